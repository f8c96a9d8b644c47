"""Which code computes the output layer, Triton kernels or plain PyTorch, and the loss on top. Chosen once, printed."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class LossPath:
    """idle_moves, positive_moves: whether tokens of advantage 0 have a gradient all the same: all of them (as with a KL
    or an entropy bonus), those of positive samples. max_log_ratio: loss.py's bound of |logp - old|, for the kernel."""

    kind: Literal["fused", "one pass", "two passes"]
    why: str
    max_log_ratio: float
    idle_moves: bool
    positive_moves: bool

    def describe(self) -> str:
        """One line for the console."""
        kinds = {
            "fused": "fused Triton kernel, proven equal to loss.py",
            "one pass": "one pass, autograd of loss.py",
            "two passes": "two passes, autograd of loss.py",
        }
        return f"loss: {kinds[self.kind]}" + (f" ({self.why})" if self.why else "")

    def may_have_gradient(self, adv_R: Tensor, positive_R: Tensor) -> Tensor:
        """Which tokens the loss can have a derivative at (bool), if they are trained on at all."""
        moved_R = adv_R != 0
        if self.positive_moves:
            moved_R = moved_R | positive_R
        return torch.ones_like(moved_R) if self.idle_moves else moved_R


TWO_PASSES = LossPath("two passes", "", 0.0, idle_moves=True, positive_moves=True)  # right for any loss
