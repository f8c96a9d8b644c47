"""How a rank ends: the exceptions that end a run, exit codes, signals, and `exit.json`. No torch.

torchrun turns all codes but 0 into 1: ranks also write {code, reason, rank, host} to exit.json and $GRPO_EXIT_FILE, and
lost_rank where another rank's death was the reason.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from base.system.disk import describe_os_error, say, write_whole

EXIT_CRASH = 1
EXIT_CONFIG = 2  # bad config, data or model folder
EXIT_CHECK = 3  # a check of the run itself: a logp gap over its limit, numbers that are not finite
EXIT_HUNG = 4  # watchdog.py
EXIT_MEMORY = 5  # run/memory.py
EXIT_SAVED = 75  # on a signal
PR_SET_PDEATHSIG = 1  # of prctl(2)
PF_EXITING = 4  # in the flags of /proc/PID/stat
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
START_TIME = time.monotonic()  # of this process, near enough
_rank = os.environ.get("RANK", "0")
job_rank = int(_rank) if _rank.isdecimal() else 0  # as torchrun gave it; in a split job RANK becomes the rank of a side


class StopRun(Exception):
    """A check of the run itself says that going on would be wrong; the message says what was seen and what it means.
    cursor: of the data after the prompts that were the reason, if they were: a resumed run draws those after them."""

    def __init__(self, message: str, cursor: Mapping[str, object] | None = None):
        super().__init__(message)
        self.cursor = cursor


class Saved(Exception):
    """A signal told the run to stop, and everything is saved."""


class OutOfMemory(Exception):
    """Memory ran out; the message says where, what was planned and measured, and which keys fix it."""


class Interrupted(Exception):
    """The run was told to stop while it waited for replies or grades: the step's samples are given up."""


class Signals:
    """A signal asks for a save and an orderly end, and so does the time `must_save_by` (seconds since this process
    began). The handler sets a flag; `pending` is this rank's view, and ranks ask one another (`any_rank`)."""

    def __init__(self, must_save_by: float | None = None):
        self.received: int | None = None
        self.end = math.inf if must_save_by is None else START_TIME + must_save_by
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame) -> None:
        self.received = number

    def pending(self) -> bool:
        return self.received is not None or time.monotonic() > self.end


def host_name() -> str:
    """What messages call this machine: GRPO_HOST_NAME, which no two machines may share, or the host's own name."""
    return os.environ.get("GRPO_HOST_NAME") or socket.gethostname()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Sends this process the signal as soon as its parent ends: nothing else stops the ranks of a killed torchrun."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    # On a busy machine torchrun may be gone before a rank gets here. Torchrun runs as Python, even as process 1.
    has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if has_torchrun and os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes of the job by rank, for what is said when one of them ends."""

    processes: dict[int, tuple[str, int]] = field(default_factory=dict)  # host and process id
    num_trainers: int | None = None  # of a split job

    def name(self, rank: int) -> str:
        """A rank of the job and its host, in a split job also its side: "generator rank 3 on node-1"."""
        side = "" if self.num_trainers is None else "trainer " if rank < self.num_trainers else "generator "
        host, _ = self.processes.get(rank, (host_name(), 0))
        return f"{side}rank {rank} on {host}"

    def first_ranks(self) -> dict[str, int]:
        """The host of rank 0, then the others -> its first rank."""
        first_rank_of: dict[str, int] = {}
        for rank, (host, _) in sorted(self.processes.items()):
            first_rank_of.setdefault(host, rank)
        return first_rank_of

    def find_lost_rank(self) -> int | None:
        """A rank on this machine whose process has ended. None while all live."""
        for rank, (host, pid) in self.processes.items():
            if host == host_name() and not _is_alive(pid):
                return rank
        return None

    def find_lost(self, run_folder: Path | None) -> str | None:
        """Why this rank must end: a rank on this machine is gone, and nobody has said why. None while all live."""
        rank = self.find_lost_rank()
        if rank is None:
            return None
        _, pid = self.processes[rank]
        return f"crashed: {self.name(rank)} (process {pid}) is gone{how_to_go_on(run_folder)}"


NO_PEERS = Peers()  # before the ranks have met


def report_exit(code: int, reason: str, run_folder: Path | None, peers: Peers = NO_PEERS) -> None:
    """Says how the run ended, once: to the user, and to scripts in `exit.json`. Rank 0, and for train.sh each machine's
    first rank, reports a good end; the first rank that ends reports a failure, because the others only lost a peer."""
    if code in (0, EXIT_SAVED):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        run_folder = run_folder if job_rank == 0 else None
    end = {"code": code, "reason": reason, "rank": job_rank, "host": host_name()}
    lost_rank = peers.find_lost_rank() if code == EXIT_CRASH else None
    if lost_rank is not None:
        end["lost_rank"] = lost_rank
    text = json.dumps(end) + "\n"
    files = [Path(os.environ["GRPO_EXIT_FILE"])] if "GRPO_EXIT_FILE" in os.environ else []
    files += [run_folder / "exit.json"] if run_folder else []
    if _write_once(files[0], text) if files else job_rank == 0:
        who = f" ({peers.name(job_rank)})" if code else ""
        say(f"{reason}{who}", is_error=code != 0)
    for file in files[1:]:  # the run folder's last: its disk may be full, or hang
        _write_once(file, text)


def exit_process(code: int) -> None:
    """Ends this rank. On CPU not by os._exit: vLLM's teardown removes shared memory that would fail the next run."""
    if "wandb" in sys.modules:  # on rank 0 of a run that logs there: sends the rest, if W&B can
        with contextlib.suppress(Exception):
            sys.modules["wandb"].finish(code)
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        # vLLM 0.24 frees its memory pools in an order that aborts a finished run (exit code 134), and 0.32 shuts its
        # engine down in an atexit function. os._exit runs none of that: the driver frees the GPU, and NCCL does not
        # complain of groups that were not destroyed. Graders end with their parent, and logs are flushed step by step.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # Else a gloo thread frees the last collective's tensor amid the teardown, and a finished run crashes (13 of 50).
    time.sleep(0.2)
    gc.freeze()  # or the interpreter looks through a million objects, module by module: 4 s instead of 0.8
    sys.exit(code)


def _write_once(file: Path, text: str) -> bool:
    """False if the file is there already. Where it cannot be written, says so."""
    try:
        write_whole(file, text, replace=False)
    except FileExistsError:
        return False
    except OSError as error:
        say(f"WARNING: {file} cannot be written ({describe_os_error(error)})", is_error=True)
    return True


def how_to_go_on(run_folder: Path | None) -> str:
    """The end of a reason after which the run can be resumed."""
    return f"; continue with checkpointing.resume_from={run_folder}, if it has a checkpoint" if run_folder else ""


def _is_alive(pid: int) -> bool:
    """False also while the process ends: the other ranks see its sockets close before it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" and not int(fields[6]) & PF_EXITING
