"""How a rank ends: the exceptions that end a run, exit codes, signals, and `exit.json`. No torch.

torchrun turns every non-zero code into 1, so the ranks also write `exit.json` {code, reason, rank} into the run folder
and to $GRPO_EXIT_FILE, which train.sh reads.
"""

import ctypes
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from config import ConfigError

EXIT_CRASH = 1
EXIT_CONFIG = 2  # bad config, data or model folder
EXIT_CHECK = 3  # a check of the run itself: a logp gap over its limit, numbers that are not finite
EXIT_HUNG = 4  # watchdog.py
EXIT_SAVED = 75  # on a signal
PR_SET_PDEATHSIG = 1  # of prctl(2)
START_TIME = time.monotonic()  # of this process, near enough


class StopRun(Exception):
    """A check of the run itself says that going on would be wrong; the message says what was seen and what it means."""


class Saved(Exception):
    """Told to stop by a signal, and everything is saved."""


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


def die_with_parent() -> None:
    """SIGKILL for this process as soon as the one that started it ends. When torchrun is killed nobody tells the ranks,
    which would go on and keep the GPUs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def report_exit(code: int, reason: str, run_folder: Path | None) -> None:
    """Says how the run ended, once: to the user, and in `exit.json`, {code, reason, rank}, which scripts read. Rank 0
    reports a good end; the first rank that ends reports a failure, because the others only lost their peer."""
    rank = int(os.environ.get("RANK", "0"))
    if code in (0, EXIT_SAVED) and rank != 0:
        return
    files = [run_folder / "exit.json"] if run_folder else []
    files += [Path(os.environ["GRPO_EXIT_FILE"])] if "GRPO_EXIT_FILE" in os.environ else []
    first = [_write_once(file, json.dumps({"code": code, "reason": reason, "rank": rank}) + "\n") for file in files]
    if any(first) or (not files and rank == 0):
        print(reason, file=sys.stderr if code else sys.stdout, flush=True)


def exit_process(code: int) -> None:
    """Ends this rank. Not by os._exit: vLLM's CPU engine removes its shared memory in the interpreter's teardown, and
    what is left fails the next run."""
    # A gloo thread that frees the last collective's tensor amid the teardown ends a finished run as crashed (13 of 50).
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
