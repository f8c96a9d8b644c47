"""Validation: accuracy, pass@k and maj@k on held-out problems, greedy and sampled, over all ranks.

Owns which problems are sampled how, the estimators, and the names of the numbers: `validation/<mode>/...`, with several
sets `validation/<set>/<mode>/...`. eval.py scores with the same functions. Sampling and grading are rollout.py's.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import config
from data import Sample
from rollout import Engine, rollout_over_ranks
from run.log import RunLog
from run.preflight import RunInputs
from sampling import groups_of
from system.ranks import Ranks

Z95 = 1.959964  # 97.5% of a normal distribution lie below


def validate(
    cfg: config.Config, inputs: RunInputs, engine: Engine, ranks: Ranks, log: RunLog | None, step: int
) -> dict[str, float]:
    """Scores every validation set in every mode; logs and returns the numbers. {} when there is no set."""
    if not inputs.validation:
        return {}
    start, values = time.perf_counter(), {}
    for name in inputs.validation:
        for mode in modes(cfg):
            samples = sample_problems(cfg, inputs, engine, ranks, name, mode)
            prefix = f"validation/{name}/{mode}" if len(inputs.validation) > 1 else f"validation/{mode}"
            values |= {f"{prefix}/{key}": value for key, value in score(samples).items()}
            if log:
                log.samples(step, prefix, samples, inputs.tokenizer, cfg.logger.num_val_samples_to_print)
    values["timing/validation/total_validation_time"] = time.perf_counter() - start
    if log:
        log.validation(step, values)
    return values


def modes(cfg: config.Config) -> dict[str, dict[str, Any]]:
    """Name -> options of `rollout`. Greedy: one reply. Sampled: val_num_generations_per_prompt, by the val_ options."""
    grpo, generation = cfg.grpo, cfg.policy.generation
    length = {"max_new_tokens": grpo.val_max_new_tokens or generation.max_new_tokens}
    sampled = {
        "num_samples": grpo.val_num_generations_per_prompt,
        "temperature": grpo.val_temperature or generation.temperature,
        "top_p": grpo.val_top_p or 1.0,
        "top_k": grpo.val_top_k,
    }
    return {"greedy": {"num_samples": 1, "temperature": 0.0} | length, "sampled": sampled | length}


def sample_problems(
    cfg: config.Config, inputs: RunInputs, engine: Engine, ranks: Ranks, name: str, mode: str
) -> list[Sample]:
    """Graded samples of the first max_val_samples problems of set `name`, on every rank; the ranks share the work. The
    same seeds every time, so that two validations differ by the weights alone."""
    problems = list(enumerate(inputs.validation[name].problems[: cfg.grpo.max_val_samples]))
    how = modes(cfg)[mode] | {"seed_key": (cfg.grpo.seed, -1), "max_turns": cfg.grpo.max_rollout_turns}
    how["max_error_fraction"] = cfg.env.max_error_fraction
    return rollout_over_ranks(engine, inputs.tokenizer, inputs.environments, problems, ranks=ranks, **how)


def score(samples: Sequence[Sample]) -> dict[str, float]:
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

    Votes go by `extracted`; samples without an answer do not vote, and 0 if none has one. Tie: each leading answer
    counts alike, as if one were drawn; a function of the votes, not of their order. maj@k is this over the first k
    samples of each problem, which is unbiased because samples are independent.
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
