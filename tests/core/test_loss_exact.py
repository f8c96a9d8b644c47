"""policy_loss against a float64 loop over tokens (loss_cases.py): value and gradients, for options in combination."""

import pytest
import torch
from cases import long_but
from loss_cases import MODES, WEIGHTS, allowed, hard_batch, loop_loss

from config import LossConfig
from loss import policy_loss

AGGREGATIONS = [
    {},
    {"loss_scale_factor": 3.0},
    {"token_level_loss": False},
    {"token_level_loss": False, "loss_scale_factor": 9.0},
]
KLS = [{"reference_policy_kl_penalty": 0.0}] + [
    {"reference_policy_kl_type": kind, "reference_policy_kl_penalty": 0.3} for kind in ("k1", "k2", "k3")
]
KL_VARIANTS = [
    {"kl_gradient": gradient, "use_on_policy_kl_approximation": approx, **clamps}
    for gradient in ("score_function", "policy_ratio", "plain")
    for approx in (False, True)
    for clamps in ({}, {"kl_input_clamp_value": 0.4}, {"kl_output_clamp_value": 0.1}, {"kl_input_clamp_value": None})
]


def run(cfg: LossConfig, dtype=torch.float64) -> torch.Tensor:
    """Loss, gradient in logp, gradient in entropy, as one vector."""
    batch = hard_batch(dtype)
    loss, _ = policy_loss(**batch, cfg=cfg)
    loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (batch["logp_R"], batch["entropy_R"])]
    return torch.cat([loss.detach()[None], *grads]).double()


BATCH = hard_batch(torch.float64)


def want(cfg: LossConfig) -> torch.Tensor:
    loss, grad, grad_entropy = loop_loss(BATCH, cfg)
    return torch.tensor([loss, *grad, *grad_entropy], dtype=torch.float64)


def check(configs: list[LossConfig], tolerance: float = 1e-12, floor: float = 1e-3, dtype=torch.float64) -> None:
    """Each number within `tolerance`, relative to itself, or to `floor` of the largest where it is below that."""
    for cfg in configs:
        got, expected = run(cfg, dtype), want(cfg)
        error = (got - expected).abs() / expected.abs().clamp(min=floor * expected.abs().max())
        assert error.max() <= tolerance, (cfg, error.max(), got, expected)


def assert_all_are_in(configs: list[LossConfig], *choices: list[dict]) -> None:
    """No rule has left out one of the choices altogether."""
    for options in (options for choice in choices for options in choice):
        is_in = [all(getattr(cfg, name) == value for name, value in options.items()) for cfg in configs]
        assert any(is_in), options


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip_max, dual", long_but([(0.2, None), (0.28, 1.05)], [(c, d) for c in (0.2, 0.28) for d in (None, 1.05, 3.0)])
)
def test_clip_dual_clip_weights_kl_aggregation_entropy(clip_max, dual):
    """Signs of the advantage and sides of the clips: all in the batch."""
    clip = [{"ratio_clip_max": clip_max, "ratio_clip_c": dual}]
    configs = allowed(clip, WEIGHTS, KLS, AGGREGATIONS, [{}, {"entropy_coef": 0.2}])
    assert_all_are_in(configs, WEIGHTS, KLS, AGGREGATIONS)
    check(configs)


@pytest.mark.slow
def test_modes_weights_aggregation():
    configs = allowed(MODES, WEIGHTS, AGGREGATIONS, [{"reference_policy_kl_penalty": 0.3, "entropy_coef": 0.2}])
    assert_all_are_in(configs, MODES, WEIGHTS, AGGREGATIONS)
    check(configs)


def test_kl_variants():
    configs = allowed(MODES[:3], KLS[1:], KL_VARIANTS, AGGREGATIONS)
    assert_all_are_in(configs, MODES[:3], KLS[1:], AGGREGATIONS)
    check(configs)


def test_positive_examples_and_a_lower_clip_of_its_own():
    check(allowed(MODES, AGGREGATIONS, [{"positive_example_nll_weight": 0.7, "ratio_clip_min": 0.05}]))


@pytest.mark.slow
def test_float32_is_close():
    configs = allowed(MODES, WEIGHTS, AGGREGATIONS, [{"entropy_coef": 0.2}]) + allowed(MODES, KLS, AGGREGATIONS)
    check(configs, tolerance=1e-6, floor=1, dtype=torch.float32)
