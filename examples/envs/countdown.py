"""Countdown: reach a target number from given numbers with + - * / and parentheses; the game of TinyZero (2025).

    .venv/bin/python -m examples.envs.countdown NUM_PROBLEMS OUT.jsonl [SEED]    problems that have a solution

In the config: env_name: examples.envs.countdown:Countdown, input_key: problem, output_key: target; a row also has
`nums`. Rows {nums, target}, as in the hub's Countdown-Tasks-3to4, get their problem by
processor: examples.envs.countdown:with_problem. The equation is what stands in the last <answer>...</answer> of the
reply. It is parsed, never run, and worked out in fractions: a power is no operator, and division has no rounding.
"""

import ast
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from config import ConfigError
from envs import Environment, StepResult, Turn

PROBLEM = (
    "Using the numbers {nums}, make an equation that equals {target}. You may use + - * / and parentheses, and each "
    "number exactly once. Show your work, then write the equation between <answer> and </answer>, as in "
    "<answer>(1 + 2) / 3</answer>."
)
PLAIN = re.compile(r"[0-9+\-*/() ]+")
MAX_CHARS = 200  # of an equation: bounds the parser's depth and the size of every number on the way
OPERATORS = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
}


class Countdown(Environment):
    """Reward 1 for an equation that is right; `format_reward` for one that parses and is not; 0 without one.

    Right: its value is the target, and it uses the row's numbers, each exactly once, or with use_all=false at most
    once. `rewards` has both parts, whose sum it is. A reply cut off by the length limit has no answer.
    """

    self_tests = (("24", "24", "parse_fail"),)  # other replies need the numbers of a problem: see test_countdown.py
    reward_names = ("answer", "format")

    def __init__(self, *, format_reward: float = 0.1, use_all: bool = True):
        if not 0 <= format_reward < 1:
            raise ConfigError(f"countdown: format_reward={format_reward}: must be at least 0 and below 1")
        self.format_reward, self.use_all = format_reward, use_all

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [self.grade(turn) for turn in turns]

    def grade(self, turn: Turn) -> StepResult:
        _, _, rest = turn.whole_reply.rpartition("<answer>")
        equation, closed, _ = rest.partition("</answer>")
        equation, _, _ = equation.partition("=")  # "... = 24" claims a value: that is not read
        result = evaluate(equation) if closed else None
        if result is None:
            return StepResult(0.0, "parse_fail", rewards={"answer": 0.0, "format": 0.0})
        value, used = result
        allowed, used = Counter(turn.fields["nums"]), Counter(used)
        right = value == int(turn.answer) and (used == allowed if self.use_all else used <= allowed)
        rewards = {"answer": (1 - self.format_reward) * right, "format": self.format_reward}
        return StepResult(
            sum(rewards.values()), "ok" if right else "wrong", rewards=rewards, extracted=equation.strip()
        )

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        """ConfigError for a row without a whole target or a list `nums` of whole numbers."""
        for where, target, fields in answers:
            nums = fields.get("nums")
            if not isinstance(nums, list) or not nums or any(type(n) is not int or n < 0 for n in nums):
                raise ConfigError(f"{where}: nums={nums!r} is not a list of whole numbers, which countdown needs")
            if not re.fullmatch(r"-?\d{1,100}", target):
                raise ConfigError(f"{where}: target {target!r} is not a whole number, which countdown needs")


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """(exact value, the numbers it uses) of an equation of whole numbers; None where it is none or divides by 0.

    Example: "(3 + 5) / 6" -> (4/3, [3, 5, 6]).
    """
    text = (
        " ".join(text.translate(str.maketrans("\u00d7\u00f7\u2212", "*/-")).split()) if len(text) <= MAX_CHARS else ""
    )
    if not PLAIN.fullmatch(text):
        return None
    used: list[int] = []

    def value_of(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=number) if type(number) is int:
                used.append(number)
                return Fraction(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value_of(left), value_of(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value_of(operand)
        raise ValueError(ast.dump(node))

    try:
        return value_of(ast.parse(text, mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last: too many parentheses
        return None


def with_problem(row: dict) -> dict:
    """A row {nums, target} and its problem: each number is to be used exactly once, as Countdown has it by default."""
    return row | {"problem": PROBLEM.format(nums=row["nums"], target=row["target"])}


def make_problems(count: int, *, seed: int = 0, num_numbers: tuple[int, ...] = (3, 4), largest: int = 99) -> list[dict]:
    """Rows {problem, nums, target}, all different: numbers up to `largest`, a whole target from 10 to 100 that some
    order of them reaches, so that every problem can be solved."""
    rng, rows, seen = random.Random(seed), [], set()
    while len(rows) < count:
        nums = [rng.randint(1, largest) for _ in range(rng.choice(num_numbers))]
        parts = [Fraction(n) for n in nums]
        while len(parts) > 1:  # joins two at a time, as a tree of operators does
            first, second = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            operator = rng.choice(list(OPERATORS.values()))
            parts.append(operator(first, second) if second or operator is not Fraction.__truediv__ else first + second)
        target, row_key = parts[0], (tuple(sorted(nums)), parts[0])
        if target.denominator == 1 and 10 <= target <= 100 and row_key not in seen:
            seen.add(row_key)
            rows.append(with_problem({"nums": nums, "target": int(target)}))
    return rows


if __name__ == "__main__":
    count, out, *seed = sys.argv[1:]
    problems = make_problems(int(count), seed=int(seed[0]) if seed else 0)
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in problems), encoding="utf-8")
