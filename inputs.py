"""What a run reads, found and checked before torch is loaded: all that `grpo.py --check` answers for.

Owns no format: config.py, data.py, model_config.py and envs.py do. It calls them in the order in which a user would
want to hear of mistakes.
"""

import json
import operator
import os
from dataclasses import dataclass
from pathlib import Path

import config
import config_file
import data
import envs
from model_config import ModelConfig

# What a resumed run must have as before: with another, its position in the data and its samples would mean others.
SAME_WHEN_RESUMED = (
    *("policy.model_name", "grpo.seed", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),
    "data.shuffle",
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads: found, parsed and checked, without torch. validation: name -> set, in the config's order."""

    model_folder: Path
    tokenizer: data.Tokenizer
    train: data.Dataset
    validation: dict[str, data.Dataset]
    environments: dict[str, envs.Environment]


def read_inputs(cfg: config.Config, *, to_train: bool = True) -> Inputs:
    """Model folder, tokenizer, datasets and environments of the config. ConfigError for whatever is wrong with them.

    Not `to_train`: the run in `checkpointing.resume_from` is only scored, and there may be no step to train.
    """
    data.check_writable("logger.log_dir", cfg.logger.log_dir)
    if cfg.checkpointing.checkpoint_dir:
        data.check_writable("checkpointing.checkpoint_dir", cfg.checkpointing.checkpoint_dir)
    if cfg.checkpointing.resume_from:
        check_resumable(cfg, to_train)
    folder = data.resolve_model_folder(cfg.policy.model_name)
    tokenizer = data.Tokenizer(folder)
    check_fits(cfg, folder, data.read_model_config(folder), tokenizer)
    sections = [cfg.data.train, *(section for section in cfg.data.validation if section.data_path)]
    datasets, environments = [], {}
    for section in sections:
        environment = environments.setdefault(section.env_name, envs.make_environment(section.env_name))
        datasets.append(data.load_dataset(section, tokenizer, cfg.max_prompt_tokens))
        environment.check_answers((f"{datasets[-1].path}:{row.line}", row.answer) for row in datasets[-1].rows)
    num_rows = len(datasets[0].rows)
    if to_train and num_steps_of(cfg, num_rows) == 0:
        spare = f" x grpo.batch_multiplier={cfg.grpo.batch_multiplier:g}" if cfg.grpo.batch_multiplier != 1 else ""
        raise config.ConfigError(
            f"nothing to train: {num_rows} prompts x grpo.max_num_epochs={cfg.grpo.max_num_epochs} are fewer than "
            f"grpo.num_prompts_per_step={cfg.grpo.num_prompts_per_step}{spare}"
        )
    names = [section.set_name for section in sections[1:]]
    return Inputs(folder, tokenizer, datasets[0], dict(zip(names, datasets[1:], strict=True)), environments)


def check_fits(cfg: config.Config, folder: Path, model: ModelConfig, tokenizer: data.Tokenizer) -> None:
    """ConfigError where config.json contradicts the tokenizer, or the run's config: vLLM would refuse either."""
    total, limit = cfg.policy.max_total_sequence_length, model.max_position_embeddings
    if limit is not None and total > limit:
        raise config.ConfigError(
            f"policy.max_total_sequence_length={total} is more than the model's max_position_embeddings={limit} "
            f"({folder / 'config.json'}): use {limit} or less"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise config.ConfigError(
            f"{folder}: tokenizer.json has ids up to {tokenizer.vocab_size - 1}, config.json vocab_size="
            f"{model.vocab_size}: tokens without an embedding; resize the model's embeddings, or use its own tokenizer"
        )
    tensor = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    sizes = {"num_attention_heads": model.num_attention_heads, "intermediate_size": model.intermediate_size}
    if tensor < model.num_key_value_heads or tensor % model.num_key_value_heads:  # else each rank has a copy of one
        sizes["num_key_value_heads"] = model.num_key_value_heads
    for name, size in sizes.items():
        if size % tensor:
            raise config.ConfigError(
                f"policy.generation.vllm_cfg.tensor_parallel_size={tensor} does not divide the model's {name}={size} "
                f"({folder / 'config.json'})"
            )


def check_resumable(cfg: config.Config, to_train: bool = True) -> None:
    """ConfigError where the run `checkpointing.resume_from` cannot go on: it left no whole checkpoint, or this run has
    another number of ranks (WORLD_SIZE, where it is set) or other settings that must stay.

    Content is not read here: checkpoint.py compares checksums.
    """
    folder = Path(cfg.checkpointing.resume_from)
    if not os.path.isdir(folder):
        raise config.ConfigError(f"checkpointing.resume_from: no folder '{folder}'; give a run folder, as logs/exp_001")
    if to_train:
        data.check_writable("checkpointing.resume_from", str(folder))
    checkpoints = checkpoint_folder(cfg.checkpointing, folder)
    newest = next(iter(committed(checkpoints)), None)
    if newest is None:
        raise config.ConfigError(
            f"checkpointing.resume_from={folder}: no whole checkpoint in {checkpoints}; start a new run without it"
        )
    ranks, saved_ranks = os.environ.get("WORLD_SIZE"), read_meta(newest)["world_size"]
    if ranks is not None and int(ranks) != saved_ranks:
        raise config.ConfigError(
            f"{newest}: written by {saved_ranks} ranks, this run has {ranks}; use --nproc_per_node={saved_ranks}"
        )
    before, changed = config_file.load(folder / "config.yaml"), []
    for key in SAME_WHEN_RESUMED if to_train else ("policy.model_name",):
        old, new = (operator.attrgetter(key)(c) for c in (before, cfg))
        if old != new and (key != "policy.model_name" or Path(old) != Path(new)):  # "model" is "./model/"
            changed.append(f"{key}={json.dumps(new)} (there {json.dumps(old)})")
    if changed:
        raise config.ConfigError(
            f"not as in the run that checkpointing.resume_from={folder} continues: {', '.join(changed)}; use "
            f"./train.sh {folder}/config.yaml checkpointing.resume_from={folder}"
        )


def checkpoint_folder(cfg: config.CheckpointingConfig, run_folder: Path) -> Path:
    """Where a run's checkpoints are. Runs that share a `checkpoint_dir` have a folder each: a run deletes old ones."""
    return Path(cfg.checkpoint_dir) / run_folder.resolve().name if cfg.checkpoint_dir else run_folder / "checkpoints"


def committed(checkpoints: Path) -> list[Path]:
    """Whole checkpoints in the folder, newest first."""
    found = [path for path in checkpoints.glob("step_*") if path.name[5:].isdigit() and read_meta(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def read_meta(checkpoint: Path) -> dict | None:
    """Its meta.json (checkpoint.py); None when that is missing, unreadable, or the files are not those it lists."""
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
        whole = all((checkpoint / name).stat().st_size == entry["bytes"] for name, entry in meta["files"].items())
        return meta if whole and {"version", "step", "world_size", "state"} <= meta.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def num_steps_of(cfg: config.Config, num_rows: int) -> int:
    """Steps of the run; dynamic sampling may draw more than one batch for a step, so fewer then."""
    return min(cfg.grpo.max_num_steps, cfg.grpo.max_num_epochs * num_rows // cfg.grpo.prompts_per_batch)


def check(cfg: config.Config) -> str:
    """Everything that can be wrong before torch is loaded; a summary when nothing is."""
    inputs = read_inputs(cfg)
    lines = [f"model      {inputs.model_folder} (vocabulary {inputs.tokenizer.vocab_size:,})"]
    for name, dataset in [("train", inputs.train), *(("validation", found) for found in inputs.validation.values())]:
        long = f", {dataset.num_too_long} left out: over {cfg.max_prompt_tokens} tokens" if dataset.num_too_long else ""
        lines.append(f"{name:10} {dataset.path}: {len(dataset.rows):,} prompts{long}")
    steps, grpo = num_steps_of(cfg, len(inputs.train.rows)), cfg.grpo
    lines.append(
        f"steps      {steps:,} of {grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} samples"
    )
    return "\n".join(lines)
