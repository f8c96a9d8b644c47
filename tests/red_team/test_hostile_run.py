"""Run folders, ends and kills that go wrong: each is answered in a sentence, in time, with the right exit code."""

import errno
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ranks
from small_run import arguments, write_rows

import config
from base.system import exits, failure
from config import ConfigError
from run import folder as run_folder
from run.folder import open_run_folder

ROOT = Path(__file__).resolve().parents[2]


def test_changes_that_are_no_utf8(tmp_path, monkeypatch):
    """A source file in latin-1 that was edited: git shows its bytes as they are."""
    repository, folder = tmp_path / "repository", tmp_path / "run"
    folder.mkdir()
    commands = ["git init -q .", "git add -A", "git -c user.name=a -c user.email=a@b commit -qm one"]
    repository.mkdir()
    (repository / "names.py").write_bytes(b"# caf\xe9\n")
    for command in commands:
        subprocess.run(command.split(), cwd=repository, check=True)
    (repository / "names.py").write_bytes(b"# caf\xe9 noir\n")
    monkeypatch.setattr(run_folder, "ROOT", repository)
    run_folder.write_provenance(folder, config.Config(), 1)
    assert b"+# caf\xe9 noir\n" in (folder / "changes_1.patch").read_bytes()


# ------------------------------------------------------------------------------------------------- two runs at once

SETTINGS = ("checkpointing.save_period=1", "checkpointing.keep_latest=9", "grpo.val_at_start=false")
SETTINGS += ("logger.tensorboard_enabled=false", "grpo.val_at_end=false", "checkpointing.save_hf_at_end=false")


def start(work: Path, name: str, overrides: list[str], go: int) -> int:
    """A run in a forked process, which waits for a byte from the pipe `go`. Its output goes to the file `name`."""
    import grpo

    if pid := os.fork():
        return pid
    output = os.open(work / name, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["GRPO_EXIT_FILE"] = str(work / f"{name}.json")
    sys.argv = ["grpo.py", *arguments(work), *SETTINGS, *overrides]
    os.read(go, 1)
    code = grpo.main()
    sys.stdout.flush()
    os._exit(code)


def run_together(work: Path, names: list[str], overrides: list[str]) -> list[int]:
    read_end, write_end = os.pipe()
    pids = [start(work, name, overrides, read_end) for name in names]
    os.write(write_end, b"!" * len(names))
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@ranks(1, seconds=400, stand_in=True)
def pairs_of_runs(work: Path, pairs: list[list[str]]) -> list[tuple[Path, list[int], list[str]]]:
    """An unbroken run of 4 steps, in `whole`. Then, for each pair, two runs start together in a copy of the run folder
    that was cut back to step 2. Returns for each pair the run folder, the exit codes and the outputs."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]  # each run is a job of its own
    faulthandler.cancel_dump_traceback_later()  # a forked process would wait for its thread
    os.chdir(ROOT)
    whole = work / "whole"
    whole.mkdir()
    write_rows(whole)
    assert run_together(whole, ["log"], []) == [0], (whole / "log").read_text()
    ends = []
    for number, overrides in enumerate(pairs):
        pair = work / f"pair_{number}"
        pair.mkdir()
        write_rows(pair)
        run = pair / "exp_001"
        shutil.copytree(whole / "exp_001", run)
        for step in (3, 4):
            shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
        codes = run_together(pair, ["a", "b"], [word.format(run=run) for word in overrides])
        ends.append((run, codes, [(pair / name).read_text() for name in ("a", "b")]))
    return ends


@pytest.mark.parametrize(
    "pairs",
    [
        [["checkpointing.resume_from={run}"], ["checkpointing.resume=auto"]],
        pytest.param([["checkpointing.resume_from={run}"], ["checkpointing.resume=auto"]] * 10, marks=pytest.mark.long),
    ],
    ids=["2", "20"],
)
def test_of_two_runs_one_goes_on_and_one_is_refused(tmp_path, pairs):
    """What goes on ends as an unbroken run does, to the bit; the other one names it and has touched nothing."""
    from safetensors.torch import load_file
    from torch import equal

    (ends,), whole = pairs_of_runs(tmp_path, pairs), tmp_path / "whole" / "exp_001"

    def lines(folder, name):
        records = [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
        return [{k: v for k, v in r.items() if not k.startswith(("timing/", "performance/"))} for r in records]

    def tensors(folder, step):
        return load_file(Path(folder) / "checkpoints" / f"step_{step:06d}" / "rank_00000.safetensors")

    for run, codes, said in ends:
        assert sorted(codes) == [0, 2], said
        first, second = sorted(said, key=len, reverse=True)
        holder = (run / "run.lock").read_text().strip()
        assert second.splitlines()[-1].startswith(f"error: {run} is in use by another run ({holder})")
        assert first.splitlines()[-1] == json.loads((run / "exit.json").read_text())["reason"] == "trained to step 4"
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step_{n:06d}" for n in (1, 2, 3, 4)]
        assert len(json.loads((run / "provenance.json").read_text())) == 2  # the first part, and the one that went on
        for name in ("metrics.jsonl", "samples.jsonl"):
            assert lines(run, name) == lines(whole, name)
        for step in (3, 4):
            ours, theirs = tensors(run, step), tensors(whole, step)
            assert ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in theirs)


# ------------------------------------------------------------------------------------------------------ how it ends


@pytest.fixture
def ending(tmp_path, monkeypatch):
    """(run folder, exit file of train.sh) of a rank 0 that is about to end."""
    run = tmp_path / "exp_001"
    run.mkdir()
    monkeypatch.setenv("GRPO_EXIT_FILE", str(tmp_path / "exit.json"))
    monkeypatch.delenv("RANK", raising=False)
    return run, tmp_path / "exit.json"


@pytest.mark.parametrize("bad", ["run folder", "exit file"])
def test_what_cannot_be_written_does_not_hide_the_reason(ending, bad, monkeypatch, capsys):
    run, exit_file = ending
    if bad == "run folder":
        run.rmdir()
    else:
        monkeypatch.setenv("GRPO_EXIT_FILE", str(run / "absent" / "exit.json"))
        exit_file = run / "exit.json"
    exits.report_exit(3, "stopped: the reason", run)
    end = {"code": 3, "reason": "stopped: the reason", "rank": 0, "host": exits.host_name()}
    assert json.loads(exit_file.read_text()) == end
    said = capsys.readouterr().err.splitlines()
    assert f"stopped: the reason (rank 0 on {exits.host_name()})" in said
    assert any("WARNING: " in line and "cannot be written (" in line for line in said)


def test_no_room_at_the_end_does_not_hide_the_reason(ending, capsys):
    run, exit_file = ending
    (run / f"exit.json.{os.getpid()}").symlink_to("/dev/full")
    exits.report_exit(3, "stopped: the reason", run)
    assert json.loads(exit_file.read_text())["reason"] == "stopped: the reason"
    warning = f"WARNING: {run}/exit.json cannot be written (the disk is full)"
    assert capsys.readouterr().err.splitlines() == [f"stopped: the reason (rank 0 on {exits.host_name()})", warning]
    assert list(run.iterdir()) == []


def test_no_room_at_the_start(tmp_path, one_rank, monkeypatch, capsys):
    """A new run, which could not be continued, is refused in one sentence. One that goes on loses its provenance."""
    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from=str(tmp_path)))

    def no_room(file, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr(run_folder, "write_whole", no_room)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: the run's folder cannot be written \(.*the disk is full\)$"):
        open_run_folder(cfg, one_rank[0])
    (tmp_path / "config.yaml").touch()
    assert open_run_folder(cfg, one_rank[0]) == tmp_path
    assert f"WARNING: {tmp_path}/provenance.json" in capsys.readouterr().out


def raised(action):
    try:
        action()
    except BaseException as error:
        return error


def test_a_crash_names_the_line(capsys):
    def buggy():
        return json.loads("{")  # the last line outside of libraries

    line = buggy.__code__.co_firstlineno + 1
    code, reason = failure.describe_failure(raised(buggy))
    assert code == 1 and reason.startswith("crashed: JSONDecodeError: Expecting property name")
    assert reason.endswith(f" ({__file__}:{line}, in buggy)")
    assert "Traceback" in capsys.readouterr().err
    assert failure.describe_failure(raised(lambda: sys.exit(7)))[1].startswith("crashed: SystemExit: 7 (")


def test_a_message_that_was_made_to_name_the_place_names_no_other():
    def call_of_users_code():
        raise RuntimeError("reward:f raised ZeroDivisionError (reward.py:2)") from ZeroDivisionError()

    expected = "crashed: RuntimeError: reward:f raised ZeroDivisionError (reward.py:2)"
    assert failure.describe_failure(raised(call_of_users_code)) == (1, expected)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_lost_rank_is_named_in_place_of_the_connections_words(capsys, number):
    """Also before its parent has waited for it."""
    process = subprocess.Popen(["sleep", "60"])
    host = exits.host_name()
    peers = exits.Peers({1: (host, os.getpid()), 3: (host, process.pid)})
    error = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:38372")
    assert peers.find_lost(None) is None
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    expected = f"crashed: rank 3 on {host} (process {process.pid}) is gone"
    assert failure.describe_failure(error, None, peers) == (1, expected)
    process.wait()
    go_on = "; continue with checkpointing.resume_from=logs/exp_001, if it has a checkpoint"
    assert failure.describe_failure(error, Path("logs/exp_001"), peers) == (1, expected + go_on)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_no_traceback(number, capsys):
    def write():
        raise OSError(number, os.strerror(number), "metrics.jsonl")

    code, reason = failure.describe_failure(raised(write))
    assert code == 1 and re.match(r"crashed: metrics\.jsonl: the disk is full \(", reason)
    assert capsys.readouterr().err == ""
