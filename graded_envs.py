"""Environments whose graders run in processes of their own: `math` and `code`.

Owns what a graded job means for a reply: its reward, outcome and extracted answer. The processes and deadlines are
grader.py's, the grading math_grader.py's and code_grader.py's. Imported by envs.make_environment only when asked for.
"""

import json
from collections.abc import Iterable, Sequence

import code_grader
import sandbox
from config import CodeEnvConfig, ConfigError, MathEnvConfig
from envs import Environment, Turn, Verdict
from grader import Graded, GraderPool
from math_grader import MAX_ANSWER_CHARS, gold_answer


def _outcome(graded: Graded) -> str:
    return graded.value["outcome"] if graded.outcome == "ok" else graded.outcome


class Math(Environment):
    """Reward 1 for the right final answer, else 0; format_reward for a wrong one that was given in a box.

    Where answers are looked for and what equals what: math_grader.py. A reply cut off by the length limit never scores.
    """

    canaries = (
        (r"so \boxed{\frac{1}{2}}", "0.5", "ok"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", "ok"),
        (r"\boxed{2}", "0.5", "wrong"),
        ("half", "0.5", "parse_fail"),
    )
    strict_canaries = (("Answer: 5", "5", "ok"), ("Answer: 4", "5", "wrong"), (r"\boxed{5}", "5", "parse_fail"))

    def __init__(self, cfg: MathEnvConfig, num_ranks: int):
        self.strict, self.format_reward = cfg.math_verify_impl == "dapo_math_verify", cfg.format_reward
        if self.strict:
            self.canaries = self.strict_canaries
        workers = max(1, cfg.num_workers // num_ranks)
        self.pool = GraderPool(
            "math_grader:grade",
            num_workers=workers,
            deadline_s=cfg.deadline_s,
            memory_mib=cfg.memory_mib,
            first={"reply": r"\boxed{x+y}", "answer": "y+x", "strict": False},  # imports sympy
        )

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        replies = [turn.messages[-1]["content"] if turn.finish_reason == "stop" else "" for turn in turns]
        jobs = [
            {"reply": reply, "answer": turn.answer, "strict": self.strict}
            for reply, turn in zip(replies, turns, strict=True)
        ]
        return [self._verdict(graded) for graded in self.pool.grade(jobs)]

    def _verdict(self, graded: Graded) -> Verdict:
        outcome, found = _outcome(graded), graded.value or {}
        boxed = outcome == "wrong" and found["boxed"]
        reward = 1.0 if outcome == "ok" else self.format_reward if boxed else 0.0
        return Verdict(reward, outcome, extracted=found.get("extracted"))

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, _ in answers:
            if not 0 < len(gold_answer(answer)) <= MAX_ANSWER_CHARS:
                raise ConfigError(f"{where}: answer {answer[:80]!r} is no final answer, which env_name 'math' needs")

    def close(self) -> None:
        self.pool.close()


class Code(Environment):
    """Reward 1 for code that passes all of its row's tests, else 0. What rows hold: code_grader.read_tests.

    A reply cut off by the length limit never scores. ConfigError where the machine cannot keep code apart as
    env.code.isolation asks.
    """

    ADD = json.dumps({"entry_point": "add", "test": "def check(f):\n    assert f(2, 3) == 5"})
    PRINT = json.dumps({"tests": [{"input": "2 3", "output": "5"}]})
    EQUAL = "class Equal:\n    __eq__ = lambda *_: True\ndef add(a, b): return Equal()"
    canaries = (
        ("```python\ndef add(a, b):\n    return a + b\n```", ADD, "ok"),
        ("def add(a, b): return a * b", ADD, "wrong"),
        (EQUAL, ADD, "wrong"),
        ("print(sum(map(int, input().split())))", PRINT, "ok"),
        ("exit(0)", PRINT, "wrong"),
    )

    def __init__(self, cfg: CodeEnvConfig, num_ranks: int):
        self.limits = {"seconds": cfg.deadline_s, "memory_mib": cfg.memory_mib, "isolation": cfg.isolation}
        try:
            sandbox.run("", "", sandbox.Limits(**self.limits))
        except sandbox.Unavailable as error:
            other = ", or set env.code.isolation=none (see README.md)" if cfg.isolation == "required" else ""
            raise ConfigError(
                f"env.code.isolation={cfg.isolation}: this machine does not let a program be kept apart ({error}): "
                f"allow user namespaces and seccomp{other}"
            ) from error
        self.pool = GraderPool(
            "code_grader:grade",
            num_workers=max(1, cfg.num_workers // num_ranks),
            deadline_s=cfg.deadline_s + 20,  # the second line: deadlines of code are sandbox.py's
            memory_mib=cfg.memory_mib + 1024,
        )

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        replies = [turn.messages[-1]["content"] if turn.finish_reason == "stop" else "" for turn in turns]
        jobs = [
            {"reply": reply, "tests": code_grader.read_tests(turn.answer, turn.columns), **self.limits}
            for reply, turn in zip(replies, turns, strict=True)
        ]
        outcomes = map(_outcome, self.pool.grade(jobs))
        return [Verdict(float(outcome == "ok"), outcome) for outcome in outcomes]

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, columns in answers:
            try:
                code_grader.read_tests(answer, columns)
            except ValueError as error:
                raise ConfigError(f"{where}: {error} (env_name 'code')") from error

    def close(self) -> None:
        self.pool.close()
