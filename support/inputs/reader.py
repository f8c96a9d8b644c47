"""Yaml files and `key.sub=value` overrides -> Config; Config -> yaml.

A value stays the text that was written until the type of its key reads it: 1e-6 is a number, `no` may be a name, and
007 keeps its zeros. Only values of the user's own keys, such as env.custom, are what yaml makes of them. A mistake is a
ConfigError that names the place, the key, the value, and the fix. rules.py judges whether values fit each other.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from decimal import Decimal
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin

import yaml

from config import Config, ConfigError, DataError, shortened
from support.inputs import keys, nemo
from support.inputs.files import read_bytes
from support.inputs.keys import FIELDS, FREE, LISTS, SECTIONS

_TAG = "tag:yaml.org,2002:"
_NUMBER = r"\d+(?:\.\d*)?"
_Merged = dict[str, tuple[Any, str]]  # full key -> (value, place)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that 1e-6 is a number and that dates, <<, =, & and * are text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [row for row in rows if row[0].removeprefix(_TAG) not in ("timestamp", "merge", "value", "yaml")]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def load(path: str | Path, overrides: Sequence[str] = (), *, explain: bool = False) -> Config:
    """The config of a yaml file, over the files that its `defaults:` names and under `key.sub=value` overrides.

    The last one to set a key wins; a list is one value. Raises ConfigError. Of a config with NeMo RL's keys, rank 0
    says that some keys do not matter; with `explain`, it prints a verdict on every key.
    """
    entries = _read_file(Path(path), ())
    entries += [_read_override(override) for override in overrides]
    values, verdicts, refusal = _judge(_merge(entries))
    lines = {kind: [f"{key}: {text}" for key, text in verdicts.items() if text.startswith(kind)] for kind in nemo.KINDS}
    if explain:
        counts = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in lines.items() if of_kind)
        print(f"{len(verdicts)} keys: {counts}")
        print(*chain(*lines.values()), "", sep="\n")
    if refusal:
        raise refusal
    cfg = _build(Config(), "", values)
    off = [line.partition("=")[0] for line in lines["does not matter"]]
    if off and not explain and os.environ.get("RANK", "0") == "0":
        some = ", ".join(off[:3]) + ", .." * (len(off) > 3)
        print(f"without effect here: {len(off)} keys of the config ({some}); --check --explain says why")
    return cfg


def to_yaml(cfg: Config) -> str:
    """The whole config as yaml that `load` reads back as an equal one."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)


# -------------------------------------------------------------------------------------------- files and overrides


def _read_file(path: Path, parents: tuple[Path, ...]) -> list[tuple[str, Any, str]]:
    """(full key, value, place) of each entry of a file, after those of its defaults. parents: whose defaults it is."""
    try:
        text = read_bytes(path)
    except DataError as error:
        named = f" (named by the defaults of {parents[-1]})" if parents else ""
        files = ", ".join(sorted(map(str, path.parent.glob("*.yaml")))) if os.path.isdir(path.parent) else ""
        raise ConfigError(f"{error}{named}; yaml files there: {files or 'none'}") from None
    if path.resolve() in [parent.resolve() for parent in parents]:
        raise ConfigError(f"{path}: defaults form a cycle: {' -> '.join(map(str, (*parents, path)))}")
    places: dict[str, str] = {}
    tree = _parse(text, "", str(path), places)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections of keys, as in 'grpo: {{seed: 1}}', got {_shown(tree)}")
    below = []
    defaults = tree.pop("defaults", [])
    for name in defaults if isinstance(defaults, list) else [defaults]:
        if not isinstance(name, str) or not name:
            problem = f"defaults: expected a file or a list of files, got {_shown(name)}"
            raise ConfigError(f"{places['defaults']}: {problem}")
        file = path.parent / name
        if file.suffix != ".yaml" and not os.path.exists(file):  # NeMo RL's guides leave out the ending, too
            file = Path(f"{file}.yaml")
        below += _read_file(file, (*parents, path))
    # What replaces a section comes first, wherever in the file it is.
    return below + sorted(_entries(tree, "", places), key=lambda entry: not entry[0].endswith("._override_"))


def _read_override(override: str) -> tuple[str, Any, str]:
    """The entry of `key.sub=value`. The value is the text as typed; only lists and the user's own keys are yaml."""
    place = f"command line {shortened(override)}"
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"{place}: expected key.sub=value, as in grpo.seed=1")
    is_list = name in FIELDS and name not in LISTS and get_origin(keys.split_optional(FIELDS[name].type)[0]) is tuple
    if is_list or name in FREE:
        return name, _parse(text, name, place, {}), place
    value = typed(text)
    return name, value if value is None or keys.is_free(name) else text, place


def _parse(text: str | bytes, name: str, path: str, places: dict[str, str]) -> Any:
    """The value of a yaml text for the key `name`; `places` gets the file and line of each key below it."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, name, path, places)
    except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError) as error:  # the last two of "\UFFFFFFFF", say
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not yaml: {' '.join(str(problem).split())}") from None


def _value(loader: yaml.Loader, node: yaml.Node, name: str, path: str, places: dict[str, str]) -> Any:
    """A node as text, null, list or mapping."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, f"{name}.{i}", path, places) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        if node.tag.startswith(_TAG) and node.tag != f"{_TAG}null" and not keys.is_free(name):
            return node.value
        try:
            return loader.construct_object(node)
        except Exception:  # PyYAML's conversions raise whatever comes: KeyError for !!bool maybe
            problem = f"{shortened(node.value)} is not of type {node.tag.removeprefix(_TAG)}; quote it if it is text"
            raise ConfigError(f"{path} line {node.start_mark.line + 1}: {name}: {problem}") from None
    tree = {}
    for key, child in node.value:
        place = f"{path} line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{place}: expected the name of a key, got a list or mapping")
        full = f"{name}.{key.value}" if name else key.value
        if not full:
            raise ConfigError(f"{place}: expected the name of a key, got '': give the section a name, such as grpo")
        if full in places:
            raise ConfigError(f"{place}: {full} is set again, first in {places[full]}; remove one")
        places[full] = place
        tree[key.value] = _value(loader, child, full, path, places)
    return tree


def typed(value: Any) -> Any:
    """What yaml makes of a text, or of each text in a list or mapping."""
    if isinstance(value, dict):
        return {key: typed(child) for key, child in value.items()}
    if isinstance(value, list):
        return [typed(child) for child in value]
    if not isinstance(value, str):
        return value
    loader = Loader("")
    tag = loader.resolve(yaml.ScalarNode, value, (True, False))
    try:
        return loader.construct_object(yaml.ScalarNode(tag, value))
    except ValueError:  # 0x_ looks like a number
        return value


def _entries(tree: dict[str, Any], prefix: str, places: dict[str, str]) -> Iterator[tuple[str, Any, str]]:
    """(full key, value, place) of everything in a tree that is not a section."""
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, dict) and value and (keys.plain_name(name) in SECTIONS or nemo.is_section(name)):
            yield from _entries(value, f"{name}.", places)
        elif name in LISTS and isinstance(value, list) and value:
            yield f"{name}._override_", "true", places[name]
            for i, item in enumerate(value):
                if not isinstance(item, dict) or not item:
                    problem = f"entry {i + 1}: expected a mapping with keys, got {keys.text_of(item):.80}"
                    raise ConfigError(f"{places[name]}: {name}: {problem}")
                yield from _entries(item, f"{name}.{i}.", places)
        else:
            yield name, value, places[name]


def _merge(entries: Sequence[tuple[str, Any, str]]) -> _Merged:
    """Key -> (value, place) in force. A value replaces all keys below it, a key the null or {} above it."""
    merged: _Merged = {}
    for name, value, place in entries:
        section, _, last = name.rpartition(".")
        replaces = last == "_override_" and section in SECTIONS and section
        if replaces and value != "true":
            raise ConfigError(f"{place}: {name}: expected true, got {_shown(value)}")
        below = [key for key in merged if key.startswith(f"{section if replaces else name}.")]
        if below and value == {}:
            continue
        empty = [key for key in merged if name.startswith(f"{key}.") and merged[key][0] in (None, {}, [])]
        for key in (*below, *empty, name):
            merged.pop(key, None)
        if not replaces:
            merged[name] = value, place
    return merged


# -------------------------------------------------------------------------------------------------- keys to values


def _judge(merged: _Merged) -> tuple[dict[str, Any], dict[str, str], ConfigError | None]:
    """(values of our keys, key=value -> verdict, the refusal that says most)."""
    rows, added = nemo.rows_of(merged)
    everything = {keys.numbered_name(name): value for name, (value, _) in merged.items()}
    everything |= {keys.numbered_name(name): value for name, value in added.items()}
    values: dict[str, Any] = {}
    verdicts: dict[str, str] = {}
    refusals: list[tuple[bool, ConfigError]] = []
    set_by: dict[str, str] = {}  # key of ours -> the key that set it last

    def value_of(name: str) -> Any:
        return typed(_resolve(name, f"${{{name}}}", "", everything))

    # Plain keys first, then keys renamed onto them, then the command line. The last one wins.
    order = {name: (place.startswith("command line"), "as" in rows[name]) for name, (_, place) in merged.items()}
    for name in sorted(merged, key=order.__getitem__):
        value, place = merged[name]
        row = rows[name]
        try:
            if "same" in row or "why" not in row:  # else any value will do
                resolved = _resolve(name, value, place, everything)
                value = typed(resolved) if keys.is_free(name) and resolved != value else resolved
            verdicts[name], settings = nemo.judge(name, value, typed(value), place, row, value_of)
            for key, own in settings:
                earlier = set_by.get(key, name)
                if _set(values, key, own, place) and earlier != name and key in (earlier, name):
                    verdicts[earlier] = f"does not matter: {name} decides"
                set_by[key] = name
        except ConfigError as error:
            verdicts[name] = f"refused: {error}"
            refusals.append(("refused" not in row, error))
    for name, value in added.items() if not refusals else ():
        _set(values, name, _resolve(name, value, "nemo.yaml", everything), "nemo.yaml")
    verdicts = {f"{name}={keys.text_of(value)}": verdicts[name] for name, (value, _) in merged.items()}
    # What cannot be done here says more than a wrong value beside it.
    return values, verdicts, min(refusals, key=lambda refusal: refusal[0])[1] if refusals else None


def _resolve(name: str, value: Any, place: str, everything: Mapping[str, Any]) -> Any:
    """The value of a key, with `${key}`, `${.sibling}` and `${mul: a, b}` in its text replaced."""
    if not isinstance(value, str) or "${" not in value or name in FREE:
        return value

    def look_up(match: re.Match) -> str:
        inner = match[1].strip()
        if ":" in inner:
            if not re.fullmatch(rf"mul\s*:\s*{_NUMBER}(\s*,\s*{_NUMBER})*", inner):
                raise ConfigError(f"{place}: {name}: ${{{inner}}}: only keys, and mul of numbers, are understood")
            return f"{float(math.prod(map(Decimal, re.findall(_NUMBER, inner)))):.17g}"  # 1.1 x 100 is 110
        other = f"{name.rpartition('.')[0]}{inner}" if inner.startswith(".") else inner
        default = FIELDS[other].default if other in FIELDS else MISSING
        found = everything.get(keys.numbered_name(other), default)
        if found is MISSING or other in SECTIONS or isinstance(found, (tuple, list, dict)):
            raise ConfigError(f"{place}: {name}: ${{{other}}} is not the name of a key with one value")
        return keys.text_of(found)

    text = value
    for _ in range(20):
        if "${" not in text:
            return None if typed(text) is None else text
        text = re.sub(r"\$\{([^${}]*)\}", look_up, text)
    raise ConfigError(f"{place}: {name}: ${{...}} forms a cycle, is too deep, or is not closed")


def _set(values: dict[str, Any], name: str, value: Any, place: str) -> bool:
    """Sets a key, and says whether it had another value. A section without keys, and null for a list of sections, set
    none. Every unknown key and wrong type ends here."""
    plain, last = keys.plain_name(name), keys.numbered_name(name)
    section, kind = values, FIELDS[plain].type if plain in FIELDS else Any
    if free := next((free for free in FREE if name.startswith(f"{free}.")), None):
        section, kind = values.setdefault(free, {}), get_args(FIELDS[free].type)[1]
        above, _, last = name.removeprefix(f"{free}.").rpartition(".")
        if free != "env.custom":
            last = name.removeprefix(f"{free}.")
        elif above:  # such as env.custom.my.envs:Class.argument
            section, kind = section.setdefault(above, {}), Any
    elif plain not in FIELDS:
        raise ConfigError(f"{place}: {keys.unknown_key(plain)}")
    elif plain in SECTIONS:
        if value not in ({}, []) and not (value is None and plain in LISTS):
            fix = f"set its keys: {keys.keys_of(plain)}"
            raise ConfigError(f"{place}: {name} is a section, got {_shown(value)}; {fix}")
        return False
    new = _checked(name, value, kind, place)
    is_changed = section.get(last, new) != new
    section[last] = new
    return is_changed


def _checked(name: str, value: Any, kind: Any, place: str) -> Any:
    """The value as one of the type `kind`; of a mapping, each of its values."""
    if get_origin(kind) is Mapping and (value is None or isinstance(value, dict)):
        of_each = get_args(kind)[1]
        return {key: _checked(f"{name}.{key}", child, of_each, place) for key, child in (value or {}).items()}
    try:
        return _read(value, kind)
    except ValueError:
        plain = keys.plain_name(name)
        hint = f"; the default is {keys.default_text(plain)}" if plain in FIELDS else ""
        if name.startswith("env.custom."):
            hint = "; give an env_name, then its arguments: env.custom.my_module:MyClass.near=6"
        expected = f"expected {keys.type_name(kind)}, got {_shown(value)}{hint}"
        raise ConfigError(f"{place}: {name}: {expected}") from None


def _read(value: Any, kind: Any) -> Any:
    """A text, null or list as a value of the type `kind`. ValueError if it is none."""
    base, optional = keys.split_optional(kind)
    if base is Any or (optional and value is None):
        return value
    if get_origin(base) is tuple and isinstance(value, list):
        kinds = get_args(base)
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(item, item_kind) for item, item_kind in zip(value, kinds, strict=True))
    if not isinstance(value, str):
        raise ValueError
    if base is str or (get_origin(base) is Literal and value in get_args(base)):
        return value
    kinds = get_args(base) if get_origin(base) is UnionType else (base,)
    if bool in kinds and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if int in kinds:
        return int(value)
    if base is float and math.isfinite(float(value)):
        return float(value)
    raise ValueError


def _shown(value: Any) -> str:
    return "null" if value is None else "a mapping" if isinstance(value, dict) else shortened(value)


def _build(section: Any, prefix: str, values: dict[str, Any]) -> Any:
    """A section with the values of its keys in place of its own. prefix: its full name and a dot."""
    changes = {}
    for f in fields(section):
        name = prefix + f.name
        if name in LISTS:  # a key that an item does not set has the value of the same key below `default`
            default = _build(getattr(section, "default", keys.SECTIONS[name]()), f"{prefix}default.", values)
            numbers = {int(key.split(".")[name.count(".") + 1]) for key in values if key.startswith(f"{name}.")}
            if missing := set(range(len(numbers))) - numbers:
                raise ConfigError(f"{name}.{max(numbers)} is set, but not {name}.{min(missing)}: leave no gaps")
            changes[f.name] = tuple(_build(default, f"{name}.{i}.", values) for i in range(len(numbers)))
        elif is_dataclass(f.type):
            changes[f.name] = _build(getattr(section, f.name), f"{name}.", values)
        elif name in values:
            changes[f.name] = values[name]
    return replace(section, **changes)
