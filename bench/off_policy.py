"""Bias and variance of each importance-sampling correction, exactly: every sequence of a toy policy is enumerated.

A policy over V = 4 tokens and L = 3 steps with its own logits after every prefix and rewards drawn once. Its samplers
are the policy with noise on their logits, or the policy as it was some optimizer steps ago. E over the sampler of the
gradient of `loss.policy_loss` is a sum over 64 sequences: no sampling, no seed to be lucky with.
`python -m bench.off_policy` prints the tables of docs/off_policy.md.
"""

import functools
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

LEARNING_RATE = 0.2  # Adam moves each logit by about this much in a step
# The age of each token of a response, in optimizer steps; in the last one the weights change twice amid the response.
AGES = {"age 1": (1, 1, 1), "age 2": (2, 2, 2), "age 4": (4, 4, 4), "ages 4, 2, 1": (4, 2, 1)}

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
        logp_R = token_logps(logits)[s]
        loss, _ = policy_loss(
            logp_R,
            old_logp_R=logp_R.detach(),
            sampler_logp_R=sampler_logp[s],
            adv_R=advantage[s].expand(L),
            mask_R=torch.ones(L),
            seq_R=torch.zeros(L, dtype=torch.long),
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


@functools.cache
def trained(seed: int) -> tuple[list[Tensor], Tensor]:
    """The policy's logits before and after each of max(AGES) steps of Adam on policy, and the rewards."""
    start, _, reward = toy(0.0, seed)
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([logits], lr=LEARNING_RATE, weight_decay=0.0)
    versions = [start]
    for _ in range(max(map(max, AGES.values()))):
        policy = versions[-1]
        prob = token_logps(policy).sum(1).exp()
        logits.grad = -(prob[:, None, None] * gradients(policy, policy, reward, LossConfig())).sum(0)
        optimizer.step()
        versions.append(logits.detach().clone())
    return versions, reward


def old_toy(ages: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """As `toy`: the newest policy, and a sampler whose token t is of the weights of ages[t] steps before. The advantage
    is against the sampler's mean reward: a group has its own."""
    versions, reward = trained(seed)
    depth = torch.tensor([0] + [1] * V + [2] * V**2)  # of each prefix
    sampler = torch.stack([versions[-1 - age] for age in ages])[depth, torch.arange(NUM_PREFIXES)]
    return versions[-1], sampler, reward - (reward * token_logps(sampler).sum(1).exp()).sum()


def table(cases: dict[str, tuple[Tensor, Tensor, Tensor]]) -> str:
    """Markdown: for each (policy, sampler, advantage) and correction, bias and spread against the true gradient."""
    lines = [f"| correction | {' | '.join(cases)} |", "|---" * (1 + len(cases)) + "|"]
    cells: dict[str, list[str]] = {"KL(sampler, policy), nats a sequence": []} | {name: [] for name in CORRECTIONS}
    for policy, sampler, advantage in cases.values():
        q = token_logps(sampler).sum(1).exp()
        kl = (q * (token_logps(sampler) - token_logps(policy)).sum(1)).sum()
        cells["KL(sampler, policy), nats a sequence"].append(f"{kl:.4f}")
        truth = on_policy_gradient(policy, advantage)
        for name, options in CORRECTIONS.items():
            gradient = gradients(policy, sampler, advantage, LossConfig(**options))  # of each sequence
            mean = (q[:, None, None] * gradient).sum(0)
            variance = (q[:, None, None] * (gradient - mean).square()).sum()
            spread = variance.sqrt()
            bias = (mean - truth).norm() / truth.norm()
            cells[name].append(f"{'0' if bias < 1e-10 else f'{bias:.1%}'} / {spread / truth.norm():.2f}")
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in cells.items())])


def tables() -> list[str]:
    """That of samplers with noise, and that of older weights."""
    noisy = {f"noise {noise:g}": toy(noise) for noise in (0.05, 0.2, 0.5, 1.0)}
    return [table(noisy), table({name: old_toy(ages) for name, ages in AGES.items()})]


if __name__ == "__main__":
    print("\n\n".join(tables()))
