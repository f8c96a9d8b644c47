"""torchrun for train.sh, `-m system.launch TORCHRUN'S ARGUMENTS`. Ends with the ranks' exit code and says why.

torchrun turns every failure into exit code 1 and a page of its own, but only torchrun knows which signal killed a rank.
"""

import json
import os
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from system.disk import keep_console
from system.exits import host_name


def main() -> int:
    """The exit code; the last line says why unless it is 0."""
    # What holds where no rank has the last word: exit() in a library or a reward function ends a rank with code 0.
    end = {"code": 1, "reason": "crashed: no rank said how it ended; the output above, or dmesg, may tell"}
    failed, failures = False, {}  # by rank, the first failure first
    try:
        run.main()
    except (ChildFailedError, SignalException) as error:
        failed, failures = True, getattr(error, "failures", {})
    except RendezvousError as error:
        fix = "give all nodes the same --nnodes and --rdzv_endpoint, a port of node 0 that the others reach"
        end = {"code": 1, "reason": f"nodes are missing ({type(error).__name__}: {error}): {fix}; see each node's log"}
    killed = {rank: failure for rank, failure in failures.items() if failure.exitcode < 0}
    gone = {rank: f"rank {rank} on {host_name()} (process {killed[rank].pid}) is gone" for rank in killed}
    if (file := Path(os.environ["GRPO_EXIT_FILE"])).exists():
        end = json.loads(file.read_text())
        if failed and end["code"] == 0:
            end = {"code": 1, "reason": "all was done, but then the processes did not end well"}
    elif killed and next(iter(failures)) in killed:
        end["reason"] = f"crashed: {gone[next(iter(killed))]}; continue with checkpointing.resume=auto"
    reason = " ".join(end["reason"].split()) + (f" (rank {end['rank']} on {end['host']})" if "rank" in end else "")
    for rank, text in gone.items():
        name = killed[rank].signal_name().replace("SIGKILL", "SIGKILL, by a user or for want of memory (dmesg tells)")
        reason = reason.replace(text, text.replace("is gone", f"was killed by {name}"))
    if end["code"]:
        print(f"train.sh: exit code {end['code']}: {reason}", file=sys.stderr)
    return end["code"]


if __name__ == "__main__":
    keep_console()
    sys.exit(main())
