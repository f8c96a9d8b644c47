"""The folder of a run: its lock, and what repeats the run (config.yaml, provenance.json, changes_1.patch)."""

import contextlib
import errno
import fcntl
import importlib.metadata
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

from base.inputs import reader
from base.inputs.checkpoints import checkpoint_folder, numbered
from base.system.disk import describe_os_error, write_whole
from base.system.exits import host_name
from base.system.files import parse_json, read_bytes
from base.system.ranks import Ranks, gather, on_rank0
from base.system.users_code import ROOT
from config import Config, ConfigError

SHARED_DISK_SECONDS = 30.0  # so long an NFS client may believe its cache of a folder
RECORDED_PREFIXES = ("OMP_", "CUDA_", "NCCL_", "VLLM_")  # of environment variables


def open_run_folder(cfg: Config, ranks: Ranks, *, to_train: bool = True) -> Path:
    """The run's folder: the one to resume, or a new `exp_NNN` in logger.log_dir (`eval_NNN` for eval.py). A run that
    trains locks it, and its checkpoints' folder, until it ends. ConfigError, on all ranks, where that fails."""
    try:
        folder = on_rank0(lambda: _open(cfg, to_train), ranks.job)
        if to_train:
            locked_folders = _to_lock(cfg, folder)
            check_shared(locked_folders, ranks)
            if ranks.job_rank > 0:
                for locked in locked_folders:
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
        folder = _new_folder(Path(cfg.logger.log_dir), "exp_" if to_train else "eval_", auto)
    if to_train:
        for locked in _to_lock(cfg, folder):
            locked.mkdir(parents=True, exist_ok=True)
            _lock(locked, fcntl.LOCK_EX)
    (folder / "exit.json").unlink(missing_ok=True)  # it says how the part before ended
    shutil.rmtree(folder / "stacks", ignore_errors=True)
    return folder


def _new_folder(log_dir: Path, kind: str, auto: bool) -> Path:
    """Makes the folder with the next number."""
    log_dir.mkdir(parents=True, exist_ok=True)
    runs = numbered(log_dir, kind)
    number = max(runs, default=0)
    if auto and runs and runs[number].is_dir():  # this job, started twice, may run there without a checkpoint yet
        _lock(runs[number], fcntl.LOCK_EX)
    while True:
        number += 1
        folder = log_dir / f"{kind}{number:03d}"
        with contextlib.suppress(FileExistsError):  # another run took it just now; with auto, the lock decides
            folder.mkdir(exist_ok=auto)
            return folder


def _to_lock(cfg: Config, folder: Path) -> list[Path]:
    """Also the folder of the checkpoints: runs of two log_dirs may have the same name in one checkpoint_dir."""
    folders = [folder]
    if cfg.checkpointing.checkpoint_dir:
        folders.append(checkpoint_folder(cfg.checkpointing, folder))
    return folders


def check_shared(folders: list[Path], ranks: Ranks) -> None:
    """ConfigError, on all ranks, that names a host whose disk does not have the locks that rank 0 has just made."""
    end = time.monotonic() + SHARED_DISK_SECONDS
    unseen = _without_lock(folders)
    while unseen and time.monotonic() < end:
        time.sleep(0.1)
        unseen = _without_lock(folders)
    for host, unseen_there in gather((host_name(), unseen), ranks.job):
        if unseen_there:
            raise ConfigError(
                f"{unseen_there[0]}: {host} cannot see what another host wrote there: put logger.log_dir and "
                "checkpointing.checkpoint_dir on a disk that all hosts share, under the same path on each"
            )


def _without_lock(folders: list[Path]) -> list[Path]:
    return [folder for folder in folders if not (folder / "run.lock").exists()]


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
    parts = []
    if file.exists():
        parts = parse_json(read_bytes(file), f"{file} (move it away)")
    changes = _git("diff", "HEAD", "--binary")
    patch = None
    if changes:
        patch = f"changes_{len(parts) + 1}.patch"
    commit = _git("rev-parse", "HEAD") or "unknown"
    part = {
        "command": shlex.join(sys.argv),
        "working_directory": os.getcwd(),
        "world_size": world_size,
        "commit": commit.strip(),
        "changes": patch,
        "python": platform.python_version(),
        "packages": _packages(),
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(RECORDED_PREFIXES)},
    }
    try:
        if patch is not None:
            write_whole(folder / patch, changes, encoding="latin-1")
        text = json.dumps([*parts, part], indent=1)
        write_whole(file, f"{text}\n")
    except OSError as error:
        print(f"WARNING: {file} does not record this start of the run ({describe_os_error(error)})", flush=True)


def _packages() -> dict[str, str]:
    """Name -> version of each installed package, by name. What is half removed has no name, and is left out."""
    versions = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata  # parses a file
        if metadata["Name"]:
            versions[metadata["Name"]] = metadata["Version"]
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _git(*arguments: str) -> str | None:
    """git's output, a character for each byte; None where this is no checkout, or git is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, encoding="latin-1")
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
