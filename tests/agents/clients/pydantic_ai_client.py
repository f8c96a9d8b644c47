"""pydantic-ai: a tool, and structured outputs by a tool and by response_format."""

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    total: int


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


async def solve(base_url, messages):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    reward = 0.0
    for output in (str, Sum, NativeOutput(Sum)):
        agent = Agent(model, output_type=output, tools=[f], retries=1)
        try:
            result = await agent.run(messages[-1]["content"])
            reward += 1 + len(str(result.output)) % 2
        except UnexpectedModelBehavior:  # the policy writes no such output, or calls tools for ever
            reward -= 0.5
    return reward
