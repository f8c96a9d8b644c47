"""A key and its value as NeMo RL writes them -> as we write them, or why not, by the table nemo.yaml.

This file knows names of keys and yaml nodes; reader.py reads values of types. The verdicts are what a run warns
of, what ends it and what `--check --explain` lists.
"""

import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from pathlib import Path
from typing import Any

import yaml

from check.config_yaml import plain_value, scalar
from config import ConfigError

SCORE = "validation/sampled/"  # NeMo RL's validation metrics `val:...` are those of our sampled validation
TABLE: list[dict] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PATTERNS = [
    (".".join(filter(None, (row.get("in"), key))), row) for row in TABLE for key in row["keys"].split()
]  # in the order in which they count
REASONS = [row["why"] for row in TABLE if "why" in row]  # what a user may miss most comes first
PREFIXES = {pattern[:i] for pattern, _ in PATTERNS for i, char in enumerate(pattern) if char == "."}
KINDS = ("refused", "taken as", "does not matter", "taken")  # of verdicts, in the order in which --explain lists them
Value = Callable[[str], Any]  # full key -> its plain value


def _any_of(patterns: list[tuple[str, dict]]) -> re.Pattern:
    """One group for each pattern: trying them one by one takes seconds for the largest config that is read."""
    return re.compile("|".join(f"({translate(pattern)})" for pattern, _ in patterns))


ANY_PATTERN = _any_of(PATTERNS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the key `name`. text: what it is taken as, or the reason; pattern: the table's, for a key that
    does not matter."""

    name: str
    kind: str  # one of KINDS
    text: str = ""
    pattern: str = ""

    def __str__(self) -> str:
        words = {"taken": "taken; ", "taken as": "taken as ", "refused": "refused: "}
        return f"{self.name}: {words.get(self.kind, 'does not matter: ')}{self.text}".removesuffix("; ")


def is_section(name: str) -> bool:
    """Whether the table has keys below `name`, so that each of them is to be looked at."""
    return name in PREFIXES or bool(ANY_PATTERN.match(f"{name}."))


def rows_of(names: Collection[str]) -> tuple[dict[str, tuple[str, dict]], dict[str, str]]:
    """(key -> pattern and row of the table, ("", {}) where it has none; settings that rows add to a config with these
    keys)."""
    rows = [row for row in TABLE if "when" not in row or any(fnmatchcase(name, row["when"]) for name in names)]
    patterns = [(pattern, row) for pattern, row in PATTERNS if row in rows]
    any_pattern = _any_of(patterns)
    matches = {name: any_pattern.match(name) for name in names}
    sets = {key: str(value) for row in rows for key, value in row.get("sets", {}).items()}
    return {name: patterns[match.lastindex - 1] if match else ("", {}) for name, match in matches.items()}, sets


def judge(
    name: str, node: yaml.Node, where: str, match: tuple[str, dict], value_of: Value
) -> tuple[Verdict, list[tuple[str, yaml.Node]]]:
    """(verdict, keys as we write them with their nodes) of a key by its pattern and row. ConfigError where it is
    refused."""
    pattern, row = match
    if not row:
        return _rewrite(name, node, where)
    value = plain_value(node, f"{where}: {name}")
    same = row.get("same", [])
    is_same = any(_equal(value, each) for each in same)
    if "at_least" in row:
        least = value_of(row["at_least"])
        same = [*same, f"{row['at_least']}={text_of(least)} or more"]
        is_same |= not isinstance(least, int) or (isinstance(value, int) and value >= least)
    refused = next((why for never, why in row.get("never", {}).items() if _equal(value, never)), None)
    if refused or ("refused" in row and not is_same):
        only = f", only {' or '.join(map(text_of, same))}" if same else ""
        problem = f"{name}={text_of(value):.80} is not supported here{only}"
        raise ConfigError(f"{where}: {problem}: {refused or row['refused']}")
    if is_same:
        return Verdict(name, "taken", "it is what happens here anyway"), []
    if "why" in row:
        return Verdict(name, "does not matter", row["why"], pattern), []
    ours = [scalar(text_of(ours)) for theirs, ours in row.get("values", {}).items() if _equal(value, theirs)]
    settings = [(row.get("as", name).replace("$", name.rpartition(".")[2]), (ours or [node])[0])]
    return _verdict(name, settings if ours or "as" in row else []), settings


def _rewrite(name: str, node: yaml.Node, where: str) -> tuple[Verdict, list[tuple[str, yaml.Node]]]:
    """The same of a key without a row: a list of schedulers gives several keys, and metrics have names of ours."""
    settings: list[tuple[str, yaml.Node]] = []
    if name == "policy.scheduler" and isinstance(node, yaml.SequenceNode):
        settings = _scheduler(name, node, where)
    if name == "checkpointing.metric_name" and isinstance(node, yaml.ScalarNode):
        metric = "val:accuracy" if node.value == "val_reward" else node.value  # an older name
        metric = metric.replace("train:", "train/", 1).replace("val:", SCORE, 1)
        settings = [(name, scalar(metric))] * (metric != node.value)
    return _verdict(name, settings), settings or [(name, node)]


def _verdict(name: str, settings: list[tuple[str, yaml.Node]]) -> Verdict:
    text = ", ".join(f"{key}={text_of(plain_value(node, key))}" for key, node in settings)
    return Verdict(name, "taken as" if settings else "taken", text)


def _equal(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def text_of(value: Any) -> str:
    """A value as a config writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def table_of(verdicts: Iterable[Verdict]) -> str:
    """The keys that do not matter, by their patterns, and why: a paragraph for each reason. "" if there are none."""
    patterns: dict[str, dict[str, None]] = {}
    for verdict in verdicts:
        if verdict.kind == "does not matter":
            patterns.setdefault(verdict.text, {})[verdict.pattern] = None
    lines = ["these keys of the config change nothing here (--check --explain lists every key):"] * bool(patterns)
    for why in sorted(patterns, key=lambda why: REASONS.index(why) if why in REASONS else -1):
        first, rest = list(patterns[why])[:3], f" and {len(patterns[why]) - 3} more" * (len(patterns[why]) > 3)
        text = f"  {', '.join(first)}{rest}: {why}"
        lines.append(textwrap.fill(text, 120, subsequent_indent="      ", break_on_hyphens=False))
    return "\n".join(lines)


def _scheduler(name: str, node: yaml.Node, where: str) -> list[tuple[str, yaml.Node]]:
    """The keys of policy.scheduler for NeMo RL's list: LinearLR, ConstantLR, and the milestone between them."""
    match plain_value(node, f"{where}: {name}"):
        case [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"end_factor": 1} as warmup},
            {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1}},
            {"milestones": [milestone]},
        ] if milestone == warmup.get("total_iters") and "start_factor" in warmup:
            settings = {"warmup_start_factor": warmup["start_factor"], "warmup_steps": milestone}
            return [(f"{name}.{key}", scalar(text_of(value))) for key, value in settings.items()]
    known = "only a LinearLR up to 1.0 before a ConstantLR is understood, which keeps 1.0 from total_iters on"
    raise ConfigError(f"{where}: {name}: of lists, {known}")
