"""Losses and advantages from their papers, in Python floats: one token after the other, with derivatives by hand."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, stdev

from config import GRPOConfig, LossConfig


@dataclass
class Token:
    place: int  # in the batch
    logp: float
    old: float
    sampler: float
    ref: float
    adv: float
    entropy: float
    is_positive: bool
    sample: int


@dataclass
class Sums:
    loss: float
    slope: list[float]  # in the logp of each token of the batch
    slope_of_entropy: list[float]

    def add(self, token: Token, value: float, slope: float) -> None:
        self.loss += value
        self.slope[token.place] += slope


def naive_loss(batch: dict, cfg: LossConfig) -> Sums:
    """The loss of a batch of loss_cases.py, with its derivatives. What is masked, or has no finite sampler logp, is
    not read. sample_R, where it is given: the sample of each token, which may have several sequences."""
    sums = Sums(0.0, [0.0] * len(batch["seq_R"]), [0.0] * len(batch["seq_R"]))
    of_sequences = sequences(batch, cfg)
    num_tokens = Counter(token.sample for tokens in of_sequences for token in tokens)
    for of_sequence in of_sequences:
        tokens = not_rejected(of_sequence, cfg)
        weights = sampler_weights(tokens, cfg)
        length = len(tokens) * num_tokens[of_sequence[0].sample] / len(of_sequence)
        share = share_of_a_token(length, batch, cfg)
        for token, weight in zip(tokens, weights, strict=True):
            add_policy_loss(sums, share * weight, token, tokens, cfg)
            value, slope = kl(token, cfg)
            share_of_kl = share * cfg.reference_policy_kl_penalty
            sums.add(token, share_of_kl * value, share_of_kl * slope)
            sums.loss -= share * cfg.entropy_coef * token.entropy
            sums.slope_of_entropy[token.place] -= share * cfg.entropy_coef
            if token.is_positive:
                nll = cfg.positive_example_nll_weight / batch["num_positive_tokens"]
                sums.add(token, -nll * token.logp, -nll)
    return sums


def sequences(batch: dict, cfg: LossConfig) -> list[list[Token]]:
    """The trained tokens of each sequence."""
    old = "old_logp_R"
    if cfg.force_on_policy_ratio or batch["old_logp_R"] is None:
        old = "logp_R"
    sample = "sample_R" if "sample_R" in batch else "seq_R"
    names = ("logp_R", old, "sampler_logp_R", "ref_logp_R", "adv_R", "entropy_R", "positive_R", sample)
    rows = zip(*(batch[name].tolist() for name in (*names, "seq_R", "mask_R")), strict=True)
    found: dict[int, list[Token]] = {}
    for place, (*numbers, seq, is_trained) in enumerate(rows):
        token = Token(place, *numbers)
        if is_trained and math.isfinite(token.sampler):
            found.setdefault(seq, []).append(token)
    return list(found.values())


def share_of_a_token(length: float, batch: dict, cfg: LossConfig) -> float:
    """What a token's loss is multiplied by, in a sample of this length."""
    if not length:
        return 0.0
    if cfg.token_level_loss:
        return 1 / (cfg.loss_scale_factor or batch["num_valid_tokens"])
    return 1 / (cfg.loss_scale_factor or length) / batch["num_valid_seqs"]


def not_rejected(tokens: list[Token], cfg: LossConfig) -> list[Token]:
    """By verl's token_k1 and seq_mean_k1: the sequence's mean is over all its tokens."""

    def is_within(log_ratio: float, low: float | None, high: float | None) -> bool:
        return (low is None or math.exp(log_ratio) >= low) and (high is None or math.exp(log_ratio) <= high)

    of_sequence = mean(t.old - t.sampler for t in tokens)
    if not is_within(of_sequence, cfg.sequence_rejection_ratio_min, cfg.sequence_rejection_ratio_max):
        return []
    low, high = cfg.token_rejection_ratio_min, cfg.token_rejection_ratio_max
    return [t for t in tokens if is_within(t.old - t.sampler, low, high)]


# ----------------------------------------------------------------------------------------------- the policy's part


def compared(token: Token, cfg: LossConfig) -> float:
    """The log-probability in the denominator of the ratio."""
    return token.sampler if cfg.old_logprobs == "sampler" else token.old


def add_policy_loss(sums: Sums, share: float, token: Token, tokens: list[Token], cfg: LossConfig) -> None:
    """Adds the token's loss, and its derivatives in all tokens of its sequence that move it."""
    left_by = mean(t.sampler - t.logp for t in tokens)
    if cfg.off_policy_mask_threshold is not None and token.adv < 0 and left_by > cfg.off_policy_mask_threshold:
        return
    if cfg.token_loss == "gmpo":
        pessimistic = [pessimistic_log_ratio(t, cfg) for t in tokens]
        loss = -token.adv * math.exp(mean(log_ratio for log_ratio, _ in pessimistic))
        sums.loss += share * loss
        for other, (_, slope) in zip(tokens, pessimistic, strict=True):
            sums.slope[other.place] += share * loss * slope / len(tokens)
        return
    log_ratio = token.logp - compared(token, cfg)
    is_shared = cfg.sequence_level_importance_ratios and not cfg.force_on_policy_ratio
    if is_shared:
        log_ratio = mean(t.logp - compared(t, cfg) for t in tokens)
    value, slope = token_loss(token, log_ratio, cfg)
    if is_shared and not cfg.gspo_token:  # the sequence's ratio is moved by each of its tokens
        sums.loss += share * value
        for other in tokens:
            sums.slope[other.place] += share * slope / len(tokens)
    else:
        sums.add(token, share * value, share * slope)


def token_loss(token: Token, log_ratio: float, cfg: LossConfig) -> tuple[float, float]:
    """Loss of a token and its derivative in the log of its ratio (in logp where there is none)."""
    ratio = math.exp(log_ratio)
    if cfg.token_loss == "sapo":
        tau = cfg.sapo_tau_positive if token.adv > 0 else cfg.sapo_tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -token.adv * 4 / tau * gate, -token.adv * 4 * gate * (1 - gate) * ratio
    if cfg.token_loss in ("dppo", "ipo", "dppo_tv"):
        is_kept = is_within_mask(token, cfg)
        if cfg.token_loss == "dppo_tv":
            constant = min(ratio, cfg.ratio_clip_c or math.inf) if is_kept else 0.0
            return -token.adv * constant * token.logp, -token.adv * constant
        surrogate = -token.adv * ratio if is_kept else 0.0
        return surrogate + cfg.dppo_kl_tau * log_ratio**2, surrogate + 2 * cfg.dppo_kl_tau * log_ratio
    if cfg.disable_ppo_ratio:
        return -token.adv * token.logp, -token.adv
    if cfg.force_on_policy_ratio:
        return -token.adv * ratio, -token.adv * ratio
    if cfg.use_cispo:
        bounded = min(max(ratio, 1 - cfg.ratio_clip_min), 1 + cfg.ratio_clip_max)
        return -token.adv * bounded * token.logp, -token.adv * bounded
    if token.adv > 0 and ratio > 1 + cfg.ratio_clip_max:
        return -token.adv * (1 + cfg.ratio_clip_max), 0.0
    if token.adv < 0 and ratio < 1 - cfg.ratio_clip_min:
        return -token.adv * (1 - cfg.ratio_clip_min), 0.0
    if token.adv < 0 and cfg.ratio_clip_c is not None and ratio > cfg.ratio_clip_c:
        return -token.adv * cfg.ratio_clip_c, 0.0
    return -token.adv * ratio, -token.adv * ratio


def is_within_mask(token: Token, cfg: LossConfig) -> bool:
    """Whether the token's probability has moved little enough, to the side that counts."""
    moved = math.exp(token.logp) - math.exp(compared(token, cfg))
    is_low, is_high = moved < -cfg.dppo_mask_low, moved > cfg.dppo_mask_high
    if cfg.token_loss == "ipo":
        return not is_low and not is_high
    return not is_high if token.adv > 0 else not is_low


def pessimistic_log_ratio(token: Token, cfg: LossConfig) -> tuple[float, float]:
    """GMPO's clipped log-ratio of a token, and its derivative in logp."""
    log_ratio = token.logp - compared(token, cfg)
    if token.adv > 0 and log_ratio > cfg.ratio_clip_max:
        return cfg.ratio_clip_max, 0.0
    if token.adv < 0 and log_ratio < -cfg.ratio_clip_min:
        return -cfg.ratio_clip_min, 0.0
    return (log_ratio, 1.0) if token.adv else (0.0, 0.0)


def sampler_weights(tokens: list[Token], cfg: LossConfig) -> list[float]:
    """Importance weights of a sequence's tokens."""
    if not cfg.use_importance_sampling_correction or not tokens:
        return [1.0] * len(tokens)
    kind, high = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    of_token = [math.exp(t.old - t.sampler) for t in tokens]
    product = [math.prod(of_token)] * len(tokens)
    geometric_mean = product[0] ** (1 / len(tokens))
    if cfg.sequence_level_importance_ratios:
        if cfg.importance_sampling_correction_level == "sequence_mean":
            of_token = [geometric_mean] * len(tokens)
        elif cfg.importance_sampling_correction_level == "sequence_sum":
            of_token = product
    if kind == "tis":
        return [min(max(w, low), high) for w in of_token]
    if kind == "icepop":
        return [w if low <= w <= high else 0.0 for w in of_token]
    if kind == "seq-mask-tis":
        return [w if low <= geometric_mean <= high else 0.0 for w in of_token]
    if kind == "sequence-truncate":
        return [min(max(w, low), high) for w in product]
    if kind == "sequence-mask":
        return [w if low <= w <= high else 0.0 for w in product]
    return product if kind == "sequence" else of_token


def kl(token: Token, cfg: LossConfig) -> tuple[float, float]:
    """KL of a token with the reference policy, and its derivative in logp."""
    if not cfg.reference_policy_kl_penalty:
        return 0.0, 0.0
    bound = math.inf if cfg.kl_input_clamp_value is None else cfg.kl_input_clamp_value
    x = min(max(token.ref - token.logp, -bound), bound)
    moves = x == token.ref - token.logp
    value = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[cfg.reference_policy_kl_type]
    slope = {"k1": 1.0, "k2": -x, "k3": 1 - math.exp(x)}[cfg.reference_policy_kl_type] if moves else 0.0
    weight = 1.0
    if cfg.use_on_policy_kl_approximation:
        weight = math.exp(token.logp - token.sampler)
    if cfg.kl_gradient == "policy_ratio":
        weight = math.exp(token.logp - token.old)
    if cfg.kl_gradient != "plain" and moves:
        slope += value
    if cfg.kl_output_clamp_value is not None and abs(weight * value) > cfg.kl_output_clamp_value:
        return math.copysign(cfg.kl_output_clamp_value, value), 0.0
    return weight * value, weight * slope


# -------------------------------------------------------------------------------------------------- the advantages


def naive_advantages(
    rewards: list[float], parts: dict[str, list[float]], groups: list[int], lengths: list[int], grpo: GRPOConfig
) -> list[float]:
    """The advantage of each sample. parts: several rewards of each, for GDPO. lengths: trained tokens."""
    estimator = grpo.adv_estimator
    members = {group: [i for i, other in enumerate(groups) if other == group] for group in groups}
    means = {group: mean(rewards[i] for i in places) for group, places in members.items()}
    centered = [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]
    if estimator.name == "reinforce_plus_plus":
        values = centered if estimator.minus_baseline else rewards
        num_tokens = sum(lengths)
        center = sum(n * value for n, value in zip(lengths, values, strict=True)) / num_tokens
        variance = sum(n * (value - center) ** 2 for n, value in zip(lengths, values, strict=True)) / num_tokens
        return [(value - center) / math.sqrt(max(variance, 1e-8)) for value in values]
    if estimator.name == "max_rl":
        return [
            value / means[group] if means[group] > 0 else 0.0 for value, group in zip(centered, groups, strict=True)
        ]
    if estimator.name == "opo":
        baselines = {}
        for group, places in members.items():
            weighted = sum(lengths[i] * rewards[i] for i in places)
            baselines[group] = weighted / max(1, sum(lengths[i] for i in places))
        return [reward - baselines[group] for reward, group in zip(rewards, groups, strict=True)]
    if estimator.name == "gpg":
        num_rewarded = sum(reward != 0 for reward in rewards)
        return [value * len(rewards) / max(1, num_rewarded) for value in centered]
    if estimator.name in ("pkpo", "grpo_passk"):
        return [best_of_k_advantage(i, rewards, members[group], grpo) for i, group in enumerate(groups)]
    if estimator.name == "gdpo":
        weights = estimator.reward_weights or [1.0] * len(parts)
        total = [0.0] * len(rewards)
        for weight, name in zip(weights, sorted(parts), strict=True):
            of_part = compared_with_peers(parts[name], members, groups, grpo)
            total = [value + weight * part for value, part in zip(total, of_part, strict=True)]
        spread = stdev(total) or 1.0
        return [(value - mean(total)) / spread for value in total]
    assert estimator.name == "grpo", estimator.name
    return compared_with_peers(rewards, members, groups, grpo)


def best_of_k_advantage(i: int, rewards: list[float], places: list[int], grpo: GRPOConfig) -> float:
    """Eq. 33 of PKPO, over all subsets, times the size of the group; or its case k = n, verl's grpo_passk."""
    size = len(places)
    is_pkpo = grpo.adv_estimator.name == "pkpo"
    k = min(grpo.adv_estimator.pass_k, size) if is_pkpo else size
    if size == 1:
        return 0.0
    gains = []
    for subset in combinations(places, k):
        if i in subset:
            best = max(rewards[j] for j in subset)
            gains.append(best - max(rewards[j] for j in subset if j != i))
    adv = math.fsum(gains) / math.comb(size, k)
    if is_pkpo:
        return adv * size
    if grpo.normalize_rewards:
        adv /= stdev(rewards[j] for j in places) + 1e-6
    return adv


def compared_with_peers(
    rewards: list[float], members: dict[int, list[int]], groups: list[int], grpo: GRPOConfig
) -> list[float]:
    """GRPO, RLOO and Dr. GRPO."""
    advantages = []
    for i, group in enumerate(groups):
        peers = members[group]
        if grpo.use_leave_one_out_baseline:
            peers = [j for j in peers if j != i]
        baseline = [rewards[j] for j in peers]
        adv = rewards[i] - mean(baseline)
        if grpo.normalize_rewards and grpo.reward_std == "batch":
            adv /= stdev(rewards) + 1e-4
        elif grpo.normalize_rewards and grpo.reward_std == "group":
            adv /= stdev(rewards[j] for j in members[group]) + 1e-4
        elif grpo.normalize_rewards and len(set(baseline)) > 1:
            spread = stdev(baseline)
            if grpo.use_leave_one_out_baseline:
                of_group = [rewards[j] for j in members[group]]
                spread = max(spread, grpo.reward_std_floor * (max(of_group) - min(of_group)))
            adv /= spread + 1e-6
        advantages.append(adv)
    return advantages
