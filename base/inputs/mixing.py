"""Which problems come next: of all sets in one shuffled order, or of the sets that a rule chooses (set_choice.py).

The draw depends only on the config and on a cursor, a small dict of JSON values that checkpoints keep. Where a set has
a prompt_selection (selection.py), the set alone is chosen here, and what has been seen of its rows chooses the row.
"""

import copy
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypedDict

import numpy as np

from base.inputs.scan import Dataset
from config import Config
from records import Problem, Sample, groups_of

SELECTION = 1  # the last number of the seeds of selection.py: not of an epoch's order, which has other seeds


class Cursor(TypedDict):
    """Where the draw stands."""

    position: int  # problems drawn
    drawn: dict[str, int]  # set -> problems drawn by name
    memory: dict  # the dataloader's
    records: dict[str, float]  # the dataloader's: the metrics of the newest step


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
        self.has_dataloader = cfg.data.custom_dataloader is not None
        self.choice = None
        if cfg.data.use_multiple_dataloader or any(section.weight for section in cfg.data.train):
            from base.inputs.set_choice import SetChoice  # a run that draws by size does without

            self.choice = SetChoice(self.sizes, cfg)
        self.selections = {}
        for dataset, section in zip(datasets, cfg.data.train, strict=False):
            if section.prompt_selection != "uniform":
                from base.inputs.selection import Selection  # a run without a prompt_selection does without

                num_rows = len(dataset.problems) // section.repeat
                self.selections[dataset.name] = Selection(section.prompt_selection, num_rows)

    def start(self) -> Cursor:
        """The cursor of a new run."""
        return {"position": 0, "drawn": dict.fromkeys(self.datasets, 0), "memory": {}, "records": {}}

    def record(self, cursor: Cursor, metrics: Mapping[str, float], samples: Sequence[Sample] = ()) -> Cursor:
        """The cursor with the metrics of the step, which a user's dataloader sees at the next step. samples: all that
        the step has drawn, for `selections`."""
        if self.selections:
            for group in groups_of(samples):
                if group[0].dataset in self.selections:
                    self.selections[group[0].dataset].record(group)
        if not self.has_dataloader:
            return cursor
        return cursor | {"records": dict(metrics)}

    def draw(self, cursor: Cursor, count: int) -> tuple[list[Problem], Cursor]:
        """The next `count` problems, and the cursor after them."""
        # A deep copy: with async_grpo, a checkpoint keeps an earlier cursor than the newest one.
        after = copy.deepcopy(cursor)
        after["position"] += count
        drawn = after["drawn"]
        names = list(self.datasets)
        selected = self._select_rows(cursor["position"], count)
        items = self._by_size(cursor["position"], count)
        if self.choice:
            items = self.choice.items(cursor["position"], after, count)  # reads after["drawn"], which grows meanwhile
        problems = []
        for name, index in items:
            if index is None and name in selected:
                index = next(selected[name])
                drawn[name] += 1
            elif index is None:
                stream = (names.index(name),)
                (index,) = self.order(self.sizes[name], drawn[name], 1, stream=stream)
                drawn[name] += 1
            problem = self.datasets[name].problems[index]
            problems.append(problem)
            if name in self.selections:
                self.selections[name].note_drawn(problem.row_id, index)
        return problems, after

    def _select_rows(self, position: int, count: int) -> dict[str, Iterator[int]]:
        """For each set with a prompt_selection, more rows than the draw will take of it."""
        rows = {}
        for number, (name, selection) in enumerate(self.selections.items()):
            bits = np.random.PCG64([self.seed, position, number, SELECTION])
            generator = np.random.Generator(bits)
            rows[name] = iter(selection.draw(count, generator))
        return rows

    def saved_selections(self) -> dict[str, str]:
        """What a checkpoint keeps of `selections`: by set."""
        return {name: selection.saved() for name, selection in self.selections.items()}

    def restore_selections(self, saved: Mapping[str, str]) -> None:
        """Takes what `saved_selections` gave. A set that had no prompt_selection then starts anew."""
        for name in self.selections.keys() & saved.keys():
            self.selections[name].restore(saved[name])

    def _by_size(self, position: int, count: int) -> Iterator[tuple[str, int | None]]:
        """All problems of all sets in one order: a number counts them through, set after set."""
        names = list(self.datasets)
        starts = [0, *accumulate(self.sizes.values())]
        for number in self.order(self.num_problems, position, count):
            place = bisect(starts, number) - 1
            name = names[place]
            index = number - starts[place]
            if name in self.selections:
                index = None
            yield name, index


def epoch_order(
    size: int, position: int, count: int, *, seed: int, shuffle: bool, stream: tuple[int, ...] = ()
) -> list[int]:
    """`count` indices below `size` from global `position` on, one epoch after the other. An epoch has every index once,
    in the order that numpy's PCG64 gives for (seed, epoch, *stream): the same on any number of ranks."""
    indices = []
    for place in range(position, position + count):
        epoch, index = divmod(place, size)
        if shuffle:
            index = int(_permutation(size, seed, epoch, stream)[index])
        indices.append(index)
    return indices


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int, stream: tuple[int, ...]) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64([seed, epoch, *stream]))
    order = generator.permutation(size)
    if size < 2**32:
        return order.astype(np.uint32)  # half the memory
    return order
