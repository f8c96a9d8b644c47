"""What makes a run sick: tests/helpers/health_runs.py names these in overrides of configs/smoke.yaml."""

import sys
from dataclasses import replace
from itertools import count

from envs import Exact


def constant_reward(completions, **columns):
    return [1.0] * len(completions)


def wrong_answer(row):
    """A processor: 54+18= is now 1072, which no reply of the starter is."""
    return row | {"answer": str(int(row["answer"]) + 1000)}


def mostly_wrong_answer(row):
    """One row in eight keeps its answer."""
    return row if int(row["answer"]) % 8 == 0 else wrong_answer(row)


NUMBERS = count()


class NearTies(Exact):
    """Scores that differ in the sixth digit, as a judge's do."""

    def step(self, turns):
        return [replace(graded, reward=graded.reward + 1e-6 * (next(NUMBERS) % 7)) for graded in super().step(turns)]


class StaleLayer(Exact):
    """Has the engine keep the first weights of layer 0, whatever it is sent: a sync that loses a part."""

    def __init__(self):
        if "engine" not in sys.modules:  # `--check` has none
            return
        from engine import VLLMEngine

        sync, first = VLLMEngine.sync, {}

        def stale(engine, weights, version):
            kept = ((name, first.setdefault(name, x.clone()) if ".layers.0." in name else x) for name, x in weights)
            return sync(engine, kept, version)

        VLLMEngine.sync = stale


def size_of_number(completions, **columns):
    """A reward without a bound, which the policy finds out to raise: by another digit, tenfold."""
    texts = ["".join(c for c in (x if isinstance(x, str) else x[-1]["content"]) if c.isdigit()) for x in completions]
    return [float(text or 0) for text in texts]
