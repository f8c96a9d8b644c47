"""LoRA adapters in PEFT's format, as a run writes them. No torch.

A folder holds `adapter_config.json` and, in `adapter_model.safetensors`, the float tensors lora_A [r, in] and lora_B
[out, r] of each adapted matrix W, in whose place W + lora_alpha / r * B A computes (Hu et al. 2021, arXiv 2106.09685).
"""

import os

from config import PolicyConfig
from hf.lora_layers import adapted_layers
from hf.model_config import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def peft_name(name: str) -> str:
    """PEFT's name of the parameter lora_A or lora_B of a layer."""
    return f"base_model.model.{name}.weight"


def adapter_config(policy: PolicyConfig, model: ModelConfig) -> dict:
    """The content of adapter_config.json for what the config trains. Unless all layers are adapted, target_modules has
    full names: a last name may select other layers as well."""
    cfg, base = policy.dtensor_cfg.lora_cfg, policy.model_name
    layers = adapted_layers(model, cfg)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base,
        "r": cfg.dim,
        "lora_alpha": int(cfg.alpha) if cfg.alpha.is_integer() else cfg.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers} if cfg.match_all_linear else layers),
        "bias": "none",
        "inference_mode": True,
    }
