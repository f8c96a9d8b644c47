"""Tools in the model's replies, over several turns: a calculator, and Python in a sandbox.

A reply that ends in <calc>17 * 23 / 4</calc> or <python>print(2 ** 10)</python> is a call: what it gives comes back as
a chat message, and the model goes on. A reply without one is the answer, graded by the environment `exact`: a number,
or text that ends in #### and a number. In the config: env_name: examples.envs.tools:Tools, and
grpo.max_rollout_turns: one more than the calls it may take. Tokens of results carry no loss (rollout.py).
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import envs
from base.graders.pool import PoolEnvironment
from config import ConfigError
from envs import StepResult, Turn
from judges import sandbox
from judges.pool import Graded, GraderPool

CALL = re.compile(r"<(calc|python)>((?:(?!<\1>).)*)</\1>\s*\Z", re.DOTALL)
MAX_RESULT_CHARS = 1000
MAX_FORMULA_CHARS = 200
MAX_BITS = 4096  # of a numerator or denominator, on the way too: 95**36**83 is refused before it is begun
OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Tools(PoolEnvironment):
    """Reward of the answer: 1 or 0. tools: those that may be called. python_timeout_s, python_memory_mib: of a program,
    of which num_workers run at once. isolation: as env.code.isolation. role: of the messages that bring results; "tool"
    where the chat template knows it."""

    self_tests = (("#### 391", "391", "ok"), ("It is 17 * 23", "391", "parse_fail"))

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("calc",),
        python_timeout_s: float = 5.0,
        python_memory_mib: int = 256,
        isolation: str = "required",
        num_workers: int = 8,
        role: str = "user",
    ):
        unknown = sorted({*tools} - {"calc", "python"})
        if unknown:
            raise ConfigError(f"tools: '{unknown[0]}' is unknown; known: calc, python")
        self.tools, self.role, self.exact = tools, role, envs.Exact()
        self.limits = {"seconds": python_timeout_s, "memory_mib": python_memory_mib, "isolation": isolation}
        if "python" in tools:
            seconds, target = python_timeout_s + 5, "examples.envs.tools:run_python"
            self.pool = GraderPool(target, num_workers=num_workers, deadline_s=seconds, memory_mib=1024)
            (graded,) = self.pool.grade([{"code": "print(6 * 7)"} | self.limits])
            if printed(graded) != "42":
                raise ConfigError(f"tools: the python tool does not work here: {printed(graded)}")

    def job(self, turn: Turn) -> dict | None:
        call = CALL.search(turn.whole_reply)
        runs = call and call[1] == "python" and self.pool
        return {"code": call[2]} | self.limits if runs else None

    def result(self, turn: Turn, graded: Graded | None) -> StepResult:
        call = CALL.search(turn.whole_reply)
        if call is None:
            return self.exact.grade(turn)
        if call[1] not in self.tools:
            result = f"error: there is no tool {call[1]}"
        else:
            result = printed(graded) if graded else calculate(call[2])
        message = {"role": self.role, "content": f"<result>{result[:MAX_RESULT_CHARS]}</result>"}
        return StepResult(0.0, "parse_fail", done=False, observation=(message,))

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        self.exact.check_answers(answers)


def printed(graded: Graded) -> str:
    """What a program printed, or "error: ..."."""
    return graded.value if graded.outcome == "ok" else f"error: {graded.message or graded.outcome}"


def run_python(job: dict) -> str:
    """In a worker: what the program {code, and its limits} writes to standard output."""
    status, written = sandbox.run(job.pop("code"), "", sandbox.Limits(**job))
    problems = {
        sandbox.CRASHED: "error: the program failed",
        sandbox.TIMED_OUT: f"error: more than {job['seconds']:g} s",
    }
    return problems.get(status) or written.strip()[:MAX_RESULT_CHARS]


def calculate(text: str) -> str:
    """The value of a formula of numbers, + - * / // % ** and parentheses, worked out in fractions: a whole number as it
    is, any other to 12 digits; "error: ..." where there is none. Parsed, never run."""
    try:
        if len(text) > MAX_FORMULA_CHARS:
            raise ValueError(f"more than {MAX_FORMULA_CHARS} characters")
        value = _value(ast.parse(text.strip(), mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
    except SyntaxError:
        return "error: not a formula"
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, ArithmeticError, RecursionError, MemoryError) as error:  # the last two: parentheses
        return f"error: {error}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if type(number) is not bool:
            value = Fraction(str(number))  # 0.1 is a tenth here
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left), _value(right)
            if exponent.denominator != 1:
                raise ValueError("an exponent must be a whole number")
            if max(map(int.bit_length, base.as_integer_ratio())) * abs(exponent) > MAX_BITS and abs(base) != 1:
                raise ValueError("the number is too large")
            value = Fraction(base ** int(exponent))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = Fraction(OPERATORS[type(op)](_value(left), _value(right)))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses")
    if max(map(int.bit_length, value.as_integer_ratio())) > MAX_BITS:
        raise ValueError("the number is too large")
    return value
