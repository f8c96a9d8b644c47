"""Log-probability and entropy of a linear head without [T, V] logits in memory.

For a row x of hidden_TD, temperature tau and target y:
    z = W x / tau        log p = z - logsumexp(z)        logp = log p_y        H = -sum_j p_j log p_j
and with g = dL/dlogp, h = dL/dH, the gradient dz of W x (not of z) gives dX and dW:
    dz_j = [ g (1[j = y] - p_j) - h p_j (log p_j + H) ] / tau        dX = dz W        dW = sum_T dz^T x
With a cap c (Gemma 2, arXiv 2408.00118, section 2), c tanh(W x / c) is in the place of W x, and dz_j has the factor
1 - tanh(W_j x / c)^2. At other ids, log p_j = log p_y + (W_j x - W_y x) / tau.

Forward computes logits chunk by chunk and keeps a row's statistics; backward computes them again.
In examples/naive.py this is `logp_GT = logp_GTV.gather(-1, token_GT[:, 1:, None])[..., 0]`.

Precision: float64 inputs are computed in float64 throughout; else logits, and everything between the matmuls, are
float32. dz is rounded to the inputs' dtype once, before its two matmuls; dW is summed over chunks in float32.
Float sums have a fixed order and there are no atomics: two runs give the same bits.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.chunks import logit_chunks, write_gradients
from kernels.logits import LogitOptions
from kernels.matmul import wide_dtype


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, target_T, options, ids_TJ, finds_ids):
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, ids_TJ)
        ctx.options = options
        ctx.set_materialize_grads(False)  # entropy as a metric only: its gradient is None and costs nothing
        stats_2T = hidden_TD.new_empty(2, len(hidden_TD), dtype=wide_dtype(hidden_TD))
        difference_TJ = None if ids_TJ is None else stats_2T.new_empty(ids_TJ.shape)
        for chunk in logit_chunks(hidden_TD, weight_VD, target_T, options):
            rows = chunk.rows
            if finds_ids:
                ids_TJ[rows] = chunk.logits_CV[:, : options.vocab].topk(ids_TJ.shape[1], 1).indices
            if ids_TJ is not None:
                target_logit_C1 = chunk.logits_CV.gather(1, chunk.target_C[:, None])
                difference_CJ = chunk.logits_CV.gather(1, ids_TJ[rows]) - target_logit_C1
                difference_TJ[rows] = difference_CJ / options.temperature
            stats_2T[:, rows] = chunk.logp_and_entropy()
        return stats_2T[0], stats_2T[1], difference_TJ

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T, grad_difference_TJ):
        hidden_TD, weight_VD, target_T, ids_TJ = ctx.saved_tensors
        options = ctx.options
        wide = wide_dtype(weight_VD)
        if grad_logp_T is None:
            grad_logp_T = hidden_TD.new_zeros(len(hidden_TD), dtype=wide)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_TD = hidden_TD.new_empty(hidden_TD.shape) if need_hidden else None
        grad_weight_VD = weight_VD.new_zeros(weight_VD.shape, dtype=wide) if need_weight else None
        for chunk in logit_chunks(hidden_TD, weight_VD, target_T, options):
            rows = chunk.rows
            if grad_difference_TJ is not None:
                ids_CJ = ids_TJ[rows]
                target_C1 = chunk.target_C[:, None]
                dlogit_CJ = grad_difference_TJ[rows] / options.temperature
                dlogit_of_target_C1 = -grad_difference_TJ[rows].sum(1, keepdim=True) / options.temperature
                if options.softcap is not None:
                    dlogit_CJ *= _slope_of_cap(chunk.logits_CV.gather(1, ids_CJ), options.softcap)
                    dlogit_of_target_C1 *= _slope_of_cap(chunk.logits_CV.gather(1, target_C1), options.softcap)
            chunk.logp_and_entropy()
            g_C = grad_logp_T[rows]
            h_C = None if grad_entropy_T is None else grad_entropy_T[rows]
            dz_CV = chunk.dlogits(g_C, h_C)
            if grad_difference_TJ is not None:
                # The target may be among the ids: in two calls, the sum has one order.
                dz_CV.scatter_add_(1, target_C1, dlogit_of_target_C1.to(dz_CV.dtype))
                dz_CV.scatter_add_(1, ids_CJ, dlogit_CJ.to(dz_CV.dtype))
            write_gradients(dz_CV, rows, hidden_TD, weight_VD, grad_hidden_TD, grad_weight_VD, accumulate=True)
            del chunk, dz_CV  # frees the buffer before dW is cast
        if need_weight:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None, None


def _slope_of_cap(capped: Tensor, softcap: float) -> Tensor:
    return 1 - (capped / softcap).square()


def linear_logp(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    options: LogitOptions,
    *,
    ids_TJ: Tensor | None = None,
    top_k: int | None = None,
) -> tuple[Tensor, ...]:
    """(logp_T, entropy_T), in nats: log softmax(hidden_TD @ weight_VD[:vocab].T / temperature) at target_T, and the
    entropy of that distribution.

    hidden_TD, weight_VD: one floating dtype and device, any strides. Rows of padding have gradients of exactly 0.
    target_T: int64 ids in [0, vocab); another id is an error (a device assert on CUDA). T = 0 is allowed.
    ids_TJ: more int64 ids of each row, different ones; or top_k: its likeliest, likeliest first. The result is then
    (logp_T, entropy_T, logp_TJ, ids_TJ). Not with a sampling_filter.
    Outputs are float32 (float64 for float64 inputs), differentiable once in hidden_TD and weight_VD.
    Memory: dX, dW (twice for 16-bit dtypes), one chunk of logits, with torch two, or three with a cap.
    """
    shapes = (hidden_TD.shape, weight_VD.shape, target_T.shape)
    assert hidden_TD.dim() == weight_VD.dim() == 2 and target_T.shape == hidden_TD.shape[:1], shapes
    assert hidden_TD.shape[1] == weight_VD.shape[1], shapes
    assert hidden_TD.dtype == weight_VD.dtype and options.temperature > 0, (hidden_TD.dtype, weight_VD.dtype, options)
    if top_k is not None:
        ids_TJ = target_T.new_empty(len(target_T), min(top_k, options.vocab or len(weight_VD)))
    assert ids_TJ is None or options.sampling_filter is None, options
    inputs = (hidden_TD, weight_VD, target_T.contiguous(), options, ids_TJ, top_k is not None)
    logp_T, entropy_T, difference_TJ = _LinearLogp.apply(*inputs)
    if ids_TJ is None:
        return logp_T, entropy_T
    return logp_T, entropy_T, logp_T[:, None] + difference_TJ, ids_TJ
