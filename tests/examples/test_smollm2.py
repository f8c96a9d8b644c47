"""examples/smollm2: its problems are right and apart, its recipe loads, its picture shows what metrics.jsonl says."""

import re
from decimal import Decimal

import pytest
from small_run import ROOT

from check import reader
from config import DatasetConfig
from envs import Exact, Turn
from examples.smollm2 import conversions, plot

SETS = ("train", "held_out", "one_or_two", "larger", "other_units", "other_factor")
IN_SMALL_UNITS = {  # by the units' names, as a schoolbook has them
    ("meters", "centimeters"): Decimal("100"),
    ("dollars", "cents"): Decimal("100"),
    ("euros", "cents"): Decimal("100"),
    ("pounds", "pence"): Decimal("100"),
    ("francs", "centimes"): Decimal("100"),
    ("centuries", "years"): Decimal("100"),
    ("rupees", "paise"): Decimal("100"),
    ("kilograms", "grams"): Decimal("1e3"),
    ("kilometers", "meters"): Decimal("1e3"),
}
QUESTION = re.compile(r"How many (\w+) are (\d+) (\w+) and (\d+) (\w+)\?")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {name: getattr(conversions, name)(DatasetConfig()) for name in SETS}


def by_hand(question: str) -> str:
    """The answer, from the text alone."""
    asked, large, large_unit, small, small_unit = QUESTION.fullmatch(question).groups()
    assert asked == small_unit
    return str(int(Decimal(large) * IN_SMALL_UNITS[large_unit, small_unit] + Decimal(small)))


def questions(rows: list[dict]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


@pytest.mark.parametrize("name", SETS)
def test_every_answer_and_every_example_is_right(rows, name):
    for row in rows[name]:
        *examples, question = row["messages"]
        assert by_hand(question["content"]) == row["answer"]
        assert [message["role"] for message in examples] == ["user", "assistant"] * 4
        for asked, answered in zip(examples[::2], examples[1::2], strict=True):
            assert by_hand(asked["content"]) == answered["content"]
            assert asked["content"] != question["content"], "the answer stands in the prompt"


def test_sets_have_no_problem_in_common(rows):
    contents = {name: set(questions(rows[name])) for name in SETS}
    assert [len(contents[name]) for name in SETS] == [20_000, 300, 300, 300, 300, 300]
    assert sum(map(len, contents.values())) == len(set.union(*contents.values()))


def test_neither_constant_nor_copied_replies_score(rows):
    """What can be said without the task: the digits of both amounts, a number of the prompt, every number there is."""

    def accuracy(reply) -> float:
        turns = [
            Turn([{"role": "assistant", "content": reply(row)}], answer=row["answer"], finish_reason="stop")
            for row in rows["held_out"]
        ]
        return sum(result.reward for result in Exact().step(turns)) / len(turns)

    def amounts(row: dict) -> list[str]:
        return re.findall(r"\d+", row["messages"][-1]["content"])

    assert accuracy(lambda row: row["answer"]) == 1
    assert 0.6 < accuracy(lambda row: "".join(amounts(row))) < 0.7, "digits in a row: right where no zero is wanted"
    assert accuracy(lambda row: amounts(row)[0]) == accuracy(lambda row: amounts(row)[1]) == 0
    assert accuracy(lambda row: row["messages"][2]["content"]) == 0
    assert accuracy(lambda row: " ".join(str(number) for number in range(100, 2_000))) == 0


def test_recipe_loads():
    cfg = reader.load(ROOT / "configs/smollm2.yaml", [])
    assert cfg.grpo.max_val_samples == 300 and cfg.policy.scheduler.warmup_steps * 3 < cfg.grpo.max_num_steps


@pytest.mark.parametrize("theme", plot.THEMES)
def test_committed_pictures_are_drawn_from_the_committed_metrics(theme):
    """What README shows is this run."""
    folder = ROOT / "examples" / "smollm2"
    drawn = plot.draw(folder / "metrics.jsonl", plot.THEMES[theme])
    committed = (folder / f"curve_{theme}.svg").read_text(encoding="utf-8")
    assert committed == drawn, "run `python examples/smollm2/plot.py`"
