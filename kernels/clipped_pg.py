"""Triton only: the derivatives of loss.policy_loss fused into the kernel that writes a row's gradient.

loss.policy_loss defines the loss; `_slope` below repeats its derivative in logp for the options of LossConfig that see
one token at a time. The copy is only a fast path: loss_path.py uses it only while loss.py is unchanged (`PROVEN`) and
after a check at start that it gives the gradients of loss.py. policy_loss always gives the loss's value and metrics.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.softmax import LogitChunk, launch_options, row_stats, rows_in_flight, write_dlogits

MOST = tl.constexpr(20.0)  # bound of |logp - old|: config.MAX_LOG_RATIO


def kernel_inputs(pack: Mapping, dtype: torch.dtype) -> Tensor:
    """[6, R]: old, sampler, adv, weight, ref, nll_weight of each token, from the keyword arguments of policy_loss.

    weight, nll_weight: the token's weight in the loss and in the positive-example NLL, 0 where it is not trained.
    """
    cfg, seq_R = pack["cfg"], pack["seq_R"]
    valid_R = (pack["mask_R"] != 0) & pack["sampler_logp_R"].isfinite()
    weight_R, nll_weight_R = valid_R.to(dtype), None
    if cfg.token_level_loss:
        weight_R = weight_R / torch.as_tensor(pack["num_valid_tokens"]).clamp(min=1)
    else:
        length_R = cfg.loss_scale_factor
        if length_R is None:
            index_R = torch.searchsorted(seq_R.sort().values, seq_R.contiguous())  # as in loss.py: a number a sequence
            length_R = torch.zeros_like(weight_R).index_add(0, index_R, weight_R)[index_R].clamp(min=1)
        weight_R = weight_R / length_R / torch.as_tensor(pack["num_valid_seqs"]).clamp(min=1)
    if cfg.positive_example_nll_weight:
        nll_weight_R = (valid_R & (pack["positive_R"] != 0)) / torch.as_tensor(pack["num_positive_tokens"]).clamp(min=1)
    old_R = pack["sampler_logp_R"] if cfg.old_logprobs == "sampler" else pack["old_logp_R"]
    columns = (old_R, pack["sampler_logp_R"], pack["adv_R"], weight_R, pack["ref_logp_R"], nll_weight_R)
    return torch.stack([torch.zeros_like(weight_R) if x_R is None else x_R.detach().to(dtype) for x_R in columns])


@triton.jit
def _slope(logp, old, sampler, adv, ref, CFG: tl.constexpr, HAS_REF: tl.constexpr):
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
                g = tl.where(loss < most, g, tl.where(loss == most, g / 2, 0.0))  # at a tie autograd halves g
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
        elif CFG.reference_policy_kl_type == "k3":  # cancellation near 0 costs less than gap's rounding
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


@triton.jit(do_not_specialize=["num_rows", "pack_rows"])  # both differ between micro-batches
def clipped_pg_kernel(
    logits_ptr, dlogits_ptr, target_ptr, inputs_ptr, stats_ptr, num_rows, pack_rows, vocab, row_stride, scale,
    CFG: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes logp and entropy of the chunk's rows to stats, and dlogits over logits. inputs and stats start at the
    chunk's first row; a row's values lie pack_rows apart. CFG: an object with the options of LossConfig. Few programs
    walk over the rows, so that each row is still in L2 when it is read again."""
    first = tl.program_id(0).to(tl.int64)  # row * row_stride exceeds 2^31
    for row in range(first, num_rows, tl.num_programs(0)):
        logits, inputs = logits_ptr + row * row_stride, inputs_ptr + row
        target = tl.load(target_ptr + row)
        logp, entropy, largest, log2_sum = row_stats(logits, target, vocab, row_stride, scale, BLOCK)
        tl.store(stats_ptr + row, logp)
        tl.store(stats_ptr + pack_rows + row, entropy)

        weight, nll_weight = tl.load(inputs + 3 * pack_rows), tl.load(inputs + 5 * pack_rows)
        trained = weight != 0  # other rows may hold NaN, and are not read
        old, sampler = tl.load(inputs, trained, 0.0), tl.load(inputs + pack_rows, trained, 0.0)
        adv, ref = tl.load(inputs + 2 * pack_rows, trained, 0.0), tl.load(inputs + 4 * pack_rows, trained, 0.0)
        logp = tl.where(trained, logp, 0.0)
        if not HAS_OLD:
            old = logp
        slope = _slope(logp, old, sampler, adv, ref, CFG, HAS_REF)
        g = weight * slope - CFG.positive_example_nll_weight * nll_weight
        h = -CFG.entropy_coef * weight
        terms = largest, log2_sum, entropy, g, h, scale
        write_dlogits(logits, dlogits_ptr, row, vocab, row_stride, target, *terms, CFG.entropy_coef > 0, BLOCK)


def clipped_pg_dlogits_(chunk: LogitChunk, inputs_KR: Tensor, stats_KR: Tensor, pack: Mapping) -> Tensor:
    """dz_CV of a chunk, as `LogitChunk.dlogits_` gives it. Fills the chunk's rows of stats_KR: logp, entropy."""
    cfg, row_stride = pack["cfg"], chunk.logits_CV.stride(0)
    has_old = pack["old_logp_R"] is not None or cfg.old_logprobs == "sampler"
    has_old = has_old and not cfg.force_on_policy_ratio  # else r = 1 and no clip binds
    has_ref = pack["ref_logp_R"] is not None and cfg.reference_policy_kl_penalty > 0 and not cfg.use_kl_in_reward
    dlogits_CV = chunk.narrow_view()
    clipped_pg_kernel[(rows_in_flight(chunk.logits_CV),)](
        chunk.logits_CV, dlogits_CV, chunk.target_C, inputs_KR[:, chunk.rows], stats_KR[:, chunk.rows],
        len(chunk.logits_CV), inputs_KR.shape[1], chunk.vocab, row_stride, 1 / chunk.temperature,
        CFG=cfg, HAS_OLD=has_old, HAS_REF=has_ref, **launch_options(row_stride),
    )  # fmt: skip
    return dlogits_CV
