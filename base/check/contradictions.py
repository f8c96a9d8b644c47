"""Settings that contradict each other: what the tables of contradictions.yaml refuse of a Config."""

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from base.inputs.keys import FIELDS, text_of
from config import Config

COMPARE = {">": operator.gt, ">=": operator.ge}


class Condition(NamedTuple):
    """other: the values of which the key has one ("="), or none ("!="); or the key that it is compared with."""

    key: str
    sign: str
    other: Any

    @classmethod
    def read(cls, text: str) -> "Condition":
        key, sign, other = re.fullmatch(r"([\w.]+)(=|!=|>=|>)(.+)", text).groups()
        if sign not in COMPARE:
            other = [yaml.safe_load(value) for value in other.split("|")]
        return cls(key, sign, other)

    @property
    def keys(self) -> list[str]:
        return [self.key, self.other] if self.sign in COMPARE else [self.key]

    def is_met(self, cfg: Config) -> bool:
        value, *bound = (attrgetter(key)(cfg) for key in self.keys)
        if bound:
            return None not in (value, *bound) and COMPARE[self.sign](value, *bound)
        if isinstance(value, tuple):
            value = list(value)
        return (value in self.other) == (self.sign == "=")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table."""

    when: Sequence[Condition] = ()
    refuse: Sequence[Condition] = ()
    unread: Sequence[str] = ()
    why: str

    @classmethod
    def read(cls, why: str, when: str = "", refuse: str = "", unread: str = "") -> "Rule":
        conditions = [Condition.read(text) for text in when.split()]
        refused = [Condition.read(text) for text in refuse.split()]
        return cls(when=conditions, refuse=refused, unread=unread.split(), why=why)


_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
READS: dict[str, list[str]] = _TABLES["reads"]
RULES = [Rule.read(**row) for row in _TABLES["rules"]]


def contradictions(cfg: Config) -> Iterator[str]:
    """What RULES and READS refuse."""
    for rule in [*RULES, unread_by(cfg.loss_fn.token_loss)]:
        if not all(condition.is_met(cfg) for condition in rule.when):
            continue
        others = [setting(cfg, key) for condition in rule.when for key in condition.keys]
        for condition in rule.refuse:
            if condition.is_met(cfg):
                settings = [setting(cfg, key) for key in condition.keys]
                yield f"{' and '.join([*settings, *others])}: {rule.why}"
        for key in rule.unread:
            default = FIELDS[key].default
            if attrgetter(key)(cfg) != default:
                fix = f"set {key}={text_of(default)}"
                yield f"{setting(cfg, key)} has no effect with {' and '.join(others)}: {rule.why}; {fix}"


def unread_by(token_loss: str) -> Rule:
    """The rule that refuses the keys of other token losses."""
    assert token_loss in READS, f"READS needs a line of {token_loss}"
    keys = dict.fromkeys(chain.from_iterable(READS.values()))
    return Rule(
        when=[Condition("loss_fn.token_loss", "=", [token_loss])],
        unread=[f"loss_fn.{key}" for key in keys if key not in READS[token_loss]],
        why="this token loss does not read it",
    )


def setting(cfg: Config, key: str) -> str:
    return f"{key}={text_of(attrgetter(key)(cfg))}"
