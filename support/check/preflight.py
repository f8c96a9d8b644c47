"""Finds and checks what a run reads, before torch is loaded: `grpo.py --check` prints what this module finds.

It knows no format. It calls the modules that do, in the order in which a user wants to hear of mistakes.
"""

import importlib.metadata
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import envs
from config import Config, ConfigError, DataError, DatasetConfig, RewardModelConfig, TokenizerConfig, shortened
from support.check import memory_fit, rules
from support.check.memory_plan import GIB, Plan
from support.graders.environments import make_environment, read_results
from support.hf.lora_layers import adapted_layers
from support.inputs import keys, resume
from support.inputs.mixing import Cursor, Mixture
from support.inputs.model_config import ModelConfig, check_weights, missing_weights, read_model_config, resolve_folder
from support.inputs.scan import Dataset, load_dataset
from support.inputs.tokenizer import Tokenizer
from support.system.imports import call

MAX_ROWS = 5_000  # --check reads this many rows of each set: half a second
# Overrides for a run that only scores, on any number of ranks
_WHOLE = ("enabled=true", "resources.gpus_per_node=null", "resources.num_nodes=null")
ALL_RANKS_GENERATE = [f"policy.generation.colocated.{setting}" for setting in _WHOLE]
ALL_RANKS_GENERATE += ["policy.dtensor_cfg.dp_replicate_size=1"]
SMALL_MODEL = 50  # million parameters
SHOWN_CHARS = 200  # of a long prompt, this many are printed from each end
WANDB_VERSION = "0.31.0"  # the tests run with this version: requirements/tests.txt


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a run reads: found, parsed and checked, without torch. validation: name -> set, in the config's order."""

    model_folder: Path
    model_config: ModelConfig
    tokenizer: Tokenizer
    train: Mixture
    validation: dict[str, Dataset]
    environments: dict[str, envs.Environment]
    reward_model: tuple[Path, ModelConfig, Tokenizer] | None = None  # if an environment asks for one
    reference_model: tuple[Path, ModelConfig] | None = None  # a teacher

    @property
    def sets(self) -> list[tuple[str, Dataset]]:
        """(purpose, set)"""
        train, validation = self.train.datasets.values(), self.validation.values()
        return [("train", each) for each in train] + [("validation", each) for each in validation]


def read_inputs(
    cfg: Config,
    *,
    to_train: bool = True,
    to_plan: bool = False,
    max_rows: int | None = None,
    on_rank0: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> RunInputs:
    """Everything the config names; ConfigError for whatever is wrong with it. Without `to_train` the run of
    `resume_from` is only scored, and there may be no step to train. With `to_plan` the policy's weights may be absent.
    max_rows, on_rank0: as in `load_dataset`."""
    if to_train and cfg.logger.wandb_enabled and not any(importlib.metadata.distributions(name="wandb")):
        fix = f"run `{sys.executable} -m pip install wandb=={WANDB_VERSION}`, or set it to false"
        raise ConfigError(f"logger.wandb_enabled=true needs W&B's package, which is not installed: {fix}")
    resume.check_folders(cfg)
    if cfg.checkpointing.resume_from:
        resume.check_resumable(cfg, to_train)
    also = "policy.tokenizer.name and " if cfg.policy.tokenizer.name == cfg.policy.model_name else ""
    folder = resolve_folder(cfg.policy.model_name, f"{also}policy.model_name", weights=not to_plan)
    model = read_model_config(folder, cfg.policy.hf_config_overrides)
    tokenizer = read_tokenizer(cfg.policy.tokenizer, "policy.tokenizer.name", folder)
    check_fits(cfg, folder, model, tokenizer)
    if not (to_plan and missing_weights(folder)):
        check_weights(folder, model.tensor_shapes())
    adapted_layers(model, cfg.policy.dtensor_cfg.lora_cfg)  # raises ConfigError
    environments: dict[str, envs.Environment] = {}
    # The ranks of this machine that grade
    num_ranks = (
        cfg.policy.generation.colocated.resources.gpus_per_node or number_in_environment("LOCAL_WORLD_SIZE") or 1
    )

    agents = {agent.name: agent for agent in cfg.env.agents}

    def make(env_name: str) -> envs.Environment:
        if env_name not in agents:
            return make_environment(env_name, cfg.env, num_ranks)
        from support.agents.environment import Agent  # a run without agents imports nothing of them

        return Agent(agents[env_name], dict(cfg.env.custom.get(env_name, {})), num_ranks)

    def check_answers(env_name: str, answers: list[tuple[str, str, dict]]) -> None:
        if env_name not in environments:
            environments[env_name] = make(env_name)
        call(f"env_name '{env_name}': check_answers()", environments[env_name].check_answers, answers)

    def read(section: DatasetConfig) -> tuple[Dataset, Dataset | None]:
        limit, tasks = cfg.max_prompt_tokens, dict(zip(agents, agents, strict=True)) | cfg.data.task_to_env
        return load_dataset(section, tokenizer, limit, tasks, check_answers, max_rows=max_rows, on_rank0=on_rank0)

    train = [read(section) for section in cfg.data.train]
    if cfg.grpo.adv_estimator.name == "gdpo":
        check_reward_names(environments, cfg.grpo.adv_estimator.reward_weights)
    held_out = [part for _, part in train if part]
    held_out += [read(replace(section, split_validation_size=0))[0] for section in cfg.data.validation]
    if unused := agents.keys() - environments.keys():
        raise ConfigError(f"env.agents: no row has the env_name {min(unused)}: set it in data, or remove the agent")
    mixture = Mixture([dataset for dataset, _ in train], cfg)
    if to_train and num_steps_of(cfg, mixture.num_problems) == 0:
        prompts = f"{mixture.num_problems} prompts x grpo.max_num_epochs={cfg.grpo.max_num_epochs}"
        step = f"{cfg.grpo.num_prompts_per_step} x grpo.batch_multiplier={cfg.grpo.batch_multiplier:g}"
        raise ConfigError(f"nothing to train: {prompts} are fewer than grpo.num_prompts_per_step={step}: lower it")
    if to_train and mixture.sampler:  # the user's function: a mistake in it should show now
        mixture.draw(mixture.start(), cfg.grpo.prompts_per_batch)
    reward_model = read_reward_model(cfg.env.reward_model) if "reward_model" in environments else None
    validation = {each.name: each for each in held_out}
    if not (to_train or validation):
        raise ConfigError("data.validation.data_path is not set: name the jsonl file with the problems")
    teacher = read_teacher(cfg, tokenizer) if to_train and cfg.policy.reference_model_name else None
    inputs = RunInputs(folder, model, tokenizer, mixture, validation, environments, reward_model, teacher)
    if "GRPO_PARENT" not in os.environ:  # else train.sh's check has tried them: a judge may cost money
        on_rank0(lambda: try_environments(inputs))
    return inputs


def try_environments(inputs: RunInputs) -> None:
    """Calls each class or function of the user's once, with two plain replies to a row; self_tests are such calls, too.
    ConfigError for what it raises: a run would find out only after its engine has started."""
    for name, environment in inputs.environments.items():
        if ":" not in name or getattr(environment, "self_tests", ()):
            continue
        problems = (problem for _, each in inputs.sets for problem in islice(each.problems, MAX_ROWS // 4))
        if (problem := next((problem for problem in problems if problem.env_name == name), None)) is None:
            continue  # it is rare
        turns = []
        for reply in (f"The answer is {problem.answer}.", "I do not know."):
            messages = [*problem.messages, {"role": "assistant", "content": reply}]
            ids = {"prompt_ids": problem.prompt_ids, "completion_ids": inputs.tokenizer.backend.encode(reply).ids}
            turns.append(envs.Turn(messages, problem.answer, "stop", {}, problem.fields, **ids, raw_reply=reply))
        tried = f"env_name '{name}', tried on row {problem.row_id} of {problem.dataset} before the run,"
        call(tried, lambda: read_results(name, environment.step(turns), turns))  # noqa: B023


def check_reward_names(environments: dict[str, envs.Environment], weights: tuple[float, ...] | None) -> None:
    """ConfigError unless all environments declare the same two or more reward_names, and there are as many weights."""
    declared = {name: sorted(getattr(each, "reward_names", ())) for name, each in environments.items()}
    names = next(iter(declared.values()))
    if len(names) < 2 or any(each != names for each in declared.values()) or len(weights or names) != len(names):
        fix = "declare them in reward_names and return them in StepResult.rewards, or set grpo.adv_estimator.name=grpo"
        given = "null" if weights is None else len(weights)
        needed = f"at least two reward_names, the same in every environment (declared: {declared})"
        weighted = f"reward_weights must be null or as many (now {given})"
        raise ConfigError(f"grpo.adv_estimator.name=gdpo needs {needed}; {weighted}; {fix}")


def check_fits(cfg: Config, folder: Path, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """ConfigError if config.json or the tokenizer contradicts the run's config: vLLM would fail later."""
    check_model(folder, model, tokenizer, "policy.max_total_sequence_length", cfg.policy.max_total_sequence_length)
    stop = max(cfg.policy.generation.stop_token_ids or (0,))
    if stop >= tokenizer.vocab_size:
        ids = f"{folder / 'tokenizer.json'} has ids up to {tokenizer.vocab_size - 1}"
        raise ConfigError(f"policy.generation.stop_token_ids: {stop} is not a token id: {ids}; remove it")
    tensor = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    sizes = {"num_attention_heads": model.num_attention_heads, "intermediate_size": model.intermediate_size}
    if tensor < model.num_key_value_heads or tensor % model.num_key_value_heads:  # else each rank has a copy of one
        sizes["num_key_value_heads"] = model.num_key_value_heads
    if odd := [f"{name}={size}" for name, size in sizes.items() if size % tensor]:
        key = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor}"
        raise ConfigError(f"{key} does not divide the model's {odd[0]} ({folder / 'config.json'})")


def check_model(folder: Path, model: ModelConfig, tokenizer: Tokenizer, length_key: str, length: int) -> None:
    """ConfigError if the model has no positions for `length` tokens, or no embedding for an id of the tokenizer."""
    limit = model.max_position_embeddings
    if limit is not None and length > limit:
        positions = f"the model's max_position_embeddings={limit} ({folder / 'config.json'})"
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
    tokenizer = read_tokenizer(cfg.tokenizer, "env.reward_model.tokenizer.name", folder)
    check_model(folder, model, tokenizer, "env.reward_model.max_model_len", cfg.max_model_len)
    shapes = replace(model, tie_word_embeddings=True).tensor_shapes()  # there is no head over the vocabulary
    try:
        check_weights(folder, chain([("score.weight", (1, model.hidden_size))], shapes))
    except ConfigError as error:
        kinds = "a Qwen2-, Qwen3- or LlamaForSequenceClassification with one label"
        raise ConfigError(f"{key}: {error}: give {kinds}") from error
    return folder, model, tokenizer


def read_teacher(cfg: Config, tokenizer: Tokenizer) -> tuple[Path, ModelConfig]:
    """The model of policy.reference_model_name. ConfigError unless its vocabulary is the policy's."""
    key = "policy.reference_model_name"
    folder = resolve_folder(cfg.policy.reference_model_name, key)
    model = read_model_config(folder)
    teacher_vocab = read_tokenizer(TokenizerConfig(chat_template=None), key, folder).backend.get_vocab()
    if odd := teacher_vocab.items() ^ tokenizer.backend.get_vocab().items():
        problem = f"its vocabulary is not the policy's ({len(odd)} tokens differ, such as {min(odd)[0]!r})"
        raise ConfigError(f"{key}={folder}: {problem}; use a model with the same tokenizer")
    check_model(folder, model, tokenizer, "policy.max_total_sequence_length", cfg.policy.max_total_sequence_length)
    check_weights(folder, model.tensor_shapes())
    return folder, model


def num_steps_of(cfg: Config, num_problems: int) -> int:
    """Steps of the run. Dynamic sampling may draw more than one batch for a step; then there are fewer."""
    return min(cfg.grpo.max_num_steps, cfg.grpo.max_num_epochs * num_problems // cfg.grpo.prompts_per_batch)


def data_lines(cfg: Config, inputs: RunInputs, cursor: Cursor) -> list[str]:
    """The training sets in a line, each with environment and size; the validation sets; then the next prompt as the
    model gets it and its answer."""
    texts: dict[str, list[str]] = {}
    for name, dataset in inputs.sets:
        most = "at most " * bool(dataset.is_sample and dataset.left_out)  # more may be left out of the other rows
        size = f"{most}{len(dataset.problems):,} prompts"
        if dataset.is_sample:
            size += f", {MAX_ROWS:,} rows checked (the first {MAX_ROWS // 2:,}, the others at random; --all: every row)"
        numbers = ", ".join(filter(None, (size, dataset.left_out)))
        texts.setdefault(name, []).append(f"{dataset.path}, graded by {', '.join(dataset.env_names)}: {numbers}")
    lines = [f"{name:10} {'; '.join(of_sets)}" for name, of_sets in texts.items()]
    if any(dataset.is_sample for _, dataset in inputs.sets):
        problem = inputs.sets[0][1].problems[0]  # the next one may be a row that was not checked
    else:
        count = cfg.grpo.prompts_per_batch if inputs.train.sampler else 1
        problem = inputs.train.draw(cursor, count)[0][0]
    prompt = inputs.tokenizer.backend.decode(problem.prompt_ids, skip_special_tokens=False)
    shown = [
        repr(text if len(text) <= 2 * size else f"{text[:size]} ... {text[-size:]}")
        for text, size in ((prompt, SHOWN_CHARS), (problem.answer, SHOWN_CHARS // 4))
    ]
    return [*lines, f"first      row {problem.row_id} of {problem.dataset}: {', expected answer '.join(shown)}"]


def notes(cfg: Config, num_steps: int) -> list[str]:
    """What a user easily overlooks: a long warm-up, a low learning rate for LoRA."""
    found, scheduler, lora = [], cfg.policy.scheduler, cfg.policy.dtensor_cfg.lora_cfg
    if 3 * scheduler.warmup_steps > num_steps and scheduler.warmup_start_factor != 1:
        warmup = f"policy.scheduler.warmup_steps={scheduler.warmup_steps}"
        found.append(f"{warmup} is more than a third of the run's {num_steps} steps: set fewer for a run this short")
    kwargs = cfg.policy.optimizer.kwargs
    if lora.enabled and kwargs.lr <= type(kwargs)().lr:
        lr = f"policy.optimizer.kwargs.lr={kwargs.lr:g}"
        found.append(f"{lr}: LoRA of rank {lora.dim} wants about ten times the learning rate of full training")
    return found


def memory_plan(cfg: Config, inputs: RunInputs, num_ranks: int, gpu_bytes: float | None) -> Plan:
    """How much memory the run needs on each GPU; in a split job of `num_ranks` ranks, on each GPU that trains."""
    num_trainers = max(1, num_ranks - cfg.policy.generation.num_generators)
    reward = inputs.reward_model[1] if inputs.reward_model else None
    teacher = inputs.reference_model[1] if inputs.reference_model else None
    model, vocab = inputs.model_config, inputs.tokenizer.vocab_size
    return Plan(cfg, model, vocab, num_trainers, gpu_bytes, reward=reward, teacher=teacher)


def ranks_on_cpu(cfg: Config, model: ModelConfig) -> tuple[int, str]:
    """(how many ranks train.sh starts on a CPU, why). Small operations do not occupy two threads, but two ranks do;
    for a large model FSDP's gathers cost more than that saves. LOG of 2026-11-23 has the measured steps."""
    millions = sum(math.prod(shape) for _, shape in model.tensor_shapes()) / 1e6
    is_small = millions < SMALL_MODEL
    reason = f"the model has {millions:.3g} M parameters, {'fewer' if is_small else 'no fewer'} than {SMALL_MODEL} M"
    return max(2 if is_small else 1, rules.fewest_ranks(cfg)), reason


def check(cfg: Config, *, all_rows: bool = False, gpu_bytes: float | None = None) -> str:
    """A summary, after checking everything that can be wrong before torch is loaded: all rows, or MAX_ROWS of each set.
    gpu_bytes: of one GPU, if known. Prints the summary and raises ConfigError if the run does not fit into it."""
    few = {"math": replace(cfg.env.math, num_workers=1), "code": replace(cfg.env.code, num_workers=1)}  # for canaries
    agents = tuple(replace(agent, num_workers=1) for agent in cfg.env.agents)
    cfg = replace(cfg, env=replace(cfg.env, **few, agents=agents))
    to_plan = gpu_bytes is not None and "LOCAL_WORLD_SIZE" not in os.environ  # by hand, not by train.sh: no run follows
    inputs = read_inputs(cfg, to_plan=to_plan, max_rows=None if all_rows else MAX_ROWS)
    for environment in inputs.environments.values():
        environment.close()
    lines = [f"model      {inputs.model_folder} (vocabulary {inputs.tokenizer.vocab_size:,})"]
    lines += data_lines(cfg, inputs, inputs.train.start())
    steps, samples = num_steps_of(cfg, inputs.train.num_problems), cfg.grpo.num_generations_per_prompt
    is_bound = any(each.is_sample and each.left_out for each in inputs.train.datasets.values())
    most = "at most " * (is_bound and steps < cfg.grpo.max_num_steps)
    lines.append(f"steps      {most}{steps:,}, each with {cfg.grpo.num_prompts_per_step} prompts x {samples} samples")
    lines += [f"note       {note}" for note in notes(cfg, steps)]
    if absent := to_plan and missing_weights(inputs.model_folder):
        files = f"{absent[0]}{f' and {len(absent) - 1} more files' if len(absent) > 1 else ''}"
        lines.append(f"missing    {files}: the plan below needs no weights, but a run does")
    # Without torchrun: the number of GPUs that the recipe names, or the fewest that can run it.
    num_ranks = max(cfg.cluster.gpus_per_node * cfg.cluster.num_nodes, rules.fewest_ranks(cfg))
    device = os.environ.get("GRPO_DEVICE")
    if device == "cpu" and "WORLD_SIZE" not in os.environ:
        num_started, reason = ranks_on_cpu(cfg, inputs.model_config)
        rules.check_config(cfg, num_started)
        lines.append(f"ranks      {num_started} on this CPU: {reason}; --nproc_per_node=N sets another number")
    num_ranks = number_in_environment("WORLD_SIZE") or num_ranks
    plan = memory_plan(cfg, inputs, num_ranks, gpu_bytes)
    has_gpus = num_ranks > 1 or shutil.which("nvidia-smi")  # here, or where the recipe is to run
    if gpu_bytes or (device or ("cuda" if has_gpus else "cpu")) != "cpu":
        lines.append(memory_fit.table(plan))
    summary = "\n".join(lines)
    if problem := memory_fit.problem(plan):
        print(summary)
        raise ConfigError(problem)
    return summary


def gpu_memory(argv: Sequence[str]) -> tuple[float | None, list[str]]:
    """(bytes by the last `--gpu_memory=80`, in GiB, or None; the other words). A GPU of "80 GB" has 79 to 80 GiB."""
    flag = "--gpu_memory="
    given = [word.removeprefix(flag) for word in argv if word.startswith(flag)]
    if given and not re.fullmatch(r"[1-9][0-9]{0,5}(\.[0-9]+)?", given[-1]):
        raise ConfigError(f"{flag}{given[-1]:.80}: expected a GPU's memory in GiB, such as {flag}80")
    return float(given[-1]) * GIB if given else None, [word for word in argv if not word.startswith(flag)]


def number_in_environment(name: str) -> int | None:
    """The number of ranks that torchrun, or a user, has set in this variable. ConfigError if it is none."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not re.fullmatch("[1-9][0-9]{0,6}", text):
        raise ConfigError(f"{name}={shortened(text)} in the environment: must be a number of ranks, or not set")
    return int(text)


def parse_command_line(argv: Sequence[str], usage: str) -> Config:
    """The validated config of a command line, with the run that it resumes. ConfigError for whatever is wrong."""
    flags = {"--check", "--all", "--explain"} & set(argv) if "--check" in argv else set()
    words = [word for word in argv if word not in flags]
    if not words or words[0].startswith("-") or ("=" in words[0] and not os.path.exists(words[0])):
        raise ConfigError(usage)
    # Without torchrun, `--check` does not know the number of ranks: it takes the fewest that there may be.
    num_ranks = number_in_environment("WORLD_SIZE") or (None if flags else 1)
    ranks_of_node = number_in_environment("LOCAL_WORLD_SIZE")
    cfg = rules.load_checked(words[0], words[1:], num_ranks, ranks_of_node, explain="--explain" in flags)
    return resume.resolve(cfg)


def answer(argv: Sequence[str], usage: str) -> int:
    """Prints what --help or --check asks for; returns the exit code."""
    try:
        if {"--help", "-h"} & set(argv):
            print(usage, keys.help_text(), sep="\n\n")
        else:
            gpu_bytes, words = gpu_memory(argv)
            print(check(parse_command_line(words, usage), all_rows="--all" in words, gpu_bytes=gpu_bytes))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
