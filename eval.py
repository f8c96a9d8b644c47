"""Scores a model on the validation sets of a config, with the code that scores them during training.

    torchrun --nproc_per_node=2 eval.py CONFIG.yaml policy.model_name=FOLDER [key.sub=value ...]         any HF folder
    torchrun --nproc_per_node=2 eval.py CONFIG.yaml checkpointing.resume_from=RUN [key.sub=value ...]    a checkpoint

Writes eval.json into a new numbered folder of logger.log_dir and prints its path. Exit codes are those of grpo.py.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from system.exits import die_with_parent

if "RANK" in os.environ and __name__ == "__main__":  # before torch and vllm are imported, which takes a while
    die_with_parent()

import torch

from config import Config, ConfigError
from data import Sample
from engine import sync_weights
from rollout import groups_of
from run import config_file
from run.folder import open_run_folder
from run.log import RunLog
from run.preflight import RunInputs, parse_command_line, read_inputs
from run.resume import checkpoint_folder
from run.setup import build, restore
from run.validation import clustered_interval, modes, sample_problems, summarize, wilson_interval
from system.exits import describe_failure, exit_process, write_exit_file
from system.ranks import Ranks, on_rank0, start_process_group

USAGE = "usage: [torchrun --nproc_per_node=N] eval.py CONFIG.yaml [policy.model_name=X | checkpointing.resume_from=RUN]"


def evaluate(cfg: Config, inputs: RunInputs, ranks: Ranks, device: torch.device, folder: Path) -> dict[str, Any]:
    """The report, equal on all ranks: what was scored, with which settings, and the numbers of each set and mode."""
    start = time.perf_counter()
    model, optimizer, reference, engine, sampler = build(cfg, inputs, ranks, device)
    resumed = cfg.checkpointing.resume_from
    checkpoints = checkpoint_folder(cfg.checkpointing, Path(resumed or folder))
    step = restore(cfg, inputs, model, optimizer, reference, ranks, checkpoints).step
    sync_weights(model, engine, step)
    report = {
        "model_name": cfg.policy.model_name,
        "checkpoint": f"{checkpoints}, step {step}" if resumed else None,
        "seed": cfg.grpo.seed,
        "world_size": ranks.world_size,
        "settings": {mode: {"num_samples": n} | asdict(options) for mode, (n, options) in modes(cfg).items()},
        "sets": {},
    }
    log = open_log(cfg, folder) if ranks.rank == 0 else None
    for name, dataset in inputs.validation.items():
        numbers = {"data_path": dataset.path, "fingerprint": dataset.fingerprint}
        for mode in modes(cfg):
            samples = sample_problems(cfg, sampler, dataset, mode)
            numbers[mode] = with_interval(samples, mode)
            interval = numbers[mode]["accuracy_ci95"]
            between = f"95%: {interval[0]:.4f} to {interval[1]:.4f}" if interval else "one problem: no interval"
            ranks.print_rank0(f"{name} | {mode} | accuracy {numbers[mode]['accuracy']:.4f} ({between})")
            if log:
                log.samples(step, f"{name}/{mode}", samples, inputs.tokenizer, cfg.logger.num_val_samples_to_print)
        report["sets"][name] = numbers
    return report | {"seconds": round(time.perf_counter() - start, 1)}


def open_log(cfg: Config, folder: Path) -> RunLog:
    """The folder's config.yaml and samples.jsonl."""
    (folder / "config.yaml").write_text(config_file.to_yaml(cfg))
    return RunLog(folder, tensorboard=False, first_step=0, num_steps=0, max_samples=cfg.logger.num_samples_to_log)


def with_interval(samples: Sequence[Sample], mode: str) -> dict[str, Any]:
    """`summarize` with counts and the 95% interval of accuracy: Wilson's for greedy, where a problem is one trial; for
    sampled the normal one over the problems' means."""
    right = [[s.outcome == "ok" for s in group] for group in groups_of(samples)]
    if mode == "greedy":
        method, interval = "wilson", wilson_interval(sum(map(sum, right)), len(right))
    else:
        method, interval = "normal, clustered by problem", clustered_interval([fmean(group) for group in right])
    counts = {"num_problems": len(right), "num_samples": len(samples), "num_right": sum(map(sum, right))}
    return summarize(samples) | {"accuracy_ci95": interval, "ci_method": method} | counts


def main() -> int:
    """One rank from start to exit code."""
    folder = None
    try:
        if len(sys.argv) == 1 or {"--help", "-h"} & set(sys.argv):
            raise ConfigError(USAGE)
        cfg = parse_command_line(sys.argv[1:], USAGE)
        ranks, device = start_process_group(cfg.policy.generation.vllm_cfg.tensor_parallel_size)
        inputs = read_inputs(cfg, to_train=False, on_rank0=on_rank0)
        if not inputs.validation:
            raise ConfigError("data.validation.data_path is not set: name the jsonl file with the problems")
        folder = open_run_folder(cfg.logger.log_dir, None, ranks)
        report = evaluate(cfg, inputs, ranks, device, folder)
        if ranks.rank == 0:
            (folder / "eval.json").write_text(json.dumps(report, indent=2) + "\n")
        code, reason = 0, f"scored: {folder / 'eval.json'}"
    except BaseException as error:
        code, reason = describe_failure(error)
    if write_exit_file(code, reason, folder):
        print(reason, file=sys.stderr if code else sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    exit_process(main())
