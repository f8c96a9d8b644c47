"""The numbers of a step, of its samples and of its loss, and how they are reduced over micro-batches and ranks; and
those of a validation: accuracy, pass@k and maj@k, with intervals.

loss.py has the reduction rule. Never a mean of means (huggingface/trl#6380).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pvariance

import numpy as np
import torch
import torch.distributed as dist

from advantages import rewards_differ
from envs import OUTCOMES
from head import DEVIATION
from loss import Extreme, Max, Metric, Metrics, Min
from pack import Minibatch
from records import Sample, groups_of

Numbers = dict[str, float]  # a metric's name -> its value
Z95 = 1.959964  # 97.5% of a normal distribution lie below


def total_of(parts: Iterable[Metrics]) -> Metrics:
    """The metrics of all parts, such as micro-batches, by the reduction rule; no device sync."""
    total: Metrics = {}
    for part in parts:
        for name, value in part.items():
            total[name] = _added(total[name], value) if name in total else value
    return total


def _added(value: Metric, other: Metric) -> Metric:
    if isinstance(value, tuple):
        value_sum, value_count = value
        other_sum, other_count = other
        return value_sum + other_sum, value_count + other_count
    if isinstance(value, Min):
        return Min(torch.minimum(value.value, other.value))
    if isinstance(value, Max):
        return Max(torch.maximum(value.value, other.value))
    return value + other


def reduce_over_ranks(total: Metrics, *, divide_sums_by: int = 1) -> Numbers:
    """The numbers of the step, equal on every rank. A collective; all ranks pass the same names.

    `divide_sums_by`: the optimizer steps over which plain sums are averaged.
    """
    if not total:
        return {}
    names = sorted(total)  # packs may give their metrics in another order
    # Of a pair its sum and its count, of any other metric its value and a 0, so that one gather serves all.
    numbers = []
    for name in names:
        value = total[name]
        if isinstance(value, tuple):
            numbers += value
        elif isinstance(value, Extreme):
            numbers += [value.value, 0]
        else:
            numbers += [value, 0]
    local = torch.stack([torch.as_tensor(number).detach().double() for number in numbers]).cpu()  # one copy for all
    # Gathered and then combined: the MIN and MAX of gloo's all_reduce lose a NaN of any rank but the first.
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    of_ranks = torch.stack(gathered).unflatten(1, (len(names), 2))
    sums, counts = of_ranks.sum(0).unbind(1)
    lowest = of_ranks.amin(0)[:, 0]
    highest = of_ranks.amax(0)[:, 0]
    reduced = {}
    columns = zip(names, sums.tolist(), counts.tolist(), lowest.tolist(), highest.tolist(), strict=True)
    for name, summed, count, low, high in columns:
        value = total[name]
        if isinstance(value, tuple):
            reduced[name] = summed / count if count else math.nan
        elif isinstance(value, Min):
            reduced[name] = low
        elif isinstance(value, Max):
            reduced[name] = high
        else:
            reduced[name] = summed / divide_sums_by
    return reduced


def derived_metrics(metrics: Numbers) -> Numbers:
    """The reduced metrics with effective_sample_size in place of importance_weight_square.

    It is that of the sampler weights (Kish 1965): (sum w)^2 / (n sum w^2), from 1/n (one weight dominates) to 1 (all
    equal), over n tokens, or over n sequences if each sequence has one weight.
    """
    metrics = dict(metrics)
    if "importance_weight_square" in metrics:
        mean, square = metrics["importance_weight_mean"], metrics.pop("importance_weight_square")
        metrics["effective_sample_size"] = mean**2 / square if square else math.nan
    return metrics


def sample_metrics(generated: Sequence[Sample], trained: Sequence[Sample]) -> Numbers:
    """Numbers of the samples of a step, of all ranks. Dynamic sampling keeps `trained` of the `generated` samples.

    Names are NeMo RL's where it has one. Means are over all generated samples, because those show the policy; only
    filtered_reward and total_num_tokens are over `trained`. zero_variance_fraction counts groups by the rewards that
    the advantages see, unshaped_zero_variance_fraction by the rewards before shaping.
    """
    graded_groups = [[s.grade for s in group if s.grade.is_valid] for group in groups_of(generated)]
    are_equal = [not rewards_differ(grade.reward for grade in group) for group in graded_groups]
    are_equal_unshaped = [not rewards_differ(grade.unshaped_reward for grade in group) for group in graded_groups]
    metrics = {
        "reward": _mean(s.grade.reward for s in generated),
        "filtered_reward": _mean(s.grade.reward for s in trained),
        "unshaped_reward": _mean(s.grade.unshaped_reward for s in generated),
        "accuracy": _mean(s.grade.outcome == "ok" for s in generated),
    }
    for name in OUTCOMES[1:]:
        metrics[f"outcome/{name}"] = _mean(s.grade.outcome == name for s in generated)
    metrics["zero_variance_fraction"] = _mean(are_equal)
    metrics["unshaped_zero_variance_fraction"] = _mean(are_equal_unshaped)
    tokens_E = np.bincount([s.engine for s in generated], [s.num_gen_tokens for s in generated]).tolist()
    if len(tokens_E) > 1:
        metrics["idle_engine_fraction"] = 1 - _mean(tokens_E) / max(tokens_E)
    metrics |= _by_label(generated)
    metrics |= _lengths(generated)
    metrics["total_num_tokens"] = sum(s.num_tokens for s in trained)
    metrics["truncation_rate"] = _mean(s.finish_reason == "length" for s in generated)
    metrics["natural_termination_rate"] = _mean(s.finish_reason == "stop" for s in generated)
    metrics["max_turns_reached_rate"] = _mean(s.finish_reason == "max_turns" for s in generated)
    return metrics


def _lengths(samples: Sequence[Sample]) -> Numbers:
    """Tokens and turns."""
    tokens_B = [s.num_gen_tokens for s in samples]
    turns_B = [s.num_turns for s in samples]
    return {
        "mean_prompt_length": _mean(len(s.sequence.prompt_ids) for s in samples),
        "mean_gen_tokens_per_sample": _mean(tokens_B),
        "min_gen_tokens_per_sample": min(tokens_B),
        "max_gen_tokens_per_sample": max(tokens_B),
        "mean_env_tokens_per_sample": _mean(s.num_env_tokens for s in samples),
        "mean_total_tokens_per_sample": _mean(s.num_tokens for s in samples),
        "total_gen_tokens": sum(tokens_B),
        "total_turns": sum(turns_B),
        "avg_turns_per_sample": _mean(turns_B),
        "max_turns_per_sample": max(turns_B),
    }


def training_metrics(sums_of_steps: Sequence[Metrics], minibatches: list[Minibatch]) -> Numbers:
    """The loss metrics of a step, equal on all ranks, from those of its optimizer steps: means over the tokens of all
    of them; sums (loss, counts) are averaged over them."""
    sums = total_of(sums_of_steps)
    del sums[DEVIATION]  # judge_step has read it
    metrics = derived_metrics(reduce_over_ranks(sums, divide_sums_by=len(sums_of_steps)))
    metrics["num_optimizer_steps"] = len(sums_of_steps)
    metrics["train_tokens"] = sum(minibatch.num_input_tokens for minibatch in minibatches)
    metrics["global_valid_toks"] = sum(minibatch.num_tokens for minibatch in minibatches)
    metrics["global_valid_seqs"] = sum(minibatch.num_trained_samples for minibatch in minibatches)
    return metrics


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _by_label(samples: Sequence[Sample]) -> Numbers:
    """Mean reward of the samples of each environment, dataset, finish reason and length (in powers of two, such as
    "000017-000032"). For each environment also the number of samples, the share of each outcome (`ok` is the accuracy),
    and of each part of the graded rewards mean, deviation and the share that is not 0. A label that no sample has in
    this step is absent."""
    by_label: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_label["env", sample.env_name].append(sample)
        by_label["dataset", sample.dataset].append(sample)
        by_label["finish_reason", sample.finish_reason].append(sample)
        by_label["gen_tokens", _length_label(sample.num_gen_tokens)].append(sample)
    values: Numbers = {}
    for category, label in sorted(by_label):
        group = by_label[category, label]
        if label:
            values[f"reward_by_{category}/{label}"] = _mean(s.grade.reward for s in group)
        if category == "env":
            values |= _of_environment(label, group)
    return values


def _length_label(num_tokens: int) -> str:
    """The bin of a length: above half a power of two, up to that power."""
    high = 1 << max(num_tokens - 1, 0).bit_length()
    low = high // 2 + 1 if high > 1 else 0
    return f"{low:06d}-{high:06d}"


def _of_environment(name: str, samples: Sequence[Sample]) -> Numbers:
    values: Numbers = {f"num_samples_by_env/{name}": len(samples)}
    for outcome in OUTCOMES:
        num = sum(s.grade.outcome == outcome for s in samples)
        values[f"outcome_by_env/{name}/{outcome}"] = num / len(samples)
    graded = [s.grade.rewards for s in samples if s.grade.is_valid]
    for part in sorted(set().union(*graded)):
        x = [rewards[part] for rewards in graded if part in rewards]
        prefix = f"reward_part_by_env/{name}/{part}"
        values[f"{prefix}/mean"] = float(np.mean(x))
        values[f"{prefix}/std"] = float(np.std(x))
        values[f"{prefix}/nonzero"] = np.count_nonzero(x) / len(x)
    return values


# ------------------------------------------------------------------------------------------ the numbers of a validation


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
