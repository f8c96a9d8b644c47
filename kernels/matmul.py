"""Matmuls of the output layer: 16-bit factors, float32 products and sums."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64: the dtype between the matmuls."""
    return torch.promote_types(x.dtype, torch.float32)


def mm_wide(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b, computed in out's dtype: 16-bit factors may have a float32 product. Autocast
    does not change calls with `out`."""
    if a.device.type == "cpu":
        return _mm_on_cpu(a, b, out, accumulate)
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    # Tensor cores sum in float32 anyway (torch >= 2.8).
    if accumulate:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _mm_on_cpu(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """A CPU has no product that is wider than its factors, so the factors are widened."""
    were_bfloat16 = a.dtype == b.dtype == torch.bfloat16
    wide_a, wide_b = a.to(out.dtype), b.to(out.dtype)
    with bfloat16_factors(were_bfloat16):
        if accumulate:
            return torch.addmm(out, wide_a, wide_b, out=out)
        return torch.mm(wide_a, wide_b, out=out)


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
