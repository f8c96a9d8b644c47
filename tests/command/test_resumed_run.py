"""The real command, started, killed, resumed and told to stop: 6 steps without a break are bitwise 3 steps, a kill, a
resume and 3 more. `--long` has two ranks and another signal.

test_kill.py kills at every point of a save; here it is the whole command, once.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_life import ROOT, Life, assert_same, at_step, command, newest_step, steps, told_to_stop
from torch import equal

TWO_RANKS = pytest.param((2, signal.SIGUSR1, ("grading", 4)), marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[(1, signal.SIGTERM, ("rollout", 3)), TWO_RANKS])
def runs(request, tmp_path_factory):
    """(run folder that SIGKILL to a rank ended amid the update of step 8, a copy of it, as a kill amid step 6 would
    have left it, that was resumed and told to stop amid step 7, the output of the resumed run)."""
    work, (num_ranks, number, where) = tmp_path_factory.mktemp("resumed"), request.param
    words = (f"--nproc_per_node={num_ranks}", "grpo.max_num_steps=9")
    whole = killed(work, ("update", 8), 6, *words)
    assert steps(whole) == [1, 2, 3, 4, 5, 6, 7] and newest_step(whole) == 6
    resumed = shutil.copytree(whole, work / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "step_000006")
    with (resumed / "samples.jsonl").open("a") as file:
        file.write('{"step": 8, "cut')
    told_to_stop(work, number, where, *words, "checkpointing.save_period=4", resume=resumed)
    return whole, resumed, (work / "life_1.log").read_text()


def killed(work, slow, saved, *words):
    """A run whose last rank is killed when it is in the slow phase and step `saved` is on the disk, which may be slower
    than two steps: exit code 1, and nothing is left. Its folder."""
    life = Life(work, 9, *words, slow=slow)
    life.wait_for(life.mark.exists)
    life.wait_for(lambda: newest_step(work / "logs" / "exp_001") == saved)
    ranks = [pid for pid, line in life.processes().items() if b"-u\0grpo.py" in line]
    code, _ = life.end(signal.SIGKILL, ranks[-1])
    assert code == 1 and "train.sh: exit code 1: crashed: " in life.log.read_text()
    return work / "logs" / "exp_001"


def records(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_resumed_run_ends_with_the_same_bits(runs):
    """The checkpoint of a signal is that of a run which nobody stops."""
    whole, resumed, output = runs
    assert f"resumed from {resumed}/checkpoints/step_000003\n" in output
    assert "step 4/9" in output and "step 3/9" not in output
    assert steps(resumed) == [1, 2, 3, 4, 5, 6]
    assert_same(resumed, whole, 6)
    assert at_step(whole, 6)[1]["drawn"] == {"train": 18, "heldout": 6}  # 3 to 1
    (before, *_), (after, *_) = at_step(whole, 3), at_step(whole, 6)
    assert all(not equal(before[name], after[name]) for name in before if ".up_proj" in name)  # else equal says nothing


def test_metrics_are_those_of_the_unbroken_run_but_for_time(runs):
    whole, resumed, _ = runs
    for one, other in zip(records(whole, "metrics.jsonl")[:-1], records(resumed, "metrics.jsonl"), strict=True):
        numbers = {k: v for k, v in one.items() if not k.startswith(("timing/", "performance/"))}
        assert numbers == {k: v for k, v in other.items() if not k.startswith(("timing/", "performance/"))}


def test_sampler_and_trainer_agree_after_every_real_update(runs):
    rows = records(runs[0], "metrics.jsonl")
    assert all(r["train/grad_norm"] > 0 and r["train/logp_gap_max"] <= 1e-4 for r in rows), rows


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.7 * number for number in range(10)])
def test_a_signal_at_ten_moments_of_the_last_step(tmp_path, seconds):
    """The run ends with what exit.json says: it is done, or told to stop before it could be."""
    life = Life(tmp_path, 1, slow=("update", 1))
    life.wait_for(life.mark.exists)
    time.sleep(seconds)
    code, _ = life.end(signal.SIGTERM)
    end = json.loads((tmp_path / "logs" / "exp_001" / "exit.json").read_text())
    assert (end["code"], code in (0, 75)) == (code, True), life.log.read_text()[-3000:]
