"""The third promise of README: a saved step can be trained again, with another loss, or in a debugger.

    .venv/bin/python replay.py logs/exp_001/rollouts/step_000081 [key.sub=value ...]
    .venv/bin/torchrun --nproc_per_node=2 replay.py logs/exp_001/rollouts/step_000081 [key.sub=value ...]

A run with logger.dump_rollouts saves the samples of a step before it trains (run/dump.py has the format). This
command reads them, the run's config.yaml, and the checkpoint before the step (for step 1 the model folder). It trains
the step by `grpo.update`, as the run did, and prints each metric that the run logged and that now differs. With the
same config, on a CPU and as many ranks as trained the step, none does: everything is bitwise identical. It starts no
engine and writes nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from advantages import step_advantages
from base.inputs import reader
from base.inputs.checkpoints import checkpoint_folder, of_this_program, read_meta
from base.inputs.run_inputs import num_steps_of, read_inputs
from base.system.disk import keep_console
from base.system.exits import exit_process
from base.system.failure import run_command
from base.system.files import read_records
from base.system.optimizer import Optimizer
from base.system.ranks import Ranks, on_rank0, start_process_group
from config import ColocatedConfig, Config, ConfigError
from grpo import compute_logprobs, update
from metrics import Numbers
from model import Decoder
from optim import EntropyBonus, build_optimizer, set_learning_rate
from pack import make_minibatches
from records import Sample
from reference import Reference
from run import dump, restore
from run.build import build_head, build_policy, build_reference, hash_of_base

USAGE = "usage: [torchrun --nproc_per_node=N | python] replay.py RUN/rollouts/step_000001 [key.sub=value ...]"


@dataclass(frozen=True)
class Replayed:
    """A step that was trained again: its metrics; the policy and its optimizer afterwards."""

    step: int
    metrics: Numbers
    model: Decoder
    optimizer: Optimizer


def read_config(folder: Path, words: list[str]) -> Config:
    """The config of the run that wrote `folder`, as a job whose ranks all train: a replay generates nothing."""
    cfg = reader.load(str(folder.parent.parent / "config.yaml"), words)
    generation = replace(cfg.policy.generation, colocated=ColocatedConfig())
    return replace(cfg, policy=replace(cfg.policy, generation=generation))


def replay(folder: Path, cfg: Config, ranks: Ranks, device: torch.device) -> Replayed:
    """Trains the step of `folder` again. A collective. Raises ConfigError if the dump is damaged, or if the checkpoint
    before the step is missing; StopRun where a check stops the step."""
    problem = restore.problem_of(folder, ranks)  # a dump has the form of a checkpoint
    if problem:
        raise ConfigError(f"{folder}: {problem}; replay another step")
    step = read_meta(folder)["step"]
    samples = dump.read(folder)

    inputs = read_inputs(cfg, on_rank0=partial(on_rank0, group=ranks.job))
    check_ids(folder, samples, inputs.model_config.vocab_size)
    head_options = build_head(cfg, inputs, device)
    model = build_policy(cfg, inputs, ranks, device)
    optimizer = build_optimizer(model, cfg.policy.optimizer, offloads=cfg.policy.offload_optimizer_for_logprob)
    reference = build_reference(cfg, inputs, model, device)
    num_bad_steps = 0
    bonus = EntropyBonus()
    if step > 1:
        base_sha256 = hash_of_base(cfg, inputs, ranks)
        num_bad_steps, bonus = restore_step_before(folder, step, cfg, model, optimizer, reference, ranks, base_sha256)

    adv_B, metrics = step_advantages(samples, cfg.grpo, cfg.loss_fn)
    minibatches = make_minibatches(samples, adv_B, cfg, ranks, device)
    gap, mask_metrics = compute_logprobs(model, head_options, reference, minibatches, cfg, step)
    set_learning_rate(optimizer, cfg.policy.scheduler, step, num_steps_of(cfg, inputs.train.num_problems))
    metrics |= mask_metrics
    update_metrics, _ = update(model, head_options, optimizer, minibatches, gap, num_bad_steps, bonus, cfg, step)
    metrics |= update_metrics
    return Replayed(step, metrics, model, optimizer)


def check_ids(folder: Path, samples: Sequence[Sample], vocab_size: int) -> None:
    """ConfigError where a token is none of the model's."""
    for sample in samples:
        for sequence in sample.sequences:
            ids = np.array(sequence.token_ids)
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if len(wrong):
                raise ConfigError(
                    f"{folder}: has the token id {wrong[0]}, but policy.model_name has {vocab_size:,} ids"
                )


def restore_step_before(
    folder: Path,
    step: int,
    cfg: Config,
    model: Decoder,
    optimizer: Optimizer,
    reference: Reference | None,
    ranks: Ranks,
    base_sha256: str | None,
) -> tuple[int, EntropyBonus]:
    """Loads the checkpoint that the run saved before `step`. Returns the number of bad steps in a row until then, and
    the entropy bonus."""
    checkpoints = checkpoint_folder(cfg.checkpointing, folder.parent.parent)
    before = checkpoints / f"step_{step - 1:06d}"
    if not before.is_dir():
        raise ConfigError(
            f"{folder}: needs the checkpoint before the step, {before}, which was not kept: raise "
            "checkpointing.keep_latest; dump_rollouts should be a multiple of checkpointing.save_period"
        )
    wanted = replace(cfg.checkpointing, resume="must", resume_step=str(step - 1))
    reference_shards = reference.shards if reference else {}
    state = restore.load(checkpoints, wanted, model, optimizer, ranks, reference_shards, base_sha256)
    with of_this_program(before):
        return int(state["num_bad_steps"]), EntropyBonus(**state.get("bonus", {}))


def compare(run_folder: Path, step: int, metrics: Numbers) -> str:
    """A table of the metrics that differ from those that the run logged for the step."""
    logged = logged_metrics(run_folder, step)
    compared = [name for name in metrics if isinstance(logged.get(f"train/{name}"), int | float)]  # logged as numbers
    if not compared:
        return f"step {step} of {run_folder} has no logged metrics to compare with: it stopped the run"
    title = f"step {step} of {run_folder}"
    lines = [f"{title:<42} {'logged':>16} {'replayed':>16}"]
    for name in compared:
        before, now = logged[f"train/{name}"], metrics[name]
        if repr(before) != repr(now):  # by repr, NaN equals NaN
            lines.append(f"{name:<42} {before:>16.9g} {now:>16.9g}")
    num_different = len(lines) - 1
    lines.append(f"{num_different} of {len(compared)} metrics differ")
    return "\n".join(lines)


def logged_metrics(run_folder: Path, step: int) -> Numbers:
    """The line of metrics.jsonl that the run wrote for the step; empty if the step stopped the run."""
    for _, record in read_records(run_folder / "metrics.jsonl"):
        if record.get("step") == step and "train/loss" in record:
            return record
    return {}


def work() -> str:
    """Replays the folder of the command line, and says that it did."""
    words = sys.argv[1:]
    if not words:
        raise ConfigError(USAGE)
    if not Path(words[0], "meta.json").is_file():
        raise ConfigError(f"{words[0]}: no dump of a step, for it has no meta.json; {USAGE}")
    folder = Path(words[0]).absolute()
    cfg = read_config(folder, words[1:])
    ranks, device = start_process_group(tp_size=1)
    replayed = replay(folder, cfg, ranks, device)
    ranks.print_rank0(compare(folder.parent.parent, replayed.step, replayed.metrics))
    return f"replayed step {replayed.step}"


def main() -> int:
    """One rank, from start to exit code; the codes are those of grpo.py."""
    return run_command(work)


if __name__ == "__main__":
    keep_console()
    exit_process(main())
