"""How a family of decoders names its weights; and the families that `model.Body` computes. No torch.

`base.hf.families` has all others, and `base.hf.layers` the experts and states that some of them have.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from base.hf.fields import ALWAYS, ATTENTION_BIAS, MLP_BIAS, Switch

if TYPE_CHECKING:
    from base.hf.layers import DeltaNet, Experts, Gemma4Layers, Mamba, ShortConv

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron's pattern
OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # until transformers 5
PRE_NORM = ("input_layernorm", "post_attention_layernorm")
MLP_NAMES = {
    "gated": ("gate_proj", "up_proj", "down_proj"),
    "gate and up fused": ("gate_up_proj", "down_proj"),
    "plain": ("up_proj", "down_proj"),
}


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Which layers see only the last `sliding_window` keys, if config.json has no layer_types: all, or all but each
    `full_every`-th. Without `switch` there are no windows. last_is_full: the last layer has none, whatever config.json
    says."""

    full_every: int | None = None
    switch: Switch = ALWAYS
    last_is_full: bool = False

    def layer_types(self, num_layers: int) -> list[str]:
        """As in a config.json that has them."""
        types = []
        for number in range(1, num_layers + 1):
            is_full = self.full_every is not None and number % self.full_every == 0
            types.append("full_attention" if is_full else "sliding_attention")
        return types


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family names its weights. A bias is there if the field of its switch says so, and never without a switch.

    norm_tensors: how many float32 tensors, each as large as its input, a norm keeps for its backward; the last is for
    its weight's gradient. caps_logits: it computes final_logit_softcapping, as vLLM does. values: of a field, those
    with which transformers and vLLM compute the same; None is absent or null.

    qkv: "apart" and "fused" are matrices of all heads. "latent" is the attention of DeepSeek V2 (arXiv 2405.04434,
    section 2.1): keys and values of all heads come from one vector of kv_lora_rank dims, queries from one of
    q_lora_rank unless that is null; queries and keys have qk_nope_head_dim + qk_rope_head_dim dims, values v_head_dim.
    has_query_gate: q_proj has a gate for each number that the attention returns. mlp_size: the field of config.json.

    unlike: what differs from layer to layer.

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
    windows: Windows | None = None
    experts: "Experts | None" = None
    caps_logits: bool = False
    values: dict[str, tuple] = field(default_factory=dict)
    unlike: "Gemma4Layers | None" = None
    final_norm: str = "norm"
    state: "Mamba | DeltaNet | ShortConv | None" = None
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
        listed = self.listed_types(hf)
        if listed is not None:
            return listed
        types = []
        full = hf.get("full_attn_idxs")
        for number in range(hf["num_hidden_layers"]):
            kind = self.state.layer_type
            if self.hybrid:
                kind = "hybrid"
            elif full is not None:
                if number in full:
                    kind = "full_attention"
            elif self.full_every is not None and (number + 1) % hf.get("full_attention_interval", self.full_every) == 0:
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
        multiple = hf["block_multiple_of"]
        size = int(hf["block_ffn_dim_multiplier"] * int(2 * size / 3))
        return math.ceil(size / multiple) * multiple


NATIVE = {  # `model.Body` computes these
    "llama": Family(architecture="LlamaForCausalLM", qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, mlp_bias=MLP_BIAS),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=ALWAYS),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS, qk_norm="of a head"
    ),
}
