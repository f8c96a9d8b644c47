"""Scores a model on the validation sets, in a run and for eval.py. Its numbers are made in metrics.py: `summarize`."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from base.hf.weights import sync_weights
from base.inputs.resume import checkpoint_folder
from base.inputs.run_inputs import RunInputs
from base.system.disk import write_whole
from base.system.exchange import move_to_log
from base.system.progress import Progress
from config import Config
from metrics import summarize
from model import Decoder
from records import Sample, SamplingOptions, groups_of
from rollout import Sampler
from run import checkpoint
from run.build import build, hash_of_base
from run.job import Job, Run
from run.log import RunLog, shown


def validate(run: Run) -> None:
    """Scores every validation set in every mode, logs the numbers, and keeps them in the state of the run."""
    if not run.inputs.validation:
        return
    run.watchdog.enter("validation")
    start = time.perf_counter()
    scored: dict[str, list[list[Sample]]] = defaultdict(list)  # prefix of the numbers' names -> groups
    has_several_sets = len(run.inputs.validation) > 1
    for name, mode, samples in sample_sets(run.cfg, run.inputs, run.sampler):
        groups = groups_of(samples)
        prefix = f"validation/{mode}"
        scored[prefix] += groups  # of all sets together: NeMo RL has these alone
        if has_several_sets:
            prefix = f"validation/{name}/{mode}"
            scored[prefix] += groups
        if run.log:
            run.log.samples(run.state.step, prefix, samples, run.inputs.tokenizer)
    values: dict[str, float] = {}
    for prefix, groups in scored.items():
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
    step, scored = load_scored(job, model)
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


def load_scored(job: Job, model: Decoder) -> tuple[int, str | None]:
    """Loads the weights of the run that the config names, if it names one; else they are the folder's already. Returns
    (their step, the checkpoint). A collective."""
    saving = job.cfg.checkpointing
    if not saving.resume_from:
        return 0, None
    checkpoints = checkpoint_folder(saving, Path(saving.resume_from))
    base = hash_of_base(job.cfg, job.inputs, job.ranks)
    state = checkpoint.load(checkpoints, saving, model, None, job.ranks, {}, base)
    return state["step"], f"{checkpoints}, step {state['step']}"


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
            move_to_log(logged, sampler.ranks.bridge)
            yield name, mode, samples
