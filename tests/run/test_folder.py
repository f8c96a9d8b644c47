"""One run in a folder: which processes hold its lock, when it ends, and what a second run hears."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from one_process import run_in_this_process
from small_run import arguments, write_rows

import grpo
from config import CheckpointingConfig, Config, ConfigError, LoggerConfig
from run import folder as run_folder

RANK_0, OTHER_RANK = fcntl.LOCK_EX, fcntl.LOCK_SH


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The holder has written who it is long ago."""
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: None)


@pytest.fixture
def start(tmp_path):
    """Starts a process that locks the folder and lives on: its pid. `also` runs in it first."""
    pids = []

    def start(kind=RANK_0, also=lambda: None, folder=tmp_path):
        folder.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                run_folder._lock(folder, kind)
                also()
                os.write(write_end, b"!")
                signal.pause()
            finally:
                os._exit(1)
        os.close(write_end)
        assert os.read(read_end, 1) == b"!", "the process could not lock the folder"
        os.close(read_end)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        end(pid)


def end(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def refusal(folder):
    with pytest.raises(ConfigError) as error:
        run_folder._lock(folder, RANK_0)
    return str(error.value)


def test_the_second_run_hears_of_the_first(tmp_path, start):
    first = start()
    expected = (
        rf"{tmp_path} is in use by another run \(process {first} on {socket.gethostname()}, since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+\): wait for its end, or stop it"
    )
    assert re.fullmatch(expected, refusal(tmp_path))
    end(first)
    second = start()
    assert f"(process {second} on " in refusal(tmp_path)


def test_all_ranks_of_the_first_run_keep_the_second_out(tmp_path, start):
    """Rank 0 was killed, and another rank is still about to write exit.json."""
    first, other = start(), start(OTHER_RANK)
    end(first)
    assert f"(process {first} on " in refusal(tmp_path)
    end(other)
    run_folder._lock(tmp_path, RANK_0)


@pytest.mark.slow
def test_where_a_second_run_is_refused_and_where_it_is_not(tmp_path, one_rank, start):
    logs, shared = tmp_path / "logs", tmp_path / "checkpoints"
    cfg = Config(logger=LoggerConfig(log_dir=str(logs)))

    def with_(**changes):
        return replace(cfg, checkpointing=CheckpointingConfig(**changes))

    def refused(cfg):
        with pytest.raises(ConfigError, match=rf"is in use by another run \(process {pid} on "):
            run_folder.open_run_folder(cfg, one_rank[0])
        return not (logs / "exp_002").exists()

    pid = start(folder=logs / "exp_001")
    assert refused(with_(resume="auto")), "a scheduler started the job twice, before its first checkpoint"
    assert refused(with_(resume_from=str(logs / "exp_001")))
    (tmp_path / "link").symlink_to(logs / "exp_001")
    assert refused(with_(resume_from=str(tmp_path / "link"), resume="auto"))
    assert run_folder.open_run_folder(cfg, one_rank[0], to_train=False) == logs / "eval_001"  # which only reads
    assert run_folder.open_run_folder(cfg, one_rank[0]) == logs / "exp_002"  # a new run has its own folder
    pid = start(folder=shared / "exp_003")  # of another log_dir
    with pytest.raises(ConfigError, match=rf"^{shared}/exp_003 is in use by another run \(process {pid} on "):
        run_folder.open_run_folder(with_(checkpoint_dir=str(shared)), one_rank[0])
    assert run_folder.open_run_folder(with_(checkpoint_dir=str(shared)), one_rank[0]) == logs / "exp_004"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["resume=auto", "resume_from={}"])
def test_the_run_that_is_refused_changes_nothing(tmp_path, one_rank, start, monkeypatch, capfd, way):
    """grpo.main, told twice to go on with a run: the second one."""
    run_in_this_process(monkeypatch, one_rank)
    write_rows(tmp_path)

    def main(log_dir, *words):
        words = [*arguments(tmp_path), "grpo.val_at_start=false", f"logger.log_dir={log_dir}", *words]
        monkeypatch.setattr(sys, "argv", ["", *words])
        return grpo.main()

    assert main(tmp_path / "mine", "grpo.max_num_steps=1", "checkpointing.save_period=1") == 0
    logs = shutil.copytree(tmp_path / "mine", tmp_path / "logs")  # this process holds the lock of the other one
    pid = start(folder=logs / "exp_001")
    before = {path: path.is_file() and path.read_bytes() for path in logs.rglob("*")}
    capfd.readouterr()
    assert main(logs, f"checkpointing.{way.format(logs / 'exp_001')}") == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"error: {logs}/exp_001 is in use by another run (process {pid} on ")
    assert {path: path.is_file() and path.read_bytes() for path in logs.rglob("*")} == before


@pytest.mark.parametrize("orphan", ["forked", "executed", "forked twice"])
def test_a_kill_releases_it_at_once_whatever_the_run_has_started(tmp_path, start, orphan):
    """As graders and a user's own workers, which may live on and hold what they inherited."""
    living = tmp_path / "living"

    def start_orphan():
        if orphan == "executed":
            process = subprocess.Popen(["sleep", "60"], close_fds=False)
            living.write_text(str(process.pid))
        elif os.fork() == 0:
            if orphan == "forked twice" and os.fork():
                os._exit(0)
            living.write_text(str(os.getpid()))
            signal.pause()
        while not (living.exists() and living.read_text()):
            pass

    first = start(also=start_orphan)
    pid = int(living.read_text())
    try:
        refusal(tmp_path)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.kill(pid, 0)  # it lives
        run_folder._lock(tmp_path, RANK_0)
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_disk_without_locks_is_named_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder.fcntl, "lockf", refuse)
    run_folder._lock(tmp_path, RANK_0)
    problem = f"this file system has no file locks ({os.strerror(number)})"
    expected = f"WARNING: {tmp_path}: {problem}: do not start a second run in it\n"
    assert capsys.readouterr().out == expected
    run_folder._lock(tmp_path, OTHER_RANK)
    assert capsys.readouterr().out == ""


def test_the_file_that_a_run_has_left_keeps_nobody_out(tmp_path):
    (tmp_path / "run.lock").write_text("process 1 on elsewhere, since the year of the flood, " + "x" * 1000)
    run_folder._lock(tmp_path, RANK_0)
    assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on {socket.gethostname()}, since ")


@pytest.mark.slow
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
    assert (tmp_path / first["changes"]).read_text() == "--- a\n+++ b\n"
    assert second["changes"] is None and first["packages"]["numpy"] and first["gpus"] == []


def test_the_commit_is_that_of_the_program(tmp_path, monkeypatch):
    """From whatever folder it is started. In an export of the program, which is no checkout, it is unknown."""
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    monkeypatch.chdir(tmp_path)
    run_folder.write_provenance(tmp_path, Config(), 1)
    (part,) = json.loads((tmp_path / "provenance.json").read_text())
    assert part["commit"] == (shown.stdout.strip() if shown.returncode == 0 else "unknown")


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["git", "repository"])
def test_provenance_without_git(tmp_path, monkeypatch, missing):
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(run_folder, "ROOT", tmp_path)
    run_folder.write_provenance(tmp_path, Config(), 1)
    (part,) = json.loads((tmp_path / "provenance.json").read_text())
    assert part["commit"] == "unknown" and part["changes"] is None
