"""A disk that is really full: a small tmpfs, in a mount namespace of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOUNT = 'mount -t tmpfs -o size=3m tmpfs "$0" && exec "$@"'


def on_tmpfs(folder, *command):
    words = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", MOUNT, str(folder), *command]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_training_goes_on_and_the_old_checkpoint_loads(tmp_path):
    try:
        if on_tmpfs(tmp_path, "true").returncode:
            pytest.skip("the kernel lets no user mount a tmpfs in a namespace")
    except FileNotFoundError:
        pytest.skip("unshare(1) is not installed")
    run = on_tmpfs(tmp_path, sys.executable, "tests/disk_worker.py", str(tmp_path))
    assert run.returncode == 0, run.stderr[-2000:]
    *said, seen = run.stdout.splitlines()
    one = [["step_000001"], 1, [1.0]]
    assert json.loads(seen) == [one, one, one, [["step_000001", "step_000004"], 4, [4.0]]]
    warnings = [line for line in said if line.startswith("WARNING: checkpoint step_")]
    assert len(warnings) == 2 and "MiB free, a checkpoint needs 1 MiB" in warnings[0]
    assert "No space left on device" in warnings[1] or "os error 28" in warnings[1].lower(), warnings[1]
