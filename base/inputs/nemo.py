"""A key and its value as NeMo RL writes them -> as we write them, or why not, by the table nemo.yaml.

This file knows names of keys; reader.py reads values. `--check --explain` lists all verdicts.
"""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from base.inputs import keys
from base.inputs.keys import text_of
from base.inputs.yaml_text import Plain, typed
from config import ConfigError

KINDS = ("refused", "mapped to", "does not matter", "used")  # of verdicts; --explain has this order


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of nemo.yaml, which explains the fields."""

    keys: str = ""
    section: str = msgspec.field(name="in", default="")
    same: list[Plain] = []
    at_least: str = ""
    why: str = ""
    refused: str = ""
    target: str = msgspec.field(name="as", default="")
    decides: bool = False
    values: dict[str | int | None, Plain] = {}
    when: str = ""
    sets: dict[str, str | int] = {}

    @property
    def patterns(self) -> list[str]:
        """Patterns of full names."""
        return [f"{self.section}.{key}" if self.section else key for key in self.keys.split()]

    def is_on(self, names: Collection[str]) -> bool:
        """Whether the row counts in a config that sets these keys."""
        return not self.when or any(fnmatchcase(name, self.when) for name in names)


TABLE = msgspec.convert(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")), list[Row])
PATTERNS = [(pattern, row) for row in TABLE for pattern in row.patterns]  # in the order in which they count
NO_ROW = Row()


class Verdict(NamedTuple):
    """What becomes of a key: the words of --explain, of which the first are one of KINDS, and what it sets, as we write
    it."""

    text: str
    settings: dict[str, Plain]


def is_section(name: str) -> bool:
    """Whether the table has keys below `name`, so that each of them is looked up."""
    return any(pattern.startswith(f"{name}.") or fnmatchcase(f"{name}.", pattern) for pattern, _ in PATTERNS)


def rows_of(names: Collection[str]) -> dict[str, Row]:
    """Key -> its row of the table, or NO_ROW."""
    patterns = [(pattern, row) for pattern, row in PATTERNS if row.is_on(names)]
    rows = {}
    for name in names:
        matching = (row for pattern, row in patterns if fnmatchcase(name, pattern))
        rows[name] = next(matching, NO_ROW)
    return rows


def settings_beside(names: Collection[str]) -> dict[str, str]:
    """Settings that rows add to a config with these keys."""
    return {key: str(value) for row in TABLE if row.is_on(names) for key, value in row.sets.items()}


def judge(name: str, value: Plain, row: Row, value_of: Callable[[str], Plain]) -> Verdict:
    """The verdict on a key. value: as it is written; value_of: the value of any other key. ConfigError, without
    the place, if the value is refused."""
    new = typed(value)
    known = [text_of(same) for same in row.same]
    is_same = any(_equal(new, same) for same in row.same)
    if row.at_least:
        least = value_of(row.at_least)
        known.append(f"{row.at_least}={text_of(least)} or more")
        if not isinstance(least, int):  # that key is refused by itself
            is_same = True
        elif isinstance(new, int) and new >= least:
            is_same = True
    if is_same:
        return Verdict("used; it is what happens here anyway", {})
    if row.refused:
        only = f", only {' or '.join(known)}" if known else ""
        raise ConfigError(f"{name}={text_of(new):.80} is not supported here{only}: {row.refused}")
    if row.why:
        return Verdict(f"does not matter: {row.why}", {})
    target = row.target.replace("$", name.rpartition(".")[2]) or name
    settings: dict[str, Plain] = {}
    others = [ours for theirs, ours in row.values.items() if _equal(new, theirs)]
    if others:
        settings[target] = others[0]
    elif row.target:
        settings[target] = new
    elif name == "policy.scheduler" and isinstance(value, list):
        settings = _schedule(new)
    else:
        return Verdict("used", {name: value})
    shown = ", ".join(f"{key}={text_of(setting)}" for key, setting in settings.items())
    if row.target and not others and not keys.is_free(target):
        settings[target] = value
    return Verdict(f"mapped to {shown}", settings)


def _equal(value: Plain, other: Plain) -> bool:
    """1 is not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _schedule(value: Plain) -> dict[str, Plain]:
    """The keys of policy.scheduler for NeMo RL's list: LinearLR, ConstantLR, and the milestone between them."""
    match value:
        case [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"end_factor": 1} as warmup},
            {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1}},
            {"milestones": [milestone]},
        ] if milestone == warmup.get("total_iters") and "start_factor" in warmup:
            factor = warmup["start_factor"]
            return {"policy.scheduler.warmup_start_factor": factor, "policy.scheduler.warmup_steps": milestone}
    known = "the only list supported is a LinearLR up to 1.0, then a ConstantLR at 1.0 from total_iters on"
    raise ConfigError(f"policy.scheduler: {known}")
