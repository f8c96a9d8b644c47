"""LlamaIndex: an agent that calls a function, and one that writes what it does as text."""

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.workflow.errors import WorkflowRuntimeError
from llama_index.llms.openai_like import OpenAILike


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


async def solve(base_url, messages):
    length = 0
    for kind in (FunctionAgent, ReActAgent):
        llm = OpenAILike(
            model="policy", api_base=base_url, api_key="none", is_chat_model=True, is_function_calling_model=True
        )
        agent = kind(tools=[f], llm=llm, system_prompt="Add.", streaming=False)
        try:
            length += len(str(await agent.run(messages[-1]["content"], max_iterations=3)))
        except WorkflowRuntimeError:  # too many iterations
            length += 1
    return 0.5 + length % 2
