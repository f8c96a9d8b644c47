"""What a user is told of the keys: types, defaults and meanings, the key that a misspelled one means, and --help."""

import ast
import difflib
import json
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import config
from base.inputs.keys import FIELDS, SECTIONS, Kind, bounds, split_optional

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


def keys_of(section: str) -> str:
    """The keys of a section, for a message."""
    return ", ".join(f.name for f in fields(SECTIONS[section]))


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
