"""ag2: an agent with a tool over chat completions, streamed, and over responses."""

from ag2 import Agent, tool
from ag2.config import OpenAIConfig, OpenAIResponsesConfig


@tool
def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


async def solve(base_url, messages):
    length = 0
    for kind in (OpenAIConfig, OpenAIResponsesConfig):
        policy = kind(model="policy", base_url=base_url, api_key="none", streaming=True)
        reply = await Agent("adder", "Add.", config=policy, tools=[f]).ask(messages[-1]["content"])
        length += len(str(await reply.content()))
    return 0.5 + length % 2
