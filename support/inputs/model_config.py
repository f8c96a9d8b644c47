"""What a model folder holds: the architecture in config.json, and the weights in safetensors files.

This module owns the list of supported architectures: it refuses a model if `model.Decoder` would compute something
other than the model's authors do. No torch, so that `grpo.py --check` answers in a second.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from config import ConfigError, DataError, HFConfigOverrides
from support.inputs.files import download, read_json

# Fields of config.json that change the computation, each with the values that `Decoder` computes: the fields that
# transformers or vLLM read for the three families, and the fields of near relatives (Granite, Cohere, Gemma).
UNSET = ("quantization_config", "compression_config", "text_config", "per_layer_config", "block_configs")
UNSET += ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
UNSET += ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "dual_chunk_attention_config")
UNSET += ("rotary_emb_base", "rotary_pct", "rotary_emb_fraction", "mrope_section", "no_rope_layers")
OFF = ("mlp_bias", "qkv_bias", "bias", "qk_norm", "use_sliding_window")
SUPPORTED_VALUES = {
    "model_type": ("llama", "qwen2", "qwen3"),
    "hidden_act": ("silu",),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (None, 1),
    "attention_dropout": (None, 0),
    "is_causal": (None, True),
    "attention_bias": (None, False, True),
    "tie_word_embeddings": (None, False, True),
    **dict.fromkeys(OFF, (None, False)),
    **dict.fromkeys(UNSET, (None,)),
}
INTEGERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MORE_INTEGERS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings")
NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "factor", "low_freq_factor", "high_freq_factor")
ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")  # of every kind of RoPE
DEFAULT_THETA = 10_000.0  # transformers', for all three families
FLOATS = ("F64", "F32", "F16", "BF16")  # in safetensors
EMBEDDING = "model.embed_tokens.weight"


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
    hf: dict = dataclasses.field(compare=False, repr=False)  # the whole of config.json

    @classmethod
    def from_hf(cls, hf: dict, source: str = "config.json") -> "ModelConfig":
        """Reads the dict of a config.json written by transformers 4 or 5; `source` names the file in messages.
        ConfigError names a field that is missing, has the wrong type, or asks for what `Decoder` does not compute."""
        content, hf = hf, hf | _rope_of(hf, source)
        of_llama = {"sliding_window": (None,)} if hf.get("model_type") == "llama" else {}  # Qwen's has a switch
        for field, supported in (SUPPORTED_VALUES | of_llama).items():
            if hf.get(field) not in supported:
                names = ", ".join("absent" if value is None else repr(value) for value in supported)
                raise ConfigError(f"{source}: {field}={hf.get(field)!r:.80} is not supported; supported: {names}")
        names = hf.get("architectures") or []  # vLLM builds the first
        if not all(name.lower().startswith(hf["model_type"]) for name in names):
            raise ConfigError(f"{source}: architectures={names!r:.80} is not of model_type={hf['model_type']!r}")
        if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
            raise ConfigError(f"{source}: layer_types: only 'full_attention' is supported")
        llama3 = Llama3Rope.__dataclass_fields__ if hf["rope_type"] == "llama3" else ()
        for field in (*INTEGERS, *MORE_INTEGERS, *NUMBERS):
            value, types = hf.get(field), (int, float) if field in NUMBERS else (int,)
            is_needed = value is not None or field in (*INTEGERS, "rms_norm_eps", *llama3)
            if is_needed and not (isinstance(value, types) and value > 0):
                expected = " or ".join(kind.__name__ for kind in types)
                raise ConfigError(f"{source}: {field}={value!r:.80}: expected {expected} above 0")
        is_qwen2, has_bias = hf["model_type"] == "qwen2", bool(hf.get("attention_bias"))
        heads = hf["num_attention_heads"]
        return cls(
            **{field: hf[field] for field in INTEGERS},
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            rms_norm_eps=hf["rms_norm_eps"],
            rope_theta=hf.get("rope_theta") or DEFAULT_THETA,
            rope_scaling=Llama3Rope(**{field: hf[field] for field in llama3}) if llama3 else None,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings")),
            qkv_bias=is_qwen2 or has_bias,  # Qwen2 always has them, and never a bias on o_proj
            o_bias=has_bias and not is_qwen2,
            qk_norm=hf["model_type"] == "qwen3",
            initializer_range=hf.get("initializer_range") or 0.02,
            max_position_embeddings=hf.get("max_position_embeddings"),
            hf=content,
        )

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of each weight, as in a model folder; a tied head is not repeated."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        yield EMBEDDING, (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)
        rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        layer: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,))
        layer |= {f"self_attn.{n}_proj.weight": (size, queries if n == "o" else hidden) for n, size in rows.items()}
        layer |= {f"self_attn.{n}_proj.bias": (rows[n],) for n in "qkv" * self.qkv_bias + "o" * self.o_bias}
        layer |= {f"self_attn.{n}_norm.weight": (self.head_dim,) for n in "qk" * self.qk_norm}
        layer |= dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (inner, hidden))
        layer["mlp.down_proj.weight"] = hidden, inner
        for number in range(self.num_hidden_layers):
            yield from ((f"model.layers.{number}.{name}", shape) for name, shape in layer.items())


def _rope_of(hf: dict, source: str) -> dict:
    """The settings of the rotary embedding, with `rope_type`. ConfigError for a setting that `Decoder` would ignore."""
    given = [hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)]  # transformers 5 and 4
    rope = given[0] if given else {}
    if given != [rope] * len(given):
        raise ConfigError(f"{source}: rope_parameters and rope_scaling differ: remove one")
    rope = {"rope_type": rope.get("type", "default")} | rope
    applied = ROPE_FIELDS + (tuple(Llama3Rope.__dataclass_fields__) if rope["rope_type"] == "llama3" else ())
    ignored = [name for name in rope if name not in applied]
    if rope["rope_type"] in SUPPORTED_VALUES["rope_type"] and ignored:
        raise ConfigError(f"{source}: remove {', '.join(ignored)}: no effect with rope_type={rope['rope_type']!r}")
    return rope


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files of this folder that the index names. They may be missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return [single]
    return [folder / name for name in sorted({Path(name).name for name in read_json(index)["weight_map"].values()})]


def missing_weights(folder: Path) -> list[str]:
    """The names of the files with weights that are not there."""
    return [file.name for file in weight_files(folder) if not file.exists()]


def check_weights(folder: Path, expected: Iterable[tuple[str, Sequence[int]]]) -> None:
    """ConfigError unless the folder's files are whole and hold the `expected` tensors, (name, shape), as floats, and no
    others. Rotary frequencies and the head beside a tied one, which some models store, are ignored, as vLLM does. Reads
    headers only."""
    stored: dict[str, tuple[Path, list[int] | str]] = {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            for name in file.keys():
                header = file.get_slice(name)
                stored[name] = path, header.get_shape() if header.get_dtype() in FLOATS else header.get_dtype()
    for name, shape in expected:
        path, in_file = stored.pop(name, (folder, "missing"))
        if in_file != list(shape):
            raise ConfigError(f"{path}: {name} is {in_file}, but config.json says {list(shape)}")
    for name, (path, _) in stored.items():
        if not name.endswith(("lm_head.weight", "rotary_emb.inv_freq")):
            raise ConfigError(f"{path}: {name} is not in the model that config.json describes")


def open_weights(path: Path, framework: str = "numpy") -> safe_open:
    """An open safetensors file. ConfigError if its header is malformed or does not give the size of the file."""
    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        fix = "fetch it again (other formats are not read: they can run code)"
        raise ConfigError(f"{path}: not a readable safetensors file ({error!s:.200}); {fix}") from error


def resolve_folder(name: str, key: str, weights: bool = True) -> Path:
    """The local folder that the value of config key `key` names: a Hugging Face folder, or a hub name `org/model`. What
    the hub has is fetched, of a model also the `weights`."""
    folder = Path(name)
    if not os.path.exists(folder) and name.count("/") == 1 and not name.startswith((".", "/")):
        problem = f"{key}: '{name}' is not a local folder"
        instead = "without network, download it elsewhere and give the folder's path"
        patterns = ["*.json", "*.jinja"] + ["*.safetensors"] * (weights and key.endswith("model_name"))
        folder = download(name, patterns, problem, instead)
    if not os.path.isdir(folder):
        fix = "give a Hugging Face folder or a hub name org/model"
        raise DataError(f"{key}: no folder '{name}' (tried {os.path.abspath(name)}): {fix}")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        raise DataError(f"{key}: '{name}' is an adapter: merge it into its base (PEFT: merge_and_unload)")
    if key.endswith("model_name") and not (folder / "config.json").is_file():
        raise DataError(f"{key}: {folder / 'config.json'}: cannot be read (no such file): give a folder that has one")
    return folder


def read_model_config(folder: Path, overrides: HFConfigOverrides | None = None) -> ModelConfig:
    """The folder's config.json, with `overrides`. ConfigError if the model is not supported."""
    hf = read_json(folder / "config.json")
    if overrides and overrides.max_position_embeddings:
        hf["max_position_embeddings"] = overrides.max_position_embeddings
    return ModelConfig.from_hf(hf, str(folder / "config.json"))
