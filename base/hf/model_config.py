"""What the program reads of a config.json: the sizes of a model, and the names and shapes of its weights.

`NativeConfig` refuses a model if `model.Body` would compute something other than the model's authors do;
`base.hf.blocks_config` has all other families. No torch, so that `grpo.py --check` answers in a second.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from base.hf.family import MLP_NAMES, NATIVE, Family
from base.hf.fields import Shapes, Switch
from config import ConfigError

if TYPE_CHECKING:
    from base.hf.families import Whole
    from base.hf.layers import StateSizes

# Fields of config.json that change the computation, each with the values that `model.Body` computes: the fields that
# transformers or vLLM read for the three families, and the fields of near relatives (Granite, Cohere, Gemma).
UNSET = ("quantization_config", "compression_config", "attn_logit_softcapping", "final_logit_softcapping")
UNSET += ("no_rope_layers",)
OFF = ("mlp_bias", "qkv_bias", "bias", "qk_norm", "use_sliding_window")
SUPPORTED_VALUES = {
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (None, 1),
    "attention_dropout": (None, 0),
    "attention_bias": (None, False, True),
    **dict.fromkeys(OFF, (None, False)),
    **dict.fromkeys(UNSET, (None,)),
}
INTEGERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MORE_INTEGERS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings")
MORE_INTEGERS += ("global_head_dim", "num_global_key_value_heads")
NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "factor", "low_freq_factor", "high_freq_factor")
ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")  # of every kind of RoPE
DEFAULT_THETA = 10_000.0  # transformers', for all three families
WHOLE_HEADS = ("llama", "arcee", "gemma3_text")  # whose hidden_size must be a multiple of the number of heads
MAX_HEAD_DIM = 256  # of torch's varlen attention
EMBEDDING = "model.embed_tokens.weight"
# Types of layers whose first part is not attention alone.
PARTS_OF_TYPES = {
    "linear_attention": ("state",),
    "conv": ("state",),
    "hybrid": ("state", "attention"),
    "mlp": ("mlp",),
    "moe": ("experts",),
}


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's stretching of the low rotary frequencies; fields as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


LLAMA3_FIELDS = tuple(field.name for field in dataclasses.fields(Llama3Rope))


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """What the program reads of a model, under HF's field names. `base.hf.folder.from_hf` makes it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    max_position_embeddings: int | None  # tokens of a sequence; None: no limit
    family: Family = dataclasses.field(compare=False, repr=False)
    hf: dict = dataclasses.field(compare=False, repr=False)  # config.json, or its text_config
    config_json: dict = dataclasses.field(compare=False, repr=False)
    whole: "Whole | None" = dataclasses.field(default=None, kw_only=True)  # of a folder with a vision part
    has_values: bool = dataclasses.field(default=True, kw_only=True)  # else a layer's keys are its values

    @property
    def value_dim(self) -> int:
        """Of a head; head_dim is that of queries and keys."""
        return self.hf["v_head_dim"] if self.family.qkv == "latent" else self.head_dim

    @property
    def flops_per_pair(self) -> int:
        """Of the attention's forward in a layer, for a query and a key that it sees."""
        return 2 * self.num_attention_heads * (self.head_dim + self.value_dim)

    @property
    def cached_dims(self) -> tuple[int, int]:
        """(heads, numbers of each) that a layer has of a token in vLLM's cache."""
        if self.family.qkv == "latent":
            return 1, self.hf["kv_lora_rank"] + self.hf["qk_rope_head_dim"]
        return self.num_key_value_heads, 2 * self.head_dim

    @cached_property
    def of_layers(self) -> list["ModelConfig"]:
        """The model with the sizes of each layer."""
        if self.family.unlike is None:
            return [self] * self.num_hidden_layers
        return [replace(self, **sizes) for sizes in self.family.unlike.sizes(self.hf, self.attention_types)]

    @property
    def softcap(self) -> float | None:
        """The cap of the logits; None: there is none."""
        return self.hf.get("final_logit_softcapping")

    def stored_name(self, name: str) -> str:
        """What the folder calls this tensor of the text model."""
        if self.whole:
            return self._renamed(name, self.whole.prefixes)
        return self._renamed(self.module_name(name), {"model.": self.family.stored_body})

    def module_name(self, name: str) -> str:
        """What transformers' model calls this tensor or layer, in memory: of a folder with a vision part, the whole
        one."""
        name = self._renamed(name, {"model.embed_tokens.": f"model.{self.family.embedding}."})
        return self._renamed(name, {"model.": "model.language_model."}) if self.whole else name

    def is_kept(self, stored_name: str) -> bool:
        """Whether the folder's tensor of this name is no part of the text model, and stays as it is."""
        return self.whole is not None and (stored_name.startswith(self.whole.kept) or self.is_unused(stored_name))

    @property
    def fields_for_vllm(self) -> dict:
        """Fields that vLLM wants beside those of config.json, or in their place."""
        return {}

    def _renamed(self, name: str, prefixes: dict[str, str]) -> str:
        for prefix, new in prefixes.items():
            if name.startswith(prefix):
                return new + name.removeprefix(prefix)
        return name

    def tensor_shapes(self, *, as_computed: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of each weight; a tied head is not repeated. Names are those of the policy and the engine;
        `stored_name` has those of a model folder. as_computed: of experts, as transformers' model has them, all of a
        layer in two tensors."""
        unlike = self.family.unlike
        yield EMBEDDING, (self.vocab_size, self.hidden_size)
        if unlike is not None:
            for name, shape in unlike.body_shapes(self.hf).items():
                yield f"model.{name}", shape
        norm: Shapes = {}
        self._add(norm, f"model.{self.family.final_norm}", (self.hidden_size,), self.family.norm_bias)
        yield from norm.items()
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)
        shapes_of_parts = self._shapes_of_parts(as_computed)
        norms = self._norm_shapes()
        for number, parts in enumerate(self.layers):
            block = norms
            if unlike is not None:
                block = block | unlike.layer_shapes(self.hf)
                shapes_of_parts = self.of_layers[number]._shapes_of_parts(as_computed)
            for part in parts:
                block = block | shapes_of_parts[part]
            for name, shape in block.items():
                yield f"model.layers.{number}.{name}", shape

    def _shapes_of_parts(self, as_computed: bool) -> dict[str, Shapes]:
        return {
            "attention": self._attention_shapes(),
            "state": self.family.state.shapes(self.hf) if self.family.state is not None else {},
            "mlp": self._mlp_shapes(self.family.mlp_module, self.intermediate_size),
            "experts": self._experts_shapes(as_computed) if self.num_experts else {},
        }

    @cached_property
    def layers(self) -> list[tuple[str, ...]]:
        """The parts of each layer, of "attention", "state", and then "mlp" or "experts"."""
        family = self.family
        types = ["full_attention" for _ in range(self.num_hidden_layers)]
        if family.state is not None:
            types = family.layer_types(self.hf)
        layers = []
        for number, kind in enumerate(types):
            parts = list(PARTS_OF_TYPES.get(kind, ("attention",)))
            if not family.one_part:
                parts.append("experts" if self._has_experts(number) else "mlp")
            layers.append(tuple(parts))
        return layers

    @property
    def num_experts(self) -> int:
        """Of a layer; 0 in a dense model."""
        if not self.family.has_experts(self.hf):
            return 0
        return self.hf[self.family.experts.number_field(self.hf)]

    @property
    def expert_size(self) -> int:
        """F of an expert; 0 in a dense model."""
        return self.hf[self.family.experts.inner] if self.num_experts else 0

    @property
    def experts_per_token(self) -> int:
        """How many experts of a layer compute a token; 0 in a dense model."""
        return self.hf["num_experts_per_tok"] if self.num_experts else 0

    @property
    def shared_expert_size(self) -> int:
        """The inner size of the MLP beside the experts of a layer; 0 without one."""
        experts = self.family.experts
        if experts is None or experts.shared_size is None:
            return 0
        size = self.hf[experts.shared_size]
        return size * self.expert_size if experts.shared_counts else size

    @property
    def router_endings(self) -> tuple[str, ...]:
        """How the names of the weights end by which the model chooses experts, or mixes a shared one in; () without
        experts."""
        experts = self.family.experts
        if experts is None:
            return ()
        endings = [f".{experts.router.stored}"]
        if experts.shared_gate is not None:
            endings.append(f".{experts.shared_gate}.weight")
        return tuple(endings)

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs) of each linear layer of the blocks, but for experts and routers."""
        layers = {}
        for name, shape in self.tensor_shapes():
            is_of_mixture = ".experts." in name or name.endswith(self.router_endings)
            is_matrix = len(shape) == 2 and name.endswith(".weight")
            if ".layers." in name and is_matrix and not is_of_mixture:
                layers[name.removesuffix(".weight")] = shape
        return layers

    @property
    def weights_per_token(self) -> int:
        """Elements of the blocks' matrices that a token is multiplied by: of experts, of those that it goes to."""
        num_weights = sum(outputs * inputs for outputs, inputs in self.linear_layers().values())
        if self.num_experts:
            matrices = len(self.family.experts.matrices)
            of_layer = self.hidden_size * (self.num_experts + matrices * self.experts_per_token * self.expert_size)
            num_weights += of_layer * self.count_layers("experts")
        return num_weights

    @cached_property
    def windows(self) -> list[int | None]:
        """How many keys a query of each layer with attention sees at most, its own included; None is all."""
        windows = self.family.windows
        if windows is None or not windows.switch.is_on(self.hf):
            return [None for parts in self.layers if "attention" in parts]
        size = self.hf.get("sliding_window")
        return [size if kind == "sliding_attention" else None for kind in self.attention_types]

    @cached_property
    def attention_types(self) -> list[str]:
        """Of each layer, in a family with windows."""
        windows = self.family.windows
        types = list(self.hf.get("layer_types") or windows.layer_types(self.num_hidden_layers))
        if windows.last_is_full:
            types[-1] = "full_attention"
        return types

    @property
    def with_attention(self) -> list["ModelConfig"]:
        """`of_layers` that have attention."""
        return [model for model, parts in zip(self.of_layers, self.layers, strict=True) if "attention" in parts]

    def attention_flops(self, length: int) -> int:
        """Of the attention's forward over a sequence of this length, in all layers together."""
        flops = 0
        for (window, of_pair), num_layers in self.attention_kinds.items():
            size = length if window is None else min(length, window)
            flops += num_layers * of_pair * (size * (size + 1) // 2 + (length - size) * size)
        return flops

    @cached_property
    def attention_kinds(self) -> Counter[tuple[int | None, int]]:
        """(window, FLOPs of a query and a key) -> how many layers have them."""
        return Counter(zip(self.windows, [model.flops_per_pair for model in self.with_attention], strict=True))

    @property
    def state_sizes(self) -> "StateSizes":
        """Of each layer with state."""
        return self.family.state.sizes(self.hf)

    def count_layers(self, part: str) -> int:
        """With this part; see `layers`."""
        return sum(part in parts for parts in self.layers)

    @property
    def state_flops(self) -> int:
        """Of the forward of all layers with state, but for their matrices, for each token. Of a recurrence as it is
        defined: algorithms that compute chunks make more."""
        if self.family.state is None:
            return 0
        sizes = self.state_sizes
        of_layer = 2 * sizes.width * sizes.channels + self.family.state.flops_of_state * sizes.state
        return self.count_layers("state") * of_layer

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of this layer is a mixture of experts."""
        return "experts" in self.layers[layer]

    def _has_experts(self, layer: int) -> bool:
        experts = self.family.experts
        if self.num_experts == 0:
            return False
        if experts.dense_first is not None:
            return layer >= self.hf.get(experts.dense_first, 1)
        is_dense = layer in (self.hf.get("mlp_only_layers") or ())
        return not is_dense and (layer + 1) % self.hf.get("decoder_sparse_step", 1) == 0

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of a folder is of the layers that predict tokens beyond the next one, which are beside the
        model, but in some families numbered on; or of keys in a layer that takes those of an earlier one."""
        if name.startswith("mtp."):
            return True
        parts = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.(.*)", name)
        if parts is None:
            return False
        number = int(parts[1])
        if number >= self.num_hidden_layers:
            return bool(self.hf.get("num_nextn_predict_layers"))
        return parts[2].startswith(("self_attn.k_", "self_attn.v_")) and not self.of_layers[number].num_key_value_heads

    def _experts_shapes(self, as_computed: bool) -> Shapes:
        experts = self.family.experts
        count = self.num_experts
        hidden = self.hidden_size
        inner = self.expert_size
        shapes: Shapes = {}
        shapes[experts.router.computed if as_computed else experts.router.stored] = (count, hidden)
        if experts.correction_bias is not None:
            shapes[experts.correction_bias] = (count,)
        pair = experts.computed_pair if as_computed else experts.together
        if pair is not None:
            first, down = pair
            shapes[first] = (count, (len(experts.matrices) - 1) * inner, hidden)
            shapes[down] = (count, hidden, inner)
        else:
            for number in range(count):
                *firsts, down = experts.names(number)
                for name in firsts:
                    shapes[name] = (inner, hidden)
                shapes[down] = (hidden, inner)
        if self.shared_expert_size:
            shapes |= self._mlp_shapes(experts.shared, self.shared_expert_size)
        if experts.shared_gate is not None:
            self._add(shapes, experts.shared_gate, (1, hidden))
        return shapes

    def _norm_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for name in self.family.norms:
            self._add(shapes, name, (self.hidden_size,), self.family.norm_bias)
        return shapes

    def _attention_shapes(self) -> Shapes:
        family = self.family
        module = family.attention
        hidden = self.hidden_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        shapes: Shapes = {}
        if family.qkv == "latent":
            shapes |= self._latent_shapes()
        elif family.qkv == "fused":
            self._add(shapes, f"{module}.qkv_proj", (queries + 2 * keys, hidden), family.qkv_bias)
        else:
            gates = queries if family.has_query_gate else 0
            self._add(shapes, f"{module}.q_proj", (queries + gates, hidden), family.qkv_bias)
            if keys:
                self._add(shapes, f"{module}.k_proj", (keys, hidden), family.qkv_bias)
            if keys and self.has_values:
                self._add(shapes, f"{module}.v_proj", (keys, hidden), family.qkv_bias)
        values = self.num_attention_heads * self.value_dim
        self._add(shapes, f"{module}.{family.output_name}", (hidden, values), family.o_bias)
        if family.qk_norm != "none" and family.qk_norm_switch.is_on(self.hf):
            is_whole = family.qk_norm == "of all heads"
            q_norm, k_norm = family.qk_norm_names
            self._add(shapes, f"{module}.{q_norm}", (queries if is_whole else self.head_dim,))
            if keys:
                self._add(shapes, f"{module}.{k_norm}", (keys if is_whole else self.head_dim,))
        return shapes

    def _latent_shapes(self) -> Shapes:
        hidden = self.hidden_size
        heads = self.num_attention_heads
        rank = self.hf.get("q_lora_rank")
        kv_rank = self.hf["kv_lora_rank"]
        rotated = self.hf["qk_rope_head_dim"]
        shapes: Shapes = {}
        if rank is None:
            self._add(shapes, "self_attn.q_proj", (heads * self.head_dim, hidden))
        else:
            self._add(shapes, "self_attn.q_a_proj", (rank, hidden))
            self._add(shapes, "self_attn.q_a_layernorm", (rank,))
            self._add(shapes, "self_attn.q_b_proj", (heads * self.head_dim, rank))
        self._add(shapes, "self_attn.kv_a_proj_with_mqa", (kv_rank + rotated, hidden))
        self._add(shapes, "self_attn.kv_a_layernorm", (kv_rank,))
        keys_and_values = self.head_dim - rotated + self.value_dim
        self._add(shapes, "self_attn.kv_b_proj", (heads * keys_and_values, kv_rank))
        return shapes

    def _mlp_shapes(self, module: str, inner: int) -> Shapes:
        family = self.family
        hidden = self.hidden_size
        shapes: Shapes = {}
        *firsts, down = family.mlp_names or MLP_NAMES[family.mlp]
        rows = 2 * inner if family.mlp == "gate and up fused" else inner
        for name in firsts:
            self._add(shapes, f"{module}.{name}", (rows, hidden), family.mlp_bias)
        self._add(shapes, f"{module}.{down}", (hidden, inner), family.mlp_bias)
        return shapes

    def _add(self, shapes: Shapes, layer: str, shape: tuple[int, ...], bias: Switch | None = None) -> None:
        """The weight of a layer, and the bias if there is one."""
        shapes[f"{layer}.weight"] = shape
        if bias is not None and bias.is_on(self.hf):
            shapes[f"{layer}.bias"] = (shape[0],)


@dataclass(frozen=True)
class NativeConfig(ModelConfig):
    """What `model.Body` computes."""

    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None  # None: plain RoPE
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    initializer_range: float  # std of `init_weights`

    @classmethod
    def read(cls, hf: dict, source: str) -> "NativeConfig":
        """Of a config.json, as `base.hf.folder.from_hf`."""
        content = hf
        hf = hf | _rope_of(hf, source)
        _check_values(hf, source)
        has_llama3_rope = hf["rope_type"] == "llama3"
        needed = (*INTEGERS, "rms_norm_eps")
        if has_llama3_rope:
            needed += LLAMA3_FIELDS
        check_numbers(hf, needed, source)
        is_qwen2 = hf["model_type"] == "qwen2"
        has_bias = bool(hf.get("attention_bias"))
        heads = hf["num_attention_heads"]
        rope_scaling = None
        if has_llama3_rope:
            rope_scaling = Llama3Rope(**{field: hf[field] for field in LLAMA3_FIELDS})
        head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
        check_heads(hf, head_dim, source)
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_hidden_layers=hf["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=hf["rms_norm_eps"],
            rope_theta=hf.get("rope_theta") or DEFAULT_THETA,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings")),
            qkv_bias=is_qwen2 or has_bias,  # Qwen2 always has them, and never a bias on o_proj
            o_bias=has_bias and not is_qwen2,
            qk_norm=hf["model_type"] == "qwen3",
            initializer_range=hf.get("initializer_range") or 0.02,
            max_position_embeddings=hf.get("max_position_embeddings"),
            family=NATIVE[hf["model_type"]],
            hf=content,
            config_json=content,
        )

    @property
    def fields_for_vllm(self) -> dict:
        """Of these it has defaults of its own."""
        return {name: getattr(self, name) for name in ("num_key_value_heads", "head_dim") if name not in self.hf}


def _check_values(hf: dict, source: str) -> None:
    """ConfigError for a field with a value that `model.Body` does not compute."""
    supported_values = SUPPORTED_VALUES
    if hf.get("model_type") == "llama":
        supported_values = SUPPORTED_VALUES | {"sliding_window": (None,)}  # Qwen's has a switch
    for field, supported in supported_values.items():
        _check_value(field, supported, hf, source)
    names = hf.get("architectures") or []  # vLLM builds the first
    if not all(name.lower().startswith(hf["model_type"]) for name in names):
        raise ConfigError(f"{source}: architectures={names!r:.80} is not of model_type={hf['model_type']!r}")
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise ConfigError(f"{source}: layer_types: only 'full_attention' is supported")


def _check_value(field: str, supported: Sequence[object], hf: dict, source: str) -> None:
    if hf.get(field) not in supported:
        names = ", ".join("absent" if value is None else repr(value) for value in supported)
        raise ConfigError(f"{source}: {field}={hf.get(field)!r:.80} is not supported; supported: {names}")


def check_numbers(hf: dict, needed: Sequence[str], source: str) -> None:
    """ConfigError for a number that is missing, of another type, or not above 0."""
    for field in dict.fromkeys((*INTEGERS, *MORE_INTEGERS, *NUMBERS, *needed)):
        value = hf.get(field)
        if value is None and field not in needed:
            continue
        if field in NUMBERS:
            is_right = isinstance(value, int | float) and value > 0
            expected = "int or float"
        else:
            is_right = isinstance(value, int) and value > 0
            expected = "int"
        if not is_right:
            raise ConfigError(f"{source}: {field}={value!r:.80}: expected {expected} above 0")


def check_heads(hf: dict, head_dim: int, source: str) -> None:
    """ConfigError for heads that transformers or vLLM refuse when they start."""
    heads = hf["num_attention_heads"]
    key_heads = hf.get("num_key_value_heads") or heads
    if heads % key_heads:
        raise ConfigError(f"{source}: num_key_value_heads={key_heads} does not divide num_attention_heads={heads}")
    if hf["model_type"] in WHOLE_HEADS and hf["hidden_size"] % heads:
        raise ConfigError(f"{source}: num_attention_heads={heads} does not divide hidden_size={hf['hidden_size']}")
    if head_dim < 2 or head_dim % 2 or hf.get("qk_rope_head_dim", 0) % 2:
        raise ConfigError(f"{source}: head_dim={head_dim}: expected an even number, whose pairs are rotated")


def _rope_of(hf: dict, source: str) -> dict:
    """The settings of the rotary embedding, with `rope_type`. ConfigError for one that `model.Body` would ignore."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    applied = ROPE_FIELDS
    if kind == "llama3":
        applied += LLAMA3_FIELDS
    ignored = [name for name in given if name not in applied]
    if ignored and kind in SUPPORTED_VALUES["rope_type"]:
        raise ConfigError(f"{source}: remove {', '.join(ignored)}: no effect with rope_type={kind!r}")
    return given | {"rope_type": kind}
