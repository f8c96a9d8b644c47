"""Agno: an agent with a tool."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


def solve(base_url, messages):
    model = OpenAILike(id="policy", base_url=base_url, api_key="none")
    result = Agent(model=model, tools=[f], tool_call_limit=2, telemetry=False).run(messages[-1]["content"])
    return 0.5 + len(str(result.content)) % 2
