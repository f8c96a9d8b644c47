"""What a run reads, found and checked before torch is loaded: all that `grpo.py --check` answers for.

Owns no format: config.py, data.py, model_config.py and envs.py do. It calls them in the order in which a user would
want to hear of mistakes.
"""

from dataclasses import dataclass
from pathlib import Path

import config
import data
import envs
import resume
from model_config import ModelConfig


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
        resume.check_resumable(cfg, to_train)
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
