"""base/hf/config_forms.json, from transformers' classes: `python tests/helpers/config_forms.py` writes it anew."""

import dataclasses
import json
import sys
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "base" / "hf" / "config_forms.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from families import hf_config

from base.hf.families import FAMILIES, WHOLE

# Attributes that config.json may have, too; base/hf/config_forms.py has their forms.
FIELDS_TOO = ("model_type", "name_or_path", "num_labels", "output_attentions", "rope_scaling", "torch_dtype")
ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act")
# What transformers reads and does not annotate: form -> fields, of a model_type.
MORE = {
    "gemma4_text": {
        "int": ["global_head_dim"],
        "int or null": ["num_global_key_value_heads"],
        "object": ["per_layer_config"],
    }
}
HAVE_RULES = ("head_dim", "num_key_value_heads", "sliding_window")  # in base/hf/blocks_config.py
NAMES = {"NoneType": "null", "dict": "object", "RopeParameters": "object"}


def kinds_of(annotation) -> list[str]:
    """What config.json can have: `int | None` -> ["int", "null"]. A config within it is an object."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in kinds_of(part)]
    if origin is Literal:
        return [json.dumps(value) for value in get_args(annotation)]
    if origin is list:
        kinds = dict.fromkeys(kind for part in get_args(annotation) for kind in kinds_of(part))
        return [f"list of {' or '.join(kinds)}"]
    if origin is tuple or annotation.__name__ == "dtype":
        return []
    if origin is dict or annotation.__name__.endswith("Config"):
        return ["object"]
    return [NAMES.get(annotation.__name__, annotation.__name__)]


def forms_of(config_class) -> dict[str, list[str]]:
    """Form, as "int or null" -> the fields that have it."""
    fields: dict[str, list[str]] = {}
    for field in dataclasses.fields(config_class):
        if field.name == "time_step_limit":  # transformers writes it in a form that it does not take
            continue
        annotation = field.type
        if isinstance(annotation, str):
            annotation = eval(annotation, {"torch": torch, "Literal": Literal})
        form = " or ".join(dict.fromkeys(kinds_of(annotation)))
        if field.name in ACTIVATIONS:
            form = json.dumps(field.default)  # vLLM computes no other
        fields.setdefault(form, []).append(field.name)
    return {form: sorted(names) for form, names in sorted(fields.items())}


def without_nulls_that_break(kind: str, forms: dict[str, list[str]]) -> dict[str, list[str]]:
    """The forms without null for what the layers compute with: with a null the class is built, and its forward
    ends. Some fields have rules of their own."""
    found: dict[str, list[str]] = {}
    for form, names in forms.items():
        kinds = set(form.split(" or "))
        may_be_null = kinds <= {"int", "float", "null"} and "null" in kinds
        for name in names:
            breaks = may_be_null and name not in HAVE_RULES and null_breaks(kind, name)
            found.setdefault(form.removesuffix(" or null") if breaks else form, []).append(name)
    return {form: sorted(names) for form, names in sorted(found.items())}


def null_breaks(kind: str, name: str) -> bool:
    fields = hf_config(kind).to_dict()
    if fields.get(name) is None:
        return False
    fields[name] = None
    try:
        config = AutoConfig.for_model(**fields)
        with torch.no_grad():
            AutoModelForCausalLM.from_config(config).eval()(torch.arange(1, 8)[None], use_cache=False)
    except Exception:  # of whatever kind
        return True
    return False


def reserved() -> dict[str, list[str]]:
    """The attributes of transformers' base class itself, which a field of the same name would replace, and those that
    its other classes have for the model's parts."""
    classes = [CONFIG_MAPPING[kind] for kind in [*FAMILIES, *WHOLE]]
    fields = {field.name for config_class in classes for field in dataclasses.fields(config_class)}
    forms: dict[str, set[str]] = {"absent": set(), "null": set()}
    for config_class in classes:
        for name in dir(config_class):
            if name.startswith("_") or name in FIELDS_TOO or name in fields:
                continue
            value = getattr(config_class, name)
            if not callable(value) and not isinstance(value, property):
                forms["null"].add(name)
            elif hasattr(PreTrainedConfig, name):
                is_fixed = callable(value) or value.fset is None
                forms["absent" if is_fixed else "null"].add(name)
    return {form: sorted(names) for form, names in forms.items()}


def text_of_file() -> str:
    """A line for each form of a model_type's fields, and before them those that hold for all."""
    all_forms = {"": reserved()}
    for kind in [*FAMILIES, *WHOLE]:
        all_forms[kind] = forms_of(CONFIG_MAPPING[kind])
        for form, names in MORE.get(kind, {}).items():
            all_forms[kind][form] = sorted([*all_forms[kind].get(form, []), *names])
        if kind in FAMILIES:
            all_forms[kind] = without_nulls_that_break(kind, all_forms[kind])
    of_kinds = []
    for kind, forms in all_forms.items():
        lines = [f"  {json.dumps(form)}: {json.dumps(names)}" for form, names in forms.items()]
        of_kinds.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(of_kinds) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text_of_file(), encoding="utf-8")
