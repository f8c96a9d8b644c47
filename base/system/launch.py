"""torchrun for train.sh, `-m base.system.launch TORCHRUN'S ARGUMENTS`. Ends with the ranks' exit code and says why.

torchrun turns every failure into exit code 1 and a page of its own, but only torchrun knows which signal killed a rank.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from base.system.disk import keep_console, say
from base.system.exits import EXIT_CRASH, EXIT_HUNG, die_with_parent, host_name

HUNG_SECONDS = 15.0  # for the ranks of this node to end after one of them has reported a hang


def main(file: Path) -> int:
    """The exit code; the last line says why unless it is 0. file: where the ranks say how they ended."""
    threading.Thread(target=end_with_hung_ranks, args=[file], daemon=True).start()
    failures: dict[int, ProcessFailure] = {}  # by rank, the first one first
    # What holds where no rank has the last word: exit() in a library or a reward function ends a rank with code 0.
    reason = "crashed: no rank reported how it ended; see the output above, or dmesg"
    try:
        run.main()
    except SignalException as error:  # the ranks have had it, too: they finish their step and save
        reason = f"stopped by {error.sigval.name} before any rank handled signals"
    except ChildFailedError as error:
        failures = error.failures
        first_rank, first = next(iter(failures.items()))
        if first.exitcode < 0:
            reason = f"crashed: {how_it_was_killed(first_rank, first)}; continue with checkpointing.resume=auto"
    except RendezvousError as error:
        fix = "give all nodes the same --nnodes and --rdzv_endpoint, a port of node 0 that the others reach"
        reason = f"nodes are missing ({type(error).__name__}: {error}): {fix}; see each node's log"
    code = EXIT_CRASH
    if file.exists():
        code, reason = reported_end(json.loads(file.read_text()), failures)
    if code:
        say_end(code, reason)
    return code


def say_end(code: int, reason: str) -> None:
    say(f"train.sh: exit code {code}: {' '.join(reason.split())}", is_error=True)


def end_with_hung_ranks(file: Path) -> None:
    """A thread's work: ends this process, and the ranks with it, when they hang. Torchrun itself may hang by then, as
    it asks a store on another node."""
    while True:
        time.sleep(1)
        try:
            end = json.loads(file.read_text())
        except FileNotFoundError:
            continue
        code, reason = reported_end(end, {})
        if code == EXIT_HUNG:
            time.sleep(HUNG_SECONDS)
            say_end(code, reason)
            shutil.rmtree(file.parent)
            os._exit(code)


def reported_end(end: dict, failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """(exit code, reason) by what a rank reported; only torchrun knows the signal that killed another one."""
    if failures and end["code"] == 0:
        return EXIT_CRASH, "the run was done, but then a process did not exit cleanly"
    reason = f"{end['reason']} (rank {end['rank']} on {end['host']})"
    lost = failures.get(end.get("lost_rank"))
    if lost is not None and lost.exitcode < 0:
        reason += f"; {how_it_was_killed(end['lost_rank'], lost)}"
    return end["code"], reason


def how_it_was_killed(rank: int, failure: ProcessFailure) -> str:
    name = failure.signal_name()
    if name == "SIGKILL":
        name = "SIGKILL, by a user or for lack of memory (see dmesg)"
    return f"rank {rank} on {host_name()} (process {failure.pid}) was killed by {name}"


if __name__ == "__main__":
    keep_console()
    if os.environ.get("GRPO_PARENT") == str(os.getppid()):  # train.sh: if that is killed, the run saves and ends
        die_with_parent(signal.SIGTERM)
    with TemporaryDirectory() as folder:
        os.environ["GRPO_EXIT_FILE"] = f"{folder}/exit.json"
        code = main(Path(folder) / "exit.json")
    sys.exit(code)
