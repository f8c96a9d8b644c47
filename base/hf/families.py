"""The families of decoders that transformers computes (`blocks`): their weights, by name and shape.

A family is listed once it has passed the tests that docs/families.md names; that page also says how to add one. No
torch, so that `grpo.py --check` answers in a second.
"""

import json
import math
from dataclasses import dataclass

from base.hf.config_forms import check_forms, forms_of_kind
from base.hf.family import NATIVE, PRE_NORM, Family, Windows
from base.hf.fields import ALWAYS, ATTENTION_BIAS, MLP_BIAS, Switch
from base.hf.layers import DeltaNet, Experts, Gemma4Layers, Mamba, Names, ShortConv
from config import ConfigError

USE_BIAS = Switch("use_bias")
USE_WINDOW = Switch("use_sliding_window")
POST_NORM = ("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA_NORMS = (*PRE_NORM, "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4_NORMS = (*PRE_NORM, "post_self_attn_layernorm", "post_mlp_layernorm")
GRANITE_ROUTER = Names(
    "block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight", "block_sparse_moe.gate.weight"
)
QWEN_EXPERTS = Experts(
    shared="mlp.shared_expert", shared_size="shared_expert_intermediate_size", shared_gate="mlp.shared_expert_gate"
)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A kind of folder with a vision part. Its text model is trained; the other tensors stay as they are.

    texts: model_types of its text_config; the first is meant where it has none. body, head: what the names of the text
    model's tensors begin with, in place of `model.` and `lm_head.`. kept: what all other names begin with.
    """

    texts: tuple[str, ...]
    body: str
    head: str
    kept: tuple[str, ...]

    @property
    def prefixes(self) -> dict[str, str]:
        """Of a name in the text model -> in the folder."""
        return {"model.": self.body, "lm_head.": self.head}


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
    dense_first="first_k_dense_replace",
    correction_bias="mlp.gate.e_score_correction_bias",
)
LFM2 = {
    "norms": ("operator_norm", "ffn_norm"),
    "qk_norm": "of a head",
    "qk_norm_names": ("q_layernorm", "k_layernorm"),
    "output_name": "out_proj",
    "mlp_module": "feed_forward",
    "mlp_names": ("w1", "w3", "w2"),
    "final_norm": "embedding_norm",
    "state": ShortConv(),
    "full_every": 1,
}
FAMILIES = {
    **NATIVE,
    "mistral": Family(architecture="MistralForCausalLM", windows=Windows()),
    "ministral3": Family(architecture="Ministral3ForCausalLM", windows=Windows()),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        norms=GEMMA_NORMS,
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        windows=Windows(full_every=6),
    ),
    "gemma4_text": Family(
        architecture="Gemma4ForCausalLM",
        norms=GEMMA_NORMS,
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        windows=Windows(full_every=6, last_is_full=True),
        caps_logits=True,
        values={"use_bidirectional_attention": (None, "vision")},
        unlike=Gemma4Layers(),
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
        windows=Windows(full_every=4),
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
    ),
    "glm": Family(architecture="GlmForCausalLM", qkv_bias=ATTENTION_BIAS, mlp="gate and up fused"),
    "glm4": Family(architecture="Glm4ForCausalLM", norms=GLM4_NORMS, qkv_bias=ATTENTION_BIAS, mlp="gate and up fused"),
    "arcee": Family(
        architecture="ArceeForCausalLM", qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, mlp="plain", mlp_bias=MLP_BIAS
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        norm_bias=ALWAYS,
        norm_tensors=1,
        qkv_bias=USE_BIAS,
        o_bias=USE_BIAS,
        mlp="plain",
        mlp_names=("c_fc", "c_proj"),
        mlp_bias=USE_BIAS,
        windows=Windows(),
    ),
    "ernie4_5": Family(architecture="Ernie4_5ForCausalLM", qkv_bias=USE_BIAS, o_bias=USE_BIAS, mlp_bias=USE_BIAS),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=Switch("attention_out_bias"),
        mlp_bias=MLP_BIAS,
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM", norms=POST_NORM, qk_norm="of a head", windows=Windows(full_every=4)
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
        windows=Windows(full_every=4),
        values={"tie_word_embeddings": (None, True)},  # vLLM has no such head
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=Switch("qkv_bias"),
        windows=Windows(full_every=2, switch=USE_WINDOW),
        experts=QWEN_EXPERTS,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        windows=Windows(switch=USE_WINDOW),
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
        experts=GLM_EXPERTS,
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        qkv="latent",
        experts=GLM_EXPERTS,
        values=LATENT_VALUES | {"first_k_dense_replace": (None, 1)},
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM", qkv="latent", experts=GLM_EXPERTS, values=LATENT_VALUES
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
        state=DeltaNet(),
        full_every=4,
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="of a head",
        has_query_gate=True,
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
        final_norm="norm_f",
        experts=Experts(
            stored="mixer.experts",
            computed="mixer.experts",
            gate=None,
            router=Names("mixer.gate.weight", "mixer.gate.weight", "mixer.gate.weight"),
            shared="mixer.shared_experts",
            shared_size="moe_shared_expert_intermediate_size",
            correction_bias="mixer.gate.e_score_correction_bias",
        ),
        state=Mamba(
            module="mixer",
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            width="conv_kernel",
            chunk="chunk_size",
            conv_bias=Switch("use_conv_bias"),
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
        **LFM2,
        mlp_size="block_ff_dim",
        mlp_is_adjusted=Switch("block_auto_adjust_ff_dim"),
        engine_parts=(("short_conv.", "conv."),),
    ),
    "lfm2_moe": Family(
        architecture="Lfm2MoeForCausalLM",
        **LFM2,
        values={"use_expert_bias": (None, True)},
        experts=Experts(
            stored="feed_forward.experts",
            computed="feed_forward.experts",
            gate="w1",
            up="w3",
            down="w2",
            router=Names("feed_forward.gate.weight", "feed_forward.gate.weight", "feed_forward.gate.weight"),
            dense_first="num_dense_layers",
            correction_bias="feed_forward.expert_bias",
        ),
        engine_parts=(("short_conv.", "conv."), ("gate.e_score_correction_bias", "expert_bias")),
    ),
}
LLAVA = {
    "body": "language_model.model.",
    "head": "language_model.lm_head.",
    "kept": ("vision_tower.", "multi_modal_projector."),
}
QWEN3_5 = {"body": "model.language_model.", "head": "lm_head.", "kept": ("model.visual.", "mtp.")}
WHOLE = {
    "gemma3": Whole(texts=("gemma3_text",), **LLAVA),
    "gemma4": Whole(
        texts=("gemma4_text",),
        body="model.language_model.",
        head="lm_head.",
        kept=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    ),
    "mistral3": Whole(texts=("mistral", "ministral3"), **LLAVA),
    "qwen3_5": Whole(texts=("qwen3_5_text",), **QWEN3_5),
    "qwen3_5_moe": Whole(texts=("qwen3_5_moe_text",), **QWEN3_5),
}
# model_type -> why it is refused.
STATE = "a layer carries state across sequences, which nobody has tried in packs: use a Qwen3.5 or a Nemotron H"
REFUSED = {
    **dict.fromkeys(("kimi_linear", "minimax_m1", "olmo_hybrid"), STATE),
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
    **dict.fromkeys(("kimi_k2", "kimi_k25"), "its weights are published quantized alone: use a DeepSeek V3"),
}
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
        is_off = name == "use_bidirectional_attention" and hf.get(name) is False
        if hf.get(name) is not None and not is_off and name not in FAMILIES[kind].values:
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


def text_fields(hf: dict, source: str) -> dict:
    """The fields of the text model, as in a folder of its own. ConfigError if they name another kind of model."""
    kind = hf["model_type"]
    whole = WHOLE[kind]
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"{source}: text_config={text!r:.80}: expected an object with model_type={kind!r}")
    text = {"model_type": whole.texts[0], **text, "architectures": None}
    if text["model_type"] not in whole.texts:
        known = ", ".join(whole.texts)
        given = f"text_config: model_type={text['model_type']!r:.80}"
        raise ConfigError(f"{source}: {given} is not supported with model_type={kind!r}; supported: {known}")
    text = forms_of_kind(text["model_type"])["defaults"] | text
    check_forms(text, source)
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
    types = hf.get("layer_types")
    if types is not None and (hf.get("layers_block_type") or types) != types:
        raise ConfigError(f"{source}: layers_block_type and layer_types differ: remove one")
    if family.one_part and family.listed_types(hf) is None:
        raise ConfigError(f"{source}: layers_block_type: missing: name the type of each layer")
    if family.state is not None:
        _check_state(hf, source)


def _check_state(hf: dict, source: str) -> None:
    """ConfigError for what transformers and vLLM compute in two ways."""
    limit = hf.get("time_step_limit")
    if limit is not None and limit not in NO_LIMITS:
        raise ConfigError(f"{source}: time_step_limit={limit!r:.80}: vLLM 0.32 has no such limit: remove it")
    if hf.get("moe_latent_size") is not None:
        problem = f"moe_latent_size={hf['moe_latent_size']!r:.80}"
        raise ConfigError(f"{source}: {problem}: experts between latent sizes are not computed here: use another model")
    if hf["model_type"] == "nemotron_h" and hf.get("n_shared_experts", 1) != 1:
        problem = f"n_shared_experts={hf['n_shared_experts']!r:.80}"
        raise ConfigError(f"{source}: {problem}: transformers has one shared expert: use a model with one")
    if hf.get("mamba_rms_norm") and hf.get("mamba_norm_before_gate", True):
        raise ConfigError(f"{source}: mamba_norm_before_gate=true: vLLM 0.32 applies the gate first: use another model")
