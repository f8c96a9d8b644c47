"""The process a rank lives in: process group, device, threads, signals, exit codes, run folder, phase timers.

Owns everything between torchrun and the training loop that is neither model nor data. Exit codes of the process:
0 done · 1 crashed · 2 bad config, data or model folder · 3 stopped by a check of the run itself (a logp gap over its
limit, numbers that are not finite) · 4 hung (watchdog.py) · 75 saved on a signal. torchrun turns every non-zero code
into 1, so each rank 0 also writes `exit.json` {code, reason, rank} into the run folder (and to $GRPO_EXIT_FILE, which
train.sh reads).
"""

import gc
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from config import ConfigError

EXIT_CRASH, EXIT_CONFIG, EXIT_CHECK, EXIT_HUNG, EXIT_SAVED = 1, 2, 3, 4, 75
BEGAN = time.monotonic()
T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # longer than any rollout: ranks wait for the slowest one's samples


class StopRun(Exception):
    """A check of the run itself says that going on would be wrong; the message says what was seen and what it means."""


class Saved(Exception):
    """Told to stop by a signal, and everything is saved."""


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

    def say(self, text: str) -> None:
        """A line for the user: rank 0's."""
        if self.rank == 0:
            print(text, flush=True)

    @property
    def leads_engine(self) -> bool:
        """Ranks of a group hold the same samples: the first one reports them."""
        return self.rank % self.tp_size == 0

    def engine_agrees(self, told: Callable[[], bool]) -> bool:
        """Whether any rank of this one's engine is `told`: all of them answer alike, and must ask at the same time."""
        return told() if self.engine_group is None else any_of(told(), self.engine_group)

    def from_leader(self, compute: Callable[[], T]) -> T:
        """What `compute` gives on the rank that leads this one's engine, on all ranks of the engine."""
        found = [compute() if self.leads_engine else None]
        if self.engine_group is not None:
            dist.broadcast_object_list(found, src=self.dp_rank * self.tp_size, group=self.engine_group)
        return found[0]


def start(tp_size: int) -> tuple[Ranks, torch.device]:
    """Joins the process group torchrun laid out (RANK, WORLD_SIZE, ...; a lone process needs none of them).

    Objects and CPU tensors go over gloo, CUDA tensors over nccl. Threads per rank are OMP_NUM_THREADS: train.sh sets
    it, and torchrun to 1. Ranks with more threads than their share of the cores are 30x slower (DESIGN 4).
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(_free_port())
    ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), tp_size)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", ranks.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device if cuda else None)
    if tp_size > 1:
        group, _ = dist.new_subgroups(tp_size, timeout=COLLECTIVE_TIMEOUT, backend="gloo")
        ranks = replace(ranks, engine_group=group)
    return ranks, device


def any_of(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether any rank (of the group) has the flag: a collective of these ranks."""
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags.item())


def of_rank_0(value: T) -> T:
    """Rank 0's `value`, on all ranks."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def seed_everything(seed: int) -> None:
    """Seeds the global generators. Nothing of ours draws from them (vLLM reseeds them); this is for users' code."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Signals:
    """A signal asks for a save and an orderly end, and so does the time `must_save_by` (seconds since this process
    began). The handler sets a flag, `pending` is this rank's view of it, `requested` that of all ranks."""

    def __init__(self, must_save_by: float | None = None):
        self.received: int | None = None
        self.end = math.inf if must_save_by is None else BEGAN + must_save_by
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame) -> None:
        self.received = number

    def pending(self) -> bool:
        return self.received is not None or time.monotonic() > self.end

    def requested(self) -> bool:
        """True on all ranks as soon as one got a signal: a collective, called by all at the same point of the loop."""
        return any_of(self.pending())


class Timers:
    """Seconds of each named phase since the last `take`. `enter` is told of each phase that begins: the watchdog."""

    def __init__(self, enter: Callable[[str], None]):
        self.seconds: dict[str, float] = defaultdict(float)
        self.enter = enter

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.enter(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a phase ends when its kernels have
            self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


# ------------------------------------------------------------------------------------------------------- run folder


def open_run_folder(log_dir: str, resume_from: str | None, ranks: Ranks) -> Path:
    """The run's folder: the one to resume, or a new `exp_NNN` in `log_dir`. Rank 0 makes it, all get the same path."""
    folder = resume_from
    if ranks.rank == 0 and resume_from is None:
        taken = [int(p.name[4:]) for p in Path(log_dir).glob("exp_*") if p.name[4:].isdigit()]
        number = max(taken, default=0) + 1
        while True:
            try:
                (Path(log_dir) / f"exp_{number:03d}").mkdir(parents=True)
                break
            except FileExistsError:  # another run took it just now
                number += 1
        folder = str(Path(log_dir) / f"exp_{number:03d}")
    elif ranks.rank == 0:
        (Path(resume_from) / "exit.json").unlink(missing_ok=True)  # it says how the part before ended
        shutil.rmtree(Path(resume_from) / "stacks", ignore_errors=True)
    return Path(of_rank_0(folder))


def finish(code: int, reason: str, run_folder: Path | None) -> bool:
    """Says how the run ended, where train.sh and other scripts read it: `exit.json`, {code, reason, rank}. Of a good
    end rank 0 tells; of a failure the first rank that ends, because the others only lost their peer. Returns whether
    this rank is the one to tell the user."""
    rank = int(os.environ.get("RANK", "0"))
    if code in (0, EXIT_SAVED) and rank != 0:
        return False
    files = [run_folder / "exit.json"] if run_folder else []
    files += [Path(os.environ["GRPO_EXIT_FILE"])] if "GRPO_EXIT_FILE" in os.environ else []
    first = [_write_once(file, json.dumps({"code": code, "reason": reason, "rank": rank}) + "\n") for file in files]
    return any(first) or (not files and rank == 0)


def leave(code: int) -> None:
    """Ends this rank. A gloo thread that lets go of the last collective's tensor while the interpreter is torn down
    calls std::terminate, and a finished run would count as crashed (13 of 50 seen): it gets the time to do so before.
    No os._exit: vLLM's CPU engine removes its shared memory in the teardown, and what is left fails the next run."""
    time.sleep(0.2)
    gc.freeze()  # or the interpreter looks through a million objects, module by module: 4 s instead of 0.8
    sys.exit(code)


def _write_once(file: Path, text: str) -> bool:
    """Whole or not at all, and only if it is not there yet."""
    whole = file.with_name(f"{file.name}.{os.getpid()}")
    whole.write_text(text)
    try:
        os.link(whole, file)
        return True
    except FileExistsError:
        return False
    finally:
        whole.unlink()


def describe_failure(error: BaseException) -> tuple[int, str]:
    """(exit code, one-line reason) of what ended the run; an unexpected error also leaves its traceback on stderr."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG, f"error: {error}"
    if isinstance(error, Saved):
        return EXIT_SAVED, f"saved: {error}"
    if isinstance(error, StopRun):
        return EXIT_CHECK, f"stopped: {error}"
    traceback.print_exception(error, file=sys.stderr)
    return EXIT_CRASH, f"crashed: {type(error).__name__}: {error}"
