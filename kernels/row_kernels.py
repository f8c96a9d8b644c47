"""Two Triton kernels on rows of logits, and the chunk that launches them. A program owns a row.

    z = logit / temperature      log p = z - logsumexp(z)      logp = log p at the target      H = -sum_j p_j log p_j

In examples/naive.py this is `log_softmax(-1)` and its derivative.

Bytes for each logit, and what was measured: 32,768 rows of 151,936 logits in six chunks, bfloat16 dz, an H200, commit
8af617b (docs/LOG.md, bench/results/gpu_2026-11-26/head.jsonl).

    kernel      bytes read   bytes written                              time     speed
    row_stats   4            0 (16 a row)                               5.6 ms   3.5 TB/s
    dlogits     4            2, or 4 where the inputs are float32       7.2 ms   4.2 TB/s

The softmax is over the first `vocab` columns, the tokenizer's ids: often an odd number, at which matmuls are slow. So
the logits have all columns of the weight, with p = dz = 0 from `vocab` on. `row_stride`, a row's length in memory, is a
multiple of 16 (kernels/sizes.py): the kernels load and store whole rows, 16 bytes at a time.
"""

import math
from dataclasses import dataclass, field

import triton
import triton.language as tl
from torch import Tensor

from kernels.filter import CUT
from kernels.logits import LogitChunk

BLOCK = 8192  # columns that a program has in registers: 16 a thread
CUT_LOGIT = tl.constexpr(CUT)
LN2, LOG2_E = tl.constexpr(math.log(2)), tl.constexpr(math.log2(math.e))


def launch_options(row_stride: int) -> dict[str, int]:
    """Columns per block, and warps, of a program that owns a row."""
    block = min(BLOCK, triton.next_power_of_2(row_stride))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


@dataclass(slots=True)
class TritonChunk(LogitChunk):
    """The buffer holds float32 logits of all columns, then dz: 16-bit dz fills the first half of each row's bytes. Its
    rows are a multiple of 16 elements in memory."""

    # Of each row: logp, entropy, its largest logit m, and log2 of sum exp((logit - m) / temperature): exact, however
    # large logits are.
    stats_4C: Tensor = field(init=False)

    def logp_and_entropy(self) -> Tensor:
        num_rows, row_stride = len(self.logits_CV), self.logits_CV.stride(0)
        self.stats_4C = self.logits_CV.new_empty(4, num_rows)
        row_stats_kernel[(num_rows,)](
            self.logits_CV,
            self.target_C,
            self.stats_4C,
            num_rows,
            self.options.vocab,
            row_stride,
            1 / self.options.temperature,
            **launch_options(row_stride),
        )
        if self.options.sampling_filter:
            self.options.sampling_filter.mark_cut_targets_(self.stats_4C[0])
        return self.stats_4C[:2]

    def dlogits(self, g_C: Tensor, h_C: Tensor | None) -> Tensor:
        num_rows, num_columns = self.logits_CV.shape
        row_stride = self.logits_CV.stride(0)
        dlogits_CV = self.logits_CV.view(self.dtype)[:, :num_columns]
        softcap = self.options.softcap
        h_or_g_C = g_C if h_C is None else h_C  # the kernel does not read it without ENTROPY
        dlogits_kernel[(num_rows,)](
            self.logits_CV,
            dlogits_CV,
            self.target_C,
            self.stats_4C,
            g_C.contiguous(),
            h_or_g_C.contiguous(),
            num_rows,
            self.options.vocab,
            row_stride,
            1 / self.options.temperature,
            1 / softcap if softcap else 1.0,
            ENTROPY=h_C is not None,
            CAPPED=softcap is not None,
            **launch_options(row_stride),
        )
        return dlogits_CV


@triton.jit
def load_block(logits, column, vocab, row_stride):
    """A block of a row's logits, CUT from `vocab` on. The mask of the load ends at a multiple of 16: a mask that ends
    at an odd column would split it into one load per column."""
    return tl.where(column < vocab, tl.load(logits + column, column < row_stride), CUT_LOGIT)


@triton.jit(do_not_specialize=["num_rows"])
def row_stats_kernel(logits_ptr, target_ptr, stats_ptr, num_rows, vocab, row_stride, scale, BLOCK: tl.constexpr):
    """A program per row writes its logp, entropy, m and log2 s into stats, [4, num_rows]. scale = 1 / temperature."""
    row = tl.program_id(0).to(tl.int64)  # row * row_stride exceeds 2^31
    logits, stats = logits_ptr + row * row_stride, stats_ptr + row
    largest = CUT_LOGIT
    total, weighted = 0.0, 0.0  # sums of exp and exp * log2_z
    for start in tl.range(0, row_stride, BLOCK, num_stages=3):  # prefetches two blocks
        logit = load_block(logits, start + tl.arange(0, BLOCK), vocab, row_stride)
        before, largest = largest, tl.maximum(largest, tl.max(logit, 0))
        rise = (before - largest) * (scale * LOG2_E)
        log2_z = (logit - largest) * (scale * LOG2_E)
        exp = tl.exp2(log2_z)
        # Both sums move from the old maximum to the new one.
        weighted = tl.exp2(rise) * (weighted + rise * total) + tl.sum(exp * log2_z, 0)
        total = tl.exp2(rise) * total + tl.sum(exp, 0)
    log2_sum = tl.log2(total)
    tl.store(stats, (tl.load(logits + tl.load(target_ptr + row)) - largest) * scale - log2_sum * LN2)
    tl.store(stats + num_rows, (log2_sum - weighted / total) * LN2)
    tl.store(stats + 2 * num_rows, largest)
    tl.store(stats + 3 * num_rows, log2_sum)


@triton.jit(do_not_specialize=["num_rows"])
def dlogits_kernel(
    logits_ptr, dlogits_ptr, target_ptr, stats_ptr, g_ptr, h_ptr, num_rows, vocab, row_stride, scale, inverse_cap,
    ENTROPY: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per row overwrites it with dz, in elements as wide or half as wide. stats: of `row_stats_kernel`.
    inverse_cap: 1 / softcap, which is read if CAPPED.

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
        slope_of_cap = scale
        if CAPPED:
            tanh = tl.maximum(next_logit * inverse_cap, -1.0)  # of a cut logit -1
            slope_of_cap = scale * (1 - tanh * tanh)
        next_logit = load_block(logits, column + BLOCK, vocab, row_stride)
        slope = g
        if ENTROPY:
            slope = g + h * (log2_p * LN2 + entropy)
        dz = slope_of_cap * (tl.where(column == target, g, 0.0) - tl.exp2(log2_p) * slope)
        tl.debug_barrier()
        tl.store(dlogits + column, dz.to(dlogits_ptr.dtype.element_ty), column < row_stride)
        column += BLOCK
