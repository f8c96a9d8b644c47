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


def main() -> int:
    """The exit code; the last line says why unless it is 0."""
    failed, failures = False, {}  # rank -> failure, the first one first
    try:
        run.main()
    except SignalException:  # the ranks got it too, and have said how they ended
        failed = True
    except ChildFailedError as error:
        failed, failures = True, error.failures
    end = {"code": int(failed), "reason": "no rank left a reason; the end of the output above may tell"}
    if (file := Path(os.environ["GRPO_EXIT_FILE"])).exists():
        end = json.loads(file.read_text())
        if failed and end["code"] == 0:
            end = {"code": 1, "reason": "all was done, but then the processes did not end well"}
    elif failures and (first := next(iter(failures.items())))[1].exitcode < 0:
        end["reason"] = f"crashed: rank {first[0]} (process {first[1].pid}) is gone"
        end["reason"] += "; continue with checkpointing.resume=auto"
    if end["code"]:
        reason = " ".join(end["reason"].split())
        for failure in failures.values():
            if failure.exitcode < 0:
                name = f"(process {failure.pid})"
                reason = reason.replace(f"{name} is gone", f"{name} was killed by {failure.signal_name()}")
        said_by = f" (rank {end['rank']})" if "rank" in end else ""
        print(f"train.sh: exit code {end['code']}: {reason}{said_by}", file=sys.stderr)
    return end["code"]


if __name__ == "__main__":
    sys.exit(main())
