"""What a run sends to W&B (logger.wandb_enabled)."""

import secrets
from pathlib import Path
from typing import Protocol

import yaml

from base.system.disk import write_whole
from config import WandbConfig


class WandbRun(Protocol):
    """What is used of W&B's run."""

    def log(self, data: dict[str, float], step: int, commit: bool) -> None: ...


class WandbLog:
    """Sends rows to W&B from the first one on, until it fails."""

    def __init__(self, folder: Path, cfg: WandbConfig):
        self.folder = folder
        self.cfg = cfg
        self.run: WandbRun | None = None
        self.has_failed = False

    def log(self, row: dict[str, float]) -> None:
        """Sends a row, over the x-axis `step`. W&B's own step, which may not fall and has one row each, is 2 * step for
        training and 2 * step + 1 for the validation after it. `exit_process` ends the run at W&B."""
        if self.has_failed:
            return
        try:
            if self.run is None:
                self.run = _start_wandb(self.folder, self.cfg)
            place = 2 * row["step"]
            if any(name.startswith("validation/") for name in row):
                place += 1
            self.run.log(row, step=place, commit=True)
        except Exception as error:  # W&B's own, the network's, an import that fails: no reason to end a run
            self.has_failed = True
            text = f"WARNING: W&B failed ({error!r:.300}): the run continues as with logger.wandb_enabled=false"
            print(text, flush=True)


def _start_wandb(folder: Path, cfg: WandbConfig) -> WandbRun:
    """The run at W&B. `wandb_id` in the run folder keeps its id, so a resumed run is the same one there."""
    import wandb

    file = folder / "wandb_id"
    if not file.exists():
        write_whole(file, secrets.token_hex(4))
    run = wandb.init(
        project=cfg.project,
        name=cfg.name or folder.name,
        id=file.read_text(),
        resume="allow",
        dir=folder,
        config=yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
        settings=wandb.Settings(console="off", finish_timeout=60.0),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
