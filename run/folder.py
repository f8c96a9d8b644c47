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

from config import Config
from run import config_file
from run.resume import numbered
from system.ranks import Ranks, broadcast_from_rank0

ROOT = Path(__file__).resolve().parents[1]


def write_provenance(folder: Path, cfg: Config, world_size: int) -> None:
    """Writes the resolved config into a new run's folder, and adds an object to the list in `provenance.json`: a run
    that was resumed has one for each part."""
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text(config_file.to_yaml(cfg))
    file = folder / "provenance.json"
    parts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    patch = _git("diff", "HEAD", "--binary")
    name = f"changes_{len(parts) + 1}.patch" if patch else None
    if patch:
        (folder / name).write_text(patch, encoding="utf-8")
    packages = sorted(importlib.metadata.distributions(), key=lambda package: package.name.lower())
    variables = [name for name in sorted(os.environ) if name.startswith(("OMP_", "CUDA_", "NCCL_", "VLLM_"))]
    part = {
        "command": shlex.join(sys.argv),
        "working_directory": os.getcwd(),
        "world_size": world_size,
        "commit": (_git("rev-parse", "HEAD") or "unknown").strip(),
        "changes": name,
        "python": platform.python_version(),
        "packages": {package.name: package.version for package in packages},
        "machine": _machine(),
        "environment": {name: os.environ[name] for name in variables},
    }
    file.write_text(json.dumps([*parts, part], indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str | None:
    """Its output; None where this is no checkout, or git is not installed."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
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


def open_run_folder(log_dir: str, resume_from: str | None, ranks: Ranks) -> Path:
    """The run's folder: the one to resume, or a new `exp_NNN` in `log_dir`. Rank 0 makes it, all get the same path."""
    folder = Path(resume_from or log_dir)
    if ranks.rank == 0 and resume_from:
        (folder / "exit.json").unlink(missing_ok=True)  # it says how the part before ended
        shutil.rmtree(folder / "stacks", ignore_errors=True)
    elif ranks.rank == 0:
        for number in itertools.count(max(numbered(folder, "exp_"), default=0) + 1):
            with contextlib.suppress(FileExistsError):  # another run took it just now
                (folder / f"exp_{number:03d}").mkdir(parents=True)
                break
        folder = folder / f"exp_{number:03d}"
    return broadcast_from_rank0(folder)
