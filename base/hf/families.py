"""The families of decoders that transformers computes (`blocks`): their weights, by name and shape.

A family is listed once it has passed the tests that docs/families.md names; that page also says how to add one. No
torch, so that `grpo.py --check` answers in a second.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from config import ConfigError

Shapes = dict[str, tuple[int, ...]]
NATIVE = ("llama", "qwen2", "qwen3")  # `model.Body` computes these

PRE_NORM = ("input_layernorm", "post_attention_layernorm")
POST_NORM = ("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA_NORMS = (*PRE_NORM, "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4_NORMS = (*PRE_NORM, "post_self_attn_layernorm", "post_mlp_layernorm")


class Switch(NamedTuple):
    """A field of config.json that says whether a tensor is there; where it is absent, the default of transformers."""

    field: str
    default: bool = False


ATTENTION_BIAS = Switch("attention_bias")
MLP_BIAS = Switch("mlp_bias")
USE_BIAS = Switch("use_bias")
ALWAYS = Switch("", True)
USE_WINDOW = Switch("use_sliding_window")


class Names(NamedTuple):
    """What a tensor of a layer is called in a checkpoint, in transformers' model, and in vLLM's."""

    stored: str
    computed: str
    engine: str


GATE = Names("mlp.gate.weight", "mlp.gate.weight", "mlp.gate.weight")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """How a family names its experts. In transformers' model those of a layer are two tensors, `computed`.gate_up_proj
    [E, 2F, D] and `computed`.down_proj [E, D, F]. A checkpoint has three matrices of each, [F, D] twice and [D, F],
    under `stored`.NUMBER; or, if `together` names them, the two tensors.

    inner: the field of config.json with F. shared: the MLP that every token passes, and the field with its size;
    shared_counts: in multiples of F. dense_first: the field with the number of layers at the start without experts.
    correction_bias: the router has one, a buffer.
    """

    stored: str = "mlp.experts"
    computed: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    together: tuple[str, str] | None = None
    router: Names = GATE
    inner: str = "moe_intermediate_size"
    shared: str | None = None
    shared_size: str | None = None
    shared_counts: bool = False
    shared_gate: str | None = None
    dense_first: str | None = None
    correction_bias: bool = False

    @property
    def computed_pair(self) -> tuple[str, str]:
        """The two tensors of a layer, in transformers' model."""
        return f"{self.computed}.gate_up_proj", f"{self.computed}.down_proj"

    def names(self, number: int) -> tuple[str, str, str]:
        """The checkpoint's names of the gate, up and down matrices of expert `number`, within its layer."""
        prefix = f"{self.stored}.{number}"
        return f"{prefix}.{self.gate}.weight", f"{prefix}.{self.up}.weight", f"{prefix}.{self.down}.weight"

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


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family names its weights. A bias is there if the field of its switch says so, and never without a switch.

    head_dim, is_tied: where config.json does not say. None: hidden_size / num_attention_heads. norm_tensors: how many
    float32 tensors, each as large as its input, a norm keeps for its backward; the last is for its weight's gradient.
    caps_logits: it computes final_logit_softcapping, as vLLM does.
    """

    architecture: str
    norms: tuple[str, ...] = PRE_NORM
    norm_bias: Switch | None = None
    norm_tensors: int = 2
    qkv: Literal["apart", "fused"] = "apart"
    qkv_bias: Switch | None = None
    o_bias: Switch | None = None
    qk_norm: Literal["none", "of a head", "of all heads"] = "none"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_switch: Switch = ALWAYS
    mlp: Literal["gated", "gate and up fused", "plain"] = "gated"
    plain_names: tuple[str, str] = ("up_proj", "down_proj")
    mlp_bias: Switch | None = None
    head_dim: int | None = None
    is_tied: bool = False
    windows: Windows | None = None
    experts: Experts | None = None
    caps_logits: bool = False


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
        plain_names=("c_fc", "c_proj"),
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
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=Switch("qkv_bias", True),
        windows=Windows(size=4096, full_every=2, switch=USE_WINDOW),
        experts=Experts(
            shared="shared_expert", shared_size="shared_expert_intermediate_size", shared_gate="shared_expert_gate"
        ),
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
        experts=Experts(
            shared="shared_experts",
            shared_size="n_shared_experts",
            shared_counts=True,
            dense_first="first_k_dense_replace",
            correction_bias=True,
        ),
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        experts=Experts(
            computed="block_sparse_moe.experts",
            together=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
            router=Names(
                "block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight", "block_sparse_moe.gate.weight"
            ),
            inner="intermediate_size",
        ),
    ),
}
LLAVA = {
    "body": "language_model.model.",
    "head": "language_model.lm_head.",
    "kept": ("vision_tower.", "multi_modal_projector."),
}
WHOLE = {
    "gemma3": Whole(
        texts=("gemma3_text",),
        **LLAVA,
        defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "mistral3": Whole(texts=("mistral", "ministral3"), **LLAVA, defaults={}),
}
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what config.json calls it

# model_type -> why it is refused.
STATE = "a layer carries state across sequences, which packs do not reset: use a model that has attention alone"
REFUSED = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "kimi_linear", "minimax_m1"), STATE),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h", "jamba", "bamba", "zamba2"), STATE),
    **dict.fromkeys(("granitemoehybrid", "lfm2", "lfm2_moe", "recurrent_gemma", "rwkv"), STATE),
    **dict.fromkeys(
        ("stablelm", "nemotron"), "its layers do not hand the pack's layout to the attention: use a Llama 3"
    ),
    "llama4": "chunked attention is not supported: use a Llama 3",
    "llama4_text": "chunked attention is not supported: use a Llama 3",
    "gemma2": "it caps the logits, and the output layer's kernels have no cap: use a Gemma 3",
    "ernie4_5_moe": "vLLM 0.32 ignores the bias of its routers on a CPU, so no sync has been proven: use a Glm4 MoE",
    "gpt_oss": "vLLM 0.32 does not reload its sinks and experts: use a Qwen3 MoE",
    "cohere": "nobody has tried it: use a Cohere 2",
    "gemma4": "its global layers have heads of 512 dims, and attention over packs takes up to 256: use a Gemma 3",
    "gemma4_text": "its global layers have heads of 512 dims, and attention over packs takes up to 256: use a Gemma 3",
    "deepseek_v3": "its attention has keys and values of two sizes, which no sync has been proven for: use a Glm4 MoE",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
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
    for field, fix in ABSENT.items():
        if hf.get(field):
            raise ConfigError(f"{source}: {field}={hf[field]!r:.80} is not supported: {fix}")
    if hf.get("final_logit_softcapping") and not FAMILIES[kind].caps_logits:
        given = f"final_logit_softcapping={hf['final_logit_softcapping']!r:.80} with model_type={kind!r}"
        raise ConfigError(f"{source}: {given}: transformers ignores it; remove it")
    names = hf.get("architectures") or []  # vLLM builds the first
    architecture = FAMILIES[kind].architecture
    if any(name != architecture for name in names):
        raise ConfigError(f"{source}: architectures={names!r:.80}: expected {architecture} with model_type={kind!r}")
    for layer_type in hf.get("layer_types") or ():
        if layer_type not in LAYER_TYPES:
            raise ConfigError(f"{source}: layer_types: {layer_type!r:.80} is not supported: use full_attention layers")
    if kind == "olmoe" and hf.get("norm_topk_prob"):
        raise ConfigError(
            f"{source}: norm_topk_prob=true with model_type='olmoe': vLLM 0.32 ignores it; set it to false"
        )
    if kind == "cohere2" and hf.get("tie_word_embeddings") is False:
        raise ConfigError(f"{source}: tie_word_embeddings=false with model_type='cohere2': vLLM 0.32 has no such head")
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


def fields_for_vllm(hf: dict) -> dict:
    """Fields that vLLM wants beside those of config.json, or in their place. It reads a scale of Ministral 3 in
    Mistral's own format, and adds a token to the window of a Cohere 2, which transformers does not."""
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
