"""Run folders and checkpoints as files: which run to go on with, which checkpoint is whole. No torch.

A checkpoint is a folder `step_000010` with the files that its `meta.json` lists, of the sizes it lists; checkpoint.py
writes and reads the content, and compares checksums. Anything else under that name is damaged: a rename puts a folder
there only when it is whole. What `--check` says of resuming is said here.
"""

import json
import operator
import os
from dataclasses import replace
from pathlib import Path

import config
from run import config_file
from run.config_check import check_writable

VERSION = 2
# What a resumed run must have as before: with another, its position in the data and its samples would mean others.
SAME_WHEN_RESUMED = (
    *("policy.model_name", "grpo.seed", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),
    *("policy.tokenizer.chat_template", "policy.tokenizer.chat_template_kwargs"),
    *("data.shuffle", "data.use_multiple_dataloader", "data.num_prompts_per_dataloader", "data.custom_dataloader"),
)


def checkpoint_folder(cfg: config.CheckpointingConfig, run_folder: Path) -> Path:
    """Where a run's checkpoints are. Runs that share a `checkpoint_dir` have a folder each: a run deletes old ones."""
    return Path(cfg.checkpoint_dir) / run_folder.resolve().name if cfg.checkpoint_dir else run_folder / "checkpoints"


def steps(checkpoints: Path) -> list[Path]:
    """Folders that stand for a checkpoint, whole or not, newest first."""
    found = [path for path in checkpoints.glob("step_*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def committed(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, newest first."""
    return [path for path in steps(checkpoints) if isinstance(read_meta(path), dict)]


def read_meta(checkpoint: Path) -> dict | str:
    """Its meta.json; where the checkpoint is not whole, what is wrong with it, naming the file."""
    file = checkpoint / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        if meta["version"] != VERSION:
            return f"{file}: checkpoint format {meta['version']}, this program reads {VERSION}"
        for name, entry in meta["files"].items():
            size = (checkpoint / name).stat().st_size
            if size != entry["bytes"]:
                return f"{checkpoint / name}: {size:,} bytes, {entry['bytes']:,} by meta.json"
        missing = {"step", "world_size", "state", "metric"} - meta.keys()
        return f"{file}: lacks {', '.join(sorted(missing))}" if missing else meta
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{file}: not what checkpoint.py writes ({type(error).__name__}: {error})"


def resolve(cfg: config.Config) -> config.Config:
    """The config with `checkpointing.resume_from` as `checkpointing.resume` makes it: the run to go on with, or null.

    must, auto: the run named, else the newest run of logger.log_dir that has a whole checkpoint. ConfigError where
    `must` finds none.
    """
    saving = cfg.checkpointing
    if saving.resume not in ("auto", "must") or saving.resume_from:
        return cfg
    runs = [path for path in Path(cfg.logger.log_dir).glob("exp_*") if path.name[4:].isdigit()]
    runs.sort(key=lambda path: int(path.name[4:]), reverse=True)
    found = next((path for path in runs if committed(checkpoint_folder(saving, path))), None)
    if found is None and saving.resume == "must":
        raise config.ConfigError(
            f"checkpointing.resume=must: no run in logger.log_dir={cfg.logger.log_dir} has a whole checkpoint; name "
            "one by checkpointing.resume_from, or use checkpointing.resume=auto to start a new run where there is none"
        )
    return replace(cfg, checkpointing=replace(saving, resume_from=None if found is None else str(found)))


def check_resumable(cfg: config.Config, to_train: bool = True) -> None:
    """ConfigError where the run `checkpointing.resume_from` cannot go on: it left no whole checkpoint, its newest is
    damaged (resume=auto takes the one before), or settings differ that must stay.

    Content is not read here: checkpoint.py compares checksums.
    """
    folder = Path(cfg.checkpointing.resume_from)
    if not os.path.isdir(folder):
        raise config.ConfigError(f"checkpointing.resume_from: no folder '{folder}'; give a run folder, as logs/exp_001")
    if to_train:
        check_writable("checkpointing.resume_from", str(folder))
    checkpoints = checkpoint_folder(cfg.checkpointing, folder)
    if not committed(checkpoints):
        problems = "; ".join(str(read_meta(path)) for path in steps(checkpoints)[:3])
        raise config.ConfigError(
            f"checkpointing.resume_from={folder}: no whole checkpoint in {checkpoints}"
            f"{f' ({problems})' if problems else ''}; start a new run without it"
        )
    newest = steps(checkpoints)[0]
    if cfg.checkpointing.resume != "auto" and isinstance(problem := read_meta(newest), str):
        raise config.ConfigError(damaged(problem, newest))
    before, changed = config_file.load(folder / "config.yaml"), []
    for key in SAME_WHEN_RESUMED if to_train else ("policy.model_name",):
        old, new = (operator.attrgetter(key)(c) for c in (before, cfg))
        if old != new and (key != "policy.model_name" or Path(old) != Path(new)):  # "model" is "./model/"
            changed.append(f"{key}={json.dumps(new)} (there {json.dumps(old)})")
    if changed and not cfg.checkpointing.allow_changes:
        raise config.ConfigError(
            f"not as in the run that checkpointing.resume_from={folder} continues: {', '.join(changed)}; use "
            f"./train.sh {folder}/config.yaml checkpointing.resume_from={folder}, or set "
            "checkpointing.allow_changes=true"
        )


def damaged(problem: str, checkpoint: Path) -> str:
    return (
        f"{problem}: the checkpoint is damaged; use checkpointing.resume=auto to go on from the one before it, or "
        f"remove {checkpoint}"
    )
