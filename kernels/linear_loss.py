"""Any loss of a linear head's log-probabilities and entropies, with its gradients, in one pass over the logits.

`linear_logp` with a loss outside computes the logits twice, in forward and in backward: matmuls of 8 R V D flops. If
the derivatives of the loss at a token need no other token, the token's row of logits gives them: then forward computes
both gradients chunk by chunk, 6 R V D, and backward only scales them.

The loss is a function that is called, never a copy. After each chunk it is called with the log-probabilities and
entropies of the whole pack, 0 for rows still to come; autograd gives its derivatives, and the derivatives at the
chunk's rows are used. After the last chunk all rows are known: that call gives the loss, the metrics, and the true
derivatives of all rows. If they differ from those used, the loss couples tokens: the gradient is wrong (`DEVIATION`).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.backend import LossPath
from kernels.linear_logp import linear_logp
from kernels.softmax import logit_chunks, mm_float32, wide_dtype

# A metric: the relative error of the derivatives used. 0 if the loss does not couple tokens.
DEVIATION = "one_pass_deviation_max"
MAX_DEVIATION = 1e-6  # float sums in another order stay below


def linear_loss(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    *,
    num_grad_rows: int,
    pack_loss: partial,
    path: LossPath,
    **options,
) -> tuple[Tensor, dict]:
    """(loss, metrics and `DEVIATION`) of pack_loss on log softmax(hidden_RD @ weight_VD[:vocab].T / temperature).

    hidden_RD, weight_VD, target_R, precision and options (vocab, temperature, backend, sampling_filter): as
    `linear_logp`; differentiable once in the first two.
    pack_loss: `loss.policy_loss` with all its arguments but logp_R and entropy_R.
    num_grad_rows: in one pass, only the first num_grad_rows rows get a gradient; the rest get logp and entropy alone.
    If the loss has a gradient there, that counts in `DEVIATION` too.
    With sampling_filter and ref_logp_R, two passes: the KL is of unfiltered log-probabilities.
    Memory: a chunk of logits in float32 (twice with torch), dX, and dW, which is in float32 until backward.
    """
    assert 0 <= num_grad_rows <= len(hidden_RD), (num_grad_rows, hidden_RD.shape)
    needs_grad = torch.is_grad_enabled() and (hidden_RD.requires_grad or weight_VD.requires_grad)
    needs_unfiltered = options.get("sampling_filter") is not None and pack_loss.keywords.get("ref_logp_R") is not None
    if path.kind == "two passes" or not needs_grad:
        logp_R, entropy_R = linear_logp(hidden_RD, weight_VD, target_R, return_entropy=True, **options)
        if needs_unfiltered:
            unfiltered_logp_R = linear_logp(hidden_RD, weight_VD, target_R, **options | {"sampling_filter": None})
            pack_loss = partial(pack_loss, unfiltered_logp_R=unfiltered_logp_R)
        loss, metrics = pack_loss(logp_R, entropy_R=entropy_R)
        return loss, metrics | {DEVIATION: loss.new_zeros(())}
    assert not needs_unfiltered, path
    return _OnePass.apply(hidden_RD, weight_VD, target_R.contiguous(), num_grad_rows, pack_loss, options)


class _OnePass(torch.autograd.Function):
    """Forward computes (loss, metrics) and both gradients; backward scales the gradients."""

    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, target_R, num_grad_rows, pack_loss, options):
        wide, rest = wide_dtype(hidden_RD), slice(num_grad_rows, None)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_RD = hidden_RD.new_zeros(hidden_RD.shape) if need_hidden else None
        grad_weight_VD = weight_VD.new_empty(weight_VD.shape, dtype=wide) if need_weight else None
        if need_weight:
            grad_weight_VD[options.get("vocab") if num_grad_rows else 0 :] = 0  # what no chunk writes
        stats_KR = hidden_RD.new_zeros(2, len(hidden_RD), dtype=wide)  # log-probability and entropy
        used_KR = torch.zeros_like(stats_KR)  # the derivatives that the gradients use
        of_rest = linear_logp(hidden_RD[rest], weight_VD, target_R[rest], return_entropy=True, **options)
        stats_KR[0, rest], stats_KR[1, rest] = of_rest
        for chunk in logit_chunks(hidden_RD[:num_grad_rows], weight_VD, target_R, **options):
            rows = chunk.rows
            stats_KR[:, rows] = chunk.logp_and_entropy()
            loss, metrics, slopes_KR, sees_entropy = derivatives(pack_loss, stats_KR)
            used_KR[:, rows] = slopes_KR[:, rows]
            dz_CV = chunk.dlogits_(slopes_KR[0, rows], slopes_KR[1, rows] if sees_entropy else None)
            if need_hidden:
                torch.mm(dz_CV, weight_VD[: dz_CV.shape[1]], out=grad_hidden_RD[rows])
            if need_weight:
                mm_float32(dz_CV.T, hidden_RD[rows], grad_weight_VD[: dz_CV.shape[1]], accumulate=rows.start > 0)
        if not num_grad_rows:
            loss, metrics, slopes_KR, _ = derivatives(pack_loss, stats_KR)
        ctx.save_for_backward(grad_hidden_RD, grad_weight_VD)
        ctx.dtype = hidden_RD.dtype
        return loss, metrics | {DEVIATION: torch.maximum(*map(_deviation, used_KR, slopes_KR))}

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        scale = grad_loss.view(1, 1)  # a 0-dim tensor would be rounded to 16 bits first
        grads = [
            None if x is None else torch.mul(x, scale, out=torch.empty_like(x, dtype=ctx.dtype))
            for x in ctx.saved_tensors
        ]
        return *grads, *[None] * 4


def derivatives(pack_loss: Callable, stats_KR: Tensor) -> tuple[Tensor, dict, Tensor, bool]:
    """(loss, metrics, the loss's derivatives in stats_KR, whether it uses entropies). stats_KR: logp, entropy."""
    with torch.enable_grad():
        leaves = [x_R.detach().requires_grad_() for x_R in stats_KR]
        loss, metrics = pack_loss(leaves[0], entropy_R=leaves[1])
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
    slopes_KR = torch.stack([torch.zeros_like(stats_KR[0]) if slope_R is None else slope_R for slope_R in slopes])
    return loss.detach(), metrics, slopes_KR, slopes[1] is not None


def _deviation(used_R: Tensor, true_R: Tensor) -> Tensor:
    """Sum of |used - true| / sum of |true|. Equal infinities and NaNs count as equal: the loss is not finite then."""
    same_R = (used_R == true_R) | (used_R.isnan() & true_R.isnan())
    size = torch.where(true_R.isfinite(), true_R, 0.0).abs().sum().clamp(min=torch.finfo(true_R.dtype).tiny)
    return torch.where(same_R, 0.0, (used_R - true_R).abs()).sum() / size


def one_pass_problem(deviation: float) -> str | None:
    """The error of a step with this `DEVIATION`, if its gradients must not be applied."""
    if deviation <= MAX_DEVIATION:
        return None
    return (
        f"the computed gradient differs from the gradient of loss.py by {deviation:.2g}: loss.py couples the tokens "
        "of a pack, or trains tokens without advantage, in a way that the probes at start missed. Extend `_probe` "
        "in loss_path.py, or return the path 'two passes' from `choose_loss_path`"
    )
