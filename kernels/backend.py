"""Which code computes the output layer: Triton kernels or plain PyTorch. Chosen once, and printed."""

from dataclasses import dataclass
from typing import Literal

import torch

from config import ConfigError

CHUNK_BYTES = int(3.5 * 2**30)  # of a chunk's float32 logits, with Triton, where nobody says how many rows


@dataclass(frozen=True, slots=True)
class Head:
    """backend: of both operations. chunk_rows: rows whose logits are in memory at once; None = by `CHUNK_BYTES`."""

    backend: Literal["triton", "torch"]
    chunk_rows: int | None = None

    def rows(self, vocab: int) -> int:
        """Of one chunk with Triton. A multiple of 1024: below that, dW's matmul waits for memory; whole tiles."""
        return self.chunk_rows or max(1, CHUNK_BYTES // (4 * vocab * 1024)) * 1024

    def describe(self, vocab: int) -> str:
        """One line for the console."""
        if self.backend == "triton":
            return f"head: triton grpo_head, chunk {self.rows(vocab)} rows"
        return "head: torch reference" if torch.cuda.is_available() else "head: torch reference (no CUDA)"


def choose_head(option: Literal["auto", "triton", "torch"], device_type: str, chunk_rows: int | None = None) -> Head:
    """auto: Triton on CUDA, PyTorch elsewhere. ConfigError for "triton" without CUDA."""
    if option == "triton" and device_type != "cuda":
        raise ConfigError(f"policy.head: triton needs a CUDA device, this is {device_type}; auto or torch run here")
    if option == "auto":
        option = "triton" if device_type == "cuda" else "torch"
    return Head(option, chunk_rows)
