"""What eval.py does: scores a model on the validation sets, and writes the numbers into a file."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from base.hf.weights import sync_weights
from base.inputs.checkpoints import checkpoint_folder
from base.system.disk import write_whole
from metrics import summarize
from model import Decoder
from records import groups_of
from run import restore
from run.build import build, hash_of_base
from run.job import Job
from run.log import RunLog, shown
from run.validation import modes, sample_sets


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
    state = restore.load(checkpoints, saving, model, None, job.ranks, {}, base)
    return state["step"], f"{checkpoints}, step {state['step']}"
