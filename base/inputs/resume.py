"""Finds run folders and checkpoints and says which are whole. No torch: `--check` asks here whether a run can go on.

A checkpoint is a folder `step_000010` with the files and file sizes that its `meta.json` lists; anything else under
such a name is damaged. run/checkpoint.py writes and reads the tensors and compares the checksums of the files.
"""

import hashlib
import json
import operator
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from base.inputs import reader
from base.system.disk import describe_os_error
from base.system.files import read_json
from config import LORA_KEY, CheckpointingConfig, Config, ConfigError, DataError

VERSION = 5  # the format of a checkpoint's files
# What reading a file raises that has another form.
FOREIGN = (ValueError, LookupError, TypeError, AttributeError, SafetensorError, msgspec.ValidationError)
# Under another value, a checkpoint's tensors would mean another model.
LORA_KEYS = ("enabled", "dim", "alpha", "match_all_linear", "target_modules", "exclude_modules")
SAME_WHEN_LOADED = ("policy.model_name", *(f"{LORA_KEY}.{name}" for name in LORA_KEYS))
# Not even with allow_changes: no optimizer reads another one's state, and other adapters are other tensors.
NEVER_CHANGED = ("policy.optimizer.name", *SAME_WHEN_LOADED[1:])
# Under another value, the position in the data and the sampling seeds would mean other prompts and samples.
_DATA = ("shuffle", "use_multiple_dataloader", "num_prompts_per_dataloader", "custom_dataloader")
SAME_WHEN_RESUMED = (*SAME_WHEN_LOADED, "policy.optimizer.name", "policy.reference_model_name")
SAME_WHEN_RESUMED += ("grpo.seed", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt")
SAME_WHEN_RESUMED += tuple(f"policy.tokenizer.{key}" for key in ("name", "chat_template", "chat_template_kwargs"))
SAME_WHEN_RESUMED += tuple(f"data.{key}" for key in _DATA)


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Number -> path of the exp_007 or step_000010 in `folder`, highest number first."""
    paths = {p.name.removeprefix(prefix): p for p in folder.glob(f"{prefix}*")}
    numbers = filter(re.compile("[0-9]+").fullmatch, paths)  # isdecimal() takes other alphabets' digits too
    return {int(number): paths[number] for number in sorted(numbers, key=int, reverse=True)}


def checkpoint_folder(cfg: CheckpointingConfig, run_folder: Path) -> Path:
    """Where a run's checkpoints are. A run deletes old ones, so each has a folder of its own in a `checkpoint_dir`."""
    return Path(cfg.checkpoint_dir) / run_folder.resolve().name if cfg.checkpoint_dir else run_folder / "checkpoints"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, whole or not, newest first."""
    return list(numbered(folder, "step_").values())


def committed(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, newest first. ConfigError where one has another format."""
    return [path for path in checkpoints(folder) if isinstance(read_meta(path), dict)]


def by_metric(folder: Path, higher_is_better: bool) -> list[Path]:
    """The whole checkpoints in `folder` that have the metric of metric_name, best first, the newer first of equals."""
    sign = -1 if higher_is_better else 1
    rated = [(sign * metric, path) for path in committed(folder) if (metric := read_meta(path)["metric"]) is not None]
    return [path for _, path in sorted(rated, key=lambda pair: pair[0])]


def candidates(folder: Path, cfg: CheckpointingConfig) -> list[Path]:
    """The checkpoints in `folder` that may be loaded: the one that resume_step names, else all, newest first."""
    if cfg.resume_step is None:
        return checkpoints(folder)
    kept = numbered(folder, "step_")
    best = by_metric(folder, cfg.higher_is_better)
    chosen = best[:1] if cfg.resume_step == "best" else [kept[n] for n in kept if n == int(cfg.resume_step)]
    if not chosen:
        steps = f"choose one of its steps ({', '.join(map(str, kept)) or 'none'}; with a metric: {len(best)})"
        raise ConfigError(f"checkpointing.resume_step={cfg.resume_step}: {folder} has no such checkpoint: {steps}")
    return chosen


def read_meta(checkpoint: Path) -> dict | str:
    """The content of the checkpoint's meta.json; where the checkpoint is not whole, what is wrong, naming the file.
    ConfigError where another version of the program wrote it: it is whole, but nothing here can read it."""
    file = checkpoint / "meta.json"
    try:
        meta = read_json(file)
        stated = meta.pop("sha256", None)
        if meta["version"] != VERSION:
            versions = f"{json.dumps(meta['version'])}, but this version of the program reads {VERSION}"
            fix = "continue with the commit that the run folder's provenance.json names, or start a new run"
            raise ConfigError(f"{file}: checkpoint format {versions}; {fix}")
        if stated != digest(meta):
            return f"{file}: content differs from its checksum"
        if checkpoint.name != f"step_{meta['step']:06d}":
            return f"{file}: belongs to step {meta['step']}"
        for name, entry in meta["files"].items():
            size = (checkpoint / name).stat().st_size
            if size != entry["bytes"]:
                return f"{checkpoint / name}: {size:,} bytes, but meta.json says {entry['bytes']:,}"
        return meta
    except DataError as error:
        return str(error)
    except OSError as error:
        return describe_os_error(error)
    except FOREIGN as error:
        return foreign(file, error)


def foreign(path: Path, error: Exception) -> str:
    """What is wrong with a file or folder at which reading failed with one of FOREIGN."""
    return f"{path}: not written by this program ({type(error).__name__}: {error})"


@contextmanager
def of_this_program(path: Path) -> Iterator[None]:
    """Within, the content of `path` is read, whose checksums are right: ConfigError where it has another form."""
    try:
        yield
    except FOREIGN as error:
        raise ConfigError(foreign(path, error)) from error


def digest(meta: dict) -> str:
    """The sha256 of all else in a meta.json."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def resolve(cfg: Config) -> Config:
    """The config with `checkpointing.resume_from` as `checkpointing.resume` asks. auto and must: the run that is named,
    else the newest run of logger.log_dir with a whole checkpoint. Without one: null, and ConfigError for must."""
    ckpt_cfg = cfg.checkpointing
    if ckpt_cfg.resume not in ("auto", "must") or ckpt_cfg.resume_from:
        return cfg
    check_folders(cfg)
    runs = numbered(Path(cfg.logger.log_dir), "exp_").values()
    newest = next((str(run) for run in runs if committed(checkpoint_folder(ckpt_cfg, run))), None)
    if newest is None and ckpt_cfg.resume == "must":
        problem = f"no run in logger.log_dir={cfg.logger.log_dir} has a complete checkpoint"
        fix = "set checkpointing.resume_from, or checkpointing.resume=auto to start a new run where there is none"
        raise ConfigError(f"checkpointing.resume=must: {problem}; {fix}")
    if os.environ.get("RANK", "0") == "0":
        print(f"resume     checkpointing.resume={ckpt_cfg.resume}: {_found(cfg.logger.log_dir, list(runs), newest)}")
    return replace(cfg, checkpointing=replace(ckpt_cfg, resume_from=newest))


def newest_step(cfg: Config) -> int:
    """The step of the newest whole checkpoint that resume=auto would continue; 0 without one."""
    runs = numbered(Path(cfg.logger.log_dir), "exp_").values()
    if cfg.checkpointing.resume_from:
        runs = [Path(cfg.checkpointing.resume_from)]
    for run in runs:
        kept = committed(checkpoint_folder(cfg.checkpointing, run))
        if kept:
            return read_meta(kept[0])["step"]
    return 0


def _found(log_dir: str, runs: list[Path], newest: str | None) -> str:
    """What was found in log_dir: runs, the newest first, and the newest of them that has a complete checkpoint."""
    if not runs:
        return f"no run in {log_dir}, so a new one starts"
    if newest is None:
        return f"no run in {log_dir} has a complete checkpoint (the newest: {runs[0].name}), so a new one starts"
    if newest != str(runs[0]):
        return f"continues {newest}, as {runs[0].name} has no complete checkpoint"
    return f"continues {newest}"


def check_folders(cfg: Config) -> None:
    """ConfigError where a folder that the run writes could not be made or written."""
    check_writable("logger.log_dir", cfg.logger.log_dir)
    if cfg.checkpointing.checkpoint_dir:
        check_writable("checkpointing.checkpoint_dir", cfg.checkpointing.checkpoint_dir)


def check_writable(key: str, folder: str) -> None:
    """Raise ConfigError if `folder`, the value of config key `key`, could not be made or written. Leaves nothing."""
    path = Path(folder).absolute()
    while not os.path.lexists(path):  # unlike Path.exists, also false below a folder that must not be searched
        path = path.parent
    try:
        tempfile.TemporaryFile(dir=path).close()  # os.access says that /proc may be written
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot write in {path} ({error.strerror})") from None


def check_resumable(cfg: Config, to_train: bool = True) -> None:
    """ConfigError where the run `checkpointing.resume_from` cannot go on: it has no whole checkpoint, the newest one is
    damaged (resume=auto takes the one before), another version wrote it, or settings differ that must stay."""
    run = Path(cfg.checkpointing.resume_from)
    if not os.path.isdir(run):
        tried = f"(tried {os.path.abspath(run)}): give a run folder, such as logs/exp_001"
        raise ConfigError(f"checkpointing.resume_from: no folder '{run}' {tried}")
    if to_train:
        check_writable("checkpointing.resume_from", str(run))
    folder = checkpoint_folder(cfg.checkpointing, run)
    metas = {path: read_meta(path) for path in candidates(folder, cfg.checkpointing)}
    newest, meta = next(iter(metas.items()), (folder, "the folder is empty or missing"))
    if all(isinstance(meta, str) for meta in metas.values()):
        problem = f"no complete checkpoint in {folder} ({meta})"
        raise ConfigError(f"checkpointing.resume_from={run}: {problem}; unset the key to start anew")
    if isinstance(meta, str) and cfg.checkpointing.resume != "auto":
        raise ConfigError(damaged(meta, newest))
    before = reader.load(run / "config.yaml")
    changed = {}
    has_lora = any(config.policy.dtensor_cfg.lora_cfg.enabled for config in (before, cfg))
    for key in SAME_WHEN_RESUMED if to_train else SAME_WHEN_LOADED:
        old, new = (operator.attrgetter(key)(config) for config in (before, cfg))
        is_same = Path(old) == Path(new) if key == "policy.model_name" else old == new  # "model" is "./model/"
        if not is_same and (has_lora or not key.startswith(LORA_KEY)):
            changed[key] = f"{key}={json.dumps(new, default=asdict)} (was {json.dumps(old, default=asdict)})"
    is_fixed = any(key in NEVER_CHANGED for key in changed)
    if changed and (is_fixed or not cfg.checkpointing.allow_changes):
        fix = f"use ./train.sh {run}/config.yaml checkpointing.resume_from={run}"
        fix += "" if is_fixed else ", or set checkpointing.allow_changes=true"
        problem = f"cannot continue with other settings: {', '.join(changed.values())}"
        raise ConfigError(f"checkpointing.resume_from={run} {problem}; {fix}")


def damaged(problem: str, checkpoint: Path) -> str:
    """The text of a ConfigError about a checkpoint that is not whole."""
    return f"{problem}: the checkpoint is damaged; use checkpointing.resume=auto to skip it, or remove {checkpoint}"


if __name__ == "__main__":  # for slurm.sh: CONFIG.yaml [key.sub=value ...]
    print(newest_step(reader.load(sys.argv[1], sys.argv[2:])))
