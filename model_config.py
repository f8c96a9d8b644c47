"""What a model computes, read from its config.json; refused where `model.Decoder` would compute something else.

Torch-free, so that `grpo.py --check` finds an unsupported model in a second. Used by model.py, and by data.py for that.
"""

from dataclasses import dataclass

from config import ConfigError

# Fields of config.json that change the computation, each with the values that `Decoder` is written for.
SUPPORTED_VALUES = {
    "model_type": ("llama", "qwen2", "qwen3"),
    "hidden_act": ("silu",),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (None, 1),
    "attention_dropout": (None, 0),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "is_causal": (None, True),
    "quantization_config": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None,),
    "residual_multiplier": (None,),
    "logits_scaling": (None,),
}


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

    @classmethod
    def from_hf(cls, hf: dict, source: str = "config.json") -> "ModelConfig":
        """Reads the dict of a config.json written by transformers 4 or 5; `source` names it in messages.

        Raises ConfigError, naming the field and what is supported, if a field is missing or has a value under
        which the model's authors compute something that `Decoder` does not.
        """
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}  # transformers 5 or 4
        hf = {**hf, **rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
        for field, supported in SUPPORTED_VALUES.items():
            if hf.get(field) not in supported:
                names = ", ".join("absent" if value is None else repr(value) for value in supported)
                raise ConfigError(f"{source}: {field}={hf.get(field)!r} is not supported; supported: {names}")
        if set(hf.get("layer_types") or ()) - {"full_attention"}:
            raise ConfigError(f"{source}: layer_types other than 'full_attention' are not supported")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        llama3 = Llama3Rope.__dataclass_fields__ if hf["rope_type"] == "llama3" else ()
        missing = [field for field in (*sizes, "rms_norm_eps", *llama3) if hf.get(field) is None]
        if missing:
            raise ConfigError(f"{source}: {', '.join(missing)} missing")
        is_qwen2, attention_bias = hf["model_type"] == "qwen2", bool(hf.get("attention_bias"))
        return cls(
            **{field: hf[field] for field in sizes},
            num_key_value_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            rms_norm_eps=hf["rms_norm_eps"],
            rope_theta=hf.get("rope_theta") or 10_000.0,  # transformers' default for all three
            rope_scaling=Llama3Rope(**{field: hf[field] for field in llama3}) if llama3 else None,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings")),
            qkv_bias=is_qwen2 or attention_bias,  # Qwen2 always has them, and never a bias on o_proj
            o_bias=attention_bias and not is_qwen2,
            qk_norm=hf["model_type"] == "qwen3",
            initializer_range=hf.get("initializer_range", 0.02),
        )
