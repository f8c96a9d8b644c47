"""`${key}`, `${.sibling}` and `${mul: a, b}` in the text of a config's value -> what they stand for."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from decimal import Decimal

from base.inputs.keys import FIELDS, SECTIONS, numbered_name, text_of
from base.inputs.yaml_text import Plain
from config import ConfigError

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_PART = 300  # characters of a value within another one
_NUMBER = r"\d+(?:\.\d*)?"


def resolved(name: str, value: str, written: Mapping[str, Plain]) -> Plain:
    """The value of key `name` with all references replaced, also those within what they stand for. written: the values
    of the keys that are set. ConfigError for a reference that cannot be replaced."""
    for _ in range(20):
        if len(value) > 10_000:
            break
        value = replaced(value, lambda reference: _looked_up(reference, name, written))
        if not isinstance(value, str) or "${" not in value:
            return value
    raise ConfigError(f"{name}: ${{...}} forms a cycle, is too deep, too long, or is not closed")


def replaced(text: str, look_up: Callable[[str], Plain]) -> Plain:
    """A text with what `look_up` gives for it in place of each innermost `${reference}`; its value itself where the
    text is one reference and nothing else. Within a text, a long value leaves its reference as it is."""
    whole = REFERENCE.fullmatch(text)
    if whole:
        return look_up(whole[1].strip())

    def part(reference: re.Match) -> str:
        value = text_of(look_up(reference[1].strip()))
        return value if len(value) <= MAX_PART else reference[0]

    return REFERENCE.sub(part, text)


def _looked_up(reference: str, key: str, written: Mapping[str, Plain]) -> str | None:
    """The text in place of `${reference}` in the value of `key`; None for null."""
    if ":" in reference:
        if not re.fullmatch(rf"mul\s*:\s*{_NUMBER}(\s*,\s*{_NUMBER})*", reference):
            raise ConfigError(f"{key}: ${{{reference:.80}}}: only keys, and mul of numbers, are understood")
        factors = [Decimal(number) for number in re.findall(_NUMBER, reference)]
        return f"{float(math.prod(factors)):.17g}"  # Decimal: 1.1 x 100 is 110, not 110.00000000000001
    name = f"{key.rpartition('.')[0]}{reference}" if reference.startswith(".") else reference
    default = FIELDS[name].default if name in FIELDS else MISSING
    found = written.get(numbered_name(name), default)
    if found is MISSING or name in SECTIONS or isinstance(found, (tuple, list, dict)):
        raise ConfigError(f"{key}: ${{{name:.80}}} is not the name of a key with one value")
    return None if found is None else text_of(found)
