"""LoRA's parameters: how they start, and folders of PEFT."""

import json
import os
from functools import partial
from pathlib import Path

import torch
from torch import nn

from base.hf.lora_layers import adapted_layers
from base.hf.model_config import ModelConfig
from base.hf.weights import ADAPTER, LORA_A, local_shard, new_folder, save_tensors, sharded_parameters, whole_tensors
from base.system.disk import write_whole
from base.system.ranks import local_rows, on_rank0
from config import PolicyConfig


@torch.no_grad()
def init_adapters(model: nn.Module, init: str, seed: int) -> None:
    """Sets LoRA's parameters, the same on any number of ranks: A by `init`, B to 0, so the model equals its base."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in sharded_parameters(model).items():
        if not name.endswith(ADAPTER):
            continue
        whole = torch.zeros(param.shape)
        if name.endswith(LORA_A) and init == "xavier":
            nn.init.xavier_normal_(whole, generator=generator)
        elif name.endswith(LORA_A):
            nn.init.kaiming_uniform_(whole, a=5**0.5, generator=generator)
        rows = local_rows(param)
        local_shard(param).copy_(whole[rows])


def save_adapter(model: nn.Module, folder: str | Path, config: dict) -> None:
    """Writes a PEFT folder, as `save_hf`: `config`, by `adapter_config`, and in float32 lora_A [r, in] and lora_B
    [out, r] of each adapted matrix W, in whose place W + lora_alpha / r * B A computes (Hu et al. 2021)."""
    params = {}
    for name, param in sharded_parameters(model).items():
        if name.endswith(ADAPTER):
            params[f"base_model.model.{model.config.module_name(name)}.weight"] = param  # PEFT's name
    content = {name: tensor.cpu() for name, tensor in whole_tensors(params, torch.float32)}
    text = json.dumps(config, indent=2) + "\n"
    with new_folder(Path(folder)) as (new, _):
        on_rank0(partial(write_whole, new / "adapter_config.json", text))
        on_rank0(partial(save_tensors, content, new / "adapter_model.safetensors", {"format": "pt"}))


def adapter_config(policy: PolicyConfig, model: ModelConfig) -> dict:
    """The content of adapter_config.json for what the config trains. Unless all layers are adapted, target_modules has
    full names: a last name may select other layers as well, such as those of a vision part."""
    cfg = policy.dtensor_cfg.lora_cfg
    base = policy.model_name
    if os.path.isdir(base):
        base = os.path.abspath(base)
    target_modules = {model.module_name(name) for name in adapted_layers(model, cfg)}
    if cfg.match_all_linear and model.whole is None:
        target_modules = {name.split(".")[-1] for name in target_modules}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": cfg.dim,
        "lora_alpha": int(cfg.alpha) if cfg.alpha.is_integer() else cfg.alpha,
        "target_modules": sorted(target_modules),
        "bias": "none",
        "inference_mode": True,
    }
