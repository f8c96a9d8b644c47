"""The families of decoders that transformers computes (`blocks`): their weights, by name and shape.

A family is listed once it has passed the tests that docs/families.md names; that page also says how to add one. No
torch, so that `grpo.py --check` answers in a second.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Literal, NamedTuple

from config import ConfigError

Shapes = dict[str, tuple[int, ...]]
HAS_FLA = find_spec("fla") is not None  # the package fla-core, with a kernel of the gated delta rule for CUDA
DELTA_CHUNK = 64  # rows that transformers' own gated delta rule computes at once
VECTORS = ("A_log", "D", "dt_bias")  # of a recurrence, a number for each head
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron's pattern
OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # until transformers 5
NATIVE = ("llama", "qwen2", "qwen3")  # `model.Body` computes these

PRE_NORM = ("input_layernorm", "post_attention_layernorm")
POST_NORM = ("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA_NORMS = (*PRE_NORM, "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4_NORMS = (*PRE_NORM, "post_self_attn_layernorm", "post_mlp_layernorm")
MLP_NAMES = {
    "gated": ("gate_proj", "up_proj", "down_proj"),
    "gate and up fused": ("gate_up_proj", "down_proj"),
    "plain": ("up_proj", "down_proj"),
}


class Switch(NamedTuple):
    """A field of config.json that says whether a tensor is there; where it is absent, the default of transformers."""

    field: str
    default: bool = False

    def is_on(self, hf: dict) -> bool:
        return bool(hf.get(self.field, self.default))


ATTENTION_BIAS = Switch("attention_bias")
MLP_BIAS = Switch("mlp_bias")
USE_BIAS = Switch("use_bias")
ALWAYS = Switch("", True)
USE_WINDOW = Switch("use_sliding_window")
MAMBA_BIAS = Switch("mamba_proj_bias")
MAMBA_CONV_BIAS = Switch("mamba_conv_bias", True)


class Names(NamedTuple):
    """What a tensor of a layer is called in a checkpoint, in transformers' model, and in vLLM's."""

    stored: str
    computed: str
    engine: str


GATE = Names("mlp.gate.weight", "mlp.gate.weight", "mlp.gate.weight")
GRANITE_ROUTER = Names(
    "block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight", "block_sparse_moe.gate.weight"
)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """How a family names its experts. In transformers' model those of a layer are two tensors, `computed`.gate_up_proj
    [E, 2F, D] and `computed`.down_proj [E, D, F]. A checkpoint has three matrices of each, [F, D] twice and [D, F],
    under `stored`.NUMBER; or, if `together` names them, the two tensors. Without `gate` there are two, and
    `computed`.up_proj [E, F, D].

    inner: the field of config.json with F. shared: the MLP that every token passes, and the field with its size;
    shared_counts: in multiples of F. dense_first: the field with the number of layers at the start without experts, and
    that number where it is absent. correction_bias: the router has one, a buffer. may_be_none: the field with their
    number may be 0. Names are within a layer.
    """

    stored: str = "mlp.experts"
    computed: str = "mlp.experts"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    together: tuple[str, str] | None = None
    router: Names = GATE
    inner: str = "moe_intermediate_size"
    shared: str | None = None
    shared_size: str | None = None
    shared_counts: bool = False
    shared_gate: str | None = None
    dense_first: tuple[str, int] | None = None
    correction_bias: bool = False
    may_be_none: bool = False

    @property
    def computed_pair(self) -> tuple[str, str]:
        """The two tensors of a layer, in transformers' model."""
        first = "up_proj" if self.gate is None else "gate_up_proj"
        return f"{self.computed}.{first}", f"{self.computed}.down_proj"

    @property
    def matrices(self) -> list[str]:
        """Of an expert in a checkpoint, the last of which is [D, F], the others [F, D]."""
        return [name for name in (self.gate, self.up, self.down) if name is not None]

    def names(self, number: int) -> list[str]:
        """The checkpoint's names of the matrices of expert `number`, within its layer."""
        return [f"{self.stored}.{number}.{matrix}.weight" for matrix in self.matrices]

    def sizes(self, hf: dict) -> list[str]:
        """The fields of config.json with its sizes. Of the number of experts the one that is there, or the usual."""
        num_experts = [field for field in NUM_EXPERTS if field in hf] or NUM_EXPERTS
        fields = [num_experts[0], "num_experts_per_tok", self.inner]
        if self.shared_size is not None:
            fields.append(self.shared_size)
        return fields

    def has(self, stored: str) -> bool:
        """Whether the checkpoint's tensor of this name, within its layer, is of experts."""
        return stored.startswith(f"{self.stored}.") or (self.together is not None and stored in self.together)

    @property
    def renamed(self) -> Iterator[Names]:
        """The tensors that have one name each, but maybe not the same one everywhere."""
        yield self.router
        if self.together is not None:
            for stored, computed in zip(self.together, self.computed_pair, strict=True):
                yield Names(stored, computed, computed)


QWEN_EXPERTS = Experts(
    shared="mlp.shared_expert", shared_size="shared_expert_intermediate_size", shared_gate="mlp.shared_expert_gate"
)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Which layers see only the last `sliding_window` keys, if config.json has no layer_types: all, or all but each
    `full_every`-th. size: where config.json has no sliding_window. Without `switch` there are no windows."""

    size: int | None = None
    full_every: int | None = None
    switch: Switch = ALWAYS

    def layer_types(self, num_layers: int) -> list[str]:
        """As in a config.json that has them."""
        types = []
        for number in range(1, num_layers + 1):
            is_full = self.full_every is not None and number % self.full_every == 0
            types.append("full_attention" if is_full else "sliding_attention")
        return types


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A kind of folder with a vision part. Its text model is trained; the other tensors stay as they are.

    texts: model_types of its text_config; the first is meant where it has none. body, head: what the names of the text
    model's tensors begin with, in place of `model.` and `lm_head.`. kept: what all other names begin with. defaults: of
    fields that published text_configs leave out.
    """

    texts: tuple[str, ...]
    body: str
    head: str
    kept: tuple[str, ...]
    defaults: dict[str, int]

    @property
    def prefixes(self) -> dict[str, str]:
        """Of a name in the text model -> in the folder."""
        return {"model.": self.body, "lm_head.": self.head}


class StateSizes(NamedTuple):
    """Of a layer with state. channels, width: of the convolution. inner: inputs of the last matrix. heads: of the
    recurrence, 0 if there is none; the state of each is [key_dim, value_dim], and transformers' own code computes
    `chunk` rows at once."""

    channels: int
    width: int
    inner: int
    heads: int
    key_dim: int
    value_dim: int
    chunk: int

    @property
    def state(self) -> int:
        """Numbers of the state of a recurrence."""
        return self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Layers of Mamba 2: their module, and the fields of config.json with their sizes. `groups` of heads have a vector
    B and a vector C of `state` numbers each; width: of the convolution."""

    module: str = "mamba"
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    chunk: str = "mamba_chunk_size"
    norm: Switch = ALWAYS
    conv_bias: Switch = MAMBA_CONV_BIAS
    in_bias: Switch = MAMBA_BIAS
    out_bias: Switch = MAMBA_BIAS
    layer_type = "linear_attention"
    flops_of_state = 4  # for each of its numbers and a row: B x is added, and C reads

    @property
    def fields(self) -> tuple[str, ...]:
        """Those that config.json must have."""
        return self.heads, self.head_dim, self.groups, self.state, self.width, self.chunk

    def sizes(self, hf: dict) -> StateSizes:
        heads = hf[self.heads]
        inner = heads * hf[self.head_dim]
        return StateSizes(
            channels=inner + 2 * hf[self.groups] * hf[self.state],
            width=hf[self.width],
            inner=inner,
            heads=heads,
            key_dim=hf[self.state],
            value_dim=hf[self.head_dim],
            chunk=hf[self.chunk],
        )

    def shapes(self, hf: dict) -> Shapes:
        """Within a layer."""
        hidden = hf["hidden_size"]
        channels, width, inner, heads, *_ = self.sizes(hf)
        shapes: Shapes = dict.fromkeys(VECTORS, (heads,))
        shapes["conv1d.weight"] = (channels, 1, width)
        if self.conv_bias.is_on(hf):
            shapes["conv1d.bias"] = (channels,)
        shapes["in_proj.weight"] = (inner + channels + heads, hidden)
        if self.in_bias.is_on(hf):
            shapes["in_proj.bias"] = (inner + channels + heads,)
        if self.norm.is_on(hf):
            shapes["norm.weight"] = (inner,)
        shapes["out_proj.weight"] = (hidden, inner)
        if self.out_bias.is_on(hf):
            shapes["out_proj.bias"] = (hidden,)
        return {f"{self.module}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Layers of the gated delta rule. is_fused: two matrices for their inputs, or four."""

    is_fused: bool = False
    module = "linear_attn"
    layer_type = "linear_attention"
    fields = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )

    flops_of_state = 6  # the key reads it, the value's correction is added, and the query reads

    def sizes(self, hf: dict) -> StateSizes:
        key_heads, heads, key_dim, value_dim, width = (hf[name] for name in self.fields)
        values = heads * value_dim
        return StateSizes(
            channels=2 * key_heads * key_dim + values,
            width=width,
            inner=values,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            chunk=DELTA_CHUNK,
        )

    def shapes(self, hf: dict) -> Shapes:
        """Within a layer."""
        hidden = hf["hidden_size"]
        channels, width, values, heads, _, value_dim, _ = self.sizes(hf)
        shapes: Shapes = {"A_log": (heads,), "dt_bias": (heads,)}
        shapes["conv1d.weight"] = (channels, 1, width)
        if self.is_fused:
            shapes["in_proj_qkvz.weight"] = (channels + values, hidden)
            shapes["in_proj_ba.weight"] = (2 * heads, hidden)
        else:
            shapes["in_proj_qkv.weight"] = (channels, hidden)
            shapes["in_proj_z.weight"] = (values, hidden)
            shapes["in_proj_b.weight"] = (heads, hidden)
            shapes["in_proj_a.weight"] = (heads, hidden)
        shapes["norm.weight"] = (value_dim,)
        shapes["out_proj.weight"] = (hidden, values)
        return {f"{self.module}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """Layers that are a convolution between two gates."""

    module = "conv"
    layer_type = "conv"
    fields = ("conv_L_cache",)
    bias = Switch("conv_bias")
    flops_of_state = 0

    def sizes(self, hf: dict) -> StateSizes:
        hidden = hf["hidden_size"]
        return StateSizes(hidden, hf["conv_L_cache"], hidden, heads=0, key_dim=0, value_dim=0, chunk=1)

    def shapes(self, hf: dict) -> Shapes:
        """Within a layer."""
        hidden = hf["hidden_size"]
        shapes: Shapes = {"conv.weight": (hidden, 1, hf["conv_L_cache"])}
        shapes["in_proj.weight"] = (3 * hidden, hidden)
        shapes["out_proj.weight"] = (hidden, hidden)
        if self.bias.is_on(hf):
            shapes |= {"conv.bias": (hidden,), "in_proj.bias": (3 * hidden,), "out_proj.bias": (hidden,)}
        return {f"{self.module}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family names its weights. A bias is there if the field of its switch says so, and never without a switch.

    head_dim, is_tied: where config.json does not say. None: hidden_size / num_attention_heads. norm_tensors: how many
    float32 tensors, each as large as its input, a norm keeps for its backward; the last is for its weight's gradient.
    caps_logits: it computes final_logit_softcapping, as vLLM does. values: of a field, those with which transformers
    and vLLM compute the same; None is absent or null.

    qkv: "apart" and "fused" are matrices of all heads. "latent" is the attention of DeepSeek V2 (arXiv 2405.04434,
    section 2.1): keys and values of all heads come from one vector of kv_lora_rank dims, queries from one of
    q_lora_rank unless that is null; queries and keys have qk_nope_head_dim + qk_rope_head_dim dims, values v_head_dim.
    has_query_gate: q_proj has a gate for each number that the attention returns. mlp_size: the field of config.json.

    state: the layers that carry one. A layer has it, or attention, and then an MLP or experts, by its type in
    config.json, or every `full_every`-th has attention. one_part: a layer has only one of these; hybrid: all have both.
    embedding: what transformers' model calls it. stored_body: what names in a checkpoint begin with, in place of
    `model.`. engine_parts: (in vLLM's names within a layer, in those of transformers' model).
    """

    architecture: str
    norms: tuple[str, ...] = PRE_NORM
    norm_bias: Switch | None = None
    norm_tensors: int = 2
    qkv: Literal["apart", "fused", "latent"] = "apart"
    qkv_bias: Switch | None = None
    o_bias: Switch | None = None
    qk_norm: Literal["none", "of a head", "of all heads"] = "none"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_switch: Switch = ALWAYS
    attention: str = "self_attn"
    output_name: str = "o_proj"
    has_query_gate: bool = False
    mlp: Literal["gated", "gate and up fused", "plain"] = "gated"
    mlp_module: str = "mlp"
    mlp_names: tuple[str, ...] | None = None
    mlp_size: str = "intermediate_size"
    mlp_is_adjusted: Switch | None = None
    mlp_bias: Switch | None = None
    head_dim: int | None = None
    is_tied: bool = False
    windows: Windows | None = None
    experts: Experts | None = None
    caps_logits: bool = False
    values: dict[str, tuple] = field(default_factory=dict)
    final_norm: str = "norm"
    state: Mamba | DeltaNet | ShortConv | None = None
    full_every: int | None = None
    one_part: bool = False
    hybrid: bool = False
    embedding: str = "embed_tokens"
    stored_body: str = "model."
    engine_parts: tuple[tuple[str, str], ...] = ()

    def listed_types(self, hf: dict) -> list[str] | None:
        """The type of each layer that config.json names, in the words of transformers 5; None if it names none."""
        listed = hf.get("layers_block_type") or hf.get("layer_types")
        if self.one_part and listed is None:
            listed = [LETTERS.get(letter, letter) for letter in hf.get("hybrid_override_pattern") or ()]
        if self.hybrid or not listed:
            return None
        return [OLDER_TYPES.get(name, name) for name in listed]

    def layer_types(self, hf: dict) -> list[str]:
        """Of a family with state."""
        if (listed := self.listed_types(hf)) is not None:
            return listed
        types = []
        for number in range(hf["num_hidden_layers"]):
            kind = self.state.layer_type
            if self.hybrid:
                kind = "hybrid"
            elif self.full_every is not None and (number + 1) % hf.get("full_attention_interval", self.full_every) == 0:
                kind = "full_attention"
            elif number in (hf.get("full_attn_idxs") or ()):
                kind = "full_attention"
            types.append(kind)
        return types

    def has_experts(self, hf: dict) -> bool:
        """Whether some of its layers may be mixtures."""
        if self.experts is None:
            return False
        if self.one_part:
            return "moe" in self.layer_types(hf)
        num_experts, *_ = self.experts.sizes(hf)
        return not (self.experts.may_be_none and hf.get(num_experts) == 0)

    def inner_size(self, hf: dict) -> int | None:
        """Of the MLP; None if config.json does not say. Of LFM2 it may be an upper bound, as in transformers."""
        size = hf.get(self.mlp_size, hf.get("intermediate_size"))
        if self.mlp_is_adjusted is None or not self.mlp_is_adjusted.is_on(hf):
            return size
        multiple = hf.get("block_multiple_of", 256)
        size = int(hf.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        return math.ceil(size / multiple) * multiple


# transformers has no other, and vLLM no bias.
LATENT_VALUES = {
    "topk_method": (None, "noaux_tc"),
    "scoring_func": (None, "sigmoid"),
    "moe_layer_freq": (None, 1),
    "rope_interleave": (None, True),
    "attention_bias": (None, False),
}
GLM_EXPERTS = Experts(
    shared="mlp.shared_experts",
    shared_size="n_shared_experts",
    shared_counts=True,
    dense_first=("first_k_dense_replace", 1),
    correction_bias=True,
)
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, mlp_bias=MLP_BIAS),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=ALWAYS),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        head_dim=128,
    ),
    "mistral": Family(architecture="MistralForCausalLM", windows=Windows(size=4096)),
    "ministral3": Family(architecture="Ministral3ForCausalLM", head_dim=128, windows=Windows()),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        norms=GEMMA_NORMS,
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        head_dim=256,
        is_tied=True,
        windows=Windows(size=4096, full_every=6),
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        norms=POST_NORM,
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of all heads",
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        norms=POST_NORM,
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of all heads",
        windows=Windows(size=4096, full_every=4),
    ),
    "phi3": Family(architecture="Phi3ForCausalLM", qkv="fused", mlp="gate and up fused", windows=Windows()),
    "granite": Family(
        architecture="GraniteForCausalLM", qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, mlp_bias=MLP_BIAS
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        windows=Windows(switch=USE_WINDOW),
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        mlp_bias=MLP_BIAS,
        is_tied=True,
    ),
    "glm": Family(
        architecture="GlmForCausalLM", qkv_bias=Switch("attention_bias", True), mlp="gate and up fused", head_dim=128
    ),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        norms=GLM4_NORMS,
        qkv_bias=Switch("attention_bias", True),
        mlp="gate and up fused",
        head_dim=128,
    ),
    "arcee": Family(
        architecture="ArceeForCausalLM", qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, mlp="plain", mlp_bias=MLP_BIAS
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        norm_bias=ALWAYS,
        norm_tensors=1,
        qkv_bias=Switch("use_bias", True),
        o_bias=Switch("use_bias", True),
        mlp="plain",
        mlp_names=("c_fc", "c_proj"),
        mlp_bias=Switch("use_bias", True),
        is_tied=True,
        windows=Windows(),
    ),
    "ernie4_5": Family(
        architecture="Ernie4_5ForCausalLM",
        qkv_bias=USE_BIAS,
        o_bias=USE_BIAS,
        mlp_bias=USE_BIAS,
        head_dim=128,
        is_tied=True,
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        qkv_bias=Switch("attention_bias", True),
        o_bias=Switch("attention_out_bias"),
        mlp_bias=MLP_BIAS,
        head_dim=128,
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM",
        norms=POST_NORM,
        qk_norm="of a head",
        windows=Windows(size=4096, full_every=4),
    ),
    "hunyuan_v1_dense": Family(
        architecture="HunYuanDenseV1ForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        qk_norm_names=("query_layernorm", "key_layernorm"),
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        norms=("input_layernorm",),
        norm_tensors=3,
        is_tied=True,
        windows=Windows(size=4096, full_every=4),
        values={"tie_word_embeddings": (None, True)},  # vLLM has no such head
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=Switch("qkv_bias", True),
        windows=Windows(size=4096, full_every=2, switch=USE_WINDOW),
        experts=QWEN_EXPERTS,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        windows=Windows(size=4096, switch=USE_WINDOW),
        experts=Experts(),
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of all heads",
        experts=Experts(inner="intermediate_size"),
        values={"norm_topk_prob": (None, False)},  # vLLM ignores it
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        windows=Windows(),
        experts=Experts(
            stored="block_sparse_moe.experts",
            gate="w1",
            up="w3",
            down="w2",
            router=Names("block_sparse_moe.gate.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight"),
            inner="intermediate_size",
        ),
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        qk_norm_switch=Switch("use_qk_norm"),
        head_dim=128,
        experts=GLM_EXPERTS,
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        qkv="latent",
        experts=GLM_EXPERTS,
        values=LATENT_VALUES | {"first_k_dense_replace": (None, 1)},
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        qkv="latent",
        experts=replace(GLM_EXPERTS, dense_first=("first_k_dense_replace", 3)),
        values=LATENT_VALUES,
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        experts=Experts(
            computed="block_sparse_moe.experts",
            together=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
            router=GRANITE_ROUTER,
            inner="intermediate_size",
        ),
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        has_query_gate=True,
        head_dim=256,
        state=DeltaNet(),
        full_every=4,
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        has_query_gate=True,
        head_dim=256,
        experts=QWEN_EXPERTS,
        state=DeltaNet(),
        full_every=4,
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        has_query_gate=True,
        head_dim=256,
        experts=QWEN_EXPERTS,
        state=DeltaNet(is_fused=True),
        full_every=4,
    ),
    "nemotron_h": Family(
        architecture="NemotronHForCausalLM",
        norms=("norm",),
        attention="mixer",
        mlp="plain",
        mlp_module="mixer",
        mlp_bias=MLP_BIAS,
        head_dim=128,
        final_norm="norm_f",
        experts=Experts(
            stored="mixer.experts",
            computed="mixer.experts",
            gate=None,
            router=Names("mixer.gate.weight", "mixer.gate.weight", "mixer.gate.weight"),
            shared="mixer.shared_experts",
            shared_size="moe_shared_expert_intermediate_size",
            correction_bias=True,
        ),
        state=Mamba(
            module="mixer",
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            width="conv_kernel",
            chunk="chunk_size",
            conv_bias=Switch("use_conv_bias", True),
            in_bias=USE_BIAS,
            out_bias=USE_BIAS,
        ),
        one_part=True,
        embedding="embeddings",
        stored_body="backbone.",
        engine_parts=(("mixer.A", "mixer.A_log"),),
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        mlp="gate and up fused",
        mlp_module="shared_mlp",
        mlp_names=("input_linear", "output_linear"),
        mlp_size="shared_intermediate_size",
        experts=Experts(
            computed="block_sparse_moe.experts",
            together=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
            router=GRANITE_ROUTER,
            inner="intermediate_size",
            shared="shared_mlp",
            shared_size="shared_intermediate_size",
            may_be_none=True,
        ),
        state=Mamba(),
        engine_parts=(("mamba.A", "mamba.A_log"),),
    ),
    "falcon_h1": Family(
        architecture="FalconH1ForCausalLM",
        norms=("input_layernorm", "pre_ff_layernorm"),
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        mlp_module="feed_forward",
        mlp_bias=MLP_BIAS,
        final_norm="final_layernorm",
        state=Mamba(norm=Switch("mamba_rms_norm"), out_bias=Switch("projectors_bias")),
        hybrid=True,
        engine_parts=(("mamba.mamba.", "mamba."), ("mamba.A", "mamba.A_log")),
    ),
    "lfm2": Family(
        architecture="Lfm2ForCausalLM",
        norms=("operator_norm", "ffn_norm"),
        qk_norm="of a head",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        output_name="out_proj",
        mlp_module="feed_forward",
        mlp_names=("w1", "w3", "w2"),
        mlp_size="block_ff_dim",
        mlp_is_adjusted=Switch("block_auto_adjust_ff_dim", True),
        is_tied=True,
        final_norm="embedding_norm",
        state=ShortConv(),
        engine_parts=(("short_conv.", "conv."),),
    ),
}
LLAVA = {
    "body": "language_model.model.",
    "head": "language_model.lm_head.",
    "kept": ("vision_tower.", "multi_modal_projector."),
}
QWEN3_5 = {
    "body": "model.language_model.",
    "head": "lm_head.",
    "kept": ("model.visual.", "mtp."),
    "defaults": {},
}
WHOLE = {
    "gemma3": Whole(
        texts=("gemma3_text",),
        **LLAVA,
        defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "mistral3": Whole(texts=("mistral", "ministral3"), **LLAVA, defaults={}),
    "qwen3_5": Whole(texts=("qwen3_5_text",), **QWEN3_5),
    "qwen3_5_moe": Whole(texts=("qwen3_5_moe_text",), **QWEN3_5),
}
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what config.json calls it

# model_type -> why it is refused.
STATE = "a layer carries state across sequences, which nobody has tried in packs: use a Qwen3.5 or a Nemotron H"
REFUSED = {
    **dict.fromkeys(("kimi_linear", "minimax_m1", "olmo_hybrid", "lfm2_moe"), STATE),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "recurrent_gemma", "rwkv"), STATE),
    **dict.fromkeys(
        ("stablelm", "nemotron"), "its layers do not hand the pack's layout to the attention: use a Llama 3"
    ),
    "llama4": "chunked attention is not supported: use a Llama 3",
    "llama4_text": "chunked attention is not supported: use a Llama 3",
    "gemma2": "it caps the scores of its attention, which the attention over packs does not: use a Gemma 3",
    "ernie4_5_moe": "vLLM 0.32 ignores the bias of its routers on a CPU, so no sync has been proven: use a Glm4 MoE",
    "gpt_oss": "vLLM 0.32 does not reload its sinks and experts: use a Qwen3 MoE",
    "cohere": "nobody has tried it: use a Cohere 2",
    "gemma4": "its global layers have heads of 512 dims, and attention over packs takes up to 256: use a Gemma 3",
    "gemma4_text": "its global layers have heads of 512 dims, and attention over packs takes up to 256: use a Gemma 3",
    **dict.fromkeys(("kimi_k2", "kimi_k25"), "its weights are published quantized alone: use a DeepSeek V3"),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # as transformers 4 and 5 write it
# Fields with a computation that is not there for any family.
ABSENT = {
    "quantization_config": "use a checkpoint that is not quantized",
    "compression_config": "use a checkpoint that is not compressed",
    "vision_config": "use one of docs/families.md, whose text can be trained, such as a Gemma 3",
    "attn_logit_softcapping": "the attention over packs has no cap: use a Gemma 3",
    "use_bidirectional_attention": "only causal attention is supported: use a model that generates text",
}


def check_family(hf: dict, source: str) -> None:
    """ConfigError if transformers' blocks, or vLLM, would compute this config.json wrongly, or nobody has tried it."""
    kind = hf.get("model_type")
    if kind in REFUSED:
        raise ConfigError(f"{source}: model_type={kind!r}: {REFUSED[kind]}")
    if kind not in FAMILIES:
        known = ", ".join((*FAMILIES, *WHOLE))
        raise ConfigError(
            f"{source}: model_type={kind!r:.80} is not supported; supported: {known}; "
            "docs/families.md tells how to try another"
        )
    for name, fix in ABSENT.items():
        if hf.get(name):
            raise ConfigError(f"{source}: {name}={hf[name]!r:.80} is not supported: {fix}")
    if hf.get("final_logit_softcapping") and not FAMILIES[kind].caps_logits:
        given = f"final_logit_softcapping={hf['final_logit_softcapping']!r:.80} with model_type={kind!r}"
        raise ConfigError(f"{source}: {given}: transformers ignores it; remove it")
    names = hf.get("architectures") or []  # vLLM builds the first
    architecture = FAMILIES[kind].architecture
    if any(name != architecture for name in names):
        raise ConfigError(f"{source}: architectures={names!r:.80}: expected {architecture} with model_type={kind!r}")
    _check_layer_types(hf, source)
    for name, values in FAMILIES[kind].values.items():
        if hf.get(name) not in values:
            known = ", ".join("absent" if value is None else json.dumps(value) for value in values)
            given = f"{name}={json.dumps(hf[name]):.80} with model_type={kind!r}"
            raise ConfigError(f"{source}: {given}: transformers and vLLM 0.32 differ; supported: {known}")
    for rope_type in _rope_types(hf):
        if rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"{source}: rope_type={rope_type!r:.80} is not supported: its frequencies depend on the longest "
                f"sequence of a pack; supported: {', '.join(ROPE_TYPES)}"
            )


def text_fields(hf: dict, source: str) -> dict:
    """The fields of the text model, as in a folder of its own. ConfigError if they name another kind of model."""
    kind = hf["model_type"]
    whole = WHOLE[kind]
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"{source}: text_config={text!r:.80}: expected an object with model_type={kind!r}")
    text = {"model_type": whole.texts[0], **whole.defaults, **text, "architectures": None}
    if text["model_type"] not in whole.texts:
        known = ", ".join(whole.texts)
        given = f"text_config: model_type={text['model_type']!r:.80}"
        raise ConfigError(f"{source}: {given} is not supported with model_type={kind!r}; supported: {known}")
    for field_name in ("tie_word_embeddings", "quantization_config", "compression_config"):
        if field_name in hf:
            text[field_name] = hf[field_name]
    return text


def _check_layer_types(hf: dict, source: str) -> None:
    family = FAMILIES[hf["model_type"]]
    known = LAYER_TYPES
    if family.state is not None:
        known = ("full_attention", family.state.layer_type)
    if family.one_part:
        known += ("mlp", "moe")
    for layer_type in family.listed_types(hf) or ():
        if layer_type not in known:
            raise ConfigError(
                f"{source}: layer_types: {layer_type!r:.80} is not supported; supported: {', '.join(known)}"
            )
    if family.one_part and family.listed_types(hf) is None:
        raise ConfigError(f"{source}: layers_block_type: missing: name the type of each layer")
    if family.state is not None:
        _check_state(hf, source)


def _check_state(hf: dict, source: str) -> None:
    """ConfigError for what transformers and vLLM compute in two ways."""
    limit = hf.get("time_step_limit")
    if limit is not None and limit not in NO_LIMITS:
        raise ConfigError(f"{source}: time_step_limit={limit!r:.80}: vLLM 0.32 has no such limit: remove it")
    if hf["model_type"] == "nemotron_h" and hf.get("n_shared_experts", 1) != 1:
        problem = f"n_shared_experts={hf['n_shared_experts']!r:.80}"
        raise ConfigError(f"{source}: {problem}: transformers has one shared expert: use a model with one")
    if hf.get("mamba_rms_norm") and hf.get("mamba_norm_before_gate", True):
        raise ConfigError(f"{source}: mamba_norm_before_gate=true: vLLM 0.32 applies the gate first: use another model")


def fields_for_vllm(hf: dict) -> dict:
    """Fields that vLLM wants beside those of config.json, or in their place. It reads a scale of Ministral 3 in
    Mistral's own format, and adds a token to the window of a Cohere 2, which transformers does not."""
    if FAMILIES[hf["model_type"]].qkv == "latent":
        dense_first, default = FAMILIES[hf["model_type"]].experts.dense_first
        fields = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        return fields | {dense_first: hf.get(dense_first, default)}
    if hf["model_type"] == "lfm2":  # transformers has no such fields
        return {"conv_dim": hf["hidden_size"], "block_dim": hf["hidden_size"]}
    if hf["model_type"] == "cohere2":
        return {"sliding_window": hf.get("sliding_window", 4096) - 1}
    rope = hf.get("rope_parameters") or {}
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return {}
    scaling = {"beta": beta, "original_max_position_embeddings": rope["original_max_position_embeddings"]}
    return {"llama_4_scaling": scaling}


def _rope_types(hf: dict) -> Iterator[object]:
    """Of all layers, or of each kind of layers."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    settings = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for setting in settings:
        yield setting.get("rope_type", setting.get("type", "default"))
