"""Trains a step again from its dumped samples (logger.dump_rollouts): with another loss, or in a debugger.

    .venv/bin/torchrun --nproc_per_node=2 -m tools.replay logs/exp_001/rollouts/step_000081 [key.sub=value ...]

Reads the run's config.yaml, the checkpoint before the step, and the samples; prints the metrics beside those that the
run logged. With the same config, on as many ranks as trained the step, they are bitwise identical.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from advantages import step_advantages
from batch import make_minibatches
from config import ColocatedConfig, Config, ConfigError
from data import Sample
from grpo import compute_logprobs, compute_loss
from loss import Metrics
from metrics import Numbers, accumulate, reduce_over_ranks, training_metrics
from model import Decoder
from optim import build_optimizer, clip_grad_norm, judge_step, set_learning_rate
from support.check.preflight import num_steps_of, read_inputs
from support.inputs import reader
from support.inputs.resume import checkpoint_folder, read_meta
from support.run import checkpoint, dump
from support.run.start import build_policy, build_reference, hash_of_base
from support.system.disk import keep_console
from support.system.exits import describe_failure, exit_process, report_exit
from support.system.optimizer import Optimizer
from support.system.ranks import Ranks, on_rank0, start_process_group

USAGE = "usage: [torchrun --nproc_per_node=N | python] -m tools.replay RUN/rollouts/step_000001 [key.sub=value ...]"


def load_samples(folder: Path) -> list[Sample]:
    """The samples that `support.run.dump` wrote. Every rank has all tokens."""
    samples: dict[int, Sample] = {}
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for file in sorted(folder.glob("rank_*.safetensors")):
        columns = load_file(file)
        ends = np.cumsum(columns["num_tokens_S"])
        for i, number in enumerate(columns["sample_S"].tolist()):
            rows = slice(ends[i] - columns["num_tokens_S"][i], ends[i])
            tokens = {name: columns[column][rows] for name, column in dump.COLUMNS.items()}
            record = {name: records[number][name] for name in dump.RECORDED if name in records[number]}
            samples[number] = Sample(**record, **tokens)
    found: list[Sample] = []
    for number, record in enumerate(records):
        (found[-1].forks if record.get("is_fork") else found).append(samples[number])
        samples[number].num_trained_tokens = record["num_trained_tokens"]  # 0 where it was filtered out
    return found


def read_config(folder: Path, words: list[str]) -> Config:
    """The config of the run that wrote `folder`. Every rank trains here, and none generates."""
    cfg = reader.load(str(folder.parent.parent / "config.yaml"), words)
    generation = replace(cfg.policy.generation, colocated=ColocatedConfig())
    return replace(cfg, policy=replace(cfg.policy, generation=generation))


def replay(folder: Path, cfg: Config, ranks: Ranks, device: torch.device) -> tuple[int, Numbers, Decoder, Optimizer]:
    """(number of the step, its metrics; policy and optimizer after it)."""
    if problem := checkpoint.problem_of(folder, ranks):
        raise ConfigError(f"{folder}: {problem}; replay another step")
    meta, samples = read_meta(folder), load_samples(folder)
    inputs = read_inputs(cfg, on_rank0=partial(on_rank0, group=ranks.job))
    for environment in inputs.environments.values():
        environment.close()
    model = build_policy(cfg, inputs, ranks, device)
    base = hash_of_base(cfg, inputs, ranks)
    optimizer = build_optimizer(model, cfg.policy.optimizer, offloads=cfg.policy.offload_optimizer_for_logprob)
    reference = build_reference(cfg, inputs, model, device)
    step, num_bad_steps = meta["step"], 0
    if step > 1:
        saved = checkpoint_folder(cfg.checkpointing, folder.parent.parent)
        shards = reference.shards if reference else {}
        before = saved / f"step_{step - 1:06d}"
        if not before.is_dir():
            fix = "raise checkpointing.keep_latest; dump_rollouts should be a multiple of checkpointing.save_period"
            raise ConfigError(f"{folder}: needs the checkpoint before the step, {before}, which was not kept: {fix}")
        asked = replace(cfg.checkpointing, resume="must", resume_step=str(step - 1))
        state = checkpoint.load(saved, asked, model, optimizer, ranks, shards, base)
        num_bad_steps = state["num_bad_steps"]

    adv_B, metrics = step_advantages(samples, cfg.grpo, cfg.loss_fn)
    minibatches = make_minibatches(samples, adv_B, cfg, ranks, device)
    logp_metrics = compute_logprobs(model, reference, minibatches, cfg, step)
    set_learning_rate(optimizer, cfg.policy.scheduler, step, num_steps_of(cfg, inputs.train.num_problems))
    step_sums: Metrics = {}
    for minibatch in minibatches * cfg.policy.ppo_epochs:  # as grpo.train
        sums: Metrics = {}
        for micro in minibatch.micros:
            loss, loss_metrics = compute_loss(model, micro, minibatch, cfg)
            model.backward(loss, is_last=micro is minibatch.micros[-1])
            accumulate(sums, loss_metrics)
        grad_norm = clip_grad_norm(model, cfg.policy.max_grad_norm)
        reduced = reduce_over_ranks(sums) | logp_metrics
        is_sound, num_bad_steps = judge_step(reduced, grad_norm, num_bad_steps, cfg.grpo, step)
        if is_sound:
            optimizer.step()
        optimizer.zero_grad()
        accumulate(step_sums, sums)
    metrics |= training_metrics(step_sums, logp_metrics, minibatches, cfg.policy.ppo_epochs)
    lr = optimizer.param_groups[0]["lr"]
    return step, metrics | {"grad_norm": grad_norm, "lr": lr, "num_bad_steps": num_bad_steps}, model, optimizer


def compare(run_folder: Path, step: int, metrics: Numbers) -> str:
    """A table of the metrics that differ from those that the run logged."""
    records = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    logged = next((each for each in records if each["step"] == step and "train/loss" in each), {})
    pairs = {name: (logged[f"train/{name}"], value) for name, value in metrics.items() if f"train/{name}" in logged}
    differ = {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}  # NaN is NaN
    rows = [f"{name:<42} {before:>16.9g} {now:>16.9g}" for name, (before, now) in differ.items()]
    title = f"{f'step {step} of {run_folder}':<42} {'logged':>16} {'replayed':>16}"
    return "\n".join([title, *rows, f"{len(differ)} of {len(pairs)} metrics differ"])


def main() -> int:
    try:
        if len(sys.argv) == 1 or not Path(sys.argv[1], "meta.json").is_file():
            raise ConfigError(USAGE)
        folder = Path(sys.argv[1]).absolute()
        cfg = read_config(folder, sys.argv[2:])
        ranks, device = start_process_group(1)
        step, metrics, *_ = replay(folder, cfg, ranks, device)
        ranks.print_rank0(compare(folder.parent.parent, step, metrics))
        code, reason = 0, f"replayed step {step}"
    except BaseException as error:
        code, reason = describe_failure(error)
    report_exit(code, reason, None)
    return code


if __name__ == "__main__":
    keep_console()
    exit_process(main())
