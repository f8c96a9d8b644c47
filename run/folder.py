"""The folder of a run, and what it takes to repeat the run: `config.yaml`, `provenance.json` and `changes_1.patch`."""

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from config import Config, ConfigError
from run import config_file
from run.lock import lock
from run.resume import check_free, checkpoint_folder, numbered
from system.exits import describe_os_error
from system.ranks import Ranks, on_rank0

ROOT = Path(__file__).resolve().parents[1]


def open_run_folder(cfg: Config, ranks: Ranks, *, to_train: bool = True) -> Path:
    """The run's folder: the one to resume, or a new `exp_NNN` in logger.log_dir. Who trains has it alone, and that of
    its checkpoints, while its processes live. ConfigError, on all ranks, where that cannot be."""
    folder = on_rank0(lambda: _open(cfg, to_train, ranks.world_size))
    if to_train and ranks.rank:
        for locked in _folders_to_lock(cfg, folder):
            lock(locked, leads=False)
    return folder


def _open(cfg: Config, to_train: bool, world_size: int) -> Path:
    folder = Path(cfg.logger.log_dir)
    try:
        if to_train and cfg.checkpointing.resume_from:
            folder = Path(cfg.checkpointing.resume_from)
        else:
            folder = _make_new(cfg, to_train)
        for locked in _folders_to_lock(cfg, folder) if to_train else ():
            locked.mkdir(parents=True, exist_ok=True)
            lock(locked, leads=True)
        (folder / "exit.json").unlink(missing_ok=True)  # it says how the part before ended
        shutil.rmtree(folder / "stacks", ignore_errors=True)
        write_provenance(folder, cfg, world_size)
    except OSError as error:
        raise ConfigError(f"{folder}: the run's folder cannot be written ({describe_os_error(error)})") from error
    return folder


def _make_new(cfg: Config, to_train: bool) -> Path:
    log_dir = Path(cfg.logger.log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    if to_train:
        check_free(cfg)
    for number in itertools.count(max(numbered(log_dir, "exp_"), default=0) + 1):
        folder = log_dir / f"exp_{number:03d}"
        with contextlib.suppress(FileExistsError):  # another run took it just now
            # auto: if it is this job, started twice, the lock decides between the two
            folder.mkdir(exist_ok=to_train and cfg.checkpointing.resume == "auto")
            return folder


def _folders_to_lock(cfg: Config, folder: Path) -> list[Path]:
    """Runs of two log_dirs may have one name, and so one folder in the checkpoint_dir that they share."""
    return [folder, checkpoint_folder(cfg.checkpointing, folder)] if cfg.checkpointing.checkpoint_dir else [folder]


def write_provenance(folder: Path, cfg: Config, world_size: int) -> None:
    """Writes the resolved config into a new run's folder, and adds an object to the list in `provenance.json`: a run
    that was resumed has one for each part."""
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text(config_file.to_yaml(cfg))
    file = folder / "provenance.json"
    try:
        parts = list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: not the list that this program writes ({error}): move it away") from error
    patch = _git("diff", "HEAD", "--binary")
    name = f"changes_{len(parts) + 1}.patch" if patch else None
    if patch:
        (folder / name).write_text(patch, encoding="utf-8", errors="surrogateescape")
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
    """Its output; None where this is no checkout, or git is not installed."""
    command = ["git", *arguments]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, errors="surrogateescape")
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout


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
