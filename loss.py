"""Group advantages and the policy-gradient loss with its options: pure tensors, no torch.distributed, no I/O.

`policy_loss` is the only definition of the loss; a fused head must equal it. It sees the packed tokens of one
micro-batch and returns their share of the loss of the whole optimizer batch. Shares add up, whatever the
micro-batches and ranks, because the denominators are those of the whole batch, given by the caller. Nothing
in it waits for the GPU.

How a metric of several micro-batches and ranks becomes one number is said by its form:
    (sum, count) pair          add the sums, add the counts, divide once at the end
    name ends in _min, _max    minimum, maximum (+inf, -inf where a micro-batch has no valid token)
    any other scalar           add (`loss` is divided by its global denominator already)
What is no mean, `derived_metrics` makes of the reduced numbers. docs/details.md says which paper or system each
choice is from, and what the others do.
"""

import math
import re

import torch
from torch import Tensor

from advantages import group_advantages as group_advantages  # public surface: loss.group_advantages
from config import MAX_LOG_RATIO, LossConfig
from run.config_check import loss_problems

Metrics = dict[str, Tensor | tuple[Tensor, Tensor]]

BY_SEQUENCE = ("sequence", "sequence-truncate", "sequence-mask")  # importance sampling types that weight sequences


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
    """This micro-batch's share of the loss, differentiable in logp_T and entropy_T; metrics (NeMo RL ClippedPGLossFn).

    Per token: logp_T (current policy), old_logp_T (at the start of the step), sampler_logp_T (as the engine reported
    it), ref_logp_T (reference policy) and entropy_T in nats; adv_T; mask_T, nonzero if trained; positive_T, nonzero if
    the reward is > 0; seq_T, an integer that the tokens of one sequence share and no others have. Sequences must be
    whole; tokens in any order; T may be 0. num_valid_tokens, num_valid_seqs, num_positive_tokens: trained ones, over
    all micro-batches and ranks of the optimizer step.

        loss = aggregate(w l + reference_policy_kl_penalty kl - entropy_coef entropy) + positive_example_nll_weight nll

    l: `_token_loss`; w: `_sampler_weights`; kl, where ref_logp_T is given: `_reference_kl`; aggregate: `_shares`.
    nll: mean of -logp over the tokens of positive samples (VAPO, Yue et al. 2025, eq. 10; NeMo RL's is the mean of each
    micro-batch: equal where there is one).

    What is masked may hold anything, NaN too. A token whose sampler logp is not finite is as if masked, and counted
    (`num_nonfinite_sampler_logp`): the caller's counts are without it. What an importance weight masks stays in them.
    """
    problems = list(loss_problems(cfg))
    assert not problems, problems
    t = _Tokens(logp_T, old_logp_T, sampler_logp_T, adv_T, mask_T, seq_T, cfg)
    share_T = _shares(t.seqs, num_valid_tokens, num_valid_seqs, cfg)
    ratio_T, clamped_T = _ratios(t, cfg)
    weight_T, outside_T = _sampler_weights(t, cfg)
    loss_T = _token_loss(t, ratio_T, clamped_T, cfg)
    if cfg.use_importance_sampling_correction:
        loss_T = loss_T * weight_T
    loss, kl, nll = (loss_T * share_T).sum(), share_T.new_zeros(()), share_T.new_zeros(())
    if ref_logp_T is not None and cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
        kl = (_reference_kl(t, t.keep(ref_logp_T).detach(), cfg) * share_T).sum()
        loss = loss + cfg.reference_policy_kl_penalty * kl
    if cfg.entropy_coef:
        assert entropy_T is not None, f"entropy_coef={cfg.entropy_coef} needs entropy_T"
        loss = loss - cfg.entropy_coef * (t.keep(entropy_T) * share_T).sum()
    if cfg.positive_example_nll_weight:
        assert positive_T is not None and num_positive_tokens is not None, "positive-example NLL needs both"
        nll = -torch.where(positive_T != 0, t.logp_T, 0.0).sum() / _at_least_one(num_positive_tokens)
        loss = loss + cfg.positive_example_nll_weight * nll

    with torch.no_grad():
        metrics: Metrics = {"loss": loss.detach(), "kl_penalty": kl.detach(), "positive_nll_loss": nll.detach()}
        metrics |= _token_metrics(t, ratio_T, clamped_T, entropy_T, cfg) | _weight_metrics(t, weight_T, outside_T, cfg)
    return loss, metrics


@torch.no_grad()
def token_shares(
    mask_T: Tensor,
    *,
    sampler_logp_T: Tensor,
    seq_T: Tensor,
    num_valid_tokens: int | Tensor,
    num_valid_seqs: int | Tensor,
    cfg: LossConfig,
    positive_T: Tensor,
    num_positive_tokens: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """What a head that sees tokens one by one needs to know of the rest: (share_T, nll_share_T), the weights of each
    token in `policy_loss`'s aggregate and nll; 0 where it is not trained. Arguments as there."""
    valid_T = (mask_T != 0) & sampler_logp_T.isfinite()
    seqs = _Sequences(seq_T, valid_T, sampler_logp_T.dtype)
    share_T = torch.where(valid_T, _shares(seqs, num_valid_tokens, num_valid_seqs, cfg), 0.0)
    nll_share_T = (valid_T & (positive_T != 0)).to(share_T.dtype) / _at_least_one(num_positive_tokens)
    return share_T, nll_share_T


class _Tokens:
    """What `policy_loss` was given of each token, with 0 for what is not trained."""

    def __init__(self, logp_T, old_logp_T, sampler_logp_T, adv_T, mask_T, seq_T, cfg: LossConfig):
        shapes = [x.shape for x in (logp_T, old_logp_T, sampler_logp_T, adv_T, mask_T, seq_T)]
        assert logp_T.dim() == 1 and len(set(shapes)) == 1, shapes
        self.mask_T = mask_T != 0
        self.valid_T = self.mask_T & sampler_logp_T.isfinite()
        self.dtype = logp_T.dtype
        self.logp_T, self.adv_T = self.keep(logp_T), self.keep(adv_T).detach()
        self.old_logp_T = (self.logp_T if cfg.force_on_policy_ratio else self.keep(old_logp_T)).detach()
        self.sampler_logp_T = self.keep(sampler_logp_T).detach()
        self.seqs = _Sequences(seq_T, self.valid_T, self.dtype)

    def keep(
        self, x_T: Tensor
    ) -> Tensor:  # before any exp: where a masked value gives inf, 0 times its gradient is NaN
        return torch.where(self.valid_T, x_T.to(self.dtype), 0.0)


class _Sequences:
    """Which tokens make a sequence: sums over it, given back to each of its tokens."""

    def __init__(self, seq_T: Tensor, mask_T: Tensor, dtype: torch.dtype):
        sorted_seq_T, order_T = seq_T.sort()
        self.index_T = torch.zeros_like(order_T)  # dense numbers; `unique` would make CUDA wait for how many there are
        self.index_T[order_T[1:]] = (sorted_seq_T[1:] != sorted_seq_T[:-1]).cumsum(0)
        self.mask_T = mask_T
        self.len_T = self.sum(mask_T.to(dtype)).clamp(min=1)  # trained tokens of the token's sequence
        self.count = self.sum_of(torch.ones_like(self.len_T)).round()  # sequences with a trained token

    def sum(self, x_T: Tensor) -> Tensor:
        """Sum over the sequence of each token; x_T is 0 where not trained."""
        return torch.zeros_like(x_T).index_add(0, self.index_T, x_T)[self.index_T]

    def sum_of(self, x_T: Tensor) -> Tensor:
        """Sum over sequences with a trained token of what is the same for all tokens of a sequence."""
        return torch.where(self.mask_T, x_T / self.len_T, 0).sum()


def _at_least_one(count: int | Tensor) -> Tensor:  # a batch without valid token gives 0, not 0/0
    return torch.as_tensor(count).clamp(min=1)


def _shares(seqs: _Sequences, num_valid_tokens: int | Tensor, num_valid_seqs: int | Tensor, cfg: LossConfig) -> Tensor:
    """Weight of each token in the loss, whose denominators are those of the whole optimizer step.

    token_level_loss: 1 / tokens (DAPO, Yu et al. 2025). If false, a sequence's tokens are summed over
    loss_scale_factor, the same for all (Dr. GRPO, Liu et al. 2025; verl's key), or without one over the sequence's
    length (GRPO, Shao et al. 2024), and sequences averaged. One without trained token adds 0.
    """
    one_T = torch.ones_like(seqs.len_T)
    if cfg.token_level_loss:
        return one_T / _at_least_one(num_valid_tokens)
    length_T = seqs.len_T if cfg.loss_scale_factor is None else cfg.loss_scale_factor * one_T
    return one_T / length_T / _at_least_one(num_valid_seqs)


def _ratios(t: _Tokens, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """The ratio r of each token and the clamped one.

    r = exp(logp - old) (PPO, Schulman et al. 2017); clamp(r, 1 - ratio_clip_min, 1 + ratio_clip_max), the bounds apart
    as DAPO's clip-higher. sequence_level_importance_ratios: exp(mean of logp - old over the sequence) (GSPO, Zheng et
    al. 2025). force_on_policy_ratio: no clamp; `old` is detach(logp), in the metrics too, so r = 1.
    |log r| is at most MAX_LOG_RATIO, and r has no gradient beyond: what overflows would cost the whole step.
    disable_ppo_ratio: logp is in r's place, in the metrics too, as in NeMo RL.
    """
    if cfg.disable_ppo_ratio:
        return t.logp_T, t.logp_T
    log_ratio_T = t.logp_T - t.old_logp_T
    if cfg.force_on_policy_ratio:
        ratio_T = log_ratio_T.exp()
        return ratio_T, ratio_T
    if cfg.sequence_level_importance_ratios:
        log_ratio_T = t.seqs.sum(log_ratio_T) / t.seqs.len_T
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio_T, ratio_T.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)


def _token_loss(t: _Tokens, ratio_T: Tensor, clamped_T: Tensor, cfg: LossConfig) -> Tensor:
    """Loss of each token, before weighting and aggregation.

    l = max(-A r, -A clamp(r)) (PPO, Schulman et al. 2017, eq. 7); with ratio_clip_c = c, min(l, -A c) where A < 0 (dual
    clip, Ye et al. 2019). use_cispo: l = -A detach(clamp(r)) logp (MiniMax-M1 2025), which cuts no
    token's gradient. disable_ppo_ratio: l = -A logp (REINFORCE, Williams 1992), as r is logp.
    """
    if cfg.use_cispo:
        return -t.adv_T * clamped_T.detach() * t.logp_T
    loss_T = torch.maximum(-t.adv_T * ratio_T, -t.adv_T * clamped_T)
    if cfg.ratio_clip_c is not None:
        loss_T = torch.where(t.adv_T < 0, torch.minimum(loss_T, -t.adv_T * cfg.ratio_clip_c), loss_T)
    return loss_T


def _sampler_weights(t: _Tokens, cfg: LossConfig) -> tuple[Tensor, Tensor | None]:
    """Importance weight of each token, trainer over sampler, and where it is out of bounds (None: it has no bounds).

    w = exp(old - sampler) of the token, or of its whole sequence (sum of the logs) with GSPO as in NeMo RL and for the
    types `sequence...`. Constants; 0 where not finite. Bounds: [ratio_min or 0, ratio]; by type:
        tis, sequence-truncate   w clamped (Yao et al. 2025; TRL token_truncate, sequence_truncate)
        icepop, sequence-mask    w = 0 outside (IcePop, Ring Team 2025; TRL token_mask, sequence_mask)
        seq-mask-tis             token weights, 0 where the sequence's geometric mean is outside (Liu, Li et al. 2025)
        sequence                 unbounded: the unbiased one (docs/off_policy.md), at the highest variance
    """
    kind, low, high = (
        cfg.truncated_importance_sampling_type,
        cfg.truncated_importance_sampling_ratio_min or 0.0,
        cfg.truncated_importance_sampling_ratio,
    )
    log_weight_T = t.old_logp_T - t.sampler_logp_T
    by_seq = cfg.sequence_level_importance_ratios or kind in BY_SEQUENCE
    weight_T = (t.seqs.sum(log_weight_T) if by_seq else log_weight_T).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if kind in (None, "sequence"):
        return weight_T, None
    judged_T = (t.seqs.sum(log_weight_T) / t.seqs.len_T).exp() if kind == "seq-mask-tis" else weight_T
    outside_T = (judged_T < low) | (judged_T > high)
    if kind in ("tis", "sequence-truncate"):
        return weight_T.clamp(low, high), outside_T
    return torch.where(outside_T, 0.0, weight_T), outside_T


def kl_estimate(log_ratio_T: Tensor, kind: str) -> Tensor:
    """Schulman's (2020) estimators of KL(q || p) at samples of q, from log_ratio = log(p / q): k1, k2, k3."""
    assert kind in ("k1", "k2", "k3"), kind
    if kind == "k1":
        return -log_ratio_T
    return log_ratio_T.square() / 2 if kind == "k2" else log_ratio_T.expm1() - log_ratio_T


def clamp_abs(x_T: Tensor, limit: float | None) -> Tensor:
    return x_T if limit is None else x_T.clamp(-limit, limit)


def _reference_kl(t: _Tokens, ref_logp_T: Tensor, cfg: LossConfig) -> Tensor:
    """Estimate of KL(policy || reference) at each token: u k(clamp(ref - logp)), clamped.

    u = exp(logp - detach(logp)): 1, but its gradient makes the whole that of the KL itself (NeMo RL; Tang, Munos 2025).
    use_on_policy_kl_approximation: u = exp(logp - sampler) corrects for who sampled; 0 where not finite. Where the
    input clamp bites, u is a constant. kl_gradient=plain: u is a constant everywhere (TRL, verl, Shao et al. 2024).
    Gradient in logp of k1, k2, k3, with d = logp - ref: score_function 1 + d, d + d^2/2, d; plain 1, d, 1 - exp(-d).
    """
    log_ratio_T = ref_logp_T - t.logp_T
    bounded_T = clamp_abs(log_ratio_T, cfg.kl_input_clamp_value)
    log_weight_T = t.logp_T - (t.sampler_logp_T if cfg.use_on_policy_kl_approximation else t.logp_T.detach())
    finite_T = log_weight_T.exp().isfinite()  # asked before the exp that has a gradient: 0 times inf would be NaN
    weight_T = torch.where(finite_T, torch.where(finite_T, log_weight_T, 0.0).exp(), 0.0)
    if cfg.kl_gradient == "plain":
        weight_T = weight_T.detach()
    weight_T = torch.where(bounded_T == log_ratio_T, weight_T, weight_T.detach())
    return clamp_abs(weight_T * kl_estimate(bounded_T, cfg.reference_policy_kl_type), cfg.kl_output_clamp_value)


def _token_metrics(
    t: _Tokens, ratio_T: Tensor, clamped_T: Tensor, entropy_T: Tensor | None, cfg: LossConfig
) -> Metrics:
    """Counts, extremes, and means over the trained tokens, under NeMo RL's names where it has one."""
    gap_T = t.sampler_logp_T - t.old_logp_T
    mixture_T = torch.logaddexp(t.old_logp_T, t.sampler_logp_T) - math.log(2)
    js_T = (kl_estimate(t.old_logp_T - mixture_T, "k3") + kl_estimate(t.sampler_logp_T - mixture_T, "k3")) / 2
    low_T, high_T = ratio_T < clamped_T, ratio_T > clamped_T
    if not cfg.use_cispo:  # PPO's clip binds on one side for each sign of A
        low_T, high_T = low_T & (t.adv_T < 0), high_T & (t.adv_T > 0)
    mean_T = {
        "probs_ratio": ratio_T,
        "probs_ratio_clamped": clamped_T,
        # Where the clip takes the token's gradient away; with CISPO, where it bounds its weight. Without dual clip.
        "ratio_clip_low_fraction": low_T,
        "ratio_clip_high_fraction": high_T,
        # Trainer against sampler: healthy within 1-2% above 1, and below 1e-3 for the KLs (NeMo RL's bounds).
        "token_mult_prob_error": gap_T.abs().exp(),
        "logp_gap_mean": gap_T.abs(),
        "gen_kl_error": kl_estimate(-gap_T, cfg.reference_policy_kl_type),
        "policy_kl_error": kl_estimate(gap_T, cfg.reference_policy_kl_type),
        "js_divergence_error": js_T,
        # -E[log p] under the current policy, from samples of the sampler's. `entropy` is the exact one.
        "approx_entropy": -(t.logp_T - t.sampler_logp_T).exp() * t.logp_T,
    }
    if entropy_T is not None:
        mean_T["entropy"] = entropy_T
    metrics: Metrics = {name: (t.keep(x_T).sum(), t.valid_T.sum()) for name, x_T in mean_T.items()}
    metrics["kept_fraction/finite_sampler_logp"] = (t.valid_T.sum(), t.mask_T.sum())
    metrics["probs_ratio_min"], metrics["probs_ratio_max"] = _extremes(ratio_T, t.valid_T)
    metrics["probs_ratio_clamped_min"], metrics["probs_ratio_clamped_max"] = _extremes(clamped_T, t.valid_T)
    metrics["logp_gap_max"] = _extremes(gap_T.abs(), t.valid_T)[1]
    counts = {"num_valid_samples": t.seqs.count, "num_nonfinite_sampler_logp": (t.mask_T & ~t.valid_T).sum()}
    return metrics | counts


def _weight_metrics(t: _Tokens, weight_T: Tensor, outside_T: Tensor | None, cfg: LossConfig) -> Metrics:
    """Of the sampler weights, after truncation or masking; over sequences where the weight or the mask is theirs."""
    kind = cfg.truncated_importance_sampling_type

    def mean(x_T, over_seqs):
        x_T = x_T.to(t.dtype)
        return (t.seqs.sum_of(x_T), t.seqs.count) if over_seqs else (t.keep(x_T).sum(), t.valid_T.sum())

    gspo = cfg.sequence_level_importance_ratios
    first, second = (mean(weight_T**power, gspo or kind in BY_SEQUENCE) for power in (1, 2))
    metrics = {"importance_weight_mean": first, "importance_weight_square": second}
    # NeMo RL's name, and its number: with GSPO it sums over sequences instead of averaging.
    metrics["sampling_importance_ratio"] = first[0] if gspo else first
    if outside_T is not None:
        metrics["is_oob_ratio"] = mean(outside_T, kind == "seq-mask-tis" or kind in BY_SEQUENCE)
        if kind in ("icepop", "seq-mask-tis", "sequence-mask"):
            metrics["kept_fraction/importance_sampling"] = mean(~outside_T, False)
    return metrics


def derived_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Reduced metrics -> the same with what is no mean, and NeMo RL's names where the reduction needs another ending.

    effective_sample_size of the sampler weights (Kish 1965): (sum w)^2 / (n sum w^2), from 1/n (one weight is
    everything) to 1 (all equal), over n tokens, or sequences where weights are theirs. It takes the place of
    importance_weight_square, of which it is made.
    """
    pattern = r"(seq_mult_prob_error(?:_after_mask)?)(?:_(min|max))?"
    metrics = {re.sub(pattern, lambda m: f"{m[2] or 'mean'}_{m[1]}", name): x for name, x in metrics.items()}
    if "importance_weight_square" in metrics:
        mean, square = metrics["importance_weight_mean"], metrics.pop("importance_weight_square")
        metrics["effective_sample_size"] = mean**2 / square if square else math.nan
    return metrics


def seq_logp_error_mask(
    mask_T: Tensor,
    *,
    old_logp_T: Tensor,
    sampler_logp_T: Tensor,
    seq_T: Tensor,
    threshold: float | None,
    correct_T: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """mask_T (bool) without the sequences whose mean of exp(|sampler - old|) exceeds the threshold; metrics (NeMo RL).

    Applied once, before the tokens and sequences of a step are counted: unlike a mask of the importance weights it
    does shrink the denominators, as NeMo RL's. Tokens whose sampler logp is not finite do not count in the mean.
    correct_T, nonzero where the sample is right: adds masked_correct_pct. Arguments else as `policy_loss`.
    """
    mask_T = mask_T != 0
    valid_T = mask_T & sampler_logp_T.isfinite()
    gap_T = torch.where(valid_T, sampler_logp_T - old_logp_T, 0.0).abs()
    seqs = _Sequences(seq_T, mask_T, gap_T.dtype)
    error_T = seqs.sum(torch.where(valid_T, gap_T.exp(), 0.0)) / seqs.sum(valid_T.to(gap_T.dtype)).clamp(min=1)
    kept_T = mask_T if threshold is None else mask_T & (error_T <= threshold)
    metrics: Metrics = {}
    for suffix, counted_T in ("", mask_T), ("_after_mask", kept_T):
        name, one_T = f"seq_mult_prob_error{suffix}", counted_T.to(gap_T.dtype)
        metrics[name] = (seqs.sum_of(error_T * one_T), seqs.sum_of(one_T))
        metrics[f"{name}_min"], metrics[f"{name}_max"] = _extremes(error_T, counted_T)
    lost_T = (mask_T & ~kept_T).to(gap_T.dtype)
    metrics["num_masked_seqs_by_logprob_error"] = seqs.sum_of(lost_T)
    metrics["kept_fraction/seq_logprob_error"] = (kept_T.sum(), mask_T.sum())
    if correct_T is not None:
        metrics["masked_correct_pct"] = (seqs.sum_of(lost_T * (correct_T != 0)), seqs.sum_of(lost_T))
    return kept_T, metrics


def _extremes(x_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over the valid tokens; the added infinity is the answer where there is none."""
    inf = x_T.new_full((1,), torch.inf)
    smallest = torch.cat([torch.where(valid_T, x_T, torch.inf), inf]).amin()
    return smallest, torch.cat([torch.where(valid_T, x_T, -torch.inf), -inf]).amax()
