"""Advantages of a step from its rewards, by the estimator the config names: pure tensors, no torch.distributed, no I/O.

`advantages` gives one number for each sample, which all its tokens share. Only a KL in the reward is a token's own:
then `kl_in_reward_advantages` finishes them once the log-probabilities are known. Statistics are of the whole step:
`advantages` sees all its samples; the other sees a rank's tokens and is told how to sum over ranks.
docs/details.md says which paper or system each choice is from, and what the others do.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from config import ConfigError, GRPOConfig, LossConfig
from loss import clamp_abs, group_advantages, kl_estimate


def advantages(
    reward_B: Tensor,
    group_B: Tensor,
    num_tokens_B: Tensor,
    grpo: GRPOConfig,
    loss_fn: LossConfig,
    rewards: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """adv_B, in reward_B's dtype: of every token of a sample; to be finished where loss_fn.use_kl_in_reward is set.

    reward_B: floating, all samples of the step; group_B: their groups, in any order; num_tokens_B: trained tokens.
    rewards: name -> reward_B of each kind of reward, for gdpo. By grpo.adv_estimator.name:
        grpo                  `group_advantages` (Shao et al. 2024)
        gdpo                  `multi_reward_advantages` (Liu et al. 2026)
        reinforce_plus_plus   r, less the mean of its group if minus_baseline, whitened over the tokens of the step (Hu
                              et al. 2025), so that a long response counts for as many as it has
    Then clipped to [grpo.advantage_clip_low, grpo.advantage_clip_high]. Raises ConfigError: gdpo without two rewards.
    """
    estimator = grpo.adv_estimator
    options = {
        "leave_one_out": grpo.use_leave_one_out_baseline,
        "normalize": grpo.normalize_rewards,
        "std": grpo.reward_std,
    }
    if estimator.name == "grpo":
        return _clip(group_advantages(reward_B, group_B, **options), grpo)
    if estimator.name == "gdpo":
        return _clip(multi_reward_advantages(rewards or {}, group_B, estimator.reward_weights, **options), grpo)
    adv_B = reward_B
    if estimator.minus_baseline:
        adv_B = group_advantages(reward_B, group_B, leave_one_out=False, normalize=False)
    return adv_B if loss_fn.use_kl_in_reward else _clip(_whiten(adv_B, num_tokens_B), grpo)


def advantage_metrics(reward_B: Tensor, group_B: Tensor, adv_B: Tensor, grpo: GRPOConfig) -> dict[str, float]:
    """Of the advantages, and baseline_reward/pct_0, pct_1, pct_mixed: per cent of samples whose baseline is 0, 1, else
    (NeMo RL): problems that all the others of the group got wrong, right, or some of each."""
    loo = grpo.use_leave_one_out_baseline
    baseline_B = reward_B - group_advantages(reward_B, group_B, leave_one_out=loo, normalize=False)
    zero, one = ((baseline_B == value).float().mean().item() * 100 for value in (0, 1))
    baseline = {"pct_0": zero, "pct_1": one, "pct_mixed": 100 - zero - one}
    spread = {name: getattr(adv_B, name)().item() for name in ("mean", "max", "min", "sum")}
    return {f"baseline_reward/{k}": v for k, v in baseline.items()} | {f"advantages/{k}": v for k, v in spread.items()}


def multi_reward_advantages(
    rewards: Mapping[str, Tensor], group_B: Tensor, weights: tuple[float, ...] | None, **options
) -> Tensor:
    """GDPO (Liu et al. 2026): `group_advantages` of each reward with `options`, weighted sum, whitened over the batch.

    So a reward of small spread counts as much as one of large. weights: in the alphabetical order of the names; None =
    1 each. The last step is (x - mean) / std with Bessel's correction, or x - mean where all are equal (NeMo RL).
    """
    names = sorted(rewards)
    if len(names) < 2:
        raise ConfigError(
            f"grpo.adv_estimator.name=gdpo needs two rewards or more of each sample, got {', '.join(names) or 'none'}: "
            "name environments that give them, or set grpo.adv_estimator.name=grpo"
        )
    if weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"grpo.adv_estimator.reward_weights={list(weights)}: must be {len(names)} numbers, of {', '.join(names)}"
        )
    total_B = torch.zeros_like(rewards[names[0]], dtype=torch.float64)
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        total_B += weight * group_advantages(rewards[name].double(), group_B, **options)
    total_B -= total_B.mean()
    std = total_B.std()
    return (total_B / std if std > 0 else total_B).to(rewards[names[0]].dtype)


def kl_in_reward_advantages(
    adv_T: Tensor,
    *,
    old_logp_T: Tensor,
    ref_logp_T: Tensor,
    mask_T: Tensor,
    grpo: GRPOConfig,
    loss_fn: LossConfig,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """REINFORCE++ with KL in the reward: adv_T less reference_policy_kl_penalty * KL of the token, whitened, clipped.

    adv_T: what `advantages` gave, for each token of this rank, all its packs together; mask_T, nonzero if trained: what
    is masked may hold anything and gets 0. sum_over_ranks: an all-reduce (a collective) of a 0-dim float64 tensor. The
    KL is estimated at old_logp_T, with the type and clamps of the loss, and is the token's alone, as in NeMo RL (Hu et
    al. 2025 charge a token for what follows it too).
    """
    mask_T = mask_T != 0
    log_ratio_T = clamp_abs(ref_logp_T - old_logp_T, loss_fn.kl_input_clamp_value)
    kl_T = kl_estimate(log_ratio_T, loss_fn.reference_policy_kl_type)
    adv_T = adv_T - loss_fn.reference_policy_kl_penalty * clamp_abs(kl_T, loss_fn.kl_output_clamp_value)
    adv_T = _clip(_whiten(torch.where(mask_T, adv_T, 0.0), mask_T, sum_over_ranks), grpo)
    return torch.where(mask_T, adv_T, 0.0)


def _whiten(x: Tensor, weight: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """(x - mean) / sqrt(max(variance, 1e-8)), both weighted and without Bessel's correction (NeMo RL)."""
    y, weight = x.double(), weight.double()
    total = sum_over_ranks(weight.sum()).clamp(min=1)
    y = y - sum_over_ranks((weight * y).sum()) / total
    variance = sum_over_ranks((weight * y.square()).sum()) / total
    return (y * variance.clamp(min=1e-8).rsqrt()).to(x.dtype)


def _clip(adv: Tensor, grpo: GRPOConfig) -> Tensor:
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    return adv if low is None and high is None else adv.clamp(low, high)


def step_advantages(samples, grpo, loss_fn):
    reward_B = torch.tensor([s.reward for s in samples])
    group_B = torch.tensor([s.prompt for s in samples])
    num_tokens_B = torch.tensor([int(s.mask.sum()) for s in samples])
    adv_B = advantages(reward_B, group_B, num_tokens_B, grpo, loss_fn, {})
    return adv_B.tolist(), advantage_metrics(reward_B, group_B, adv_B, grpo)
