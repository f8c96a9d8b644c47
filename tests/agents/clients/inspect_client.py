"""inspect-ai: a task with a tool and a scorer, evaluated for a sample."""

import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def f():
    async def execute(q: int) -> str:
        """Looks q up.

        Args:
            q: what to look up
        """
        return f"{q} is {q % 7} modulo 7"

    return execute


def solve(base_url, messages, answer):
    sample = Sample(input=messages[-1]["content"], target=answer)
    task = Task(dataset=[sample], solver=[use_tools(f()), generate()], scorer=includes(), message_limit=7)
    options = {"model_base_url": base_url, "model_args": {"api_key": "none"}, "display": "none"}
    with tempfile.TemporaryDirectory() as folder:
        [log] = eval(task, model="openai-api/grpo/policy", log_dir=folder, **options)
    assert log.status == "success", log.error
    return log.results.scores[0].metrics["accuracy"].value
