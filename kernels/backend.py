"""The output layer's code, Triton or PyTorch, and how the loss gets its gradient: chosen once, and printed."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

CHUNK_BYTES = int(3.25 * 2**30)  # float32 logits of a chunk with Triton, unless chunk_rows is given


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """chunk_rows: with Triton, the most rows of logits in memory at once; None: as many as `CHUNK_BYTES` holds.
    pack_rows: the most rows of a pack, if known."""

    name: Literal["triton", "torch"]
    chunk_rows: int | None = None
    pack_rows: int = 0

    def most_rows(self, row_stride: int) -> int:
        """Most rows of a chunk with Triton, of `row_stride` logits each. Below 1024, dW's matmul is memory-bound."""
        return self.chunk_rows or max(1024, CHUNK_BYTES // (4 * row_stride) // 128 * 128)

    def rows(self, num_rows: int, row_stride: int) -> int:
        """Rows of each chunk with Triton: whole tiles, and equal chunks, as even a small chunk rewrites all of dW."""
        most = self.most_rows(row_stride)
        num_chunks = max(1, math.ceil(num_rows / most))
        return min(most, max(1, math.ceil(num_rows / num_chunks / 128)) * 128)

    def describe(self, row_stride: int) -> str:
        if self.name == "triton":
            return f"output layer: Triton kernels, at most {self.most_rows(row_stride)} rows of logits at a time"
        return "output layer: PyTorch" if torch.cuda.is_available() else "output layer: PyTorch (no CUDA)"


def choose_backend(option: str, device_type: str, chunk_rows: int | None = None, pack_rows: int = 0) -> KernelBackend:
    """triton, torch, or auto: Triton on CUDA, PyTorch elsewhere. The caller has refused triton without CUDA."""
    assert option != "triton" or device_type == "cuda", device_type
    if option == "auto":
        option = "triton" if device_type == "cuda" else "torch"
    return KernelBackend(option, chunk_rows, pack_rows)


@dataclass(frozen=True, slots=True)
class LossPath:
    """How the gradient of a loss is computed; the default is right for any loss.

    zero_adv_has_grad: the loss has a gradient at tokens with advantage 0, from a KL, an entropy bonus or an NLL.
    """

    kind: Literal["one pass", "two passes"] = "two passes"
    why: str = ""
    zero_adv_has_grad: bool = True

    def describe(self) -> str:
        return f"loss: {self.kind}, autograd of loss.py" + (f" ({self.why})" if self.why else "")
