"""One operation per file: the math in its docstring, a plain PyTorch reference, Triton kernels, what training calls."""

from kernels.backend import Head, choose_head
from kernels.clipped_pg import grpo_head, unsupported
from kernels.linear_logp import linear_logp

__all__ = ["Head", "choose_head", "grpo_head", "linear_logp", "unsupported"]
