"""The ranks of a run: who this process is among them, and the collectives that carry objects and flags."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from config import ConfigError
from support.system.bridge import COLLECTIVE_TIMEOUT, Bridge, split
from support.system.exits import NO_PEERS, Interrupted, Peers, StopRun, host_name

T = TypeVar("T")
SHARED_ERRORS = (ConfigError, OSError, StopRun, Interrupted)  # raised on all ranks where one raises them
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set


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
        return self.bridge.objects if self.bridge else None

    @property
    def job_rank(self) -> int:
        return self.bridge.objects.rank() if self.bridge else self.rank

    @property
    def job_size(self) -> int:
        return self.bridge.objects.size() if self.bridge else self.world_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    def print_rank0(self, text: str) -> None:
        """Prints a line for the user, on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    @property
    def leads_engine(self) -> bool:
        """Whether this rank reports its engine's samples: all ranks of an engine hold the same ones."""
        return self.rank % self.tp_size == 0

    def any_rank_of_engine(self, flag: bool) -> bool:
        """Whether any rank of this engine has the flag. A collective of the engine's ranks: all get the same answer."""
        return flag if self.engine_group is None else any_rank(flag, self.engine_group)

    def broadcast_from_tp_leader(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on the first rank of this engine, or raises there, on all ranks of the engine."""
        return compute() if self.engine_group is None else on_rank0(compute, self.engine_group)


def start_process_group(tp_size: int, num_generators: int = 0) -> tuple[Ranks, torch.device]:
    """Joins the process group that torchrun laid out (RANK, WORLD_SIZE, ...; a lone process needs none of them). With
    num_generators the job is split: its last num_generators ranks generate, and the others train.

    Objects and CPU tensors go over gloo, CUDA tensors over nccl. OMP_NUM_THREADS says how many threads a rank has:
    train.sh sets it, and torchrun sets 1. Ranks with more threads than their share of the cores are 30x slower.
    """
    # When cuBLAS splits a sum, add the parts in float32; by default they may be rounded to bfloat16 first. And float32
    # is no TF32, as an image's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE would have it.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0: any port that is free
    ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), tp_size)
    if taken := take_out_expandable_segments():
        ranks.print_rank0(f"{taken}: off until the engine first sleeps; vLLM's sleep cannot free expandable segments")
    device = choose_device(ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Without device_id=device: with it, torch splits NCCL's communicator, on all ranks at once, for each new group,
    # gloo's too. vLLM makes ten groups for each engine; such splits have hung runs (pytorch/pytorch#145376).
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if num_generators:
        bridge = split(ranks.rank, ranks.world_size, num_generators, backend)
        tp_size = tp_size if ranks.rank >= bridge.num_trainers else 1
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), ranks.local_rank, tp_size, bridge=bridge)
    else:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    processes = dict(enumerate(gather((host_name(), os.getpid()), ranks.job)))
    peers = Peers(processes, ranks.bridge and ranks.bridge.num_trainers)
    group = dist.new_subgroups(tp_size, timeout=COLLECTIVE_TIMEOUT, backend="gloo")[0] if tp_size > 1 else None
    return replace(ranks, peers=peers, engine_group=group), device


def take_out_expandable_segments() -> str:
    """Before CUDA starts: the environment variables that had torch's segments grow, which they no longer do."""
    named = []
    for name in ALLOCATOR_VARIABLES:
        options = os.environ.get(name, "").split(",")
        kept = [option for option in options if option.replace(" ", "") != "expandable_segments:True"]
        if kept != options:
            named.append(f"{name}={os.environ.pop(name)}")
            os.environ.update({name: ",".join(kept)} if kept else {})
    return " ".join(named)


def expand_segments() -> None:
    """From now on torch's segments grow, so that what is freed of one size serves another. Only while vLLM's memory
    pools are complete: with the option on, what they allocate cannot sleep (pytorch/pytorch#147851)."""
    given = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")
    if torch.cuda.is_available() and "expandable_segments" not in given:  # off as the user has it
        torch.cuda.empty_cache()
        options = ",".join(filter(None, [given, "expandable_segments:True"]))  # an option that is left out is reset
        torch._C._accelerator_setAllocatorSettings(options)


def fsdp_mesh(device_type: str, num_replicas: int = 1) -> DeviceMesh:
    """The ranks that FSDP2 shards over: all (of this side of the job), or a row for each replica. A collective."""
    size = dist.get_world_size()
    shape = (size,) if num_replicas == 1 else (num_replicas, size // num_replicas)
    mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)
    return mesh


def choose_device(local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU: as GRPO_DEVICE says (setup.sh exports it), else as torch was built. ConfigError
    where torch sees something else: a run meant for GPUs never falls back to the CPU silently."""
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
    rows_per_rank = -(-len(tensor) // tensor.device_mesh.size(-1))
    start = min(tensor.device_mesh.get_coordinate()[-1] * rows_per_rank, len(tensor))
    return slice(start, min(start + rows_per_rank, len(tensor)))


def on_rank0(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `work` returns on rank 0 (of the group), or of SHARED_ERRORS raises there, on all ranks."""
    if not dist.is_initialized():
        return work()
    try:
        shared = [work() if (group or dist.group.WORLD).rank() == 0 else None]
    except SHARED_ERRORS as error:
        shared = [error]
    dist.broadcast_object_list(shared, group_src=0, group=group)
    if isinstance(shared[0], SHARED_ERRORS):
        raise shared[0]
    return shared[0]


def seed_everything(seed: int) -> None:
    """Seeds the global generators, for users' code: nothing of ours draws from them, and vLLM seeds them alike."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device. To a GPU from pinned memory, as any other copy waits for all that is queued there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
