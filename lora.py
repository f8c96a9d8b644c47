"""LoRA (Hu et al. 2021, arXiv 2106.09685): linear layers that train a low-rank change of their frozen weight.

The forward multiplies by the merged weight, rounded to the precision of the frozen weight: the same numbers that the
sync sends. So sampler and trainer agree as they do without LoRA, and the engine knows nothing of adapters.
In examples/naive.py this is `w = {name: x.float().requires_grad_()`: every weight is trained.
Dims: T packed tokens, I inputs, O outputs, L the low rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from base.hf.lora_layers import adapted_layers
from base.hf.weights import merged_weight
from config import LoRAConfig


class MergedLinear(torch.autograd.Function):
    """F.linear with the merged weight; the backward merges again instead of keeping it."""

    @staticmethod
    def forward(ctx, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_LI: Tensor, b_OL: Tensor, scale: float):
        ctx.save_for_backward(x_TI, weight_OI, a_LI, b_OL)
        ctx.scale = scale
        merged_OI = merged_weight(weight_OI, a_LI, b_OL, scale)
        return F.linear(x_TI, merged_OI, bias_O)

    @staticmethod
    def backward(ctx, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, a_LI, b_OL = ctx.saved_tensors
        # Through the factors, as if nothing were rounded: the gradient of the merged weight is never computed.
        grad_TL = ctx.scale * (grad_TO @ b_OL)
        grad_a_LI = grad_TL.T @ x_TI
        low_TL = ctx.scale * (x_TI @ a_LI.T)
        grad_b_OL = grad_TO.T @ low_TL
        grad_TI = None
        if ctx.needs_input_grad[0]:  # not the input of the first block: the embedding is frozen
            merged_OI = merged_weight(weight_OI, a_LI, b_OL, ctx.scale)
            grad_TI = grad_TO @ merged_OI
        return grad_TI, None, None, grad_a_LI, grad_b_OL, None


class LoRALinear(nn.Linear):
    """Computes with weight + scale * lora_B @ lora_A; lora_A [L, I] and lora_B [O, L] alone are trained, in float32."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float):
        has_bias = frozen.bias is not None
        super().__init__(frozen.in_features, frozen.out_features, has_bias, dtype=frozen.weight.dtype)
        self.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, I], or [1, T, I] in transformers' blocks."""
        x_TI = x.flatten(0, -2).to(self.weight.dtype)  # Gemma 4 gives its gates the residual stream
        y_TO = MergedLinear.apply(x_TI, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)
        return y_TO.unflatten(0, x.shape[:-1])


def freeze(model: nn.Module, precision: torch.dtype) -> None:
    """Casts a meta-device model to `precision`, and freezes it. Routers and buffers keep their type: a rounded logit
    can choose another expert, and rotary frequencies need float32."""
    kept = {param for router in model.model.routers for param in router.parameters()}
    for param in model.parameters():
        if param not in kept:
            param.data = param.data.to(precision)
    model.requires_grad_(False)


def add_adapters(model: nn.Module, cfg: LoRAConfig, precision: torch.dtype) -> None:
    """Freezes a meta-device model, as `freeze`, and adds adapters to the layers that cfg names."""
    freeze(model, precision)
    for name in adapted_layers(model.config, cfg):
        frozen = model.get_submodule(name)
        layer = LoRALinear(frozen, rank=cfg.dim, scale=cfg.alpha / cfg.dim)
        model.set_submodule(name, layer)
