"""Rows of logits, a chunk of them in one buffer: matmuls in float32, softmax statistics, gradients in place.

With z = logits / temperature, p = softmax(z), entropy H = -sum p log p, target y and the loss's derivatives g in
log p_y and h in H, the gradient of a row of logits is
    dz_j = [ g (1[j = y] - p_j) - h p_j (log p_j + H) ] / temperature
A row's statistics are kept relative to its largest logit m, which is exact however large logits are: m, and
s = sum exp((logit - m) / temperature).

dz is written over the logits, by Triton as 16 bits over 32 where the inputs have 16: one buffer, and the second read
of a row finds some of it in L2. Float sums have a fixed order and there are no atomics: two runs give the same bits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import KernelBackend

# Logits of a chunk of the torch backend: at most this many elements (one row if V is larger). In float32: 64 MiB on
# CPU, and 1 GiB on a GPU, where dW's matmul, which reads and writes all of dW, waits for memory below 1000 rows.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
BLOCK = 8192  # columns that a program has in registers: 16 a thread
LN2, LOG2_E = tl.constexpr(math.log(2)), tl.constexpr(math.log2(math.e))


def chunks(num_rows: int, vocab: int, backend: KernelBackend, device_type: str) -> list[slice]:
    """Rows whose logits are in memory together."""
    size = backend.rows(vocab) if backend.name == "triton" else max(1, CHUNK_ELEMENTS[device_type] // vocab)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def mm_float32(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b, computed in out's dtype: 16-bit factors may have a float32 product. Autocast, which
    knows nothing of outputs that are given, leaves it alone."""
    dtype = {}
    if a.dtype != out.dtype:
        if a.is_cuda:
            dtype = {"out_dtype": out.dtype}  # tensor cores sum in float32 anyway (torch >= 2.8)
        else:
            a, b = a.to(out.dtype), b.to(out.dtype)
    if accumulate:
        return torch.addmm(out, a, b, **dtype, out=out)
    return torch.mm(a, b, **dtype, out=out)


def row_stats_(
    logits_CV: Tensor, target_C: Tensor, temperature: float, backend: KernelBackend, return_entropy: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(logp_C, entropy_C or None, max_C, sum_C): max_C is m; sum_C is s, with Triton its log2.

    PyTorch leaves logits - m in the buffer where the entropy is asked for, which takes memory for a second buffer; else
    nothing of use. Triton leaves the logits as they are.
    """
    if backend.name == "triton":
        stats_KC = logits_CV.new_empty(4, len(logits_CV))
        row_stats_kernel[(len(logits_CV),)](
            logits_CV, target_C, stats_KC, len(logits_CV), logits_CV.shape[1], 1 / temperature,
            **launch_options(logits_CV.shape[1]),
        )  # fmt: skip
        return tuple(stats_KC)
    max_C = logits_CV.amax(1)
    z_CV = logits_CV.sub_(max_C[:, None])
    target_C = z_CV.gather(1, target_C[:, None])[:, 0] / temperature
    exp_CV = z_CV.div(temperature).exp_() if return_entropy else z_CV.div_(temperature).exp_()
    sum_C = exp_CV.sum(1)
    log_sum_C = sum_C.log()
    entropy_C = log_sum_C - exp_CV.mul_(z_CV).sum(1) / (sum_C * temperature) if return_entropy else None
    return target_C - log_sum_C, entropy_C, max_C, sum_C


def dlogits_(
    logits_CV: Tensor,
    target_C: Tensor,
    max_C: Tensor | None,
    sum_C: Tensor | None,
    entropy_C: Tensor | None,
    g_C: Tensor,
    h_C: Tensor | None,
    *,
    temperature: float,
    dtype: torch.dtype,
    backend: KernelBackend,
) -> Tensor:
    """dz_CV in `dtype`, in the memory of the contiguous logits_CV with Triton: for 16 bits its rows are 2 V apart.

    max_C, sum_C, entropy_C: as from `row_stats_`. max_C None: with PyTorch, the buffer holds logits - m already; with
    Triton, statistics are taken from the logits once more. h_C None: 0, and PyTorch does not read entropy_C.
    """
    if backend.name == "triton":
        dlogits_CV, vocab = narrow_view(logits_CV, dtype), logits_CV.shape[1]
        g_C = g_C.contiguous()
        h_or_any_C = g_C if h_C is None else h_C.contiguous()  # what is not there is not read
        stats = (g_C, g_C, g_C) if max_C is None else (max_C, sum_C, entropy_C)
        dlogits_kernel[(len(logits_CV),)](
            logits_CV, dlogits_CV, target_C, g_C, h_or_any_C, *stats, vocab, dlogits_CV.stride(0), 1 / temperature,
            HAS_STATS=max_C is not None, ENTROPY=h_C is not None, **launch_options(vocab),
        )  # fmt: skip
        return dlogits_CV
    z_CV = logits_CV if max_C is None else logits_CV.sub_(max_C[:, None])
    if temperature != 1:
        z_CV.div_(temperature)
    scale_C = 1 / (sum_C * temperature)
    if h_C is None:
        dz_CV = z_CV.exp_().mul_((-g_C * scale_C)[:, None])
    else:  # -p (g + h (log p + H)) with log p = z - log s
        exp_CV = z_CV.exp()
        offset_C = g_C + h_C * (entropy_C - sum_C.log())
        dz_CV = z_CV.mul_((-h_C * scale_C)[:, None]).sub_((offset_C * scale_C)[:, None]).mul_(exp_CV)
    dz_CV[torch.arange(len(dz_CV), device=dz_CV.device), target_C] += g_C / temperature
    return dz_CV.to(dtype)


def narrow_view(logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """[C, V] of a dtype of the same size or half of it in the first bytes of each row of the contiguous logits_CV."""
    assert logits_CV.is_contiguous(), logits_CV.stride()
    return logits_CV.view(dtype)[:, : logits_CV.shape[1]]


def launch_options(vocab: int) -> dict[str, int]:
    """Block of columns and warps of a program that owns a row."""
    block = min(BLOCK, max(16, triton.next_power_of_2(vocab)))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


@triton.jit
def row_stats(logits, vocab, scale, BLOCK: tl.constexpr):
    """Of the row that starts at `logits`, with scale = 1 / temperature: m, log2 s, and the sum of
    softmax(z) (z - m) log2(e), so that logp = (logit - m) scale - ln2 log2 s and H = ln2 (log2 s - that sum)."""
    largest, total, weighted = -1e30, 0.0, 0.0  # finite, as what is outside: exp gives 0, and 0 * it is 0, not NaN
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, column < vocab, -1e30)
        before, largest = largest, tl.maximum(largest, tl.max(logit, 0))
        rise = (before - largest) * (scale * LOG2_E)
        z = (logit - largest) * (scale * LOG2_E)
        exp = tl.exp2(z)
        weighted = tl.exp2(rise) * (weighted + rise * total) + tl.sum(exp * z, 0)
        total = tl.exp2(rise) * total + tl.sum(exp, 0)
    return largest, tl.log2(total), weighted / total


@triton.jit
def write_dlogits(
    logits, dlogits, vocab, target, largest, log2_sum, entropy, g, h, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes dz of the row that starts at `logits` to `dlogits`, the same address, elements as wide or half as wide.

    The program owns the row and goes from left to right: narrow elements land on logits of this block or of earlier
    ones, all of which are read, since every thread waits at the barrier between its load and its store."""
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        log2_p = (tl.load(logits + column, column < vocab, -1e30) - largest) * (scale * LOG2_E) - log2_sum
        slope = g
        if ENTROPY:
            slope = g + h * (log2_p * LN2 + entropy)
        dz = scale * (tl.where(column == target, g, 0.0) - tl.exp2(log2_p) * slope)
        tl.debug_barrier()
        tl.store(dlogits + column, dz.to(dlogits.dtype.element_ty), column < vocab)


@triton.jit(do_not_specialize=["num_rows"])
def row_stats_kernel(logits_ptr, target_ptr, stats_ptr, num_rows, vocab, scale, BLOCK: tl.constexpr):
    """A program per row writes logp, entropy, m and log2 s of it into stats, [4, num_rows]."""
    row = tl.program_id(0).to(tl.int64)  # before it is multiplied: rows times vocab passes 2^31
    logits, stats = logits_ptr + row * vocab, stats_ptr + row
    largest, log2_sum, weighted = row_stats(logits, vocab, scale, BLOCK)
    tl.store(stats, (tl.load(logits + tl.load(target_ptr + row)) - largest) * scale - log2_sum * LN2)
    tl.store(stats + num_rows, (log2_sum - weighted) * LN2)
    tl.store(stats + 2 * num_rows, largest)
    tl.store(stats + 3 * num_rows, log2_sum)


@triton.jit
def dlogits_kernel(
    logits_ptr, dlogits_ptr, target_ptr, g_ptr, h_ptr, max_ptr, log2_sum_ptr, entropy_ptr, vocab, row_stride, scale,
    HAS_STATS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per row; row_stride: of dlogits. Statistics must be of these very logits: with those of another matmul,
    1 - p of a sure token would be the difference of the two."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * vocab
    if HAS_STATS:
        largest, log2_sum = tl.load(max_ptr + row), tl.load(log2_sum_ptr + row)
        entropy = tl.load(entropy_ptr + row)
    else:
        largest, log2_sum, weighted = row_stats(logits, vocab, scale, BLOCK)
        entropy = (log2_sum - weighted) * LN2
    h = 0.0
    if ENTROPY:
        h = tl.load(h_ptr + row)
    write_dlogits(
        logits, dlogits_ptr + row * row_stride, vocab, tl.load(target_ptr + row), largest, log2_sum, entropy,
        tl.load(g_ptr + row), h, scale, ENTROPY, BLOCK,
    )  # fmt: skip
