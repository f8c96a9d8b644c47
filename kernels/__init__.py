"""The output layer and the loss on top of it, without logits of all rows in memory: Triton kernels or PyTorch."""

from kernels.backend import KernelBackend, LossPath, choose_backend
from kernels.linear_logp import linear_logp
from kernels.linear_loss import linear_loss
from kernels.softmax import SamplingFilter

__all__ = ["KernelBackend", "LossPath", "SamplingFilter", "choose_backend", "linear_logp", "linear_loss"]
