"""AutoGen: a team of two; the first has a tool, and its reflection on the result asks without it."""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABILITIES = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


async def solve(base_url, messages):
    about = {**ABILITIES, "family": "unknown"}
    model = OpenAIChatCompletionClient(model="policy", base_url=base_url, api_key="none", model_info=about)
    adder = AssistantAgent("adder", model, tools=[f], reflect_on_tool_use=True, system_message="Add.")
    critic = AssistantAgent("critic", model, system_message="Judge the sum.")
    team = RoundRobinGroupChat([adder, critic], termination_condition=MaxMessageTermination(5))
    result = await team.run(task=messages[-1]["content"])
    return 0.5 + len(str(result.messages[-1].content)) % 2
