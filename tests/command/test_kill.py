"""Ranks killed while they save: every life loads what was committed last (tests/helpers/kill_worker.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kill_worker import POINTS

WORKER = Path(__file__).resolve().parents[1] / "helpers" / "kill_worker.py"


@pytest.mark.parametrize("num_kills", [15, pytest.param(200, marks=pytest.mark.long)])
def test_every_life_loads_the_last_commit(tmp_path, num_kills):
    command = [sys.executable, WORKER, tmp_path, str(num_kills), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])  # gloo says before it whom it could not reach
    print(found)
    assert sum(found["kills"].values()) == num_kills
    assert all(found["kills"][point] >= max(1, num_kills // 20) for point in POINTS), "each named point was reached"
    assert found["loaded"] >= num_kills // 3  # lives that had something to load, and lived to see it
    assert len(found["left"]) == 2 and all(name[5:].isdigit() for name in found["left"])
