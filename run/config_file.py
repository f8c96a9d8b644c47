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

from config import Config, ConfigError
from run import config_keys as keys
from run import config_nemo
from run.config_keys import FIELDS, FREE, LISTS, SECTIONS

_TAG = "tag:yaml.org,2002:"  # the tags of yaml's own types start with it
_NULL = config_nemo.NULL
_NUMBER = r"\d+(?:\.\d*)?"
_Entry = tuple[str, yaml.Node, str]  # full key, what is written for it, the place


@dataclass(frozen=True, slots=True)
class _Reference:
    """A value with `${...}` in it, which is read when all others are known."""

    text: str
    where: str


# Values come from yaml's node tree, not from the objects PyYAML makes of it: it takes `1e-6` for a string,
# `no` for False and the last of two equal keys. A node has text and line; the field says what the text is.


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a yaml file, over the files its `defaults:` names and under `key.sub=value` overrides.

    The last to set a key wins; a list is one value. Raises ConfigError. `config_check.validate` judges the values.
    """
    entries = _read_file(Path(path), ())
    for override in overrides:
        entries += _read_override(override)
    values: dict[str, Any] = {}
    without_effect: set[str] = set()  # rows of config_nemo.NO_EFFECT
    for name, node, where in entries:
        if section := _emptied_section(name, node, where):
            values = {key: value for key, value in values.items() if not key.startswith(f"{section}.")}
        elif free := next((free for free in FREE if name.startswith(f"{free}.")), None):
            values[free] = _with_free_key(values.get(free) or {}, free, name, node, where)
        elif (row := config_nemo.no_effect(keys.plain_name(name), node, where)) is None:
            values[keys.numbered_name(name)] = _value(name, node, where)
        else:
            without_effect |= {row} - {""}
            values[name] = node.value  # other keys may refer to it
    values = {name: _resolve(name, value, values) for name, value in values.items()}
    if without_effect and os.environ.get("RANK", "0") == "0":
        print(config_nemo.warning(without_effect), file=sys.stderr)
    return _build(Config(), "", values)


def _read_file(path: Path, parents: tuple[Path, ...]) -> list[_Entry]:
    """The entries of a file after those of its defaults. `parents`: the files whose defaults led here."""
    if path.resolve() in [parent.resolve() for parent in parents]:
        raise ConfigError(f"{path}: defaults go in a circle: {' -> '.join(map(str, (*parents, path)))}")
    try:
        root = _compose(path.read_bytes(), str(path))
    except OSError as error:
        named = f" (named by the defaults of {parents[-1]})" if parents else ""
        files = ", ".join(sorted(map(str, path.parent.glob("*.yaml")))) or "none"
        raise ConfigError(f"{path}: {error.strerror}{named}; yaml files there: {files}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected sections of keys, as in 'grpo: {{seed: 1}}', got {_got(root)}")
    below: list[_Entry] = []
    entries: list[_Entry] = []
    for name, node, where in _leaves(root, "", path, {}):
        if name != "defaults":
            entries.append((name, node, where))
            continue
        for default in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(default, yaml.ScalarNode) or not default.value:
                raise ConfigError(f"{where}: defaults: expected a file or a list of files, got {_got(default)}")
            below += _read_file(path.parent / default.value, (*parents, path))
    # What empties a section comes first, wherever in the file it is.
    return below + sorted(entries, key=lambda entry: _emptied_section(*entry) is None)


def _read_override(override: str) -> list[_Entry]:
    """The entries of `key.sub=value`, whose value is the text as typed, whatever yaml sees in "no", "a: b" or "[x]"."""
    where = f"command line {override!r}"
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"{where}: expected key.sub=value, as in grpo.seed=1")
    is_list = name in FIELDS and name not in LISTS and get_origin(keys.split_optional(FIELDS[name].type)[0]) is tuple
    node = _compose(text, where) if is_list or name in FREE else config_nemo.scalar(text)
    return list(config_nemo.rewrite(name, node, where))


def _emptied_section(name: str, node: yaml.Node, where: str) -> str | None:
    """The section of which an entry drops all values set before: a list of sections is one value, and NeMo RL's
    `_override_: true` asks for it."""
    if name in LISTS and (node.tag == _NULL or isinstance(node, yaml.SequenceNode)):
        return name
    section, _, last = name.rpartition(".")
    if last != "_override_" or section not in SECTIONS:
        return None
    if node.value != "true":
        raise ConfigError(f"{where}: {name}: expected true, got {_got(node)}")
    return section


def _with_free_key(mapping: dict[str, Any], free: str, name: str, node: yaml.Node, where: str) -> dict[str, Any]:
    """The mapping at key `free` with one more key, `name`, such as env.custom.my.envs:Class.key."""
    key = name.removeprefix(f"{free}.")
    env_name, _, argument = key.rpartition(".") if free == "env.custom" else ("", "", key)
    try:
        value = {argument: _free(node)}
        mapping = mapping | ({env_name: mapping.get(env_name, {}) | value} if env_name else value)
        return _checked_values(mapping, FIELDS[free].type)
    except ValueError:
        raise ConfigError(f"{where}: {name}: got {_got(node)}, which {free} cannot hold") from None


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
        if isinstance(found, _Reference):
            return found.text
        return found if isinstance(found, str) else json.dumps(found)

    for _ in range(20):
        text = re.sub(r"\$\{([^${}]*)\}", look_up, text)
        if "${" not in text:
            return _value(name, config_nemo.scalar(text), value.where)
    raise ConfigError(f"{place}: ${{...}} goes in a circle, is too deep or is not closed")


def _compose(text: str | bytes, where: str) -> yaml.Node:
    """Yaml text -> its node tree, with no object made of it. Empty text is null."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader) or yaml.ScalarNode(_NULL, "")
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{where} line {error.problem_mark.line + 1}: not yaml: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not yaml: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a config") from None


def _leaves(node: yaml.Node, prefix: str, path: Path, lines: dict[str, int]) -> Iterator[tuple[str, yaml.Node, str]]:
    """(full key, node, place) of all below a mapping that is no section. `lines`: keys seen -> their line."""
    for key_node, child in node.value:
        line = key_node.start_mark.line + 1
        where = f"{path} line {line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: expected the name of a key, got {_got(key_node)}")
        name = prefix + key_node.value
        if name in lines:
            raise ConfigError(f"{where}: {name} is set again, first in line {lines[name]}; remove one")
        lines[name] = line
        if isinstance(child, yaml.MappingNode) and (name in SECTIONS or config_nemo.is_section(name)):
            yield from _leaves(child, f"{name}.", path, lines)
            continue
        for i, item in enumerate(child.value if name in LISTS and isinstance(child, yaml.SequenceNode) else ()):
            if not isinstance(item, yaml.MappingNode):
                raise ConfigError(f"{where}: {name}: expected a list of mappings, got {_got(item)} in it")
            if not item.value:
                raise ConfigError(f"{where}: {name}: entry {i + 1} is empty")
            yield from _leaves(item, f"{name}.{i}.", path, lines)
        yield from config_nemo.rewrite(name, child, where)


def _value(name: str, node: yaml.Node, where: str) -> Any:
    """The value of a key. Every unknown key and wrong type ends here."""
    plain = keys.plain_name(name)
    if plain not in FIELDS:
        raise ConfigError(f"{where}: {keys.unknown_key(plain)}")
    if plain in SECTIONS:
        raise ConfigError(f"{where}: {name} is a section, got {_got(node)}; set its keys: {keys.keys_of(plain)}")
    if isinstance(node, yaml.ScalarNode) and "${" in node.value and plain not in FREE:
        return _Reference(node.value, where)
    kind = FIELDS[plain].type
    try:
        return _read(node, kind)
    except ValueError:
        expected = f"expected {keys.type_name(kind)}, got {_got(node)}"
        raise ConfigError(f"{where}: {name}: {expected}; the default is {keys.default_text(plain)}") from None


def _read(node: yaml.Node, kind: Any) -> Any:
    """A node as a value of a field's type. ValueError if it is none."""
    base, optional = keys.split_optional(kind)
    if optional and node.tag == _NULL:
        return None
    if get_origin(base) is tuple and isinstance(node, yaml.SequenceNode):
        kinds = get_args(base)
        kinds = kinds[:1] * len(node.value) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(item, item_kind) for item, item_kind in zip(node.value, kinds, strict=True))
    if get_origin(base) is Mapping and (node.tag == _NULL or isinstance(node, yaml.MappingNode)):
        return _checked_values(_free(node) or {}, base)
    text = node.value
    if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL or not node.tag.startswith(_TAG):
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


def _checked_values(mapping: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The mapping, if its values are of the type that `kind`, a Mapping, gives them; else ValueError."""
    inner = get_args(kind)[1]
    if inner is not Any and not all(isinstance(value, get_origin(inner) or inner) for value in mapping.values()):
        raise ValueError
    return mapping


def _free(node: yaml.Node) -> Any:
    """A node as yaml means it, except that 1e-6 is a number, not text. ValueError if it has a tag of the user's."""
    if isinstance(node, yaml.MappingNode):
        return {str(_free(key)): _free(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_free(item) for item in node.value]
    if node.style is None and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", node.value):
        return float(node.value)
    try:
        return yaml.SafeLoader("").construct_object(node)
    except yaml.YAMLError:
        raise ValueError from None


def _got(node: yaml.Node) -> str:
    """What was written, and what yaml takes it for."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(_got(i) if isinstance(i, yaml.ScalarNode) else '...' for i in node.value)}]"
    tag = node.tag.removeprefix(_TAG)
    return {"map": "a mapping", "null": "null"}.get(tag, f"{node.value!r} ({tag})")


def _build(section: Any, prefix: str, values: dict[str, Any]) -> Any:
    """A section with the values of its keys in place of its own. `prefix`: its full name and a dot."""
    changes = {}
    for f in fields(section):
        name = prefix + f.name
        if name in LISTS:  # a key that an item does not set has the value of the same key below `default`
            default = _build(section.default, f"{prefix}default.", values)
            numbers = [int(key.split(".")[name.count(".") + 1]) for key in values if key.startswith(f"{name}.")]
            indices = range(max(numbers, default=-1) + 1)
            changes[f.name] = tuple(_build(default, f"{name}.{i}.", values) for i in indices)
        elif is_dataclass(f.type):
            changes[f.name] = _build(getattr(section, f.name), f"{name}.", values)
        elif name in values:
            changes[f.name] = values[name]
    return replace(section, **changes)


def to_yaml(cfg: Config) -> str:
    """The whole config as yaml that `load` reads back to an equal one."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)
