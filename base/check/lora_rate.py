"""Whether the learning rate is low for LoRA. No torch."""

from base.hf.model_config import ModelConfig
from config import PolicyConfig

# Of tinker-cookbook 0.6.1: learning rates of its RL recipes, with this alpha (theirs, too, divides by the rank), and
# exponents of hyperparam_utils.get_lr.
RATES = (1e-5, 4e-5)
ALPHA = 32
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}


def low_rate(policy: PolicyConfig, model: ModelConfig) -> list[str]:
    """A note, or none."""
    alpha = policy.dtensor_cfg.lora_cfg.alpha
    lr = policy.optimizer.kwargs.lr
    if lr >= RATES[0] * ALPHA / alpha:  # an update of the weights grows with both
        return []
    given = f"policy.optimizer.kwargs.lr={lr:g} with lora_cfg.alpha={alpha:g}"
    published = f"{RATES[0]:g} to {RATES[1]:g} with alpha={ALPHA:g} in tinker-cookbook's RL recipes"
    return [f"{given} is below published rates for LoRA: {published}{_formula(model)}"]


def _formula(model: ModelConfig) -> str:
    """What tinker-cookbook's `get_lr` says for the model, of the two kinds for which it has an exponent."""
    for kind, exponent in EXPONENTS.items():
        if model.hf["model_type"].startswith(kind):
            rate = 5e-4 * (2000 / model.hidden_size) ** exponent
            return f"; its formula for supervised training has {rate:.1e} for this model"
    return ""
