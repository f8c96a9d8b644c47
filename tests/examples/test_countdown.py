"""examples/envs/countdown.py: equations judged by hand, hostile ones, and problems that all have a solution."""

import itertools
import time
from fractions import Fraction

import pytest

from config import ConfigError
from envs import Turn
from examples.envs import countdown

ROW = ([3, 5, 6, 6], "24")


def grade(reply, row=ROW, finish_reason="stop", **options):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    turn = Turn(messages, row[1], finish_reason, fields={"nums": row[0]})
    (result,) = countdown.Countdown(**options).step([turn])
    return result


@pytest.mark.parametrize(
    ("equation", "outcome"),
    [
        ("6 * (3 + 6 - 5)", "ok"),
        ("(3 + 6\n- 5) \u00d7 6 = 25", "ok"),  # what it claims to be is not read
        ("6 / (6 / (5 + 3 + 0 * 6))", "wrong"),  # 8
        ("3 + 5 + 6 + 6", "wrong"),  # 20
        ("5 * 6 - 6", "wrong"),  # 24, without the 3
        ("(5 + 3) * 6 / 6 * 3", "wrong"),  # 24, but 3 twice
        ("6 * (3 + 6 - 5) * 1", "wrong"),  # 24, with a number that is not there
        ("24", "wrong"),
        ("3 / (5 - 5)", "parse_fail"),
        ("3 ** 5", "parse_fail"),
        ("95**36**83", "parse_fail"),
        ("6 // 5", "parse_fail"),
        ("24.0", "parse_fail"),
        ("0x18", "parse_fail"),
        ("6 6", "parse_fail"),
        ("", "parse_fail"),
        ("__import__('os').getpid()", "parse_fail"),
        ("٣ + 5", "parse_fail"),
        ("9" * 5000, "parse_fail"),
        ("3 +" + " " * 300 + "5", "parse_fail"),  # longer than any equation
        ("9" * 99 + "*" + "9" * 100, "wrong"),
        ("(" * 99 + "3" + ")" * 99, "wrong"),
        ("-" * 199 + "3", "wrong"),
    ],
)
def test_equations(equation, outcome):
    start = time.process_time()
    result = grade(f"<answer>3 + 5</answer> no: <answer>{equation}</answer>")  # the last one counts
    assert time.process_time() - start < 0.5
    assert result.outcome == outcome
    assert result.reward == sum(result.rewards.values()) == {"ok": 1.0, "wrong": 0.1, "parse_fail": 0.0}[outcome]


def test_values_are_exact_fractions():
    assert countdown.evaluate("(1 - 9 / 10) * 3 - 3 / 10")[0] == 0 != (1 - 9 / 10) * 3 - 3 / 10
    assert countdown.evaluate("(3 + 5) / 6") == (Fraction(4, 3), [3, 5, 6])


@pytest.mark.parametrize(
    ("reply", "finish_reason", "options", "expected"),
    [
        ("<answer>5 * 6 - 6</answer>", "stop", {"use_all": False}, (1.0, "ok")),
        ("<answer>(5 * 6 - 6) * 3 / 3</answer>", "stop", {"use_all": False}, (0.1, "wrong")),  # 3 twice
        ("<answer>6 * (3 + 6 - 5)</answer>", "length", {}, (0.0, "parse_fail")),
        ("<answer>6 * (3 + 6 - 5)", "stop", {}, (0.0, "parse_fail")),
        ("6 * (3 + 6 - 5)", "stop", {}, (0.0, "parse_fail")),
        ("<answer>5 * 6</answer>", "stop", {"format_reward": 0.25}, (0.25, "wrong")),
        ("<answer>" * 20_000, "stop", {}, (0.0, "parse_fail")),
    ],
)
def test_replies(reply, finish_reason, options, expected):
    result = grade(reply, finish_reason=finish_reason, **options)
    assert (result.reward, result.outcome) == expected


@pytest.mark.parametrize(("nums", "target"), [(None, "24"), ([], "24"), ([3.5], "24"), ([True], "1"), ([3], "x")])
def test_rows_that_are_no_problem_are_named(nums, target):
    with pytest.raises(ConfigError, match=r"rows.jsonl:7: (nums|target)"):
        countdown.Countdown().check_answers([("rows.jsonl:7", target, {"nums": nums})])


def reachable(values):
    """All values of + - * / over all of `values`, by trying every pair first."""
    if len(values) == 1:
        return set(values)
    found = set()
    for i, j in itertools.permutations(range(len(values)), 2):
        rest = [v for k, v in enumerate(values) if k not in (i, j)]
        a, b = values[i], values[j]
        for value in [a + b, a - b, a * b, *([a / b] if b else [])]:
            found |= reachable([value, *rest])
    return found


def test_every_problem_made_has_a_solution():
    rows = countdown.make_problems(24, seed=3, num_numbers=(2, 3, 4))
    assert rows == countdown.make_problems(24, seed=3, num_numbers=(2, 3, 4))
    assert {len(row["nums"]) for row in rows} == {2, 3, 4} and len({str(row) for row in rows}) == 24
    for row in rows:
        assert row["target"] in reachable([Fraction(n) for n in row["nums"]]), row
        assert str(row["nums"]) in row["problem"] and f"equals {row['target']}." in row["problem"]
    countdown.Countdown().check_answers([("here", str(row["target"]), row) for row in rows])
