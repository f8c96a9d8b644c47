"""torchrun for train.sh, `-m support.system.launch TORCHRUN'S ARGUMENTS`. Ends with the ranks' exit code and says why.

torchrun turns every failure into exit code 1 and a page of its own, but only torchrun knows which signal killed a rank.
"""

import json
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from support.system.disk import keep_console, say
from support.system.exits import die_with_parent, host_name


def main(file: Path) -> int:
    """The exit code; the last line says why unless it is 0. file: where the ranks say how they ended."""
    # What holds where no rank has the last word: exit() in a library or a reward function ends a rank with code 0.
    end = {"code": 1, "reason": "crashed: no rank reported how it ended; see the output above, or dmesg"}
    failed, failures = False, {}  # by rank, the first failure first
    try:
        run.main()
    except SignalException as error:
        failed, end = True, {"code": 1, "reason": f"stopped by {error.sigval.name} before any rank handled signals"}
    except ChildFailedError as error:
        failed, failures = True, error.failures
    except RendezvousError as error:
        fix = "give all nodes the same --nnodes and --rdzv_endpoint, a port of node 0 that the others reach"
        end = {"code": 1, "reason": f"nodes are missing ({type(error).__name__}: {error}): {fix}; see each node's log"}
    killed = {rank: failure for rank, failure in failures.items() if failure.exitcode < 0}
    gone = {rank: f"rank {rank} on {host_name()} (process {killed[rank].pid}) is gone" for rank in killed}
    if file.exists():
        end = json.loads(file.read_text())
        if failed and end["code"] == 0:
            end = {"code": 1, "reason": "the run was done, but then a process did not exit cleanly"}
    elif killed and next(iter(failures)) in killed:
        end["reason"] = f"crashed: {gone[next(iter(killed))]}; continue with checkpointing.resume=auto"
    reason = " ".join(end["reason"].split()) + (f" (rank {end['rank']} on {end['host']})" if "rank" in end else "")
    for rank, text in gone.items():
        name = killed[rank].signal_name().replace("SIGKILL", "SIGKILL, by a user or for lack of memory (see dmesg)")
        reason = reason.replace(text, text.replace("is gone", f"was killed by {name}"))
    if end["code"]:
        say(f"train.sh: exit code {end['code']}: {reason}", is_error=True)
    return end["code"]


if __name__ == "__main__":
    keep_console()
    if os.environ.get("GRPO_PARENT") == str(os.getppid()):  # train.sh: if that is killed, the run saves and ends
        die_with_parent(signal.SIGTERM)
    with TemporaryDirectory() as folder:
        os.environ["GRPO_EXIT_FILE"] = f"{folder}/exit.json"
        code = main(Path(folder) / "exit.json")
    sys.exit(code)
