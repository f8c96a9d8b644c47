"""The policy-gradient loss: its one and only definition, with its options and metrics. Pure tensors, no I/O.

Training follows `policy_loss`, whatever it is: head.py calls it and takes its derivatives by autograd. A tensor's name
ends in its dimensions, here R: the response tokens of a pack, and J: the reference's likeliest ids at each.

A pack is one of several micro-batches, on one of several ranks. So no loss here is a mean: each token has a weight,
1 / (what the aggregation divides by, counted over the whole optimizer step), and losses of packs simply add up. So do
metrics: sums and counts of (sum, count) pairs add up and are divided once, at the end; a `Min` or `Max` takes the
extremum (+inf, -inf where a pack has no valid token); any other scalar adds up (metrics.py). All packs give metrics of
the same names, whatever their tokens.

Nothing in this file waits for the GPU. docs/details.md has what other systems do.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from config import MAX_LOG_RATIO, LossConfig


@dataclass(frozen=True, slots=True)
class Extreme:
    """A metric whose extremum over packs and ranks is kept. It reads as a number, as all scalars do."""

    value: Tensor

    def __float__(self) -> float:
        return float(self.value)


class Min(Extreme):
    """The smallest value is kept."""


class Max(Extreme):
    """The largest value is kept."""


Metric = Tensor | tuple[Tensor, Tensor] | Extreme
Metrics = dict[str, Metric]

MIN_REST = 1e-6  # a probability that is 1 - a sum in float32 is rounding error below, and has no gradient
BY_SEQUENCE = ("sequence", "sequence-truncate", "sequence-mask")  # importance sampling types that weight sequences


def policy_loss(
    logp_R: Tensor,
    *,
    old_logp_R: Tensor | None,
    sampler_logp_R: Tensor,
    adv_R: Tensor,
    mask_R: Tensor,
    seq_R: Tensor,
    num_valid_tokens: int | Tensor,
    num_valid_seqs: int | Tensor,
    cfg: LossConfig,
    share_R: Tensor | None = None,
    ref_logp_R: Tensor | None = None,
    ref_logp_RJ: Tensor | None = None,
    logp_RJ: Tensor | None = None,
    unfiltered_logp_R: Tensor | None = None,
    entropy_R: Tensor | None = None,
    positive_R: Tensor | None = None,
    num_positive_tokens: int | Tensor | None = None,
    entropy_coef: float | Tensor | None = None,
    with_metrics: bool = True,
) -> tuple[Tensor, Metrics]:
    """This pack's part of the loss, differentiable in logp_R and entropy_R; metrics (NeMo RL's ClippedPGLossFn), {}
    without with_metrics.

    Per token, in nats: logp_R (current policy), old_logp_R (at the start of the step; None: logp_R itself, and ratios
    are 1), sampler_logp_R (as the engine reported it), ref_logp_R (reference policy), entropy_R. unfiltered_logp_R, for
    the KL: logp_R without top_p and top_k; ref_logp_R is always without. logp_RJ, ref_logp_RJ: of the reference's
    likeliest ids, under policy and reference; with these the KL is `_top_kl`. adv_R: advantages; mask_R: nonzero if
    trained; positive_R: nonzero if the reward is > 0; seq_R: an integer for each sequence. Sequences must be whole;
    tokens in any order; R may be 0. share_R: the sequence's share of its sample's trained tokens, where a sample has
    several sequences (None: each is a sample). num_valid_tokens, num_valid_seqs, num_positive_tokens: trained, over all
    micro-batches and ranks of the optimizer step; num_valid_seqs counts samples. entropy_coef: None takes cfg's.

        loss = sum over tokens of weight (w l + reference_policy_kl_penalty kl - entropy_coef entropy)
               + positive_example_nll_weight nll

    weight: `_aggregation_weights`; w: `_sampler_weights`; l: `_token_loss`; kl, where ref_logp_R is given:
    `_reference_kl`; nll: mean of -logp over the tokens of positive samples (VAPO, Yue et al. 2025, eq. 10).

    Masked tokens may hold anything, NaN too. A token whose sampler logp is not finite counts as masked, and is reported
    (`num_nonfinite_sampler_logp`). The caller's counts exclude it, but include tokens that are rejected
    (`_is_rejected`), of weight 0, or cut by a filter.
    """
    t = _Tokens(logp_R, old_logp_R, sampler_logp_R, adv_R, mask_R, seq_R, cfg)
    before_rejection = t
    if cfg.has_rejection:
        mask_R = t.mask_R & ~_is_rejected(t, cfg)
        t = _Tokens(logp_R, old_logp_R, sampler_logp_R, adv_R, mask_R, seq_R, cfg)
    weight_R = _aggregation_weights(t.seqs, num_valid_tokens, num_valid_seqs, share_R, cfg)
    ratio_R, clamped_R = _ratios(t, cfg)
    sampler_weight_R, outside_R = _sampler_weights(t, cfg)
    loss_R = _token_loss(t, ratio_R, clamped_R, cfg)
    if cfg.use_importance_sampling_correction:
        loss_R = loss_R * sampler_weight_R
    if cfg.off_policy_mask_threshold is not None:
        loss_R = torch.where(_is_off_policy(t, cfg), 0.0, loss_R)
    loss = (loss_R * weight_R).sum()
    kl = nll = loss.new_zeros(())
    if ref_logp_R is not None and cfg.reference_policy_kl_penalty:
        t_of_kl = t
        if unfiltered_logp_R is not None:
            t_of_kl = _Tokens(unfiltered_logp_R, None, sampler_logp_R, adv_R, mask_R, seq_R, cfg)
        if ref_logp_RJ is None:
            kl_R = _reference_kl(t_of_kl, ref_logp_R, cfg)
        else:
            kl_R = _top_kl(t, logp_RJ, ref_logp_RJ, cfg)
        kl = (kl_R * weight_R).sum()
        loss = loss + cfg.reference_policy_kl_penalty * kl
    if cfg.has_entropy_bonus:
        assert entropy_R is not None, f"entropy_coef={cfg.entropy_coef} needs entropy_R"
        entropy = (t.where_trained(entropy_R) * weight_R).sum()
        coef = cfg.entropy_coef if entropy_coef is None else entropy_coef
        loss = loss - coef * entropy
    if cfg.positive_example_nll_weight:
        assert positive_R is not None and num_positive_tokens is not None, "positive-example NLL needs both"
        positive_logp_R = torch.where(positive_R != 0, t.logp_R, 0.0)
        nll = -positive_logp_R.sum() / _at_least_one(num_positive_tokens)
        loss = loss + cfg.positive_example_nll_weight * nll

    metrics: Metrics = {}
    if with_metrics:
        metrics["loss"] = loss.detach()
        metrics["kl_penalty"] = kl.detach()
        metrics["positive_nll_loss"] = nll.detach()
        with torch.no_grad():
            metrics |= _token_metrics(t, ratio_R, clamped_R, entropy_R, cfg)
            metrics |= _weight_metrics(t, sampler_weight_R, outside_R, cfg)
            if cfg.has_rejection:
                metrics["kept_fraction/rejection"] = (t.counted_R.sum(), before_rejection.counted_R.sum())
    return loss, metrics


class _Tokens:
    """The arguments of `policy_loss` per token, with 0 at tokens that are not trained.

    logp -inf: the sampler drew a token that the trainer, which rounds differently, cuts by top_p or top_k. As in NeMo
    RL it has ratio 1 and no gradient in the loss, and counts in lengths; the KL trains it.
    """

    def __init__(self, logp_R, old_logp_R, sampler_logp_R, adv_R, mask_R, seq_R, cfg: LossConfig):
        if old_logp_R is None or cfg.force_on_policy_ratio:
            old_logp_R = logp_R
        assert logp_R.dim() == 1, logp_R.shape
        for x_R in (old_logp_R, sampler_logp_R, adv_R, mask_R, seq_R):
            assert x_R.shape == logp_R.shape, (x_R.shape, logp_R.shape)
        self.mask_R = mask_R != 0  # as the caller says, without what is rejected
        self.counted_R = self.mask_R & sampler_logp_R.isfinite()  # in lengths, and in the caller's counts
        is_cut_R = (logp_R == -math.inf) | (old_logp_R == -math.inf)
        self.valid_R = self.counted_R & ~is_cut_R  # has a gradient
        self.dtype = logp_R.dtype
        self.logp_R = self.where_trained(logp_R)
        self.old_logp_R = self.where_trained(old_logp_R).detach()
        self.sampler_logp_R = self.where_trained(sampler_logp_R).detach()
        self.adv_R = torch.where(self.counted_R, adv_R.to(self.dtype), 0.0).detach()
        self.seqs = Sequences(seq_R, self.counted_R, self.dtype)

    def where_trained(self, x_R: Tensor) -> Tensor:
        """x_R where `valid_R`, else 0. Before any exp: 0 times the gradient of a masked infinity would be NaN."""
        return torch.where(self.valid_R, x_R.to(self.dtype), 0.0)

    def mean(self, x_R: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, count) over the trained tokens."""
        return self.where_trained(x_R).sum(), self.valid_R.sum()


class Sequences:
    """Sums and means over the sequences of a pack. `counted_R` (bool): tokens that count."""

    def __init__(self, seq_R: Tensor, counted_R: Tensor, dtype: torch.dtype):
        # Numbers the sequences, below R, by their first index in the sorted seq_R. `unique` would number them too, but
        # make the host wait for the length of its result.
        sorted_R = seq_R.sort().values
        self.index_R = torch.searchsorted(sorted_R, seq_R.contiguous())
        self.counted_R = counted_R
        length_R = self.sum_for_each_token(counted_R.to(dtype))
        self.length_R = length_R.clamp(min=1)  # tokens of the token's sequence
        one_R = torch.ones_like(self.length_R)
        self.count = self.sum_over_sequences(one_R).round()  # sequences with a counted token

    def sum_for_each_token(self, x_R: Tensor) -> Tensor:
        """[R]: for each token the sum of x_R over its sequence. x_R must be 0 where a token is not counted."""
        sum_of_sequence = torch.zeros_like(x_R).index_add(0, self.index_R, x_R)
        return sum_of_sequence[self.index_R]

    def mean_for_each_token(self, x_R: Tensor) -> Tensor:
        """[R]: for each token the mean of x_R over its sequence. x_R must be 0 where a token is not counted."""
        return self.sum_for_each_token(x_R) / self.length_R

    def sum_over_sequences(self, x_R: Tensor) -> Tensor:
        """A scalar: x_R, which must be equal within a sequence, summed once for each sequence with a counted token."""
        return torch.where(self.counted_R, x_R / self.length_R, 0).sum()

    def mean(self, x_R: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, count) over the sequences with a counted token."""
        return self.sum_over_sequences(x_R), self.count


def _at_least_one(count: int | Tensor) -> Tensor:
    """A step without a valid token gives 0, not 0/0."""
    return torch.as_tensor(count).clamp(min=1)


def _aggregation_weights(seqs: Sequences, num_valid_tokens, num_valid_seqs, share_R, cfg: LossConfig) -> Tensor:
    """Weight of each token in the loss. Counts are over the whole optimizer step.

    token_level_loss: 1 / tokens (DAPO, Yu et al. 2025). If false: 1 / (length * samples), the mean over samples of
    their tokens' mean (GRPO, Shao et al. 2024); the length is that of all sequences of the sample, here the sequence's
    divided by its share. share_R includes rejected tokens, the length does not: of a sample with several sequences the
    quotient is then exact only if each loses the same fraction. loss_scale_factor takes the place of the number of
    tokens (1: verl's token-sum), or of the length (Dr. GRPO, Liu et al. 2025; verl).
    """
    one_R = torch.ones_like(seqs.length_R)
    num_samples = _at_least_one(num_valid_seqs)
    if cfg.token_level_loss:
        num_tokens = cfg.loss_scale_factor
        if num_tokens is None:
            num_tokens = _at_least_one(num_valid_tokens)
        return one_R / num_tokens
    if cfg.loss_scale_factor is not None:
        return 1 / (one_R * cfg.loss_scale_factor) / num_samples
    length_R = seqs.length_R
    if share_R is not None:
        length_R = length_R / torch.where(seqs.counted_R, share_R.to(length_R.dtype), 1.0)
    return 1 / length_R / num_samples


def _is_rejected(t: _Tokens, cfg: LossConfig) -> Tensor:
    """[R], bool: tokens whose ratio old / sampler, or whose sequence's geometric mean of them, is out of bounds (verl's
    rollout_rs=token_k1 and seq_mean_k1). They leave the mask: nothing trains them, not even the KL and the entropy
    bonus, and they count in no length. The caller's counts include them."""
    log_ratio_R = (t.old_logp_R - t.sampler_logp_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mean_R = t.seqs.mean_for_each_token(log_ratio_R)
    token_R = _is_outside(log_ratio_R, cfg.token_rejection_ratio_min, cfg.token_rejection_ratio_max)
    sequence_R = _is_outside(mean_R, cfg.sequence_rejection_ratio_min, cfg.sequence_rejection_ratio_max)
    return t.counted_R & (token_R | sequence_R)


def _is_outside(log_ratio_R: Tensor, low: float | None, high: float | None) -> Tensor:
    """[R], bool: whether the ratio is below low or above high; None is no bound."""
    log_low = -math.inf if low is None else math.log(low)
    log_high = math.inf if high is None else math.log(high)
    return (log_ratio_R < log_low) | (log_ratio_R > log_high)


def _ratios(t: _Tokens, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """The probability ratio r of each token, and the clamped one.

    r = exp(logp - old) (PPO, Schulman et al. 2017); clamp(r, 1 - ratio_clip_min, 1 + ratio_clip_max), two bounds as in
    DAPO's clip-higher. sequence_level_importance_ratios: exp(mean of logp - old over the sequence) (GSPO, Zheng et al.
    2025); with gspo_token its value alone, and the gradient of the token's own logp (GSPO-token, there 4.3; verl).
    force_on_policy_ratio: `old` is detach(logp), in the metrics too, so each token's own r is 1.
    old_logprobs=sampler: `old` is the sampler's logp, so r compares with the policy that drew the token (PPO).
    Beyond |log r| of MAX_LOG_RATIO r is constant: without the bound, one infinite ratio would discard the whole step.
    disable_ppo_ratio: logp stands in place of r, in the metrics too, as in NeMo RL. A token_loss that does not clip r
    has clamp(r) = r.
    """
    if cfg.disable_ppo_ratio:
        return t.logp_R, t.logp_R  # max(-A r, -A r) is then -A logp
    log_ratio_R = t.logp_R - _logp_to_compare(t, cfg)
    if cfg.sequence_level_importance_ratios and not cfg.force_on_policy_ratio:
        log_ratio_R = t.seqs.mean_for_each_token(log_ratio_R)
        if cfg.gspo_token:
            log_ratio_R = log_ratio_R.detach() + t.logp_R - t.logp_R.detach()
    ratio_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if cfg.token_loss != "ppo":
        return ratio_R, ratio_R
    clamped_R = ratio_R.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
    return ratio_R, clamped_R


def _logp_to_compare(t: _Tokens, cfg: LossConfig) -> Tensor:
    """Of the policy that the ratio compares with: the sampler, or the trainer at the start of the step."""
    if cfg.old_logprobs == "sampler":
        return t.sampler_logp_R
    return t.old_logp_R


def _token_loss(t: _Tokens, ratio_R: Tensor, clamped_R: Tensor, cfg: LossConfig) -> Tensor:
    """Loss l of each token, before weights, by cfg.token_loss. CISPO and REINFORCE have NeMo RL's keys.

    ppo                 max(-A r, -A clamp(r)) (Schulman et al. 2017, eq. 7); with ratio_clip_c = c, min(l, -A c)
                        where A < 0 (dual clip, Ye et al. 2019)
    use_cispo           -A detach(clamp(r)) logp: every token keeps its gradient (MiniMax-M1 2025)
    disable_ppo_ratio   -A logp, as r is logp (REINFORCE, Williams 1992)
    sapo                -A 4 / tau sigmoid(tau (r - 1)): a gate in place of the clip; tau by the sign of A (SAPO,
                        Gao et al. 2025; TRL, verl)
    dppo                -A r m + dppo_kl_tau log(r)^2, where m is 0 if the token's probability has moved past
                        dppo_mask_high with A > 0, or below -dppo_mask_low else (prime-rl's default)
    ipo                 the same, where m is 0 past either bound (prime-rl)
    dppo_tv             -A detach(min(r, ratio_clip_c)) m logp, m as in dppo (DPPO, arXiv:2602.04879; verl)
    gmpo                -A exp(mean over the sequence of the pessimistic log r), clipped to [-ratio_clip_min,
                        ratio_clip_max] (GMPO, Zhao et al. 2025; verl's geo_mean)
    """
    if cfg.use_cispo:
        return -t.adv_R * clamped_R.detach() * t.logp_R
    if cfg.token_loss == "sapo":
        return _sapo_loss(t, ratio_R, cfg)
    if cfg.token_loss in ("dppo", "ipo"):
        return _dppo_loss(t, ratio_R, cfg)
    if cfg.token_loss == "dppo_tv":
        return _dppo_tv_loss(t, ratio_R, cfg)
    if cfg.token_loss == "gmpo":
        return -t.adv_R * _geometric_mean_ratio(t, cfg)
    loss_R = torch.maximum(-t.adv_R * ratio_R, -t.adv_R * clamped_R)
    if cfg.ratio_clip_c is not None:
        bounded_R = torch.minimum(loss_R, -t.adv_R * cfg.ratio_clip_c)
        loss_R = torch.where(t.adv_R < 0, bounded_R, loss_R)
    return loss_R


def _sapo_loss(t: _Tokens, ratio_R: Tensor, cfg: LossConfig) -> Tensor:
    positive_tau_R = torch.full_like(t.adv_R, cfg.sapo_tau_positive)
    negative_tau_R = torch.full_like(t.adv_R, cfg.sapo_tau_negative)
    tau_R = torch.where(t.adv_R > 0, positive_tau_R, negative_tau_R)
    gate_R = torch.sigmoid(tau_R * (ratio_R - 1))
    return -t.adv_R * 4 / tau_R * gate_R


def _dppo_loss(t: _Tokens, ratio_R: Tensor, cfg: LossConfig) -> Tensor:
    log_ratio_R = t.logp_R - _logp_to_compare(t, cfg)
    masked_R = torch.where(_is_outside_mask(t, cfg), 0.0, -t.adv_R * ratio_R)
    return masked_R + cfg.dppo_kl_tau * log_ratio_R.square()


def _dppo_tv_loss(t: _Tokens, ratio_R: Tensor, cfg: LossConfig) -> Tensor:
    constant_R = ratio_R.detach()
    if cfg.ratio_clip_c is not None:
        constant_R = constant_R.clamp(max=cfg.ratio_clip_c)
    loss_R = -t.adv_R * constant_R * t.logp_R
    return torch.where(_is_outside_mask(t, cfg), 0.0, loss_R)


def _is_outside_mask(t: _Tokens, cfg: LossConfig) -> Tensor:
    """[R], bool: where the mask of dppo, dppo_tv or ipo removes the token's policy gradient. It bounds the change of
    the token's probability, not of its ratio: a rare token may move by a large factor."""
    p_R = t.logp_R.detach().exp()
    moved_R = p_R - _logp_to_compare(t, cfg).exp()
    is_above_R = moved_R > cfg.dppo_mask_high
    is_below_R = moved_R < -cfg.dppo_mask_low
    if cfg.token_loss == "ipo":
        return is_above_R | is_below_R
    return torch.where(t.adv_R > 0, is_above_R, is_below_R)


def _geometric_mean_ratio(t: _Tokens, cfg: LossConfig) -> Tensor:
    """GMPO's ratio of each token's sequence. Log-ratios are clipped one by one where that raises the loss."""
    log_ratio_R = t.logp_R - _logp_to_compare(t, cfg)
    clipped_R = log_ratio_R.clamp(-cfg.ratio_clip_min, cfg.ratio_clip_max)
    sign_R = t.adv_R.sign()
    pessimistic_R = sign_R * torch.minimum(sign_R * log_ratio_R, sign_R * clipped_R)
    mean_R = t.seqs.mean_for_each_token(pessimistic_R)
    return mean_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _is_off_policy(t: _Tokens, cfg: LossConfig) -> Tensor:
    """[R], bool: the tokens of negative advantage whose sequence the policy has left: its mean of sampler - logp is
    above off_policy_mask_threshold. They are not trained, and count in the denominator (DeepSeek-V3.2, 2025; TRL)."""
    gap_R = t.sampler_logp_R - t.logp_R.detach()
    is_left_R = t.seqs.mean_for_each_token(gap_R) > cfg.off_policy_mask_threshold
    return is_left_R & (t.adv_R < 0)


def _sampler_weights(t: _Tokens, cfg: LossConfig) -> tuple[Tensor, Tensor | None]:
    """Importance weight of each token, trainer over sampler, and where it is out of bounds (None: it has no bounds).

    w = exp(old - sampler) of the token, or of its whole sequence (sum of the logs) with the types `sequence...`. With
    GSPO, importance_sampling_correction_level decides (default: the sum, as in NeMo RL). w has no gradient, and is 0
    where not finite. Bounds: [ratio_min or 0, ratio]; by type:
        tis, sequence-truncate   w clamped (Yao et al. 2025; TRL token_truncate, sequence_truncate)
        icepop, sequence-mask    w = 0 outside (IcePop, Ring Team 2025; TRL token_mask, sequence_mask)
        seq-mask-tis             token weights, 0 where the sequence's geometric mean is outside (Liu, Li et al. 2025)
        null, sequence           unbounded; `sequence` alone has no bias (docs/off_policy.md), at the highest variance
    """
    log_weight_R = t.old_logp_R - t.sampler_logp_R
    log_product_R = t.seqs.sum_for_each_token(log_weight_R)
    log_mean_R = log_product_R / t.seqs.length_R
    level = _weight_level(cfg)
    if level == "sequence_mean":
        log_weight_R = log_mean_R
    elif level == "sequence_sum":
        log_weight_R = log_product_R
    weight_R = log_weight_R.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    kind = cfg.truncated_importance_sampling_type
    if kind in (None, "sequence"):
        return weight_R, None
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    high = cfg.truncated_importance_sampling_ratio
    bounded_R = weight_R
    if kind == "seq-mask-tis":
        bounded_R = log_mean_R.exp()
    outside_R = (bounded_R < low) | (bounded_R > high)
    if kind in ("tis", "sequence-truncate"):
        return weight_R.clamp(low, high), outside_R
    return torch.where(outside_R, 0.0, weight_R), outside_R


def _weight_level(cfg: LossConfig) -> str:
    """What a sampler weight covers: token, sequence_mean or sequence_sum."""
    if cfg.truncated_importance_sampling_type in BY_SEQUENCE:
        return "sequence_sum"
    if cfg.sequence_level_importance_ratios:
        return cfg.importance_sampling_correction_level
    return "token"


def kl_estimate(log_ratio_R: Tensor, kind: str) -> Tensor:
    """Schulman's (2020) estimators of KL(q || p) at samples of q, from log_ratio = log(p / q): k1, k2, k3."""
    assert kind in ("k1", "k2", "k3"), kind
    if kind == "k1":
        return -log_ratio_R
    if kind == "k2":
        return log_ratio_R.square() / 2
    return log_ratio_R.expm1() - log_ratio_R


def clamp_abs(x_R: Tensor, limit: float | None) -> Tensor:
    if limit is None:
        return x_R
    return x_R.clamp(-limit, limit)


def _reference_kl(t: _Tokens, ref_logp_R: Tensor, cfg: LossConfig) -> Tensor:
    """Estimate of KL(policy || reference) at each token: k(clamp(ref - logp)) times a factor, clamped.

    The KL at a token's state is an expectation over samples of the policy. Its gradient has a part that moves the
    estimate k at the token and one that moves how often the token is sampled, k times the gradient of logp (Tang, Munos
    2025). What the token does to the KL of later tokens is left out, as in NeMo RL, TRL and verl. A factor adds the
    second part: exp(logp - detach(logp)) has the value 1 and the gradient of logp (NeMo RL).
        kl_gradient=plain               the factor is a constant: the first part alone (verl, Shao et al. 2024)
        kl_gradient=policy_ratio        it is exp(logp - old), so that later optimizer steps of a rollout, too, have the
                                        gradient of the KL (DeepSeek-V3.2, 2025; TRL's use_bias_correction_kl)
        use_on_policy_kl_approximation  it is exp(logp - sampler), as the sampler drew the token; 0 where not finite
    Where the input clamp acts, the factor is a constant: the token then gets no gradient from the KL.
    Gradient in logp of k1, k2, k3, with d = logp - ref: score_function 1 + d, d + d^2/2, d; plain 1, d, 1 - exp(-d).
    """
    log_ratio_R = t.where_trained(ref_logp_R).detach() - t.logp_R
    bounded_R = clamp_abs(log_ratio_R, cfg.kl_input_clamp_value)
    drawn_R = t.logp_R.detach()
    if cfg.use_on_policy_kl_approximation:
        drawn_R = t.sampler_logp_R
    elif cfg.kl_gradient == "policy_ratio":
        drawn_R = t.old_logp_R
    log_factor_R = t.logp_R - drawn_R
    finite_R = log_factor_R.exp().isfinite()  # before the exp that has a gradient: 0 times infinity would be NaN
    finite_log_R = torch.where(finite_R, log_factor_R, 0.0)
    factor_R = torch.where(finite_R, finite_log_R.exp(), 0.0)
    if cfg.kl_gradient == "plain":
        factor_R = factor_R.detach()
    is_clamped_R = bounded_R != log_ratio_R
    factor_R = torch.where(is_clamped_R, factor_R.detach(), factor_R)
    kl_R = factor_R * kl_estimate(bounded_R, cfg.reference_policy_kl_type)
    return clamp_abs(kl_R, cfg.kl_output_clamp_value)


def _top_kl(t: _Tokens, logp_RJ: Tensor, ref_logp_RJ: Tensor, cfg: LossConfig) -> Tensor:
    """KL(policy || reference) at each token's state, with all ids but the reference's likeliest as one:

        sum over these ids of p (log p - log q) + r (log r - log s), p: policy, q: reference, r = 1 - sum p, s likewise

    At most the KL over all ids; without a sample's noise. NeMo RL's distillation (reverse) is without r and s."""
    trained_R1 = t.valid_R[:, None]
    logp_RJ = torch.where(trained_R1, logp_RJ.to(t.dtype), 0.0)
    ref_logp_RJ = torch.where(trained_R1, ref_logp_RJ.to(t.dtype), 0.0).detach()
    rest_R = (1 - logp_RJ.exp().sum(1)).clamp(min=MIN_REST)
    ref_rest_R = (1 - ref_logp_RJ.exp().sum(1)).clamp(min=MIN_REST)
    log_ratio_RJ = clamp_abs(logp_RJ - ref_logp_RJ, cfg.kl_input_clamp_value)
    log_ratio_of_rest_R = clamp_abs((rest_R / ref_rest_R).log(), cfg.kl_input_clamp_value)
    kl_R = (logp_RJ.exp() * log_ratio_RJ).sum(1) + rest_R * log_ratio_of_rest_R
    return t.where_trained(clamp_abs(kl_R, cfg.kl_output_clamp_value))


def _token_metrics(t: _Tokens, ratio_R: Tensor, clamped_R: Tensor, entropy_R, cfg: LossConfig) -> Metrics:
    """Counts, extremes, and means over the trained tokens, under NeMo RL's names where it has one."""
    gap_R = t.sampler_logp_R - t.old_logp_R
    low_R, high_R = _clipped(t, ratio_R, clamped_R, cfg)
    mean_R = {
        "probs_ratio": ratio_R,
        "probs_ratio_clamped": clamped_R,
        "ratio_clip_low_fraction": low_R,
        "ratio_clip_high_fraction": high_R,
        # Trainer against sampler: healthy within 1-2% above 1, and below 1e-3 for the KLs (NeMo RL's bounds).
        "token_mult_prob_error": gap_R.abs().exp(),
        "gen_kl_error": kl_estimate(-gap_R, cfg.reference_policy_kl_type),
        "policy_kl_error": kl_estimate(gap_R, cfg.reference_policy_kl_type),
        "js_divergence_error": _js_divergence(t.old_logp_R, t.sampler_logp_R),
        # -E[log p] under the current policy, estimated from the sampler's tokens. `entropy` is exact.
        "approx_entropy": -(t.logp_R - t.sampler_logp_R).exp() * t.logp_R,
    }
    if entropy_R is not None:
        mean_R["entropy"] = entropy_R
    metrics: Metrics = {name: t.mean(x_R) for name, x_R in mean_R.items()}
    metrics["kept_fraction/finite_sampler_logp"] = (t.counted_R.sum(), t.mask_R.sum())
    metrics["kept_fraction/sampling_filter"] = (t.valid_R.sum(), t.counted_R.sum())
    metrics["probs_ratio_min"], metrics["probs_ratio_max"] = extremes(ratio_R, t.valid_R)
    metrics["probs_ratio_clamped_min"], metrics["probs_ratio_clamped_max"] = extremes(clamped_R, t.valid_R)
    metrics["num_valid_samples"] = t.seqs.count
    metrics["num_nonfinite_sampler_logp"] = (t.mask_R & ~t.counted_R).sum()
    return metrics


def _js_divergence(logp_R: Tensor, other_R: Tensor) -> Tensor:
    """Estimate of the Jensen-Shannon divergence of two policies: the mean KL of each from their mixture."""
    mixture_R = torch.logaddexp(logp_R, other_R) - math.log(2)
    kl_R = kl_estimate(logp_R - mixture_R, "k3")
    kl_of_other_R = kl_estimate(other_R - mixture_R, "k3")
    return (kl_R + kl_of_other_R) / 2


def _clipped(t: _Tokens, ratio_R: Tensor, clamped_R: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """([R], [R]), bool: where the lower and the upper clip, not the dual clip, acts on the token."""
    low_R = ratio_R < clamped_R
    high_R = ratio_R > clamped_R
    if cfg.use_cispo:  # bounds the weight on both sides
        return low_R, high_R
    if cfg.token_loss in ("dppo", "ipo", "dppo_tv"):
        low_R = high_R = _is_outside_mask(t, cfg)
    elif cfg.token_loss == "gmpo":
        log_ratio_R = t.logp_R - _logp_to_compare(t, cfg)
        low_R = log_ratio_R < -cfg.ratio_clip_min
        high_R = log_ratio_R > cfg.ratio_clip_max
    # A clip binds on one side for each sign of A.
    return low_R & (t.adv_R < 0), high_R & (t.adv_R > 0)


def _weight_metrics(t: _Tokens, weight_R: Tensor, outside_R: Tensor | None, cfg: LossConfig) -> Metrics:
    """Means of the sampler weights, after truncation or masking: over sequences where each has one weight."""
    kind = cfg.truncated_importance_sampling_type
    level = _weight_level(cfg)
    mean_of = t.seqs.mean
    if level == "token":
        mean_of = t.mean
    mean = mean_of(weight_R)
    metrics: Metrics = {"importance_weight_mean": mean, "importance_weight_square": mean_of(weight_R**2)}
    # NeMo RL's name, and its number: with GSPO it sums over sequences instead of averaging.
    metrics["sampling_importance_ratio"] = mean
    if level == "sequence_sum" and kind not in BY_SEQUENCE:
        metrics["sampling_importance_ratio"] = mean[0]
    if outside_R is not None:
        mean_of = t.mean
        if kind == "seq-mask-tis" or kind in BY_SEQUENCE:
            mean_of = t.seqs.mean
        metrics["is_oob_ratio"] = mean_of(outside_R)
        if kind in ("icepop", "seq-mask-tis", "sequence-mask"):
            metrics["kept_fraction/importance_sampling"] = t.mean(~outside_R)
    return metrics


def extremes(x_R: Tensor, valid_R: Tensor) -> tuple[Min, Max]:
    """Minimum and maximum over the valid tokens; the appended infinity defines them where there are none."""
    infinity = x_R.new_full((1,), torch.inf)
    high_R = torch.where(valid_R, x_R, torch.inf)
    low_R = torch.where(valid_R, x_R, -torch.inf)
    smallest = torch.cat([high_R, infinity]).amin()
    largest = torch.cat([low_R, -infinity]).amax()
    return Min(smallest), Max(largest)
