"""Microsoft's Agent Framework: an agent with a tool over chat completions, and over responses, its default."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


async def solve(base_url, messages):
    length = 0
    for kind in (OpenAIChatCompletionClient, OpenAIChatClient):
        client = kind(model="policy", base_url=base_url, api_key="none")
        result = await Agent(client=client, instructions="Add.", tools=[f]).run(messages[-1]["content"])
        length += len(result.text)
    return 0.5 + length % 2
