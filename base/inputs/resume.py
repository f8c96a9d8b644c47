"""Which run goes on, and from which of its checkpoints. No torch: `--check` asks here whether a run can go on.

A run that continues none does without this file.
"""

import json
import operator
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from base.inputs import reader
from base.inputs.checkpoints import (
    by_metric,
    check_folders,
    check_writable,
    checkpoint_folder,
    committed,
    numbered,
    read_meta,
)
from base.inputs.mixing import Mixture
from config import LORA_KEY, CheckpointingConfig, Config, ConfigError

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


def candidates(folder: Path, cfg: CheckpointingConfig) -> list[Path]:
    """The checkpoints in `folder` that may be loaded: the one that resume_step names, else all, newest first."""
    kept = numbered(folder, "step_")
    if cfg.resume_step is None:
        return list(kept.values())
    best = by_metric(folder, cfg.higher_is_better)
    chosen = best[:1] if cfg.resume_step == "best" else [kept[n] for n in kept if n == int(cfg.resume_step)]
    if not chosen:
        steps = f"choose one of its steps ({', '.join(map(str, kept)) or 'none'}; with a metric: {len(best)})"
        raise ConfigError(f"checkpointing.resume_step={cfg.resume_step}: {folder} has no such checkpoint: {steps}")
    return chosen


def resolve(cfg: Config) -> Config:
    """The config with `checkpointing.resume_from` as `checkpointing.resume`, auto or must, asks: the newest run of
    logger.log_dir with a whole checkpoint. Without one: null, and ConfigError for must."""
    ckpt_cfg = cfg.checkpointing
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
    if to_train:
        check_same_reference(run, saved=_saves_reference(before), needed=_saves_reference(cfg))
        if _saves_reference(cfg) and before.policy.freeze_moe_router != cfg.policy.freeze_moe_router:
            problem = "its reference has the weights that were trained: set policy.freeze_moe_router as in that run"
            raise ConfigError(f"checkpointing.resume_from={run}: {problem}")
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


def check_same_reference(where: Path, *, saved: bool, needed: bool) -> None:
    """ConfigError where a run or checkpoint has a reference policy that is not needed, or lacks one that is."""
    if saved != needed:
        problem = f"{where}: was saved {'with' if saved else 'without'} a reference policy"
        keys = "loss_fn.reference_policy_kl_penalty, policy.reference_model_name and policy.reference_server_url"
        raise ConfigError(f"{problem}; set {keys} as in that run")


def _saves_reference(cfg: Config) -> bool:
    """Whether a checkpoint has the weights of a reference: a teacher's are in its own folder."""
    return cfg.holds_reference and cfg.policy.reference_model_name is None


def check_same_data(train: Mixture, fingerprints: Mapping[str, str], resumed: str) -> None:
    """ConfigError unless these are the sets that the run `resumed` was trained on, by their fingerprints."""
    for name in sorted({*train.fingerprints, *fingerprints}):
        if train.fingerprints.get(name) == fingerprints.get(name):
            continue
        here = "is missing"
        if name in train.datasets:
            here = f"is new or changed ({train.datasets[name].path})"
        raise ConfigError(
            f"data.train: '{name}' {here}, compared with the data of the run {resumed}, so the saved position "
            "would select other prompts; give the same data, or start at the beginning of this data with "
            "checkpointing.allow_changes=true"
        )


def damaged(problem: str, checkpoint: Path) -> str:
    """The text of a ConfigError about a checkpoint that is not whole."""
    return f"{problem}: the checkpoint is damaged; use checkpointing.resume=auto to skip it, or remove {checkpoint}"


if __name__ == "__main__":  # for slurm.sh: CONFIG.yaml [key.sub=value ...]
    print(newest_step(reader.load(sys.argv[1], sys.argv[2:])))
