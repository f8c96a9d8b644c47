"""A key and its value as NeMo RL writes them -> as we write them, or why not, by the table nemo.yaml.

This file knows names of keys; reader.py reads values. `--check --explain` lists all verdicts.
"""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from config import ConfigError
from support.inputs import keys
from support.inputs.keys import text_of

TABLE: list[dict] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PATTERNS = [
    (".".join(filter(None, (row.get("in"), key))), row) for row in TABLE for key in row["keys"].split()
]  # in the order in which they count
KINDS = ("refused", "mapped to", "does not matter", "used")  # a verdict begins with one; --explain has this order


def is_section(name: str) -> bool:
    """Whether the table has keys below `name`, so that each of them is looked up."""
    return any(pattern.startswith(f"{name}.") or fnmatchcase(f"{name}.", pattern) for pattern, _ in PATTERNS)


def rows_of(names: Collection[str]) -> tuple[dict[str, dict], dict[str, str]]:
    """(key -> its row of the table, {} if it has none; settings that rows add to such a config)."""
    off = [row for row in TABLE if "when" in row and not any(fnmatchcase(name, row["when"]) for name in names)]
    rows = [(pattern, row) for pattern, row in PATTERNS if row not in off]
    found = {name: next((row for pattern, row in rows if fnmatchcase(name, pattern)), {}) for name in names}
    return found, {k: str(v) for row in TABLE if row not in off for k, v in row.get("sets", {}).items()}


def judge(
    name: str, value: Any, typed: Any, place: str, row: dict, value_of: Callable[[str], Any]
) -> tuple[str, list[tuple[str, Any]]]:
    """(verdict, (key, value) as we write them) of a key. typed: the value as yaml sees it. ConfigError if refused."""
    same = row.get("same", [])
    is_same = any(_equal(typed, each) for each in same)
    if "at_least" in row:
        least = value_of(row["at_least"])
        same = [*same, f"{row['at_least']}={text_of(least)} or more"]
        is_same |= not isinstance(least, int) or (isinstance(typed, int) and typed >= least)
    if "refused" in row and not is_same:
        only = f", only {' or '.join(map(text_of, same))}" if same else ""
        problem = f"{name}={text_of(typed):.80} is not supported here{only}"
        raise ConfigError(f"{place}: {problem}: {row['refused']}")
    if is_same:
        return "used; it is what happens here anyway", []
    if "why" in row:
        return f"does not matter: {row['why']}", []
    ours = [ours for theirs, ours in row.get("values", {}).items() if _equal(typed, theirs)]
    if ours or "as" in row:
        settings = {row.get("as", name).replace("$", name.rpartition(".")[2]): (ours or [typed])[0]}
    elif name == "policy.scheduler" and isinstance(value, list):
        settings = _scheduler(typed, place)
    else:
        return "used", [(name, value)]
    written = []
    for key, new in settings.items():
        as_it_is = keys.is_free(key) or new is None
        written.append((key, new if as_it_is else value if new is typed else text_of(new)))
    return f"mapped to {', '.join(f'{key}={text_of(new)}' for key, new in settings.items())}", written


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
