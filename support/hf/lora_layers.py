"""Which linear layers of a model LoRA adapts, by their names. No torch, so that `grpo.py --check` answers for it."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from config import ConfigError, LoRAConfig
from support.inputs.model_config import ModelConfig

KEY = "policy.dtensor_cfg.lora_cfg"


@lru_cache(maxsize=4)  # train_flops asks in each step
def adapted_layers(model: ModelConfig, cfg: LoRAConfig) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of each linear layer of the blocks that gets an adapter; {} if LoRA is off.

    A name or pattern selects layers by the full name, as in NeMo RL's Automodel, and by its last parts, as in PEFT.
    Raises ConfigError if a pattern selects nothing, or cfg.dim is more than the rank of a layer can be.
    """
    if not cfg.enabled:
        return {}
    matrices = ((name, shape) for name, shape in model.tensor_shapes() if ".layers." in name and len(shape) == 2)
    shapes = {name.removesuffix(".weight"): shape for name, shape in matrices}
    for key, patterns in (("target_modules", cfg.target_modules), ("exclude_modules", cfg.exclude_modules)):
        known = [*shapes, *["lm_head"] * (key == "exclude_modules")]  # the head is never adapted
        for pattern in patterns:
            if not any(_matches(name, [pattern]) for name in known):
                names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in shapes))
                raise ConfigError(f"{KEY}.{key}: no linear layer of the blocks is called '{pattern:.80}'; use {names}")
    targets = cfg.target_modules or ("*",)
    adapted = {n: s for n, s in shapes.items() if _matches(n, targets) and not _matches(n, cfg.exclude_modules)}
    if not adapted:
        raise ConfigError(f"{KEY}.exclude_modules leaves no linear layer to adapt: name fewer")
    for name, shape in adapted.items():
        if cfg.dim > min(shape):
            size = " x ".join(map(str, shape))
            raise ConfigError(f"{KEY}.dim={cfg.dim} is more than the rank of {name}, {size}: use {min(shape)} or less")
    return adapted


def factor_shapes(model: ModelConfig, cfg: LoRAConfig) -> dict[str, tuple[int, int]]:
    """Name -> shape of both factors of each adapted layer (lora.LoRALinear)."""
    layers = adapted_layers(model, cfg)
    factors = {f"{name}.lora_A": (cfg.dim, inputs) for name, (_, inputs) in layers.items()}
    return factors | {f"{name}.lora_B": (outputs, cfg.dim) for name, (outputs, _) in layers.items()}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) or name.endswith(f".{pattern}") for pattern in patterns)
