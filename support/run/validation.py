"""Scores a model on the validation sets, in a run and for eval.py: accuracy, pass@k and maj@k, with intervals."""

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, pvariance

from config import Config
from engine import SamplingOptions, sync_weights
from records import Sample, groups_of
from rollout import Sampler
from support.inputs.resume import checkpoint_folder
from support.inputs.run_inputs import RunInputs
from support.run import checkpoint
from support.run.log import RunLog, shown
from support.run.start import Job, Run, build, hash_of_base
from support.system.disk import write_whole
from support.system.exchange import move_calls, move_tokens
from support.system.progress import Progress

Z95 = 1.959964  # 97.5% of a normal distribution lie below


def validate(run: Run) -> None:
    """Scores every validation set in every mode, logs the numbers, and keeps them in the state of the run."""
    if not run.inputs.validation:
        return
    run.watchdog.enter("validation")
    start = time.perf_counter()
    scored: dict[str, list[list[Sample]]] = {}  # prefix of the names of its numbers -> groups
    of_all_sets: dict[str, list[list[Sample]]] = defaultdict(list)  # NeMo RL has these alone
    has_several_sets = len(run.inputs.validation) > 1
    for name, mode, samples in sample_sets(run.cfg, run.inputs, run.sampler):
        prefix = f"validation/{name}/{mode}" if has_several_sets else f"validation/{mode}"
        scored[prefix] = groups_of(samples)
        of_all_sets[f"validation/{mode}"] += scored[prefix]
        if run.log:
            run.log.samples(run.state.step, prefix, samples, run.inputs.tokenizer)
    values: dict[str, float] = {}
    for prefix, groups in (*scored.items(), *of_all_sets.items()):
        for key, value in summarize(groups).items():
            values[f"{prefix}/{key}"] = value
    values["timing/validation/total_validation_time"] = time.perf_counter() - start
    if run.log:
        run.log.validation(run.state.step, values)
    if run.state.step == 0:
        run.state.first_validation = values
    else:
        run.state.last_validation = values


def evaluate(job: Job) -> str:
    """Writes eval.json, the report of eval.py: what was scored, how, and the numbers. Returns where it is."""
    cfg = job.cfg
    inputs = job.inputs
    ranks = job.ranks
    start = time.perf_counter()
    model, sampler = build(cfg, inputs, ranks, job.device)
    step = 0
    scored = None
    if cfg.checkpointing.resume_from:
        checkpoints = checkpoint_folder(cfg.checkpointing, Path(cfg.checkpointing.resume_from))
        base = hash_of_base(cfg, inputs, ranks)
        state = checkpoint.load(checkpoints, cfg.checkpointing, model, None, ranks, {}, base)
        step = state["step"]
        scored = f"{checkpoints}, step {step}"
    sync_weights(model, sampler.engine, step)
    log = None
    if ranks.rank == 0:
        without_events = replace(cfg.logger, tensorboard_enabled=False, wandb_enabled=False)
        log = RunLog(job.folder, without_events, first_step=0, num_steps=0)
    sets = {}
    for name, dataset in inputs.validation.items():
        sets[name] = {"data_path": dataset.path, "fingerprint": dataset.fingerprint}
    for name, mode, samples in sample_sets(cfg, inputs, sampler):
        numbers = summarize(groups_of(samples))
        sets[name][mode] = numbers
        score = "accuracy"
        if numbers["reward"] != numbers["accuracy"]:  # some reward is neither 0 nor 1
            score = "reward"
        ranks.print_rank0(f"{name} | {mode} | {score} {shown(numbers, score)}")
        if log:
            log.samples(step, f"{name}/{mode}", samples, inputs.tokenizer)
    settings = {}
    for mode, (num_samples, options) in modes(cfg).items():
        settings[mode] = {"num_samples": num_samples, **asdict(options)}
    report = {
        "model_name": cfg.policy.model_name,
        "checkpoint": scored,
        "seed": cfg.grpo.seed,
        "world_size": ranks.world_size,
        "settings": settings,
        "sets": sets,
        "seconds": round(time.perf_counter() - start, 1),
    }
    file = job.folder / "eval.json"
    if ranks.rank == 0:
        write_whole(file, json.dumps(report, indent=2) + "\n")
    return f"scored: {file}"


def modes(cfg: Config) -> dict[str, tuple[int, SamplingOptions]]:
    """Name -> (samples per problem, sampling options). Greedy takes one sample; the val_ options set the other mode."""
    grpo = cfg.grpo
    generation = cfg.policy.generation
    length = grpo.val_max_new_tokens or generation.max_new_tokens
    temperature = grpo.val_temperature or generation.temperature
    top_p = grpo.val_top_p or generation.top_p
    top_k = generation.top_k if grpo.val_top_k is None else grpo.val_top_k
    greedy = SamplingOptions(0.0, length)
    sampled = SamplingOptions(temperature, length, top_p, top_k)
    return {"greedy": (1, greedy), "sampled": (grpo.val_num_generations_per_prompt, sampled)}


def sample_sets(cfg: Config, inputs: RunInputs, sampler: Sampler) -> Iterator[tuple[str, str, list[Sample]]]:
    """(set, mode, graded samples of its first max_val_samples problems). The ranks share the work; rank 0 gets the
    tokens that it logs. The seeds are the same every time, so two validations differ by the weights alone."""
    num_logged = max(cfg.logger.num_samples_to_log, cfg.logger.num_val_samples_to_print)
    for name, dataset in inputs.validation.items():
        problems = list(enumerate(dataset.problems[: cfg.grpo.max_val_samples]))
        for mode, (num_samples, options) in modes(cfg).items():
            with Progress(f"validation, {name}, {mode}: {len(problems) * num_samples:,} answers"):
                samples = sampler.sample(problems, num_samples, options, (cfg.grpo.seed, -1))
            logged = samples[:num_logged]
            move_tokens([[row for sample in logged for row in sample.sequences]])
            move_calls(logged)
            yield name, mode, samples


def summarize(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Numbers of one mode over groups of n samples of a problem. Rewards are the grader's, unscaled. With n > 1 also
    pass_at_k and maj_at_k, k = 1, 2, 4, ... and n: pass_at_1 is accuracy, pass_at_n NeMo RL's pass_k."""
    samples = [sample for group in groups for sample in group]
    size = len(groups[0])
    assert all(len(group) == size for group in groups), sorted(map(len, groups))
    low, high = accuracy_interval([accuracy(group) for group in groups], len(samples))
    values = {
        "accuracy": accuracy(samples),
        "accuracy_ci95_low": low,
        "accuracy_ci95_high": high,
        "num_problems": len(groups),
        "reward": fmean(sample.grade.reward for sample in samples),
        "avg_length": fmean(sample.num_gen_tokens for sample in samples),
        "truncation_rate": fmean(sample.finish_reason == "length" for sample in samples),
        "outcome/parse_fail": fmean(sample.grade.outcome == "parse_fail" for sample in samples),
    }
    if size == 1:
        return values
    for k in _attempts(size):
        values[f"pass_at_{k}"] = fmean(pass_at_k(size, num_right(group), k) for group in groups)
        if k > 1:
            values[f"maj_at_{k}"] = fmean(majority(group[:k]) for group in groups)
    return values


def accuracy(samples: Iterable[Sample]) -> float:
    return fmean(sample.grade.outcome == "ok" for sample in samples)


def num_right(samples: Iterable[Sample]) -> int:
    return sum(sample.grade.outcome == "ok" for sample in samples)


def _attempts(size: int) -> list[int]:
    """1, 2, 4, ... and `size`."""
    counts = []
    k = 1
    while k < size:
        counts.append(k)
        k *= 2
    counts.append(size)
    return counts


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k); unbiased
    for the chance of k fresh samples (Chen et al. 2021, "Evaluating Large Language Models Trained on Code")."""
    assert 1 <= k <= num_samples and 0 <= num_right <= num_samples, (num_samples, num_right, k)
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(samples: Sequence[Sample]) -> float:
    """Whether the answer that most samples give is right (Wang et al. 2022, "Self-Consistency"); 0 if none has one. At
    a tie each leading answer counts alike, as if one were drawn: the order of the votes does not matter. maj@k is this
    over the first k samples of each problem, which is unbiased because samples are independent."""
    votes = Counter(sample.grade.extracted for sample in samples if sample.grade.extracted is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    shares_right = []
    for answer, count in votes.items():
        if count == most:
            shares_right.append(accuracy(sample for sample in samples if sample.grade.extracted == answer))
    return fmean(shares_right)


def accuracy_interval(means: Sequence[float], num_samples: int) -> tuple[float, float]:
    """95% interval of accuracy from the accuracy on each problem: Wilson's (1927), inside [0, 1] and of some width even
    if all are right. Samples of a problem are alike (Miller 2024, "Adding Error Bars to Evals"), so n is the number of
    independent samples whose mean varies as much: p (1 - p) / n = variance of the mean."""
    p = fmean(means)
    variance = pvariance(means)
    n = len(means)
    if variance > 0:
        n = min(num_samples, n * p * (1 - p) / variance)
    middle = p + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    return (middle - half) / scale, (middle + half) / scale
