"""What it takes to repeat a run, written into its folder: `provenance.json`, and `changes.patch` beside it.

The resolved config is config.yaml; this is the rest: the program's commit and what was changed since, the packages, the
machine, the command line.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from run.resume import numbered
from system.ranks import Ranks, broadcast_from_rank0

ROOT = Path(__file__).resolve().parents[1]


def write_provenance(folder: Path, world_size: int) -> None:
    """Adds an object to the list in `provenance.json`: a run that was resumed has one for each part."""
    file = folder / "provenance.json"
    parts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    patch = _git("diff", "HEAD", "--binary")
    name = f"changes_{len(parts) + 1}.patch" if patch else None
    if patch:
        (folder / name).write_text(patch, encoding="utf-8")
    part = {
        "command": shlex.join(sys.argv),
        "working_directory": os.getcwd(),
        "world_size": world_size,
        "commit": (_git("rev-parse", "HEAD") or "unknown").strip(),
        "changes": name,
        "python": platform.python_version(),
        "packages": {
            d.name: d.version for d in sorted(importlib.metadata.distributions(), key=lambda d: d.name.lower())
        },
        "machine": _machine(),
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("OMP_", "CUDA_", "NCCL_", "VLLM_"))
        },
    }
    file.write_text(json.dumps([*parts, part], indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str | None:
    """Its output; None where this is no checkout, or git is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _machine() -> dict:
    cpus = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.platform(),
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def open_run_folder(log_dir: str, resume_from: str | None, ranks: Ranks) -> Path:
    """The run's folder: the one to resume, or a new `exp_NNN` in `log_dir`. Rank 0 makes it, all get the same path."""
    folder = resume_from
    if ranks.rank == 0 and resume_from is None:
        number = max(numbered(Path(log_dir), "exp_"), default=0) + 1
        while True:
            try:
                (Path(log_dir) / f"exp_{number:03d}").mkdir(parents=True)
                break
            except FileExistsError:  # another run took it just now
                number += 1
        folder = str(Path(log_dir) / f"exp_{number:03d}")
    elif ranks.rank == 0:
        (Path(resume_from) / "exit.json").unlink(missing_ok=True)  # it says how the part before ended
        shutil.rmtree(Path(resume_from) / "stacks", ignore_errors=True)
    return Path(broadcast_from_rank0(folder))
