"""The files that hold a config of TRL or verl -> {their key: value}: yaml, json, hydra's overrides, scripts, Python.

A value that only Python, a shell or hydra can compute is `Unread`: its text.
"""

import os
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from base.inputs import yaml_text
from base.inputs.keys import text_of
from base.system.files import parse_json, read_text
from config import ConfigError, shortened
from tools import theirs_python, theirs_shell
from tools.python_values import Unread, Values

MAX_LENGTH = 400_000  # characters of a file
MAX_DEPTH = 30  # interpolations within each other
MAX_STEPS = 1_000  # interpolations of one value


def read(system: str, name: str, table: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """(the values in a file, where they were read and what was left out). table: `convert.load_table`. ConfigError."""
    text = read_text(name).removeprefix("\ufeff")
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"{name}: it has more than {MAX_LENGTH:,} characters, which no config has")
    if system == "trl":
        return _read_trl(name, text, table)
    return _read_verl(name, text, table)


def _read_trl(name: str, text: str, table: Mapping[str, Any]) -> tuple[Values, list[str]]:
    if name.endswith(".py"):
        return theirs_python.read(text, name, table)
    values = parse_json(text.encode(errors="replace"), name) if name.endswith(".json") else parse_yaml(text, name)
    is_config = isinstance(values, dict) and "cells" not in values  # of a notebook
    if is_config:
        for value in values.values():
            is_section = isinstance(value, dict) and any(key in table["keys"] for key in value)
            is_config = is_config and not is_section
    if not is_config:
        problem = "expected a mapping of TRL's keys, in yaml or json and not in sections, or a Python file (.py)"
        raise ConfigError(f"{name}: {problem}; {table['way_out']}")
    return values, []


def _read_verl(name: str, text: str, table: Mapping[str, Any]) -> tuple[Values, list[str]]:
    if name.endswith(".py"):
        raise ConfigError(f"{name}: verl's config is hydra's, not Python's: {table['way_out']}")
    try:
        values = parse_yaml(text, name)
    except ConfigError:
        if name.endswith((".yaml", ".yml", ".json")):
            raise
        values = None
    if isinstance(values, list):
        return assigned([str(word) for word in values]), []
    if not isinstance(values, dict) or not all(re.fullmatch(r"\w+", key) for key in values):
        words, unused = theirs_shell.overrides(text, name)
        if not words:
            example = "such as algorithm.adv_estimator=grpo"
            raise ConfigError(f"{name}: it has no override of verl's, {example}; {table['way_out']}")
        return assigned(words), [f"  {line}" for line in unused]
    notes = []
    for key in ("hydra", "defaults"):
        if key in values:
            del values[key]
            notes.append(f"  {key}: left out, because hydra reads it")
    sections = {key.partition(".")[0] for key in (*table["keys"], *table["recorded"], *table["moved"])}
    if not values.keys() & sections:
        raise ConfigError(f"{name}: it has no key of verl's; {table['way_out']}")
    return _flat(values, "", table), notes


# --------------------------------------------------------------------------------------------------------------- yaml


def parse_yaml(text: str, where: str) -> Any:
    """The value of a yaml text. ConfigError, beginning with `where`, also for one that is too large or too deep."""
    return yaml_text.Document(text, where, lambda name: True).value


def _flat(tree: Mapping[str, Any], prefix: str, table: Mapping[str, Any]) -> Values:
    """Full key -> value of everything in a tree that is no section. Keys such as _target_ are hydra's."""
    values: Values = {}
    known = (*table["keys"], *table["recorded"])
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key.startswith("_"):
            continue
        is_value = name in table["keys"] or not isinstance(value, dict)
        if not value and value in (None, {}) and any(key.startswith(f"{name}.") for key in known):
            continue  # a section without keys
        if is_value or not value:
            values[name] = value
        else:
            values |= _flat(value, f"{name}.", table)
    return values


# ----------------------------------------------------------------------------------------- overrides, interpolations


def assigned(words: Sequence[str]) -> Values:
    """The values of words key=value, each as yaml reads it, and ${...} for `resolved`."""
    values: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{shortened(word)}: expected key=value")
        if text.startswith("{"):  # hydra's {a:1}
            text = re.sub(r"(?<=[{,])(\w+):(?=\S)", r"\1: ", text)
        if "`" in text or re.search(r"\$(?!\{[\w.]*[.:])", text):
            values[name.lstrip("+")] = Unread(text)
        elif "${" in text:
            values[name.lstrip("+")] = text
        else:
            values[name.lstrip("+")] = parse_yaml(text, shortened(word))
    return values


def resolved(values: Values, defaults: Mapping[str, Any]) -> Values:
    """The values, with OmegaConf's ${key}, ${.sibling}, ${oc.env:NAME,default} and ${oc.select:key,default} put in."""
    return {key: _Interpolation(values, defaults).value_or_text(key, value) for key, value in values.items()}


class _Interpolation:
    """The value of one key, whose interpolations it follows."""

    def __init__(self, values: Values, defaults: Mapping[str, Any]):
        self.values, self.defaults = values, defaults
        self.steps = 0

    def value_or_text(self, key: str, value: Any) -> Any:
        if isinstance(value, Unread):
            return value
        try:
            return self._value(key, value, 0)
        except (LookupError, ValueError):
            return Unread(value if isinstance(value, str) else text_of(value))

    def _value(self, key: str, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise LookupError(f"{key}: a circle")
        if isinstance(value, list):
            return [self._value(key, item, depth + 1) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        while isinstance(value, str) and (match := re.search(r"\$\{([^${}]*)\}", value)):
            found = self._look_up(key, match[1].strip(), depth)
            value = found if match[0] == value else f"{value[: match.start()]}{found}{value[match.end() :]}"
            self.steps += 1
            if self.steps > MAX_STEPS or len(str(value)) > MAX_LENGTH:
                raise LookupError(f"{key}: too long")
        if isinstance(value, str) and "${" in value:
            raise LookupError(f"{key}: not closed")
        return yaml_text.typed(value)

    def _look_up(self, key: str, inner: str, depth: int) -> Any:
        kind, _, argument = inner.rpartition(":")
        name, comma, default = argument.partition(",")
        if kind == "oc.env":
            places: Mapping[str, Any] = os.environ
        elif kind == "oc.select" and comma:
            places = self.values
        elif kind in ("", "oc.select"):
            places = ChainMap(self.values, dict(self.defaults))
        else:
            raise LookupError(inner)
        num_dots = len(name) - len(name.lstrip("."))
        if num_dots:
            name = ".".join([*key.split(".")[:-num_dots], name[num_dots:]])
        if comma and name not in places:
            return yaml_text.typed(default.strip())
        return self._value(name, places[name], depth + 1)
