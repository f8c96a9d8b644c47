"""The folder of a run, which it has alone (`run.lock`), and what it takes to repeat the run: `config.yaml`,
`provenance.json` and `changes_1.patch`."""

import contextlib
import errno
import fcntl
import importlib.metadata
import itertools
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from check import reader
from check.resume import checkpoint_folder, numbered
from config import Config, ConfigError
from hf.files import parse_json, read_bytes
from system.exits import describe_os_error, host_name
from system.ranks import Ranks, broadcast_from_rank0, gather, on_rank0

ROOT = Path(__file__).resolve().parents[1]
SHARED_DISK_SECONDS = 30.0  # NFS clients may believe for so long what they knew of a folder


def open_run_folder(cfg: Config, ranks: Ranks, *, to_train: bool = True) -> Path:
    """The run's folder: the one to resume, or a new `exp_NNN` in logger.log_dir. Who trains has it alone, and that of
    its checkpoints, while its processes live. ConfigError, on all ranks, where that cannot be."""
    try:
        folder = on_rank0(lambda: _open(cfg, to_train), ranks.job)
        if to_train:
            check_shared(_to_lock(cfg, folder), ranks)
        if to_train and ranks.job_rank:
            for locked in _to_lock(cfg, folder):
                _lock(locked, fcntl.LOCK_SH)
        on_rank0(lambda: write_provenance(folder, cfg, ranks.job_size), ranks.job)
    except OSError as error:
        folder = cfg.checkpointing.resume_from or cfg.logger.log_dir
        raise ConfigError(f"{folder}: the run's folder cannot be written ({describe_os_error(error)})") from error
    return folder


def _open(cfg: Config, to_train: bool) -> Path:
    """Rank 0's part, up to the locks."""
    auto = to_train and cfg.checkpointing.resume == "auto"
    if to_train and cfg.checkpointing.resume_from:
        folder = Path(cfg.checkpointing.resume_from)
    else:
        log_dir = Path(cfg.logger.log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        runs = list(numbered(log_dir, "exp_").items())
        if auto and runs and runs[0][1].is_dir():  # this job may run there, started twice, without a checkpoint so far
            _lock(runs[0][1], fcntl.LOCK_EX)
        for number in itertools.count(runs[0][0] + 1 if runs else 1):
            folder = log_dir / f"exp_{number:03d}"
            with contextlib.suppress(FileExistsError):  # another run took it just now; of one job, the lock decides
                folder.mkdir(exist_ok=auto)
                break
    for locked in _to_lock(cfg, folder) if to_train else ():
        locked.mkdir(parents=True, exist_ok=True)
        _lock(locked, fcntl.LOCK_EX)
    (folder / "exit.json").unlink(missing_ok=True)  # it says how the part before ended
    for name in ("stacks", "ends"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def _to_lock(cfg: Config, folder: Path) -> list[Path]:
    """Runs of two log_dirs may have one name, and so one folder in the checkpoint_dir that they share."""
    return [folder, checkpoint_folder(cfg.checkpointing, folder)] if cfg.checkpointing.checkpoint_dir else [folder]


def check_shared(folders: list[Path], ranks: Ranks) -> None:
    """ConfigError, on all ranks, that names the hosts whose disk does not have these folders of rank 0: there no rank
    could save its part of a checkpoint. Each looks for a new file, since it may have folders of these names."""
    token = broadcast_from_rank0(secrets.token_hex(), ranks.job)
    files = [folder / f"{token}.seen" for folder in folders]
    on_rank0(lambda: [file.touch() for file in files], ranks.job)
    end = time.monotonic() + SHARED_DISK_SECONDS
    while not all(map(os.path.exists, files)) and time.monotonic() < end:
        time.sleep(0.1)
    unseen = [str(file.parent) for file in files if not os.path.exists(file)]
    host_folders = gather((host_name(), unseen), ranks.job)
    on_rank0(lambda: [file.unlink() for file in files], ranks.job)
    if hosts := sorted({host for host, folders in host_folders if folders}):
        folder = max(folders for _, folders in host_folders)[0]
        raise ConfigError(
            f"{folder}: {host_folders[0][0]} writes there, and {', '.join(hosts)} cannot see it: put logger.log_dir "
            "and checkpointing.checkpoint_dir on a disk that all hosts share, by paths that do not depend on the host"
        )


def _lock(folder: Path, kind: int) -> None:
    """Keeps other runs out until this process ends. LOCK_EX: rank 0, which then shares it with the other ranks; they
    give LOCK_SH. ConfigError names who has it. A POSIX record lock: a fork does not inherit it, so no orphan of a
    killed run keeps the next one out; but it ends if its process closes any descriptor of the file: open it nowhere."""
    descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            time.sleep(0.5)  # who took it just now writes who it is
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            text = f"{folder} is in use by another run ({holder}): wait for its end, or stop it"
            raise ConfigError(text) from error
        if kind == fcntl.LOCK_EX:
            print(f"WARNING: {folder}: no locks on this disk ({error.strerror}): start no second run there", flush=True)
        return
    if kind == fcntl.LOCK_EX:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {host_name()}, since {since}\n".encode())
        fcntl.lockf(descriptor, fcntl.LOCK_SH)


def write_provenance(folder: Path, cfg: Config, world_size: int) -> None:
    """Writes the resolved config into a new run's folder, and adds an object to the list in `provenance.json`: a run
    that was resumed has one for each part."""
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text(reader.to_yaml(cfg))
    file = folder / "provenance.json"
    parts = parse_json(read_bytes(file), file) if file.exists() else []
    if not isinstance(parts, list):
        raise ConfigError(f"{file}: not the list that this program writes: move it away")
    patch = _git("diff", "HEAD", "--binary")
    name = f"changes_{len(parts) + 1}.patch" if patch else None
    if patch:
        (folder / name).write_text(patch, encoding="latin-1")
    packages = [package for package in importlib.metadata.distributions() if package.name]  # None: half removed
    variables = [name for name in sorted(os.environ) if name.startswith(("OMP_", "CUDA_", "NCCL_", "VLLM_"))]
    part = {
        "command": shlex.join(sys.argv),
        "working_directory": os.getcwd(),
        "world_size": world_size,
        "commit": (_git("rev-parse", "HEAD") or "unknown").strip(),
        "changes": name,
        "python": platform.python_version(),
        "packages": {package.name: package.version for package in sorted(packages, key=lambda p: p.name.lower())},
        "machine": _machine(),
        "environment": {name: os.environ[name] for name in variables},
    }
    file.write_text(json.dumps([*parts, part], indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str | None:
    """Its output, a character for each byte; None where this is no checkout, or git is not installed."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, encoding="latin-1").stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _machine() -> dict:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.platform(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }
