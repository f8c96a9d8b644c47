"""How a rank ends: the exceptions that end a run, exit codes, signals, and `exit.json`. No torch.

torchrun turns every non-zero code into 1, so the ranks also write `exit.json` {code, reason, rank, host} into the run
folder and to $GRPO_EXIT_FILE, which train.sh reads.
"""

import contextlib
import ctypes
import errno
import gc
import json
import math
import os
import re
import signal
import socket
import sys
import sysconfig
import time
import traceback
from pathlib import Path

from config import ConfigError

EXIT_CRASH = 1
EXIT_CONFIG = 2  # bad config, data or model folder
EXIT_CHECK = 3  # a check of the run itself: a logp gap over its limit, numbers that are not finite
EXIT_HUNG = 4  # watchdog.py
EXIT_MEMORY = 5  # run/memory.py
EXIT_SAVED = 75  # on a signal
PR_SET_PDEATHSIG = 1  # of prctl(2)
PF_EXITING = 4  # in the flags of /proc/PID/stat
GRACE_SECONDS = 5.0  # for another rank's word on why it ended, or for its stacks
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOST = re.compile("gloo|NCCL|Connection")  # in the text of a collective's error
START_TIME = time.monotonic()  # of this process, near enough

# Set by start_process_group.
peers: dict[int, tuple[str, int]] = {}  # host and process of each other rank
job_rank = int(os.environ.get("RANK", "0"))  # in a split job not the rank on its side, which RANK then is
num_trainers: int | None = None  # of a split job
skip_teardown = False  # of the interpreter, when this process ends: on CUDA


class StopRun(Exception):
    """A check of the run itself says that going on would be wrong; the message says what was seen and what it means."""


class Saved(Exception):
    """Told to stop by a signal, and everything is saved."""


class OutOfMemory(Exception):
    """Memory ran out; the message says where, what was planned and measured, and what mends it."""


class Interrupted(Exception):
    """The run was told to stop while it waited for replies or their grades: the step's samples are given up."""


class Signals:
    """A signal asks for a save and an orderly end, and so does the time `must_save_by` (seconds since this process
    began). The handler sets a flag; `pending` is this rank's view of it, and ranks ask one another (`any_rank`)."""

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
    """Of this machine, in all that is said to the user: GRPO_HOST_NAME, which no two machines may share."""
    return os.environ.get("GRPO_HOST_NAME") or socket.gethostname()


def die_with_parent() -> None:
    """SIGKILL for this process as soon as the one that started it ends. When torchrun is killed nobody tells the ranks,
    which would go on and keep the GPUs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # On a busy machine torchrun may be gone before a rank comes here. It is Python, also where it is process 1 itself.
    if (
        os.getppid() == 1
        and "TORCHELASTIC_RUN_ID" in os.environ
        and b"python" not in Path("/proc/1/cmdline").read_bytes()
    ):
        os.kill(os.getpid(), signal.SIGKILL)


def report_exit(code: int, reason: str, run_folder: Path | None) -> None:
    """Says how the run ended, once: to the user, and in `exit.json`, which scripts read. Rank 0 reports a good end; the
    first rank that ends reports a failure, because the others only lost their peer. Each machine's train.sh hears of a
    good end from its own first rank."""
    if code in (0, EXIT_SAVED):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        run_folder = run_folder if job_rank == 0 else None
    text = json.dumps({"code": code, "reason": reason, "rank": job_rank, "host": host_name()}) + "\n"
    files = [Path(os.environ["GRPO_EXIT_FILE"])] if "GRPO_EXIT_FILE" in os.environ else []
    files += [run_folder / "exit.json"] if run_folder else []
    if _write_once(files[0], text) if files else job_rank == 0:
        with contextlib.suppress(OSError):  # the output may be a file on the disk that is full
            who = f" ({rank_name(job_rank)})" if code else ""
            print(f"{reason}{who}", file=sys.stderr if code else sys.stdout, flush=True)
    for file in files[1:]:  # after that: its disk may be full, or hang
        _write_once(file, text)


def exit_process(code: int) -> None:
    """Ends this rank. On CPU not by os._exit: vLLM's engine there removes its shared memory in the interpreter's
    teardown, and what is left fails the next run."""
    if "wandb" in sys.modules:  # on rank 0 of a run that logs there: sends what is left
        sys.modules["wandb"].finish(code)
    if skip_teardown:
        # vLLM 0.24 frees its memory pools in an order that aborts a finished run (exit code 134), and 0.32 shuts its
        # engine down in an atexit function. Here nothing of that runs: the driver frees the GPU, and NCCL does not
        # complain of groups that were not destroyed. Graders end with their parent, and logs are flushed step by step.
        with contextlib.suppress(OSError):  # the output may be a file on the disk that is full
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    # A gloo thread that frees the last collective's tensor amid the teardown ends a finished run as crashed (13 of 50).
    time.sleep(0.2)
    gc.freeze()  # or the interpreter looks through a million objects, module by module: 4 s instead of 0.8
    sys.exit(code)


def _write_once(file: Path, text: str) -> bool:
    """Whole or not at all, and only if it is not there yet: then False. Where it cannot be written, says so."""
    whole = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        whole.write_text(text)
        os.link(whole, file)
    except FileExistsError:
        return False
    except OSError as error:
        print(f"WARNING: {file} cannot be written ({describe_os_error(error)})", file=sys.stderr, flush=True)
    finally:
        with contextlib.suppress(OSError):  # it could not be made
            whole.unlink()
    return True


def describe_failure(error: BaseException, run_folder: Path | None = None) -> tuple[int, str]:
    """(exit code, one-line reason) of what ended the run; an unexpected error also leaves its traceback on stderr."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG, f"error: {error}"
    if isinstance(error, Saved):
        return EXIT_SAVED, f"saved: {error}"
    if isinstance(error, StopRun):
        return EXIT_CHECK, f"stopped: {error}"
    if isinstance(error, OutOfMemory):
        return EXIT_MEMORY, f"out of memory: {error}"
    if lost := find_lost_rank(run_folder):
        return EXIT_CRASH, lost
    if any(host != host_name() for host, _ in peers.values()):
        is_lost = isinstance(error, RuntimeError) and LOST.search(str(error))  # a server's ConnectionError is none
        lost_folder = run_folder if is_lost else None  # else it is this rank that others lose
        if lost_folder:
            with contextlib.suppress(OSError):
                (lost_folder / "ends").mkdir(exist_ok=True)
                (lost_folder / "ends" / str(job_rank)).touch()
        time.sleep(GRACE_SECONDS)  # a rank on the lost one's machine knows more, and the first report counts
        if lost_folder and (first := _first_end(lost_folder)):
            return first
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        reason = describe_os_error(error)
    else:
        traceback.print_exception(error, file=sys.stderr)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    if frames and not error.__cause__:  # else the message was made to name the place
        reason += f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})"
    return EXIT_CRASH, f"crashed: {reason}"


def find_lost_rank(run_folder: Path | None) -> str | None:
    """The reason to end of a rank whose peer on this machine has ended, by a signal if nobody has reported; or None."""
    for rank, (host, pid) in peers.items():
        if host == host_name() and not _is_alive(pid):
            go_on = f"; continue with checkpointing.resume_from={run_folder}" if run_folder else ""
            return f"crashed: {rank_name(rank)} (process {pid}) is gone{go_on}"
    return None


def _first_end(run_folder: Path) -> tuple[int, str] | None:
    """(exit code, reason) of a rank that has lost another machine's: what the first rank to end has said; if none did,
    the machines of which no rank has lost another one; None where all have one."""
    with contextlib.suppress(FileNotFoundError):
        end = json.loads((run_folder / "exit.json").read_text())
        return end["code"], f"{rank_name(end['rank'])} ended first: {end['reason']}"
    silent = {host for host, _ in peers.values()} - {host_name()}
    silent -= {host for rank, (host, _) in peers.items() if (run_folder / "ends" / str(rank)).exists()}
    if not silent:
        return None
    names = ", ".join(sorted(silent))
    return EXIT_CRASH, f"crashed: no rank of {names} answers; continue with checkpointing.resume_from={run_folder}"


def rank_name(rank: int) -> str:
    """A rank of the job and its host, in a split job with its side: "generator rank 3 on node-1"."""
    side = "" if num_trainers is None else "trainer " if rank < num_trainers else "generator "
    host, _ = peers.get(rank, (host_name(), 0))
    return f"{side}rank {rank} on {host}"


def _is_alive(pid: int) -> bool:
    """Not while it ends either: the other ranks see its sockets close before it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" and not int(fields[6]) & PF_EXITING


def describe_os_error(error: OSError) -> str:
    """What is wrong, and with which file where the error knows it."""
    problem = "the disk is full" if error.errno in NO_ROOM else error.strerror or str(error)
    return f"{error.filename}: {problem}" if error.filename else problem
