"""The keys of `Config` by their full names, such as `policy.optimizer.kwargs.lr`."""

import json
import re
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from types import GenericAlias, NoneType, UnionType
from typing import get_args, get_origin

import config
from base.inputs.yaml_text import Plain

Kind = type | UnionType | GenericAlias  # the type of a field


def section_class(kind: Kind) -> type | None:
    """The class of a section, or of the sections of a list; None for the type of any other field."""
    if get_origin(kind) is tuple:
        kind, *_ = get_args(kind)
    if is_dataclass(kind):
        return kind
    return None


FIELDS: dict[str, Field] = {}  # full key -> field, sections too, in the order of config.py
SECTIONS: dict[str, type] = {}  # full name -> class; "" is the whole config


def _add_section(cls: type, name: str) -> None:
    """Adds a section and all below it to FIELDS and SECTIONS."""
    SECTIONS[name] = cls
    for field in fields(cls):
        key = f"{name}.{field.name}" if name else field.name
        FIELDS[key] = field
        below = section_class(field.type)
        if below:
            _add_section(below, key)


_add_section(config.Config, "")
LISTS = [name for name in SECTIONS if name and not is_dataclass(FIELDS[name].type)]  # lists of sections
FREE = [name for name, f in FIELDS.items() if get_origin(f.type) is Mapping]  # their values are mappings of any keys


def is_free(name: str) -> bool:
    """Whether the key is one of FREE, or one of the user's own keys below it."""
    return any(f"{name}.".startswith(f"{free}.") for free in FREE)


def plain_name(name: str) -> str:
    """A key without the number of a section in a list."""
    return re.sub(rf"^({'|'.join(map(re.escape, LISTS))})\.(0|[1-9][0-9]{{0,3}})(?=\.|$)", r"\1", name)


def numbered_name(name: str) -> str:
    """`data.validation.x` -> `data.validation.0.x`: a list of sections may be written as its only one."""
    return re.sub(rf"^({'|'.join(map(re.escape, LISTS))})\.(?!\d)", r"\1.0.", name)


def split_optional(kind: Kind) -> tuple[Kind, bool]:
    """`X | None` -> (X, True); `X` -> (X, False)."""
    if NoneType not in get_args(kind):
        return kind, False
    base, *_ = get_args(kind)
    return base, True


def text_of(value: Plain | tuple) -> str:
    """A value as a config writes it: json, and text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def bounds(name: str) -> str:
    """What the number of a key must be, such as ">= 0, < 1"; "" for keys without bounds."""
    return FIELDS[name].metadata.get("bounds", "")
