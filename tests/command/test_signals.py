"""The real command by train.sh, 2 ranks on CPU, stopped on request or killed: what is saved goes on to the same bits.

test_resumed_run.py tells a run to stop, too; what takes minutes is here and marked `long`.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_life import ROOT, Life, assert_same, command, newest_step, run_to_the_end, steps, told_to_stop
from safetensors.torch import load_file


@pytest.mark.long
def test_told_to_stop_and_killed(tmp_path, unbroken):
    """SIGTERM amid decoding, SIGKILL to a rank amid the update, SIGUSR1 amid grading; each part goes on from the one
    before, and what is saved in the end is the unbroken run's, to the bit."""
    folder = told_to_stop(tmp_path, signal.SIGTERM, ("rollout", 1))
    assert steps(folder) == [1]
    assert_same(folder, unbroken, 1)
    life = Life(tmp_path, 6, slow=("update", 3), resume=folder)  # of step 4
    life.wait_for(life.mark.exists)
    rank = next(pid for pid, line in life.processes().items() if b"-u\0grpo.py" in line)
    code, _ = life.end(signal.SIGKILL, rank)
    assert code == 1 and "crashed" in json.loads((folder / "exit.json").read_text())["reason"]
    assert newest_step(folder) in (1, 3), "the save of step 3 may not have been committed"
    told_to_stop(tmp_path, signal.SIGUSR1, ("grading", 3), resume=folder)
    assert newest_step(folder) in (3, 5)
    assert_same(folder, unbroken, newest_step(folder))


LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=3")


@pytest.mark.long
@pytest.mark.parametrize(("num_kills", "overrides"), [(25, ()), (6, LORA)], ids=["all weights", "lora"])
def test_chain_of_kills(tmp_path, num_kills, overrides):
    """A random rank, or torchrun, at random instants; each life goes on from what the last one has committed. In the
    end checkpoint and exports are those of the unbroken run, to the bit."""
    num_steps, rng, kills = 60 + 8 * num_kills, random.Random(7), []
    works = [tmp_path / name for name in ("whole", "killed")]
    for work in works:
        work.mkdir()
    whole, folder = run_to_the_end(works[0], num_steps, *overrides), works[1] / "logs" / "exp_001"
    for _ in range(num_kills):
        before = newest_step(folder)
        life = Life(works[1], num_steps, *overrides, resume=folder if before else None)
        life.wait_for(lambda life=life: re.search(r"^engine: ", life.log.read_text(), re.M))
        time.sleep(rng.uniform(0, 6))
        victims = [pid for pid, line in life.processes().items() if b"grpo.py\0" in line]
        assert len(victims) == 3, "two ranks and torchrun"
        assert life.end(signal.SIGKILL, rng.choice(victims))[0] not in (0, 75)
        done, committed = max(steps(folder), default=0), newest_step(folder)
        kills.append((done, committed))
        assert committed >= before and done - committed <= 3, kills  # save_period
        if committed == 0:  # nothing to go on from
            folder.rename(works[1] / f"nothing_{len(kills)}")
    print(f"killed after steps, with a checkpoint of step: {kills}")
    run_to_the_end(works[1], num_steps, *overrides, resume=folder)
    assert_same(folder, whole, num_steps)
    for file in whole.glob("hf_*/*.safetensors"):
        one, other = load_file(file), load_file(folder / file.relative_to(whole))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_torchrun_killed_while_the_ranks_import_leaves_none(tmp_path):
    command_line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "grpo.py"]
    command_line += ["configs/smoke.yaml", f"logger.log_dir={tmp_path}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        torchrun = subprocess.Popen(command_line, cwd=ROOT, env=env, stdout=log, stderr=log)
    end = time.monotonic() + 60
    while len(ranks := children_of(torchrun.pid)) < 2 or "loading torch" not in (tmp_path / "log").read_text():
        assert time.monotonic() < end and torchrun.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    time.sleep(0.5)  # both are past the first lines of grpo.py, and import torch for seconds
    torchrun.kill()
    torchrun.wait()
    end = time.monotonic() + 20
    while (left := [pid for pid in ranks if command(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def children_of(pid):
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
