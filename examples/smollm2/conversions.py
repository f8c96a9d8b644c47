"""Amounts in two units, to be said in the smaller one: the problems of configs/smollm2.yaml.

    How many cents are 137 dollars and 8 cents?      ->      13708

Each problem is a chat: four questions of its kind with their answers, then the question. The examples show the form of
an answer, and no word explains the rule. What must be learnt is to keep every digit, and when to write a zero: 137
dollars and 8 cents are neither 1378 nor 137080 cents. Seven in twenty problems need one. The reward (env_name exact) is
for the whole number and nothing else. Amounts with 1 or 2 of the small unit are left to a shifted set: in training the
model comes to join them (`137 dollars and 1 cent` -> 1371), and a group in which no sample is right teaches nothing.

A problem is known by its content: kind and amounts. No content is in two sets, and none is one of the examples.
"""

import random
from typing import Any, NamedTuple

from config import DatasetConfig

NUM_HELD_OUT = 300  # and of each shifted set


class Kind(NamedTuple):
    """Two units: so many of the small one are one of the large one."""

    large: str
    small: str
    factor: int


class Problem(NamedTuple):
    """An amount: so many of the large unit, and so many of the small one."""

    kind: Kind
    num_large: int
    num_small: int

    @property
    def question(self) -> str:
        kind = self.kind
        return f"How many {kind.small} are {self.num_large} {kind.large} and {self.num_small} {kind.small}?"

    @property
    def answer(self) -> str:
        return str(self.num_large * self.kind.factor + self.num_small)


KINDS = (
    Kind("meters", "centimeters", 100),
    Kind("dollars", "cents", 100),
    Kind("euros", "cents", 100),
    Kind("pounds", "pence", 100),
    Kind("francs", "centimes", 100),
)
UNSEEN_KINDS = (Kind("centuries", "years", 100), Kind("rupees", "paise", 100))
UNSEEN_FACTOR = (Kind("kilograms", "grams", 1000), Kind("kilometers", "meters", 1000))
EXAMPLES = {100: ((13, 45), (4, 8), (127, 6), (31, 72)), 1000: ((13, 452), (4, 82), (127, 6), (58, 31))}
NUM_TRAIN = 20_000
LARGE, SMALL = range(2, 220), range(3, 23)


def train(cfg: DatasetConfig) -> list[dict[str, Any]]:
    """20,000 problems of 2 to 219 large units and 3 to 22 small ones."""
    return [row(problem) for problem in draw_both_sets()[0]]


def held_out(cfg: DatasetConfig) -> list[dict[str, Any]]:
    """300 problems with amounts of the same size; none is in the training set."""
    return [row(problem) for problem in draw_both_sets()[1]]


def one_or_two(cfg: DatasetConfig) -> list[dict[str, Any]]:
    """300 problems with 1 or 2 small units, which training never has; each needs a zero."""
    return [row(problem) for problem in draw(KINDS, LARGE, range(1, 3), seed=5)]


def larger(cfg: DatasetConfig) -> list[dict[str, Any]]:
    """300 problems with amounts that training never has: 1,000 to 9,999 large units, 25 to 99 small ones."""
    return [row(problem) for problem in draw(KINDS, range(1000, 10_000), range(25, 100), seed=2)]


def other_units(cfg: DatasetConfig) -> list[dict[str, Any]]:
    """300 problems with units that training never has."""
    return [row(problem) for problem in draw(UNSEEN_KINDS, LARGE, SMALL, seed=3)]


def other_factor(cfg: DatasetConfig) -> list[dict[str, Any]]:
    """300 problems with a factor that training never has: 1000, and so with one zero or two."""
    return [row(problem) for problem in draw(UNSEEN_FACTOR, LARGE, range(1, 250), seed=4)]


def draw_both_sets() -> tuple[list[Problem], list[Problem]]:
    """The training and the held-out problems. They are one draw without repetition, so none is in both."""
    generator = random.Random(1)
    train, held_out = [], []
    for kind in KINDS:
        num_train = NUM_TRAIN // len(KINDS)
        problems = different_problems(kind, LARGE, SMALL, num_train + NUM_HELD_OUT // len(KINDS), generator)
        train += problems[:num_train]
        held_out += problems[num_train:]
    generator.shuffle(train)
    generator.shuffle(held_out)
    return train, held_out


def draw(kinds: tuple[Kind, ...], large: range, small: range, *, seed: int) -> list[Problem]:
    """300 problems, as many of one kind as of another."""
    generator = random.Random(seed)
    num_per_kind = NUM_HELD_OUT // len(kinds)
    problems = [
        problem for kind in kinds for problem in different_problems(kind, large, small, num_per_kind, generator)
    ]
    generator.shuffle(problems)
    return problems


def different_problems(kind: Kind, large: range, small: range, number: int, generator: random.Random) -> list[Problem]:
    """`number` problems of one kind, all different, none of them an example."""
    examples = examples_of(kind)
    indices = generator.sample(range(len(large) * len(small)), number + len(examples))
    drawn = [Problem(kind, large[index // len(small)], small[index % len(small)]) for index in indices]
    return [problem for problem in drawn if problem not in examples][:number]


def examples_of(kind: Kind) -> list[Problem]:
    return [Problem(kind, *amounts) for amounts in EXAMPLES[kind.factor]]


def row(problem: Problem) -> dict[str, Any]:
    """A row of the dataset: chat messages and the expected answer."""
    messages = []
    for example in examples_of(problem.kind):
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer})
    return {"messages": [*messages, {"role": "user", "content": problem.question}], "answer": problem.answer}
