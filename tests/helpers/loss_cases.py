"""Batches for the loss tests, and the loss again: one token after the other in Python floats, derivatives by hand."""

import itertools
import math

import torch

from config import Config, LossConfig
from support.check.contradictions import contradictions

LOGPS = ("logp_R", "old_logp_R", "sampler_logp_R", "ref_logp_R")


def golden_batch(dtype=torch.float32):
    """Two sequences of three tokens, the last one masked: the inputs the golden numbers were made with."""
    return {
        "logp_R": torch.tensor([-1, -0.5, -2, -0.2, -3, -0.7], dtype=dtype, requires_grad=True),
        "old_logp_R": torch.tensor([-1.2, -0.5, -1.5, -0.3, -2, -0.7], dtype=dtype),
        "sampler_logp_R": torch.tensor([-1.1, -0.6, -1.5, -0.3, -2.3, -0.9], dtype=dtype),
        "adv_R": torch.tensor([1, 1, 1, -0.5, -0.5, -0.5], dtype=dtype),
        "mask_R": torch.tensor([1, 1, 1, 1, 1, 0]),
        "seq_R": torch.tensor([0, 0, 0, 1, 1, 1]),
        "num_valid_tokens": 5,
        "num_valid_seqs": 2,
    }


GOLDEN_REF = [-1.1, -0.9, -1.8, -0.2, -2.5, -0.4]


def hard_batch(dtype):
    """Every side of both clips for both signs of A; seven sequences interleaved, one of them masked whole.

    The ratios lie in every interval that 0.2, 0.28 and the dual clips cut, and at least 0.01 from its ends.
    """
    generator = torch.Generator().manual_seed(1)
    ratios = [0.3, 0.7, 0.9, 1.0, 1.04, 1.15, 1.24, 1.5, 2.9, 3.3]
    cases = list(itertools.product(ratios, [1.3, -0.7, 0.0, -2.1]))
    logp_R = -3 * torch.rand(len(cases), generator=generator) - 0.1
    old_logp_R = logp_R - torch.tensor([r for r, _ in cases]).log()
    mask_R = torch.rand(len(cases), generator=generator) < 0.8
    seq_R = torch.randint(7, (len(cases),), generator=generator) * 1000 - 500
    mask_R[seq_R == 500] = False
    batch = {
        "logp_R": logp_R,
        "old_logp_R": old_logp_R,
        "sampler_logp_R": old_logp_R + 0.3 * torch.randn(len(cases), generator=generator),
        "adv_R": torch.tensor([a for _, a in cases]),
        "ref_logp_R": logp_R + 0.5 * torch.randn(len(cases), generator=generator),
        "entropy_R": 2 * torch.rand(len(cases), generator=generator),
    }
    batch = {name: x_R.to(dtype) for name, x_R in batch.items()}
    num_seqs = len(set(seq_R[mask_R].tolist()))
    assert num_seqs == 6 and 25 < mask_R.sum() < 35
    batch["logp_R"].requires_grad_()
    batch["entropy_R"].requires_grad_()
    positive_R = seq_R % 3000 == 500
    assert 0 < (mask_R & positive_R).sum() < mask_R.sum()
    counts = {  # other ranks have some too
        "num_valid_tokens": int(mask_R.sum()) + 11,
        "num_valid_seqs": num_seqs + 2,
        "num_positive_tokens": int((mask_R & positive_R).sum()) + 4,
    }
    return batch | {"mask_R": mask_R, "seq_R": seq_R, "positive_R": positive_R} | counts


def loop_loss(batch: dict, cfg: LossConfig) -> tuple[float, list[float], list[float]]:
    """Loss, its gradient in logp_R and in entropy_R."""
    names = (*LOGPS, "adv_R", "entropy_R", "positive_R", "seq_R")
    columns = {name: batch[name].tolist() for name in names}
    num = len(columns["seq_R"])
    columns["old_logp_R"] = columns["logp_R"] if cfg.force_on_policy_ratio else columns["old_logp_R"]
    total, grad, grad_entropy = 0.0, [0.0] * num, [0.0] * num
    for seq in sorted(set(columns["seq_R"])):
        mine = [i for i in range(num) if columns["seq_R"][i] == seq and batch["mask_R"][i]]
        weights = loop_weights([columns["old_logp_R"][i] - columns["sampler_logp_R"][i] for i in mine], cfg)
        before = columns["sampler_logp_R" if cfg.old_logprobs == "sampler" else "old_logp_R"]
        mean_log_ratio = sum(columns["logp_R"][i] - before[i] for i in mine) / max(len(mine), 1)
        left_by = sum(columns["sampler_logp_R"][i] - columns["logp_R"][i] for i in mine) / max(len(mine), 1)
        pessimistic = {i: gmpo_log_ratio(columns["logp_R"][i] - before[i], columns["adv_R"][i], cfg) for i in mine}
        mean_pessimistic = sum(x for x, _ in pessimistic.values()) / max(len(mine), 1)
        for i, weight in zip(mine, weights, strict=True):
            logp, _, sampler, ref = (columns[name][i] for name in LOGPS)
            adv = columns["adv_R"][i]
            if cfg.token_level_loss and cfg.loss_scale_factor is not None:
                share = 1 / cfg.loss_scale_factor
            elif cfg.token_level_loss:
                share = 1 / batch["num_valid_tokens"]
            elif cfg.loss_scale_factor is None:
                share = 1 / batch["num_valid_seqs"] / len(mine)
            else:
                share = 1 / batch["num_valid_seqs"] / cfg.loss_scale_factor
            gspo = cfg.sequence_level_importance_ratios and not cfg.force_on_policy_ratio
            log_ratio = mean_log_ratio if gspo else logp - before[i]
            value, slope = loop_token(logp, log_ratio, math.exp(logp) - math.exp(before[i]), adv, cfg)
            if cfg.off_policy_mask_threshold is not None and adv < 0 and left_by > cfg.off_policy_mask_threshold:
                value = slope = 0.0
            if cfg.token_loss == "gmpo":
                is_masked = value == slope == 0.0
                ratio = 0.0 if is_masked else math.exp(mean_pessimistic)
                total += share * weight * -adv * ratio
                for j in mine:
                    grad[j] += share * weight * -adv * ratio * pessimistic[j][1] / len(mine)
            else:
                total += share * weight * value
                shares_ratio = gspo and not cfg.gspo_token
                for j in mine if shares_ratio else [i]:  # a sequence's ratio is moved by each of its tokens
                    grad[j] += share * weight * slope / (len(mine) if shares_ratio else 1)
            value, slope = loop_kl(logp, sampler, columns["old_logp_R"][i], ref, cfg)
            total += share * cfg.reference_policy_kl_penalty * value
            grad[i] += share * cfg.reference_policy_kl_penalty * slope
            total -= share * cfg.entropy_coef * columns["entropy_R"][i]
            grad_entropy[i] -= share * cfg.entropy_coef
            if columns["positive_R"][i]:
                total -= cfg.positive_example_nll_weight * logp / batch["num_positive_tokens"]
                grad[i] -= cfg.positive_example_nll_weight / batch["num_positive_tokens"]
    return total, grad, grad_entropy


def gmpo_log_ratio(log_ratio: float, adv: float, cfg: LossConfig) -> tuple[float, float]:
    """GMPO's clipped log-ratio of a token, and its derivative in logp."""
    if adv > 0 and log_ratio > cfg.ratio_clip_max:
        return cfg.ratio_clip_max, 0.0
    if adv < 0 and log_ratio < -cfg.ratio_clip_min:
        return -cfg.ratio_clip_min, 0.0
    return (log_ratio, 1.0) if adv else (0.0, 0.0)


def loop_token(logp: float, log_ratio: float, moved: float, adv: float, cfg: LossConfig) -> tuple[float, float]:
    """Loss of a token and its derivative in the log of its ratio (in logp where there is none). moved: change of its
    probability."""
    ratio = math.exp(log_ratio)
    if cfg.token_loss == "sapo":
        tau = cfg.sapo_tau_positive if adv > 0 else cfg.sapo_tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -adv * 4 / tau * gate, -adv * 4 * gate * (1 - gate) * ratio
    if cfg.token_loss in ("dppo", "ipo", "dppo_tv"):
        is_masked = moved > cfg.dppo_mask_high if adv > 0 else moved < -cfg.dppo_mask_low
        if cfg.token_loss == "ipo":
            is_masked = not -cfg.dppo_mask_low <= moved <= cfg.dppo_mask_high
        if cfg.token_loss == "dppo_tv":
            constant = 0.0 if is_masked else min(ratio, cfg.ratio_clip_c or math.inf)
            return -adv * constant * logp, -adv * constant
        surrogate = 0.0 if is_masked else -adv * ratio
        return surrogate + cfg.dppo_kl_tau * log_ratio**2, surrogate + 2 * cfg.dppo_kl_tau * log_ratio
    if cfg.disable_ppo_ratio:
        return -adv * logp, -adv
    if cfg.force_on_policy_ratio:
        return -adv * ratio, -adv * ratio
    if cfg.use_cispo:
        bounded = min(max(ratio, 1 - cfg.ratio_clip_min), 1 + cfg.ratio_clip_max)
        return -adv * bounded * logp, -adv * bounded
    if adv > 0 and ratio > 1 + cfg.ratio_clip_max:
        return -adv * (1 + cfg.ratio_clip_max), 0.0
    if adv < 0 and ratio < 1 - cfg.ratio_clip_min:
        return -adv * (1 - cfg.ratio_clip_min), 0.0
    if adv < 0 and cfg.ratio_clip_c is not None and ratio > cfg.ratio_clip_c:
        return -adv * cfg.ratio_clip_c, 0.0
    return -adv * ratio, -adv * ratio


def loop_weights(log_weights: list[float], cfg: LossConfig) -> list[float]:
    """Sampler weights of a sequence's tokens."""
    kind, high = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    if not cfg.use_importance_sampling_correction or not log_weights:
        return [1.0] * len(log_weights)
    token = [math.exp(x) for x in log_weights]
    product = [math.exp(sum(log_weights))] * len(token)
    if cfg.sequence_level_importance_ratios and cfg.importance_sampling_correction_level != "token":
        is_mean = cfg.importance_sampling_correction_level == "sequence_mean"
        token = [w ** (1 / len(product)) for w in product] if is_mean else product
    if kind == "tis":
        return [min(max(w, low), high) for w in token]
    if kind == "icepop":
        return [w if low <= w <= high else 0.0 for w in token]
    if kind == "seq-mask-tis":
        mean = math.exp(sum(log_weights) / len(log_weights))
        return [w if low <= mean <= high else 0.0 for w in token]
    if kind == "sequence-truncate":
        return [min(max(w, low), high) for w in product]
    if kind == "sequence-mask":
        return [w if low <= w <= high else 0.0 for w in product]
    return product if kind == "sequence" else token


def loop_kl(logp: float, sampler: float, old: float, ref: float, cfg: LossConfig) -> tuple[float, float]:
    """KL of a token and its derivative in logp."""
    bound = math.inf if cfg.kl_input_clamp_value is None else cfg.kl_input_clamp_value
    x = min(max(ref - logp, -bound), bound)
    moves = x == ref - logp
    value = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[cfg.reference_policy_kl_type]
    slope = {"k1": 1.0, "k2": -x, "k3": 1 - math.exp(x)}[cfg.reference_policy_kl_type] if moves else 0.0
    weight = math.exp(logp - sampler) if cfg.use_on_policy_kl_approximation else 1.0
    if cfg.kl_gradient == "policy_ratio":
        weight = math.exp(logp - old)
    if cfg.kl_gradient != "plain" and moves:
        slope += value
    value, slope = weight * value, weight * slope
    if cfg.kl_output_clamp_value is not None and abs(value) > cfg.kl_output_clamp_value:
        return math.copysign(cfg.kl_output_clamp_value, value), 0.0
    return value, slope


def reduced(*parts):
    """Metrics of several micro-batches as one number each, by the rule of loss.py's docstring."""
    out = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if isinstance(values[0], tuple):
            out[name] = float(sum(v[0] for v in values) / sum(v[1] for v in values))
        elif name.endswith(("_min", "_max")):
            out[name] = float((min if name.endswith("_min") else max)(values))
        else:
            out[name] = float(sum(values))
    return out


IS_TYPES = {  # bounds that some weights of the batch are under, some above, some within
    None: {},
    "tis": {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.8},
    "icepop": {"truncated_importance_sampling_ratio": 1.3, "truncated_importance_sampling_ratio_min": 0.7},
    "seq-mask-tis": {"truncated_importance_sampling_ratio": 1.1, "truncated_importance_sampling_ratio_min": 0.95},
    "sequence": {},
    "sequence-truncate": {"truncated_importance_sampling_ratio": 1.5, "truncated_importance_sampling_ratio_min": 0.8},
    "sequence-mask": {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 0.5},
}
WEIGHTS = [{}] + [
    {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind, **bounds}
    for kind, bounds in IS_TYPES.items()
]
MODES = [
    {},
    {"sequence_level_importance_ratios": True},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
    {"sequence_level_importance_ratios": True, "force_on_policy_ratio": True},
    {"sequence_level_importance_ratios": True, "importance_sampling_correction_level": "token"},
    {"sequence_level_importance_ratios": True, "importance_sampling_correction_level": "sequence_mean"},
    {"old_logprobs": "sampler"},
    {"sequence_level_importance_ratios": True, "old_logprobs": "sampler"},
    {"use_cispo": True, "old_logprobs": "sampler"},
    {"sequence_level_importance_ratios": True, "gspo_token": True},
    {"token_loss": "sapo"},
    {"token_loss": "sapo", "sapo_tau_positive": 3.0, "sapo_tau_negative": 0.5, "old_logprobs": "sampler"},
    {"token_loss": "dppo", "dppo_mask_low": 0.05, "dppo_mask_high": 0.1, "old_logprobs": "sampler"},
    {"token_loss": "dppo", "dppo_mask_low": 0.05, "dppo_mask_high": 0.1, "dppo_kl_tau": 0.3},
    {"token_loss": "ipo", "dppo_mask_low": 0.1, "dppo_mask_high": 0.05, "old_logprobs": "sampler"},
    {"token_loss": "dppo_tv", "dppo_mask_low": 0.05, "dppo_mask_high": 0.1, "ratio_clip_c": 1.3},
    {"token_loss": "gmpo"},
    {"off_policy_mask_threshold": 0.1},
    {"off_policy_mask_threshold": 0.0, "token_loss": "dppo_tv"},
]


def allowed(*choices: list[dict]) -> list[LossConfig]:
    combined = (
        {name: value for part in parts for name, value in part.items()} for parts in itertools.product(*choices)
    )
    configs = [LossConfig(**options) for options in combined]
    clashes = (any(" has no effect " not in text for text in contradictions(Config(loss_fn=cfg))) for cfg in configs)
    return [cfg for cfg, is_refused in zip(configs, clashes, strict=True) if not is_refused]
