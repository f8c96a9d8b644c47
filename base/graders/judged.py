"""The environments that ask the judges: `math` and `code`. Only a run that has one of them imports this file."""

from dataclasses import replace

from base.graders.pool import PoolEnvironment, pool_of
from config import CodeEnvConfig, ConfigError, MathEnvConfig
from envs import Answers, StepResult, Turn
from judges import code, math, sandbox
from judges.pool import Graded

TEST_FIELDS = ("test", "tests", "entry_point", "prompt")  # that a row may have for `code`


class Math(PoolEnvironment):
    """Reward 1 for the right final answer, else 0. Rules: judges/math.py."""

    def __init__(self, cfg: MathEnvConfig, num_ranks: int):
        self.strict = cfg.math_verify_impl == "dapo_math_verify"
        self.self_tests = math.STRICT_SELF_TESTS if self.strict else math.SELF_TESTS
        self.cfg = cfg
        self.num_ranks = num_ranks

    def start_workers(self) -> None:
        self.pool = pool_of(".math:grade", self.cfg, self.num_ranks, first=math.FIRST_JOB)

    def job(self, turn: Turn) -> dict:
        return {"reply": turn.whole_reply, "answer": turn.answer, "strict": self.strict}

    def result(self, turn: Turn, graded: Graded) -> StepResult:
        if graded.outcome != "ok":  # the grader failed, or overran its deadline
            return StepResult(0.0, "error")
        outcome = graded.value["outcome"]
        return StepResult(float(outcome == "ok"), outcome, extracted=graded.value["extracted"])

    def check_answers(self, answers: Answers) -> None:
        for where, answer, _ in answers:
            if not 0 < len(math.gold_answer(answer)) <= math.MAX_ANSWER_CHARS:
                raise ConfigError(f"{where}: answer {answer[:80]!r} is not a final answer, which env_name 'math' needs")


class Code(PoolEnvironment):
    """Reward 1 for code that passes all tests of its problem, else 0. Forms of tests: judges/code.py, read_tests."""

    self_tests = code.SELF_TESTS

    def __init__(self, cfg: CodeEnvConfig, num_ranks: int):
        self.limits = {"seconds": cfg.deadline_s, "memory_mib": cfg.memory_mib, "isolation": cfg.isolation}
        self.cfg = cfg
        self.num_ranks = num_ranks

    def start_workers(self) -> None:
        """Raises ConfigError if this machine cannot isolate a program as env.code.isolation demands."""
        cfg = self.cfg
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
        self.pool = pool_of(".code:grade", wider, self.num_ranks)

    def job(self, turn: Turn) -> dict:
        fields = {name: turn.fields.get(name) for name in TEST_FIELDS}
        return {**self.limits, "reply": turn.whole_reply, "answer": turn.answer, "fields": fields}

    def result(self, turn: Turn, graded: Graded) -> StepResult:
        # `timeout` is the program's; a judge that overran its own deadline has no verdict.
        if graded.outcome != "ok":
            return StepResult(0.0, "error")
        return StepResult(float(graded.value == "ok"), graded.value)

    def check_answers(self, answers: Answers) -> None:
        for where, answer, fields in answers:
            try:
                code.read_tests(answer, fields)
            except ValueError as error:
                raise ConfigError(f"{where}: {error} (env_name 'code')") from error
