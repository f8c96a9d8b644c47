"""Chunks of rows of logits in one buffer: matmuls in float32, softmax statistics, gradients in place.

z, p, H, g, h, dz: as in linear_logp.py. A row's statistics are its largest logit m and s = sum exp((logit - m) /
temperature): exact, however large logits are.

dz overwrites the logits in their buffer. With 16-bit inputs Triton writes 16-bit dz over 32-bit logits.

The softmax is over the first `vocab` columns, the tokenizer's ids: often an odd number, at which matmuls are slow. So
Triton's logits have all columns of the weight, with p = dz = 0 from `vocab` on. `row_stride`, a row's length in memory,
is a multiple of 16: kernels load and store whole rows, 16 bytes at a time.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import KernelBackend, choose_backend

# Logits of a chunk of the torch backend: at most this many elements (one row if V is larger). In float32: 64 MiB on
# CPU, and 1 GiB on a GPU, where dW's matmul, which reads and writes all of dW, is memory-bound below 1000 rows.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
BLOCK = 8192  # columns that a program has in registers: 16 a thread
SORT_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # logits that a filter sorts at once
CUT = -1e30  # the logit of a cut token: exp gives 0; finite, so that 0 * CUT is 0, not NaN
LN2, LOG2_E = tl.constexpr(math.log(2)), tl.constexpr(math.log2(math.e))


@dataclass(frozen=True, slots=True)
class SamplingFilter:
    """The sampler's top_k, then its top_p, on the trainer's logits, by the rule of vLLM and NeMo RL.

    A row keeps its top_k largest logits and ties with the last of them; of these, the likeliest that together hold
    top_p of the probability, at least one. Among ties at that cut, the largest ids are kept.
    """

    top_p: float = 1.0
    top_k: int | None = None

    def cut_(self, logits_CV: Tensor, temperature: float) -> None:
        """Cuts in place, so every reader of the logits sees the renormalised distribution, with no gradient at a cut
        logit. Sorting takes 20 bytes of memory per logit."""
        if self.top_k is not None and self.top_k < logits_CV.shape[1]:
            last_C1 = logits_CV.topk(self.top_k).values[:, -1:]
            logits_CV.masked_fill_(logits_CV < last_C1, CUT)
        if self.top_p < 1:
            sorted_CV, index_CV = logits_CV.sort(stable=True)
            mass_CV = sorted_CV.div(temperature).softmax(1).cumsum_(1)  # of a token and all less likely tokens
            mass_CV[:, -1] = 2  # the likeliest always stays
            logits_CV.scatter_(1, index_CV, sorted_CV.masked_fill_(mass_CV <= 1 - self.top_p, CUT))


@dataclass(slots=True)
class LogitChunk:
    """Rows of a head's logits, in float32 or wider, in a buffer that the methods and the next chunk overwrite.

    dtype: of the inputs. stats_KC, from `logp_and_entropy`: logp, entropy, m, and s (Triton: log2 s) of each row.
    logp is -inf where `SamplingFilter` cut the target.
    """

    rows: slice
    logits_CV: Tensor
    vocab: int
    target_C: Tensor
    temperature: float
    dtype: torch.dtype
    backend: KernelBackend
    stats_KC: Tensor | None = None

    def logp_and_entropy(self) -> Tensor:
        """[2, C]. PyTorch allocates a second buffer, and leaves logits - m in this one."""
        if self.backend.name == "triton":
            num_rows, row_stride = len(self.logits_CV), self.logits_CV.stride(0)
            self.stats_KC = self.logits_CV.new_empty(4, num_rows)
            row_stats_kernel[(num_rows,)](
                self.logits_CV, self.target_C, self.stats_KC, num_rows, self.vocab, row_stride, 1 / self.temperature,
                **launch_options(row_stride),
            )  # fmt: skip
        else:
            max_C = self.logits_CV.amax(1)
            shifted_CV = self.logits_CV.sub_(max_C[:, None])
            exp_CV = shifted_CV.div(self.temperature).exp_()
            sum_C = exp_CV.sum(1)
            logp_C = shifted_CV.gather(1, self.target_C[:, None])[:, 0] / self.temperature - sum_C.log()
            entropy_C = sum_C.log() - exp_CV.mul_(shifted_CV).sum(1) / (sum_C * self.temperature)
            self.stats_KC = torch.stack([logp_C, entropy_C, max_C, sum_C])
        self.stats_KC[0].masked_fill_(self.stats_KC[0] < CUT / 1e9, -math.inf)  # a cut logit over any temperature
        return self.stats_KC[:2]

    def dlogits_(self, g_C: Tensor, h_C: Tensor | None) -> Tensor:
        """dz_CV in `dtype`; with Triton in the logits' memory. h_C None: 0. Needs this chunk's own `logp_and_entropy`:
        with statistics of another matmul, 1 - p of a near-certain token would be rounding error."""
        num_rows, row_stride = len(self.logits_CV), self.logits_CV.stride(0)
        if self.backend.name == "triton":
            # Elements of the same size or half of it, in the first bytes of each row of the logits.
            dlogits_CV = self.logits_CV.view(self.dtype)[:, : self.logits_CV.shape[1]]
            h_or_any_C = g_C if h_C is None else h_C  # not read without ENTROPY
            dlogits_kernel[(num_rows,)](
                self.logits_CV, dlogits_CV, self.target_C, self.stats_KC, g_C.contiguous(), h_or_any_C.contiguous(),
                num_rows, self.vocab, row_stride, 1 / self.temperature, ENTROPY=h_C is not None,
                **launch_options(row_stride),
            )  # fmt: skip
            return dlogits_CV
        _, entropy_C, _, sum_C = self.stats_KC
        z_CV = self.logits_CV if self.temperature == 1 else self.logits_CV.div_(self.temperature)
        scale_C = 1 / (sum_C * self.temperature)
        if h_C is None:
            dz_CV = z_CV.exp_().mul_((-g_C * scale_C)[:, None])
        else:  # -p (g + h (log p + H)) with log p = z - log s
            exp_CV = z_CV.exp()
            offset_C = g_C + h_C * (entropy_C - sum_C.log())
            dz_CV = z_CV.mul_((-h_C * scale_C)[:, None]).sub_((offset_C * scale_C)[:, None]).mul_(exp_CV)
        dz_CV[torch.arange(num_rows, device=dz_CV.device), self.target_C] += g_C / self.temperature
        return dz_CV.to(self.dtype)


def logit_chunks(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    vocab: int | None = None,
    temperature: float = 1.0,
    backend: KernelBackend | None = None,
    sampling_filter: SamplingFilter | None = None,
) -> Iterator[LogitChunk]:
    """The logits hidden_RD @ weight_VD.T in chunks of rows, cut by sampling_filter, one buffer for all chunks. Triton's
    have all columns, PyTorch's the first `vocab`. The options are those of `linear_logp`."""
    if hidden_RD.dtype == torch.float64:
        backend = KernelBackend("torch")
    backend = backend or choose_backend("auto", hidden_RD.device.type)
    vocab = len(weight_VD) if vocab is None else vocab
    assert 0 < vocab <= len(weight_VD), (vocab, weight_VD.shape)
    torch._assert_async(((target_R >= 0) & (target_R < vocab)).all(), "a target is outside the vocabulary")
    num_rows, row_stride = len(hidden_RD), triton.cdiv(len(weight_VD), 16) * 16
    most = max(num_rows, backend.pack_rows)  # so that the memory which a pack leaves is what the next one asks for
    size = backend.rows(most, row_stride)
    if backend.name == "torch":
        weight_VD, row_stride = weight_VD[:vocab], vocab
        size = max(1, CHUNK_ELEMENTS[hidden_RD.device.type] // vocab)
    buffer_CV = hidden_RD.new_empty(min(size, most), row_stride, dtype=wide_dtype(hidden_RD))
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        logits_CV = mm_float32(hidden_RD[rows], weight_VD.T, out=buffer_CV[: rows.stop - start, : len(weight_VD)])
        if sampling_filter:
            for rows_CV in logits_CV[:, :vocab].split(max(1, SORT_ELEMENTS[logits_CV.device.type] // vocab)):
                sampling_filter.cut_(rows_CV, temperature)
        yield LogitChunk(rows, logits_CV, vocab, target_R[rows], temperature, hidden_RD.dtype, backend)


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def mm_float32(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b, computed in out's dtype: 16-bit factors may have a float32 product. Autocast
    does not change calls with `out`."""
    dtype = {}
    narrow = a.dtype == b.dtype == torch.bfloat16
    if a.device.type == "cpu":
        a, b = a.to(out.dtype), b.to(out.dtype)
    elif a.dtype != out.dtype:
        dtype = {"out_dtype": out.dtype}  # tensor cores sum in float32 anyway (torch >= 2.8)
    with bfloat16_factors(narrow and a.device.type == "cpu"):
        if accumulate:
            return torch.addmm(out, a, b, **dtype, out=out)
        return torch.mm(a, b, **dtype, out=out)


@contextmanager
def bfloat16_factors(on: bool) -> Iterator[None]:
    """If `on`, a CPU may round the factors of float32 matmuls to bfloat16, and sum in float32. Factors that were
    bfloat16 lose nothing, and a CPU with bfloat16 instructions takes a third of the time."""
    if not on:
        yield
        return
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def launch_options(row_stride: int) -> dict[str, int]:
    """Columns per block, and warps, of a program that owns a row."""
    block = min(BLOCK, triton.next_power_of_2(row_stride))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


@triton.jit
def load_block(logits, column, vocab, row_stride):
    """A block of a row's logits, CUT from `vocab` on. The mask of the load ends at a multiple of 16: a mask that ends
    at an odd column would split it into one load per column."""
    return tl.where(column < vocab, tl.load(logits + column, column < row_stride), -1e30)  # CUT


@triton.jit(do_not_specialize=["num_rows"])
def row_stats_kernel(logits_ptr, target_ptr, stats_ptr, num_rows, vocab, row_stride, scale, BLOCK: tl.constexpr):
    """A program per row writes its logp, entropy, m and log2 s into stats, [4, num_rows]. scale = 1 / temperature."""
    row = tl.program_id(0).to(tl.int64)  # row * row_stride exceeds 2^31
    logits, stats = logits_ptr + row * row_stride, stats_ptr + row
    largest = -1e30  # CUT
    total, weighted = 0.0, 0.0  # sums of exp and exp * log2_z
    for start in tl.range(0, row_stride, BLOCK, num_stages=3):  # prefetches two blocks
        logit = load_block(logits, start + tl.arange(0, BLOCK), vocab, row_stride)
        before, largest = largest, tl.maximum(largest, tl.max(logit, 0))
        rise = (before - largest) * (scale * LOG2_E)
        log2_z = (logit - largest) * (scale * LOG2_E)
        exp = tl.exp2(log2_z)
        weighted = tl.exp2(rise) * (weighted + rise * total) + tl.sum(exp * log2_z, 0)
        total = tl.exp2(rise) * total + tl.sum(exp, 0)
    log2_sum = tl.log2(total)
    tl.store(stats, (tl.load(logits + tl.load(target_ptr + row)) - largest) * scale - log2_sum * LN2)
    tl.store(stats + num_rows, (log2_sum - weighted / total) * LN2)
    tl.store(stats + 2 * num_rows, largest)
    tl.store(stats + 3 * num_rows, log2_sum)


@triton.jit(do_not_specialize=["num_rows"])
def dlogits_kernel(
    logits_ptr, dlogits_ptr, target_ptr, stats_ptr, g_ptr, h_ptr, num_rows, vocab, row_stride, scale,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per row overwrites it with dz, in elements as wide or half as wide. stats: of `row_stats_kernel`.

    The program goes from left to right. Narrow elements land on this block or earlier ones, which all threads have
    read: a barrier separates loads from stores. The next block is prefetched meanwhile."""
    row = tl.program_id(0).to(tl.int64)  # row * row_stride exceeds 2^31
    logits, stats = logits_ptr + row * row_stride, stats_ptr + row
    dlogits = dlogits_ptr + row * row_stride * (32 // dlogits_ptr.dtype.element_ty.primitive_bitwidth)
    target, g, h = tl.load(target_ptr + row), tl.load(g_ptr + row), 0.0
    entropy, largest = tl.load(stats + num_rows), tl.load(stats + 2 * num_rows)
    log2_sum = tl.load(stats + 3 * num_rows)
    if ENTROPY:
        h = tl.load(h_ptr + row)
    column = tl.arange(0, BLOCK)
    next_logit = load_block(logits, column, vocab, row_stride)
    for _ in range(0, row_stride, BLOCK):
        log2_p = (next_logit - largest) * (scale * LOG2_E) - log2_sum
        next_logit = load_block(logits, column + BLOCK, vocab, row_stride)
        slope = g
        if ENTROPY:
            slope = g + h * (log2_p * LN2 + entropy)
        dz = scale * (tl.where(column == target, g, 0.0) - tl.exp2(log2_p) * slope)
        tl.debug_barrier()
        tl.store(dlogits + column, dz.to(dlogits_ptr.dtype.element_ty), column < row_stride)
        column += BLOCK
