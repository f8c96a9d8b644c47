"""The folder of a run: its lock, and what repeats the run (config.yaml, provenance.json, changes_1.patch)."""

import contextlib
import errno
import fcntl
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from config import Config, ConfigError
from support.inputs import reader
from support.inputs.files import parse_json, read_bytes
from support.inputs.resume import checkpoint_folder, numbered
from support.system.disk import describe_os_error, write_whole
from support.system.exits import host_name
from support.system.ranks import Ranks, gather, on_rank0

ROOT = Path(__file__).resolve().parents[2]
SHARED_DISK_SECONDS = 30.0  # so long an NFS client may believe its cache of a folder


def open_run_folder(cfg: Config, ranks: Ranks, *, to_train: bool = True) -> Path:
    """The run's folder: the one to resume, or a new `exp_NNN` in logger.log_dir (`eval_NNN` for eval.py). A run that
    trains locks it, and its checkpoints' folder, until it ends. ConfigError, on all ranks, where that fails."""
    try:
        folder = on_rank0(lambda: _open(cfg, to_train), ranks.job)
        if to_train:
            check_shared(_to_lock(cfg, folder), ranks)
            for locked in _to_lock(cfg, folder) if ranks.job_rank else ():
                _lock(locked, fcntl.LOCK_SH)
        on_rank0(lambda: write_provenance(folder, cfg, ranks.job_size), ranks.job)
    except OSError as error:
        folder = cfg.checkpointing.resume_from or cfg.logger.log_dir
        raise ConfigError(f"{folder}: the run's folder cannot be written ({describe_os_error(error)})") from error
    return folder


def _open(cfg: Config, to_train: bool) -> Path:
    """Finds or makes the folder, and locks it: on rank 0."""
    auto = to_train and cfg.checkpointing.resume == "auto"
    if to_train and cfg.checkpointing.resume_from:
        folder = Path(cfg.checkpointing.resume_from)
    else:
        log_dir = Path(cfg.logger.log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        kind = "exp_" if to_train else "eval_"
        runs = list(numbered(log_dir, kind).items())
        if auto and runs and runs[0][1].is_dir():  # this job, started twice, may run there without a checkpoint yet
            _lock(runs[0][1], fcntl.LOCK_EX)
        for number in itertools.count(runs[0][0] + 1 if runs else 1):
            folder = log_dir / f"{kind}{number:03d}"
            with contextlib.suppress(FileExistsError):  # another run took it just now; with auto, the lock decides
                folder.mkdir(exist_ok=auto)
                break
    for locked in _to_lock(cfg, folder) if to_train else ():
        locked.mkdir(parents=True, exist_ok=True)
        _lock(locked, fcntl.LOCK_EX)
    (folder / "exit.json").unlink(missing_ok=True)  # it says how the part before ended
    shutil.rmtree(folder / "stacks", ignore_errors=True)
    return folder


def _to_lock(cfg: Config, folder: Path) -> list[Path]:
    """Also the folder of the checkpoints: runs of two log_dirs may have the same name in one checkpoint_dir."""
    return [folder, checkpoint_folder(cfg.checkpointing, folder)] if cfg.checkpointing.checkpoint_dir else [folder]


def check_shared(folders: list[Path], ranks: Ranks) -> None:
    """ConfigError, on all ranks, that names a host whose disk does not have the locks that rank 0 has just made."""
    end = time.monotonic() + SHARED_DISK_SECONDS
    while (unseen := [folder for folder in folders if not (folder / "run.lock").exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    if blind := [(host, absent[0]) for host, absent in gather((host_name(), unseen), ranks.job) if absent]:
        raise ConfigError(
            f"{blind[0][1]}: {blind[0][0]} cannot see what another host wrote there: put logger.log_dir and "
            "checkpointing.checkpoint_dir on a disk that all hosts share, under the same path on each"
        )


def _lock(folder: Path, kind: int) -> None:
    """Keeps other runs out until this process ends. Rank 0 takes LOCK_EX and then shares the lock with the other
    ranks, which take LOCK_SH. ConfigError names the holder. It is a POSIX record lock: a fork does not inherit it, so
    no orphan of a killed run keeps the next run out. It ends when this process closes any descriptor of the file."""
    descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            time.sleep(0.5)  # a run that took it just now is still writing its name
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            text = f"{folder} is in use by another run ({holder}): wait for its end, or stop it"
            raise ConfigError(text) from error
        if kind == fcntl.LOCK_EX:
            problem = f"this file system has no file locks ({error.strerror})"
            print(f"WARNING: {folder}: {problem}: do not start a second run in it", flush=True)
        return
    if kind == fcntl.LOCK_EX:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {host_name()}, since {since}\n".encode())
        fcntl.lockf(descriptor, fcntl.LOCK_SH)


def write_provenance(folder: Path, cfg: Config, world_size: int) -> None:
    """Writes the resolved config into a new run's folder, and adds an object to the list in `provenance.json`: a
    resumed run has one for each part. A disk without room costs that object, not the run."""
    if not (folder / "config.yaml").exists():
        write_whole(folder / "config.yaml", reader.to_yaml(cfg))
    file = folder / "provenance.json"
    parts = parse_json(read_bytes(file), f"{file} (move it away)") if file.exists() else []
    patch = _git("diff", "HEAD", "--binary")
    name = f"changes_{len(parts) + 1}.patch" if patch else None
    found = [each.metadata for each in importlib.metadata.distributions()]  # each parses a file
    packages = sorted(((each["Name"], each["Version"]) for each in found if each["Name"]), key=lambda p: p[0].lower())
    prefixes = ("OMP_", "CUDA_", "NCCL_", "VLLM_")
    part = {
        "command": shlex.join(sys.argv),
        "working_directory": os.getcwd(),
        "world_size": world_size,
        "commit": (_git("rev-parse", "HEAD") or "unknown").strip(),
        "changes": name,
        "python": platform.python_version(),
        "packages": dict(packages),  # but those half removed, which have no name
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)},
    }
    try:
        if name:
            write_whole(folder / name, patch, encoding="latin-1")
        write_whole(file, json.dumps([*parts, part], indent=1) + "\n")
    except OSError as error:
        print(f"WARNING: {file} does not record this start of the run ({describe_os_error(error)})", flush=True)


def _git(*arguments: str) -> str | None:
    """git's output, a character for each byte; None where this is no checkout, or git is not installed."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, encoding="latin-1").stdout
    except (OSError, subprocess.CalledProcessError):
        return None
