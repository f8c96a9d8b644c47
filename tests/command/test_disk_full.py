"""A disk that is really full (a small tmpfs), or refuses to let a file grow: training goes on, the checkpoint before
loads, and nothing is left that is half written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def skip_without_mounts(folder):
    """Skips, with its reason, where this machine lets nobody mount over `folder` in a namespace."""
    try:
        mount = [*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
        allowed = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no `unshare` on this machine: its disk cannot be made full")
    if allowed.returncode:
        pytest.skip(f"this machine allows no mount in a user namespace ({allowed.stderr.strip()}): no disk to fill")


def runs_of(tmp_path_factory, *words, seconds=100):
    """What the process of tests/helpers found in a namespace of its own."""
    skip_without_mounts(tmp_path_factory.mktemp("mount"))
    command = [*IN_A_NAMESPACE, sys.executable, "tests/helpers/full_disk_runs.py"]
    command += [str(tmp_path_factory.mktemp("disk")), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def assert_nothing_is_half_written(runs):
    """What is there was whole (the process of the runs reads all of it). With room, each goes on to the same bits."""
    for name, found in runs.items():
        is_refused = "resumed" not in name and found["checkpoints"] == [] == found["metrics"]  # as it started
        assert found["code"] in ((0, 2, 3) if is_refused else (0, 3)), (name, found)
        assert found["left"] == [] and all(isinstance(step, int) for step in found["checkpoints"]), (name, found)
        assert "resumed" not in name or (1 in found["metrics"] and found["checkpoints"][-1] == 1), (name, found)
        assert found["same"] and found.get("again", 0) == 0, (name, found)


def test_runs_go_on_over_a_full_disk(tmp_path_factory):
    runs = runs_of(tmp_path_factory)
    assert_nothing_is_half_written(runs)
    full, limited = runs["full in step 2, unread"], runs["limit 9000, resumed"]
    assert full["code"] == 0 and full["exported"] and "again" not in full
    assert full["metrics"][-1] == 3 and full["checkpoints"][0] == 3
    assert limited["code"] == 3 and not limited["exported"] and limited["checkpoints"] == [1]


@pytest.mark.long
def test_runs_over_disks_that_are_full_at_any_point(tmp_path_factory):
    runs = runs_of(tmp_path_factory, "all", seconds=900)
    assert len(runs) == 22
    assert_nothing_is_half_written(runs)
