"""`grpo.py --check`: reads what a run reads, judges it, and prints what it finds; and `--help`. No torch."""

import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from base.check import memory_fit, rules
from base.hf.model_config import ModelConfig, kept_tensors, missing_weights
from base.inputs import keys, resume
from base.inputs.mixing import Cursor
from base.inputs.run_inputs import RunInputs, num_steps_of, number_in_environment, read_inputs
from base.inputs.scan import Dataset
from base.plan import step_time
from base.plan.memory_plan import GIB, Plan
from config import Config, ConfigError

MAX_ROWS = 5_000  # --check reads this many rows of each set: half a second
COLOCATED = "policy.generation.colocated"
# Overrides for a run that only scores, on any number of ranks
ALL_RANKS_GENERATE = [
    f"{COLOCATED}.enabled=true",
    f"{COLOCATED}.resources.gpus_per_node=null",
    f"{COLOCATED}.resources.num_nodes=null",
    "policy.dtensor_cfg.dp_replicate_size=1",
]
SMALL_MODEL = 50  # million parameters
# Of tinker-cookbook 0.6.1: learning rates of its RL recipes, with this alpha (theirs, too, divides by the rank), and
# exponents of hyperparam_utils.get_lr.
LORA_RATES = (1e-5, 4e-5)
LORA_ALPHA = 32
LORA_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
SHOWN_CHARS = 200  # of a long prompt, this many are printed from each end


# ------------------------------------------------------------------------------------------- what a run prints, too


def data_lines(cfg: Config, inputs: RunInputs, cursor: Cursor) -> list[str]:
    """The training sets in a line, each with environment and size; the validation sets; then the next prompt as the
    model gets it and its answer."""
    texts: dict[str, list[str]] = {}
    for purpose, dataset in inputs.sets:
        texts.setdefault(purpose, []).append(_described(dataset))
    lines = [f"{purpose:10} {'; '.join(of_sets)}" for purpose, of_sets in texts.items()]
    if any(dataset.is_sample for _, dataset in inputs.sets):
        problem = inputs.sets[0][1].problems[0]  # the next one may be a row that was not checked
    else:
        count = cfg.grpo.prompts_per_batch if inputs.train.sampler or inputs.train.selections else 1
        problem = inputs.train.draw(cursor, count)[0][0]
    prompt = inputs.tokenizer.backend.decode(problem.prompt_ids, skip_special_tokens=False)
    answer = _ends(problem.answer, SHOWN_CHARS // 4)
    row = f"row {problem.row_id} of {problem.dataset}"
    return [*lines, f"first      {row}: {_ends(prompt, SHOWN_CHARS)!r}, expected answer {answer!r}"]


def _described(dataset: Dataset) -> str:
    """A set with its environments, its size, and what was left out of it."""
    size = f"{len(dataset.problems):,} prompts"
    if dataset.is_sample and dataset.left_out:
        size = f"at most {size}"  # more may be left out of the other rows
    if dataset.is_sample:
        size += f", {MAX_ROWS:,} rows checked (the first {MAX_ROWS // 2:,}, the others at random; --all: every row)"
    if dataset.left_out:
        size += f", {dataset.left_out}"
    return f"{dataset.path}, graded by {', '.join(dataset.env_names)}: {size}"


def _ends(text: str, size: int) -> str:
    return text if len(text) <= 2 * size else f"{text[:size]} ... {text[-size:]}"


def notes(cfg: Config, model: ModelConfig, num_steps: int) -> list[str]:
    """What a user easily overlooks: a long warm-up, a low learning rate for LoRA."""
    found = []
    scheduler = cfg.policy.scheduler
    if 3 * scheduler.warmup_steps > num_steps and scheduler.warmup_start_factor != 1:
        warmup = f"policy.scheduler.warmup_steps={scheduler.warmup_steps}"
        found.append(f"{warmup} is more than a third of the run's {num_steps} steps: set fewer for a run this short")
    lora = cfg.policy.dtensor_cfg.lora_cfg
    least = LORA_RATES[0] * LORA_ALPHA / lora.alpha  # an update of the weights grows with both
    if lora.enabled and cfg.policy.optimizer.kwargs.lr < least:
        lr = f"policy.optimizer.kwargs.lr={cfg.policy.optimizer.kwargs.lr:g} with lora_cfg.alpha={lora.alpha:g}"
        published = f"{LORA_RATES[0]:g} to {LORA_RATES[1]:g} with alpha={LORA_ALPHA:g} in tinker-cookbook's RL recipes"
        found.append(f"{lr} is below published rates for LoRA: {published}{_lora_formula(model)}")
    return found


def _lora_formula(model: ModelConfig) -> str:
    """What tinker-cookbook's `get_lr` says for the model, of the two kinds for which it has an exponent."""
    for kind, exponent in LORA_EXPONENTS.items():
        if model.hf["model_type"].startswith(kind):
            rate = 5e-4 * (2000 / model.hidden_size) ** exponent
            return f"; its formula for supervised training has {rate:.1e} for this model"
    return ""


def turn_notes(cfg: Config, inputs: RunInputs) -> list[str]:
    """Environments that ask for another turn where none can come."""
    found = []
    prompt = min(len(dataset.problems[0].prompt_ids) for dataset in inputs.train.datasets.values())
    new = cfg.policy.generation.max_new_tokens
    total = cfg.policy.max_total_sequence_length
    for name in inputs.asks_again:
        asks = f"env_name '{name}' asks for another turn (done=False)"
        if cfg.grpo.max_rollout_turns == 1:
            found.append(f"{asks}, but grpo.max_rollout_turns=1: raise it, or nobody answers")
        elif prompt + new + 2 > total:  # a token of the environment and one of the policy
            room = f"a prompt of {prompt} tokens and a reply of policy.generation.max_new_tokens={new} leave no room"
            found.append(f"{asks}, but {room} in policy.max_total_sequence_length={total}: raise that")
    return found


def memory_plan(cfg: Config, inputs: RunInputs, num_ranks: int, gpu_bytes: float | None) -> Plan:
    """How much memory the run needs on each GPU; in a split job of `num_ranks` ranks, on each GPU that trains."""
    num_trainers = max(1, num_ranks - cfg.policy.generation.num_generators)
    reward = inputs.reward_model[1] if inputs.reward_model else None
    teacher = inputs.reference_model[1] if inputs.reference_model else None
    vocab = inputs.tokenizer.vocab_size
    return Plan(cfg, inputs.model_config, vocab, num_trainers, gpu_bytes, reward=reward, teacher=teacher)


# ----------------------------------------------------------------------------------------------------------- --check


def _what_is_trained(folder: Path, model: ModelConfig) -> str:
    """Of a folder with a vision part."""
    kept = "the vision part is kept as it is"
    if not missing_weights(folder):
        kept = f"{len(kept_tensors(folder, model))} tensors of the vision part are kept as they are"
    return f"only the text model of {model.config_json['model_type']} is trained; {kept}"


def ranks_on_cpu(cfg: Config, model: ModelConfig) -> tuple[int, str]:
    """(how many ranks train.sh starts on a CPU, why). Small operations do not occupy two threads, but two ranks do;
    for a large model FSDP's gathers cost more than that saves. LOG of 2026-11-23 has the measured steps."""
    millions = sum(math.prod(shape) for _, shape in model.tensor_shapes()) / 1e6
    size = f"the model has {millions:.3g} M parameters"
    if millions < SMALL_MODEL:
        return max(2, rules.fewest_ranks(cfg)), f"{size}, fewer than {SMALL_MODEL} M"
    return rules.fewest_ranks(cfg), f"{size}, no fewer than {SMALL_MODEL} M"


def check(
    cfg: Config, *, all_rows: bool = False, gpu_bytes: float | None = None, gpu: step_time.Gpu | None = None
) -> str:
    """A summary, after checking everything that can be wrong before torch is loaded: all rows, or MAX_ROWS of each set.
    gpu_bytes: of one GPU, if known. Prints the summary and raises ConfigError if the run does not fit into it. gpu: the
    summary says how long a step takes on it."""
    cfg = _with_one_worker(cfg)
    if gpu and gpu_bytes is None:
        gpu_bytes = gpu.gib * GIB
    to_plan = gpu_bytes is not None and "LOCAL_WORLD_SIZE" not in os.environ  # by hand, not by train.sh: no run follows
    inputs = read_inputs(cfg, to_plan=to_plan, max_rows=None if all_rows else MAX_ROWS)
    for environment in inputs.environments.values():
        environment.close()
    lines = [f"model      {inputs.model_folder} (vocabulary {inputs.tokenizer.vocab_size:,})"]
    if inputs.model_config.whole is not None:
        lines.append(f"note       {_what_is_trained(inputs.model_folder, inputs.model_config)}")
    lines += data_lines(cfg, inputs, inputs.train.start())
    num_steps = num_steps_of(cfg, inputs.train.num_problems)
    lines.append(_steps_line(cfg, inputs, num_steps))
    lines += [f"note       {note}" for note in (*notes(cfg, inputs.model_config, num_steps), *turn_notes(cfg, inputs))]
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
    plan = memory_plan(cfg, inputs, num_ranks, gpu_bytes)
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


def _mean_prompt(inputs: RunInputs) -> float:
    """Mean tokens of a prompt of the training sets, of the rows that are read."""
    lengths = []
    for dataset in inputs.train.datasets.values():
        lengths += [len(problem.prompt_ids) for problem in dataset.problems]
    return sum(lengths) / len(lengths)


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


# -------------------------------------------------------------------------------------------------- the command line


def gpu_memory(argv: Sequence[str]) -> tuple[float | None, list[str]]:
    """(bytes by the last `--gpu_memory=80`, in GiB, or None; the other words). A GPU of "80 GB" has 79 to 80 GiB."""
    flag = "--gpu_memory="
    given = [word.removeprefix(flag) for word in argv if word.startswith(flag)]
    others = [word for word in argv if not word.startswith(flag)]
    if not given:
        return None, others
    if not re.fullmatch(r"[1-9][0-9]{0,5}(\.[0-9]+)?", given[-1]):
        raise ConfigError(f"{flag}{given[-1]:.80}: expected a GPU's memory in GiB, such as {flag}80")
    return float(given[-1]) * GIB, others


def gpu_by_name(argv: Sequence[str]) -> tuple[step_time.Gpu | None, list[str]]:
    """(the GPU of the last `--gpu=h100`, or None; the other words)."""
    flag = "--gpu="
    given = [word.removeprefix(flag) for word in argv if word.startswith(flag)]
    others = [word for word in argv if not word.startswith(flag)]
    if not given:
        return None, others
    if given[-1] not in step_time.GPUS:
        raise ConfigError(f"{flag}{given[-1]:.80}: expected one of {', '.join(step_time.GPUS)}")
    return step_time.GPUS[given[-1]], others


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
    if {"--help", "-h"} & set(argv):
        print(usage, keys.help_text(), sep="\n\n")
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
