"""What several keys of TRL or verl decide together; from_trl.py and from_verl.py fill it in."""

from dataclasses import dataclass, field
from typing import Any

from base.inputs.keys import text_of
from config import ConfigError

Values = dict[str, Any]  # by the full names of keys

GRADED_BY = "data.default.env_name"
LARGEST = 1e18  # of numbers, so that products of them stay finite
YOURS = "your_module:"  # what --check cannot import: the user is to name a function of theirs in its place


@dataclass
class Translation:
    keys: Values = field(default_factory=dict)  # ours, which win over those of the table
    refused: dict[str, str] = field(default_factory=dict)  # a key of theirs -> why what it trains is not here
    notes: dict[str, str] = field(default_factory=dict)  # a key of theirs -> what differs here all the same
    updates_per_rollout: int = 1  # optimizer steps, for a system whose keys count those


def whole(values: Values, key: str, least: int) -> int:
    """The value of a key that must be a whole number. ConfigError."""
    value = values[key]
    if not is_number(value) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}={text_of(value):.80}: expected a whole number, {least} or more")
    return value


def number(values: Values, key: str) -> float:
    """The value of a key that must be a number. ConfigError."""
    value = values[key]
    if not is_number(value):
        raise ConfigError(f"{key}={text_of(value):.80}: expected a number")
    return value


def is_number(value: Any) -> bool:
    """Whether it is one with which one can count: no bool, no NaN, and below LARGEST."""
    return type(value) in (int, float) and abs(value) < LARGEST
