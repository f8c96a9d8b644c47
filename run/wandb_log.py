"""The rows of metrics.jsonl at Weights & Biases. Whatever W&B does, training goes on."""

import secrets
from pathlib import Path

import yaml

from config import WandbConfig


class WandbLog:
    """A run at W&B. `wandb_id` in the run folder keeps its id, so a resumed run is the same one there."""

    def __init__(self, folder: Path, cfg: WandbConfig):
        self.folder, self.cfg = folder, cfg
        self.run = None
        self.has_failed = False

    def send(self, row: dict[str, float] | None) -> None:
        """Sends a row, over the x-axis `step`; None ends the run. W&B's own step, which may not fall and has one row
        each, is 2 * step for training and 2 * step + 1 for the validation after it."""
        if self.has_failed:
            return
        try:
            if row is None:
                return self.run.finish() if self.run else None
            self.run = self.run or self._init()
            is_validation = any(name.startswith("validation/") for name in row)
            self.run.log(row, step=2 * row["step"] + is_validation, commit=True)
        except Exception as error:  # W&B's own, the network's, an import that fails: no reason to end a run
            self.has_failed = True
            way_out = "logger.wandb_enabled=false runs without it"
            print(f"WARNING: W&B failed, training goes on without it ({error!r:.300}); {way_out}", flush=True)

    def _init(self):
        import wandb

        file = self.folder / "wandb_id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        run = wandb.init(
            project=self.cfg.project,
            name=self.cfg.name or self.folder.name,
            id=file.read_text(),
            resume="allow",
            dir=self.folder,
            config=yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8")),
            settings=wandb.Settings(console="off", finish_timeout=60.0),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run
