"""Yaml files and `key.sub=value` overrides -> Config; Config -> yaml and the text of --help.

A mistake is a `ConfigError` that names the place, the full key, the value and the fix. Reads yaml files and nothing
else: whether data and model exist is for data.py to say, whether values fit each other for config_check.py.
"""

import difflib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from config import FIELDS, LISTS, SECTIONS, Config, ConfigError, section_class
from run import config_nemo

_TAG = "tag:yaml.org,2002:"  # the tags of yaml's own types start with it
# Keys whose value is a mapping of any keys.
_FREE = {name for name, f in FIELDS.items() if get_origin(f.type) is Mapping}


@dataclass(frozen=True, slots=True)
class _Reference:
    """A value with `${...}` in it, read when all others are known."""

    text: str
    where: str


# Values come from yaml's node tree, not from the objects PyYAML makes of it: it takes `1e-6` for a string,
# `no` for False and the last of two equal keys. A node has text and line; the field says what the text is.


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a yaml file, over the files its `defaults:` names and under `key.sub=value` overrides.

    The last to set a key wins; a list is one value. Raises ConfigError. What the values say is `validate`'s.
    """
    passed_over: dict[str, None] = {}
    values = _read_file(Path(path), (), passed_over)
    for override in overrides:
        where = f"command line {override!r}"
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{where}: expected key.sub=value, as in grpo.seed=1")
        free = next((free for free in _FREE if name.startswith(f"{free}.")), None)
        if name in LISTS and text == "null":
            values = _without(values, name)
        elif free:
            value = _free(config_nemo.scalar(text))
            *outer, last = name.removeprefix(f"{free}.").rsplit(".", 1 if free == "env.custom" else 0)
            inner = values.get(free) or {}
            entry = {last: value} if not outer else {outer[0]: inner.get(outer[0], {}) | {last: value}}
            values[free] = inner | entry
        else:
            is_tree = name in _FREE or (name in FIELDS and get_origin(_split(FIELDS[name].type)[0]) is tuple)
            # the text as typed, whatever yaml would see in "no", "a: b" or "[x]"
            node = _compose(text, where) if is_tree and name not in SECTIONS else config_nemo.scalar(text)
            for entry in config_nemo.rewrite(name, node, where):
                values |= _entry(*entry, passed_over)
    values = {name: _resolve(name, value, values) for name, value in values.items()}
    if passed_over and os.environ.get("RANK", "0") == "0":
        print(f"warning: keys of NeMo RL that mean nothing here: {', '.join(passed_over)}", file=sys.stderr)
    return _build(Config, "", values)


def _read_file(path: Path, parents: tuple[Path, ...], passed_over: dict[str, None]) -> dict[str, Any]:
    """Full key -> value of a file over its defaults. `parents`: the files whose defaults led here. Adds to passed_over
    the keys of NeMo RL that mean nothing here."""
    if path.resolve() in [parent.resolve() for parent in parents]:
        raise ConfigError(f"{path}: defaults go in a circle: {' -> '.join(map(str, (*parents, path)))}")
    try:
        root = _compose(path.read_bytes(), str(path))
    except OSError as error:
        named = f" (named by the defaults of {parents[-1]})" if parents else ""
        there = ", ".join(sorted(map(str, path.parent.glob("*.yaml")))) or "none"
        raise ConfigError(f"{path}: {error.strerror}{named}; yaml files there: {there}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected sections of keys, as in 'grpo: {{seed: 1}}', got {_got(root)}")
    below, own = {}, {}
    for name, node, where in _leaves(root, "", path, {}):
        section, _, last = name.rpartition(".")
        is_null = node.tag == _TAG + "null"
        if name in LISTS and (is_null or isinstance(node, yaml.SequenceNode)):
            below = _without(below, name)  # one value: nothing of what it replaces stays
            continue
        if last == "_override_" and section in SECTIONS:
            if node.value != "true":
                raise ConfigError(f"{where}: {name}: expected true, got {_got(node)}")
            below = _without(below, section)
            continue
        if name != "defaults":
            own |= _entry(name, node, where, passed_over)
            continue
        for entry in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(entry, yaml.ScalarNode) or not entry.value:
                raise ConfigError(f"{where}: defaults: expected a file or a list of files, got {_got(entry)}")
            below |= _read_file(path.parent / entry.value, (*parents, path), passed_over)
    return below | own


def _entry(name: str, node: yaml.Node, where: str, passed_over: dict[str, None]) -> dict[str, Any]:
    """{full key: value}. The text of a key that is passed over stays too: another may refer to it."""
    plain = _plain(name)
    row = None if plain in FIELDS else config_nemo.passed_over(plain, node, where)
    if row is None:
        return {_numbered(name): _value(name, node, where)}
    if row:
        passed_over[row] = None
    return {name: node.value} if isinstance(node, yaml.ScalarNode) else {}


def _without(values: dict[str, Any], section: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith(f"{section}.")}


def _plain(name: str) -> str:
    """A key without the numbers of lists."""
    return re.sub(r"\.\d+(?=\.|$)", "", name)


def _resolve(name: str, value: Any, values: dict[str, Any]) -> Any:
    """The value of a key whose text refers to others."""
    if not isinstance(value, _Reference):
        return value

    def look_up(other: str) -> str:
        found = values.get(_numbered(other), FIELDS[other].default if other in FIELDS else MISSING)
        if found is MISSING or other in SECTIONS or isinstance(found, (tuple, dict)):
            raise ConfigError(f"{value.where}: {name}: ${{{other}}} is not the name of a key with one value")
        return found.text if isinstance(found, _Reference) else found if isinstance(found, str) else json.dumps(found)

    text = config_nemo.interpolate(name, value.text, value.where, look_up)
    return _value(name, config_nemo.scalar(text), value.where)


def _numbered(name: str) -> str:
    """`data.validation.x` -> `data.validation.0.x`: a list of sections may be written as its only one."""
    for section in LISTS:
        rest = name.removeprefix(f"{section}.")
        if rest != name and not rest.partition(".")[0].isdigit():
            return f"{section}.0.{rest}"
    return name


def _compose(text: str | bytes, where: str) -> yaml.Node:
    """Yaml text -> its node tree, with no object made of it. Empty text is null."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader) or yaml.ScalarNode(_TAG + "null", "")
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
        if name in SECTIONS and isinstance(child, yaml.MappingNode):
            yield from _leaves(child, f"{name}.", path, lines)
            continue
        for i, item in enumerate(child.value if name in LISTS and isinstance(child, yaml.SequenceNode) else ()):
            if not isinstance(item, yaml.MappingNode):
                raise ConfigError(f"{where}: {name}: expected a list of mappings, got {_got(item)} in it")
            if not item.value:
                raise ConfigError(f"{where}: {name}: entry {i + 1} is empty")
            yield from _leaves(item, f"{name}.{i}.", path, lines)
        is_tree = isinstance(child, yaml.MappingNode) and name not in FIELDS
        if is_tree and config_nemo.is_section(name):
            yield from _leaves(child, f"{name}.", path, lines)
            continue
        yield from config_nemo.rewrite(name, child, where)


def _value(name: str, node: yaml.Node, where: str) -> Any:
    """The value of a key. Every unknown key and wrong type ends here."""
    plain = _plain(name)
    if plain not in FIELDS:
        raise ConfigError(f"{where}: {_unknown(plain)}")
    if plain in SECTIONS:
        raise ConfigError(f"{where}: {name} is a section, got {_got(node)}; set its keys: {SECTIONS[plain]}")
    f = FIELDS[plain]
    if isinstance(node, yaml.ScalarNode) and "${" in node.value and plain not in _FREE:
        return _Reference(node.value, where)
    try:
        return _read(node, f.type)
    except ValueError:
        expected = f"expected {_type_name(f.type)}, got {_got(node)}"
        raise ConfigError(f"{where}: {name}: {expected}; the default is {json.dumps(_default(f))}") from None


def _read(node: yaml.Node, kind: Any) -> Any:
    """A node as a value of a field's type. ValueError where it is none."""
    base, optional = _split(kind)
    if optional and node.tag == _TAG + "null":
        return None
    if get_origin(base) is tuple and isinstance(node, yaml.SequenceNode):
        kinds = get_args(base)
        kinds = kinds[:1] * len(node.value) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(item, item_kind) for item, item_kind in zip(node.value, kinds, strict=True))
    if get_origin(base) is Mapping and (node.tag == _TAG + "null" or isinstance(node, yaml.MappingNode)):
        found, inner = _free(node) or {}, get_args(base)[1]
        if inner is not Any and not all(isinstance(value, get_origin(inner) or inner) for value in found.values()):
            raise ValueError
        return found
    text = node.value
    if not isinstance(node, yaml.ScalarNode) or node.tag == _TAG + "null" or not node.tag.startswith(_TAG):
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


def _free(node: yaml.Node) -> Any:
    """A node as yaml means it, but for numbers like 1e-6, which PyYAML takes for text."""
    if isinstance(node, yaml.MappingNode):
        return {str(_free(key)): _free(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_free(item) for item in node.value]
    if node.style is None and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", node.value):
        return float(node.value)
    try:
        return yaml.SafeLoader("").construct_object(node)
    except yaml.YAMLError:  # a tag of someone's own
        raise ValueError from None


def _default(f: Field) -> Any:
    return {} if f.default is MISSING else f.default


def _got(node: yaml.Node) -> str:
    """What was written, and what yaml takes it for."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(_got(i) if isinstance(i, yaml.ScalarNode) else '...' for i in node.value)}]"
    tag = node.tag.removeprefix(_TAG)
    return {"map": "a mapping", "null": "null"}.get(tag, f"{node.value!r} ({tag})")


def _unknown(name: str) -> str:
    """What to say of a key that does not exist: the key nearest by its last name, and the keys beside it."""
    last_names = {full: full.rpartition(".")[2] for full in FIELDS}
    last = difflib.get_close_matches(name.rpartition(".")[2], last_names.values(), n=1)
    namesakes = [full for full in FIELDS if last_names[full] in last]
    near = difflib.get_close_matches(name, namesakes, n=1, cutoff=0)
    section = name
    while section not in SECTIONS:
        section = section.rpartition(".")[0]
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"unknown key '{name}'.{hint} Keys of {section or 'a config'}: {SECTIONS[section]}"


def _split(kind: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); `X` -> (X, False)."""
    return (get_args(kind)[0], True) if NoneType in get_args(kind) else (kind, False)


def _build(cls: type, prefix: str, values: dict[str, Any]) -> Any:
    kwargs = {}
    for f in fields(cls):
        if prefix + f.name in LISTS:
            start = f"{prefix}{f.name}."
            numbers = [int(name.removeprefix(start).partition(".")[0]) for name in values if name.startswith(start)]
            items = range(max(numbers, default=-1) + 1)
            for i, item in ((i, item) for i in items for item in fields(section_class(f.type))):
                if f"{prefix}default.{item.name}" in values:
                    values.setdefault(f"{start}{i}.{item.name}", values[f"{prefix}default.{item.name}"])
            kwargs[f.name] = tuple(_build(section_class(f.type), f"{start}{i}.", values) for i in items)
        elif is_dataclass(f.type):
            kwargs[f.name] = _build(f.type, f"{prefix}{f.name}.", values)
        elif prefix + f.name in values:
            kwargs[f.name] = values[prefix + f.name]
    return cls(**kwargs)


def to_yaml(cfg: Config) -> str:
    """The whole config as yaml that `load` reads back to an equal one."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)


def help_text() -> str:
    """Every key with its type, bounds, default and meaning."""
    lines = []
    for name, f in FIELDS.items():
        if name not in SECTIONS:
            bounds = f" ({f.metadata['bounds']})" if f.metadata["bounds"] else ""
            lines.append(f"{name}: {_type_name(f.type)}{bounds} = {json.dumps(_default(f))}")
            lines.append(textwrap.indent(textwrap.fill(f.metadata["help"], 100), "    "))
    return "\n".join(lines) + "\n"


def _type_name(kind: Any) -> str:
    base, optional = _split(kind)
    names = {bool: "true or false", int: "int", float: "finite float", str: "str"}
    if get_origin(base) is Literal:
        name = " or ".join(get_args(base))
    else:
        name = "mapping" if get_origin(base) is Mapping else names.get(base) or str(base).replace("tuple", "list")
    return f"{name} or null" if optional else name
