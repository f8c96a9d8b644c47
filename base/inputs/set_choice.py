"""Which training set each of the next problems comes from: by weight, in turn, or by a user's dataloader.

The user's dataloader, data.custom_dataloader, is called once per draw with keyword arguments:
    f(num_prompts, sizes, records, memory, position, seed) -> a list of `num_prompts` items. An item is the name of a
    set, for its next problem, or (name, index of a problem).
sizes: set -> number of problems. records: the metrics of the newest step, {} at first (`reward_by_dataset/<set>` among
them); with grpo.async_grpo a prompt is drawn up to max_trajectory_age_steps steps before it is trained on. memory: a
dict of JSON values that it may change and that checkpoints keep. It must depend on nothing else.
`--check` and the start of a run call it once, with an empty memory.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from base.system.users_code import call
from config import Config, ConfigError

Item = tuple[str, int | None]  # a set, and the index of a problem; None: the set's next one


class SetChoice:
    """The rule of a run. sizes: set -> number of its problems, in the config's order."""

    def __init__(self, sizes: Mapping[str, int], cfg: Config):
        self.sizes = sizes
        self.seed = cfg.grpo.seed
        self.sections = cfg.data.train
        self.turn: int | None = None  # so many prompts of a set follow each other
        self.dataloader: Callable[..., Iterable] | None = None
        self.dataloader_name = f"data.custom_dataloader '{cfg.data.custom_dataloader}'"
        if cfg.data.use_multiple_dataloader:
            self.turn = cfg.data.num_prompts_per_dataloader
            if cfg.data.custom_dataloader:
                from base.system.imports import import_attribute

                self.dataloader = import_attribute(cfg.data.custom_dataloader, "data.custom_dataloader")

    def items(self, position: int, after: dict, count: int) -> Iterable[Item]:
        """As many items. position: problems drawn before. after: the cursor behind them, whose "drawn" grows as the
        items are taken."""
        if self.dataloader:
            return call(self.dataloader_name, self._load, position, after, count)
        if self.turn:
            return self._in_turn(position, count)
        return self._by_weight(after["drawn"], count)

    def _load(self, position: int, after: dict, count: int) -> list[Item]:
        """What the user's dataloader draws, `count` items; else ConfigError. It may change after["memory"]."""
        answer = self.dataloader(
            num_prompts=count,
            sizes=dict(self.sizes),
            records=after["records"],
            memory=after["memory"],
            position=position,
            seed=self.seed,
        )
        items = [(item, None) if isinstance(item, str) else item for item in answer]
        if len(items) != count or not all(map(self._is_there, items)):
            raise ConfigError(
                f"{self.dataloader_name} returned {items!r:.160}: expected {count} items, each a key of {self.sizes} "
                "or (key, index of a problem)"
            )
        json.dumps(after["memory"])  # checkpoints keep it
        return items

    def _is_there(self, item: Item) -> bool:
        name, index = item
        if index is None:
            index = 0
        return 0 <= index < self.sizes.get(name, 0)

    def _in_turn(self, position: int, count: int) -> Iterator[Item]:
        """`turn` prompts of a set, then as many of the next one."""
        names = list(self.sizes)
        for place in range(position, position + count):
            number_of_turn = place // self.turn
            yield names[number_of_turn % len(names)], None

    def _by_weight(self, drawn: Mapping[str, int], count: int) -> Iterator[Item]:
        weights = [Fraction(section.weight) for section in self.sections]
        for _ in range(count):
            yield furthest_behind(drawn, weights), None


def furthest_behind(drawn: Mapping[str, int], weights: Sequence[Fraction]) -> str:
    """The set that is furthest behind its share of all prompts up to the next one; of equals the first.

    No set is ever a prompt or more ahead of its share, and shares are exact whenever they are whole numbers. Example:
    weights 3 and 1 give a a b a, again and again.
    """
    prompts_per_weight = Fraction(sum(drawn.values()) + 1, sum(weights))
    behind = {}
    for name, weight in zip(drawn, weights, strict=True):
        behind[name] = weight * prompts_per_weight - drawn[name]
    return max(behind, key=behind.__getitem__)
