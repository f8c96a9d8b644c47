"""torchrun for train.sh: `python -m system.launch TORCHRUN'S ARGUMENTS`. Ends with the ranks' exit code and says why.

torchrun turns every failure into exit code 1 and a page of its own, but it alone knows which signal killed a rank.
"""

import json
import os
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from system.exits import host_name


def main() -> int:
    """The exit code; the last line says why unless it is 0."""
    failed, failures = False, {}  # by rank, the first one first
    reason = "no rank left a reason; the end of the output above may tell"
    try:
        run.main()
    except (ChildFailedError, SignalException) as error:
        failed, failures = True, getattr(error, "failures", {})
    except RendezvousError as error:
        failed = True
        reason = f"not all nodes came, or one has left ({type(error).__name__}: {error}): give all of them the same "
        reason += "--nnodes and --rdzv_endpoint, whose port the others reach on node 0, and see the nodes' own logs"
    end = {"code": int(failed), "reason": reason}
    names = {rank: f"rank {rank} on {host_name()} (process {failure.pid}) " for rank, failure in failures.items()}
    if (file := Path(os.environ["GRPO_EXIT_FILE"])).exists():
        end = json.loads(file.read_text())
        if failed and end["code"] == 0:
            end = {"code": 1, "reason": "all was done, but then the processes did not end well"}
    elif failures and failures[first := next(iter(failures))].exitcode < 0:
        end["reason"] = f"crashed: {names[first]}is gone; continue with checkpointing.resume=auto"
    reason = " ".join(end["reason"].split()) + (f" (rank {end['rank']} on {end['host']})" if "rank" in end else "")
    for rank, failure in failures.items():
        if failure.exitcode < 0:
            reason = reason.replace(f"{names[rank]}is gone", f"{names[rank]}was killed by {failure.signal_name()}")
    if end["code"]:
        print(f"train.sh: exit code {end['code']}: {reason}", file=sys.stderr)
    return end["code"]


if __name__ == "__main__":
    sys.exit(main())
