"""What a model folder holds: the architecture by its config.json, and whole safetensors files with its weights.

Owns which architectures are supported: it refuses a model for which `model.Decoder` would compute something else than
its authors do. No torch, so that `grpo.py --check` answers in a second.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from config import ConfigError, DataError
from hf.files import download, read_json

# Fields of config.json that change the computation, each with the values that `Decoder` computes.
UNSET = ("quantization_config", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
SUPPORTED_VALUES = {
    "model_type": ("llama", "qwen2", "qwen3"),
    "hidden_act": ("silu",),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (None, 1),
    "attention_dropout": (None, 0),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "is_causal": (None, True),
    "attention_bias": (None, False, True),
    "tie_word_embeddings": (None, False, True),
    **dict.fromkeys(UNSET, (None,)),
}
INTEGERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MORE_INTEGERS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings")
NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's stretching of the low rotary frequencies; fields as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder computes, under HF's field names where there is one. Made by `from_hf`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None  # None: plain RoPE
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    initializer_range: float  # std of `init_weights`
    max_position_embeddings: int | None  # tokens of a sequence; None: no limit

    @classmethod
    def from_hf(cls, hf: dict, source: str = "config.json") -> "ModelConfig":
        """Reads the dict of a config.json written by transformers 4 or 5; `source` names it in messages. ConfigError
        names a field that is missing, is not the number it should be, or asks for what `Decoder` does not compute."""
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}  # transformers 5 or 4
        if not isinstance(rope, dict):
            raise ConfigError(f"{source}: rope_parameters or rope_scaling: expected a mapping, got {rope!r}")
        hf = {**hf, **rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
        for field, supported in SUPPORTED_VALUES.items():
            if hf.get(field) not in supported:
                names = ", ".join("absent" if value is None else repr(value) for value in supported)
                raise ConfigError(f"{source}: {field}={hf.get(field)!r} is not supported; supported: {names}")
        layer_types = hf.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise ConfigError(f"{source}: layer_types: only a list of 'full_attention' is supported")
        llama3 = Llama3Rope.__dataclass_fields__ if hf["rope_type"] == "llama3" else ()
        missing = [field for field in (*INTEGERS, "rms_norm_eps", *llama3) if hf.get(field) is None]
        if missing:
            raise ConfigError(f"{source}: {', '.join(missing)} missing")
        for field in (*INTEGERS, *MORE_INTEGERS, *NUMBERS):
            value = hf.get(field)
            types, kind = (int | float, "number") if field in NUMBERS else (int, "whole number")
            is_number = isinstance(value, types) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ConfigError(f"{source}: {field}={value!r} is not a {kind} above 0")
        is_qwen2, has_bias = hf["model_type"] == "qwen2", bool(hf.get("attention_bias"))
        heads = hf["num_attention_heads"]
        kv_heads, head_dim = hf.get("num_key_value_heads") or heads, hf.get("head_dim") or hf["hidden_size"] // heads
        if heads % kv_heads:
            raise ConfigError(f"{source}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(f"{source}: head_dim={head_dim}: not even (absent: hidden_size / num_attention_heads)")
        return cls(
            **{field: hf[field] for field in INTEGERS},
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=hf["rms_norm_eps"],
            rope_theta=hf.get("rope_theta") or 10_000.0,  # transformers' default for all three
            rope_scaling=Llama3Rope(**{field: hf[field] for field in llama3}) if llama3 else None,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings")),
            qkv_bias=is_qwen2 or has_bias,  # Qwen2 always has them, and never a bias on o_proj
            o_bias=has_bias and not is_qwen2,
            qk_norm=hf["model_type"] == "qwen3",
            initializer_range=hf.get("initializer_range") or 0.02,
            max_position_embeddings=hf.get("max_position_embeddings"),
        )


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files that its index names. ConfigError where one is missing or incomplete. Which
    tensors they hold, `load_weights` checks."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{index}: no 'weight_map' of name to file")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        adapter = any(folder.glob("adapter_model.*"))
        why = "merge the adapter into its model" if adapter else "other formats are not read: they can run code"
        raise ConfigError(f"{folder}: no {single.name} nor {index.name} ({why})")
    for file in files:
        open_weights(file)
    return files


def stored_shape(folder: Path, name: str) -> list[int] | None:
    """Shape of a weight by the headers of the folder's `weight_files`; None where they do not have it."""
    for file in map(open_weights, weight_files(folder)):
        if name in file.keys():
            return file.get_slice(name).get_shape()
    return None


def open_weights(path: Path, framework: str = "numpy") -> safe_open:
    """An open safetensors file. ConfigError where its header is malformed, or its size is not what that says."""
    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); fetch it again") from error


def resolve_model_folder(name: str, key: str = "policy.model_name") -> Path:
    """A checked local folder for the value of config key `key`: a Hugging Face folder, or a hub name `org/model`.
    Raises DataError, or ConfigError where the model is not supported."""
    folder = Path(name)
    # os.path says no to a name that is too long for the file system; Path's own methods raise.
    if not os.path.exists(folder) and name.count("/") == 1 and not name.startswith((".", "/")):
        problem = f"{key}: '{name}' is no local folder"
        instead = "without network, download it elsewhere and give the folder's path"
        folder = download(name, ["*.json", "*.safetensors", "*.jinja"], problem, instead)
    if not os.path.isdir(folder):
        raise DataError(f"{key}: no folder '{name}' (give a Hugging Face folder or a hub name org/model)")
    read_model_config(folder)
    weight_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder}: no tokenizer.json (save the tokenizer in its 'fast' format)")
    return folder


def read_model_config(folder: Path) -> ModelConfig:
    """The folder's config.json. ConfigError where the model is not supported."""
    return ModelConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
