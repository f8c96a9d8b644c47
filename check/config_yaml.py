"""Yaml text -> a tree of nodes of bounded size; a node -> its plain value. Knows no key of a config.

Values come from nodes, not from the objects that PyYAML makes of them: it takes `1e-6` for text, `no` for False and the
last of two equal keys. A node has text and line; the type of a field says what the text is.
"""

import math
import re
from typing import Any

import yaml

from config import ConfigError, shortened

MAX_BYTES = 2**16  # of a config with its defaults, and of its overrides: PyYAML needs up to 5 s for as many brackets
MAX_VALUES, MAX_NAME_CHARS = 20_000, 200  # no real config comes near; the second also ends an alias that holds itself
TAG = "tag:yaml.org,2002:"  # the tags of yaml's own types start with it
NULL = f"{TAG}null"
_TAGS = {yaml.MappingNode: "map", yaml.SequenceNode: "seq"}
_SCALAR_TAGS = "str int float bool null timestamp merge value"  # the last two are those of << and =, here text


def compose(text: str | bytes, where: str) -> yaml.Node:
    """Yaml text -> its node tree, checked, with no object made of it; empty text is null."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader) or yaml.ScalarNode(NULL, "")
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{where} line {error.problem_mark.line + 1}: not yaml: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a config") from None
    except Exception as error:  # of PyYAML's: "\UFFFFFFFF" and %YAML 1.<5000 digits> are ValueErrors there
        raise ConfigError(f"{where}: not yaml: {' '.join(str(error).split())}") from None
    return check(root, where)


def check(root: yaml.Node, where: str) -> yaml.Node:
    """The root. ConfigError for more values than a config has, an alias counting each time as all that it stands for;
    for a key that is there twice or no text, tags but those of plain values, and text that UTF-8 or C cannot hold."""
    lines: dict[str, int] = {}  # full name of a key or list item -> its line
    nodes = [("", root)]
    while nodes:
        name, node = nodes.pop()
        place = ": ".join(filter(None, (f"{where} line {lines[name]}" if name else where, name)))
        tag = node.tag.removeprefix(TAG)
        if tag not in _TAGS.get(type(node), _SCALAR_TAGS).split():
            raise ConfigError(f"{place}: the tag {shortened(tag)} has no meaning here; write the value without it")
        if re.search("[\0\ud800-\udfff]", name + node.value if isinstance(node, yaml.ScalarNode) else name):
            raise ConfigError(f"{place}: {described(node)}: take out the byte 0, or what is no UTF-8")
        items = enumerate(node.value if tag == "seq" else ())
        pairs = node.value if tag == "map" else [(yaml.ScalarNode(f"{TAG}str", str(i)), item) for i, item in items]
        for key, child in pairs:
            line = (key.start_mark or child.start_mark).line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{TAG}merge":
                raise ConfigError(f"{where} line {line}: expected the name of a key, got {described(key)}")
            full = f"{name}.{key.value}" if name else key.value
            if full in lines:
                raise ConfigError(f"{where} line {line}: {full} is set again, first in line {lines[full]}; remove one")
            if len(full) > MAX_NAME_CHARS or len(lines) == MAX_VALUES:
                limits = f"over {MAX_VALUES:,} values, counting all that aliases stand for, or over {MAX_NAME_CHARS}"
                raise ConfigError(f"{where} line {line}: {full:.80}: too much: {limits} characters of a key")
            lines[full] = line
            nodes.append((full, child))
    return root


def scalar(text: str) -> yaml.ScalarNode:
    """The node of a text as typed: null, a number or text, as yaml sees it."""
    return yaml.ScalarNode(yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False)), text)


def described(node: yaml.Node) -> str:
    """What was written, and what yaml takes it for."""
    if isinstance(node, yaml.SequenceNode):
        items = [described(item) if isinstance(item, yaml.ScalarNode) else "..." for item in node.value[:5]]
        return f"[{', '.join(items + ['...'] * (len(node.value) > 5))}]"
    tag = node.tag.removeprefix(TAG)
    return {"map": "a mapping", "null": "null"}.get(tag) or f"{shortened(node.value)} ({tag})"


def plain_value(node: yaml.Node, place: str) -> Any:
    """A checked node as text, number, true, false, null, list or mapping: what yaml takes it for, except that 1e-6 is a
    number and a date is text. ConfigError for a number that is none."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: plain_value(value, f"{place}.{key.value}") for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain_value(item, place) for item in node.value]
    is_float = node.style is None and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", node.value)
    if not is_float and node.tag not in (f"{TAG}int", f"{TAG}float", f"{TAG}bool"):
        return None if node.tag == NULL else node.value
    try:
        value = float(node.value) if is_float else yaml.SafeLoader("").construct_object(node)
        is_finite = math.isfinite(value)
    except Exception:  # PyYAML's conversions raise whatever comes: KeyError for !!bool maybe
        is_finite = False
    if not is_finite:
        raise ConfigError(f"{place}: {described(node)} has no finite value; quote it if it is text")
    return value
