"""Two nodes on this machine: copies of the repository, each with a working folder, a train.sh and a host name of its
own; stand-ins of Slurm's commands; and of the package `vllm` (fake_vllm.py), which ranks find on PYTHONPATH."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from run_life import command
from small_run import arguments

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("base", "run", "judges", "kernels", "configs", "requirements", "examples/arithmetic")
NOT_OURS = ("GRPO_EXIT_FILE", "NPROC", "GRPO_VENV", "HF_HUB_OFFLINE", "RANK", "WORLD_SIZE", "LOCAL_RANK")

# Starts the task of both nodes, with their variables and logs, passes signals on, and ends with the highest exit code.
SRUN = """#!/usr/bin/env python3
import os, signal, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")][:5]
words = sys.argv[1 + len(options):]
assert options[:4] == ["--cpus-per-task=4", "--kill-on-bad-exit=0", "--wait=120", "--open-mode=append"], options
pattern = options[4].removeprefix("--output=").replace("%j", os.environ["SLURM_JOB_ID"])
tasks = []
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
for node in (0, 1):
    mine = {"SLURM_NODEID": str(node), "SLURMD_NODENAME": f"node-{node}"}
    log = open(pattern.replace("%n", str(node)), "a")
    tasks.append(subprocess.Popen(words, env=os.environ | mine, cwd=f"node-{node}", stdout=log, stderr=log))
sys.exit(max(task.wait() for task in tasks))
"""
# `show hostnames` as Slurm has it; a job that is queued again waits until the script before it has ended.
SCONTROL = """#!/usr/bin/env bash
case "$*" in
    "show hostnames node-[0-1]") printf '%s\\n' 127.0.0.1 node-1 ;;
    "requeue 4711") touch requeued ;;
    *) echo "scontrol $*" >&2; exit 1 ;;
esac
"""


def copy_of_repository(folder: Path) -> Path:
    folder.mkdir()
    for name in (*ROOMS, *(path.name for path in [*ROOT.glob("*.py"), *ROOT.glob("*.sh")])):
        source, copy = ROOT / name, shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(source, folder / name)
    return folder


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def environment(work: Path, **more: str) -> dict[str, str]:
    """Of a node's train.sh: `vllm` is the stand-in."""
    package = work / "packages" / "vllm"
    if not package.exists():
        package.mkdir(parents=True)
        text = "import sys\n\nimport fake_vllm\n\ndel sys.modules['vllm']\nfake_vllm.install()\n"
        (package / "__init__.py").write_text(text)
    clean = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    clean |= {"GRPO_PYTHON": sys.executable, "GRPO_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return clean | {"PYTHONPATH": f"{package.parent}:{ROOT / 'tests' / 'helpers'}", **more}


def last_line(log: Path) -> str:
    """torchrun may still warn after it, say that the node with the rendezvous has gone first."""
    lines = [line for line in log.read_text().splitlines() if not re.match(r"W\d{4} ", line)]
    return lines[-1]


class Node:
    """train.sh on one of two nodes, in a session of its own."""

    def __init__(self, work: Path, number: int, port: int, words: list[str], life: int = 0, **more: str):
        folder = work / f"node-{number}"
        self.log = work / f"node_{number}_{life}.log"
        env = environment(work, GRPO_HOST_NAME=f"node-{number}", **more)
        where = [f"--nnodes=2 --node-rank {number}".split(), [f"--rdzv_endpoint=127.0.0.1:{port}"]]
        line = ["./train.sh", *where[0], *where[1], "--nproc_per_node=1", *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                line, cwd=folder, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait(self, seconds: float = 120) -> tuple[int, str]:
        """(exit code, last line)."""
        code = self.process.wait(timeout=seconds)
        return code, last_line(self.log)

    def kill_all(self) -> None:
        """train.sh and the agent, as a machine that is gone: the ranks die with the agent."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        agent = next(int(pid) for pid in children if b"base.system.launch" in (command(int(pid)) or b""))
        os.kill(self.process.pid, signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)

    def signal_all(self, number: int) -> None:
        """To train.sh and all that it has started. SIGSTOP is a machine without power or network: no connection closes,
        and nothing answers."""
        pids = [self.process.pid]
        for pid in pids:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pids += map(int, children)
        for pid in pids:
            os.kill(pid, number)


def start(work: Path, words: list[str], life: int = 0, **more: str) -> list[Node]:
    port = free_port()
    return [Node(work, number, port, words, life, **more) for number in (0, 1)]


def run_words(rows: Path, shared: Path, *overrides: str) -> list[str]:
    """Of small_run.py's run with its run folder on the shared disk."""
    return [*arguments(rows), f"logger.log_dir={shared}", "logger.tensorboard_enabled=false", *overrides]


def wait_until(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    """While the process lives."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.poll() is None, process.args
        time.sleep(0.05)


def write_slurm(work: Path) -> Path:
    """The stand-ins' folder, for PATH."""
    tools = work / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return tools


class Job:
    """A job of two nodes: `sbatch` and the controller. Each part runs the same script until none is queued again."""

    def __init__(self, work: Path, words: list[str], **more: str):
        self.work, self.words = work, words
        self.env = environment(work, **more) | {"PATH": f"{write_slurm(work)}:{os.environ['PATH']}", "NPROC": "1"}
        self.env |= {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2"}
        self.env |= {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_NODELIST": "node-[0-1]"}
        for name in ("base", "requirements", "setup.sh", "config.py"):  # what slurm.sh needs of the shared disk
            (work / name).symlink_to(ROOT / name)
        self.part = -1
        self.codes: list[int] = []

    def say_step(self, step: int) -> None:
        """From now on a stand-in for Python says that this is the newest checkpoint's step."""
        python = self.work / "bin" / "python"
        python.write_text(f"#!/bin/sh\necho {step}\n")
        python.chmod(0o755)
        self.env["GRPO_PYTHON"] = str(python)

    def start_part(self) -> subprocess.Popen:
        self.part += 1
        script = shutil.copy(ROOT / "slurm.sh", self.work / "slurm_script")  # as slurmd runs a copy of it
        env = self.env | ({"SLURM_RESTART_COUNT": str(self.part)} if self.part else {})
        with (self.work / "batch.log").open("a") as log:
            return subprocess.Popen(
                [script, *self.words], cwd=self.work, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def is_queued_again(self) -> bool:
        queued = (self.work / "requeued").exists()
        (self.work / "requeued").unlink(missing_ok=True)
        return queued
