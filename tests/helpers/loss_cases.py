"""Batches and options for the loss tests."""

import itertools

import torch

from base.check.contradictions import contradictions
from config import Config, LossConfig
from loss import Max, Min
from records import TOKEN


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


def token_columns(num_rows):
    """A pack's tokens_R, with a column for each value of a token, also for those that a fork adds."""
    return {name: torch.zeros(num_rows) for name in TOKEN.names}


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


def numbers_of(value):
    """The tensors of a metric."""
    if isinstance(value, tuple):
        return value
    return (getattr(value, "value", value),)  # of a `Min` or `Max`, also of an edited loss.py


def reduced(*parts):
    """Metrics of several micro-batches as one number each, by the rule of loss.py's docstring."""
    out = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if isinstance(values[0], tuple):
            out[name] = float(sum(v[0] for v in values) / sum(v[1] for v in values))
        elif isinstance(values[0], Min):
            out[name] = min(map(float, values))
        elif isinstance(values[0], Max):
            out[name] = max(map(float, values))
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
    {"token_rejection_ratio_min": 0.8, "token_rejection_ratio_max": 1.3},
    {"sequence_rejection_ratio_min": 0.95, "sequence_rejection_ratio_max": 1.1},
]


def allowed(*choices: list[dict]) -> list[LossConfig]:
    combined = (
        {name: value for part in parts for name, value in part.items()} for parts in itertools.product(*choices)
    )
    configs = [LossConfig(**options) for options in combined]
    clashes = (any(" has no effect " not in text for text in contradictions(Config(loss_fn=cfg))) for cfg in configs)
    return [cfg for cfg, is_refused in zip(configs, clashes, strict=True) if not is_refused]
