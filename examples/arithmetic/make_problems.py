"""Writes train.jsonl and heldout.jsonl: two-digit additions as chat rows, of which 80% need a carry.

    .venv/bin/python examples/arithmetic/make_problems.py [FOLDER]

A row is {"messages": [{"role": "user", "content": "37+48="}], "answer": "85"}. The two files share no
problem (37+48 and 48+37 are two), and are the same bytes every time: the generator is this script's own.
"""

import json
import random
import sys
from pathlib import Path

SEED = 0
NUM_HELDOUT, NUM_TRAIN = 500, 4000
CARRY_SHARE = 0.8  # of all 8,100 problems it is 0.45; those without a carry have nothing to teach


def needs_carry(a: int, b: int) -> bool:
    """Whether the units add up to ten or more."""
    return a % 10 + b % 10 >= 10


def sum_without_carry(a: int, b: int) -> int:
    """The classic slip: the tens are added as if the units had not overflowed. 37+48 -> 75."""
    return 10 * (a // 10 + b // 10) + (a + b) % 10


def draw_problems() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(train, held-out) pairs of operands in 10..99: disjoint, shuffled, each with CARRY_SHARE of carries."""
    rng = random.Random(SEED)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    pools = ([p for p in pairs if not needs_carry(*p)], [p for p in pairs if needs_carry(*p)])
    splits = []
    for size in (NUM_HELDOUT, NUM_TRAIN):
        num_carry = round(size * CARRY_SHARE)
        split = []
        for pool, count in zip(pools, (size - num_carry, num_carry), strict=True):
            assert len(pool) >= count, (len(pool), count)
            split += [pool.pop() for _ in range(count)]
        rng.shuffle(split)
        splits.append(split)
    heldout, train = splits
    return train, heldout


def write_problems(folder: Path) -> None:
    for name, pairs in zip(("train.jsonl", "heldout.jsonl"), draw_problems(), strict=True):
        text = ""
        for a, b in pairs:
            row = {"messages": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}
            text += json.dumps(row) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_problems(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
