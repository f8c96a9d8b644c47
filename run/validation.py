"""Scores a model on the validation sets. Its numbers are made in metrics.py: `summarize`."""

import time
from collections import defaultdict
from collections.abc import Iterator

from base.inputs.run_inputs import RunInputs
from base.system.exchange import move_to_log
from base.system.progress import Progress
from config import Config
from metrics import summarize
from records import Sample, SamplingOptions, groups_of
from rollout import Sampler
from run.job import Run


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
