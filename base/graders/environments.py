"""env_name of a dataset -> its environment: `make_environment`, and the environments that need graders or a pool.

Workers import neither this file nor envs.py.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, SupportsFloat

from base.graders.reward_function import RewardFunction
from base.system.imports import call, import_attribute
from config import CodeEnvConfig, ConfigError, EnvConfig, MathEnvConfig, shortened
from envs import OUTCOMES, Environment, Exact, MathMultiReward, RewardModelEnv, StepResult, Turn
from judges import code, math, sandbox
from judges.codec import Json
from judges.pool import Graded, GraderPool, WorkerError

TEST_FIELDS = ("test", "tests", "entry_point", "prompt")  # that a row may have for `code`


class PoolConfig(Protocol):
    """A section of `env` that has workers."""

    num_workers: int
    deadline_s: float
    memory_mib: int | None


def pool_of(
    target: str, cfg: PoolConfig, num_ranks: int, *, first: Json = None, python: str = "", pass_env: Sequence[str] = ()
) -> GraderPool:
    """A pool with this rank's share of the workers of a section of `env`. ConfigError if no worker can start."""
    try:
        return GraderPool(
            target,
            num_workers=max(1, cfg.num_workers // num_ranks),
            deadline_s=cfg.deadline_s,
            memory_mib=cfg.memory_mib,
            first=first,
            python=python,
            pass_env=pass_env,
        )
    except WorkerError as error:
        raise ConfigError(str(error)) from error


class PoolEnvironment(Environment):
    """A base for environments that grade in worker processes, by `pool`: each turn alone, as soon as it is there."""

    def job(self, turn: Turn) -> Json:
        """What a worker gets for the turn, as JSON; None if it needs no worker."""
        raise NotImplementedError

    def result(self, turn: Turn, graded: Graded | None) -> StepResult:
        """The result of the turn, by what the worker said; None if job() was None."""
        raise NotImplementedError

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        jobs = [self.job(turn) for turn in turns]
        graded = iter(())
        if self.pool is not None:
            graded = iter(self.pool.grade([job for job in jobs if job is not None]))
        results = []
        for turn, job in zip(turns, jobs, strict=True):
            if job is None:
                results.append(self.result(turn, None))
            else:
                results.append(self.result(turn, next(graded)))
        return results


class Math(PoolEnvironment):
    """Reward 1 for the right final answer, else 0. Rules: judges/math.py."""

    def __init__(self, cfg: MathEnvConfig, num_ranks: int):
        self.strict = cfg.math_verify_impl == "dapo_math_verify"
        self.self_tests = math.STRICT_SELF_TESTS if self.strict else math.SELF_TESTS
        self.pool = pool_of(".math:grade", cfg, num_ranks, first=math.FIRST_JOB)

    def job(self, turn: Turn) -> dict:
        return {"reply": turn.whole_reply, "answer": turn.answer, "strict": self.strict}

    def result(self, turn: Turn, graded: Graded) -> StepResult:
        if graded.outcome != "ok":  # the grader failed, or overran its deadline
            return StepResult(0.0, "error")
        outcome = graded.value["outcome"]
        return StepResult(float(outcome == "ok"), outcome, extracted=graded.value["extracted"])

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, _ in answers:
            if not 0 < len(math.gold_answer(answer)) <= math.MAX_ANSWER_CHARS:
                raise ConfigError(f"{where}: answer {answer[:80]!r} is not a final answer, which env_name 'math' needs")


class Code(PoolEnvironment):
    """Reward 1 for code that passes all tests of its problem, else 0. Forms of tests: judges/code.py, read_tests.

    Raises ConfigError if this machine cannot isolate a program as env.code.isolation demands.
    """

    self_tests = code.SELF_TESTS

    def __init__(self, cfg: CodeEnvConfig, num_ranks: int):
        self.limits = {"seconds": cfg.deadline_s, "memory_mib": cfg.memory_mib, "isolation": cfg.isolation}
        try:
            sandbox.run("", "", sandbox.Limits(**self.limits))
        except sandbox.Unavailable as error:
            problem = f"this machine cannot run programs this way ({error})"
            fix = "allow user namespaces and seccomp"
            if cfg.isolation == "required":
                fix += ", or set env.code.isolation=none (see docs/tasks.md)"
            raise ConfigError(f"env.code.isolation={cfg.isolation}: {problem}: {fix}") from error
        # sandbox.py holds the limits; these are for a grader that hangs
        wider = replace(cfg, deadline_s=cfg.deadline_s + 20, memory_mib=cfg.memory_mib + 1024)
        self.pool = pool_of(".code:grade", wider, num_ranks)

    def job(self, turn: Turn) -> dict:
        fields = {name: turn.fields.get(name) for name in TEST_FIELDS}
        return {**self.limits, "reply": turn.whole_reply, "answer": turn.answer, "fields": fields}

    def result(self, turn: Turn, graded: Graded) -> StepResult:
        # `timeout` is the program's; a judge that overran its own deadline has no verdict.
        if graded.outcome != "ok":
            return StepResult(0.0, "error")
        return StepResult(float(graded.value == "ok"), graded.value)

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, fields in answers:
            try:
                code.read_tests(answer, fields)
            except ValueError as error:
                raise ConfigError(f"{where}: {error} (env_name 'code')") from error


def make_environment(name: str, cfg: EnvConfig, num_ranks: int = 1) -> Environment:
    """`env_name` of a dataset -> its environment, which has passed its self-tests. `num_ranks` share the machine.

    "module:name" is a user's class, made with the keyword arguments in env.custom[name], or a reward function. Starts
    processes, so call it before the engine starts. Raises ConfigError.
    """
    make: dict[str, Callable[[], Environment]] = {
        "exact": Exact,
        "math": lambda: Math(cfg.math, num_ranks),
        "math_multi_reward": MathMultiReward,
        "code": lambda: Code(cfg.code, num_ranks),
        "reward_model": RewardModelEnv,
    }
    if ":" in name:
        environment = _custom(name, import_attribute(name, "env_name"), cfg.custom.get(name, {}))
    elif name in make:
        environment = make[name]()
    else:
        known = ", ".join(make)
        raise ConfigError(f"env_name '{name}' is unknown; known: {known}, agents, module:Class, module:function")
    call(f"env_name '{name}', in its self_tests,", _self_test, name, environment)
    return environment


def read_results(name: str, results: object, turns: Sequence[Turn]) -> list[StepResult]:
    """The results that an environment gave for the turns, with floats. A reward that is not finite counts as outcome
    `error` with reward 0. ConfigError names the environment and what has another form than envs.py says."""
    gave = f"env_name '{name}': step() returned"
    if not isinstance(results, Iterable):
        raise ConfigError(f"{gave} {shortened(results)} results for {len(turns)} turns")
    results = list(results)
    if len(results) != len(turns):
        raise ConfigError(f"{gave} {len(results)} results for {len(turns)} turns")
    return [_read(gave, result) for result in results]


def _read(gave: str, result: StepResult) -> StepResult:
    if not isinstance(result, StepResult):
        raise ConfigError(f"{gave} {shortened(result)}, expected a StepResult")
    parts = result.rewards
    if not _is_number(result.reward):
        raise _wrong(gave, "reward", result.reward, "a number")
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise _wrong(gave, "rewards", parts, "a dict of numbers")
    if result.outcome not in OUTCOMES:
        raise _wrong(gave, "outcome", result.outcome, f"one of {', '.join(OUTCOMES)}")
    if not _is_number(result.done):
        raise _wrong(gave, "done", result.done, "True or False")
    if not result.done and not _are_messages(result.observation):
        raise _wrong(gave, "observation", result.observation, "messages {role, content} with text in both")
    if all(abs(value) <= sys.float_info.max for value in (result.reward, *parts.values())):
        return replace(result, reward=float(result.reward), rewards={name: float(parts[name]) for name in parts})
    return replace(result, reward=0.0, rewards=dict.fromkeys(parts, 0.0), outcome="error", done=True)


def _wrong(gave: str, field: str, value: object, form: str) -> ConfigError:
    return ConfigError(f"{gave} {field}={shortened(value)}, expected {form}")


def _is_number(value: object) -> bool:
    return isinstance(value, SupportsFloat) and not getattr(value, "shape", ())


def _are_messages(values: object) -> bool:
    return isinstance(values, list | tuple) and all(map(_is_message, values))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _self_test(name: str, environment: Environment) -> None:
    for reply, answer, expected, *row in getattr(environment, "self_tests", ()):
        fields = {}
        if row:
            (fields,) = row
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": reply}]
        turn = Turn(chat, answer, "stop", fields=fields)
        (result,) = read_results(name, environment.step([turn]), [turn])
        if result.outcome != expected:  # a run would learn from noise
            environment.close()
            outcomes = f"must get '{expected}', but gets '{result.outcome}'"
            raise ConfigError(f"env_name '{name}' is broken: reply {reply!r} with answer {answer!r} {outcomes}")


def _custom(name: str, attribute: Callable, kwargs: Mapping[str, Json]) -> Environment:
    if not isinstance(attribute, type):
        if kwargs:
            raise ConfigError(f"env_name '{name}' is a function and takes no env.custom arguments: make it a class")
        return call(f"env_name '{name}'", RewardFunction, attribute, name)
    environment = call(f"env.custom['{name}']: its class", attribute, **kwargs)
    for method in ("step", "check_answers", "close"):
        if not callable(getattr(environment, method, None)):
            raise ConfigError(f"env_name '{name}': no method {method}(); derive the class from envs.Environment")
    return environment
