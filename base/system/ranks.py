"""The ranks of a run: who this process is among them, and the collectives that carry objects and flags."""

import math
import os
import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from base.system.disk import say
from base.system.exits import NO_PEERS, Interrupted, Peers, StopRun, host_name
from config import ConfigError
from records import TokenSequence

T = TypeVar("T")
# More than any limit of the watchdog, which says who hangs: a collective would only say that it waited.
COLLECTIVE_TIMEOUT = timedelta(days=7)
SHARED_ERRORS = (ConfigError, OSError, StopRun, Interrupted)  # raised on all ranks where one raises them


class Bridge(Protocol):
    """What joins the sides of a split job: run.split.bridge.Bridge."""

    num_trainers: int
    objects: dist.ProcessGroup  # of all ranks of the job

    def ask_for_tokens(self, needed: Sequence[Sequence[TokenSequence]]) -> None:
        """The generators begin their part of `exchange.send_tokens`. A collective of all trainers."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks. A tensor-parallel group is `tp_size` consecutive ranks that share one engine; there
    are `dp_size` groups, and this rank belongs to number `dp_rank`. In a split job `rank` and `world_size` count this
    rank's side only, and `bridge` joins the sides."""

    rank: int
    world_size: int
    local_rank: int
    tp_size: int
    engine_group: dist.ProcessGroup | None = None  # the ranks that share this rank's engine; None for one alone
    bridge: Bridge | None = None
    peers: Peers = NO_PEERS

    @property
    def generates(self) -> bool:
        """Whether this rank is a generator of a split job."""
        return self.bridge is not None and self.job_rank >= self.bridge.num_trainers

    @property
    def job(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the job; None for the default one."""
        if self.bridge is None:
            return None
        return self.bridge.objects

    @property
    def job_rank(self) -> int:
        if self.bridge is None:
            return self.rank
        return self.bridge.objects.rank()

    @property
    def job_size(self) -> int:
        if self.bridge is None:
            return self.world_size
        return self.bridge.objects.size()

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    def print_rank0(self, text: str) -> None:
        """Prints a line for the user, on rank 0 only."""
        if self.rank == 0:
            say(text)

    @property
    def is_tp_leader(self) -> bool:
        """Whether this rank reports its engine's samples: all ranks of an engine hold the same ones."""
        return self.rank % self.tp_size == 0

    def any_rank_of_engine(self, flag: bool) -> bool:
        """Whether any rank of this engine has the flag. A collective of the engine's ranks: all get the same answer."""
        if self.engine_group is None:
            return flag
        return any_rank(flag, self.engine_group)

    def broadcast_from_tp_leader(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on the first rank of this engine, or raises there, on all ranks of the engine."""
        if self.engine_group is None:
            return compute()
        return on_rank0(compute, self.engine_group)


def start_process_group(
    tp_size: int, split: Callable[[int, int, str], Bridge] | None = None
) -> tuple[Ranks, torch.device]:
    """Joins the process group that torchrun laid out (RANK, WORLD_SIZE, ...; a lone process needs none of them). split:
    of a split job, what joins it instead, from rank, number of ranks and backend.

    Objects and CPU tensors go over gloo, CUDA tensors over nccl. OMP_NUM_THREADS says how many threads a rank has:
    train.sh sets it, and torchrun sets 1. Ranks with more threads than their share of the cores are 30x slower.
    """
    # When cuBLAS splits a sum, add the parts in float32; by default they may be rounded to bfloat16 first. And float32
    # is no TF32, as an image's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE would have it.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
    # Gloo alone has two connections from each rank to each other one: with 512 ranks more than the usual 1,024 files.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0: any port that is free
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    if "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        from base.system.allocator import take_out_expandable_segments

        taken = take_out_expandable_segments()
        if taken and rank == 0:
            why = "vLLM's sleep cannot free expandable segments"
            print(f"{taken}: off until the engine first sleeps; {why}", flush=True)
    device = choose_device(local_rank)
    # Without device_id=device: with it, torch splits NCCL's communicator, on all ranks at once, for each new group,
    # gloo's too. vLLM makes ten groups for each engine; such splits have hung runs (pytorch/pytorch#145376).
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    bridge = None
    num_trainers = None
    job = None
    if split:
        bridge = split(rank, world_size, backend)
        num_trainers = bridge.num_trainers
        job = bridge.objects
        if rank < num_trainers:
            tp_size = 1
        rank = dist.get_rank()  # of this side, like the number of ranks
        world_size = dist.get_world_size()
    else:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    processes = dict(enumerate(gather((host_name(), os.getpid()), job)))
    engine_group = None
    if tp_size > 1:
        engine_group, _ = dist.new_subgroups(tp_size, timeout=COLLECTIVE_TIMEOUT, backend="gloo")
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        tp_size=tp_size,
        engine_group=engine_group,
        bridge=bridge,
        peers=Peers(processes, num_trainers),
    )
    return ranks, device


def fsdp_mesh(device_type: str, num_replicas: int = 1) -> DeviceMesh:
    """The ranks that FSDP2 shards over: all (of this side of the job), or a row for each replica. A collective."""
    size = dist.get_world_size()
    if num_replicas == 1:
        mesh = dist.init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    else:
        shape = (num_replicas, size // num_replicas)
        mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)
    return mesh


def choose_device(local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU: as GRPO_DEVICE says (setup.sh exports it), else as torch was built. ConfigError
    where torch sees something else: a run meant for GPUs never falls back to the CPU silently."""
    wanted = os.environ.get("GRPO_DEVICE")
    if not wanted:
        wanted = "cuda" if torch.backends.cuda.is_built() else "cpu"
    cpu_packages = "the packages for CPUs: GRPO_DEVICE=cpu GRPO_VENV=.venv-cpu ./train.sh ..., without GRPO_PYTHON"
    if wanted == "cpu":
        if torch.cuda.is_available():  # then engine and kernels use it
            raise ConfigError(f"GRPO_DEVICE=cpu, but torch is for CUDA and sees a GPU: unset it, or use {cpu_packages}")
        return torch.device("cpu")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, or too old; no visible GPU; a torch for CPUs
        hint = "see nvidia-smi"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            hint = f"CUDA_VISIBLE_DEVICES is '{visible}': unset it, or name a GPU"
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"torch cannot use a GPU: {reason} ({hint}); or use {cpu_packages}") from error
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ConfigError(f"torch sees {num_gpus} GPUs, and each process needs one: use --nproc_per_node={num_gpus}")
    return torch.device("cuda", local_rank)


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether any rank (of the group) has the flag. A collective of these ranks."""
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags.item())


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of each rank (of the group), on all of them."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def local_rows(tensor: torch.Tensor) -> slice:
    """The rows of a whole tensor that this rank holds: all, or its shard's by torch.chunk (uneven, maybe none)."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor))
    assert tensor.placements[-1] == Shard(0), tensor.placements  # with replicas, the placement before it is Replicate
    num_rows = len(tensor)
    rows_per_rank = math.ceil(num_rows / tensor.device_mesh.size(-1))
    place = tensor.device_mesh.get_coordinate()[-1]
    start = min(place * rows_per_rank, num_rows)
    stop = min(start + rows_per_rank, num_rows)
    return slice(start, stop)


def on_rank0(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `work` returns on rank 0 (of the group), or of SHARED_ERRORS raises there, on all ranks."""
    if not dist.is_initialized():
        return work()
    if group is None:
        group = dist.group.WORLD
    result = None
    if group.rank() == 0:  # dist.get_rank does not know the group that joins the sides of a split job
        try:
            result = work()
        except SHARED_ERRORS as error:
            result = error
    shared = [result]
    dist.broadcast_object_list(shared, group_src=0, group=group)
    (result,) = shared
    if isinstance(result, SHARED_ERRORS):
        raise result
    return result


def seed_everything(seed: int) -> None:
    """Seeds the global generators, for users' code: nothing of ours draws from them, and vLLM seeds them alike."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device. To a GPU from pinned memory, as any other copy waits for all that is queued there."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
