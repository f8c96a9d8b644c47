"""Tiny random models of all families that transformers' blocks compute, with what makes each of them different."""

import torch
from tiny import LLAMA3_ROPE

BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 6
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
LATENT = {  # vLLM computes it on a CPU if kv_lora_rank + qk_rope_head_dim = 576
    "num_key_value_heads": 4,
    "head_dim": 64,  # of what is rotated
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
OF_FAMILY = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": WINDOW},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 20, "tie_word_embeddings": True},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "sliding_window": WINDOW,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 300,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "olmo3": WINDOWS,
    "phi3": {"resid_pdrop": 0.1, "sliding_window": WINDOW},
    "granite": {
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm": {"partial_rotary_factor": 0.5},
    "exaone4": WINDOWS,
    "starcoder2": {"sliding_window": WINDOW},
    "hunyuan_v1_dense": {"attention_bias": True},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3_moe": MOE | {"mlp_only_layers": [0]},
    "olmoe": MOE | {"norm_topk_prob": False, "head_dim": 32, "num_attention_heads": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "cohere2": WINDOWS
    | {"logit_scale": 0.5, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "granitemoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_5_text": DELTA | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": DELTA | MOE | {"shared_expert_intermediate_size": 64},
    "qwen3_next": DELTA | MOE | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "n_routed_experts": 8,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "falcon_h1": MAMBA
    | {
        "mamba_d_ssm": 128,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "ssm_multipliers": [1.0, 2.0, 0.5, 0.7, 0.9],
        "ssm_in_multiplier": 1.5,
        "ssm_out_multiplier": 0.5,
        "attention_in_multiplier": 1.2,
        "mlp_multipliers": [0.5, 2.0],
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "block_multiple_of": 32,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": MOE
    | {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_dense_layers": 1,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": True,
    },
    "glm4_moe_lite": LATENT
    | {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "q_lora_rank": None,
    },
    "deepseek_v3": LATENT
    | {"n_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
}


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN3_5 = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "image_token_id": 292,
    "video_token_id": 293,
    "vision_start_token_id": 290,
    "vision_end_token_id": 291,
}
# Folders with a vision part. What `fields` of the functions below change is of the text model.
OF_WHOLE = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text"},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "boi_token_index": 290,
        "eoi_token_index": 291,
        "image_token_index": 292,
    },
    "gemma4": {
        "text_config": {"model_type": "gemma4_text"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "boi_token_id": 290,
        "eoi_token_id": 291,
        "image_token_id": 292,
        "video_token_id": 293,
        "audio_token_id": 294,
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3"},
        "vision_config": VISION | {"head_dim": 16},
        "spatial_merge_size": 1,
        "image_token_index": 292,
        "tie_word_embeddings": False,
    },
    "qwen3_5": QWEN3_5 | {"text_config": {"model_type": "qwen3_5_text"}, "tie_word_embeddings": True},
    "qwen3_5_moe": QWEN3_5 | {"text_config": {"model_type": "qwen3_5_moe_text"}},
}


def hf_config(family, **fields):
    """transformers' config."""
    from transformers import AutoConfig  # not at the top: spawned ranks do without its seconds

    if family in OF_WHOLE:
        whole = OF_WHOLE[family]
        kind = whole["text_config"]["model_type"]
        text = {**BASE, **OF_FAMILY.get(kind, {}), **fields, **whole["text_config"]}
        return AutoConfig.for_model(family, **{**whole, "text_config": text})
    return AutoConfig.for_model(family, **{**BASE, **OF_FAMILY.get(family, {}), **fields})


def make_family(family, seed=0, **fields):
    """transformers' float32 model, with eager attention and experts. No norm, bias or buffer has its initial value."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = hf_config(family, **fields)
    auto = AutoModelForImageTextToText if family in OF_WHOLE else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))  # Nemotron's: vLLM has none, as its authors' own code
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("A_log"):
                tensor.copy_(torch.rand(tensor.shape) * 1.5 - 0.5)  # a state that lasts for some tokens
            elif name.endswith("dt_bias"):
                tensor.normal_(-1, 0.5)
            elif "conv" in name and tensor.dim() == 3:
                tensor.normal_(0, 0.4)
            elif tensor.dim() == 1:
                tensor.add_(0.2 * torch.randn(tensor.shape))
                if name.endswith("q_norm.weight") and family.startswith("gemma4"):
                    tensor.mul_(0.15)  # nothing else divides its scores
            elif name.endswith(("router.weight", "gate.weight")):
                tensor.normal_(0, 0.5)
    return model
