"""Several torch optimizers behind the interface of one, and where their moments lie between steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")  # of AdamW, of Muon


Part = tuple[Callable, list[nn.Parameter]]  # the function that makes an optimizer; its parameters


class Optimizer:
    """One interface (`param_groups`, `state`, `step`, `zero_grad`) to several optimizers, one for each of `parts`.

    offloads: between steps the moments lie in host memory, pinned for a GPU. first_moment_dtype: the precision, between
    steps, of AdamW's first moment and of momentum. With either, each parameter has an optimizer of its own, and a step
    takes one parameter's moments after another to the device, in float32.
    """

    def __init__(self, parts: list[Part], *, offloads: bool, first_moment_dtype: torch.dtype):
        self.offloads = offloads
        self.first_moment_dtype = first_moment_dtype
        self.streams = offloads or first_moment_dtype != torch.float32
        self.optimizers: list[torch.optim.Optimizer] = []
        for make, params in parts:
            if self.streams:
                self.optimizers += [make([param]) for param in params]
            else:
                self.optimizers.append(make(params))
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = self.optimizers[0].state
        for optimizer in self.optimizers:
            optimizer.state = self.state  # one dict serves all: no parameter is in two groups

    @torch.no_grad()
    def step(self) -> None:
        if not self.state and torch.cuda.is_available():
            # The moments stay: in what the activations have left, they would keep it from the engine and from packs.
            torch.cuda.empty_cache()
        for optimizer in self.optimizers:
            if self.streams:
                self._step_streamed(optimizer)
            else:
                optimizer.step()
        if self.offloads and torch.cuda.is_available():
            torch.cuda.synchronize()  # readers of the moments in host memory do not wait for the copies

    def _step_streamed(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the optimizer of one parameter: its moments go to the device in float32, and back."""
        (param,) = optimizer.param_groups[0]["params"]
        state = self.state[param]
        resting = {key: value for key, value in state.items() if value.dim() > 0}  # without the number of steps
        for key, value in resting.items():
            state[key] = value.to(param.device, torch.float32, non_blocking=True, copy=True)
        optimizer.step()
        for key, value in state.items():
            if key in resting:
                state[key] = resting[key].copy_(value, non_blocking=True)
            else:
                state[key] = self.at_rest(key, value)

    def at_rest(self, key: str, value: Tensor) -> Tensor:
        """What `state` holds between steps for a tensor on the device. AdamW's second moment stays in float32: rounded
        to bfloat16 it stops following the gradient, and with stochastic rounding it is off by 4%."""
        dtype = value.dtype
        if key in FIRST_MOMENTS:
            dtype = self.first_moment_dtype
        is_number = value.dim() == 0
        if is_number or not self.offloads:
            return value.to(dtype)
        on_host = torch.empty_like(value, dtype=dtype, device="cpu", pin_memory=value.is_cuda)
        return on_host.copy_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
