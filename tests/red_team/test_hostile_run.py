"""Hostile run folders, ends and kills: every one is answered in a sentence, in time, with the right exit code."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from red_team import assert_answered

import config
from check import resume
from check.rules import check_writable
from config import ConfigError
from run import folder as run_folder
from run.folder import open_run_folder
from system import exits

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "examples/arithmetic/starter"
LONG = "l" * 200


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory with files and links of every kind, and a config that runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "grpo: {num_prompts_per_step: 4, val_period: 0}\ndata: {train: {data_path: train.jsonl, output_key: answer}}\n"
        f"policy: {{model_name: {STARTER}, max_total_sequence_length: 32, generation: {{max_new_tokens: 8}}}}\n"
    )
    rows = [{"input": f"{number}+1=", "answer": number + 1} for number in range(10, 20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "good").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for name, target in {
        "to_good": "good",
        "to_to_good": "to_good",
        "to_file": "file",
        "dangling": "/no/such/disk",
        "to_dangling": "dangling",
        "to_itself": "to_itself",
        "there": "back",
        "back": "there",
        "good/up": "../dangling/logs",
    }.items():
        (tmp_path / name).symlink_to(target)
    return tmp_path


# (folder, what the message says; None: it can be made)
FOLDERS = (
    ("good", None),
    ("to_good/new", None),
    ("to_to_good/a/b/c", None),
    ("good/../new", None),
    ("new/../new/./logs", None),
    ("with space, ü and \n", None),
    ("~/logs", None),
    ("dangling", "dangling is a link that cannot be followed (No such file or directory)"),
    ("dangling/logs", "dangling is a link that cannot be followed"),
    ("to_dangling/a/b", "to_dangling is a link that cannot be followed"),
    ("good/up", "up is a link that cannot be followed"),
    ("to_itself", "to_itself is a link that cannot be followed (Too many levels of symbolic links)"),
    ("there/logs", "there is a link that cannot be followed (Too many levels"),
    ("file", "file is a file, not a folder"),
    ("file/logs/a", "file is a file, not a folder"),
    ("to_file/logs", "to_file is a file, not a folder"),
    ("pipe", "pipe is a file, not a folder"),
    ("/dev/null/logs", "/dev/null is a file, not a folder"),
    ("/proc/logs", "cannot write in /proc"),
    ("/proc/self/logs", "cannot write in /proc/self"),
    ("/sys/logs", "cannot write in /sys"),
    (f"{LONG}{LONG}", "a name in it is longer than 255 bytes"),
    (f"a/{'ü' * 128}", "a name in it is longer than 255 bytes"),
    ("/".join([LONG] * 30), "all of it is longer than 3,800 bytes"),
    ("a/" * 3000 + "b", "all of it is longer than 3,800 bytes"),
)


@pytest.mark.parametrize("key", ["logger.log_dir", "checkpointing.checkpoint_dir"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_run(work, key):
    for folder, message in FOLDERS:
        if message is None:
            check_writable(key, folder)
            continue
        with pytest.raises(ConfigError) as error:
            check_writable(key, folder)
        assert message in str(error.value) and str(error.value).startswith(key), (folder, str(error.value))
        assert len(str(error.value)) <= 400


HOSTILE = [folder for folder, message in FOLDERS if message]


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_the_command_answers(work, check, mode):
    """With resume=auto the folder is looked into before anything else."""
    before = sorted(work.rglob("*"))
    for folder in HOSTILE[:: 1 if mode == "auto" else 4]:
        (work / "hostile.yaml").write_text(json.dumps({"defaults": "run.yaml", "logger": {"log_dir": folder}}))
        answer = check(work, "hostile.yaml", f"checkpointing.resume={mode}")
        assert_answered(answer, "logger.log_dir", code=2)
    (work / "hostile.yaml").unlink()
    assert sorted(work.rglob("*")) == before


@pytest.mark.parametrize("folder", ["\ud800", "a\ud83d/b", "a\0b"])
def test_names_that_no_file_can_have(work, check, folder):
    (work / "hostile.yaml").write_text(json.dumps({"defaults": "run.yaml", "logger": {"log_dir": folder}}))
    assert_answered(check(work, "hostile.yaml", "checkpointing.resume=auto"), "logger.log_dir", code=2)


def test_a_run_does_not_hang_on_a_folder_that_went_bad_after_the_check(work, one_rank):
    """Made by the run itself, which --check did not see: as a disk that was unmounted in between."""
    for folder in HOSTILE:
        with pytest.raises(ConfigError) as error:
            open_run_folder(config.Config(logger=config.LoggerConfig(log_dir=folder)), one_rank[0])
        assert "the run's folder cannot be written (" in error.value.args[0]


def random_tree(rng, root):
    """Folders, files and links below `root`, some that lead nowhere, some in circles, some closed."""
    paths = [root]
    for number in range(rng.randrange(3, 9)):
        path = rng.choice(paths) / f"n{number}"
        kind = rng.choice(["folder", "folder", "file", "link", "dangling"])
        try:
            if kind == "folder":
                path.mkdir()
            elif kind == "file":
                path.write_text("")
            else:
                path.symlink_to(rng.choice(paths) if kind == "link" else rng.choice([f"n{number}", "../n3/x", "/no/x"]))
        except OSError:
            continue
        paths.append(path)
    for path in sorted(rng.sample(paths[1:], k=len(paths) // 3), reverse=True):
        if os.path.isdir(path) and not os.path.islink(path):
            path.chmod(rng.choice([0o000, 0o555, 0o311, 0o644, 0o755]))
    below = rng.choice(["", "new", "new/a", "..", "../new", "./n1/../x"])
    return rng.choice(paths) / below


def compare_with_making(root, seed, num_cases):
    """Each folder is first checked, then made for real. Returns the cases where the check was wrong."""
    wrong, refused = [], 0
    for case in range(num_cases):
        rng = random.Random(seed * 1_000_000 + case)
        top = root / str(case)
        top.mkdir()
        target = random_tree(rng, top)
        message = None
        try:
            check_writable("logger.log_dir", str(target))
        except ConfigError as error:
            message = str(error)
        try:
            os.makedirs(target, exist_ok=True)
            (target / f"probe_{case}").mkdir()
            made = None
        except OSError as error:
            made = str(error)
        refused += made is not None
        if (message is None) != (made is None):
            wrong.append((case, str(target), message, made))
    assert num_cases // 10 < refused < num_cases, refused
    return wrong


@pytest.mark.parametrize("num_cases", [100, pytest.param(3000, marks=pytest.mark.long)])
def test_the_check_is_right_about_random_trees(tmp_path_factory, num_cases):
    """By an oracle: making it. In a child that is not root, for whom permissions count."""
    root = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    root.chmod(0o777)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            os.write(writer, json.dumps(compare_with_making(root, 12, num_cases)[:5]).encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    result = os.read(reader, 60_000).decode()
    os.close(reader)
    shutil.rmtree(root)
    assert result == "[]"


# ------------------------------------------------------------------------------------------- what is in the folder


NAMES = ["", "_", "_²", "_٣", "_-1", "_1.5", "_1e3", "_0x7", "_½", "_Ⅷ", "_ 5", "_5\n", "_+5", "_1_0"]


def test_odd_names_beside_the_runs(tmp_path, one_rank, monkeypatch):
    for name in NAMES:
        (tmp_path / f"exp{name}" / "checkpoints" / "step_²").mkdir(parents=True)
    (tmp_path / "exp_004").write_text("")
    (tmp_path / "exp_006").symlink_to("nowhere")
    assert list(resume.numbered(tmp_path, "exp_")) == [6, 4]
    logs = config.LoggerConfig(log_dir=str(tmp_path))
    for mode in ("never", "auto"):
        cfg = config.Config(logger=logs, checkpointing=config.CheckpointingConfig(resume=mode))
        cfg = resume.resolve(cfg)
        assert cfg.checkpointing.resume_from is None
        assert open_run_folder(cfg, one_rank[0]).name == ("exp_007" if mode == "never" else "exp_008")


@pytest.mark.parametrize("text", ["", "null", "5", "{}", '{"a": 1}', '"text"', "[1", "[" * 100_000, "\0", "[1] [2]"])
def test_damaged_provenance_is_named(tmp_path, one_rank, text):
    (tmp_path / "provenance.json").write_text(text)
    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from=str(tmp_path)))
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}/provenance\.json: not (valid JSON|the list that this program)"
    ):
        open_run_folder(cfg, one_rank[0])


@pytest.mark.parametrize("name", ["exit.json", "run.lock", "provenance.json", "config.yaml", "changes_1.patch"])
def test_a_folder_where_a_file_belongs(tmp_path, one_rank, monkeypatch, name):
    monkeypatch.setattr(run_folder, "_git", lambda *_: "a change")
    (tmp_path / name / "sub").mkdir(parents=True)
    cfg = config.Config(checkpointing=config.CheckpointingConfig(resume_from=str(tmp_path)))
    if name == "config.yaml":
        open_run_folder(cfg, one_rank[0])  # a resumed run keeps what is there; --check reads it, and says so
        return
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

    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT / "tests/helpers")}
    command = [sys.executable, str(ROOT / "tests/helpers/two_runs_worker.py"), str(tmp_path), json.dumps(pairs)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60 + 15 * len(pairs))
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((tmp_path / "answer.json").read_text())

    def lines(folder, name):
        records = [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
        return [{k: v for k, v in r.items() if not k.startswith(("timing/", "performance/"))} for r in records]

    def tensors(folder, step):
        return load_file(Path(folder) / "checkpoints" / f"step_{step:06d}" / "rank_00000.safetensors")

    for pair in answer["pairs"]:
        assert sorted(pair["codes"]) == [0, 2], pair
        run, (first, second) = Path(pair["run"]), sorted(pair["said"], key=len, reverse=True)
        holder = (run / "run.lock").read_text().strip()
        refusal = f"error: {run} is in use by another run ({holder}): wait for its end, or stop it"
        assert second == f"{refusal} (rank 0 on {exits.host_name()})\n"
        assert first.splitlines()[-1] == json.loads((run / "exit.json").read_text())["reason"] == "trained to step 4"
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step_{n:06d}" for n in (1, 2, 3, 4)]
        assert len(json.loads((run / "provenance.json").read_text())) == 2  # the first part, and the one that went on
        for name in ("metrics.jsonl", "samples.jsonl"):
            assert lines(run, name) == lines(answer["whole"], name)
        for step in (3, 4):
            ours, whole = tensors(run, step), tensors(answer["whole"], step)
            assert ours.keys() == whole.keys() and all(equal(ours[name], whole[name]) for name in whole)


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


def spoil(file, kind):
    """Makes writing `file` fail, for root too."""
    if kind == "removed":
        shutil.rmtree(file.parent)
    elif kind == "a file":
        shutil.rmtree(file.parent)
        file.parent.write_text("")
    elif kind == "a circle":
        shutil.rmtree(file.parent)
        file.parent.symlink_to(file.parent.name)


@pytest.mark.parametrize("kind", ["removed", "a file", "a circle"])
def test_a_folder_that_went_bad_does_not_hide_the_reason(ending, kind, capsys):
    run, exit_file = ending
    spoil(run / "exit.json", kind)
    exits.report_exit(3, "stopped: the reason", run)
    assert json.loads(exit_file.read_text()) == {
        "code": 3,
        "reason": "stopped: the reason",
        "rank": 0,
        "host": exits.host_name(),
    }
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"stopped: the reason (rank 0 on {exits.host_name()})"
    assert second.startswith(f"WARNING: {run}/exit.json cannot be written (")


def test_nor_does_an_exit_file_that_cannot_be_written(ending, monkeypatch, capsys):
    run, _ = ending
    monkeypatch.setenv("GRPO_EXIT_FILE", str(run / "absent" / "exit.json"))
    exits.report_exit(3, "stopped: the reason", run)
    assert json.loads((run / "exit.json").read_text())["reason"] == "stopped: the reason"
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped: the reason (rank 0 on {exits.host_name()})"


FULL = """
import errno, json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from config import Config, ConfigError, LoggerConfig
from run.folder import open_run_folder
from system import exits
from system.ranks import start_process_group
full, exit_file = Path(sys.argv[2]), Path(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full)], check=True)
(full / "exp_001").mkdir()
try:
    with (full / "ballast").open("wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
except OSError:
    pass
ranks, _ = start_process_group(1)
os.environ["GRPO_EXIT_FILE"] = str(exit_file)
try:
    open_run_folder(Config(logger=LoggerConfig(log_dir=str(full))), ranks)
except ConfigError as error:
    print(error)
try:
    (full / "exp_001" / "metrics.jsonl").write_text("x" * 10_000)
except OSError as error:
    exits.report_exit(*exits.describe_failure(error), full / "exp_001")
"""


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


@pytest.mark.long
def test_a_full_disk_is_one_sentence_at_the_start_and_at_the_end(tmp_path):
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = [*namespace, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine allows no mount in a user namespace: no disk to fill")
    (tmp_path / "full").mkdir()
    words = [sys.executable, "-c", FULL, str(ROOT), str(tmp_path / "full"), str(tmp_path / "exit.json")]
    done = subprocess.run([*namespace, *words], capture_output=True, text=True, timeout=60)
    folder = tmp_path / "full"
    assert done.stdout == f"{folder}: the run's folder cannot be written (the disk is full)\n", done.stderr
    reason = "crashed: the disk is full"
    assert json.loads((tmp_path / "exit.json").read_text())["reason"].startswith(reason)
    assert done.stderr.splitlines()[-2].startswith(reason) and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("exp_001/exit.json cannot be written (the disk is full)")


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


def test_a_reward_function_that_raises_ends_with_its_file_and_line(tmp_path, monkeypatch):
    """Its environment's message names them already: they come last."""
    from envs import Turn
    from graders.reward_function import RewardFunction

    (tmp_path / "hostile_reward.py").write_text("def f(completions):\n    return [1 / 0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    from hostile_reward import f

    turn = Turn([{"role": "assistant", "content": "4"}], answer="4", finish_reason="stop")
    _, reason = exits.describe_failure(raised(lambda: RewardFunction(f, "hostile_reward:f").step([turn])))
    assert reason == (
        f"crashed: RuntimeError: hostile_reward:f raised ZeroDivisionError: division by zero "
        f"({tmp_path}/hostile_reward.py:2)"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_a_lost_rank_is_named_in_place_of_the_connections_words(monkeypatch, capsys, number):
    """Also before its parent has waited for it."""
    process = subprocess.Popen(["sleep", "60"])
    host = exits.host_name()
    monkeypatch.setattr(exits, "peers", {1: (host, os.getpid()), 3: (host, process.pid)})
    error = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:38372")
    assert exits.find_lost_rank(None) is None
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    expected = f"crashed: rank 3 on {host} (process {process.pid}) is gone"
    assert exits.describe_failure(error) == (1, expected)
    process.wait()
    assert exits.describe_failure(error, Path("logs/exp_001")) == (
        1,
        f"{expected}; continue with checkpointing.resume_from=logs/exp_001",
    )
    assert capsys.readouterr().err == ""


def test_a_rank_of_another_machine_lets_those_speak_first_who_know_more(monkeypatch, capsys):
    seconds = []
    monkeypatch.setattr(exits.time, "sleep", seconds.append)
    monkeypatch.setattr(exits, "peers", {0: ("elsewhere", os.getpid()), 1: ("elsewhere", 2**22 + 1)})
    assert exits.describe_failure(RuntimeError("Connection closed by peer")) == (
        1,
        "crashed: RuntimeError: Connection closed by peer",
    )
    assert seconds == [exits.GRACE_SECONDS]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_no_traceback(number, capsys):
    def write():
        raise OSError(number, os.strerror(number), "metrics.jsonl")

    code, reason = exits.describe_failure(raised(write))
    assert code == 1 and re.match(r"crashed: metrics\.jsonl: the disk is full \(", reason)
    assert capsys.readouterr().err == ""
