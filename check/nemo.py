"""A key and its value as NeMo RL writes them -> as we write them, or why not, by the table nemo.yaml.

This file knows names of keys; reader.py reads values. `--check --explain` lists all verdicts.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from pathlib import Path
from typing import Any

import yaml

from check import keys
from check.keys import text_of
from config import ConfigError

TABLE: list[dict] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PATTERNS = [
    (".".join(filter(None, (row.get("in"), key))), row) for row in TABLE for key in row["keys"].split()
]  # in the order in which they count
COMPILED = [re.compile(translate(pattern)) for pattern, _ in PATTERNS]
PREFIXES = {pattern[:i] for pattern, _ in PATTERNS for i, char in enumerate(pattern) if char == "."}
KINDS = ("refused", "mapped to", "does not matter", "used")  # of verdicts, in the order in which --explain lists them


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the key `name`. text: what it is mapped to, or why it is not used."""

    name: str
    kind: str  # one of KINDS
    text: str = ""

    def __str__(self) -> str:
        words = {"used": "used; ", "mapped to": "mapped to ", "refused": "refused: "}
        return f"{self.name}: {words.get(self.kind, 'does not matter: ')}{self.text}".removesuffix("; ")


def is_section(name: str) -> bool:
    """Whether the table has keys below `name`, so that each of them is looked up."""
    return name in PREFIXES or any(pattern.match(f"{name}.") for pattern in COMPILED)


def rows_of(names: Collection[str]) -> tuple[dict[str, dict], dict[str, str]]:
    """(key -> its row of the table, {} if it has none; settings that rows add to such a config)."""
    off = [row for row in TABLE if "when" in row and not any(fnmatchcase(name, row["when"]) for name in names)]
    rows = [(regex, row) for regex, (_, row) in zip(COMPILED, PATTERNS, strict=True) if row not in off]
    found = {name: next((row for regex, row in rows if regex.match(name)), {}) for name in names}
    return found, {k: str(v) for row in TABLE if row not in off for k, v in row.get("sets", {}).items()}


def judge(
    name: str, value: Any, typed: Any, place: str, row: dict, value_of: Callable[[str], Any]
) -> tuple[Verdict, list[tuple[str, Any]]]:
    """(verdict, (key, value) as we write them) of a key. typed: the value as yaml sees it. ConfigError if refused."""
    is_same, same = any(_equal(typed, each) for each in row.get("same", [])), row.get("same", [])
    if "at_least" in row:
        least = value_of(row["at_least"])
        same = [*same, f"{row['at_least']}={text_of(least)} or more"]
        is_same |= not isinstance(least, int) or (isinstance(typed, int) and typed >= least)
    if "refused" in row and not is_same:
        only = f", only {' or '.join(map(text_of, same))}" if same else ""
        problem = f"{name}={text_of(typed):.80} is not supported here{only}"
        raise ConfigError(f"{place}: {problem}: {row['refused']}")
    if is_same:
        return Verdict(name, "used", "it is what happens here anyway"), []
    if "why" in row:
        return Verdict(name, "does not matter", row["why"]), []
    settings = {}
    if "as" in row or "values" in row:
        ours = [ours for theirs, ours in row.get("values", {}).items() if _equal(typed, theirs)]
        if ours or "as" in row:
            settings[row.get("as", name).replace("$", name.rpartition(".")[2])] = (ours or [typed])[0]
    elif name == "policy.scheduler" and isinstance(value, list):
        settings = _scheduler(typed, place)
    text = ", ".join(f"{key}={text_of(new)}" for key, new in settings.items())
    written = [
        (key, new if keys.is_free(key) or new is None else value if new is typed else text_of(new))
        for key, new in settings.items()
    ]
    return Verdict(name, "mapped to" if settings else "used", text), written or [(name, value)]


def _equal(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _scheduler(value: Any, place: str) -> dict[str, Any]:
    """The keys of policy.scheduler for NeMo RL's list: LinearLR, ConstantLR, and the milestone between them."""
    match value:
        case [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"end_factor": 1} as warmup},
            {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1}},
            {"milestones": [milestone]},
        ] if milestone == warmup.get("total_iters") and "start_factor" in warmup:
            settings = {"warmup_start_factor": warmup["start_factor"], "warmup_steps": milestone}
            return {f"policy.scheduler.{key}": new for key, new in settings.items()}
    known = "the only list supported is a LinearLR up to 1.0, then a ConstantLR at 1.0 from total_iters on"
    raise ConfigError(f"{place}: policy.scheduler: {known}")
