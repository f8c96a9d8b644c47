"""One operation per file: the math in its docstring, a plain PyTorch reference, what training calls."""

from kernels.linear_logp import linear_logp

__all__ = ["linear_logp"]
