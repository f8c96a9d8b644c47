"""base/hf/config_forms.json, from transformers' classes: `python tests/helpers/config_forms.py` writes it anew."""

import copy
import dataclasses
import json
import re
import sys
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "base" / "hf" / "config_forms.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from families import hf_config

from base.hf.config_forms import NEEDED_BY_ROPE
from base.hf.families import FAMILIES, WHOLE
from base.hf.fields import NUM_EXPERTS

# Attributes that config.json may have, too; base/hf/config_forms.py has their forms.
FIELDS_TOO = ("model_type", "name_or_path", "num_labels", "output_attentions", "rope_scaling", "torch_dtype")
ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act")
# What transformers reads and does not annotate: form -> fields, of a model_type.
MORE = {
    "gemma4_text": {
        "int": ["global_head_dim"],
        "int or null": ["num_global_key_value_heads"],
        "int above 0 or null": ["num_experts"],  # vLLM
        "object": ["per_layer_config"],
    },
    "qwen3_5_text": {"int above 0": ["full_attention_interval"]},
    "qwen3_5_moe_text": {"int above 0": ["full_attention_interval"]},
    "qwen3_next": {"int above 0": ["full_attention_interval"]},
    "lfm2": {"bool": ["tie_embedding"], "int above 0": ["block_ff_dim"]},
    "lfm2_moe": {"bool": ["tie_embedding"]},
}
HAVE_RULES = re.compile("head_dim|num_key_value_heads|sliding_window|.*dropout|.*pdrop")  # in base/hf
OF_VLLM = ("default", "linear", "llama3", "yarn")  # for all families
ROPE_TYPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
    "proportional": {},
}
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


def measured(kind: str, forms: dict[str, list[str]]) -> dict[str, list[str]]:
    """The forms without null, and without values, with which the class is built and its forward ends, or is not
    finite. Some fields have rules of their own."""
    found: dict[str, list[str]] = {}
    for form, names in forms.items():
        for name in names:
            kinds = form.split(" or ")
            if not HAVE_RULES.fullmatch(name):
                if "null" in kinds and not works(kind, {"num_kv_shared_layers": 0, name: None}):
                    kinds.remove("null")
                kinds = [bounded(kind, name, one) for one in kinds]
            found.setdefault(" or ".join(kinds), []).append(name)
    return {form: sorted(names) for form, names in sorted(found.items())}


def bounded(kind: str, name: str, form: str) -> str:
    """The form, as "int", with what is too low, as "int above -1"; of "bool" what is left."""
    if form == "float" and not (works(kind, {name: 0.0}) and works(kind, {name: -1.0})):
        return "float above 0"
    if form == "int" and not works(kind, {name: 0}):
        return "int above 0"
    if form == "int" and not works(kind, {name: -1}):
        return "int above -1"
    if form == "bool" and not works(kind, {name: False}):
        return "true"
    return form


def logits(kind: str, change: dict) -> torch.Tensor | None:
    """Of a tiny model with this change of its config.json; None if transformers cannot build or compute it."""
    change = copy.deepcopy(change)  # some classes write into what they get
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(hf_config(kind, **change)).eval()
        with torch.no_grad():
            return model(torch.arange(1, 8)[None], use_cache=False).logits
    except Exception:  # of whatever kind
        return None


def works(kind: str, change: dict) -> bool:
    found = logits(kind, change)
    return found is not None and bool(found.isfinite().all())


def forms_of_rope(kind: str) -> tuple[dict[str, list[str]], list[str]]:
    """Of rope_parameters: (what the class computes, what it ends without)."""
    own = hf_config(kind).to_dict().get("rope_parameters") or {}
    layers = {name: setting for name, setting in own.items() if isinstance(setting, dict)}
    settings = layers or {"": own}

    def changed(change: dict) -> dict:
        of_layers = {layer: setting | change for layer, setting in settings.items()}
        return {"rope_parameters": of_layers if layers else of_layers[""]}

    types = []
    for name, fields in ROPE_TYPES.items():
        is_own = name in [setting.get("rope_type") for setting in settings.values()]
        if (is_own or name in OF_VLLM) and works(kind, changed(fields | {"rope_type": name})):
            types.append(name)
    half, whole = (logits(kind, changed({"partial_rotary_factor": part})) for part in (0.5, 1.0))
    reads_part = half is not None and not torch.equal(half, whole)
    needed = [name for name in own if not works(kind, {"rope_parameters": without(own, name)})]
    for layer, setting in layers.items():
        for name in setting:
            if not works(kind, {"rope_parameters": own | {layer: without(setting, name)}}):
                needed.append(f"{layer}.{name}")
    return {
        " or ".join(map(json.dumps, types)): ["rope_type", "type"],
        "object" if layers else "absent": ["full_attention", "linear_attention", "sliding_attention"],
        "float or int or null" if reads_part else "1 or 1.0 or null": ["partial_rotary_factor"],
    }, [name for name in needed if name not in NEEDED_BY_ROPE["llama3"]]


def without(fields: dict, name: str) -> dict:
    return {other: value for other, value in fields.items() if other != name}


def defaults_of(config_class) -> dict[str, bool | int | float | str]:
    """What the class takes for a field that config.json lacks. Their number of experts has several names."""
    found = {}
    for field in dataclasses.fields(config_class):
        if isinstance(field.default, bool | int | float | str) and field.name not in NUM_EXPERTS:
            found[field.name] = field.default
    return found


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
    """What holds for all, and then of each model_type. A line for each form."""
    parts = {"": {"fields": reserved()}}
    for kind in [*FAMILIES, *WHOLE]:
        parts[kind] = forms_of_kind(kind)
    return (
        re.sub(r"\n    +|\n   ]", lambda space: " " if space[0][-1] == " " else "]", json.dumps(parts, indent=1)) + "\n"
    )


def forms_of_kind(kind: str) -> dict[str, dict]:
    forms = forms_of(CONFIG_MAPPING[kind])
    for form, names in MORE.get(kind, {}).items():
        for others in forms.values():
            others[:] = [name for name in others if name not in names]
        forms[form] = sorted([*forms.get(form, []), *names])
    if kind not in FAMILIES:
        return {"fields": forms}
    of_rope, needed = forms_of_rope(kind)
    for form, names in of_rope.items():
        if names == ["partial_rotary_factor"]:
            forms.setdefault(form, []).extend(names)
    of_kind = {"fields": measured(kind, forms), "rope_parameters": of_rope, "needed_by_rope": needed}
    return of_kind | {"defaults": defaults_of(CONFIG_MAPPING[kind])}


if __name__ == "__main__":
    FILE.write_text(text_of_file(), encoding="utf-8")
