"""Yaml files and `key.sub=value` overrides -> Config; Config -> yaml.

A mistake is a `ConfigError` that names the place, the full key, the value and the fix. This file reads yaml files and
nothing else: preflight.py looks for the data and the model, config_check.py whether values fit each other.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from config import Config, ConfigError, DataError, shortened
from hf.files import open_regular
from run import config_keys as keys
from run import config_nemo, config_yaml
from run.config_keys import FIELDS, FREE, LISTS, SECTIONS
from run.config_yaml import NULL, described

MAX_FILES = 100  # of a config with its defaults
MAX_REFERENCE_CHARS = 10_000  # of a value with ${...} in it
_NUMBER = r"\d+(?:\.\d*)?"
_Entry = tuple[str, yaml.Node, str]  # full key, what is written for it, the place


@dataclass(frozen=True, slots=True)
class _Reference:
    """A value with `${...}` in it, which is read when all others are known."""

    text: str
    where: str


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a yaml file, over the files its `defaults:` names and under `key.sub=value` overrides.

    The last to set a key wins; a list is one value. Raises ConfigError. `config_check.validate` judges the values.
    """
    sizes: list[int] = []
    entries = _read_file(Path(path), (), sizes)
    if sum(map(len, overrides)) > config_yaml.MAX_BYTES:
        raise ConfigError(f"command line {shortened(max(overrides, key=len))}: too long; write it into a file")
    for override in overrides:
        entries += _read_override(override)
    values: dict[str, Any] = {}
    without_effect: set[str] = set()  # rows of config_nemo.NO_EFFECT
    for name, node, where in entries:
        if section := _emptied_section(name, node, where):
            values = {key: value for key, value in values.items() if not key.startswith(f"{section}.")}
        elif free := next((free for free in FREE if name.startswith(f"{free}.")), None):
            _set_free_key(values.setdefault(free, {}), free, name, node, where)
        elif (row := config_nemo.no_effect(keys.plain_name(name), node, where)) is None:
            values[keys.numbered_name(name)] = _value(name, node, where)
        else:
            without_effect |= {row} - {""}
            values[keys.numbered_name(name)] = node.value  # other keys may refer to it
    values = {name: _resolve(name, value, values) for name, value in values.items()}
    if without_effect and os.environ.get("RANK", "0") == "0":
        print(config_nemo.warning(without_effect), file=sys.stderr)
    return _build(Config(), "", values)


def _read_file(path: Path, parents: tuple[Path, ...], sizes: list[int]) -> list[_Entry]:
    """The entries of a file after those of its defaults. `parents`: the files whose defaults led here. `sizes`: those
    of all files read so far, in bytes."""
    try:
        with open_regular(path) as file:
            text = file.read(config_yaml.MAX_BYTES + 1) or b""
    except DataError as error:
        named = f" (named by the defaults of {parents[-1]})" if parents else ""
        files = ", ".join(sorted(map(str, path.parent.glob("*.yaml")))) if os.path.isdir(path.parent) else ""
        raise ConfigError(f"{error}{named}; yaml files there: {files or 'none'}") from None
    if os.path.realpath(path) in map(os.path.realpath, parents):
        raise ConfigError(f"{path}: defaults go in a circle: {' -> '.join(map(str, (*parents, path)))}")
    sizes.append(len(text))
    if sum(sizes) > config_yaml.MAX_BYTES or len(sizes) > MAX_FILES:
        limit = f"{config_yaml.MAX_BYTES >> 10} KiB and {MAX_FILES} files"
        raise ConfigError(f"{path}: a config with all its defaults has at most {limit}")
    root = config_yaml.compose(text, str(path))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected sections of keys, as in 'grpo: {{seed: 1}}', got {described(root)}")
    below: list[_Entry] = []
    entries: list[_Entry] = []
    for name, node, where in _leaves(root, "", path):
        if name != "defaults":
            entries.append((name, node, where))
            continue
        for default in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(default, yaml.ScalarNode) or not default.value:
                raise ConfigError(f"{where}: defaults: expected a file or a list of files, got {described(default)}")
            below += _read_file(path.parent / default.value, (*parents, path), sizes)
    # What empties a section comes first, wherever in the file it is.
    return below + sorted(entries, key=lambda entry: _emptied_section(*entry) is None)


def _read_override(override: str) -> list[_Entry]:
    """The entries of `key.sub=value`, whose value is the text as typed, whatever yaml sees in "no", "a: b" or "[x]"."""
    where = f"command line {shortened(override)}"
    config_yaml.check(yaml.ScalarNode(f"{config_yaml.TAG}str", override), where)
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"{where}: expected key.sub=value, as in grpo.seed=1")
    is_list = name in FIELDS and name not in LISTS and get_origin(keys.split_optional(FIELDS[name].type)[0]) is tuple
    node = config_yaml.compose(text, where) if is_list or name in FREE else config_yaml.scalar(text)
    return list(config_nemo.rewrite(name, node, where))


def _emptied_section(name: str, node: yaml.Node, where: str) -> str | None:
    """The section of which an entry drops all values set before: a list of sections is one value, and NeMo RL's
    `_override_: true` asks for it."""
    if name in LISTS and (node.tag == NULL or isinstance(node, yaml.SequenceNode)):
        return name
    section, _, last = name.rpartition(".")
    if last != "_override_" or section not in SECTIONS:
        return None
    if node.value != "true":
        raise ConfigError(f"{where}: {name}: expected true, got {described(node)}")
    return section


def _set_free_key(mapping: dict[str, Any], free: str, name: str, node: yaml.Node, where: str) -> None:
    """Sets one more key of the mapping at key `free`: `name`, such as env.custom.my.envs:Class.key."""
    key = name.removeprefix(f"{free}.")
    env_name, _, argument = key.rpartition(".")
    if free == "env.custom" and env_name:
        mapping.setdefault(env_name, {})[argument] = _typed(name, node, Any, where)
    else:
        mapping[key] = _typed(name, node, get_args(FIELDS[free].type)[1], where)


def _resolve(name: str, value: Any, values: dict[str, Any]) -> Any:
    """The value of a key whose text may have `${key}`, `${.sibling}` and `${mul: a, b}` in it."""
    if not isinstance(value, _Reference):
        return value
    place, text = f"{value.where}: {name}", value.text

    def look_up(match: re.Match) -> str:
        inner = match[1].strip()
        if ":" in inner:
            if not re.fullmatch(rf"mul\s*:\s*{_NUMBER}(\s*,\s*{_NUMBER})*", inner):
                raise ConfigError(f"{place}: ${{{inner}}}: only keys, and mul of numbers, are understood")
            return f"{math.prod(map(float, re.findall(_NUMBER, inner))):.17g}"
        other = f"{name.rpartition('.')[0]}{inner}" if inner.startswith(".") else inner
        found = values.get(keys.numbered_name(other), FIELDS[other].default if other in FIELDS else MISSING)
        if found is MISSING or other in SECTIONS or isinstance(found, (tuple, list, dict)):
            raise ConfigError(f"{place}: ${{{other}}} is not the name of a key with one value")
        found = found.text if isinstance(found, _Reference) else found
        found = found if isinstance(found, str) else json.dumps(found)
        return found[: MAX_REFERENCE_CHARS + 1]  # a longer one is refused below

    for _ in range(20):
        if len(text) > MAX_REFERENCE_CHARS:
            break
        if "${" not in text:
            return _value(name, config_yaml.scalar(text), value.where)
        text = re.sub(r"\$\{([^${}]*)\}", look_up, text)
    raise ConfigError(f"{place}: ${{...}} goes in a circle, is too deep or long, or is not closed")


def _leaves(node: yaml.Node, prefix: str, path: Path) -> Iterator[_Entry]:
    """The entries of all below a mapping that is no section."""
    for key_node, child in node.value:
        where = f"{path} line {key_node.start_mark.line + 1}"
        name = prefix + key_node.value
        if isinstance(child, yaml.MappingNode) and (name in SECTIONS or config_nemo.is_section(name)):
            yield from _leaves(child, f"{name}.", path)
            continue
        for i, item in enumerate(child.value if name in LISTS and isinstance(child, yaml.SequenceNode) else ()):
            if not isinstance(item, yaml.MappingNode):
                raise ConfigError(f"{where}: {name}: expected a list of mappings, got {described(item)} in it")
            if not item.value:
                raise ConfigError(f"{where}: {name}: entry {i + 1} is empty")
            yield from _leaves(item, f"{name}.{i}.", path)
        yield from config_nemo.rewrite(name, child, where)


def _value(name: str, node: yaml.Node, where: str) -> Any:
    """The value of a key. Every unknown key and wrong type ends here."""
    plain = keys.plain_name(name)
    if plain not in FIELDS:
        raise ConfigError(f"{where}: {keys.unknown_key(plain)}")
    if plain in SECTIONS:
        raise ConfigError(f"{where}: {name} is a section, got {described(node)}; set its keys: {keys.keys_of(plain)}")
    if isinstance(node, yaml.ScalarNode) and "${" in node.value and plain not in FREE:
        return _Reference(node.value, where)
    return _typed(name, node, FIELDS[plain].type, where)


def _typed(name: str, node: yaml.Node, kind: Any, where: str) -> Any:
    """The value of a key as one of type `kind`; of a mapping, each of its values."""
    base, _ = keys.split_optional(kind)
    if base is Any:
        return config_yaml.plain_value(node, f"{where}: {name}")
    if get_origin(base) is Mapping and (node.tag == NULL or isinstance(node, yaml.MappingNode)):
        pairs = node.value if node.tag != NULL else ()
        return {key.value: _typed(f"{name}.{key.value}", value, get_args(base)[1], where) for key, value in pairs}
    plain = keys.plain_name(name)
    try:
        if plain not in FIELDS and not isinstance(config_yaml.plain_value(node, f"{where}: {name}"), str):
            raise ValueError  # a text that a user names is not read as one where yaml sees a number or true
        return _read(node, kind)
    except ValueError:
        default = f"; the default is {keys.default_text(plain)}" if plain in FIELDS else ""
        expected = f"expected {keys.type_name(kind)}, got {described(node)}"
        raise ConfigError(f"{where}: {name}: {expected}{default}") from None


def _read(node: yaml.Node, kind: Any) -> Any:
    """A node as text, number, true, false, null or a list of those. ValueError if it is none of the type `kind`."""
    base, optional = keys.split_optional(kind)
    if optional and node.tag == NULL:
        return None
    if get_origin(base) is tuple and isinstance(node, yaml.SequenceNode):
        kinds = get_args(base)
        kinds = kinds[:1] * len(node.value) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(item, item_kind) for item, item_kind in zip(node.value, kinds, strict=True))
    text = node.value
    if not isinstance(node, yaml.ScalarNode) or node.tag == NULL:
        raise ValueError
    if base is str or (get_origin(base) is Literal and text in get_args(base)):
        return text
    if base is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if base is int:
        return int(text)
    if base is float and math.isfinite(float(text)):
        return float(text)
    raise ValueError


def _build(section: Any, prefix: str, values: dict[str, Any]) -> Any:
    """A section with the values of its keys in place of its own. `prefix`: its full name and a dot."""
    changes = {}
    for f in fields(section):
        name = prefix + f.name
        if name in LISTS:  # a key that an item does not set has the value of the same key below `default`
            default = _build(section.default, f"{prefix}default.", values)
            numbers = {int(key.split(".")[name.count(".") + 1]) for key in values if key.startswith(f"{name}.")}
            if missing := set(range(len(numbers))) - numbers:
                raise ConfigError(f"{name}.{max(numbers)} is set, but not {name}.{min(missing)}: leave out no number")
            changes[f.name] = tuple(_build(default, f"{name}.{i}.", values) for i in range(len(numbers)))
        elif is_dataclass(f.type):
            changes[f.name] = _build(getattr(section, f.name), f"{name}.", values)
        elif name in values:
            changes[f.name] = values[name]
    return replace(section, **changes)


def to_yaml(cfg: Config) -> str:
    """The whole config as yaml that `load` reads back to an equal one."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)
