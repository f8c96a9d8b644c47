"""Which linear layers of a model LoRA adapts, by their names. No torch, so that `grpo.py --check` answers for it."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from base.hf.model_config import ModelConfig
from config import LORA_KEY, ConfigError, LoRAConfig


@lru_cache(maxsize=4)  # train_flops asks in each step
def adapted_layers(model: ModelConfig, cfg: LoRAConfig) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of each linear layer of the blocks that gets an adapter; {} if LoRA is off.

    A name or pattern selects layers by the full name, as in NeMo RL's Automodel, and by its last parts, as in PEFT.
    Raises ConfigError if a pattern selects nothing, or cfg.dim is more than the rank of a layer can be.
    """
    if not cfg.enabled:
        return {}
    shapes = model.linear_layers()
    _check_patterns("target_modules", cfg.target_modules, known=shapes)
    _check_patterns("exclude_modules", cfg.exclude_modules, known=(*shapes, "lm_head"))  # the head is never adapted
    adapted = {}
    for name, shape in shapes.items():
        is_target = not cfg.target_modules or _matches(name, cfg.target_modules)
        if is_target and not _matches(name, cfg.exclude_modules):
            adapted[name] = shape
    if not adapted:
        raise ConfigError(f"{LORA_KEY}.exclude_modules leaves no linear layer to adapt: name fewer")
    for name, (outputs, inputs) in adapted.items():
        rank = min(outputs, inputs)
        if cfg.dim > rank:
            size = f"{outputs} x {inputs}"
            raise ConfigError(f"{LORA_KEY}.dim={cfg.dim} is more than the rank of {name}, {size}: use {rank} or less")
    return adapted


def factor_shapes(model: ModelConfig, cfg: LoRAConfig) -> dict[str, tuple[int, int]]:
    """Name -> shape of both factors of each adapted layer (lora.LoRALinear)."""
    factors = {}
    for name, (outputs, inputs) in adapted_layers(model, cfg).items():
        factors[f"{name}.lora_A"] = (cfg.dim, inputs)
        factors[f"{name}.lora_B"] = (outputs, cfg.dim)
    return factors


def _check_patterns(key: str, patterns: Iterable[str], known: Iterable[str]) -> None:
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in known):
            names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in known if name != "lm_head"))
            raise ConfigError(f"{LORA_KEY}.{key}: no linear layer of the blocks is called '{pattern:.80}'; use {names}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) or name.endswith(f".{pattern}") for pattern in patterns)
