"""Validation: accuracy on held-out problems, greedy and sampled, over all ranks.

Owns which problems are sampled how, and the names of the numbers. Sampling and grading are rollout.py's.
"""

import time

import config
from inputs import Inputs
from metrics import RunLog, sample_metrics
from rollout import Engine, gather_samples, rollout
from runtime import Ranks


def validate(
    cfg: config.Config, inputs: Inputs, engine: Engine, ranks: Ranks, log: RunLog | None, step: int
) -> dict[str, float]:
    """Greedy (one reply) and sampled (val_num_generations_per_prompt replies) accuracy on the first max_val_samples
    problems. The same seeds every time, so that two validations differ by the weights alone. Ranks share the work."""
    if inputs.validation is None:
        return {}
    start, values = time.perf_counter(), {}
    rows = inputs.validation.rows[: cfg.grpo.max_val_samples]
    mine = [(i, rows[i]) for i in range(ranks.dp_rank, len(rows), ranks.dp_size)]
    modes = {
        "greedy": (0.0, 1),
        "sampled": (cfg.policy.generation.temperature, cfg.grpo.val_num_generations_per_prompt),
    }
    for mode, (temperature, num_samples) in modes.items():
        samples = rollout(
            engine,
            inputs.tokenizer,
            inputs.environments,
            mine,
            num_samples=num_samples,
            temperature=temperature,
            max_new_tokens=cfg.policy.generation.max_new_tokens,
            seed_key=(cfg.grpo.seed, -1),
        )
        samples = gather_samples(samples, ranks)
        found = sample_metrics(samples)
        for name in ("accuracy", "reward", "truncation_rate", "outcome/parse_fail"):
            values[f"validation/{mode}/{name}"] = found[name]
        values[f"validation/{mode}/avg_length"] = found["mean_gen_tokens_per_sample"]
        if log:
            log.samples(step, f"validation/{mode}", samples, inputs.tokenizer, cfg.logger.num_val_samples_to_print)
    values["timing/validation/total_validation_time"] = time.perf_counter() - start
    if log:
        log.validation(step, values)
    return values
