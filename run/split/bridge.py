"""A split job: one torchrun job of two sides, of which the first ranks train and the last ones generate.

Each side has a default process group of its own, so FSDP, vLLM, checkpoints and `dist.*` work there as in a job without
sides. (One default group for both would hang: vLLM makes subgroups of it, each a collective of all its ranks.) Two
groups join the sides: one of all ranks for objects, and one of trainer 0 and the generators for weights.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from base.system.ranks import COLLECTIVE_TIMEOUT
from records import TokenSequence

T = TypeVar("T")
Shapes = list[tuple[str, tuple[int, ...]]]  # names and shapes of tensors, in the order in which they are sent


@dataclass(slots=True)
class Bridge:
    """What joins the sides."""

    num_trainers: int
    objects: dist.ProcessGroup  # of all ranks of the job
    weights: dist.ProcessGroup | None  # None for trainers but the first, which have no part in it
    # Of a generator: the sequences of the step whose tokens may be asked for, by `TokenSequence.place`.
    held: dict[int, TokenSequence] = field(default_factory=dict)
    num_held: int = 0  # of all steps
    first_of_step: int = 0  # the place of the first one after the newest sync

    def announce(self, *, async_op: bool = False) -> dist.Work | None:
        """Waits for trainer 0, whose request follows. async_op: the wait only begins. A collective of both sides."""
        return dist.broadcast(torch.zeros(1), group_src=0, group=self.objects, async_op=async_op)

    def broadcast(self, value: T, root: int) -> T:
        """The value of rank `root` of the job, on all ranks. A collective of both sides."""
        shared = [value]
        dist.broadcast_object_list(shared, group_src=root, group=self.objects)
        return shared[0]

    def tell(self, *request: Any) -> None:
        """The trainers' request to the generators. A collective of both sides."""
        self.announce()
        self.broadcast(request, root=0)

    def ask(self, *request: Any, weights: Iterable[Tensor] = ()) -> Any:
        """The generators' answer, after the weights that they receive for it. Raises it if it is an error."""
        self.tell(*request)
        self.send_weights(weights)
        answer = self.broadcast(None, root=self.num_trainers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask_for_tokens(self, needed: Sequence[Sequence[TokenSequence]]) -> None:
        """The generators begin their part of `exchange.send_tokens`. A collective of all trainers."""
        places = [[sequence.place for sequence in sequences] for sequences in needed]
        self.tell("tokens", places)

    def hold_tokens(self, sequences: Sequence[TokenSequence]) -> None:
        """The generators hold these sequences, of which each has the tokens on one of them."""
        for sequence in sequences:
            sequence.holder += self.num_trainers  # as a rank of the job
            sequence.place = self.num_held
            self.held[sequence.place] = sequence
            self.num_held += 1

    def drop_tokens(self) -> None:
        """At a sync: what was held at the sync before. The step that ends is logged only later."""
        self.held = {place: sequence for place, sequence in self.held.items() if place >= self.first_of_step}
        self.first_of_step = self.num_held

    def send_weights(self, tensors: Iterable[Tensor]) -> None:
        """The trainers' part, while all generators are in `receive_weights`. Trainer 0 sends the tensors; the other
        trainers only walk them, because gathering each is a collective of the trainers."""
        for tensor in tensors:
            if self.weights is not None:
                dist.broadcast(tensor.contiguous(), group_src=0, group=self.weights)

    def receive_weights(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The generators' part: (name, tensor) of what is sent, which has these shapes. To be walked to its end."""
        for name, shape in shapes:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, group_src=0, group=self.weights)
            yield name, tensor


def split(rank: int, size: int, backend: str, num_generators: int) -> Bridge:
    """Starts the default process group of this rank's side, and joins the sides. RANK and WORLD_SIZE, which vLLM reads,
    are set to this side's. A collective of the whole job, with torchrun's environment."""
    num_trainers = size - num_generators
    assert 0 < num_trainers < size, (size, num_generators)
    store, _, _ = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    generates = rank >= num_trainers
    if generates:
        first = num_trainers
        side_size = num_generators
    else:
        first = 0
        side_size = num_trainers
    os.environ["RANK"] = str(rank - first)
    os.environ["WORLD_SIZE"] = str(side_size)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"side {first}", store),
        rank=rank - first,
        world_size=side_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    objects = _group("objects", "gloo", store, rank, size)
    kind = "nccl" if "nccl" in backend else "gloo"
    weights = None
    if rank == 0:
        weights = _group("weights", kind, store, 0, 1 + num_generators)
    elif generates:
        weights = _group("weights", kind, store, 1 + rank - num_trainers, 1 + num_generators)
    return Bridge(num_trainers, objects, weights)


def _group(name: str, backend: str, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group across the sides. `dist.new_group` makes groups within the default group, by this call; [] says that the
    ranks are not those of the default group."""
    c10d = dist.distributed_c10d
    options = {"backend": dist.Backend(backend), "timeout": COLLECTIVE_TIMEOUT}
    group, _ = c10d._new_process_group_helper(size, rank, [], store=store, group_name=name, **options)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}  # else torch hides errors behind one of its own
    return group
