"""The inputs of blocks that the backward pass computes again, in host memory (activation_checkpointing=offload).

A block that is computed again keeps nothing but its input. Of a long pack these inputs are most of what the
trainer holds: 4 x 4,096 bytes a token and block in Qwen3-8B. A copy to pinned memory and back takes a fraction of the
time in which the GPU computes a block, on a stream of its own.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kernels.sizes import host_rows


class ParkedInput:
    """The input of a block in host memory, in parts; near its use also on the device. before: of the block before."""

    def __init__(self, tensor: Tensor, stream: "torch.cuda.Stream | None", before: "ParkedInput | None"):
        self.on_device: Tensor | None = tensor
        self.form = {"size": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
        self.stream = stream
        self.before = weakref.ref(before) if before else _nothing
        self.on_host: list[Tensor] = []
        rows = _rows(tensor)
        for part in rows.split(host_rows(rows.shape[1] * rows.itemsize)):
            self.on_host.append(torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda))
        self._copy(rows, self.on_host, to_host=True)

    def leave_device(self) -> None:
        """The device's memory is free once the copy in host memory is complete."""
        self._wait()
        self.on_device = None

    def load(self) -> None:
        """Begins the copy to the device, if it is not there."""
        if self.on_device is None:
            self.on_device = torch.empty(**self.form)
            self._copy(_rows(self.on_device), self.on_host, to_host=False)

    def take(self) -> Tensor:
        """The input, on the device. The copy of the input before begins, which the backward pass needs next."""
        self.load()
        self._wait()
        before = self.before()
        if before:
            before.load()
        tensor = self.on_device
        self.on_device = None
        return tensor

    def _copy(self, rows: Tensor, on_host: list[Tensor], *, to_host: bool) -> None:
        """Between the rows on the device and their parts in host memory, beside what the device computes."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # which writes the rows, or has used their memory
        with torch.cuda.stream(self.stream):
            for part, host in zip(rows.split(len(on_host[0])), on_host, strict=True):
                source, target = (part, host) if to_host else (host, part)
                target.copy_(source, non_blocking=True)
        self.copied = self.stream.record_event() if self.stream else None

    def _wait(self) -> None:
        """What the device computes from now on finds the newest copy complete."""
        if self.copied:
            torch.cuda.current_stream().wait_event(self.copied)


def _nothing() -> None:
    """In place of a reference to an input."""


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten(0, -2)


class HostInputs:
    """Parks the inputs of a model's blocks. One input may be on its way to host memory, and one back."""

    def __init__(self):
        self.stream: torch.cuda.Stream | None = None
        self.shape: torch.Size | None = None  # of the input of the block that begins
        self.newest: Callable[[], ParkedInput | None] = _nothing

    def recomputed(self, function: Callable, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """function(hidden, *args, **kwargs), of which autograd keeps the arguments alone, `hidden` in host memory: the
        backward pass computes it again."""
        if hidden.is_cuda and self.stream is None:
            self.stream = torch.cuda.Stream(hidden.device)
        self.shape = hidden.shape
        with saved_tensors_hooks(self._park, _take):
            return checkpoint(function, hidden, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _park(self, tensor: Tensor) -> "ParkedInput | Tensor":
        """What autograd keeps in place of the tensor. Of all that a block gets the hidden states come first, and only
        they are its own."""
        if self.shape is None:
            return tensor
        assert tensor.shape == self.shape, (tensor.shape, self.shape)
        self.shape = None
        before = self.newest()
        if before:
            before.leave_device()
        parked = ParkedInput(tensor, self.stream, before)
        self.newest = weakref.ref(parked)
        return parked


def _take(kept: ParkedInput | Tensor) -> Tensor:
    return kept.take() if isinstance(kept, ParkedInput) else kept
