"""`eval.py --serve`: a checkpoint or a Hugging Face folder behind the agents' endpoint, for a benchmark's harness or
any client. The endpoint and the engine are a run's; nothing is trained."""

import sys
from dataclasses import replace
from pathlib import Path

from base.hf.weights import sync_weights
from base.system.exits import Signals
from config import ConfigError
from records import SamplingOptions
from run.build import build, build_endpoint
from run.evaluation import load_scored
from run.job import Job

CONFIG = Path(__file__).with_suffix(".yaml")  # of a model that no run has made
REMEMBERED = 10_000  # newest calls that a conversation can go on from
VALIDATION = 0  # the priority, as all requests are equal


def config_words(model: str) -> list[str]:
    """The command line for a run folder, a Hugging Face folder or hub model, or a config file."""
    if model.endswith((".yaml", ".yml")):
        return [model]
    config = Path(model) / "config.yaml"
    if config.is_file():
        return [str(config), f"checkpointing.resume_from={model}"]
    return [str(CONFIG), f"policy.model_name={model}"]


def serve(job: Job) -> str:
    """Answers requests until a signal asks it to stop; returns why it ended."""
    cfg = job.cfg
    ranks = job.ranks
    if ranks.dp_size > 1:
        needed = f"the ranks of one engine: --nproc_per_node={ranks.tp_size}"
        raise ConfigError(f"--serve with {ranks.world_size} ranks: start {needed}")
    signals = Signals()
    model, sampler = build(cfg, job.inputs, ranks, job.device)
    step, scored = load_scored(job, model)
    engine = sampler.engine
    sync_weights(model, engine, step)
    endpoint = build_endpoint(cfg, job.inputs, ranks, engine, clients_sample=True)
    options = replace(SamplingOptions.of(cfg.policy.generation), max_new_tokens=engine.max_total_tokens)
    key, url = endpoint.open((cfg.grpo.seed,), options, VALIDATION, max_calls=sys.maxsize)
    ranks.print_rank0(f"serving {scored or cfg.policy.model_name} as the model 'policy' at {url}; Ctrl-C ends it")
    while not ranks.any_rank_of_engine(signals.pending()):
        endpoint.before_step()
        engine.step()
        endpoint.rollouts[key].calls = endpoint.rollouts[key].calls[-REMEMBERED:]
    endpoint.shut_down()
    return "told to stop"
