"""The forms of config.json's fields: those that transformers, and with it vLLM, starts with. No torch.

Its classes are strict: one field of another form, though nothing reads it, would end a run after its start.
config_forms.json has their annotations; tests/helpers/config_forms.py writes it.
"""

import json
import re
from pathlib import Path

from base.hf.fields import NUM_EXPERTS
from base.system.files import read_json
from config import ConfigError

# What vLLM takes, if it is smaller, for max_position_embeddings.
LENGTHS = (
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Form -> names: of fields that the readers of all families rely on, or that transformers reads and does not annotate.
OF_ALL = {
    "str or null": [
        "hybrid_override_pattern",
        "torch_dtype",
        "name_or_path",
        "attn_implementation",
        "experts_implementation",
    ],
    "list of str or null": ["architectures", "layer_types"],
    "object or null": ["rope_parameters", "rope_scaling"],
    "list of int or null": ["no_rope_layers"],
    "list of str": ["layers_block_type"],
    "object": ["auto_map"],
    "bool or null": ["output_attentions"],
    "int": ["num_labels"],
    "float above 1 or int above 1": ["rope_theta"],  # yarn divides by its logarithm
    "int or null": ["sliding_window", "num_nextn_predict_layers", *LENGTHS],
    "[] or null": ["mlp_only_layers"],
    "1 or absent": ["decoder_sparse_step"],
    "absent": [
        "full_attention_interval",
        "logit_scale",
        "logits_scaling",
        "lm_head_multiplier",
    ],  # `blocks` reads them of each class
    "1 or 1.0 or null": ["rotary_pct", "rotary_emb_fraction"],
    # What vLLM reads in place of a field that is read here, and what the class of another family computes with.
    "null": [
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "query_pre_attn_scalar",
        "dual_chunk_attention_config",
        "rotary_emb_base",
        "mrope_section",
        "tie_embedding",
        "full_attn_idxs",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_attention_groups",
        "hidden_size_per_head",
        "text_config",
        "moe_num_experts",
        "block_configs",
        "compress_ratios",
        "canvas_length",
        "rswa_window",
        "index_topk",
        "mlp_layer_types",
    ],
}
OF_ROPE = {
    "str": ["rope_type", "type"],
    "int": ["original_max_position_embeddings"],
    "bool": ["truncate"],
    "float above 1 or int above 1": ["rope_theta"],
    "float or int": [
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "mscale",
        "mscale_all_dim",
        "llama_4_scaling_beta",
    ],
    "float or int or null": ["attention_factor", "beta_fast", "beta_slow"],
}
NEEDED_BY_ROPE = {"linear": ["factor"], "yarn": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
CLASSES = {"null": type(None), "bool": bool, "int": int, "float": float, "str": str, "object": dict, "absent": None}
VALUES = {
    "dtype": (None, "float16", "bfloat16", "float32", "float64"),
    "torch_dtype": (None, "float16", "bfloat16", "float32", "float64"),
    "is_encoder_decoder": (None, False),
    "is_causal": (None, True),
}
# Of sizes: vLLM computes the rotation of each position, and each layer or expert is an object.
MAX_POSITIONS = 1 << 24
MAX_PARTS = 1 << 16
MAX_INT = (1 << 31) - 1
MAX_FLOAT = 1e15
POSITIONS = ("max_position_embeddings", "original_max_position_embeddings")
PARTS = ("num_hidden_layers", *NUM_EXPERTS, "num_labels")
FRACTIONS = ("dropout", "pdrop", "initializer_range", "partial_rotary_factor")


def forms_of_kind(model_type: str) -> dict[str, dict]:
    """What config_forms.json has of it: the forms of "fields" and of "rope_parameters", and "defaults" of fields."""
    return read_json(Path(__file__).with_suffix(".json")).get(model_type, {"fields": {}})


def check_forms(hf: dict, source: str) -> None:
    """ConfigError for a field of another form, or a value with which transformers or vLLM do not start."""
    check_fields(hf, {"model_type": "str or null"}, source)
    of_kind = forms_of_kind(hf.get("model_type"))
    forms: dict[str, str] = {}
    for names_of_form in (OF_ALL, forms_of_kind("")["fields"], of_kind["fields"]):
        forms |= _form_of_names(names_of_form)
    check_fields(hf, forms, source)
    _check_rope(hf, of_kind, source)
    for name, values in VALUES.items():
        if hf.get(name) not in values:
            known = ", ".join(json.dumps(value) for value in values)
            raise ConfigError(f"{source}: {name}={hf[name]!r:.80} is not supported; supported: {known}")
    _check_sizes(hf, source)
    num_layers = hf.get("num_hidden_layers")
    for name in ("layer_types", "no_rope_layers"):
        of_layers = hf.get(name)
        if of_layers is not None and num_layers not in (None, len(of_layers)):
            problem = f"{name} names {len(of_layers)} layers: expected num_hidden_layers={num_layers}"
            raise ConfigError(f"{source}: {problem}")
    for number in hf.get("id2label") or ():
        if not re.fullmatch("[0-9]{1,9}", str(number)):
            raise ConfigError(f"{source}: id2label: {number!r:.80}: expected a number")


def _check_sizes(fields: dict, source: str) -> None:
    for name, value in fields.items():
        if not isinstance(value, int | float):
            continue
        largest: float = MAX_INT
        if name.endswith(FRACTIONS):
            largest = 1
        elif name in POSITIONS:
            largest = MAX_POSITIONS
        elif name in PARTS:
            largest = MAX_PARTS
        elif isinstance(value, float):
            largest = MAX_FLOAT
        least = 0 if largest == 1 else -largest
        if not least <= value <= largest:  # as a NaN
            raise ConfigError(f"{source}: {name}={value!r:.80}: expected a number from {least:,} to {largest:,}")


def _check_rope(hf: dict, of_kind: dict, source: str) -> None:
    """Of all layers, or of each kind of layers."""
    rope = hf.get("rope_parameters")
    older = hf.get("rope_scaling")
    if None not in (rope, older) and rope != older:
        raise ConfigError(f"{source}: rope_parameters and rope_scaling differ: remove one")
    source = f"{source}: {'rope_scaling' if rope is None else 'rope_parameters'}"
    rope = older if rope is None else rope
    if rope is None:
        return
    is_nested = [isinstance(value, dict) for value in rope.values()]
    if any(is_nested) and not all(is_nested):
        raise ConfigError(f"{source}: what holds for all layers is beside what holds for some: remove it")
    forms = _form_of_names(OF_ROPE) | _form_of_names(of_kind.get("rope_parameters", {}))
    for setting in (rope, *rope.values()):
        if not isinstance(setting, dict):
            continue
        check_fields(setting, forms, source)
        _check_sizes(setting, source)
        rope_type = setting.get("rope_type", setting.get("type"))
        if setting.get("type", rope_type) != rope_type:
            raise ConfigError(f"{source}: rope_type and type differ: remove one")
        for name in NEEDED_BY_ROPE.get(rope_type, ()):
            if name not in setting:
                raise ConfigError(f"{source}: {name} is missing")
    for name in of_kind.get("needed_by_rope", ()):
        layer, _, inner = name.rpartition(".")
        if inner not in rope.get(layer, rope):
            raise ConfigError(f"{source}: {name} is missing")


def _form_of_names(names_of_form: dict[str, list[str]]) -> dict[str, str]:
    forms = {}
    for form, names in names_of_form.items():
        for name in names:
            forms[name] = form
    return forms


def check_fields(fields: dict, forms: dict[str, str], source: str) -> None:
    """ConfigError for a field that is there, and not of its form, as "int or list of int or null"."""
    for name, form in forms.items():
        if name in fields and not _has_form(fields[name], form):
            raise ConfigError(f"{source}: {name}={fields[name]!r:.80}: expected {form}")


def _has_form(value: object, form: str) -> bool:
    """Whether a value of JSON is one of "int or list of int or null", or "int above 0", or of values as in JSON."""
    for kind in form.split(" or "):
        name, _, bound = kind.partition(" above ")
        if kind.startswith("list of "):
            is_right = isinstance(value, list) and all(_has_form(item, kind.removeprefix("list of ")) for item in value)
        elif name in CLASSES:
            is_right = type(value) is CLASSES[name]  # a bool is no int
        else:
            is_right = type(value) is type(json.loads(kind)) and value == json.loads(kind)
        if is_right and (not bound or value > int(bound)):
            return True
    return False
