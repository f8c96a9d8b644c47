"""The ranks of a run: who this process is among them, and the collectives that carry objects and flags."""

import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from config import ConfigError
from system import exits

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # longer than any rollout: ranks wait for the slowest one's samples


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands. A tensor-parallel group is `tp_size` consecutive ranks sharing one engine; there are
    `dp_size` groups, and this rank belongs to number `dp_rank`. FSDP shards over all ranks."""

    rank: int
    world_size: int
    local_rank: int
    tp_size: int
    engine_group: dist.ProcessGroup | None = None  # the ranks of this one's engine; None where it is alone

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    def print_rank0(self, text: str) -> None:
        """A line for the user: rank 0's."""
        if self.rank == 0:
            print(text, flush=True)

    @property
    def leads_engine(self) -> bool:
        """Ranks of a group hold the same samples: the first one reports them."""
        return self.rank % self.tp_size == 0

    def any_rank_of_engine(self, flag: bool) -> bool:
        """Whether any rank of this one's engine has the flag: a collective of them, so all get the same answer."""
        return flag if self.engine_group is None else any_rank(flag, self.engine_group)

    def broadcast_from_tp_leader(self, compute: Callable[[], T]) -> T:
        """What `compute` gives on the rank that leads this one's engine, on all ranks of the engine."""
        shared = [compute() if self.leads_engine else None]
        if self.engine_group is not None:
            dist.broadcast_object_list(shared, src=self.dp_rank * self.tp_size, group=self.engine_group)
        return shared[0]


def start_process_group(tp_size: int) -> tuple[Ranks, torch.device]:
    """Joins the process group torchrun laid out (RANK, WORLD_SIZE, ...; a lone process needs none of them).

    Objects and CPU tensors go over gloo, CUDA tensors over nccl. Threads per rank are OMP_NUM_THREADS: train.sh sets
    it, and torchrun to 1. Ranks with more threads than their share of the cores are 30x slower.
    """
    # The parts of a sum that cuBLAS splits are added in float32; by default they may be rounded to bfloat16 before.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0: any port that is free
    ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), tp_size)
    device = choose_device(ranks.local_rank)
    exits.skip_teardown = device.type == "cuda"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Not device_id=device: torch would then split NCCL's communicator, on all ranks at once, for each group that is
    # made, gloo's too. vLLM makes ten for each engine; such splits have hung runs (pytorch/pytorch#145376).
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    processes = enumerate(gather((socket.gethostname(), os.getpid())))
    exits.peers.update((rank, process) for rank, process in processes if rank != ranks.rank)
    if tp_size > 1:
        group, _ = dist.new_subgroups(tp_size, timeout=COLLECTIVE_TIMEOUT, backend="gloo")
        ranks = replace(ranks, engine_group=group)
    return ranks, device


def choose_device(local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU: as GRPO_DEVICE says (setup.sh exports it), else as torch was built.

    Raises ConfigError where torch sees something else: a run on GPUs never becomes one on the CPU in silence.
    """
    wanted = os.environ.get("GRPO_DEVICE") or ("cuda" if torch.backends.cuda.is_built() else "cpu")
    cpu_packages = "the packages for CPUs: GRPO_DEVICE=cpu GRPO_VENV=.venv-cpu ./train.sh ..., without GRPO_PYTHON"
    if wanted == "cpu":
        if torch.cuda.is_available():  # then engine and kernels use it
            raise ConfigError(f"GRPO_DEVICE=cpu, but torch is for CUDA and sees a GPU: unset it, or use {cpu_packages}")
        return torch.device("cpu")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, or too old; no visible GPU; a torch for CPUs
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "see nvidia-smi" if visible is None else f"CUDA_VISIBLE_DEVICES is '{visible}': unset it, or name a GPU"
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"torch cannot use a GPU: {reason} ({hint}); or use {cpu_packages}") from error
    if local_rank >= (num_gpus := torch.cuda.device_count()):
        raise ConfigError(f"torch sees {num_gpus} GPUs, and each process needs one: --nproc_per_node={num_gpus}")
    return torch.device("cuda", local_rank)


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether any rank (of the group) has the flag: a collective of these ranks."""
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags.item())


def gather(value: T) -> list[T]:
    """The value of each rank, on all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_from_rank0(value: T) -> T:
    """Rank 0's `value`, on all ranks."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def local_rows(tensor: torch.Tensor) -> slice:
    """The rows of a whole tensor that this rank holds: all, or of a shard those of torch.chunk: uneven, maybe none."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    assert tensor.placements == (Shard(0),), tensor.placements
    rows_per_rank = -(-len(tensor) // tensor.device_mesh.size())
    start = min(tensor.device_mesh.get_local_rank() * rows_per_rank, len(tensor))
    return slice(start, min(start + rows_per_rank, len(tensor)))


def on_rank0(work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on all ranks; a ConfigError or OSError that it raises there is raised on all."""
    try:
        result = work() if dist.get_rank() == 0 else None
    except (ConfigError, OSError) as error:
        result = error
    result = broadcast_from_rank0(result)
    if isinstance(result, ConfigError | OSError):
        raise result
    return result


def seed_everything(seed: int) -> None:
    """Seeds the global generators. Nothing of ours draws from them (vLLM reseeds them); this is for users' code."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
