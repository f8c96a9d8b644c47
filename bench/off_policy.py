"""Bias and variance of each importance-sampling correction, exactly: every sequence of a toy policy is enumerated.

A policy over V = 4 tokens and L = 3 steps with its own logits after every prefix, rewards drawn once, and samplers that
are the policy with noise on their logits. E over the sampler of the gradient of `loss.policy_loss` is a sum over 64
sequences: no sampling, no seed to be lucky with. `python -m bench.off_policy` prints the table of docs/off_policy.md.
"""

import itertools

import torch
from torch import Tensor

from config import LossConfig
from loss import policy_loss

V, L = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=L)))  # [64, L]
# The logits after each of the 1 + V + V^2 prefixes; PREFIX[s, t] numbers the one before token t of sequence s.
PREFIX = torch.stack(
    [torch.zeros(V**L, dtype=torch.long), 1 + SEQUENCES[:, 0], 1 + V + SEQUENCES[:, :2] @ torch.tensor([V, 1])], 1
)
NUM_PREFIXES = 1 + V + V**2

IS = {"use_importance_sampling_correction": True}
CORRECTIONS = {
    "none": {},
    "token": IS,
    "tis, 2": IS | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
    "icepop, 0.5-2": IS
    | {
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 2.0,
        "truncated_importance_sampling_ratio_min": 0.5,
    },
    "seq-mask-tis, 0.8-1.25": IS
    | {
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.25,
        "truncated_importance_sampling_ratio_min": 0.8,
    },
    "sequence-mask, 3": IS
    | {"truncated_importance_sampling_type": "sequence-mask", "truncated_importance_sampling_ratio": 3.0},
    "sequence-truncate, 3": IS
    | {"truncated_importance_sampling_type": "sequence-truncate", "truncated_importance_sampling_ratio": 3.0},
    "sequence": IS | {"truncated_importance_sampling_type": "sequence"},
}


def toy(noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The policy's logits [prefixes, V], the sampler's, and the advantage of each sequence; float64."""
    generator = torch.Generator().manual_seed(seed)
    policy, change = torch.randn(2, NUM_PREFIXES, V, generator=generator, dtype=torch.float64)
    reward = torch.rand(len(SEQUENCES), generator=generator, dtype=torch.float64)
    sampler = policy + noise * change
    advantage = reward - (reward * token_logps(policy).sum(1).exp()).sum()
    return policy, sampler, advantage


def token_logps(logits: Tensor) -> Tensor:
    """Log-probability of each token of each sequence, [64, L]."""
    return logits.log_softmax(-1)[PREFIX, SEQUENCES]


def gradients(policy: Tensor, sampler: Tensor, advantage: Tensor, cfg: LossConfig) -> Tensor:
    """Ascent direction that `policy_loss` gives for each sequence alone, [64, prefixes, V]; a sum over tokens."""
    sampler_logp = token_logps(sampler)
    rows = []
    for s in range(len(SEQUENCES)):
        logits = policy.clone().requires_grad_()
        logp_T = token_logps(logits)[s]
        loss, _ = policy_loss(
            logp_T,
            old_logp_T=logp_T.detach(),
            sampler_logp_T=sampler_logp[s],
            adv_T=advantage[s].expand(L),
            mask_T=torch.ones(L),
            seq_T=torch.zeros(L, dtype=torch.long),
            num_valid_tokens=1,  # the sum over tokens, not their mean
            num_valid_seqs=1,
            cfg=cfg,
        )
        rows.append(torch.autograd.grad(-loss, logits)[0])
    return torch.stack(rows)


def on_policy_gradient(policy: Tensor, advantage: Tensor) -> Tensor:
    """Gradient of the expected advantage, straight from the probabilities: no score function, no sampling."""
    logits = policy.clone().requires_grad_()
    (token_logps(logits).sum(1).exp() * advantage).sum().backward()
    return logits.grad


def table() -> str:
    """Markdown: for each distance of the sampler and each correction, bias and spread against the true gradient."""
    lines = ["| correction | noise 0.05 | noise 0.2 | noise 0.5 | noise 1 |", "|---|---|---|---|---|"]
    cells: dict[str, list[str]] = {"KL(sampler, policy), nats a sequence": []} | {name: [] for name in CORRECTIONS}
    for noise in (0.05, 0.2, 0.5, 1.0):
        policy, sampler, advantage = toy(noise)
        q = token_logps(sampler).sum(1).exp()
        kl = (q * (token_logps(sampler) - token_logps(policy)).sum(1)).sum()
        cells["KL(sampler, policy), nats a sequence"].append(f"{kl:.4f}")
        truth = on_policy_gradient(policy, advantage)
        for name, options in CORRECTIONS.items():
            each = gradients(policy, sampler, advantage, LossConfig(**options))
            mean = (q[:, None, None] * each).sum(0)
            spread = ((q[:, None, None] * (each - mean).square()).sum()).sqrt()
            bias = (mean - truth).norm() / truth.norm()
            cells[name].append(f"{'0' if bias < 1e-10 else f'{bias:.1%}'} / {spread / truth.norm():.2f}")
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in cells.items())])


if __name__ == "__main__":
    print(table())
