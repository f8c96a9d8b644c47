"""Any loss of a linear head's log-probabilities and entropies, with its gradients, in one pass over the logits.

`linear_logp` with a loss outside computes the logits twice, in forward and in backward: matmuls of 8 R V D flops. If
the derivatives of the loss at a token need no other token, they are known as soon as the token's row of logits is: then
forward makes both gradients chunk by chunk, 6 R V D, and backward only scales them.

The loss is a function that is called, never a copy. After each chunk it is called with the log-probabilities and
entropies of the whole pack, 0 where they are still to come; autograd gives its derivatives, and those of the chunk's
rows are used. After the last chunk all rows are known: that call gives the loss, the metrics, and the true derivatives
of all rows. If those that were used differ, the loss couples tokens and its gradient is wrong (`DEVIATION`).

Precision: as `linear_logp`; dW is summed over chunks in float32 and rounded once, in backward.
"""

from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.backend import KernelBackend, LossPath, choose_backend
from kernels.clipped_pg import clipped_pg_dlogits_, kernel_inputs
from kernels.linear_logp import TORCH, linear_logp
from kernels.softmax import chunks, dlogits_, mm_float32, row_stats_

# A metric: how far the derivatives that were used are from the true ones, relative. 0 for a loss of tokens one by one.
DEVIATION = "one_pass_deviation_max"
MAX_DEVIATION = 1e-6  # what float sums in another order may do


def linear_loss(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    *,
    temperature: float,
    num_grad_rows: int,
    pack_loss: partial,
    path: LossPath,
    backend: KernelBackend | None = None,
) -> tuple[Tensor, dict]:
    """(loss, metrics) of pack_loss on log softmax(hidden_RD @ weight_VD.T / temperature); with `DEVIATION`.

    hidden_RD, weight_VD, target_R, backend: as `linear_logp`; the loss is differentiable once in the first two.
    pack_loss: `loss.policy_loss` with all its arguments but logp_T and entropy_T.
    num_grad_rows: in one pass, only the first so many rows get a gradient; of the others logp and entropy alone are
    computed. If the loss has one there all the same, that is a deviation too.
    Memory: a chunk of logits in float32 (twice with torch), dX, and dW, which is in float32 until backward.
    """
    assert 0 <= num_grad_rows <= len(hidden_RD), (num_grad_rows, hidden_RD.shape)
    backend = backend or choose_backend("auto", hidden_RD.device.type)
    backend = TORCH if hidden_RD.dtype == torch.float64 else backend
    moves = torch.is_grad_enabled() and (hidden_RD.requires_grad or weight_VD.requires_grad)
    if path.kind == "two passes" or not moves:
        options = {"temperature": temperature, "return_entropy": True, "backend": backend}
        logp_R, entropy_R = linear_logp(hidden_RD, weight_VD, target_R, **options)
        loss, metrics = pack_loss(logp_R, entropy_T=entropy_R)
        return loss, metrics | {DEVIATION: loss.new_zeros(())}
    matrices = (hidden_RD.detach(), weight_VD.detach())
    needed = (hidden_RD.requires_grad, weight_VD.requires_grad)
    with torch.no_grad():
        loss, metrics, *grads = _one_pass(
            *matrices, target_R, temperature, num_grad_rows, pack_loss, path, backend, needed
        )
    return _KnownGradients.apply(hidden_RD, weight_VD, loss, *grads), metrics


class _KnownGradients(torch.autograd.Function):
    """The loss, whose gradients are there already: backward scales them."""

    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, loss, grad_hidden_RD, grad_weight_VD):
        ctx.save_for_backward(grad_hidden_RD, grad_weight_VD)
        ctx.dtype = weight_VD.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        scale = grad_loss.view(1, 1)  # without dimensions it would be rounded to 16 bits first
        grads = [
            None if x is None else torch.mul(x, scale, out=torch.empty_like(x, dtype=ctx.dtype))
            for x in ctx.saved_tensors
        ]
        return *grads, None, None, None


def _one_pass(hidden_RD, weight_VD, target_R, temperature, num_grad_rows, pack_loss, path, backend, needed):
    """(loss, metrics, dX or None, dW in float32 or None)."""
    narrow, (num_rows, vocab) = hidden_RD.dtype, (len(hidden_RD), len(weight_VD))
    wide = torch.promote_types(narrow, torch.float32)
    is_fused = path.kind == "fused" and backend.name == "triton"
    logp_R, entropy_R = hidden_RD.new_zeros(2, num_rows, dtype=wide)
    used_KR = hidden_RD.new_zeros(2, num_rows, dtype=wide)  # derivatives in logp and entropy, as used
    rest, target_R = slice(num_grad_rows, None), target_R.contiguous()
    grad_hidden_RD = hidden_RD.new_empty(hidden_RD.shape) if needed[0] else None
    grad_weight_VD = weight_VD.new_empty(weight_VD.shape, dtype=wide) if needed[1] else None
    if needed[0]:
        grad_hidden_RD[rest] = 0
    if needed[1] and not num_grad_rows:
        grad_weight_VD.zero_()
    logp_R[rest], entropy_R[rest] = linear_logp(
        hidden_RD[rest], weight_VD, target_R[rest], temperature=temperature, return_entropy=True, backend=backend
    )
    torch._assert_async(((target_R >= 0) & (target_R < vocab)).all(), "a target is outside [0, V)")
    inputs_KR = kernel_inputs(pack_loss.keywords, wide) if is_fused else None
    options = {"temperature": temperature, "dtype": narrow}
    parts = chunks(num_grad_rows, vocab, backend, hidden_RD.device.type)
    buffer_CV = hidden_RD.new_empty(parts[0].stop if parts else 0, vocab, dtype=wide)
    for rows in parts:
        logits_CV = mm_float32(hidden_RD[rows], weight_VD.T, out=buffer_CV[: rows.stop - rows.start])
        if is_fused:
            dz_CV = clipped_pg_dlogits_(
                logits_CV, target_R, inputs_KR, logp_R, entropy_R, rows.start, pack_loss.keywords,
                max_log_ratio=path.max_log_ratio, **options,
            )  # fmt: skip
        else:
            logp_R[rows], entropy_R[rows], max_C, sum_C = row_stats_(logits_CV, target_R[rows], temperature, backend)
            loss, metrics, slopes_KR, sees_entropy = _derivatives(pack_loss, logp_R, entropy_R)
            used_KR[:, rows] = slopes_KR[:, rows]
            max_C = None if backend.name == "torch" else max_C  # the buffer has been made relative to it
            h_C = slopes_KR[1, rows] if sees_entropy else None
            dz_CV = dlogits_(
                logits_CV, target_R[rows], max_C, sum_C, entropy_R[rows], slopes_KR[0, rows], h_C, backend=backend,
                **options,
            )  # fmt: skip
        if needed[0]:
            torch.mm(dz_CV, weight_VD, out=grad_hidden_RD[rows])
        if needed[1]:
            mm_float32(dz_CV.T, hidden_RD[rows], out=grad_weight_VD, accumulate=rows.start > 0)
    if is_fused or not parts:
        loss, metrics, slopes_KR, _ = _derivatives(pack_loss, logp_R, entropy_R)
        used_KR[:, :num_grad_rows] = slopes_KR[:, :num_grad_rows]
    deviation = torch.maximum(*map(_deviation, used_KR, slopes_KR))
    return loss, metrics | {DEVIATION: deviation}, grad_hidden_RD, grad_weight_VD


def _derivatives(pack_loss: partial, logp_R: Tensor, entropy_R: Tensor) -> tuple[Tensor, dict, Tensor, bool]:
    """(loss, metrics, [2, R]: its derivatives in logp_R and in entropy_R, whether the loss sees entropies)."""
    with torch.enable_grad():
        leaves = logp_R.detach().requires_grad_(), entropy_R.detach().requires_grad_()
        loss, metrics = pack_loss(leaves[0], entropy_T=leaves[1])
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
    slopes_KR = torch.stack([torch.zeros_like(logp_R) if slope_R is None else slope_R for slope_R in slopes])
    return loss.detach(), metrics, slopes_KR, slopes[1] is not None


def _deviation(used_R: Tensor, true_R: Tensor) -> Tensor:
    """Sum of |used - true| over the sum of |true|. Equal infinities and NaNs are equal: the loss is not finite then."""
    same_R = (used_R == true_R) | (used_R.isnan() & true_R.isnan())
    size = torch.where(true_R.isfinite(), true_R, 0.0).abs().sum().clamp(min=torch.finfo(true_R.dtype).tiny)
    return torch.where(same_R, 0.0, (used_R - true_R).abs()).sum() / size


def one_pass_problem(deviation: float) -> str | None:
    """What is wrong with a step that has this `DEVIATION`: its gradients must not be applied."""
    if deviation <= MAX_DEVIATION:
        return None
    return (
        f"the gradient that was computed differs from that of loss.py by {deviation:.2g}: loss.py couples the tokens "
        "of a pack, or trains tokens without advantage, in a way that the probes at start did not see. Show it to them "
        "(`_random_pack` in run/loss_path.py), or return the path 'two passes' from `choose_loss_path` there"
    )
