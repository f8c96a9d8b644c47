"""Accuracy, pass@k and maj@k on the validation sets, with intervals: called by the loop, and a command of its own.

    torchrun --nproc_per_node=2 eval.py CONFIG.yaml policy.model_name=FOLDER [key.sub=value ...]         any HF folder
    torchrun --nproc_per_node=2 eval.py CONFIG.yaml checkpointing.resume_from=RUN [key.sub=value ...]    a checkpoint

The command writes eval.json into a new numbered folder of logger.log_dir and prints its path. Exit codes are those of
grpo.py.
"""

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from system.exits import die_with_parent

if "RANK" in os.environ and __name__ == "__main__":  # before torch and vllm are imported, which takes a while
    die_with_parent()

import torch

from config import Config, ConfigError
from data import Sample
from dataset.problems import Dataset
from engine import SamplingOptions, sync_weights
from model import Reference
from rollout import Sampler, groups_of
from run import config_file
from run.folder import open_run_folder
from run.log import RunLog
from run.preflight import Inputs, parse_command_line, read_inputs
from run.resume import checkpoint_folder
from run.setup import Run, build, restore
from system.exits import describe_failure, exit_process, write_exit_file
from system.ranks import Ranks, start_process_group

USAGE = "usage: [torchrun --nproc_per_node=N] eval.py CONFIG.yaml [policy.model_name=X | checkpointing.resume_from=RUN]"
Z95 = 1.959964  # 97.5% of a normal distribution lie below


def validate(run: Run) -> None:
    """Scores every validation set in every mode, logs the numbers, and keeps them in the run's state."""
    if not run.inputs.validation:
        return
    run.watchdog.enter("validation")
    start = time.perf_counter()
    values: dict[str, float] = {}
    for name, dataset in run.inputs.validation.items():
        for mode in modes(run.cfg):
            samples = sample_problems(run.cfg, run.sampler, dataset, mode)
            prefix = f"validation/{name}/{mode}" if len(run.inputs.validation) > 1 else f"validation/{mode}"
            values |= {f"{prefix}/{key}": value for key, value in summarize(samples).items()}
            if run.log:
                num_print = run.cfg.logger.num_val_samples_to_print
                run.log.samples(run.state.step, prefix, samples, run.inputs.tokenizer, num_print)
    values["timing/validation/total_validation_time"] = time.perf_counter() - start
    if run.log:
        run.log.validation(run.state.step, values)
    if run.state.step == 0:
        run.state.first_validation = values
    else:
        run.state.last_validation = values


def modes(cfg: Config) -> dict[str, tuple[int, SamplingOptions]]:
    """Name -> (samples per problem, how they are sampled). Greedy: one. Sampled: as the val_ options say."""
    grpo, generation = cfg.grpo, cfg.policy.generation
    length = grpo.val_max_new_tokens or generation.max_new_tokens
    sampled = SamplingOptions(
        temperature=grpo.val_temperature or generation.temperature,
        max_new_tokens=length,
        top_p=grpo.val_top_p or 1.0,
        top_k=grpo.val_top_k,
    )
    greedy = SamplingOptions(temperature=0.0, max_new_tokens=length)
    return {"greedy": (1, greedy), "sampled": (grpo.val_num_generations_per_prompt, sampled)}


def sample_problems(cfg: Config, sampler: Sampler, dataset: Dataset, mode: str) -> list[Sample]:
    """Graded samples of the first max_val_samples problems of a set, on every rank; the ranks share the work. The seeds
    are the same every time, so that two validations differ by the weights alone."""
    problems = list(enumerate(dataset.rows[: cfg.grpo.max_val_samples]))
    num_samples, options = modes(cfg)[mode]
    return sampler.sample(problems, num_samples, options, (cfg.grpo.seed, -1))


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """Numbers of one set and mode, over groups of n samples of a problem. Rewards are the grader's, unscaled.

    With n > 1 also pass_at_k and maj_at_k, k = 1, 2, 4, ... and n: pass_at_1 is accuracy, pass_at_n NeMo RL's pass_k.
    """
    groups = groups_of(samples)
    size = len(groups[0])
    assert all(len(group) == size for group in groups), sorted(map(len, groups))
    values = {
        "accuracy": fmean(s.outcome == "ok" for s in samples),
        "reward": fmean(s.reward for s in samples),
        "avg_length": fmean(s.num_gen_tokens for s in samples),
        "truncation_rate": fmean(s.finish_reason == "length" for s in samples),
        "outcome/parse_fail": fmean(s.outcome == "parse_fail" for s in samples),
    }
    for k in sorted({size} | {2**i for i in range(size.bit_length())}) if size > 1 else ():
        values[f"pass_at_{k}"] = fmean(pass_at_k(size, sum(s.outcome == "ok" for s in g), k) for g in groups)
        if k > 1:
            values[f"maj_at_{k}"] = fmean(majority(g[:k]) for g in groups)
    return values


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k); unbiased
    for the chance of k fresh samples (Chen et al. 2021, "Evaluating Large Language Models Trained on Code")."""
    assert 1 <= k <= num_samples and 0 <= num_right <= num_samples, (num_samples, num_right, k)
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(samples: Sequence[Sample]) -> float:
    """Whether the answer that most samples give is right (Wang et al. 2022, "Self-Consistency").

    Votes go by `extracted`; samples without an answer do not vote, and the value is 0 if none has one. At a tie each
    leading answer counts alike, as if one were drawn: a function of the votes, not of their order. maj@k is this over
    the first k samples of each problem, which is unbiased because samples are independent.
    """
    votes = Counter(s.extracted for s in samples if s.extracted is not None)
    leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
    share_right = [fmean(s.outcome == "ok" for s in samples if s.extracted == answer) for answer in leaders]
    return fmean(share_right) if leaders else 0.0


def wilson_interval(num_right: int, num_problems: int) -> tuple[float, float]:
    """95% interval of a share of independent problems (Wilson 1927): (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) /
    (1 + z^2/n). Inside [0, 1], and of some width even when all are right."""
    n, p = num_problems, num_right / num_problems
    middle, half = p + Z95**2 / (2 * n), Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    return (middle - half) / (1 + Z95**2 / n), (middle + half) / (1 + Z95**2 / n)


def clustered_interval(means: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean of per-problem means: m -+ z s / sqrt(N), s with Bessel's correction, cut to [0, 1].

    Samples of one problem are alike, so the problem is the unit (Miller 2024, "Adding Error Bars to Evals"). Normal
    approximation: for tens of problems or more. None for a single one.
    """
    if len(means) < 2:
        return None
    middle, half = fmean(means), Z95 * stdev(means) / math.sqrt(len(means))
    return max(0.0, middle - half), min(1.0, middle + half)


# --------------------------------------------------------------------------------------------------------- the command


def evaluate(cfg: Config, inputs: Inputs, ranks: Ranks, device: torch.device, folder: Path) -> dict[str, Any]:
    """The report, equal on all ranks: what was scored, with which settings, and the numbers of each set and mode."""
    start = time.perf_counter()
    model, optimizer, engine, sampler = build(cfg, inputs, ranks, device)
    # A checkpoint holds the reference policy too, where training needs one.
    reference = Reference(model) if cfg.loss_fn.reference_policy_kl_penalty > 0 else None
    resumed = cfg.checkpointing.resume_from
    checkpoints = checkpoint_folder(cfg.checkpointing, Path(resumed or folder))
    step = restore(cfg, inputs, model, optimizer, reference, ranks, checkpoints).step
    sync_weights(model, engine, step)
    settings = {}
    for mode, (num_samples, options) in modes(cfg).items():
        settings[mode] = {"num_samples": num_samples, "temperature": options.temperature, "top_p": options.top_p}
        settings[mode] |= {"top_k": options.top_k, "max_new_tokens": options.max_new_tokens}
    report = {
        "model_name": cfg.policy.model_name,
        "checkpoint": f"{checkpoints}, step {step}" if resumed else None,
        "seed": cfg.grpo.seed,
        "world_size": ranks.world_size,
        "settings": settings,
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
        inputs = read_inputs(cfg, to_train=False)
        if not inputs.validation:
            raise ConfigError("data.validation.data_path is not set: name the jsonl file with the problems")
        ranks, device = start_process_group(cfg.policy.generation.vllm_cfg.tensor_parallel_size)
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
