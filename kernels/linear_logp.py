"""Log-probability and entropy of a linear head without [T, V] logits in memory.

For a row x of hidden_TD, temperature tau and target y:
    z = W x / tau        log p = z - logsumexp(z)        logp = log p_y        H = -sum_j p_j log p_j
and with g = dL/dlogp, h = dL/dH, the gradient dz of the logits before the temperature gives dX and dW:
    dz_j = [ g (1[j = y] - p_j) - h p_j (log p_j + H) ] / tau        dX = dz W        dW = sum_T dz^T x

Forward with Triton computes logits tile by tile in registers and merges the statistics of a row's tiles; PyTorch, for
CPU and float64, and GPUs before Hopper take chunks of rows. Backward recomputes logits chunk by chunk.

Precision: float64 inputs are computed in float64 throughout; else logits, and everything between the matmuls, are
float32. dz is rounded to the inputs' dtype once, before its two matmuls; dW is summed over chunks in float32.
Float sums have a fixed order and there are no atomics: two runs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.backend import KernelBackend, backend_for
from kernels.softmax import LN2, LOG2_E, SamplingFilter, logit_chunks, mm_float32, wide_dtype

# Rows, columns and depth of a tile of logits, by the bytes of an element: what sm_90 holds without spilling
# (tests/kernels/test_aot.py). 4 bytes: exact float32 products, without tensor cores.
TILES = {2: (128, 256, 64), 4: (32, 256, 16)}
LAUNCH = {"num_warps": 8, "num_stages": 3}


@triton.jit
def tile_stats_kernel(
    hidden, weight, target_ptr, picked_ptr, stats_ptr, num_rows, vocab, width, scale,
    WIDEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """For each row of each [ROWS, COLS] tile of hidden @ weight.T, writes to stats[column tile, :, row] its largest
    logit m and, with z = (logit - m) scale, the sums of exp(z) and exp(z) z; to picked[row] the target's logit.

    hidden, weight: descriptors, which read 0 outside. A program walks many tiles; 16 row tiles share a column of
    weights while it is in L2. WIDEN: for the interpreter, whose dot reads 16-bit floats as integers."""
    row_tiles, col_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(vocab, COLS)
    band = 16 * col_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=True):
        height = tl.minimum(row_tiles - tile // band * 16, 16)
        row_tile, col_tile = tile // band * 16 + tile % band % height, tile % band // height
        logit = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, width, DEPTH):
            a, b = hidden.load([row_tile * ROWS, k]), weight.load([col_tile * COLS, k])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            logit = tl.dot(a, b.T, logit, input_precision="ieee")
        row, col = row_tile * ROWS + tl.arange(0, ROWS), col_tile * COLS + tl.arange(0, COLS)
        inside = row < num_rows
        target = tl.load(target_ptr + row, inside, -1)
        picked = tl.sum(tl.where(col[None, :] == target[:, None], logit, 0.0), 1)
        tl.store(picked_ptr + row, picked, inside & (target // COLS == col_tile))
        logit = tl.where(col[None, :] < vocab, logit, -1e30)  # finite, also scaled: exp(z) and exp(z) z are 0, not NaN
        largest = tl.max(logit, 1)
        logit = (logit - largest[:, None]) * (scale * LOG2_E)  # relative to the largest: exact, however large
        exp = tl.exp2(logit)
        at = stats_ptr + col_tile.to(tl.int64) * num_rows * 3 + row
        tl.store(at, largest, inside)
        tl.store(at + num_rows, tl.sum(exp, 1), inside)
        tl.store(at + 2 * num_rows, tl.sum(exp * logit, 1) * LN2, inside)


def _descriptor(x_ND: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """For TMA, which needs rows at multiples of 16 bytes: a tensor without them is copied into longer rows."""
    step = 16 // x_ND.element_size()
    if x_ND.data_ptr() % 16 or x_ND.stride(0) % step or x_ND.stride(1) != 1:
        copy_ND = x_ND.new_empty(len(x_ND), triton.cdiv(x_ND.shape[1], step) * step)[:, : x_ND.shape[1]]
        x_ND = copy_ND.copy_(x_ND)
    return TensorDescriptor(x_ND, list(x_ND.shape), list(x_ND.stride()), list(block))


def _forward_triton(hidden_TD, weight_VD, target_T, vocab, temperature):
    num_rows, width = hidden_TD.shape
    rows, cols, depth = TILES[hidden_TD.element_size()]
    stats_NKT = hidden_TD.new_empty(triton.cdiv(vocab, cols), 3, num_rows, dtype=torch.float32)
    picked_T = stats_NKT.new_empty(num_rows)
    if num_rows:
        programs = torch.cuda.get_device_properties(hidden_TD.device).multi_processor_count if hidden_TD.is_cuda else 2
        tile_stats_kernel[(programs,)](
            _descriptor(hidden_TD, (rows, depth)), _descriptor(weight_VD, (cols, depth)),
            target_T, picked_T, stats_NKT, num_rows, vocab, width, 1 / temperature,
            WIDEN=not hidden_TD.is_cuda, ROWS=rows, COLS=cols, DEPTH=depth, **LAUNCH,
        )  # fmt: skip
    largest_NT, sum_NT, weighted_NT = stats_NKT.unbind(1)
    max_T = largest_NT.amax(0)
    rise_NT = (largest_NT - max_T).div_(temperature)  # the tile's largest minus the row's, <= 0
    factor_NT = rise_NT.exp()
    sum_NT = factor_NT * sum_NT
    sum_T = sum_NT.sum(0)
    entropy_T = sum_T.log() - (rise_NT * sum_NT + factor_NT * weighted_NT).sum(0) / sum_T
    return (picked_T - max_T) / temperature - sum_T.log(), entropy_T


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, target_T, vocab, temperature, backend, sampling_filter):
        ctx.save_for_backward(hidden_TD, weight_VD, target_T)
        ctx.options = vocab, temperature, backend, sampling_filter
        ctx.set_materialize_grads(False)  # entropy as a metric only: its gradient is None and costs nothing
        torch._assert_async(((target_T >= 0) & (target_T < vocab)).all(), "a target is outside the vocabulary")
        has_tma = not hidden_TD.is_cuda or torch.cuda.get_device_capability(hidden_TD.device) >= (9, 0)
        # A filter needs rows of logits. Without TMA, before Hopper, Triton would read tiles 2 bytes at a time.
        if backend.name == "triton" and sampling_filter is None and has_tma:
            return _forward_triton(hidden_TD, weight_VD, target_T, vocab, temperature)
        stats_KT = hidden_TD.new_empty(2, len(hidden_TD), dtype=wide_dtype(hidden_TD))
        for chunk in logit_chunks(hidden_TD, weight_VD, target_T, *ctx.options):
            stats_KT[:, chunk.rows] = chunk.logp_and_entropy()
        return stats_KT[0], stats_KT[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T):
        hidden_TD, weight_VD, target_T = ctx.saved_tensors
        wide = wide_dtype(weight_VD)
        if grad_logp_T is None:
            grad_logp_T = hidden_TD.new_zeros(len(hidden_TD), dtype=wide)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_TD = hidden_TD.new_empty(hidden_TD.shape) if need_hidden else None
        grad_weight_VD = weight_VD.new_zeros(weight_VD.shape, dtype=wide) if need_weight else None
        for chunk in logit_chunks(hidden_TD, weight_VD, target_T, *ctx.options):
            rows = chunk.rows
            chunk.logp_and_entropy()
            dz_CV = chunk.dlogits_(grad_logp_T[rows], None if grad_entropy_T is None else grad_entropy_T[rows])
            if need_hidden:
                torch.mm(dz_CV, weight_VD[: dz_CV.shape[1]], out=grad_hidden_TD[rows])
            if need_weight:
                mm_float32(dz_CV.T, hidden_TD[rows], out=grad_weight_VD[: dz_CV.shape[1]], accumulate=True)
            del chunk, dz_CV  # frees the buffer before dW is cast
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype) if need_weight else None, *[None] * 5


def linear_logp(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    *,
    vocab: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    backend: KernelBackend | None = None,
    sampling_filter: SamplingFilter | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden_TD @ weight_VD[:vocab].T / temperature) at target_T: logp_T or (logp_T, entropy_T), in nats.

    hidden_TD, weight_VD: one floating dtype and device, any strides.
    vocab: the tokenizer's number of ids; None = V. Later, padded rows have gradients of exactly 0.
    target_T: int64 ids in [0, vocab); another id is an error (a device assert on CUDA). T = 0 is allowed.
    backend: None = Triton on CUDA, PyTorch elsewhere; float64 always goes to PyTorch.
    sampling_filter: the softmax is over the logits that it keeps; logp is -inf where it cuts the target.
    Outputs are float32 (float64 for float64 inputs), differentiable once in hidden_TD and weight_VD.
    Memory: dX, dW (twice for 16-bit dtypes), one chunk of logits, with torch two.
    """
    shapes = (hidden_TD.shape, weight_VD.shape, target_T.shape)
    assert hidden_TD.dim() == weight_VD.dim() == 2 and target_T.shape == hidden_TD.shape[:1], shapes
    vocab = len(weight_VD) if vocab is None else vocab
    assert hidden_TD.shape[1] == weight_VD.shape[1] and 0 < vocab <= len(weight_VD), (*shapes, vocab)
    assert hidden_TD.dtype == weight_VD.dtype and temperature > 0, (hidden_TD.dtype, weight_VD.dtype, temperature)
    backend = backend_for(hidden_TD, backend)
    inputs = (hidden_TD, weight_VD, target_T.contiguous())
    logp_T, entropy_T = _LinearLogp.apply(*inputs, vocab, temperature, backend, sampling_filter)
    return (logp_T, entropy_T) if return_entropy else logp_T
