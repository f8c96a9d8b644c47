"""Haystack: its agent with a tool."""

from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def f(q: Annotated[int, "what to look up"]) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


def solve(base_url, messages):
    model = OpenAIChatGenerator(api_key=Secret.from_token("none"), model="policy", api_base_url=base_url)
    agent = Agent(chat_generator=model, tools=[f], max_agent_steps=3)
    result = agent.run([ChatMessage.from_user(messages[-1]["content"])])
    return 0.5 + len(str(result["messages"][-1].text)) % 2
