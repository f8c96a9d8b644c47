"""OpenAI's Agents SDK by its default, the Responses wire: a tool, a stream, and a structured output."""

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Sum(BaseModel):
    total: int


@function_tool
def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


async def solve(base_url, messages):
    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key="none"))
    with_tool = Agent(name="adder", instructions="Add.", model="policy", tools=[f])
    typed = Agent(name="typed", instructions="Add.", model="policy", output_type=Sum)
    reward = 0.0
    for agent in (with_tool, typed):
        try:
            result = await Runner.run(agent, messages, max_turns=3)
            reward += 1 + len(str(result.final_output)) % 2
        except AgentsException:  # too many turns; a text that is no JSON
            reward -= 0.5
    streamed = Runner.run_streamed(with_tool, messages, max_turns=3)
    try:
        async for _ in streamed.stream_events():
            reward += 0.01
    except AgentsException:
        reward -= 0.5
    return reward
