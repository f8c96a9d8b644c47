"""A rank that is stuck, dead or slow: the others end too, in time, and the reason names rank and line."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config
from run import folder as run_folder

pytestmark = pytest.mark.slow

WORKER = Path(__file__).resolve().parents[1] / "helpers" / "watchdog_worker.py"


def run_ranks(folder, fault, hosts=("one", "one")):
    """(exit codes of two ranks, exit.json if there is one, their stderr); none of them is left after a minute."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if k != "GRPO_EXIT_FILE"}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, folder, fault],
            env=clean | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GRPO_HOST_NAME": hosts[rank]},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    end = json.loads((folder / "exit.json").read_text()) if (folder / "exit.json").exists() else None
    return [rank.returncode for rank in ranks], end, errors


def test_stuck_rank_is_named_with_its_line(tmp_path):
    codes, end, errors = run_ranks(tmp_path, "stuck", hosts=("one", "two"))
    assert codes == [4, 4] and end["code"] == 4
    assert (end["host"], end["rank"]) in {("one", 0), ("two", 1)}
    line = next(i for i, text in enumerate(WORKER.read_text().splitlines(), 1) if "the line the report names" in text)
    assert end["reason"].startswith("hung: rank 1 on two did not come; rank 1 on two: step 4, generation, ")
    assert f"is at watchdog_worker.py:{line} grade_forever: time.sleep(0.1)" in end["reason"]
    said = f"{end['reason']} (rank {end['rank']} on {end['host']})\n"
    assert sum(said in text for text in errors) == sum(end["reason"] in text for text in errors) == 1  # said once
    waiting = (tmp_path / "stacks" / "rank_00000.txt").read_text()
    assert (
        waiting.startswith("rank 0 on one: step 4, update, ")
        and "waits for other ranks in watchdog_worker.py" in waiting
    )


def test_rank_whose_interpreter_is_locked_ends_too(tmp_path):
    codes, end, errors = run_ranks(tmp_path, "interpreter lock")
    assert codes == [4, 1]
    assert end["reason"].startswith("hung: rank 1 on one did not come; rank 1 on one: does not answer; stacks ")
    assert "Timeout" in errors[1] and "in main" in errors[1]  # of the thread that needs no interpreter


def test_death_of_a_rank_ends_the_others(tmp_path):
    codes, end, _ = run_ranks(tmp_path, "killed")
    assert codes == [1, -9] and end["code"] == 1
    assert re.fullmatch(
        rf"crashed: rank 1 on one \(process \d+\) is gone; continue with checkpointing\.resume_from={tmp_path}",
        end["reason"],
    )


def test_a_collective_that_loses_its_peer_names_it(tmp_path):
    """In place of what the connection says, and at once: by the time that it is closed the peer is ending."""
    codes, end, errors = run_ranks(tmp_path, "killed, and the other waits in a collective")
    assert codes == [1, -9] and end["code"] == 1 and end["rank"] == 0
    assert re.fullmatch(
        rf"crashed: rank 1 on one \(process \d+\) is gone; continue with checkpointing\.resume_from={tmp_path}",
        end["reason"],
    )
    assert errors[0].splitlines()[-1] == f"{end['reason']} (rank 0 on one)" and "Traceback" not in errors[0], errors[0]


def test_a_run_folder_that_went_away_does_not_keep_a_stuck_run_alive(tmp_path):
    codes, end, errors = run_ranks(tmp_path / "run", "stuck, and no disk")
    assert 4 in codes and set(codes) <= {1, 4} and end is None
    reasons = [line for text in errors for line in text.splitlines() if line.startswith(("hung: ", "crashed: "))]
    assert any("its stack cannot be written (" in reason and "/run/stacks: No such" in reason for reason in reasons)


def test_slow_is_not_stuck(tmp_path):
    codes, end, _ = run_ranks(tmp_path, "slow")
    assert codes == [0, 0] and end == {"code": 0, "reason": "done", "rank": 0, "host": "one"}
    assert not (tmp_path / "stacks").exists()


def test_hosts_that_do_not_see_the_disk_are_named(tmp_path):
    codes, end, errors = run_ranks(tmp_path, "unshared disk", hosts=("one", "two"))
    reason = f"error: {tmp_path}/disk_of_rank_1/exp_002: one writes there, and two cannot see it: put logger.log_dir"
    assert codes == [2, 2] and end["code"] == 2 and end["reason"].startswith(reason), errors
    with_host = f"{end['reason']} (rank {end['rank']} on {end['host']})"
    assert (end["rank"], end["host"]) in {(0, "one"), (1, "two")}
    assert [line for text in errors for line in text.splitlines() if line.startswith("error:")] == [with_host]


def test_provenance_repeats_the_program(tmp_path, monkeypatch):
    git = {"rev-parse": "abc123\n", "diff": "--- a\n+++ b\n"}
    monkeypatch.setattr(run_folder, "_git", lambda verb, *_: git[verb])
    monkeypatch.setattr(sys, "argv", ["grpo.py", "my config.yaml", "grpo.seed=1"])
    run_folder.write_provenance(tmp_path, Config(), 2)
    git["diff"] = ""
    run_folder.write_provenance(tmp_path, Config(), 4)  # resumed
    first, second = json.loads((tmp_path / "provenance.json").read_text())
    assert first["commit"] == "abc123" and first["command"] == "grpo.py 'my config.yaml' grpo.seed=1"
    assert (first["world_size"], second["world_size"]) == (2, 4)
    assert (tmp_path / first["changes"]).read_text() == git["diff"] or (
        tmp_path / first["changes"]
    ).read_text() == "--- a\n+++ b\n"
    assert second["changes"] is None and first["packages"]["numpy"] and first["machine"]["cores"] == os.cpu_count()


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_provenance_without_git(tmp_path, monkeypatch, missing):
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(run_folder, "ROOT", tmp_path)
    run_folder.write_provenance(tmp_path, Config(), 1)
    (part,) = json.loads((tmp_path / "provenance.json").read_text())
    assert part["commit"] == "unknown" and part["changes"] is None
