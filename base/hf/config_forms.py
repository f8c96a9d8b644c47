"""The forms of config.json's fields: those that transformers, and with it vLLM, starts with. No torch.

Its classes are strict: one field of another form, though nothing reads it, would end a run after its start.
config_forms.json has their annotations; tests/helpers/config_forms.py writes it.
"""

import json
import re
from pathlib import Path

from base.hf.family import NUM_EXPERTS
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
    "list of str or null": ["architectures", "layer_types", "layers_block_type"],
    "object or null": ["rope_parameters", "rope_scaling", "auto_map"],
    "bool or null": ["output_attentions"],
    "int": ["num_labels"],
    "float or int": ["rope_theta"],
    "float or int or null": ["partial_rotary_factor"],
    "int or null": ["sliding_window", *LENGTHS],
    # What vLLM reads in place of a field that is read here.
    "null": [
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
    "float or int": [
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "partial_rotary_factor",
        "mscale",
        "mscale_all_dim",
        "llama_4_scaling_beta",
    ],
    "float or int or null": ["attention_factor", "beta_fast", "beta_slow"],
    "object": ["full_attention", "sliding_attention", "linear_attention"],
}
NEEDED_BY_ROPE = {"linear": ["factor"], "yarn": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
CLASSES = {"null": type(None), "bool": bool, "int": int, "float": float, "str": str, "object": dict, "absent": None}
VALUES = {
    "dtype": (None, "float16", "bfloat16", "float32", "float64"),
    "torch_dtype": (None, "float16", "bfloat16", "float32", "float64"),
    "is_encoder_decoder": (None, False),
}
# Of sizes: vLLM computes the rotation of each position, and each layer or expert is an object.
MAX_POSITIONS = 1 << 24
MAX_PARTS = 1 << 16
MAX_INT = (1 << 31) - 1
POSITIONS = ("max_position_embeddings", "original_max_position_embeddings")
PARTS = ("num_hidden_layers", *NUM_EXPERTS, "num_labels")


def check_forms(hf: dict, source: str) -> None:
    """ConfigError for a field of another form, or a value with which transformers or vLLM do not start."""
    check_fields(hf, {"model_type": "str or null"}, source)
    of_kinds = read_json(Path(__file__).with_suffix(".json"))
    forms: dict[str, str] = {}
    for names_of_form in (OF_ALL, of_kinds[""], of_kinds.get(hf.get("model_type"), {})):
        forms |= _form_of_names(names_of_form)
    check_fields(hf, forms, source)
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(hf.get(name) or {}, f"{source}: {name}")
    for name, values in VALUES.items():
        if hf.get(name) not in values:
            known = ", ".join(json.dumps(value) for value in values)
            raise ConfigError(f"{source}: {name}={hf[name]!r:.80} is not supported; supported: {known}")
    _check_sizes(hf, source)
    types = hf.get("layer_types")
    num_layers = hf.get("num_hidden_layers")
    if types is not None and num_layers not in (None, len(types)):
        problem = f"layer_types names {len(types)} layers: expected num_hidden_layers={num_layers}"
        raise ConfigError(f"{source}: {problem}")
    for number in hf.get("id2label") or ():
        if not re.fullmatch("[0-9]{1,9}", str(number)):
            raise ConfigError(f"{source}: id2label: {number!r:.80}: expected a number")


def _check_sizes(fields: dict, source: str) -> None:
    for name, value in fields.items():
        largest = MAX_INT
        if name in POSITIONS:
            largest = MAX_POSITIONS
        if name in PARTS:
            largest = MAX_PARTS
        if isinstance(value, int) and abs(value) > largest:
            raise ConfigError(f"{source}: {name}={value!r:.80}: expected up to {largest:,}")
        if name.endswith(("dropout", "pdrop")) and value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{source}: {name}={value!r:.80}: expected a probability")


def _check_rope(rope: dict, source: str) -> None:
    """Of all layers, or of each kind of layers."""
    for setting in (rope, *rope.values()):
        if not isinstance(setting, dict):
            continue
        check_fields(setting, _form_of_names(OF_ROPE), source)
        _check_sizes(setting, source)
        for name in NEEDED_BY_ROPE.get(setting.get("rope_type", setting.get("type")), ()):
            if name not in setting:
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
    """Whether a value of JSON is one of "int or list of int or null", or of names in quotes."""
    for kind in form.split(" or "):
        if kind.startswith('"'):
            is_right = value == kind.strip('"')
        elif kind.startswith("list of "):
            is_right = isinstance(value, list) and all(_has_form(item, kind.removeprefix("list of ")) for item in value)
        else:
            is_right = type(value) is CLASSES[kind]  # a bool is no int
        if is_right:
            return True
    return False
