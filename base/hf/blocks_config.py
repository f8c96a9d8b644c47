"""What the program reads of the config.json of a model that transformers' blocks compute. No torch."""

from dataclasses import dataclass

from base.hf.config_forms import forms_of_kind
from base.hf.families import FAMILIES, WHOLE, check_family, text_fields
from base.hf.family import Family
from base.hf.layers import DeltaNet, Mamba
from base.hf.model_config import INTEGERS, MAX_HEAD_DIM, ModelConfig, check_heads, check_numbers
from config import ConfigError

SIZE_OF_ROWS = 8  # that torch's grouped product takes, 16 bytes in bfloat16
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


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
        check_family(hf, source)
        family = FAMILIES[hf["model_type"]]
        defaults = forms_of_kind(hf["model_type"])["defaults"]
        if family.unlike is not None:
            hf = family.unlike.with_heads(hf)
        types = family.listed_types(hf) if family.one_part else None
        num_layers = len(types) if types is not None else hf.get("num_hidden_layers")
        inner = family.inner_size(defaults | hf)
        fields = hf | {"num_hidden_layers": num_layers, "intermediate_size": inner}
        needed = [*INTEGERS, "num_key_value_heads"]
        if family.state is not None:
            needed += family.state.fields
        if family.has_experts(hf):
            needed += family.experts.sizes(hf)
            if "intermediate_size" not in defaults:  # no layer of transformers' class is dense
                needed.remove("intermediate_size")
        if family.qkv == "latent":
            needed += LATENT_SIZES
        check_numbers(fields, needed, source)
        hf = defaults | hf
        _check_layers(hf, family, source)
        if family.state is not None and family.state.heads is not None:
            _check_heads_of_state(hf, family.state, source)
        if "n_group" in defaults and family.has_experts(hf):
            _check_groups(hf, source)
        heads = hf["num_attention_heads"]
        head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
        if "head_dim" in hf and family.qkv != "latent":
            hf = hf | {"head_dim": head_dim}  # a null, with which some classes of transformers do not start
        key_heads = hf["num_key_value_heads"]
        if family.qkv == "latent":
            key_heads = heads  # whatever the field says
            rotated = hf["qk_rope_head_dim"]
            if hf.get("head_dim") not in (None, rotated):
                problem = f"head_dim={hf['head_dim']}: transformers rotates as many, vLLM qk_rope_head_dim={rotated}"
                raise ConfigError(f"{source}: {problem}: remove head_dim")
            hf = hf | {"head_dim": rotated}
            head_dim = hf["qk_nope_head_dim"] + rotated
        check_heads(hf, head_dim, source)
        padding = hf.get("pad_token_id") or 0
        if not -hf["vocab_size"] <= padding < hf["vocab_size"]:
            raise ConfigError(f"{source}: pad_token_id={padding}: expected an id below vocab_size={hf['vocab_size']}")
        if head_dim > MAX_HEAD_DIM:
            problem = f"head_dim={head_dim}: attention over packs takes up to {MAX_HEAD_DIM}"
            raise ConfigError(f"{source}: {problem}: use a model with smaller heads")
        model = cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=inner or 0,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            tie_word_embeddings=hf.get("tie_embedding", hf["tie_word_embeddings"]),
            max_position_embeddings=hf.get("max_position_embeddings"),
            family=family,
            hf=hf,
            config_json=config_json,
            whole=whole,
        )
        if not model.windows:
            raise ConfigError(f"{source}: layer_types: expected a layer with attention")
        if family.unlike is not None:
            _check_unlike(model, source)
        return model

    @property
    def fields_for_vllm(self) -> dict:
        """vLLM reads a scale of Ministral 3 in Mistral's own format, and adds a token to the window of a Cohere 2,
        which transformers does not."""
        hf = self.hf
        fields: dict = {}
        if self.family.qkv == "latent":
            dense_first = self.family.experts.dense_first
            fields = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", dense_first: hf.get(dense_first, 1)}
        elif self.config_json.get("head_dim", 0) is None:
            fields["head_dim"] = self.head_dim
        if hf["model_type"] == "lfm2":  # transformers has no such fields
            fields |= {"conv_dim": hf["hidden_size"], "block_dim": hf["hidden_size"]}
        if hf["model_type"] == "cohere2" and hf["sliding_window"] is not None:
            fields["sliding_window"] = hf["sliding_window"] - 1
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        beta = rope.get("llama_4_scaling_beta")
        if beta is not None:
            positions = rope.get("original_max_position_embeddings", self.max_position_embeddings)
            fields["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": positions}
        return fields


def _check_unlike(model: BlocksConfig, source: str) -> None:
    """ConfigError for layers of Gemma 4 that transformers or vLLM cannot build, or that nobody has tried."""
    hf = model.hf
    if hf.get("enable_moe_block"):
        problem = "nobody has tried experts beside an MLP"
        raise ConfigError(f"{source}: enable_moe_block=true: {problem}: use a Gemma 4 without experts")
    types = model.attention_types
    shared = hf["num_kv_shared_layers"]
    if shared not in range(len(types)) or not set(types).issubset(types[: len(types) - shared]):
        problem = f"num_kv_shared_layers={shared}: expected an earlier layer of each type, with keys of its own"
        raise ConfigError(f"{source}: {problem}")
    ids = hf["vocab_size_per_layer_input"]
    if ids < hf["vocab_size"]:
        problem = f"vocab_size_per_layer_input={ids} is less than vocab_size={hf['vocab_size']}"
        raise ConfigError(f"{source}: {problem}: a token has an embedding for each layer")
    full = model.of_layers[types.index("full_attention")]
    check_heads(hf | {"num_key_value_heads": full.num_key_value_heads}, full.head_dim, source)
    written = hf.get("per_layer_config")
    if written:
        known = ["head_dim", "num_key_value_heads"] if hf.get("attention_k_eq_v") else ["head_dim"]
        numbers = [str(number) for number, kind in enumerate(types) if kind == "full_attention"]
        heads = written.get(numbers[0])
        if not isinstance(heads, dict) or written != dict.fromkeys(numbers, heads) or not set(heads).issubset(known):
            expected = f"the same {' and '.join(known)} for each layer of full attention"
            raise ConfigError(f"{source}: per_layer_config={written!r:.80}: expected {expected}, and nothing else")


def _check_layers(hf: dict, family: Family, source: str) -> None:
    """ConfigError for experts or windows that no layer can have."""
    if family.has_experts(hf):
        num_experts, per_token, *_ = family.experts.sizes(hf)
        if hf[per_token] > hf[num_experts]:
            problem = f"{per_token}={hf[per_token]} is more than {num_experts}={hf[num_experts]}"
            raise ConfigError(f"{source}: {problem}: use {hf[num_experts]} or less")
        sizes = [hf["hidden_size"], hf[family.experts.inner]]
        if any(size % SIZE_OF_ROWS for size in sizes):
            problem = f"hidden_size and {family.experts.inner} are {sizes}"
            raise ConfigError(f"{source}: {problem}: grouped products take multiples of {SIZE_OF_ROWS}")
        if family.experts.dense_first is not None:
            num_dense = hf.get(family.experts.dense_first, 1)
            mlp_types = ["dense"] * num_dense + ["sparse"] * (hf["num_hidden_layers"] - num_dense)
            if hf.get("mlp_layer_types") not in (None, mlp_types):
                problem = f"mlp_layer_types={hf['mlp_layer_types']!r:.80} is not that of the other fields"
                raise ConfigError(f"{source}: {problem}: remove it")
    if family.windows is not None and family.windows.switch.is_on(hf):
        size = hf.get("sliding_window")
        is_size = isinstance(size, int) and size > 0
        if size is not None and not is_size:
            raise ConfigError(f"{source}: sliding_window={size!r:.80}: expected int above 0, or null")
        has_windows = family.windows.full_every is not None
        if hf.get("layer_types"):
            has_windows = "sliding_attention" in hf["layer_types"]
        if has_windows and size is None:
            problem = "sliding_window=null, and some layers have a window: give its size"
            raise ConfigError(f"{source}: {problem}, or list layer_types without sliding_attention")


def _check_groups(hf: dict, source: str) -> None:
    """ConfigError if a router cannot choose the best groups, each by its two best experts, and experts of them."""
    groups = hf["n_group"]
    chosen = hf["topk_group"]
    num_experts = hf["n_routed_experts"]
    of_group = num_experts // groups
    is_even = groups * of_group == num_experts
    if not is_even or of_group < 2 or chosen > groups or chosen * of_group < hf["num_experts_per_tok"]:
        given = f"n_group={groups} and topk_group={chosen}"
        wanted = f"{hf['num_experts_per_tok']} of n_routed_experts={num_experts}"
        raise ConfigError(f"{source}: {given} do not leave {wanted} in equal groups")


def _check_heads_of_state(hf: dict, state: Mamba | DeltaNet, source: str) -> None:
    heads = hf[state.heads]
    groups = hf[state.groups]
    if heads % groups:
        raise ConfigError(f"{source}: {state.groups}={groups} does not divide {state.heads}={heads}")
    if isinstance(state, Mamba) and state.heads == "mamba_n_heads":
        expanded = hf.get("mamba_d_ssm") or hf["hidden_size"] * (hf["mamba_expand"] or 0)
        inner = state.sizes(hf).inner
        if inner != expanded:
            raise ConfigError(f"{source}: mamba_n_heads * mamba_d_head = {inner}: expected {expanded}, as expanded")
