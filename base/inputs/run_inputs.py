"""Everything that a run reads, found, parsed and checked before torch is loaded: models, data, environments.

It knows no format. It calls the modules that do, in the order in which a user wants to hear of mistakes.
"""

import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import envs
from base.graders.environments import make_environment, start_environment
from base.hf.config_forms import LENGTHS
from base.hf.family import NATIVE
from base.hf.folder import check_weights, has_experts_together, missing_weights, read_model_config, resolve_folder
from base.hf.model_config import ModelConfig, NativeConfig
from base.hf.tokenizer import Tokenizer
from base.inputs.checkpoints import check_folders
from base.inputs.mixing import Mixture
from base.inputs.scan import Dataset, OnRank0, load_dataset
from base.system.users_code import ROOT, call
from config import (
    Config,
    ConfigError,
    DataError,
    DatasetConfig,
    EnvConfig,
    LoggerConfig,
    RewardModelConfig,
    TokenizerConfig,
    shortened,
)

if TYPE_CHECKING:
    from base.inputs.teacher_server import TeacherServer

WANDB_VERSION = "0.31.0"  # the tests run with this version: requirements/tests.txt


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a run reads. validation: name -> set, in the config's order."""

    model_folder: Path
    model_config: ModelConfig
    tokenizer: Tokenizer
    train: Mixture
    validation: dict[str, Dataset]
    environments: dict[str, envs.Environment]
    reward_model: tuple[Path, ModelConfig, Tokenizer] | None = None  # if an environment asks for one
    reference_model: tuple[Path, ModelConfig] | None = None  # a teacher
    teacher_server: "TeacherServer | None" = None  # or this

    @property
    def sets(self) -> list[tuple[str, Dataset]]:
        """(purpose, set)"""
        train = [("train", dataset) for dataset in self.train.datasets.values()]
        validation = [("validation", dataset) for dataset in self.validation.values()]
        return train + validation


def read_inputs(
    cfg: Config,
    *,
    to_train: bool = True,
    to_plan: bool = False,
    reads_data: bool = True,
    max_rows: int | None = None,
    on_rank0: OnRank0 = lambda work: work(),
) -> RunInputs:
    """Everything the config names; ConfigError for whatever is wrong with it. Without `to_train` the run of
    `resume_from` is only scored, and there may be no step to train. With `to_plan` the policy's weights may be absent.
    Without `reads_data` the model is all there is. max_rows, on_rank0: as in `load_dataset`."""
    if to_train:
        check_wandb(cfg.logger)
    check_folders(cfg)
    if cfg.checkpointing.resume_from:
        from base.inputs.resume import check_resumable  # a run that continues none does without

        check_resumable(cfg, to_train)
    folder, model, tokenizer = read_policy(cfg, to_plan)
    if not reads_data:
        return RunInputs(folder, model, tokenizer, Mixture((), cfg), {}, {})
    environments = Environments(cfg.env, num_grading_ranks(cfg))
    train, validation = read_datasets(cfg, tokenizer, environments, max_rows, on_rank0)
    mixture = Mixture(train, cfg)
    if to_train:
        check_steps(cfg, mixture)
    elif not validation:
        raise ConfigError("data.validation.data_path is not set: name the jsonl file with the problems")
    asks_reward_model = "reward_model" in environments.made
    reward_model = read_reward_model(cfg.env.reward_model) if asks_reward_model else None
    has_teacher = to_train and cfg.policy.reference_model_name is not None
    teacher = read_teacher(cfg, tokenizer, model) if has_teacher else None
    server = None
    url = cfg.policy.reference_server_url
    if to_train and url is not None:
        from base.inputs.teacher_server import find_teacher  # a run without one does not import it

        top_k = cfg.loss_fn.topk_logits_k
        server = find_teacher(url, tokenizer, cfg.policy.max_total_sequence_length, top_k)
    return RunInputs(folder, model, tokenizer, mixture, validation, environments.made, reward_model, teacher, server)


def check_wandb(cfg: LoggerConfig) -> None:
    if cfg.wandb_enabled and not any(importlib.metadata.distributions(name="wandb")):
        fix = f"run `{sys.executable} -m pip install wandb=={WANDB_VERSION}`, or set it to false"
        raise ConfigError(f"logger.wandb_enabled=true needs W&B's package, which is not installed: {fix}")


def number_in_environment(name: str) -> int | None:
    """The number of ranks that torchrun, or a user, has set in this variable. ConfigError if it is none."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not re.fullmatch("[1-9][0-9]{0,6}", text):
        raise ConfigError(f"{name}={shortened(text)} in the environment: must be a number of ranks, or not set")
    return int(text)


def num_grading_ranks(cfg: Config) -> int:
    """The ranks of this machine that grade, and share the workers."""
    num_generators = cfg.policy.generation.colocated.resources.gpus_per_node
    return num_generators or number_in_environment("LOCAL_WORLD_SIZE") or 1


# ---------------------------------------------------------------------------------------------------------- models


def read_policy(cfg: Config, to_plan: bool) -> tuple[Path, ModelConfig, Tokenizer]:
    """The policy's folder. ConfigError if it does not fit the config, or, except `to_plan`, has no weights."""
    key = "policy.model_name"
    if cfg.policy.tokenizer.name == cfg.policy.model_name:
        key = "policy.tokenizer.name and policy.model_name"
    folder = resolve_folder(cfg.policy.model_name, key, weights=not to_plan)
    model = read_policy_config(cfg, folder)
    tokenizer = read_tokenizer(cfg.policy.tokenizer, "policy.tokenizer.name", folder)
    check_fits(cfg, folder, model, tokenizer)
    is_without_weights = to_plan and missing_weights(folder)
    if not is_without_weights:
        check_model_weights(folder, model)
    if cfg.policy.dtensor_cfg.lora_cfg.enabled:
        from base.hf.lora_layers import adapted_layers

        adapted_layers(model, cfg.policy.dtensor_cfg.lora_cfg)  # raises ConfigError
    return folder, model, tokenizer


def check_model_weights(folder: Path, model: ModelConfig) -> None:
    """ConfigError unless the folder's files hold the weights of the model."""
    as_computed = model.num_experts > 0 and has_experts_together(folder)
    check_weights(folder, model.tensor_shapes(as_computed=as_computed), model)


def read_policy_config(cfg: Config, folder: Path) -> ModelConfig:
    """The policy's config.json. ConfigError if the model is not supported, or not with these options."""
    policy = cfg.policy
    force_hf = policy.dtensor_cfg.automodel_kwargs.force_hf
    model = read_model_config(folder, policy.hf_config_overrides, force_hf=force_hf)
    is_native = isinstance(model, NativeConfig)
    kind = model.hf["model_type"]
    if not is_native and not (ROOT / "blocks.py").exists():
        raise ConfigError(f"policy.model_name: a {kind} needs blocks.py, which is not here: restore it, or do without")
    if policy.router_replay.enabled and model.num_experts == 0:
        raise ConfigError(f"policy.router_replay.enabled=true: a {kind} has no experts; set it to false")
    if policy.compile and not is_native:
        raise ConfigError(f"policy.compile=true: transformers' blocks of a {kind} are not compiled; set it to null")
    async_grpo = cfg.grpo.async_grpo
    keeps_caches = async_grpo.enabled and not async_grpo.recompute_kv_cache_after_weight_updates
    if keeps_caches and model.family.state is not None:
        key = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false"
        kind = model.hf["model_type"]
        raise ConfigError(f"{key}: the state of a {kind} keeps what older weights made of it; set it to true")
    return model


def check_fits(cfg: Config, folder: Path, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """ConfigError if config.json or the tokenizer contradicts the run's config: vLLM would fail later."""
    check_model(folder, model, tokenizer, "policy.max_total_sequence_length", cfg.policy.max_total_sequence_length)
    for stop in cfg.policy.generation.stop_token_ids or ():
        if stop >= tokenizer.vocab_size:
            ids = f"{folder / 'tokenizer.json'} has ids up to {tokenizer.vocab_size - 1}"
            raise ConfigError(f"policy.generation.stop_token_ids: {stop} is not a token id: {ids}; remove it")
    tensor = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    sizes = {"num_attention_heads": model.num_attention_heads}
    if model.intermediate_size is not None:  # all layers of some mixtures have experts
        sizes["intermediate_size"] = model.intermediate_size
    if model.family.state is not None:
        sizes["heads of a state"] = model.state_sizes.heads
    shares_key_heads = tensor >= model.num_key_value_heads and tensor % model.num_key_value_heads == 0
    if not shares_key_heads:  # else each rank has a copy of one
        sizes["num_key_value_heads"] = model.num_key_value_heads
    for name, size in sizes.items():
        if size % tensor:
            key = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor}"
            raise ConfigError(f"{key} does not divide the model's {name}={size} ({folder / 'config.json'})")


def check_model(folder: Path, model: ModelConfig, tokenizer: Tokenizer, length_key: str, length: int) -> None:
    """ConfigError if the model has no positions for `length` tokens, or no embedding for an id of the tokenizer."""
    limits = {name: model.hf.get(name) for name in LENGTHS}
    limits["max_position_embeddings"] = model.max_position_embeddings
    for name, limit in limits.items():
        if limit is not None and length > limit:
            positions = f"the model's {name}={limit} ({folder / 'config.json'})"
            raise ConfigError(f"{length_key}={length} is more than {positions}: use {limit} or less")
    if tokenizer.vocab_size > model.vocab_size:
        ids = f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, config.json vocab_size={model.vocab_size}"
        raise ConfigError(f"{folder}: {ids}: resize the model's embeddings, or use its own tokenizer")


def read_tokenizer(cfg: TokenizerConfig, key: str, model_folder: Path) -> Tokenizer:
    """The tokenizer that config key `key` names, or the model's own."""
    folder = resolve_folder(cfg.name, key) if cfg.name is not None else model_folder
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"{key}: no tokenizer.json in {folder} (save the tokenizer in its 'fast' format)")
    return Tokenizer(folder, cfg.chat_template, cfg.chat_template_kwargs)


def read_reward_model(cfg: RewardModelConfig) -> tuple[Path, ModelConfig, Tokenizer]:
    """The reward model. ConfigError if the folder holds none, or does not fit the config."""
    key = "env.reward_model.model_name"
    if cfg.model_name is None:
        raise ConfigError(f"{key} is not set: env_name 'reward_model' scores with it")
    folder = resolve_folder(cfg.model_name, key)
    model = read_model_config(folder)
    if not isinstance(model, NativeConfig):
        given = f"{key}: {folder / 'config.json'}: model_type={model.hf['model_type']!r}"
        raise ConfigError(f"{given} is not supported for a reward model; use one of {', '.join(NATIVE)}")
    tokenizer = read_tokenizer(cfg.tokenizer, "env.reward_model.tokenizer.name", folder)
    check_model(folder, model, tokenizer, "env.reward_model.max_model_len", cfg.max_model_len)
    shapes = replace(model, tie_word_embeddings=True).tensor_shapes()  # there is no head over the vocabulary
    try:
        check_weights(folder, chain([("score.weight", (1, model.hidden_size))], shapes))
    except ConfigError as error:
        kinds = "a Qwen2-, Qwen3- or LlamaForSequenceClassification with one label"
        raise ConfigError(f"{key}: {error}: give {kinds}") from error
    return folder, model, tokenizer


def read_teacher(cfg: Config, tokenizer: Tokenizer, policy: ModelConfig) -> tuple[Path, ModelConfig]:
    """The model of policy.reference_model_name. ConfigError unless its vocabulary and its cap are the policy's."""
    key = "policy.reference_model_name"
    folder = resolve_folder(cfg.policy.reference_model_name, key)
    model = read_model_config(folder)
    teacher_vocab = read_tokenizer(TokenizerConfig(chat_template=None), key, folder).backend.get_vocab()
    different = teacher_vocab.items() ^ tokenizer.backend.get_vocab().items()
    if different:
        problem = f"its vocabulary is not the policy's ({len(different)} tokens differ, such as {min(different)[0]!r})"
        raise ConfigError(f"{key}={folder}: {problem}; use a model with the same tokenizer")
    check_model(folder, model, tokenizer, "policy.max_total_sequence_length", cfg.policy.max_total_sequence_length)
    if model.softcap != policy.softcap:
        caps = f"final_logit_softcapping={model.softcap}, the policy's is {policy.softcap}"
        raise ConfigError(f"{key}={folder}: {caps}: use a model with the same cap")
    check_model_weights(folder, model)
    return folder, model


# ------------------------------------------------------------------------------------------- data and environments


class Environments:
    """The environments of rows, each made when the first row asks for it. `made` has them by env_name."""

    def __init__(self, cfg: EnvConfig, num_ranks: int):
        self.cfg = cfg
        self.num_ranks = num_ranks
        self.agents = {agent.name: agent for agent in cfg.agents}
        self.made: dict[str, envs.Environment] = {}

    def check_answers(self, env_name: str, answers: envs.Answers) -> None:
        """ConfigError if the environment cannot be made, or refuses an answer."""
        if env_name not in self.made:
            self.made[env_name] = self._make(env_name)
        call(f"env_name '{env_name}': check_answers()", self.made[env_name].check_answers, answers)

    def check_agents_in_use(self) -> None:
        unused = self.agents.keys() - self.made.keys()
        if unused:
            raise ConfigError(f"env.agents: no row has the env_name {min(unused)}: set it in data, or remove the agent")

    def _make(self, env_name: str) -> envs.Environment:
        if env_name not in self.agents:
            return make_environment(env_name, self.cfg, self.num_ranks)
        from base.agents.environment import Agent  # a run without agents imports nothing of them

        return Agent(self.agents[env_name], dict(self.cfg.custom.get(env_name, {})), self.num_ranks)


def read_datasets(
    cfg: Config, tokenizer: Tokenizer, environments: Environments, max_rows: int | None, on_rank0: OnRank0
) -> tuple[list[Dataset], dict[str, Dataset]]:
    """(training sets, validation sets by name). Raises ConfigError, also for environments that do not fit together."""
    tasks = {name: name for name in environments.agents} | cfg.data.task_to_env
    check = environments.check_answers

    def read(section: DatasetConfig) -> tuple[Dataset, Dataset | None]:
        limit = cfg.max_prompt_tokens
        return load_dataset(section, tokenizer, limit, tasks, check, max_rows=max_rows, on_rank0=on_rank0)

    train: list[Dataset] = []
    validation: dict[str, Dataset] = {}
    for section in cfg.data.train:
        dataset, held_out = read(section)
        train.append(dataset)
        if held_out:
            validation[held_out.name] = held_out
    if cfg.grpo.adv_estimator.name == "gdpo":
        check_reward_names(environments.made, cfg.grpo.adv_estimator.reward_weights)
    for section in cfg.data.validation:
        dataset, _ = read(replace(section, split_validation_size=0))
        validation[dataset.name] = dataset
    environments.check_agents_in_use()
    return train, validation


def check_reward_names(environments: dict[str, envs.Environment], weights: tuple[float, ...] | None) -> None:
    """ConfigError unless all environments declare the same two or more reward_names, and there are as many weights."""
    declared = {name: sorted(getattr(environment, "reward_names", ())) for name, environment in environments.items()}
    names = next(iter(declared.values()))
    is_same = all(others == names for others in declared.values())
    if is_same and len(names) >= 2 and (weights is None or len(weights) == len(names)):
        return
    fix = "declare them in reward_names and return them in StepResult.rewards, or set grpo.adv_estimator.name=grpo"
    given = "null" if weights is None else len(weights)
    needed = f"at least two reward_names, the same in every environment (declared: {declared})"
    weighted = f"reward_weights must be null or as many (now {given})"
    raise ConfigError(f"grpo.adv_estimator.name=gdpo needs {needed}; {weighted}; {fix}")


def num_steps_of(cfg: Config, num_problems: int) -> int:
    """Steps of the run. Dynamic sampling may draw more than one batch for a step; then there are fewer."""
    return min(cfg.grpo.max_num_steps, cfg.grpo.max_num_epochs * num_problems // cfg.grpo.prompts_per_batch)


def check_steps(cfg: Config, mixture: Mixture) -> None:
    """ConfigError if there are too few prompts for a step. Asks the user's dataloader for a step: a mistake in it
    should show now."""
    if num_steps_of(cfg, mixture.num_problems) == 0:
        prompts = f"{mixture.num_problems} prompts x grpo.max_num_epochs={cfg.grpo.max_num_epochs}"
        step = f"{cfg.grpo.num_prompts_per_step} x grpo.batch_multiplier={cfg.grpo.batch_multiplier:g}"
        raise ConfigError(f"nothing to train: {prompts} are fewer than grpo.num_prompts_per_step={step}: lower it")
    if mixture.has_dataloader:
        mixture.draw(mixture.start(), cfg.grpo.prompts_per_batch)


def start_environments(inputs: RunInputs, on_rank0: OnRank0 = lambda work: work()) -> tuple[str, ...]:
    """Starts the workers of this rank's environments, which must be closed, and tries the environments. Returns the
    names of those that ask for another turn."""
    for name, environment in inputs.environments.items():
        start_environment(name, environment)
    if not any(":" in name for name in inputs.environments):
        return ()
    from base.inputs.trial import try_environments  # a run without classes of the user's does without

    return on_rank0(lambda: try_environments(inputs.environments, inputs.sets, inputs.tokenizer))
