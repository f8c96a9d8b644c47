"""One rank of tests/system/test_watchdog.py: watchdog_worker.py FOLDER FAULT, in the environment of a rank."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from config import CheckpointingConfig, Config, ConfigError, LoggerConfig, WatchdogConfig
from run import folder as run_folder
from system import watchdog
from system.exits import describe_failure, exit_process, report_exit
from system.ranks import start_process_group

watchdog.POLL_SECONDS, watchdog.GRACE_SECONDS = 0.05, 0.8
run_folder.SHARED_DISK_SECONDS = 0.5


def grade_forever():
    while True:
        time.sleep(0.1)  # the line the report names


def open_folders(folder: Path, ranks) -> None:
    """A run whose disk is shared, one whose checkpoints' is not, though the other host has folders of these names."""
    shared = LoggerConfig(log_dir=str(folder / "shared"))
    opened = run_folder.open_run_folder(Config(logger=shared), ranks)
    assert opened == folder / "shared" / "exp_001" and not list(opened.glob("*.seen"))
    local = folder / f"disk_of_rank_{ranks.rank}"
    (local / "exp_002").mkdir(parents=True)
    (local / "exp_002" / "0123.seen").touch()
    cfg = Config(logger=shared, checkpointing=CheckpointingConfig(checkpoint_dir=str(local)))
    run_folder.open_run_folder(cfg, ranks)


def main(folder: Path, fault: str) -> None:
    ranks, _ = start_process_group(tp_size=1)
    if fault == "unshared disk":
        open_folders(folder, ranks)
    watch = watchdog.Watchdog(ranks, folder, WatchdogConfig(factor=10, min_seconds=1.0, first_seconds=3.0))
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
            elif fault == "slow":
                time.sleep(0.7)
        if fault == "killed" and step == 4:
            time.sleep(1000)  # as a kernel that waits for the other rank: no error comes out of it
        time.sleep(0.05)
        watch.enter("update")
        dist.all_reduce(torch.ones(1))
    watch.stop()
    report_exit(0, "done", folder)


if __name__ == "__main__":
    code = 0
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except (RuntimeError, ConfigError) as error:  # of a collective, as grpo.main has it
        code, reason = describe_failure(error, Path(sys.argv[1]))
        report_exit(code, reason, Path(sys.argv[1]))
    exit_process(code)
