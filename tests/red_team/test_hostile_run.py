"""Run folders, ends and kills that go wrong: each is answered in a sentence, in time, with the right exit code."""

import errno
import faulthandler
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import ranks
from small_run import arguments, write_rows

import config
from check import resume
from config import ConfigError
from run import folder as run_folder
from run.folder import open_run_folder
from system import exits

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------- what is in the folder


@pytest.mark.parametrize("folder", ["dangling", "to_itself", "file/logs", "/proc/logs", "l" * 300])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, one_rank, monkeypatch, folder):
    """Made by the run itself, which --check did not see: as a disk that was unmounted in between."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("/no/such/disk")
    (tmp_path / "to_itself").symlink_to("to_itself")
    with pytest.raises(ConfigError) as error:
        open_run_folder(config.Config(logger=config.LoggerConfig(log_dir=folder)), one_rank[0])
    assert "the run's folder cannot be written (" in error.value.args[0]


def test_odd_names_beside_the_runs(tmp_path, one_rank):
    for name in ("", "_", "_²", "_-1", "_1e3", "_ 5", "_5\n", "_1_0"):
        (tmp_path / f"exp{name}" / "checkpoints" / "step_²").mkdir(parents=True)
    (tmp_path / "exp_004").write_text("")
    (tmp_path / "exp_006").symlink_to("nowhere")
    assert list(resume.numbered(tmp_path, "exp_")) == [6, 4]
    logs = config.LoggerConfig(log_dir=str(tmp_path))
    for mode in ("never", "auto"):
        cfg = resume.resolve(config.Config(logger=logs, checkpointing=config.CheckpointingConfig(resume=mode)))
        assert cfg.checkpointing.resume_from is None
        assert open_run_folder(cfg, one_rank[0]).name == ("exp_007" if mode == "never" else "exp_008")


@pytest.mark.parametrize("text", ["", "[1"])
def test_damaged_provenance_is_named(tmp_path, one_rank, text):
    (tmp_path / "provenance.json").write_text(text)
    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/provenance\.json: "):
        open_run_folder(cfg, one_rank[0])


@pytest.mark.parametrize("name", ["exit.json", "run.lock", "provenance.json", "changes_1.patch"])
def test_a_folder_where_a_file_belongs(tmp_path, one_rank, monkeypatch, name):
    monkeypatch.setattr(run_folder, "_git", lambda *_: "a change")
    (tmp_path / name / "sub").mkdir(parents=True)
    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"^{tmp_path}.*{name}: (cannot be read \()?Is a dir"):
        open_run_folder(cfg, one_rank[0])


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
        assert second.startswith(f"error: {run} is in use by another run ({holder})") and second.count("\n") == 1
        assert first.splitlines()[-1] == json.loads((run / "exit.json").read_text())["reason"] == "trained to step 4"
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step_{n:06d}" for n in (1, 2, 3, 4)]
        assert len(json.loads((run / "provenance.json").read_text())) == 2  # the first part, and the one that went on
        for name in ("metrics.jsonl", "samples.jsonl"):
            assert lines(run, name) == lines(whole, name)
        for step in (3, 4):
            ours, theirs = tensors(run, step), tensors(whole, step)
            assert ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture
def holder():
    """Starts another process that runs a run: holder(folder) gives its id."""
    pids = []

    def start(folder):
        folder.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            run_folder._lock(folder, fcntl.LOCK_EX)
            os.write(writer, b"!")
            signal.pause()
        assert os.read(reader, 1) == b"!"
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_where_a_second_run_is_refused_and_where_it_is_not(tmp_path, one_rank, holder, monkeypatch):
    monkeypatch.setattr("run.folder.time.sleep", lambda seconds: None)  # the holder has written who it is
    logs, shared = tmp_path / "logs", tmp_path / "checkpoints"
    cfg = config.Config(logger=config.LoggerConfig(log_dir=str(logs)))

    def with_(**changes):
        return replace(cfg, checkpointing=config.CheckpointingConfig(**changes))

    def refused(cfg):
        with pytest.raises(ConfigError, match=rf"is in use by another run \(process {pid} on "):
            open_run_folder(cfg, one_rank[0])
        return not (logs / "exp_002").exists()

    pid = holder(logs / "exp_001")
    assert refused(with_(resume="auto")), "a scheduler started the job twice, before its first checkpoint"
    assert refused(with_(resume_from=str(logs / "exp_001")))
    (tmp_path / "link").symlink_to(logs / "exp_001")
    assert refused(with_(resume_from=str(tmp_path / "link"), resume="auto"))
    assert open_run_folder(cfg, one_rank[0], to_train=False) == logs / "exp_002"  # eval.py only reads runs
    assert open_run_folder(cfg, one_rank[0]) == logs / "exp_003"  # a new run has its own folder
    pid = holder(shared / "exp_004")  # of another log_dir
    with pytest.raises(ConfigError, match=rf"^{shared}/exp_004 is in use by another run \(process {pid} on "):
        open_run_folder(with_(checkpoint_dir=str(shared)), one_rank[0])
    assert open_run_folder(with_(checkpoint_dir=str(shared)), one_rank[0]) == logs / "exp_005"


# ------------------------------------------------------------------------------------------------------ how it ends


@pytest.fixture
def ending(tmp_path, monkeypatch):
    """(run folder, exit file of train.sh) of a rank 0 that is about to end."""
    run = tmp_path / "exp_001"
    run.mkdir()
    monkeypatch.setenv("GRPO_EXIT_FILE", str(tmp_path / "exit.json"))
    monkeypatch.delenv("RANK", raising=False)
    return run, tmp_path / "exit.json"


@pytest.mark.parametrize("kind", ["removed", "a file", "a circle"])
def test_a_folder_that_went_bad_does_not_hide_the_reason(ending, kind, capsys):
    run, exit_file = ending
    run.rmdir()
    if kind == "a file":
        run.touch()
    elif kind == "a circle":
        run.symlink_to(run.name)
    exits.report_exit(3, "stopped: the reason", run)
    end = {"code": 3, "reason": "stopped: the reason", "rank": 0, "host": exits.host_name()}
    assert json.loads(exit_file.read_text()) == end
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"stopped: the reason (rank 0 on {exits.host_name()})"
    assert second.startswith(f"WARNING: {run}/exit.json cannot be written (")


def test_nor_does_an_exit_file_that_cannot_be_written(ending, monkeypatch, capsys):
    run, _ = ending
    monkeypatch.setenv("GRPO_EXIT_FILE", str(run / "absent" / "exit.json"))
    exits.report_exit(3, "stopped: the reason", run)
    assert json.loads((run / "exit.json").read_text())["reason"] == "stopped: the reason"
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped: the reason (rank 0 on {exits.host_name()})"


def test_no_room_at_the_end_does_not_hide_the_reason(ending, capsys):
    run, exit_file = ending
    (run / f"exit.json.{os.getpid()}").symlink_to("/dev/full")
    exits.report_exit(3, "stopped: the reason", run)
    assert json.loads(exit_file.read_text())["reason"] == "stopped: the reason"
    warning = f"WARNING: {run}/exit.json cannot be written (the disk is full)"
    assert capsys.readouterr().err.splitlines() == [f"stopped: the reason (rank 0 on {exits.host_name()})", warning]
    assert list(run.iterdir()) == []


def test_no_room_at_the_start_is_one_sentence(tmp_path, one_rank, monkeypatch):
    monkeypatch.setattr(run_folder, "_git", lambda *_: "a change")
    (tmp_path / "changes_1.patch").symlink_to("/dev/full")
    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: the run's folder cannot be written \(the disk is full\)$"):
        open_run_folder(cfg, one_rank[0])


def raised(action):
    try:
        action()
    except BaseException as error:
        return error


def test_a_crash_names_the_line(capsys):
    def buggy():
        return json.loads("{")  # the last line outside of libraries

    line = buggy.__code__.co_firstlineno + 1
    code, reason = exits.describe_failure(raised(buggy))
    assert code == 1 and reason.startswith("crashed: JSONDecodeError: Expecting property name")
    assert reason.endswith(f" ({__file__}:{line}, in buggy)")
    assert "Traceback" in capsys.readouterr().err
    assert exits.describe_failure(raised(lambda: sys.exit(7)))[1].startswith("crashed: SystemExit: 7 (")


def test_a_message_that_was_made_to_name_the_place_names_no_other():
    def call_of_users_code():
        raise RuntimeError("reward:f raised ZeroDivisionError (reward.py:2)") from ZeroDivisionError()

    expected = "crashed: RuntimeError: reward:f raised ZeroDivisionError (reward.py:2)"
    assert exits.describe_failure(raised(call_of_users_code)) == (1, expected)


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
    assert exits.describe_failure(error, None, peers) == (1, expected)
    process.wait()
    go_on = "; continue with checkpointing.resume_from=logs/exp_001"
    assert exits.describe_failure(error, Path("logs/exp_001"), peers) == (1, expected + go_on)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_no_traceback(number, capsys):
    def write():
        raise OSError(number, os.strerror(number), "metrics.jsonl")

    code, reason = exits.describe_failure(raised(write))
    assert code == 1 and re.match(r"crashed: metrics\.jsonl: the disk is full \(", reason)
    assert capsys.readouterr().err == ""
