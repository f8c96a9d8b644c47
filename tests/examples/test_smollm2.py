"""examples/smollm2: its problems are right and apart, its recipe loads, its picture shows what metrics.jsonl says."""

import re
from decimal import Decimal

import pytest
from small_run import ROOT

from config import DatasetConfig
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


@pytest.mark.parametrize("theme", plot.THEMES)
def test_committed_pictures_are_drawn_from_the_committed_metrics(theme):
    """What README shows is this run."""
    folder = ROOT / "examples" / "smollm2"
    drawn = plot.draw(folder / "metrics.jsonl", plot.THEMES[theme])
    committed = (folder / f"curve_{theme}.svg").read_text(encoding="utf-8")
    assert committed == drawn, "run `python examples/smollm2/plot.py`"
