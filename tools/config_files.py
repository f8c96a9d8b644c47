"""The files that TRL and verl write -> {their key: value}: yaml, and TRL's json.

They are what the systems have resolved themselves. Scripts are not read: each system has one command that writes its
config (`way_out` in from_trl.yaml and from_verl.yaml).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from base.inputs import yaml_text
from base.inputs.keys import text_of
from base.inputs.references import replaced
from config import ConfigError, shortened
from tools.translation import Values

Table = dict[str, Any]  # of a system: `convert.load_table`

MAX_KEYS = 3_000  # of a file; verl has about 900
SUFFIXES = (".json", ".yaml", ".yml")


def read(system: str, name: str, table: Table) -> Values:
    """The values in a file. Raises ConfigError."""
    if Path(name).suffix not in SUFFIXES:
        raise ConfigError(f"{name}: expected a file in yaml or json: {table['way_out']}")
    text = yaml_text.read_yaml(name)
    if name.endswith(".json"):
        tree = parse_json(text, name)
    else:
        tree = parse_yaml(text, name)
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: expected a mapping of keys: {table['way_out']}")
    for key, program in table["others"].items():
        if key in tree:
            problem = f"written by {program}, as its key {key} tells"
            raise ConfigError(f"{name}: {problem}; expected the config of {table['program']}")
    if system == "trl":
        values = _read_trl(tree, name, table)
    else:
        values = _read_verl(tree, name, table)
    if len(values) > MAX_KEYS:
        raise ConfigError(f"{name}: {len(values):,} keys: a config has at most {MAX_KEYS:,}")
    return values


def _read_trl(tree: Values, name: str, table: Table) -> Values:
    for section, value in tree.items():
        if isinstance(value, dict) and value.keys() & table["keys"].keys():
            problem = f"TRL's keys are in a section, {shortened(section)}; expected them not in sections"
            raise ConfigError(f"{name}: {problem}: {table['way_out']}")
    return tree


def _read_verl(tree: Values, name: str, table: Table) -> Values:
    if "defaults" in tree:
        raise ConfigError(f"{name}: hydra has yet to put the files of its `defaults` in: {table['way_out']}")
    if "actor_rollout_ref" not in tree:
        problem = f"no section actor_rollout_ref, which the config of {table['program']} has"
        raise ConfigError(f"{name}: {problem}: {table['way_out']}")
    return _flat(tree, "", table)


def _flat(tree: Values, prefix: str, table: Table) -> Values:
    """Full key -> value of everything in a tree that is no section. `hydra` and keys such as _target_ are hydra's."""
    values: Values = {}
    known = (*table["keys"], *table["recorded"])
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name == "hydra" or key.startswith("_"):
            continue
        is_section = any(row.startswith(f"{name}.") for row in known)
        if is_section and value in (None, {}):
            continue
        if isinstance(value, dict) and value and name not in table["keys"]:
            values |= _flat(value, f"{name}.", table)
        else:
            values[name] = value
    return values


# --------------------------------------------------------------------------------------------------------------- text


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The value of a yaml text. ConfigError, beginning with `where`, also for one that is too large or too deep."""
    return yaml_text.Document(text, where, lambda name: True).value


def parse_json(text: bytes, where: str) -> Any:
    """The value of a JSON text. ConfigError, beginning with `where`, also for one that is too deep."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from None
    _check_depth(value, where, 0)
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> Values:
    values: Values = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{shortened(key)} is there twice")
        values[key] = value
    return values


def _check_depth(value: Any, where: str, depth: int) -> None:
    if depth > yaml_text.MAX_DEPTH:
        raise ConfigError(f"{where}: more than {yaml_text.MAX_DEPTH} levels deep")
    children = []
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list):
        children = value
    for child in children:
        _check_depth(child, where, depth + 1)


def assigned(words: Sequence[str]) -> Values:
    """The values of words key=value, each as yaml reads it."""
    values: Values = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"{shortened(word)}: expected key=value")
        values[key] = parse_yaml(text, shortened(word))
    return values


# --------------------------------------------------------------------------------------------------------- references


def resolved(values: Values) -> Values:
    """The values of verl, with hydra's ${other.key} replaced by the value of that key, but not a ${...} within it."""
    found: Values = {}
    for key, value in values.items():
        if isinstance(value, str):
            value = replaced(value, lambda reference: values.get(reference, f"${{{reference}}}"))
        found[key] = value
    return found


def has_reference(value: Any) -> bool:
    """Whether `resolved` has left a ${...}, whose value only hydra knows."""
    return "${" in text_of(value)
