"""Mixtures of several datasets, and what they draw."""

import json

from base.inputs.mixing import Mixture
from base.inputs.scan import Dataset
from config import Config, DataConfig, DatasetConfig, GRPOConfig
from records import Problem

MIXES = {
    "size": {},
    "weight": {"weights": (2, 1, 1)},
    "turns": {"use_multiple_dataloader": True, "num_prompts_per_dataloader": 4},
}


def mixture_of(sizes, weights=None, *, rules=None, repeat=1, shuffle=True, seed=42, **data):
    """Sets a, b, ... of so many problems; a row knows its set and its number."""
    names = "abcdefgh"[: len(sizes)]
    given = zip(names, weights or [None] * len(sizes), rules or ["uniform"] * len(sizes), strict=True)
    train = tuple(DatasetConfig(name=n, weight=w, prompt_selection=rule, repeat=repeat) for n, w, rule in given)
    sets = [
        Dataset(
            f"{name}.jsonl",
            [Problem(i % (size // repeat), [], "", "exact", [], dataset=name) for i in range(size)],
            f"of {name}",
            name,
        )
        for name, size in zip(names, sizes, strict=True)
    ]
    return Mixture(sets, Config(grpo=GRPOConfig(seed=seed), data=DataConfig(train=train, shuffle=shuffle, **data)))


def batches(mixture, counts, cursor=None):
    """(set, row) of each prompt of each draw, and the cursor behind them, which went through JSON every time."""
    cursor, found = cursor or mixture.start(), []
    for count in counts:
        rows, cursor = mixture.draw(cursor, count)
        cursor = json.loads(json.dumps(cursor))
        found.append([(row.dataset, row.row_id) for row in rows])
    return found, cursor
