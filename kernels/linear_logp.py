"""Log-probability and entropy of a linear head without [T, V] logits in memory.

For a row x of hidden_TD, temperature tau and target y:
    z = W x / tau        log p = z - logsumexp(z)        logp = log p_y        H = -sum_j p_j log p_j
and with g = dL/dlogp, h = dL/dH, the gradient of the logits before the temperature, dz, gives the two others:
    dz_j = [ g (1[j = y] - p_j) - h p_j (log p_j + H) ] / tau        dX = dz W        dW = sum_T dz^T x

Rows go through in chunks. Forward keeps two numbers per row: the largest logit m and s = sum exp(z - m).
Backward recomputes each chunk's logits: matmuls of 8 T V D flops; keeping the logits would cost 6 T V D.

Precision: float64 inputs are computed in float64 throughout. Others are multiplied in their own dtype, and
everything between the matmuls is float32. With bfloat16 or float16 inputs the logits are therefore rounded to
16 bits once, as vLLM's head does by default, dz once before its two matmuls, each chunk's dW once before it
is summed in float32. Autocast changes nothing: every matmul writes into an output of given dtype.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of a chunk: at most this many elements (one row if V is larger). In float32: 64 MiB on CPU, and 1 GiB
# on a GPU, where dW's matmul, which reads and writes all of dW, waits for memory below about a thousand rows.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}


def reference(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature: float = 1.0):
    """(logp_T, entropy_T) by the definition and autograd, logits and all: what the chunked op must equal."""
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    all_logp_TV = ((hidden_TD @ weight_VD.T).to(wide) / temperature).log_softmax(-1)
    entropy_T = -(all_logp_TV.exp() * all_logp_TV).sum(-1)
    return all_logp_TV.gather(1, target_T[:, None])[:, 0], entropy_T


def _chunks(num_rows: int, vocab: int, device: str) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS[device] // vocab)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, buffer_CV: Tensor) -> Tensor:
    """z of one chunk, in the first rows of the buffer."""
    z_CV = buffer_CV[: len(hidden_CD)]
    if hidden_CD.dtype == z_CV.dtype:
        torch.mm(hidden_CD, weight_VD.T, out=z_CV)
    else:
        z_CV.copy_(torch.mm(hidden_CD, weight_VD.T, out=hidden_CD.new_empty(z_CV.shape)))
    return z_CV.div_(temperature) if temperature != 1 else z_CV


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, target_T, temperature, return_entropy):
        num_rows, vocab = len(hidden_TD), len(weight_VD)
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logp_T, max_T, sum_T = (hidden_TD.new_empty(num_rows, dtype=wide) for _ in range(3))
        entropy_T = torch.empty_like(logp_T) if return_entropy else None
        chunks = _chunks(num_rows, vocab, hidden_TD.device.type)
        buffer_CV = hidden_TD.new_empty(chunks[0].stop if chunks else 0, vocab, dtype=wide)
        spare_CV = torch.empty_like(buffer_CV) if return_entropy else buffer_CV
        for rows in chunks:
            z_CV = _logits(hidden_TD[rows], weight_VD, temperature, buffer_CV)
            target_logit_C = z_CV.gather(1, target_T[rows, None])[:, 0]
            torch.amax(z_CV, 1, out=max_T[rows])
            z_CV.sub_(max_T[rows, None])  # from here on z is relative to its largest: exact, however large
            exp_CV = torch.exp(z_CV, out=spare_CV[: len(z_CV)])
            torch.sum(exp_CV, 1, out=sum_T[rows])
            log_sum_C = sum_T[rows].log()
            logp_T[rows] = target_logit_C - max_T[rows] - log_sum_C
            if return_entropy:
                entropy_T[rows] = log_sum_C - z_CV.mul_(exp_CV).sum(1) / sum_T[rows]
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, max_T, sum_T, entropy_T)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # entropy as a metric only: its gradient is None and costs nothing
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T):
        hidden_TD, weight_VD, target_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(max_T)
        wide, (vocab, narrow) = max_T.dtype, (len(weight_VD), weight_VD.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_TD = hidden_TD.new_empty(hidden_TD.shape) if need_hidden else None
        grad_weight_VD = weight_VD.new_zeros(weight_VD.shape, dtype=wide) if need_weight else None
        product_VD = weight_VD.new_empty(weight_VD.shape) if need_weight and narrow != wide else None
        chunks = _chunks(len(hidden_TD), vocab, hidden_TD.device.type)
        buffer_CV = hidden_TD.new_empty(chunks[0].stop if chunks else 0, vocab, dtype=wide)
        spare_CV = torch.empty_like(buffer_CV) if grad_entropy_T is not None else buffer_CV
        for rows in chunks:
            z_CV = _logits(hidden_TD[rows], weight_VD, ctx.temperature, buffer_CV).sub_(max_T[rows, None])
            exp_CV = torch.exp(z_CV, out=spare_CV[: len(z_CV)])
            g_C, scale_C = grad_logp_T[rows], 1 / (sum_T[rows] * ctx.temperature)
            if grad_entropy_T is None:
                dz_CV = z_CV.mul_((-g_C * scale_C)[:, None])  # z_CV holds exp(z)
            else:  # p (g + h (log p + H)), with log p = z - log s and p = exp(z) / s
                h_C, offset_C = grad_entropy_T[rows], entropy_T[rows] - sum_T[rows].log()
                dz_CV = z_CV.mul_((-h_C * scale_C)[:, None]).sub_(((g_C + h_C * offset_C) * scale_C)[:, None])
                dz_CV.mul_(exp_CV)
            dz_CV[torch.arange(len(dz_CV), device=dz_CV.device), target_T[rows]] += g_C / ctx.temperature
            dz_CV = dz_CV.to(narrow)
            if need_hidden:
                torch.mm(dz_CV, weight_VD, out=grad_hidden_TD[rows])
            if product_VD is not None:
                grad_weight_VD.add_(torch.mm(dz_CV.T, hidden_TD[rows], out=product_VD))
            elif need_weight:
                torch.addmm(grad_weight_VD, dz_CV.T, hidden_TD[rows], out=grad_weight_VD)
        return grad_hidden_TD, grad_weight_VD.to(narrow) if need_weight else None, None, None, None


def linear_logp(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, temperature: float = 1.0, return_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden_TD @ weight_VD.T / temperature) at target_T: logp_T or (logp_T, entropy_T), in nats.

    hidden_TD, weight_VD: one floating dtype and device; any strides: `weight[:vocab_size]` drops padded rows.
    target_T: int64 ids in [0, V); another id is an index error (a device assert on CUDA). T = 0 is allowed.
    Outputs are float32 (float64 for float64 inputs), differentiable once in hidden_TD and weight_VD.
    Memory: dX, dW (twice for 16-bit dtypes), one chunk of logits, a second one if entropy takes part.
    """
    shapes = (hidden_TD.shape, weight_VD.shape, target_T.shape)
    assert hidden_TD.dim() == weight_VD.dim() == 2 and target_T.shape == hidden_TD.shape[:1], shapes
    assert hidden_TD.shape[1] == weight_VD.shape[1] and len(weight_VD) > 0, shapes
    assert hidden_TD.dtype == weight_VD.dtype, (hidden_TD.dtype, weight_VD.dtype)
    assert temperature > 0, temperature
    logp_T, entropy_T = _LinearLogp.apply(hidden_TD, weight_VD, target_T, temperature, return_entropy)
    return (logp_T, entropy_T) if return_entropy else logp_T
