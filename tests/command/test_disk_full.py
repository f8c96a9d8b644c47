"""A disk that is really full (a small tmpfs), or refuses to let a file grow: training goes on, the checkpoint before
loads, and nothing is left that is half written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import IN_A_NAMESPACE, skip_without_mounts

ROOT = Path(__file__).resolve().parents[2]


def found_by(worker, tmp_path_factory, *words, seconds=100):
    """What a process of tests/helpers found in a namespace of its own: (its JSON, the lines before it)."""
    skip_without_mounts(tmp_path_factory.mktemp("mount"))
    command = [*IN_A_NAMESPACE, sys.executable, f"tests/helpers/{worker}", str(tmp_path_factory.mktemp("disk")), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds)
    assert run.returncode == 0, run.stderr[-3000:]
    *told, last = run.stdout.splitlines()
    return json.loads(last), told


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """What there was after each save, and what the user was told."""
    return found_by("disk_full_worker.py", tmp_path_factory)


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
    assert "step_000003 was not saved" in told[1] and "a checkpoint needs 2." in told[1]
    assert all(line.startswith("WARNING: ") and "training continues" in line for line in told) and len(told) == 4


def test_three_in_a_row_stop_the_run_and_the_last_good_one_stays(saves):
    found, _ = saves
    assert found["full, 5"] == found["full, 6"] == of_step(4, [1, 4])  # counted from the last one that was saved
    stopped = found["full, 7"].pop("stopped")
    assert found["full, 7"] == {k: v for k, v in of_step(4, [1, 4]).items() if k != "stopped"}
    assert (
        "3 failed in a row: make room in" in stopped
        and "the newest saved one: " in stopped
        and "step_000004" in stopped
    )


def assert_nothing_is_half_written(runs):
    """What is there was whole (the process of the runs reads all of it). With room, each goes on to the same bits."""
    for name, found in runs.items():
        is_refused = "resumed" not in name and found["checkpoints"] == [] == found["metrics"]  # as it started
        assert found["code"] in ((0, 2, 3) if is_refused else (0, 3)), (name, found)
        assert found["left"] == [] and all(isinstance(step, int) for step in found["checkpoints"]), (name, found)
        assert "resumed" not in name or (1 in found["metrics"] and found["checkpoints"][-1] == 1), (name, found)
        assert found["same"] and found.get("again", 0) == 0, (name, found)


@pytest.mark.long
def test_runs_go_on_over_a_full_disk(tmp_path_factory):
    runs, _ = found_by("full_disk_runs.py", tmp_path_factory)
    assert_nothing_is_half_written(runs)
    full, limited = runs["full in step 2, unread"], runs["limit 9000, resumed"]
    assert full["code"] == 0 and full["exported"] and "again" not in full
    assert full["metrics"][-1] == 3 and full["checkpoints"][0] == 3
    assert limited["code"] == 3 and not limited["exported"] and limited["checkpoints"] == [1]


@pytest.mark.long
def test_runs_over_disks_that_are_full_at_any_point(tmp_path_factory):
    runs, _ = found_by("full_disk_runs.py", tmp_path_factory, "all", seconds=900)
    assert len(runs) == 22
    assert_nothing_is_half_written(runs)
