"""Yaml text -> plain values, within bounds: aliases that multiply, deep nests and large files are refused by line.

Texts stay as they are written, because only the type of a key says what is a number. Merge keys (`<<`) are text.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import yaml

from base.system.files import read_bytes
from config import ConfigError, shortened

Plain = str | int | float | bool | None | list | dict  # lists and mappings of plain values

MAX_BYTES = 1 << 20  # of a file
MAX_NODES = 20_000  # of a file; what an alias names counts each time
MAX_DEPTH = 30
_TAG = "tag:yaml.org,2002:"


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that 1e-6 is a number and that dates, <<, =, & and * are text; it bounds the depth.
    Raises a YAMLError where that is exceeded."""

    depth = 0
    yaml_implicit_resolvers: ClassVar = {
        first: [row for row in rows if row[0].removeprefix(_TAG) not in ("timestamp", "merge", "value", "yaml")]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


class Document:
    """The values of a text, and for each full key the file and line that set it. `where` names the file in messages.
    Values of the keys for which `is_typed` holds are what yaml makes of them; others stay text, null, list or mapping.
    name: the full name of the key whose value the text is. Raises ConfigError."""

    def __init__(self, text: str | bytes, where: str, is_typed: Callable[[str], bool], name: str = ""):
        self.where = where
        self.is_typed = is_typed
        self.places: dict[str, str] = {}
        self.num_nodes = 0
        self.value: Plain = None
        try:
            self.loader = Loader(text)
            node = self.loader.get_single_node()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", error)
            place = where if mark is None else f"{where} line {mark.line + 1}"
            raise ConfigError(f"{place}: not yaml: {' '.join(str(problem).split())}") from None
        except (ValueError, ArithmeticError) as error:  # of "\UFFFFFFFF", say
            raise ConfigError(f"{where}: not yaml: {error}") from None
        if node is not None:
            self.value = self._read(node, name, 0)

    def place_of(self, node: yaml.Node) -> str:
        return f"{self.where} line {node.start_mark.line + 1}"

    def _read(self, node: yaml.Node, name: str, depth: int) -> Plain:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            problem = f"more than {MAX_NODES:,} values, with each alias written out"
            raise ConfigError(f"{self.place_of(node)}: {name:.80}: {problem}: remove some")
        if depth > MAX_DEPTH:  # an alias of what it is in
            raise ConfigError(f"{self.place_of(node)}: {name:.80}: more than {MAX_DEPTH} levels deep")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, name, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self._read(item, f"{name}.{number}", depth + 1) for number, item in enumerate(node.value)]
        is_null = node.tag == f"{_TAG}null"
        if node.tag.startswith(_TAG) and not is_null and not self.is_typed(name):
            return node.value
        try:
            return self.loader.construct_object(node)
        except Exception:  # PyYAML's conversions raise whatever comes: KeyError for !!bool maybe
            problem = f"{shortened(node.value)} is not of type {node.tag.removeprefix(_TAG)}; quote it if it is text"
            raise ConfigError(f"{self.place_of(node)}: {name}: {problem}") from None

    def _read_mapping(self, node: yaml.MappingNode, name: str, depth: int) -> dict[str, Plain]:
        values: dict[str, Plain] = {}
        for key, child in node.value:
            place = self.place_of(key)
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{place}: expected the name of a key, got a list or mapping")
            full = f"{name}.{key.value}" if name else key.value
            if not full:
                raise ConfigError(f"{place}: expected the name of a key, got '': give the section a name, such as grpo")
            if key.value in values:
                raise ConfigError(f"{place}: {full:.200} is set again, first in {self.places[full]}; remove one")
            self.places[full] = place
            values[key.value] = self._read(child, full, depth + 1)
        return values


def read_yaml(path: str | Path) -> bytes:
    """The text of a yaml file. DataError if it cannot be read, ConfigError if it is too large for a config."""
    text = read_bytes(path)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path}: {len(text):,} bytes: a config has at most {MAX_BYTES:,}")
    return text


def typed(value: Plain) -> Plain:
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
