"""Which code computes the output layer: Triton kernels or plain PyTorch. Chosen once, and printed."""

from dataclasses import dataclass
from typing import Literal

import torch

CHUNK_BYTES = int(3.5 * 2**30)  # of a chunk's float32 logits with Triton, where nobody says how many rows


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """chunk_rows: with Triton, rows whose logits are in memory at once; None: as many as `CHUNK_BYTES` holds."""

    name: Literal["triton", "torch"]
    chunk_rows: int | None = None

    def rows(self, vocab: int) -> int:
        """Rows of a chunk with Triton: a multiple of 1024, below which dW's matmul waits for memory."""
        return self.chunk_rows or max(1, CHUNK_BYTES // (4 * vocab * 1024)) * 1024

    def describe(self, vocab: int) -> str:
        """One line for the console."""
        if self.name == "triton":
            return f"output layer: Triton kernels, {self.rows(vocab)} rows of logits at a time"
        return "output layer: PyTorch" if torch.cuda.is_available() else "output layer: PyTorch (no CUDA)"


def choose_backend(
    option: Literal["auto", "triton", "torch"], device_type: str, chunk_rows: int | None = None
) -> KernelBackend:
    """auto: Triton on CUDA, PyTorch elsewhere. ValueError for "triton" without CUDA."""
    if option == "triton" and device_type != "cuda":
        raise ValueError(f"triton needs a CUDA device, this is {device_type}; auto or torch run here")
    if option == "auto":
        option = "triton" if device_type == "cuda" else "torch"
    return KernelBackend(option, chunk_rows)
