"""Yaml files and `key.sub=value` overrides -> Config; Config -> yaml.

A mistake is a `ConfigError` that names the place, the full key, the value and the fix. This file reads yaml files and
nothing else: preflight.py looks for the data and the model, rules.py whether values fit each other.
"""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from check import config_yaml, nemo
from check import keys as keys
from check.config_yaml import NULL, described
from check.keys import FIELDS, FREE, LISTS, SECTIONS
from check.nemo import Verdict
from config import Config, ConfigError, DataError, shortened
from hf.files import open_file

MAX_FILES = 100  # of a config with its defaults
MAX_REFERENCE_CHARS = 10_000  # of a value with ${...} in it
_NUMBER = r"\d+(?:\.\d*)?"
_Entry = tuple[str, yaml.Node, str]  # full key, what is written for it, the place


def load(path: str | Path, overrides: Sequence[str] = (), *, explain: bool = False) -> Config:
    """The config of a yaml file, over the files its `defaults:` names and under `key.sub=value` overrides.

    The last to set a key wins; a list is one value. Raises ConfigError. `rules.validate` judges the values. Of a
    config with NeMo RL's keys, rank 0 prints what does not matter and what decides the reward; `explain`: each key.
    """
    entries = _read_file(Path(path), (), [])
    if sum(map(len, overrides)) > config_yaml.MAX_BYTES:
        raise ConfigError(f"command line {shortened(max(overrides, key=len))}: too long; write it into a file")
    for override in overrides:
        entries += _read_override(override)
    values, verdicts, refusal = _judge(_merge(entries))
    if explain:
        shown = sorted(verdicts, key=lambda verdict: nemo.KINDS.index(verdict.kind))
        counts = Counter(verdict.kind for verdict in shown)
        print(f"{len(shown)} keys: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
        print(*shown, "", sep="\n")
    if refusal:
        raise refusal
    cfg = _build(Config(), "", values)
    if (table := nemo.table_of(verdicts)) and not explain and os.environ.get("RANK", "0") == "0":
        print(table, *_in_force(cfg), sep="\n", file=sys.stderr)
    return cfg


def _merge(entries: list[_Entry]) -> dict[str, tuple[yaml.Node, str]]:
    """Key -> (node, place) of what is in force. A value takes the place of all keys below it, and a key that of a null
    or {} above it."""
    merged: dict[str, tuple[yaml.Node, str]] = {}
    above: set[str] = set()  # all sections of these keys
    for name, node, where in entries:
        section = _emptied_section(name, node, where)
        prefix = section or name
        if prefix in above and (section or isinstance(node, yaml.ScalarNode)):
            merged = {key: entry for key, entry in merged.items() if not key.startswith(f"{prefix}.")}
            above = {part for key in merged for part in _sections_of(key)}
        merged.pop(name, None)
        if (not section or node.tag == NULL or not node.value) and (node.value or name not in above):
            for part in _sections_of(name):
                if part in merged and (merged[part][0].tag == NULL or not merged[part][0].value):
                    del merged[part]
                above.add(part)
            merged[name] = node, where
    return merged


def _sections_of(name: str) -> list[str]:
    return [name[: match.start()] for match in re.finditer(r"\.", name)]


def _judge(merged: dict[str, tuple[yaml.Node, str]]) -> tuple[dict[str, Any], list[Verdict], ConfigError | None]:
    """(values of our keys, a verdict for each key, the refusal that says most)."""
    rows, added = nemo.rows_of(merged)
    entries = merged | {name: (config_yaml.scalar(text), "nemo.yaml") for name, text in added.items()}
    nodes = {keys.numbered_name(name): node for name, (node, _) in entries.items()}
    values: dict[str, Any] = {}
    verdicts: dict[str, Verdict] = {}
    refusals: list[tuple[bool, ConfigError]] = []
    set_by: dict[str, str] = {}  # key of ours -> the key that set it last

    def value_of(name: str) -> Any:
        return config_yaml.plain_value(_resolve(name, config_yaml.scalar(f"${{{name}}}"), "", nodes), name)

    # What is taken as another key comes behind that key, a part of a mapping behind the mapping, and the command line
    # behind all files.
    order = {
        name: (merged[name][1].startswith("command line"), rows[name][1].get("as", "").count(".")) for name in merged
    }
    for name in sorted(merged, key=order.__getitem__):
        node, where = merged[name]
        row = rows[name][1]
        try:
            if "same" in row or "why" not in row:  # else any value will do
                node = _resolve(name, node, where, nodes)
            verdicts[name], settings = nemo.judge(name, node, where, rows[name], value_of)
            for key, its_node in settings:
                earlier = set_by.get(key, name)
                before = repr(values) if earlier != name and key in (earlier, name) else ""
                _set(values, key, its_node, where)
                set_by[key] = name
                if before and repr(values) != before:
                    verdicts[earlier] = Verdict(earlier, "does not matter", f"{name} decides", earlier)
        except ConfigError as error:
            verdicts[name] = Verdict(name, "refused", str(error))
            refusals.append(("refused" not in row and "never" not in row, error))
    for name in added if not refusals else ():
        node, where = entries[name]
        _set(values, name, _resolve(name, node, where, nodes), where)
    listed = [replace(verdicts[name], name=leaf) for name in merged for leaf in _leaf_names(name, merged[name][0])]
    # What cannot be done here says more than a wrong value beside it.
    return values, listed, min(refusals, key=lambda refusal: refusal[0])[1] if refusals else None


def _leaf_names(name: str, node: yaml.Node) -> Iterator[str]:
    """The keys of a mapping that is one value, or the one name of another value."""
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, child in node.value:
            yield from _leaf_names(f"{name}.{key.value}", child)
    else:
        yield name


def _in_force(cfg: Config) -> Iterator[str]:
    """A line for each data set of what comes from the config and decides its prompts and rewards."""
    yield "in force, and decides the prompts and the reward:"
    names = ("dataset_name", "data_path", "prompt_file", "system_prompt_file", "processor", "env_name")
    verifiers = {
        "math": f"env.math.math_verify_impl={cfg.env.math.math_verify_impl}",
        "reward_model": f"env.reward_model.model_name={cfg.env.reward_model.model_name}",
    }
    for part, sets in (("train", cfg.data.train), ("validation", cfg.data.validation)):
        for dataset in sets:
            words = [f"{name}={getattr(dataset, name)}" for name in names if getattr(dataset, name)]
            words += filter(None, [verifiers.get(dataset.env_name)])
            yield f"  {part}: {', '.join(words)}"


def _read_file(path: Path, parents: tuple[Path, ...], sizes: list[int]) -> list[_Entry]:
    """The entries of a file after those of its defaults. `parents`: the files whose defaults led here. `sizes`: those
    of all files read so far, in bytes."""
    try:
        with open_file(path) as file:
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
            file = f"{path.parent / default.value}"
            if not file.endswith(".yaml") and not os.path.lexists(file):  # NeMo RL's guides leave out the ending, too
                file += ".yaml"
            below += _read_file(Path(file), (*parents, path), sizes)
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
    return [(name, node, where)]


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


def _set(values: dict[str, Any], name: str, node: yaml.Node, where: str) -> None:
    """Sets the value of a key; a section without keys, and null for a list of sections, set none. Every unknown key and
    wrong type ends here."""
    plain = keys.plain_name(name)
    if free := next((free for free in FREE if name.startswith(f"{free}.")), None):
        mapping, key = values.setdefault(free, {}), name.removeprefix(f"{free}.")
        env_name, _, argument = key.rpartition(".")
        if free == "env.custom" and env_name:  # such as env.custom.my.envs:Class.argument
            mapping.setdefault(env_name, {})[argument] = _typed(name, node, Any, where)
        else:
            mapping[key] = _typed(name, node, get_args(FIELDS[free].type)[1], where)
    elif plain not in FIELDS:
        raise ConfigError(f"{where}: {keys.unknown_key(plain)}")
    elif plain not in SECTIONS:
        values[keys.numbered_name(name)] = _typed(name, node, FIELDS[plain].type, where)
    elif not (plain in LISTS and node.tag == NULL) and (isinstance(node, yaml.ScalarNode) or node.value):
        got = described(node)
        raise ConfigError(f"{where}: {name} is a section, got {got}; set its keys: {keys.keys_of(plain)}")


def _resolve(name: str, node: yaml.Node, where: str, nodes: Mapping[str, yaml.Node]) -> yaml.Node:
    """The node of a key whose text may have `${key}`, `${.sibling}` and `${mul: a, b}` in it. `nodes`: of all keys."""
    if not isinstance(node, yaml.ScalarNode) or "${" not in node.value or keys.plain_name(name) in FREE:
        return node
    place, text = f"{where}: {name}", node.value

    def look_up(match: re.Match) -> str:
        inner = match[1].strip()
        if ":" in inner:
            if not re.fullmatch(rf"mul\s*:\s*{_NUMBER}(\s*,\s*{_NUMBER})*", inner):
                raise ConfigError(f"{place}: ${{{inner}}}: only keys, and mul of numbers, are understood")
            return f"{math.prod(map(float, re.findall(_NUMBER, inner))):.17g}"
        other = f"{name.rpartition('.')[0]}{inner}" if inner.startswith(".") else inner
        default = FIELDS[other].default if other in FIELDS else MISSING
        value = nodes.get(keys.numbered_name(other), default)
        if isinstance(value, yaml.ScalarNode):
            value = "null" if value.tag == NULL else value.value
        if value is MISSING or other in SECTIONS or isinstance(value, (tuple, yaml.Node)):
            raise ConfigError(f"{place}: ${{{other}}} is not the name of a key with one value")
        return nemo.text_of(value)[: MAX_REFERENCE_CHARS + 1]  # a longer one is refused below

    for _ in range(20):
        if len(text) > MAX_REFERENCE_CHARS:
            break
        if "${" not in text:
            return config_yaml.scalar(text)
        text = re.sub(r"\$\{([^${}]*)\}", look_up, text)
    raise ConfigError(f"{place}: ${{...}} goes in a circle, is too deep or long, or is not closed")


def _leaves(node: yaml.Node, prefix: str, path: Path) -> Iterator[_Entry]:
    """The entries of all below a mapping that is no section."""
    for key_node, child in node.value:
        where = f"{path} line {key_node.start_mark.line + 1}"
        name = prefix + key_node.value
        is_mapping = isinstance(child, yaml.MappingNode) and child.value
        if is_mapping and (name in SECTIONS or nemo.is_section(name)):
            yield from _leaves(child, f"{name}.", path)
            continue
        for i, item in enumerate(child.value if name in LISTS and isinstance(child, yaml.SequenceNode) else ()):
            if not isinstance(item, yaml.MappingNode):
                raise ConfigError(f"{where}: {name}: expected a list of mappings, got {described(item)} in it")
            if not item.value:
                raise ConfigError(f"{where}: {name}: entry {i + 1} is empty")
            yield from _leaves(item, f"{name}.{i}.", path)
        yield name, child, where


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
        hint = f"; the default is {keys.default_text(plain)}" if plain in FIELDS else ""
        if name.startswith("env.custom."):
            hint = "; here stands an env_name, then its arguments: env.custom.my_module:MyClass.near=6"
        expected = f"expected {keys.type_name(kind)}, got {described(node)}"
        raise ConfigError(f"{where}: {name}: {expected}{hint}") from None


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
