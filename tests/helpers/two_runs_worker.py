"""Runs of `grpo.main` that start together in one run folder, with a stand-in for vLLM: two_runs_worker.py FOLDER PAIRS

One process that has imported everything forks each run. An unbroken run of 4 steps comes first; each pair goes on from
a copy of it that was cut back to step 2. PAIRS is json: the overrides of each pair, where {run} is its run folder.
Writes answer.json: the unbroken run's folder, and of each pair its folder, its exit codes and what was said.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import fake_vllm

fake_vllm.install()
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from small_run import arguments, write_rows

import grpo

SETTINGS = ("checkpointing.save_period=1", "checkpointing.keep_latest=9", "grpo.val_at_start=false")
SETTINGS += ("logger.tensorboard_enabled=false", "grpo.val_at_end=false", "checkpointing.save_hf_at_end=false")


def start(work: Path, name: str, overrides: list[str], go: int) -> int:
    """A run in a process of its own, which waits for the end of the pipe `go`. What it says is in the file `name`."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(work / name, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["GRPO_EXIT_FILE"] = str(work / f"{name}.json")
    sys.argv = ["grpo.py", *arguments(work), *SETTINGS, *overrides]
    os.read(go, 1)
    code = grpo.main()
    sys.stdout.flush()
    os._exit(code)


def run_together(work: Path, names: list[str], overrides: list[str]) -> list[int]:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, False)
    pids = []
    for name in names:
        pids.append(start(work, name, overrides, read_end))
    os.write(write_end, b"!" * len(names))
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main(work: Path, pairs: list[list[str]]) -> None:
    os.chdir(ROOT)
    whole = work / "whole"
    whole.mkdir()
    write_rows(whole)
    assert run_together(whole, ["log"], []) == [0], (whole / "log").read_text()
    ends = []
    for number, overrides in enumerate(pairs):
        pair = work / f"pair_{number}"
        pair.mkdir()
        write_rows(pair)
        run = pair / "exp_001"
        shutil.copytree(whole / "exp_001", run)
        for step in (3, 4):
            shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
        codes = run_together(pair, ["a", "b"], [word.format(run=run) for word in overrides])
        ends.append({"run": str(run), "codes": codes, "said": [(pair / name).read_text() for name in ("a", "b")]})
    (work / "answer.json").write_text(json.dumps({"whole": str(whole / "exp_001"), "pairs": ends}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
