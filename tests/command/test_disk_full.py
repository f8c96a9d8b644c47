"""A disk that is really full (a small tmpfs): training goes on, the checkpoint before loads, and half a one is gone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import IN_A_NAMESPACE, skip_without_mounts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """What tests/helpers/disk_full_worker.py found after each save, and what it told the user."""
    skip_without_mounts(tmp_path_factory.mktemp("mount"))
    worker = ["tests/helpers/disk_full_worker.py", str(tmp_path_factory.mktemp("disk"))]
    command = [*IN_A_NAMESPACE, sys.executable, *worker]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    *told, last = run.stdout.splitlines()
    return json.loads(last), told


def of_step(step, left, stopped=None):
    values, loaded = [float(step)], {"step": step, "cursor": 7 * step}
    return {"left": [f"step_{n:06d}" for n in left], "loaded": loaded, "values": values, "stopped": stopped}


def test_a_full_disk_costs_its_checkpoint_and_nothing_else(saves):
    found, told = saves
    assert found["room"] == of_step(1, [1])
    assert found["full while it is written"] == of_step(1, [1])
    assert found["full before"] == of_step(1, [1])
    assert found["room again"] == of_step(4, [1, 4])
    assert "step_000002 was not saved" in told[0] and "No space left on device" in told[0]
    assert "step_000003 was not saved" in told[1] and "a checkpoint needs 2 MiB" in told[1]
    assert all(line.startswith("WARNING: ") and "training goes on" in line for line in told) and len(told) == 4


def test_three_in_a_row_stop_the_run_and_the_last_good_one_stays(saves):
    found, _ = saves
    assert found["full, 5"] == found["full, 6"] == of_step(4, [1, 4])  # counted from the last one that was saved
    stopped = found["full, 7"].pop("stopped")
    assert found["full, 7"] == {k: v for k, v in of_step(4, [1, 4]).items() if k != "stopped"}
    assert "3 failed in a row: make room in" in stopped and "the newest is " in stopped and "step_000004" in stopped
