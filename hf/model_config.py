"""What a model folder holds: the architecture in config.json, and the weights in safetensors files.

Owns the list of supported architectures: a model is refused if `model.Decoder` would compute something other than its
authors do. No torch, so that `grpo.py --check` answers in a second.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from config import ConfigError, DataError, HFConfigOverrides
from hf.files import download, read_json

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
        """Reads the dict of a config.json written by transformers 4 or 5; `source` names it in messages. ConfigError
        names a field that is missing, is not the number it should be, or asks for what `Decoder` does not compute."""
        content, hf = hf, hf | _rope_of(hf, source)
        of_llama = {"sliding_window": (None,)} if hf.get("model_type") == "llama" else {}  # Qwen's has a switch
        for field, supported in (SUPPORTED_VALUES | of_llama).items():
            if hf.get(field) not in supported:
                names = ", ".join("absent" if value is None else repr(value) for value in supported)
                raise ConfigError(f"{source}: {field}={hf.get(field)!r:.80} is not supported; supported: {names}")
        names = hf.get("architectures") or []  # vLLM builds the first
        if not isinstance(names, list) or not all(str(name).lower().startswith(hf["model_type"]) for name in names):
            raise ConfigError(f"{source}: architectures={names!r:.80} is not of model_type={hf['model_type']!r}")
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
            if value is not None and not (is_number and 0 < value < 2**63):
                raise ConfigError(f"{source}: {field}={value!r:.80} is not a {kind} above 0")
        if layer_types and len(layer_types) != hf["num_hidden_layers"]:
            raise ConfigError(f"{source}: {len(layer_types)} layer_types, num_hidden_layers={hf['num_hidden_layers']}")
        is_qwen2, has_bias = hf["model_type"] == "qwen2", bool(hf.get("attention_bias"))
        heads = hf["num_attention_heads"]
        kv_heads, head_dim = hf.get("num_key_value_heads") or heads, hf.get("head_dim") or hf["hidden_size"] // heads
        if llama3 and hf["low_freq_factor"] >= hf["high_freq_factor"]:
            raise ConfigError(f"{source}: low_freq_factor={hf['low_freq_factor']} is not below high_freq_factor")
        if heads % kv_heads:
            raise ConfigError(f"{source}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(f"{source}: head_dim={head_dim}: not even (absent: hidden_size / num_attention_heads)")
        return cls(
            **{field: hf[field] for field in INTEGERS},
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
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
        """(name, shape) of each weight, as a checkpoint has them; a tied head is not repeated."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
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
    """The settings of the rotary embedding, with their `rope_type`. ConfigError for a setting that is given twice, or
    would have no effect."""
    given = [hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)]  # transformers 5 and 4
    rope = given[0] if given else {}
    if not isinstance(rope, dict) or any(each != rope for each in given):
        values = " and ".join(map(repr, given))
        raise ConfigError(f"{source}: rope_parameters or rope_scaling: expected one mapping, got {values:.160}")
    rope = {"rope_type": rope.get("type", "default")} | rope
    applied = ROPE_FIELDS + (tuple(Llama3Rope.__dataclass_fields__) if rope["rope_type"] == "llama3" else ())
    beside = hf | {"type": rope["rope_type"]}
    for name, value in rope.items():
        if rope["rope_type"] in SUPPORTED_VALUES["rope_type"] and name not in applied:
            raise ConfigError(f"{source}: {name}={value!r:.80} has no effect with rope_type={rope['rope_type']!r}")
        if beside.get(name) not in (None, value):
            raise ConfigError(
                f"{source}: {name}={value!r:.80} in its rope settings, but {beside[name]!r:.80} beside it"
            )
    return rope


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files that the index names. `check_weights` says whether they are whole."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        adapter = any(folder.glob("adapter_model.*"))
        why = "merge the adapter into its model" if adapter else "other formats are not read: they can run code"
        raise ConfigError(f"{folder}: no {single.name} nor {index.name} ({why})")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: no 'weight_map' of name to file")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ConfigError(f"{index}: {outside[0]!r:.80} is no file of this folder")
    return [folder / name for name in names]


def check_weights(folder: Path, expected: Iterable[tuple[str, Sequence[int]]]) -> None:
    """ConfigError unless the folder's files are whole and hold the `expected` tensors, (name, shape), as floats, and no
    others. The copy of a tied head and rotary frequencies, which some models store, are ignored. Reads headers only."""
    stored: dict[str, tuple[Path, list[int], str]] = {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            for name in file.keys():
                if name in stored:
                    raise ConfigError(f"{path}: {name!r:.80} is in {stored[name][0].name} too")
                tensor = file.get_slice(name)
                stored[name] = path, tensor.get_shape(), tensor.get_dtype()
    for name, shape in expected:
        if name not in stored:
            raise ConfigError(f"{folder}: weights do not match its config.json; missing: {name}")
        path, stored_shape, dtype = stored.pop(name)
        if stored_shape != list(shape):
            raise ConfigError(f"{path}: {name}: shape {stored_shape}, but {list(shape)} by config.json")
        if dtype not in FLOATS:
            raise ConfigError(f"{path}: {name}: dtype {dtype} is not one of {', '.join(FLOATS)}")
    spare = ("lm_head.weight", "rotary_emb.inv_freq")
    unexpected = [f"{name:.80} ({path.name})" for name, (path, _, _) in stored.items() if not name.endswith(spare)]
    if unexpected:
        raise ConfigError(f"{folder}: weights do not match its config.json; unexpected: {', '.join(unexpected[:5])}")


def open_weights(path: Path, framework: str = "numpy") -> safe_open:
    """An open safetensors file. ConfigError where its header is malformed or does not give the size of the file."""
    try:
        return safe_open(path, framework=framework)
    except (OSError, MemoryError, SafetensorError) as error:  # MemoryError: a size that lies
        raise ConfigError(f"{path}: not a readable safetensors file ({error!s:.200}); fetch it again") from error


def resolve_folder(name: str, key: str) -> Path:
    """The local folder for the value of config key `key`: a Hugging Face folder, or a hub name `org/model`. DataError
    where there is none."""
    folder = Path(name)
    # os.path says no to a name that is too long for the file system; Path's own methods raise.
    if not os.path.exists(folder) and name.count("/") == 1 and not name.startswith((".", "/")):
        problem = f"{key}: '{name}' is no local folder"
        instead = "without network, download it elsewhere and give the folder's path"
        patterns = ["*.json", "*.jinja"] + ["*.safetensors"] * key.endswith("model_name")
        folder = download(name, patterns, problem, instead)
    if not os.path.isdir(folder):
        raise DataError(f"{key}: no folder '{name}' (give a Hugging Face folder or a hub name org/model)")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        keys = "policy.dtensor_cfg.lora_cfg.enabled=true and lora_cfg.adapter_path"
        raise DataError(f"{key}: '{name}' is an adapter: give its base here, and the adapter by {keys}")
    return folder


def read_model_config(folder: Path, overrides: HFConfigOverrides | None = None) -> ModelConfig:
    """The folder's config.json, with overrides of it. ConfigError where the model is not supported."""
    hf = read_json(folder / "config.json")
    if overrides and overrides.max_position_embeddings:
        hf["max_position_embeddings"] = overrides.max_position_embeddings
    return ModelConfig.from_hf(hf, str(folder / "config.json"))
