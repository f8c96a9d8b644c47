"""LoRA adapters in PEFT's format: what a folder must hold to be trained on, and what a run writes. No torch.

A folder holds `adapter_config.json` and, in `adapter_model.safetensors`, the float tensors lora_A [r, in] and lora_B
[out, r] of each adapted matrix W, in whose place W + lora_alpha / r * B A computes (Hu et al. 2021, arXiv 2106.09685).
"""

import os
from pathlib import Path

from config import ConfigError, PolicyConfig, shortened
from hf.files import read_json
from hf.lora_layers import KEY, adapted_layers, factor_shapes
from hf.model_config import ModelConfig, open_weights, stored_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_SHA256 = "base_sha256"  # key in the header of WEIGHTS that a run writes: the hash of the base's weights
# Fields of adapter_config.json that are compared with the config or do not affect the computation. All other fields
# belong to other methods, or to parts of the model that are not trained here.
FIELDS = ("peft_type", "r", "lora_alpha", "base_model_name_or_path", "target_modules", "exclude_modules", "task_type")
FIELDS += ("lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size")
FIELDS += ("auto_mapping", "peft_version", "revision", "inference_mode")
UNSET = (None, False, "none", {}, [])
PLAIN_INITS = (*UNSET, True, "gaussian", "orthogonal")  # all other values also change the base


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


def check_adapter(policy: PolicyConfig, model: ModelConfig) -> None:
    """ConfigError unless the adapter of lora_cfg.adapter_path fits the config and its model. Reads headers only."""
    cfg = policy.dtensor_cfg.lora_cfg
    source, file = (Path(cfg.adapter_path) / name for name in (CONFIG, WEIGHTS))
    if not os.path.isdir(cfg.adapter_path):
        raise ConfigError(f"{KEY}.adapter_path: no folder '{cfg.adapter_path}' (give a folder in PEFT's format)")
    fields = read_json(source)
    for field, value in fields.items():
        plain = PLAIN_INITS if field == "init_lora_weights" else UNSET
        if field not in FIELDS and value not in plain:
            raise ConfigError(f"{source}: {field}={shortened(value)} is not trained here: give an adapter without it")
    for field, key, value in (("peft_type", "", "LORA"), ("r", ".dim", cfg.dim), ("lora_alpha", ".alpha", cfg.alpha)):
        if fields.get(field) != value:
            raise ConfigError(f"{source}: {field}={shortened(fields.get(field))}, but {value} by {KEY}{key}")
    with open_weights(file) as tensors:
        has_sha256 = BASE_SHA256 in (tensors.metadata() or {})
        stored = stored_shapes(tensors)
    base = fields.get("base_model_name_or_path")
    # A hub name and its local copy end in the same name. If the hash is known, the weights are compared instead.
    ends = {os.path.basename(os.path.abspath(str(name))) for name in (base, policy.model_name)}
    if len(ends) > 1 and not has_sha256:
        other = f"an adapter of {shortened(base)}, not of policy.model_name={policy.model_name}"
        raise ConfigError(f"{source}: {other}: set policy.model_name to its base, or name your model in the file")
    expected = {peft_name(name): list(shape) for name, shape in factor_shapes(model, cfg).items()}
    for name in sorted(stored.keys() | expected.keys()):
        given, needed = (tensors.get(name, "no tensor") for tensors in (stored, expected))
        if given != needed:
            by = f"the model and {KEY}, whose target_modules and exclude_modules must be as in {CONFIG}"
            raise ConfigError(f"{file}: {shortened(name)} is {given}, but {needed} by {by}")
