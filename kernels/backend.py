"""The output layer's code, Triton or PyTorch: chosen once, and printed."""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels import sizes


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """chunk_rows: with Triton, the most rows of logits in memory at once; None: as many as fit (kernels/sizes.py).
    pack_rows: the most rows of a pack, if known: then packs of any size ask for one buffer."""

    name: Literal["triton", "torch"]
    chunk_rows: int | None = None
    pack_rows: int = 0

    def describe(self, num_columns: int) -> str:
        """For the log. num_columns: rows of the output layer's weight."""
        if self.name == "triton":
            most = sizes.most_triton_rows(sizes.row_stride(num_columns), self.chunk_rows)
            return f"output layer: Triton kernels, at most {most} rows of logits at a time"
        if torch.cuda.is_available():
            return "output layer: PyTorch"
        return "output layer: PyTorch (no CUDA)"


def choose_backend(option: str, device_type: str, chunk_rows: int | None = None, pack_rows: int = 0) -> KernelBackend:
    """triton, torch, or auto: Triton on CUDA, PyTorch elsewhere. The caller has refused triton without CUDA."""
    assert option != "triton" or device_type == "cuda", device_type
    if option == "auto":
        option = "triton" if device_type == "cuda" else "torch"
    return KernelBackend(option, chunk_rows, pack_rows)
