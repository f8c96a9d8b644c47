"""Strands, which streams each reply: an agent with a tool."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import EventLoopException, MaxTokensReachedException


@tool
def f(q: int) -> str:
    """Looks q up.

    Args:
        q: what to look up
    """
    return f"{q} is {q % 7} modulo 7"


def solve(base_url, messages):
    model = OpenAIModel(client_args={"base_url": base_url, "api_key": "none"}, model_id="policy")
    agent = Agent(model=model, tools=[f], callback_handler=None)
    try:
        result = agent(messages[-1]["content"], limits={"turns": 3})
    except (EventLoopException, MaxTokensReachedException):  # a reply that was cut
        return 0
    return 0.5 + len(str(result)) % 2
