"""reasoning-gym (Stojanovski et al. 2025): generators of problems, each with its verifier, as rows and as environment.

    .venv/bin/pip install reasoning-gym      # 19 packages; none of the lock's changes
    dataset_name: examples.envs.reasoning_gym:rows
    subset: "chain_sum(max_terms=3) + leg_counting(size=500, seed=7)"    # generators and their arguments
    env_name: examples.envs.reasoning_gym:ReasoningGym

The answer is the text of the reply's last <answer>, or the whole reply. The reward is the verifier's score, 0 to 1.
"""

import ast
from functools import cache

from config import ConfigError
from envs import Environment, StepResult
from graders.pool import GraderPool


def rows(cfg):
    import reasoning_gym  # here, because it takes seconds: in the processes that need it

    problems = {}  # without repetition
    for node in (node for node in ast.walk(ast.parse(cfg.subset or "")) if isinstance(node, ast.Call)):
        arguments = {"size": 1000, "seed": 42} | {each.arg: ast.literal_eval(each.value) for each in node.keywords}
        for entry in reasoning_gym.create_dataset(node.func.id, **arguments):
            row = {"problem": entry["question"], "answer": str(entry["answer"])}
            problems[entry["question"]] = row | {"task": node.func.id, "entry": entry}
    return list(problems.values())


@cache
def verifier(task):
    import reasoning_gym

    return reasoning_gym.create_dataset(task)


def score(job):
    task, reply, entry = job or ("leg_counting", "4", {"answer": "4"})  # a worker's first job imports the package
    try:
        return float(verifier(task).score_answer(reply, entry))
    except Exception:  # of the reply: check_answers has seen that the verifier scores the right answer
        return 0.0


class ReasoningGym(Environment):
    def __init__(self, num_workers=2, deadline_s=10.0):
        limits = {"num_workers": num_workers, "deadline_s": deadline_s, "memory_mib": 4096}
        self.pool = GraderPool("examples.envs.reasoning_gym:score", **limits)

    def step(self, turns):
        replies = [turn.whole_reply.rpartition("<answer>")[2].partition("</answer>")[0].strip() for turn in turns]
        jobs = [(t.fields["task"], reply, t.fields["entry"]) for t, reply in zip(turns, replies, strict=True)]
        values = [graded.value for graded in self.pool.grade(jobs)]
        return [StepResult(value or 0.0, {1: "ok", None: "error"}.get(value, "wrong")) for value in values]

    def check_answers(self, answers):
        for task, (answer, row) in {row["task"]: (answer, row) for _, answer, row in answers}.items():
            jobs = [(task, reply, row["entry"]) for reply in (answer, "nonsense")]
            right, wrong = [graded.value for graded in self.pool.grade(jobs)]
            if right != 1 or wrong == 1:
                raise ConfigError(f"{task} cannot be learned: its own answer scores {right}, nonsense scores {wrong}")
