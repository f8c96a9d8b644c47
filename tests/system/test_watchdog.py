"""A rank that is stuck, dead or slow: the others end too, in time, and the reason names rank and line."""

import ctypes
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import ends_of

from base.system import heartbeat, watchdog
from base.system.exits import report_exit
from base.system.failure import describe_failure
from base.system.ranks import start_process_group
from config import CheckpointingConfig, Config, ConfigError, LoggerConfig, WatchdogConfig
from run import folder as run_folder

pytestmark = pytest.mark.slow


def grade_forever():
    while True:
        time.sleep(0.1)  # the line the report names


def open_folders(folder: Path, ranks) -> None:
    """A run whose disk is shared, then one whose checkpoints are not, though the other host has folders of the same
    names."""
    run_folder.SHARED_DISK_SECONDS = 0.5
    shared = LoggerConfig(log_dir=str(folder / "shared"))
    opened = run_folder.open_run_folder(Config(logger=shared), ranks)
    assert opened == folder / "shared" / "exp_001" and not list(opened.glob("*.seen"))
    local = folder / f"disk_of_rank_{ranks.rank}"
    (local / "exp_002").mkdir(parents=True)
    cfg = Config(logger=shared, checkpointing=CheckpointingConfig(checkpoint_dir=str(local)))
    run_folder.open_run_folder(cfg, ranks)


def five_steps(folder: Path, ranks, fault: str) -> None:
    if fault == "unshared disk":
        open_folders(folder, ranks)
    least = 60.0 if fault == "silent" else 1.0
    limits = WatchdogConfig(factor=10, min_seconds=least, first_seconds=3 * least)
    watch = watchdog.Watchdog(ranks, folder, limits)
    for step in range(1, 6):
        watch.step = step
        watch.enter("generation")
        if ranks.rank == 1 and step == 4:
            if fault == "stuck, and no disk":
                folder.rename(folder.with_name("gone"))
            if fault.startswith("stuck"):
                grade_forever()
            elif fault == "interpreter lock":
                ctypes.PyDLL(None).sleep(1000)  # PyDLL: C code that keeps the lock
            elif fault.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "silent":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "slow":
                time.sleep(0.7)
        if fault == "killed" and step == 4:
            time.sleep(1000)  # as a kernel that waits for the other rank: no error comes out of it
        time.sleep(0.05)
        watch.enter("update")
        dist.all_reduce(torch.ones(1))
    watch.stop()
    report_exit(0, "done", folder, ranks.peers)


def live(folder: Path, fault: str, hosts: tuple[str, str]) -> None:
    """One rank to its end, as grpo.main has it."""
    watchdog.POLL_SECONDS, watchdog.GRACE_SECONDS, heartbeat.BEAT_SECONDS = 0.05, 0.8, 0.1
    if fault == "stuck":
        watchdog.GRACE_SECONDS = 20.0  # it ends as soon as both ranks have written their stacks, on a busy machine late
    os.environ["GRPO_HOST_NAME"] = hosts[int(os.environ["RANK"])]
    os.environ.pop("GRPO_EXIT_FILE", None)
    ranks, _ = start_process_group(tp_size=1)
    try:
        five_steps(folder, ranks, fault)
    except (RuntimeError, ConfigError) as error:  # of a collective
        code, reason = describe_failure(error, folder, ranks.peers)
        report_exit(code, reason, folder, ranks.peers)
        os._exit(code)


def run_ranks(folder, fault, hosts=("one", "one")):
    """(exit codes of two ranks, exit.json if there is one, their outputs)."""
    folder.mkdir(exist_ok=True)
    ends = ends_of(live, 2, folder, fault, hosts, seconds=60)
    end = json.loads((folder / "exit.json").read_text()) if (folder / "exit.json").exists() else None
    return [rank.code for rank in ends], end, [rank.output for rank in ends]


def test_stuck_rank_is_named_with_its_line(tmp_path):
    codes, end, outputs = run_ranks(tmp_path, "stuck", hosts=("one", "two"))
    assert codes == [4, 4] and end["code"] == 4
    assert (end["host"], end["rank"]) in {("one", 0), ("two", 1)}
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# the line the report names"))
    assert end["reason"].startswith("hung: rank 1 on two reached no collective; rank 1 on two: step 4, generation, ")
    assert f"is at test_watchdog.py:{line} grade_forever: time.sleep(0.1)" in end["reason"]
    said = f"{end['reason']} (rank {end['rank']} on {end['host']})\n"
    assert sum(said in text for text in outputs) == sum(end["reason"] in text for text in outputs) == 1  # said once
    waiting = (tmp_path / "stacks" / "rank_00000.txt").read_text()
    assert waiting.startswith("rank 0 on one: step 4, update, ")
    assert "waits for other ranks in test_watchdog.py" in waiting


def test_rank_whose_interpreter_is_locked_ends_too(tmp_path):
    codes, end, outputs = run_ranks(tmp_path, "interpreter lock")
    assert codes == [4, 1]
    assert end["reason"].startswith(
        "hung: rank 1 on one reached no collective; rank 1 on one: does not answer; stacks "
    )
    assert "Timeout" in outputs[1] and "in five_steps" in outputs[1]  # of the thread that needs no interpreter


@pytest.mark.parametrize("fault", ["killed", "killed, and the other waits in a collective"])
def test_death_of_a_rank_ends_the_others(tmp_path, fault):
    """In place of what the connection says, and at once: by the time that it is closed the peer is ending."""
    codes, end, outputs = run_ranks(tmp_path, fault)
    assert codes == [1, -9] and end["code"] == 1 and end["rank"] == 0
    go_on = re.escape(f"continue with checkpointing.resume_from={tmp_path}, if it has a checkpoint")
    assert re.fullmatch(rf"crashed: rank 1 on one \(process \d+\) is gone; {go_on}", end["reason"])
    assert outputs[0].splitlines()[-1] == f"{end['reason']} (rank 0 on one)" and "Traceback" not in outputs[0]


def test_a_machine_that_falls_silent_is_named_before_any_limit(tmp_path):
    """SIGSTOP: it neither beats nor closes a connection. The limits of this run are a minute."""
    codes, end, outputs = run_ranks(tmp_path, "silent", hosts=("one", "two"))
    assert codes == [4, -9], outputs
    go_on = re.escape(f"continue with checkpointing.resume_from={tmp_path}, if it has a checkpoint")
    assert re.fullmatch(rf"hung: two does not answer; {go_on}", end["reason"]) and end["host"] == "one"
    assert not (tmp_path / "stacks").exists()


def test_a_run_folder_that_went_away_does_not_keep_a_stuck_run_alive(tmp_path):
    codes, end, outputs = run_ranks(tmp_path / "run", "stuck, and no disk")
    assert 4 in codes and set(codes) <= {1, 4} and end is None
    reasons = [line for text in outputs for line in text.splitlines() if line.startswith(("hung: ", "crashed: "))]
    assert any("its stack cannot be written (" in reason and "No such file" in reason for reason in reasons), reasons


def test_slow_is_not_stuck(tmp_path):
    codes, end, _ = run_ranks(tmp_path, "slow")
    assert codes == [0, 0] and end == {"code": 0, "reason": "done", "rank": 0, "host": "one"}
    assert not (tmp_path / "stacks").exists()


def test_hosts_that_do_not_see_the_disk_are_named(tmp_path):
    codes, end, outputs = run_ranks(tmp_path, "unshared disk", hosts=("one", "two"))
    assert codes == [2, 2] and end["code"] == 2, outputs
    for said in ("error: ", f"{tmp_path}/disk_of_rank_1/exp_002", "two", "logger.log_dir", "checkpoint_dir"):
        assert said in end["reason"]
    assert sum(text.count("error: ") for text in outputs) == 1
