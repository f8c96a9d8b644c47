"""`grpo.py --check`: reads what a run reads, judges it, and prints what it finds; and `--help`. No torch."""

import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from base.check import memory_fit, rules
from base.check.command_line import gpu_memory, last_value, parse_command_line
from base.check.summary import MAX_ROWS, data_lines, notes, template_notes
from base.hf.folder import missing_weights
from base.hf.model_config import ModelConfig
from base.inputs.key_help import help_text
from base.inputs.run_inputs import RunInputs, num_steps_of, number_in_environment, read_inputs, start_environments
from base.plan import step_time
from base.plan.gpus import GIB, GPUS, Gpu
from base.plan.memory_plan import Plan
from config import Config, ConfigError

SMALL_MODEL = 50  # million parameters


def ranks_on_cpu(cfg: Config, model: ModelConfig) -> tuple[int, str]:
    """(how many ranks train.sh starts on a CPU, why). Small operations do not occupy two threads, but two ranks do;
    for a large model FSDP's gathers cost more than that saves. LOG of 2026-11-23 has the measured steps."""
    millions = sum(math.prod(shape) for _, shape in model.tensor_shapes()) / 1e6
    size = f"the model has {millions:.3g} M parameters"
    if millions < SMALL_MODEL:
        return max(2, rules.fewest_ranks(cfg)), f"{size}, fewer than {SMALL_MODEL} M"
    return rules.fewest_ranks(cfg), f"{size}, no fewer than {SMALL_MODEL} M"


def check(cfg: Config, *, all_rows: bool = False, gpu_bytes: float | None = None, gpu: Gpu | None = None) -> str:
    """A summary, after checking everything that can be wrong before torch is loaded: all rows, or MAX_ROWS of each set.
    gpu_bytes: of one GPU, if known. Prints the summary and raises ConfigError if the run does not fit into it. gpu: the
    summary says how long a step takes on it."""
    cfg = _with_one_worker(cfg)
    if gpu and gpu_bytes is None:
        gpu_bytes = gpu.gib * GIB
    to_plan = gpu_bytes is not None and "LOCAL_WORLD_SIZE" not in os.environ  # by hand, not by train.sh: no run follows
    inputs = read_inputs(cfg, to_plan=to_plan, max_rows=None if all_rows else MAX_ROWS)
    asks_again = start_environments(inputs)
    for environment in inputs.environments.values():
        environment.close()
    lines = [f"model      {inputs.model_folder} (vocabulary {inputs.tokenizer.vocab_size:,})"]
    lines += data_lines(cfg, inputs, inputs.train.start())
    num_steps = num_steps_of(cfg, inputs.train.num_problems)
    lines.append(_steps_line(cfg, inputs, num_steps))
    found = [
        *notes(cfg, inputs.model_config, num_steps),
        *template_notes(cfg, inputs),
        *_turn_notes(cfg, inputs, asks_again),
    ]
    lines += [f"note       {note}" for note in found]
    absent = missing_weights(inputs.model_folder) if to_plan else []
    if absent:
        files = absent[0] if len(absent) == 1 else f"{absent[0]} and {len(absent) - 1} more files"
        lines.append(f"missing    {files}: the plan below needs no weights, but a run does")
    device = os.environ.get("GRPO_DEVICE")
    num_ranks = number_in_environment("WORLD_SIZE")
    if device == "cpu" and num_ranks is None:
        num_started, reason = ranks_on_cpu(cfg, inputs.model_config)
        rules.check_config(cfg, num_started)
        lines.append(f"ranks      {num_started} on this CPU: {reason}; --nproc_per_node=N sets another number")
    if num_ranks is None:  # without torchrun: as many GPUs as the recipe names, or the fewest that can run it
        num_ranks = max(cfg.cluster.gpus_per_node * cfg.cluster.num_nodes, rules.fewest_ranks(cfg))
    plan = Plan.of_run(cfg, inputs, num_ranks, gpu_bytes)
    if gpu_bytes or _is_for_gpus(device, num_ranks):
        lines.append(memory_fit.table(plan))
    summary = "\n".join(lines)
    problem = memory_fit.problem(plan)
    if problem:
        print(summary)
        raise ConfigError(problem)
    if gpu:
        step = step_time.Step.of(cfg, prompt=_mean_prompt(inputs))
        lines.append(step_time.time_line(plan, gpu, step, num_steps))
    lines.append(step_time.disk_line(plan))
    return "\n".join(lines)


def _turn_notes(cfg: Config, inputs: RunInputs, asks_again: Sequence[str]) -> list[str]:
    """Environments that ask for another turn where none can come."""
    found = []
    prompt = min(len(dataset.problems[0].prompt_ids) for dataset in inputs.train.datasets.values())
    new = cfg.policy.generation.max_new_tokens
    total = cfg.policy.max_total_sequence_length
    for name in asks_again:
        asks = f"env_name '{name}' asks for another turn (done=False)"
        if cfg.grpo.max_rollout_turns == 1:
            found.append(f"{asks}, but grpo.max_rollout_turns=1: raise it, or nobody answers")
        elif prompt + new + 2 > total:  # a token of the environment and one of the policy
            room = f"a prompt of {prompt} tokens and a reply of policy.generation.max_new_tokens={new} leave no room"
            found.append(f"{asks}, but {room} in policy.max_total_sequence_length={total}: raise that")
    return found


def _mean_prompt(inputs: RunInputs) -> float:
    """Mean tokens of a prompt of the training sets. Rows that the scan did not read are not read here either: they
    count as long as the others of their set."""
    num_problems = 0
    num_tokens = 0.0
    for dataset in inputs.train.datasets.values():
        num_problems += len(dataset.problems)
        num_tokens += len(dataset.problems) * dataset.mean_prompt_tokens
    return num_tokens / num_problems


def _with_one_worker(cfg: Config) -> Config:
    """The config with one worker for each environment, which is enough to check it."""
    agents = tuple(replace(agent, num_workers=1) for agent in cfg.env.agents)
    math_cfg = replace(cfg.env.math, num_workers=1)
    code_cfg = replace(cfg.env.code, num_workers=1)
    return replace(cfg, env=replace(cfg.env, math=math_cfg, code=code_cfg, agents=agents))


def _steps_line(cfg: Config, inputs: RunInputs, num_steps: int) -> str:
    size = f"{cfg.grpo.num_prompts_per_step} prompts x {cfg.grpo.num_generations_per_prompt} samples"
    may_lose_rows = any(dataset.is_sample and dataset.left_out for dataset in inputs.train.datasets.values())
    if may_lose_rows and num_steps < cfg.grpo.max_num_steps:
        return f"steps      at most {num_steps:,}, each with {size}"
    return f"steps      {num_steps:,}, each with {size}"


def _is_for_gpus(device: str | None, num_ranks: int) -> bool:
    """Whether the run is for GPUs, here or where the recipe is to run."""
    if device is not None:
        return device != "cpu"
    return num_ranks > 1 or shutil.which("nvidia-smi") is not None


def gpu_by_name(argv: Sequence[str]) -> tuple[Gpu | None, list[str]]:
    """(the GPU of the last `--gpu=h100`, or None; the other words)."""
    word, others = last_value("--gpu=", argv)
    if word is None:
        return None, others
    spelled = re.sub(r"[-_ ]", "", word.lower())
    for name, gpu in GPUS.items():
        plain = name.replace("_", "")
        if spelled in (plain, plain.removeprefix("rtx")):
            return gpu, others
    raise ConfigError(f"--gpu={word:.80}: expected one of {', '.join(GPUS)}")


def answer(argv: Sequence[str], usage: str) -> int:
    """Prints what --help or --check asks for; returns the exit code."""
    if {"--help", "-h"} & set(argv):
        print(usage, help_text(), sep="\n\n")
        return 0
    try:
        gpu_bytes, words = gpu_memory(argv)
        gpu, words = gpu_by_name(words)
        cfg = parse_command_line(words, usage)
        print(check(cfg, all_rows="--all" in words, gpu_bytes=gpu_bytes, gpu=gpu))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
