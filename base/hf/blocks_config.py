"""What the program reads of the config.json of a model that transformers' blocks compute. No torch."""

from dataclasses import dataclass

from base.hf.config_forms import check_forms
from base.hf.families import FAMILIES, WHOLE, check_family, text_fields
from base.hf.family import Family
from base.hf.model_config import INTEGERS, ModelConfig, check_heads, check_numbers
from config import ConfigError

LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MAX_HEAD_DIM = 256  # of torch's varlen attention


@dataclass(frozen=True, eq=False)
class BlocksConfig(ModelConfig):
    """Of a model that transformers' blocks compute (`blocks`)."""

    @classmethod
    def read(cls, config_json: dict, source: str) -> "BlocksConfig":
        """Of a config.json, as `base.hf.folder.from_hf`."""
        hf = config_json
        whole = WHOLE.get(hf.get("model_type"))
        if whole is not None:
            hf = text_fields(hf, source)
            check_forms(hf, source)
        check_family(hf, source)
        family = FAMILIES[hf["model_type"]]
        types = family.listed_types(hf) if family.one_part else None
        num_layers = len(types) if types is not None else hf.get("num_hidden_layers")
        inner = family.inner_size(hf)
        fields = hf | {"num_hidden_layers": num_layers, "intermediate_size": inner}
        needed = [*INTEGERS, "num_key_value_heads"]
        if family.state is not None:
            needed += family.state.fields
        if family.has_experts(hf):
            needed += family.experts.sizes(hf)
        if family.qkv == "latent":
            needed += LATENT_SIZES
        check_numbers(fields, needed, source)
        _check_layers(hf, family, source)
        heads = hf["num_attention_heads"]
        head_dim = hf.get("head_dim") or family.head_dim or hf["hidden_size"] // heads
        key_heads = hf["num_key_value_heads"]
        if family.qkv == "latent":
            key_heads = heads  # whatever the field says
            rotated = hf["qk_rope_head_dim"]
            if hf.get("head_dim") not in (None, rotated):
                problem = f"head_dim={hf['head_dim']}: transformers rotates as many, vLLM qk_rope_head_dim={rotated}"
                raise ConfigError(f"{source}: {problem}: remove head_dim")
            head_dim = hf["qk_nope_head_dim"] + rotated
        check_heads(hf, head_dim, source)
        padding = hf.get("pad_token_id") or 0
        if not -hf["vocab_size"] <= padding < hf["vocab_size"]:
            raise ConfigError(f"{source}: pad_token_id={padding}: expected an id below vocab_size={hf['vocab_size']}")
        if head_dim > MAX_HEAD_DIM:
            problem = f"head_dim={head_dim}: attention over packs takes up to {MAX_HEAD_DIM}"
            raise ConfigError(f"{source}: {problem}: use a model with smaller heads")
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=inner,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            tie_word_embeddings=hf.get("tie_word_embeddings", hf.get("tie_embedding", family.is_tied)),
            max_position_embeddings=hf.get("max_position_embeddings"),
            family=family,
            hf=hf,
            config_json=config_json,
            whole=whole,
        )

    @property
    def fields_for_vllm(self) -> dict:
        """vLLM reads a scale of Ministral 3 in Mistral's own format, and adds a token to the window of a Cohere 2,
        which transformers does not."""
        hf = self.hf
        if self.family.qkv == "latent":
            dense_first, default = self.family.experts.dense_first
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


def _check_layers(hf: dict, family: Family, source: str) -> None:
    """ConfigError for experts or windows that no layer can have."""
    if family.has_experts(hf):
        num_experts, per_token, *_ = family.experts.sizes(hf)
        if hf[per_token] > hf[num_experts]:
            problem = f"{per_token}={hf[per_token]} is more than {num_experts}={hf[num_experts]}"
            raise ConfigError(f"{source}: {problem}: use {hf[num_experts]} or less")
        if family.experts.dense_first is not None:
            num_dense = hf.get(*family.experts.dense_first)
            mlp_types = ["dense"] * num_dense + ["sparse"] * (hf["num_hidden_layers"] - num_dense)
            if hf.get("mlp_layer_types") not in (None, mlp_types):
                problem = f"mlp_layer_types={hf['mlp_layer_types']!r:.80} is not that of the other fields"
                raise ConfigError(f"{source}: {problem}: remove it")
    if family.windows is not None and family.windows.switch.is_on(hf):
        size = hf.get("sliding_window")
        is_size = isinstance(size, int) and size > 0
        if size is not None and not is_size:
            raise ConfigError(f"{source}: sliding_window={size!r:.80}: expected int above 0, or null")
