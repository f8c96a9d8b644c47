"""verifiers before 0.4, whose package imports the Agents SDK: a ToolEnv with a rubric."""

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


def f(q: int) -> str:
    """Looks q up.

    Args:
        q: what to look up
    """
    return f"{q} is {q % 7} modulo 7"


def score(completion):
    return float(len(str(completion)) % 2)


async def solve(base_url, messages, answer):
    rows = Dataset.from_list([{"prompt": messages, "answer": answer, "example_id": 0, "task": "sum"}])
    env = vf.ToolEnv(dataset=rows, tools=[f], max_turns=3, rubric=vf.Rubric(funcs=[score]))
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    found = await env.generate(list(env.get_dataset()), client=client, model="policy")
    return found["outputs"][0]["reward"]
