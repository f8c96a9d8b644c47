"""Corrections for a sampler that is not the policy: which give back the gradient of the policy, in
expectation over all sequences, in float64. (core/test_loss_exact.py has the weights.)"""

import itertools

import pytest
import torch

from bench import off_policy
from bench.off_policy import AGES, CORRECTIONS, PREFIX, SEQUENCES, gradients, on_policy_gradient, token_logps, toy
from config import LossConfig

NOISE = 0.5  # enough that each bound has weights on both sides


@pytest.fixture(scope="module")
def old_toys():
    return {name: off_policy.old_toy(ages) for name, ages in AGES.items()}


def expected(name: str, policy, sampler, advantage) -> tuple[torch.Tensor, torch.Tensor]:
    """(what policy_loss gives in expectation over the sampler, the true gradient)."""
    q = token_logps(sampler).sum(1).exp()
    gradient_of_sequences = gradients(policy, sampler, advantage, LossConfig(**CORRECTIONS[name]))
    return (q[:, None, None] * gradient_of_sequences).sum(0), on_policy_gradient(policy, advantage)


def test_the_toy_is_what_it_says():
    assert SEQUENCES.tolist() == [list(s) for s in itertools.product(range(4), repeat=3)]
    assert all(row == [0, 1 + a, 5 + 4 * a + b] for row, (a, b, _) in zip(PREFIX.tolist(), SEQUENCES, strict=True))
    policy, sampler, advantage = toy(NOISE)
    p, q = (token_logps(logits).sum(1).exp() for logits in (policy, sampler))
    torch.testing.assert_close(torch.stack([p.sum(), q.sum(), 1 + (p * advantage).sum()]), torch.ones(3).double())
    ratios = (token_logps(policy) - token_logps(sampler)).exp()
    assert (ratios > 2).any() and (ratios < 0.5).any() and (ratios.prod(1) > 3).any()


@pytest.mark.slow
@pytest.mark.parametrize("case", [*AGES, "noise"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_expectation_of_each_correction(name, case, old_toys):
    """Without a bound that cuts, the sequence weight gives back the on-policy gradient; all others their known bias."""
    tables = toy(NOISE) if case == "noise" else old_toys[case]
    got, truth = expected(name, *tables)
    bias = (got - truth).norm() / truth.norm()
    if name == "sequence" or (name.startswith("sequence") and case not in ("age 4", "noise")):
        assert bias <= 1e-12
        torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-14)
    else:
        assert bias > (0.1 if case == "noise" else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("age", AGES)
def test_token_weights_are_exact_where_one_token_decides(age, old_toys):
    """An advantage that hangs on the first token alone: nothing stands before it, what follows does not matter."""
    policy, sampler, _ = old_toys[age]
    advantage = torch.tensor([0.5, -1.0, 0.25, 0.75], dtype=torch.float64)[SEQUENCES[:, 0]]
    got, truth = expected("token", policy, sampler, advantage)
    torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-14)
    uncorrected, _ = expected("none", policy, sampler, advantage)
    assert (uncorrected - truth).norm() > 0.05 * truth.norm()
