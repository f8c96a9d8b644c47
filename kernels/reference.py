"""What the kernels compute, written naively: all logits in memory, autograd, in any dtype. Tests and bench/ compare
with it in float64; nothing else uses it."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.logits import LogitOptions


def reference_logp(
    hidden_RD: Tensor, weight_VD: Tensor, target_R: Tensor, options: LogitOptions
) -> tuple[Tensor, Tensor]:
    """(logp_R, entropy_R) of `linear_logp`, in the inputs' dtype. options: without a sampling_filter."""
    logits_RV = hidden_RD @ weight_VD[: options.vocab].T
    if options.softcap is not None:
        logits_RV = options.softcap * torch.tanh(logits_RV / options.softcap)
    all_logp_RV = (logits_RV / options.temperature).log_softmax(-1)
    logp_R = all_logp_RV.gather(1, target_R[:, None])[:, 0]
    entropy_R = -(all_logp_RV.exp() * all_logp_RV).sum(-1)
    return logp_R, entropy_R


def reference_gradients(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    options: LogitOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, logp_R, entropy_R, dX, dW) in float64. loss_of: a scalar of (logp_R, entropy_R)."""
    hidden_RD, weight_VD = (x.detach().double().requires_grad_() for x in (hidden_RD, weight_VD))
    with torch.enable_grad():
        logp_R, entropy_R = reference_logp(hidden_RD, weight_VD, target_R, options)
        loss = loss_of(logp_R, entropy_R)
    grad_hidden_RD, grad_weight_VD = torch.autograd.grad(loss, (hidden_RD, weight_VD))
    return loss.detach(), logp_R.detach(), entropy_R.detach(), grad_hidden_RD, grad_weight_VD
