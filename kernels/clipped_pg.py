"""The token-level policy-gradient loss of a linear head and its gradients, in one pass over the logits.

`loss.policy_loss` on `linear_logp` computes the logits twice: matmuls of 8 R V D flops. Where the loss of a token needs
no other token, its derivatives g in logp and h in the entropy are known as soon as its row of logits is, and dz with
them (kernels/rows.py): forward makes both gradients chunk by chunk, 6 R V D, and backward scales them. Per token:
    loss = share (w l + reference_policy_kl_penalty kl - entropy_coef H) - positive_example_nll_weight nll_share logp
    l    PPO max(-A r, -A clamp(r)), r = exp(logp - old) as loss._ratios; dual clip; CISPO -A clamp(r) logp; or -A logp
    w    exp(old - sampler), clamped (tis) or 0 out of bounds (icepop)
    kl   k1, k2 or k3 of ref - logp, with either gradient
share and nll_share weigh the token in its aggregates. `loss.policy_loss` is the definition, ties included. Here it is
twice: `token_terms` in PyTorch; in Triton, line by line the same, within the kernel that reads a row and writes its dz.

Precision: logits, statistics and terms in float32 (float64 for float64 inputs, always in PyTorch); dz rounded once to
the inputs' dtype; dW summed over chunks in float32 and rounded once, in backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from config import MAX_LOG_RATIO, LossConfig
from kernels.backend import Head, choose_head
from kernels.linear_logp import linear_logp
from kernels.softmax import LN2, chunks, dlogits_, launch, mm_float32, narrow_view, row_stats, row_stats_, write_dlogits

MOST = tl.constexpr(MAX_LOG_RATIO)


def unsupported(cfg: LossConfig) -> list[str]:
    """Options, with their values, that make a token's loss depend on other tokens; [] = `grpo_head` computes it."""
    kind = cfg.truncated_importance_sampling_type
    found = ["sequence_level_importance_ratios=true"] if cfg.sequence_level_importance_ratios else []
    return found + ([] if kind in (None, "tis", "icepop") else [f"truncated_importance_sampling_type={kind}"])


def token_terms(
    logp: Tensor, entropy: Tensor, inputs_KR: Tensor, cfg: LossConfig, has_old: bool, has_ref: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, g, h; None = 0) of each row; inputs_KR: old, sampler, adv, share, ref, nll_share."""
    share, nll = inputs_KR[3], cfg.positive_example_nll_weight * inputs_KR[5]
    old, sampler, adv, ref, logp = (torch.where(share != 0, x, 0.0) for x in (*inputs_KR[:3], inputs_KR[4], logp))
    old = old if has_old else logp
    if cfg.disable_ppo_ratio:
        loss, g = -adv * logp, -adv
    else:
        log_ratio = logp - old
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clamped = ratio.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
        if cfg.use_cispo:
            loss, g = -adv * clamped * logp, -adv * clamped
        else:
            loss = torch.maximum(-adv * ratio, -adv * clamped)
            moves = (log_ratio.abs() <= MAX_LOG_RATIO) & ((ratio == clamped) | (-adv * ratio > -adv * clamped))
            g = torch.where(moves, -adv * ratio, 0.0)
            if cfg.ratio_clip_c is not None:
                most = torch.where(adv < 0, -adv * cfg.ratio_clip_c, torch.inf)
                g = torch.where(loss < most, g, torch.where(loss == most, g / 2, 0.0))  # at a tie autograd halves
                loss = torch.minimum(loss, most)
    if cfg.use_importance_sampling_correction:
        weight = (old - sampler).exp().nan_to_num(nan=0.0, posinf=0.0)
        low, high = cfg.truncated_importance_sampling_ratio_min or 0.0, cfg.truncated_importance_sampling_ratio
        if cfg.truncated_importance_sampling_type == "tis":
            weight = weight.clamp(low, high)
        elif cfg.truncated_importance_sampling_type == "icepop":
            weight = torch.where((weight < low) | (weight > high), 0.0, weight)
        loss, g = loss * weight, g * weight
    if has_ref:
        gap, bound, top = ref - logp, cfg.kl_input_clamp_value, cfg.kl_output_clamp_value
        x = gap if bound is None else gap.clamp(-bound, bound)
        kl, slope = -x, torch.ones_like(x)  # of the KL in logp
        if cfg.reference_policy_kl_type == "k2":
            kl, slope = x * x / 2, -x
        elif cfg.reference_policy_kl_type == "k3":
            kl, slope = x.expm1() - x, -x.expm1()
        if cfg.kl_gradient == "score_function":
            slope = slope + kl
        if cfg.use_on_policy_kl_approximation:
            weight = (logp - sampler).exp().nan_to_num(nan=0.0, posinf=0.0)
            kl, slope = kl * weight, slope * weight
        slope = torch.where(x == gap, slope, 0.0)  # none where a clamp bites
        if top is not None:
            kl, slope = kl.clamp(-top, top), torch.where(kl.abs() <= top, slope, 0.0)
        loss, g = loss + cfg.reference_policy_kl_penalty * kl, g + cfg.reference_policy_kl_penalty * slope
    loss, g, h = loss * share - nll * logp, g * share - nll, None
    if cfg.entropy_coef:
        h = -cfg.entropy_coef * share
        loss = loss + h * entropy
    return loss, g, h


@triton.jit
def _token_terms(logp, entropy, old, sampler, adv, share, ref, nll, CFG: tl.constexpr, HAS_REF: tl.constexpr):
    if CFG.disable_ppo_ratio:
        loss, g = -adv * logp, -adv
    else:
        log_ratio = logp - old
        ratio = tl.exp(tl.where(log_ratio > MOST, MOST, tl.where(log_ratio < -MOST, -MOST, log_ratio)))  # NaN stays
        clamped = tl.minimum(tl.maximum(ratio, 1 - CFG.ratio_clip_min), 1 + CFG.ratio_clip_max)
        if CFG.use_cispo:
            loss, g = -adv * clamped * logp, -adv * clamped
        else:
            loss = tl.maximum(-adv * ratio, -adv * clamped)
            moves = (tl.abs(log_ratio) <= MOST) & ((ratio == clamped) | (-adv * ratio > -adv * clamped))
            g = tl.where(moves, -adv * ratio, 0.0)
            if CFG.ratio_clip_c is not None:
                most = tl.where(adv < 0, -adv * CFG.ratio_clip_c, float("inf"))
                g = tl.where(loss < most, g, tl.where(loss == most, g / 2, 0.0))
                loss = tl.minimum(loss, most)
    if CFG.use_importance_sampling_correction:
        weight = tl.exp(old - sampler)
        weight = tl.where(weight < float("inf"), weight, 0.0)
        low: tl.constexpr = CFG.truncated_importance_sampling_ratio_min
        high: tl.constexpr = CFG.truncated_importance_sampling_ratio
        if CFG.truncated_importance_sampling_type == "tis":
            weight = tl.minimum(weight if low is None else tl.maximum(weight, low), high)
        elif CFG.truncated_importance_sampling_type == "icepop":
            weight = tl.where((weight < low) | (weight > high), 0.0, weight)
        loss, g = loss * weight, g * weight
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
            kl = tl.minimum(tl.maximum(kl, -CFG.kl_output_clamp_value), CFG.kl_output_clamp_value)
        loss, g = loss + CFG.reference_policy_kl_penalty * kl, g + CFG.reference_policy_kl_penalty * slope
    h = -CFG.entropy_coef * share
    return loss * share - nll * logp + h * entropy, g * share - nll, h


@triton.jit(do_not_specialize=["first_row", "num_rows"])  # which change from one micro-batch to the next
def policy_row_kernel(
    logits_ptr, dlogits_ptr, target_ptr, inputs_ptr, outputs_ptr, first_row, num_rows, vocab, row_stride, scale,
    CFG: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per row of the chunk that starts at first_row: dlogits, in the memory of logits, row_stride apart.
    inputs: as `token_terms`, [6, num_rows]; outputs: logp, entropy, loss, [3, num_rows]. CFG: the LossConfig."""
    row = tl.program_id(0).to(tl.int64)  # before it is multiplied: rows times vocab passes 2^31
    at = first_row + row
    logits, inputs, outputs = logits_ptr + row * vocab, inputs_ptr + at, outputs_ptr + at
    target = tl.load(target_ptr + at)
    largest, log2_sum, weighted = row_stats(logits, vocab, scale, BLOCK)
    logp = (tl.load(logits + target) - largest) * scale - log2_sum * LN2
    entropy = (log2_sum - weighted) * LN2

    share, nll_share = tl.load(inputs + 3 * num_rows), tl.load(inputs + 5 * num_rows)
    trained = share != 0  # what is not may hold NaN, and is not read
    old, sampler = tl.load(inputs, trained, 0.0), tl.load(inputs + num_rows, trained, 0.0)
    adv, ref = tl.load(inputs + 2 * num_rows, trained, 0.0), tl.load(inputs + 4 * num_rows, trained, 0.0)
    kept = tl.where(trained, logp, 0.0)
    if not HAS_OLD:
        old = kept
    nll = CFG.positive_example_nll_weight * nll_share
    loss, g, h = _token_terms(kept, entropy, old, sampler, adv, share, ref, nll, CFG, HAS_REF)

    tl.store(outputs, logp)
    tl.store(outputs + num_rows, entropy)
    tl.store(outputs + 2 * num_rows, loss)
    dlogits = dlogits_ptr + row * row_stride
    write_dlogits(logits, dlogits, vocab, target, largest, log2_sum, entropy, g, h, scale, CFG.entropy_coef > 0, BLOCK)


class _GrpoHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, target_R, inputs_KR, temperature, terms, head):
        """(loss, and of each row its logp, entropy, loss: outputs_KR)."""
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        num_rows, vocab = len(hidden_RD), len(weight_VD)
        torch._assert_async(((target_R >= 0) & (target_R < vocab)).all(), "a target is outside [0, V)")
        parts = chunks(num_rows, vocab, head, hidden_RD.device.type)
        buffer_CV = inputs_KR.new_empty(parts[0].stop if parts else 0, vocab)
        outputs_KR = inputs_KR.new_empty(3, num_rows)
        grad_hidden_RD = hidden_RD.new_empty(hidden_RD.shape) if need_hidden else None
        grad_weight_VD = inputs_KR.new_empty(weight_VD.shape) if need_weight else None
        if need_weight and not parts:
            grad_weight_VD.zero_()
        for rows in parts:
            logits_CV = mm_float32(hidden_RD[rows], weight_VD.T, out=buffer_CV[: rows.stop - rows.start])
            if head.backend == "triton":
                dz_CV = narrow_view(logits_CV, hidden_RD.dtype)
                policy_row_kernel[(len(logits_CV),)](
                    logits_CV, dz_CV, target_R, inputs_KR, outputs_KR, rows.start, num_rows, vocab, dz_CV.stride(0),
                    1 / temperature, *terms, **launch(vocab),
                )  # fmt: skip
            else:
                logp_C, entropy_C, _, sum_C = row_stats_(logits_CV, target_R[rows], temperature, return_entropy=True)
                loss_C, g_C, h_C = token_terms(logp_C, entropy_C, inputs_KR[:, rows], *terms)
                torch.stack([logp_C, entropy_C, loss_C], out=outputs_KR[:, rows])
                like = {"temperature": temperature, "dtype": hidden_RD.dtype, "head": head}
                dz_CV = dlogits_(logits_CV, target_R[rows], None, sum_C, entropy_C, g_C, h_C, **like)
            if need_hidden:
                torch.mm(dz_CV, weight_VD, out=grad_hidden_RD[rows])
            if need_weight:
                mm_float32(dz_CV.T, hidden_RD[rows], out=grad_weight_VD, accumulate=rows.start > 0)
        ctx.save_for_backward(grad_hidden_RD, grad_weight_VD)
        ctx.dtype = weight_VD.dtype
        ctx.mark_non_differentiable(outputs_KR)
        return outputs_KR[2].sum(), outputs_KR

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        scale = grad_loss.view(1, 1)  # without dimensions it would be rounded to 16 bits first
        grads = [
            None if x is None else torch.mul(x, scale, out=torch.empty_like(x, dtype=ctx.dtype))
            for x in ctx.saved_tensors
        ]
        return *grads, None, None, None, None, None


def grpo_head(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    *,
    temperature: float,
    num_grad_rows: int,
    old_logp_R: Tensor | None,
    sampler_logp_R: Tensor,
    adv_R: Tensor,
    share_R: Tensor,
    ref_logp_R: Tensor | None,
    nll_share_R: Tensor | None,
    cfg: LossConfig,
    head: Head | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logp_R, entropy_R): loss is differentiable once in hidden_RD and weight_VD, the others are constants.

    hidden_RD, weight_VD, target_R, head: as `linear_logp`. The loss is that of the first num_grad_rows rows; of the
    others only logp and entropy are computed, by forward alone, as is everything under torch.no_grad.
    Per row: share_R and nll_share_R (None: 0), the weights in the loss and in the positive-example NLL, both 0 where a
    token is not trained (`loss.token_shares`): what is not trained may hold anything in the rest, NaN too. The rest
    as `policy_loss`; old_logp_R None: the policy itself, so that ratios are 1; ref_logp_R None: no KL.
    Memory: a chunk of logits in float32 (twice with torch), dX, and dW, which is in float32 until backward.
    """
    refused = unsupported(cfg)
    assert not refused, f"needs whole sequences, not tokens one by one: {refused}"
    assert 0 <= num_grad_rows <= len(hidden_RD), (num_grad_rows, hidden_RD.shape)
    head = head or choose_head("auto", hidden_RD.device.type)
    if hidden_RD.dtype == torch.float64:
        head = Head("torch")
    wide = torch.promote_types(hidden_RD.dtype, torch.float32)
    inputs = (old_logp_R, sampler_logp_R, adv_R, share_R, ref_logp_R, nll_share_R)
    inputs = [torch.zeros_like(share_R) if x_R is None else x_R.detach() for x_R in inputs]
    assert all(x_R.shape == hidden_RD.shape[:1] for x_R in inputs), (hidden_RD.shape, [x_R.shape for x_R in inputs])
    first = slice(num_grad_rows)
    inputs_KR = torch.stack([x_R[first].to(wide) for x_R in inputs])
    has_old = old_logp_R is not None and not cfg.force_on_policy_ratio  # if not, r = 1 and no clip binds
    has_ref = ref_logp_R is not None and cfg.reference_policy_kl_penalty > 0 and not cfg.use_kl_in_reward
    terms = (cfg, has_old, has_ref)

    moves = torch.is_grad_enabled() and (hidden_RD.requires_grad or weight_VD.requires_grad)
    rest = slice(num_grad_rows if moves else 0, None)
    like = {"temperature": temperature, "return_entropy": True, "head": head}
    with torch.no_grad():
        logp_R, entropy_R = linear_logp(hidden_RD[rest], weight_VD, target_R[rest], **like)
    if not moves:
        loss_R, *_ = token_terms(logp_R[first], entropy_R[first], inputs_KR, *terms)
        return loss_R.sum(), logp_R, entropy_R
    matrices, target_R = (hidden_RD[first], weight_VD), target_R[first].contiguous()
    loss, outputs_KR = _GrpoHead.apply(*matrices, target_R, inputs_KR, temperature, terms, head)
    return loss, torch.cat([outputs_KR[0], logp_R]), torch.cat([outputs_KR[1], entropy_R])
