"""The output layer and the loss on top of it, without logits of all rows in memory: Triton kernels or PyTorch."""

from kernels.backend import KernelBackend, choose_backend
from kernels.linear_logp import linear_logp
from kernels.linear_loss import linear_loss
from kernels.loss_path import LossPath, choose_loss_path

__all__ = ["KernelBackend", "LossPath", "choose_backend", "choose_loss_path", "linear_logp", "linear_loss"]
