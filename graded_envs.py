"""Environments whose graders run in processes of their own, `math` and `code`; and the one door, `env_name` to any.

Owns what a graded job means for a reply: its reward, outcome and extracted answer. The processes and deadlines are
grader.py's, the grading math_grader.py's and code_grader.py's.
The interface and the small ones are in envs.py.
"""

import inspect
import json
from collections.abc import Iterable, Sequence
from typing import Any

from config import CodeEnvConfig, ConfigError, EnvConfig, MathEnvConfig
from envs import Environment, Exact, RewardFunction, RewardModelEnv, StepResult, Turn
from graders import code_grader, sandbox
from graders.math_grader import MAX_ANSWER_CHARS, gold_answer
from graders.pool import Graded, GraderPool
from system.imports import import_attribute


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
            "graders.math_grader:grade",
            num_workers=workers,
            deadline_s=cfg.deadline_s,
            memory_mib=cfg.memory_mib,
            first={"reply": r"\boxed{x+y}", "answer": "y+x", "strict": False},  # imports sympy
        )

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        replies = [turn.messages[-1]["content"] if turn.finish_reason == "stop" else "" for turn in turns]
        jobs = [
            {"reply": reply, "answer": turn.answer, "strict": self.strict}
            for reply, turn in zip(replies, turns, strict=True)
        ]
        return [self._verdict(graded) for graded in self.pool.grade(jobs)]

    def _verdict(self, graded: Graded) -> StepResult:
        outcome, found = _outcome(graded), graded.value or {}
        boxed = outcome == "wrong" and found["boxed"]
        reward = 1.0 if outcome == "ok" else self.format_reward if boxed else 0.0
        return StepResult(reward, outcome, extracted=found.get("extracted"))

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
            "graders.code_grader:grade",
            num_workers=max(1, cfg.num_workers // num_ranks),
            deadline_s=cfg.deadline_s + 20,  # the second line: deadlines of code are sandbox.py's
            memory_mib=cfg.memory_mib + 1024,
        )

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        replies = [turn.messages[-1]["content"] if turn.finish_reason == "stop" else "" for turn in turns]
        jobs = [
            {"reply": reply, "tests": code_grader.read_tests(turn.answer, turn.fields), **self.limits}
            for reply, turn in zip(replies, turns, strict=True)
        ]
        outcomes = map(_outcome, self.pool.grade(jobs))
        return [StepResult(float(outcome == "ok"), outcome) for outcome in outcomes]

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, fields in answers:
            try:
                code_grader.read_tests(answer, fields)
            except ValueError as error:
                raise ConfigError(f"{where}: {error} (env_name 'code')") from error

    def close(self) -> None:
        self.pool.close()


def make_environment(name: str, cfg: EnvConfig, num_ranks: int = 1) -> Environment:
    """`env_name` of a dataset -> environment, after its canaries went through it. `num_ranks` share the machine.

    "module:name" is a user's class, made with the keyword arguments in env.custom[name], or reward function; both are
    imported, so this is before torch and vllm are. Raises ConfigError.
    """
    if name == "exact":
        environment: Environment = Exact()
    elif name == "reward_model":
        environment = RewardModelEnv()
    elif name in ("math", "code"):
        environment = Math(cfg.math, num_ranks) if name == "math" else Code(cfg.code, num_ranks)
    elif ":" in name:
        environment = _custom(name, import_attribute(name, "env_name"), cfg.custom.get(name, {}))
    else:
        raise ConfigError(
            f"env_name '{name}' is unknown; known: exact, math, code, reward_model, and module:Class or module:function"
        )
    try:
        check_canaries(name, environment)
    except ConfigError:
        environment.close()
        raise
    return environment


def check_canaries(name: str, environment: Environment) -> None:
    """ConfigError when an environment does not grade its own examples as it should: a run would learn from noise."""
    canaries = getattr(environment, "canaries", ())
    turns = [
        Turn([{"role": "user", "content": ""}, {"role": "assistant", "content": r}], a, "stop") for r, a, _ in canaries
    ]
    results = environment.step(turns) if turns else []
    for (reply, answer, expected), result in zip(canaries, results, strict=True):
        if result.outcome != expected:
            raise ConfigError(
                f"env_name '{name}' is broken: reply {reply!r} to answer {answer!r} must be '{expected}', and is "
                f"'{result.outcome}'"
            )


def _custom(name: str, found: Any, kwargs: dict[str, Any]) -> Environment:
    if not isinstance(found, type):
        if not callable(found) or kwargs:
            why = "takes no env.custom arguments" if callable(found) else "is neither a class nor a function"
            raise ConfigError(f"env_name '{name}' {why}")
        return RewardFunction(found, name)
    missing = [method for method in ("step", "check_answers", "close") if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"env_name '{name}': no method {missing[0]}(); derive the class from envs.Environment")
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"env.custom['{name}']: {error}") from error
    return found(**kwargs)
