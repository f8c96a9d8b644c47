"""smolagents: both of its agents with a tool. They write their own history anew."""

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def f(q: int) -> str:
    """Looks q up.

    Args:
        q: what to look up
    """
    return f"{q} is {q % 7} modulo 7"


def solve(base_url, messages, seed):
    model = OpenAIModel("gpt-4o", api_base=base_url, api_key="none")
    agent = (ToolCallingAgent, CodeAgent)[seed % 2](tools=[f], model=model, max_steps=3, verbosity_level=0)
    return len(str(agent.run(messages[-1]["content"]))) % 2
