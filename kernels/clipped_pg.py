"""Triton only: the derivatives of loss.policy_loss fused into the kernel that writes a row's gradient.

loss.policy_loss defines the loss; `_slope` below repeats its derivative in logp for the options of LossConfig that see
one token at a time. The copy is a fast path and nothing else: loss_path.py lets it run only while loss.py is the one it
was written for (`PROVEN`) and after it has shown at start that it gives the gradients of loss.py. The loss's value and
all metrics are always those of policy_loss.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.softmax import LN2, launch_options, narrow_view, row_stats, write_dlogits


def kernel_inputs(pack: Mapping, dtype: torch.dtype) -> Tensor:
    """[6, R]: old, sampler, adv, weight, ref, nll_weight of each token, from the keyword arguments of policy_loss.

    weight, nll_weight: the token's weight in the loss and in the positive-example NLL, 0 where it is not trained.
    """
    cfg, sampler_R, seq_R = pack["cfg"], pack["sampler_logp_T"], pack["seq_T"]
    zero_R = torch.zeros_like(sampler_R)
    valid_R = (pack["mask_T"] != 0) & sampler_R.isfinite()
    if cfg.token_level_loss:
        weight_R = (zero_R + 1) / torch.as_tensor(pack["num_valid_tokens"]).clamp(min=1)
    else:
        sorted_R, order_R = seq_R.sort()
        count = torch.nn.functional.pad(valid_R[order_R].cumsum(0), (1, 0))
        last_R, first_R = (torch.searchsorted(sorted_R, seq_R, right=right) for right in (True, False))
        length_R = (count[last_R] - count[first_R]).to(zero_R.dtype).clamp(min=1)
        length_R = length_R if cfg.loss_scale_factor is None else zero_R + cfg.loss_scale_factor
        weight_R = 1 / length_R / torch.as_tensor(pack["num_valid_seqs"]).clamp(min=1)
    nll_weight_R = zero_R
    if cfg.positive_example_nll_weight:
        positive_R = valid_R & (pack["positive_T"] != 0)
        nll_weight_R = positive_R.to(zero_R.dtype) / torch.as_tensor(pack["num_positive_tokens"]).clamp(min=1)
    old_R = zero_R if pack["old_logp_T"] is None else pack["old_logp_T"]
    ref_R = zero_R if pack["ref_logp_T"] is None else pack["ref_logp_T"]
    columns = (old_R, sampler_R, pack["adv_T"], torch.where(valid_R, weight_R, 0.0), ref_R, nll_weight_R)
    assert len({x_R.shape for x_R in columns}) == 1, [x_R.shape for x_R in columns]
    return torch.stack([x_R.detach().to(dtype) for x_R in columns])


@triton.jit
def _slope(logp, old, sampler, adv, ref, CFG: tl.constexpr, MOST: tl.constexpr, HAS_REF: tl.constexpr):
    """Derivative in logp of a token's loss, before its weight, entropy and NLL."""
    if CFG.disable_ppo_ratio:
        g = -adv
    else:
        log_ratio = logp - old
        ratio = tl.exp(tl.where(log_ratio > MOST, MOST, tl.where(log_ratio < -MOST, -MOST, log_ratio)))  # NaN stays
        clamped = tl.minimum(tl.maximum(ratio, 1 - CFG.ratio_clip_min), 1 + CFG.ratio_clip_max)
        if CFG.use_cispo:
            g = -adv * clamped
        else:
            moves = (tl.abs(log_ratio) <= MOST) & ((ratio == clamped) | (-adv * ratio > -adv * clamped))
            g = tl.where(moves, -adv * ratio, 0.0)
            if CFG.ratio_clip_c is not None:
                loss = tl.maximum(-adv * ratio, -adv * clamped)
                most = tl.where(adv < 0, -adv * CFG.ratio_clip_c, float("inf"))
                g = tl.where(loss < most, g, tl.where(loss == most, g / 2, 0.0))  # at a tie autograd halves
    if CFG.use_importance_sampling_correction:
        weight = tl.exp(old - sampler)
        weight = tl.where(weight < float("inf"), weight, 0.0)
        low: tl.constexpr = CFG.truncated_importance_sampling_ratio_min
        high: tl.constexpr = CFG.truncated_importance_sampling_ratio
        if CFG.truncated_importance_sampling_type == "tis":
            weight = tl.minimum(weight if low is None else tl.maximum(weight, low), high)
        elif CFG.truncated_importance_sampling_type == "icepop":
            weight = tl.where((weight < low) | (weight > high), 0.0, weight)
        g *= weight
    if HAS_REF:
        gap = ref - logp
        x = gap
        if CFG.kl_input_clamp_value is not None:
            x = tl.minimum(tl.maximum(gap, -CFG.kl_input_clamp_value), CFG.kl_input_clamp_value)
        kl, slope = -x, x * 0 + 1
        if CFG.reference_policy_kl_type == "k2":
            kl, slope = x * x / 2, -x
        elif CFG.reference_policy_kl_type == "k3":  # what cancels near 0 is less than the rounding of gap
            kl, slope = tl.exp(x) - 1 - x, 1 - tl.exp(x)
        if CFG.kl_gradient == "score_function":
            slope += kl
        if CFG.use_on_policy_kl_approximation:
            weight = tl.exp(logp - sampler)
            weight = tl.where(weight < float("inf"), weight, 0.0)
            kl, slope = kl * weight, slope * weight
        slope = tl.where(x == gap, slope, 0.0)
        if CFG.kl_output_clamp_value is not None:
            slope = tl.where(tl.abs(kl) <= CFG.kl_output_clamp_value, slope, 0.0)
        g += CFG.reference_policy_kl_penalty * slope
    return g


@triton.jit(do_not_specialize=["first_row", "num_rows"])  # which change from one micro-batch to the next
def clipped_pg_kernel(
    logits_ptr, dlogits_ptr, target_ptr, inputs_ptr, logp_ptr, entropy_ptr, first_row, num_rows, vocab, row_stride,
    scale, CFG: tl.constexpr, MOST: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per row of the chunk that starts at first_row: logp, entropy, and dlogits in the memory of logits,
    row_stride apart. inputs: as `kernel_inputs`, [6, num_rows]. CFG: an object with the options of LossConfig."""
    row = tl.program_id(0).to(tl.int64)  # before it is multiplied: rows times vocab passes 2^31
    at = first_row + row
    logits, inputs = logits_ptr + row * vocab, inputs_ptr + at
    target = tl.load(target_ptr + at)
    largest, log2_sum, weighted = row_stats(logits, vocab, scale, BLOCK)
    logp = (tl.load(logits + target) - largest) * scale - log2_sum * LN2
    entropy = (log2_sum - weighted) * LN2
    tl.store(logp_ptr + at, logp)
    tl.store(entropy_ptr + at, entropy)

    weight, nll_weight = tl.load(inputs + 3 * num_rows), tl.load(inputs + 5 * num_rows)
    trained = weight != 0  # what is not may hold NaN, and is not read
    old, sampler = tl.load(inputs, trained, 0.0), tl.load(inputs + num_rows, trained, 0.0)
    adv, ref = tl.load(inputs + 2 * num_rows, trained, 0.0), tl.load(inputs + 4 * num_rows, trained, 0.0)
    logp = tl.where(trained, logp, 0.0)
    if not HAS_OLD:
        old = logp
    slope = _slope(logp, old, sampler, adv, ref, CFG, MOST, HAS_REF)
    g = weight * slope - CFG.positive_example_nll_weight * nll_weight
    h = -CFG.entropy_coef * weight
    dlogits = dlogits_ptr + row * row_stride
    write_dlogits(logits, dlogits, vocab, target, largest, log2_sum, entropy, g, h, scale, CFG.entropy_coef > 0, BLOCK)


def clipped_pg_dlogits_(
    logits_CV: Tensor,
    target_R: Tensor,
    inputs_KR: Tensor,
    logp_R: Tensor,
    entropy_R: Tensor,
    first_row: int,
    pack: Mapping,
    *,
    temperature: float,
    dtype: torch.dtype,
    max_log_ratio: float,
) -> Tensor:
    """dz_CV, as `softmax.dlogits_`, of the rows of the pack that begin at first_row. Fills their logp_R, entropy_R."""
    cfg, vocab, dlogits_CV = pack["cfg"], logits_CV.shape[1], narrow_view(logits_CV, dtype)
    has_old = pack["old_logp_T"] is not None and not cfg.force_on_policy_ratio  # if not, r = 1 and no clip binds
    has_ref = pack["ref_logp_T"] is not None and cfg.reference_policy_kl_penalty > 0 and not cfg.use_kl_in_reward
    clipped_pg_kernel[(len(logits_CV),)](
        logits_CV, dlogits_CV, target_R, inputs_KR, logp_R, entropy_R, first_row, inputs_KR.shape[1], vocab,
        dlogits_CV.stride(0), 1 / temperature, CFG=cfg, MOST=max_log_ratio, HAS_OLD=has_old, HAS_REF=has_ref,
        **launch_options(vocab),
    )  # fmt: skip
    return dlogits_CV
