"""The keys of `Config` by their full names, such as `policy.optimizer.kwargs.lr`; the text of --help."""

import ast
import difflib
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

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

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_PART = 300  # characters of a value within another one

# Keys by the names that other systems give them: ours=theirs,theirs
_THEIRS = """lr=learning_rate reference_policy_kl_penalty=beta,kl_coef,kl_loss_coef dim=r,rank,lora_rank
ratio_clip_min=epsilon,clip_ratio,clip_ratio_low,cliprange ratio_clip_max=epsilon_high,clip_ratio_high alpha=lora_alpha
num_generations_per_prompt=n,group_size,rollout_n ppo_epochs=num_iterations max_new_tokens=max_completion_length
activation_checkpointing=gradient_checkpointing max_input_seq_length=max_prompt_length log_dir=output_dir
save_period=save_freq val_period=test_freq"""
SYNONYMS = {}
for _line in _THEIRS.split():
    _ours, _, _names = _line.partition("=")
    SYNONYMS |= dict.fromkeys(_names.split(","), _ours)


def is_free(name: str) -> bool:
    """Whether the key is one of FREE, or one of the user's own keys below it."""
    return any(f"{name}.".startswith(f"{free}.") for free in FREE)


def keys_of(section: str) -> str:
    """The keys of a section, for a message."""
    return ", ".join(f.name for f in fields(SECTIONS[section]))


def plain_name(name: str) -> str:
    """A key without the number of a section in a list."""
    return re.sub(rf"^({'|'.join(map(re.escape, LISTS))})\.(0|[1-9][0-9]{{0,3}})(?=\.|$)", r"\1", name)


def numbered_name(name: str) -> str:
    """`data.validation.x` -> `data.validation.0.x`: a list of sections may be written as its only one."""
    return re.sub(rf"^({'|'.join(map(re.escape, LISTS))})\.(?!\d)", r"\1.0.", name)


def meant_key(name: str, names: Collection[str], cutoff: float = 0.6) -> str | None:
    """Which of `names` is meant by `name`, if one is near. One with the same last part comes before a near one of the
    same section, and that before a near one elsewhere."""
    section, _, last = name[-200:].rpartition(".")
    last = SYNONYMS.get(last, last)
    last_of_name = {full: full.rpartition(".")[2] for full in names}
    last_beside = {full: end for full, end in last_of_name.items() if section in ("", full.rpartition(".")[0])}
    for lasts, least in ((last_of_name, 1.0), (last_beside, cutoff), (last_of_name, cutoff)):
        found = difflib.get_close_matches(last, lasts.values(), n=1, cutoff=least)
        candidates = [full for full, end in lasts.items() if end in found]
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0)
        if near:
            return near[0]
    return None


def hint(name: str, names: Collection[str], cutoff: float = 0.6) -> str:
    """The end of a message: which of `names` is meant by `name`; "" if none is near."""
    meant = meant_key(name, names, cutoff)
    return "" if meant is None else f" Did you mean '{meant}'?"


def unknown_key(name: str, meant: str | None) -> str:
    """The message about a key that does not exist, with the key that is meant, if any, and the keys of the section."""
    section = name
    while section not in SECTIONS:
        section = section.rpartition(".")[0]
    guess = f" Did you mean '{meant}'?" if meant else ""
    return f"unknown key '{name:.200}'.{guess} Keys of {section or 'a config'}: {keys_of(section)}"


def split_optional(kind: Kind) -> tuple[Kind, bool]:
    """`X | None` -> (X, True); `X` -> (X, False)."""
    if NoneType not in get_args(kind):
        return kind, False
    base, *_ = get_args(kind)
    return base, True


def type_name(kind: Kind) -> str:
    """A field's type in the words of a message."""
    base, optional = split_optional(kind)
    origin = get_origin(base) or base
    names = {bool: "true or false", int: "int", float: "finite float", str: "str", Mapping: "mapping"}
    if origin in (UnionType, Union):
        name = " or ".join(map(type_name, get_args(base)))
    elif origin is Literal:
        name = " or ".join(get_args(base))
    elif origin in names:
        name = names[origin]
    else:
        name = str(base).replace("tuple", "list")
    if optional:
        name += " or null"
    return name


def default_text(name: str) -> str:
    """The default of a key, as json."""
    default = FIELDS[name].default
    return json.dumps({} if default is MISSING else default)


def text_of(value: Plain | tuple) -> str:
    """A value as a config writes it: json, and text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


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


def bounds(name: str) -> str:
    """What the number of a key must be, such as ">= 0, < 1"; "" for keys without bounds."""
    return FIELDS[name].metadata.get("bounds", "")


def settings(section: config.Section, prefix: str = "") -> Iterator[tuple[str, Plain | tuple]]:
    """(full key, value) of a config; the sections of a list are numbered if there are several."""
    for f in fields(section):
        name = prefix + f.name
        value = getattr(section, f.name)
        if is_dataclass(value):
            yield from settings(value, f"{name}.")
        elif name in LISTS:
            for i, item in enumerate(value):
                yield from settings(item, f"{name}.{i}." if len(value) > 1 else f"{name}.")
        else:
            yield name, value


@cache
def meanings() -> dict[str, str]:
    """Full key -> its meaning: the text below its field in config.py, which Python does not keep at run time."""
    texts = {}  # class, field -> meaning
    for cls in ast.parse(Path(config.__file__).read_text(encoding="utf-8")).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        for node, below in pairwise(cls.body):
            if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                texts[cls.name, node.target.id] = " ".join(text.split())
    found = {}
    for name, field in FIELDS.items():
        if name in SECTIONS:
            continue
        section, _, _ = name.rpartition(".")
        owner = SECTIONS[section].__name__
        found[name] = texts.get((owner, field.name), "config.py has no text below this field.")
    return found


def help_text() -> str:
    """Every key with its type, bounds, default and meaning."""
    lines = []
    for name, meaning in meanings().items():
        limits = f" ({bounds(name)})" if bounds(name) else ""
        lines.append(f"{name}: {type_name(FIELDS[name].type)}{limits} = {default_text(name)}")
        paragraph = textwrap.fill(meaning, 100, break_on_hyphens=False)
        lines.append(textwrap.indent(paragraph, "    "))
    return "\n".join(lines) + "\n"
