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

# Of fields that the readers of all families rely on, or that transformers reads and has no annotation of.
OF_ALL = {
    "architectures": "list of str or null",
    "layer_types": "list of str or null",
    "layers_block_type": "list of str or null",
    "hybrid_override_pattern": "str or null",
    "rope_parameters": "object or null",
    "rope_scaling": "object or null",
    "torch_dtype": "str or null",
    "num_labels": "int",
    "output_attentions": "bool or null",
    "name_or_path": "str or null",
    "attn_implementation": "str or null",
    "experts_implementation": "str or null",
    "auto_map": "object or null",
    "rope_theta": "float or int",
    "partial_rotary_factor": "float or int or null",
    "sliding_window": "int or null",
}
# What vLLM reads in place of a field that is read here.
NOT_READ = ("num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups", "hidden_size_per_head")
NOT_READ += ("text_config", "moe_num_experts", "block_configs", "compress_ratios", "canvas_length", "rswa_window")
NOT_READ += ("index_topk", "mlp_layer_types")
# What vLLM takes, if it is smaller, for max_position_embeddings.
LENGTHS = ("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions")
LENGTHS += ("max_sequence_length", "max_seq_length", "seq_len")
OF_ALL |= dict.fromkeys(NOT_READ, "null") | dict.fromkeys(LENGTHS, "int or null")
OF_ROPE = {"rope_type": "str", "type": "str", "original_max_position_embeddings": "int", "truncate": "bool"}
OF_ROPE |= dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), "float or int")
OF_ROPE |= dict.fromkeys(("partial_rotary_factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta"), "float or int")
OF_ROPE |= dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), "float or int or null")
OF_ROPE |= dict.fromkeys(("full_attention", "sliding_attention", "linear_attention"), "object")
NEEDED_BY_ROPE = {"linear": ("factor",), "yarn": ("factor",)}
NEEDED_BY_ROPE["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
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
MAXIMA = {"max_position_embeddings": MAX_POSITIONS, "original_max_position_embeddings": MAX_POSITIONS}
MAXIMA |= dict.fromkeys(("num_hidden_layers", *NUM_EXPERTS, "num_labels"), MAX_PARTS)


def check_forms(hf: dict, source: str) -> None:
    """ConfigError for a field of another form, or a value with which transformers or vLLM do not start."""
    check_fields(hf, {"model_type": "str or null"}, source)
    forms = dict(OF_ALL)
    all_forms = read_json(Path(__file__).with_suffix(".json"))
    for kind in ("", hf.get("model_type")):
        for form, names in all_forms.get(kind, {}).items():
            forms |= dict.fromkeys(names, form)
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
        largest = MAXIMA.get(name, MAX_INT)
        if isinstance(value, int) and abs(value) > largest:
            raise ConfigError(f"{source}: {name}={value!r:.80}: expected up to {largest:,}")
        if name.endswith(("dropout", "pdrop")) and value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{source}: {name}={value!r:.80}: expected a probability")


def _check_rope(rope: dict, source: str) -> None:
    """Of all layers, or of each kind of layers."""
    for setting in (rope, *rope.values()):
        if not isinstance(setting, dict):
            continue
        check_fields(setting, OF_ROPE, source)
        _check_sizes(setting, source)
        for name in NEEDED_BY_ROPE.get(setting.get("rope_type", setting.get("type")), ()):
            if name not in setting:
                raise ConfigError(f"{source}: {name} is missing")


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
