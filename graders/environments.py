"""env_name of a dataset -> its environment; and the two environments that grade in processes of their own.

These stand here, not in envs.py, because they need the pool and the graders, and those know the interface in envs.py.
Workers import neither this file nor envs.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from config import CodeEnvConfig, ConfigError, EnvConfig, MathEnvConfig
from envs import Environment, Exact, RewardFunction, RewardModelEnv, StepResult, Turn
from graders import code_grader, math_grader, sandbox
from graders.pool import Graded, GraderPool
from system.imports import call, import_attribute


class Math(Environment):
    """Reward 1 for the right final answer, else 0; format_reward for a wrong one in a box. Rules: math_grader.py."""

    def __init__(self, cfg: MathEnvConfig, num_ranks: int):
        self.strict = cfg.math_verify_impl == "dapo_math_verify"
        self.format_reward = cfg.format_reward
        self.self_tests = math_grader.STRICT_SELF_TESTS if self.strict else math_grader.SELF_TESTS
        self.pool = GraderPool(
            "graders.math_grader:grade",
            num_workers=max(1, cfg.num_workers // num_ranks),
            deadline_s=cfg.deadline_s,
            memory_mib=cfg.memory_mib,
            first=math_grader.FIRST_JOB,
        )

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        jobs = [{"reply": turn.whole_reply, "answer": turn.answer, "strict": self.strict} for turn in turns]
        return [self.result(graded) for graded in self.pool.grade(jobs)]

    def result(self, graded: Graded) -> StepResult:
        if graded.outcome != "ok":  # the grader itself failed, or overran its deadline
            return StepResult(0.0, graded.outcome)
        outcome = graded.value["outcome"]
        wrong_reward = self.format_reward if outcome == "wrong" and graded.value["boxed"] else 0.0
        return StepResult(1.0 if outcome == "ok" else wrong_reward, outcome, extracted=graded.value["extracted"])

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, _ in answers:
            if not 0 < len(math_grader.gold_answer(answer)) <= math_grader.MAX_ANSWER_CHARS:
                raise ConfigError(f"{where}: answer {answer[:80]!r} is no final answer, which env_name 'math' needs")


class Code(Environment):
    """Reward 1 for code that passes all tests of its problem, else 0. Forms of tests: code_grader.read_tests.

    Raises ConfigError if this machine cannot isolate a program as env.code.isolation demands.
    """

    self_tests = code_grader.SELF_TESTS

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
            deadline_s=cfg.deadline_s + 20,  # sandbox.py holds the deadline; this one is for a grader that hangs
            memory_mib=cfg.memory_mib + 1024,
        )

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        rows = {(id(turn.fields), turn.answer): turn for turn in turns}  # the samples of a prompt share their row
        tests = {row: code_grader.read_tests(turn.answer, turn.fields) for row, turn in rows.items()}
        jobs = [
            {"reply": turn.whole_reply, "tests": tests[id(turn.fields), turn.answer], **self.limits} for turn in turns
        ]
        outcomes = [graded.value if graded.outcome == "ok" else graded.outcome for graded in self.pool.grade(jobs)]
        return [StepResult(float(outcome == "ok"), outcome) for outcome in outcomes]

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, fields in answers:
            try:
                code_grader.read_tests(answer, fields)
            except ValueError as error:
                raise ConfigError(f"{where}: {error} (env_name 'code')") from error


def make_environment(name: str, cfg: EnvConfig, num_ranks: int = 1) -> Environment:
    """`env_name` of a dataset -> its environment, which has passed its self-tests. `num_ranks` share the machine.

    "module:name" is a user's class, made with the keyword arguments in env.custom[name], or a reward function. Call
    this before the engine starts, because it starts processes. Raises ConfigError.
    """
    if name == "exact":
        environment: Environment = Exact()
    elif name == "math":
        environment = Math(cfg.math, num_ranks)
    elif name == "code":
        environment = Code(cfg.code, num_ranks)
    elif name == "reward_model":
        environment = RewardModelEnv()
    elif ":" in name:
        environment = _custom(name, import_attribute(name, "env_name"), cfg.custom.get(name, {}))
    else:
        raise ConfigError(
            f"env_name '{name}' is unknown; known: exact, math, code, reward_model, and module:Class or module:function"
        )
    call(f"env_name '{name}', in its self_tests,", _self_test, name, environment)
    return environment


def _self_test(name: str, environment: Environment) -> None:
    examples = getattr(environment, "self_tests", ())
    chats = [[{"role": "user", "content": ""}, {"role": "assistant", "content": reply}] for reply, _, _ in examples]
    turns = [Turn(chat, answer, "stop") for chat, (_, answer, _) in zip(chats, examples, strict=True)]
    results = environment.step(turns) if turns else []
    for (reply, answer, expected), result in zip(examples, results, strict=True):
        if result.outcome != expected:  # a run would learn from noise
            environment.close()
            raise ConfigError(
                f"env_name '{name}' is broken: reply {reply!r} to answer {answer!r} must be '{expected}', and is "
                f"'{result.outcome}'"
            )


def _custom(name: str, attribute: Any, kwargs: Mapping[str, Any]) -> Environment:
    if not isinstance(attribute, type):
        if not callable(attribute) or kwargs:
            why = "takes no env.custom arguments" if callable(attribute) else "is neither a class nor a function"
            raise ConfigError(f"env_name '{name}' {why}")
        return call(f"env_name '{name}'", RewardFunction, attribute, name)
    environment = call(f"env.custom['{name}']: its class", attribute, **kwargs)
    missing = [m for m in ("step", "check_answers", "close") if not callable(getattr(environment, m, None))]
    if missing:
        raise ConfigError(f"env_name '{name}': no method {missing[0]}(); derive the class from envs.Environment")
    return environment
