"""Group advantages and the clipped policy-gradient loss: pure tensors, no torch.distributed, no I/O.

`policy_loss` is the only definition of the loss; a fused head must equal it. It sees the packed tokens of one
micro-batch and returns their share of the loss of the whole optimizer batch. Shares add up, whatever the
micro-batches and ranks, because the denominators are those of the whole batch, given by the caller. Nothing
in it waits for the GPU.

How a metric of several micro-batches and ranks becomes one number is said by its form:
    (sum, count) pair          add the sums, add the counts, divide once at the end
    name ends in _min, _max    minimum, maximum (+inf, -inf where a micro-batch has no valid token)
    any other scalar           add (`loss` is divided by its global denominator already)
"""

import math

import torch
from torch import Tensor

from config import LossConfig

Metrics = dict[str, Tensor | tuple[Tensor, Tensor]]


def group_advantages(reward_B: Tensor, group_B: Tensor, *, leave_one_out: bool, normalize: bool) -> Tensor:
    """Advantage of each sample within its group, as NeMo RL's `calculate_baseline_and_std_per_prompt`.

    A_i = r_i - b_i; with `normalize`, A_i / (s_i + 1e-6) where s_i > 0. b_i and s_i are the mean and the
    standard deviation (with Bessel's correction) of the rewards of i's group, without r_i if `leave_one_out`.
    s_i = 0 where fewer than two rewards remain, or all that remain are equal: such samples stay unnormalized,
    so that one right answer among wrong ones gets A = 1, not a million. A group of one gets 0.

    reward_B: floating; group_B: the group of each sample, in any order. Returns adv_B in reward_B's dtype.
    Example: rewards [1, 0, 0, 0] of one group, both options on -> [1, -.577349, -.577349, -.577349].
    """
    assert reward_B.is_floating_point() and reward_B.shape == group_B.shape, (reward_B.dtype, group_B.shape)
    adv_B = torch.zeros_like(reward_B, dtype=torch.float64)
    for group in group_B.unique():
        member_B = group_B == group
        adv_B[member_B] = _advantages_of_group(reward_B[member_B].double(), leave_one_out, normalize)
    return adv_B.to(reward_B.dtype)


def _advantages_of_group(reward_G: Tensor, leave_one_out: bool, normalize: bool) -> Tensor:
    size = len(reward_G)
    if size == 1:
        return torch.zeros_like(reward_G)
    peers_GG = reward_G.expand(size, size)
    if leave_one_out:
        peers_GG = peers_GG[~torch.eye(size, dtype=torch.bool, device=reward_G.device)].view(size, size - 1)
    adv_G = reward_G - peers_GG.mean(1)
    if not normalize or peers_GG.shape[1] == 1:
        return adv_G
    std_G = peers_GG.std(1)  # exactly 0 for equal rewards; sqrt(mean of squares - squared mean) would not be
    return torch.where(std_G > 0, adv_G / (std_G + 1e-6), adv_G)


def policy_loss(
    logp_T: Tensor,
    *,
    old_logp_T: Tensor,
    sampler_logp_T: Tensor,
    adv_T: Tensor,
    mask_T: Tensor,
    seq_T: Tensor,
    num_valid_tokens: int | Tensor,
    num_valid_seqs: int | Tensor,
    cfg: LossConfig,
    ref_logp_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    positive_T: Tensor | None = None,
    num_positive_tokens: int | Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """This micro-batch's share of the loss, differentiable in logp_T, and metrics (NeMo RL ClippedPGLossFn).

    Per token: logp_T (current policy), old_logp_T (at the start of the step), sampler_logp_T (as the engine
    reported it) and entropy_T in nats; adv_T; mask_T, nonzero if trained; seq_T, an integer that the tokens
    of one sequence share and no others have. Sequences must be whole; tokens in any order; T may be 0.
    num_valid_tokens, num_valid_seqs: by mask_T, over all micro-batches and ranks of the optimizer step.

    token_level_loss: sum over tokens / num_valid_tokens (DAPO, Yu et al. 2025). If false, a sequence's mean
    over its tokens, summed, / num_valid_seqs (GRPO, Shao et al. 2024); one without trained token adds 0.
    What is masked may hold anything, NaN too. A token whose sampler logp is not finite is dropped and counted
    (`num_nonfinite_sampler_logp`); no denominator shrinks for it.
    """
    if ref_logp_T is not None or positive_T is not None or num_positive_tokens is not None:
        raise NotImplementedError("policy_loss: no KL (ref_logp_T), no positive-example (positive_T) yet")
    shapes = [x.shape for x in (logp_T, old_logp_T, sampler_logp_T, adv_T, mask_T, seq_T)]
    assert logp_T.dim() == 1 and len(set(shapes)) == 1, shapes
    mask_T = mask_T != 0
    valid_T = mask_T & sampler_logp_T.isfinite()

    def keep(x_T):  # before any exp: where a masked value gives inf, 0 times its gradient would be NaN
        return torch.where(valid_T, x_T.to(logp_T.dtype), 0.0)

    logp_T, adv_T, sampler_logp_T = keep(logp_T), keep(adv_T).detach(), keep(sampler_logp_T).detach()
    old_logp_T = logp_T.detach() if cfg.force_on_policy_ratio else keep(old_logp_T).detach()
    loss_T, ratio_T, clamped_T, weight_T = _token_loss(logp_T, old_logp_T, sampler_logp_T, adv_T, cfg)
    # The 1e-8 is that of NeMo RL's masked_mean: a batch without valid token gives 0, not 0/0.
    seq_len_T, num_seqs = _seq_lengths(mask_T, seq_T, logp_T.dtype)
    if cfg.token_level_loss:
        loss = loss_T.sum() / (num_valid_tokens + 1e-8)
    else:
        loss = (loss_T / (seq_len_T + 1e-8)).sum() / (num_valid_seqs + 1e-8)

    with torch.no_grad():
        mean_T = _token_metrics(logp_T, old_logp_T, sampler_logp_T, ratio_T, clamped_T, weight_T, adv_T)
        if entropy_T is not None:
            mean_T["entropy"] = keep(entropy_T)
        count = mask_T.sum()
        metrics: Metrics = {name: (torch.where(valid_T, x_T, 0).sum(), count) for name, x_T in mean_T.items()}
        metrics["probs_ratio_min"], metrics["probs_ratio_max"] = _extremes(ratio_T, valid_T)
        metrics["probs_ratio_clamped_min"], metrics["probs_ratio_clamped_max"] = _extremes(clamped_T, valid_T)
        metrics["logp_gap_max"] = _extremes((sampler_logp_T - old_logp_T).abs(), valid_T)[1]
        metrics["num_nonfinite_sampler_logp"] = (mask_T & ~valid_T).sum()
        metrics |= {"loss": loss.detach(), "num_valid_samples": num_seqs}
    return loss, metrics


def _token_loss(
    logp_T: Tensor, old_logp_T: Tensor, sampler_logp_T: Tensor, adv_T: Tensor, cfg: LossConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss of each token, before aggregation; the ratio, the clamped ratio and the sampler weight behind it.

    With r = exp(logp - old) (PPO, Schulman et al. 2017, eq. 7):
        l = max(-A r, -A clamp(r, 1 - ratio_clip_min, 1 + ratio_clip_max))
        ratio_clip_c = c: l = min(l, -A c) where A < 0         (dual clip, Ye et al. 2019)
        disable_ppo_ratio: l = -A logp (REINFORCE); logp is in r's place in the metrics too, as in NeMo RL
        force_on_policy_ratio: no clamp; `old` is detach(logp), here and in the metrics, so r = 1
        use_importance_sampling_correction: l times w = exp(old - sampler), a constant, 0 where not finite
    """
    ratio_T = clamped_T = logp_T if cfg.disable_ppo_ratio else (logp_T - old_logp_T).exp()
    if not (cfg.disable_ppo_ratio or cfg.force_on_policy_ratio):
        clamped_T = ratio_T.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
    loss_T = torch.maximum(-adv_T * ratio_T, -adv_T * clamped_T)
    if cfg.ratio_clip_c is not None:
        loss_T = torch.where(adv_T < 0, torch.minimum(loss_T, -adv_T * cfg.ratio_clip_c), loss_T)
    weight_T = (old_logp_T - sampler_logp_T).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if cfg.use_importance_sampling_correction:
        loss_T = loss_T * weight_T
    return loss_T, ratio_T, clamped_T, weight_T


def _seq_lengths(mask_T: Tensor, seq_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Trained tokens of the sequence each token belongs to; the number of sequences that have any."""
    sorted_seq_T, order_T = seq_T.sort()
    index_T = torch.zeros_like(order_T)  # dense numbers from 0; `unique` would make CUDA wait for its size
    index_T[order_T[1:]] = (sorted_seq_T[1:] != sorted_seq_T[:-1]).cumsum(0)
    len_S = torch.zeros(len(seq_T), dtype=dtype, device=seq_T.device).index_add_(0, index_T, mask_T.to(dtype))
    return len_S[index_T], (len_S > 0).sum()


def _token_metrics(
    logp_T: Tensor,
    old_logp_T: Tensor,
    sampler_logp_T: Tensor,
    ratio_T: Tensor,
    clamped_T: Tensor,
    weight_T: Tensor,
    adv_T: Tensor,
) -> dict[str, Tensor]:
    """What is averaged over the trained tokens, under NeMo RL's names where it has one."""
    gap_T = sampler_logp_T - old_logp_T
    mixture_T = torch.logaddexp(old_logp_T, sampler_logp_T) - math.log(2)

    def k3(log_ratio_T):  # Schulman's estimator of KL(q || p) at samples of q, from log(p / q)
        return log_ratio_T.exp() - 1 - log_ratio_T

    return {
        "probs_ratio": ratio_T,
        "probs_ratio_clamped": clamped_T,
        "sampling_importance_ratio": weight_T,
        # Where clipping takes the token's gradient away. Dual clip is not counted.
        "ratio_clip_low_fraction": ((ratio_T < clamped_T) & (adv_T < 0)).to(ratio_T.dtype),
        "ratio_clip_high_fraction": ((ratio_T > clamped_T) & (adv_T > 0)).to(ratio_T.dtype),
        # Trainer against sampler: healthy within 1-2% above 1, and below 1e-3 for the KLs (NeMo RL's bounds).
        "token_mult_prob_error": gap_T.abs().exp(),
        "logp_gap_mean": gap_T.abs(),
        "gen_kl_error": k3(-gap_T),
        "policy_kl_error": k3(gap_T),
        "js_divergence_error": (k3(old_logp_T - mixture_T) + k3(sampler_logp_T - mixture_T)) / 2,
        # -E[log p] under the current policy, from samples of the sampler's. `entropy` is the exact one.
        "approx_entropy": -(logp_T - sampler_logp_T).exp() * logp_T,
    }


def _extremes(x_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over the valid tokens; the added infinity is the answer where there is none."""
    inf = x_T.new_full((1,), torch.inf)
    smallest = torch.cat([torch.where(valid_T, x_T, torch.inf), inf]).amin()
    return smallest, torch.cat([torch.where(valid_T, x_T, -torch.inf), -inf]).amax()
