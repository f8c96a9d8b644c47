"""Which problems come next: by size (all sets in one shuffled order), by weight, in turn, or by a user's sampler.

The draw depends only on the config and on a cursor, a small dict of JSON values that checkpoints keep.

The user's sampler, data.custom_dataloader, is called once per draw with keyword arguments:
    f(num_prompts, sizes, records, memory, position, seed) -> a list of `num_prompts` items. An item is the name of a
    set, for its next problem, or (name, index of a problem).
sizes: set -> number of problems. records: the metrics of the newest step, {} at first (`reward_by_dataset/<set>` among
them); with grpo.async_grpo a prompt is drawn up to max_trajectory_age_steps steps before it is trained on. memory: a
dict of JSON values that the sampler may change and that checkpoints keep. The sampler must depend on nothing else.
"""

import copy
import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from config import Config, ConfigError
from data import Problem
from support.inputs.scan import Dataset
from support.system.imports import call, import_attribute

# position: problems drawn; drawn: set -> problems drawn by name; memory, records: the sampler's
Cursor = dict[str, Any]


class Mixture:
    """The training sets of a run, in the config's order, and the rule by which prompts are drawn from them."""

    def __init__(self, datasets: Sequence[Dataset], cfg: Config):
        self.datasets = {dataset.name: dataset for dataset in datasets}
        assert len(self.datasets) == len(datasets), [dataset.name for dataset in datasets]
        self.sizes = {name: len(dataset.problems) for name, dataset in self.datasets.items()}
        self.num_problems = sum(self.sizes.values())  # prompts of an epoch, for every mix
        self.fingerprints = {name: dataset.fingerprint for name, dataset in self.datasets.items()}
        self.seed = cfg.grpo.seed
        self.order = partial(epoch_order, seed=cfg.grpo.seed, shuffle=cfg.data.shuffle)
        self.turn = cfg.data.num_prompts_per_dataloader if cfg.data.use_multiple_dataloader else None
        weights = [section.weight for section in cfg.data.train]
        self.weights = [Fraction(weight) for weight in weights] if all(weights) else []
        path = cfg.data.custom_dataloader if cfg.data.use_multiple_dataloader else None
        self.sampler = import_attribute(path, "data.custom_dataloader") if path else None
        self.sampler_name = f"data.custom_dataloader '{path}'"

    def check_same(self, fingerprints: Mapping[str, str], resumed: str) -> None:
        """ConfigError unless these are the sets that the run `resumed` was trained on."""
        for name in sorted({*self.fingerprints, *fingerprints}):
            if self.fingerprints.get(name) != fingerprints.get(name):
                here = f"is new or changed ({self.datasets[name].path})" if name in self.datasets else "is missing"
                raise ConfigError(
                    f"data.train: '{name}' {here}, compared with the data of the run {resumed}, so the saved position "
                    "would select other prompts; give the same data, or start at the beginning of this data with "
                    "checkpointing.allow_changes=true"
                )

    def start(self) -> Cursor:
        """The cursor of a new run."""
        return {"position": 0, "drawn": dict.fromkeys(self.datasets, 0), "memory": {}, "records": {}}

    def record(self, cursor: Cursor, metrics: Mapping[str, Any]) -> Cursor:
        """The cursor with the metrics of the step, which a user's sampler sees at the next step."""
        return cursor | {"records": dict(metrics)} if self.sampler else cursor

    def draw(self, cursor: Cursor, count: int) -> tuple[list[Problem], Cursor]:
        """The next `count` problems, and the cursor after them."""
        position, drawn = cursor["position"], dict(cursor["drawn"])
        names = list(self.datasets)
        # A deep copy: with async_grpo, a checkpoint keeps an earlier cursor than the newest one.
        memory = copy.deepcopy(cursor["memory"])
        after = cursor | {"position": position + count, "drawn": drawn, "memory": memory}
        if self.sampler:
            items = call(self.sampler_name, self._sample, after, count)
        elif self.turn:
            items = [(names[k // self.turn % len(names)], None) for k in range(position, position + count)]
        elif self.weights:
            items = ((furthest_behind(drawn, self.weights), None) for _ in range(count))  # one by one: `drawn` grows
        else:
            starts = [0, *accumulate(self.sizes.values())]
            places = ((bisect(starts, k) - 1, k) for k in self.order(self.num_problems, position, count))
            items = [(names[place], k - starts[place]) for place, k in places]
        problems = []
        for name, index in items:
            if index is None:
                index = self.order(self.sizes[name], drawn[name], 1, stream=(names.index(name),))[0]
                drawn[name] += 1
            problems.append(self.datasets[name].problems[index])
        return problems, after

    def _sample(self, after: Cursor, count: int) -> list[tuple[str, int | None]]:
        """What the user's sampler draws; it may change after["memory"]. ConfigError unless it gives `count` items."""
        answer = self.sampler(
            num_prompts=count,
            sizes=dict(self.sizes),
            records=after["records"],
            memory=after["memory"],
            position=after["position"] - count,
            seed=self.seed,
        )
        items = [(item, None) if isinstance(item, str) else item for item in answer]
        if len(items) != count or not all(0 <= (index or 0) < self.sizes.get(name, 0) for name, index in items):
            raise ConfigError(
                f"{self.sampler_name} returned {items!r:.160}: expected {count} items, each a key of {self.sizes} or "
                "(key, index of a problem)"
            )
        json.dumps(after["memory"])  # checkpoints keep it
        return items


def furthest_behind(drawn: Mapping[str, int], weights: Sequence[Fraction]) -> str:
    """The set that is furthest behind its share of all prompts up to the next one; of equals the first.

    No set is ever a prompt or more ahead of its share, and shares are exact whenever they are whole numbers. Example:
    weights 3 and 1 give a a b a, again and again.
    """
    share = Fraction(sum(drawn.values()) + 1, sum(weights))  # prompts per weight
    behind = {name: weight * share - drawn[name] for name, weight in zip(drawn, weights, strict=True)}
    return max(behind, key=behind.__getitem__)


def epoch_order(
    size: int, position: int, count: int, *, seed: int, shuffle: bool, stream: tuple[int, ...] = ()
) -> list[int]:
    """`count` indices below `size` from global `position` on, one epoch after the other. An epoch has every index once,
    in the order that numpy's PCG64 gives for (seed, epoch, *stream): the same on any number of ranks."""
    places = (divmod(k, size) for k in range(position, position + count))
    return [int(_permutation(size, seed, epoch, stream)[i]) if shuffle else i for epoch, i in places]


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int, stream: tuple[int, ...]) -> np.ndarray:
    order = np.random.Generator(np.random.PCG64([seed, epoch, *stream])).permutation(size)
    return order.astype(np.uint32) if size < 2**32 else order
