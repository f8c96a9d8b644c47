"""Optimizers of torch behind the interface of one, and where their moments lie between steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")  # of AdamW, of Muon


class Optimizer:
    """`param_groups`, `state`, `step`, `zero_grad` of the optimizers that `parts` makes: function -> its parameters.

    offloads: between steps the moments are in host memory, pinned for a GPU. first_moment: the precision of AdamW's
    first moment and of momentum then. With either, each parameter has an optimizer of its own, and one after another
    their moments are taken to the device, in float32, for the step.
    """

    def __init__(self, parts: dict[Callable, list[nn.Parameter]], *, offloads: bool = False, first_moment: torch.dtype):
        self.offloads = offloads
        self.first_moment = first_moment
        self.streams = offloads or first_moment != torch.float32
        self.optimizers: list[torch.optim.Optimizer] = []
        for make, params in parts.items():
            self.optimizers += [make([param]) for param in params] if self.streams else [make(params)]
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = self.optimizers[0].state
        for optimizer in self.optimizers:
            optimizer.state = self.state  # one dict serves all: no parameter is in two groups

    @torch.no_grad()
    def step(self) -> None:
        for optimizer in self.optimizers:
            param = optimizer.param_groups[0]["params"][0]
            state = self.state[param] if self.streams else {}
            resting = {key: value for key, value in state.items() if value.dim()}  # not the number of steps
            for key, value in resting.items():
                state[key] = value.to(param.device, torch.float32, non_blocking=True, copy=True)
            optimizer.step()
            for key, value in state.items():
                if key in resting:
                    state[key] = resting[key].copy_(value, non_blocking=True)
                else:
                    state[key] = self.at_rest(key, value)
        if self.offloads and torch.cuda.is_available():
            torch.cuda.synchronize()  # whoever reads the moments in host memory does not wait for the copies

    def at_rest(self, key: str, value: Tensor) -> Tensor:
        """What is in `state` between steps for a tensor of the device. AdamW's second moment keeps float32: rounded to
        bfloat16 it stops following, and rounded at random it errs by 4%."""
        dtype = self.first_moment if key in FIRST_MOMENTS else value.dtype
        if not self.offloads or not value.dim():
            return value.to(dtype)
        return torch.empty_like(value, dtype=dtype, device="cpu", pin_memory=value.is_cuda).copy_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
