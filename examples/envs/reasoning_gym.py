"""reasoning-gym (Stojanovski et al. 2025): generators of problems, each with its verifier, as rows and as environment.

    .venv/bin/pip install reasoning-gym      # 19 packages; none of the lock's changes
    dataset_name: examples.envs.reasoning_gym:rows
    subset: "chain_sum(max_terms=3) + leg_counting(size=500, seed=7)"    # generators and their arguments
    env_name: examples.envs.reasoning_gym:ReasoningGym

The answer is the text of the reply's last <answer>, or the whole reply. The reward is the verifier's score, 0 to 1.
"""

import ast
from functools import cache

from base.graders.pool import PoolEnvironment
from config import ConfigError
from envs import StepResult
from judges.pool import GraderPool


def rows(cfg):
    problems = {}  # without repetition
    for node in (node for node in ast.walk(ast.parse(cfg.subset or "")) if isinstance(node, ast.Call)):
        arguments = {"size": 1000, "seed": 42}
        for keyword in node.keywords:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        for entry in create_dataset(node.func.id, str(arguments)):
            row = {"problem": entry["question"], "answer": str(entry["answer"])}
            problems[entry["question"]] = row | {"task": node.func.id, "entry": entry}
    return list(problems.values())


@cache
def create_dataset(task, arguments="{}"):
    import reasoning_gym  # here, because it takes seconds: in the processes that need it

    return reasoning_gym.create_dataset(task, **ast.literal_eval(arguments))


def score(job):
    task, reply, entry = job
    try:
        return float(create_dataset(task).score_answer(reply, entry))
    except Exception:  # of the reply: check_answers has seen that the verifier scores the right answer
        return 0.0


class ReasoningGym(PoolEnvironment):
    def __init__(self, num_workers=2):
        target = "examples.envs.reasoning_gym:score"
        first = ("leg_counting", "4", {"answer": "4"})  # imports the package, for which no deadline runs
        self.pool = GraderPool(target, first=first, num_workers=num_workers, deadline_s=10.0, memory_mib=4096)

    def job(self, turn):
        reply = turn.whole_reply.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        return turn.fields["task"], reply, turn.fields["entry"]

    def result(self, turn, graded):
        return StepResult(graded.value or 0.0, {1: "ok", None: "error"}.get(graded.value, "wrong"))

    def check_answers(self, answers):
        for task, (answer, row) in {row["task"]: (answer, row) for _, answer, row in answers}.items():
            right, wrong = self.pool.grade([(task, reply, row["entry"]) for reply in (answer, "?")])
            for graded in (right, wrong):
                if graded.outcome != "ok":
                    raise ConfigError(f"{task}: the verifier gives no score: {graded.message}")
            if right.value != 1 or wrong.value == 1:
                scores = f"its own answer scores {right.value}, nonsense scores {wrong.value}"
                raise ConfigError(f"{task} cannot be learned: {scores}")
