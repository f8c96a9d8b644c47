"""Rewards -> advantages: scaling and shaping, the overlong filter, then the estimator that the config names.

A step calls `shape_rewards`, `filter_overlong` and `step_advantages`, in this order. All tokens of a sample, or of a
turn, share an advantage. All statistics are over the whole step, on any number of ranks. docs/details.md has what
other systems do.

Dims: B samples of a step, P prompts, G samples of a group, M rewards in the baseline of a sample.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import ConfigError, GRPOConfig, LossConfig, RewardScalingConfig, RewardShapingConfig
from records import Sample

Parts = Mapping[str, Tensor]  # name of a part of the reward -> reward_B of that part


class Rewarded(NamedTuple):
    """What has an advantage of its own: a sample, or one of its turns. Tokens are trained ones."""

    prompt: int
    turn: int
    reward: float
    num_tokens: int
    num_tokens_of_sample: int


def shape_rewards(samples: Sequence[Sample], grpo: GRPOConfig, max_new_tokens: int) -> None:
    """Scales rewards, their parts and turns, then shapes rewards by length (NeMo RL's order). In place: call it once.

    `unshaped_reward` keeps the scaled reward. stop_properly_penalty_coef replaces the overlong penalty: it multiplies
    the reward of each truncated sample (NeMo RL), so a negative one moves towards 0. Lengths and their limit count the
    sampled tokens of all turns, end tokens included. max_new_tokens: of a turn.
    """
    scaling = grpo.reward_scaling
    shaping = grpo.reward_shaping
    longest = grpo.max_rollout_turns * max_new_tokens
    for sample in samples:
        grade = sample.grade
        if scaling.enabled:
            grade.reward = scale_reward(grade.reward, scaling)
            grade.rewards = {name: scale_reward(reward, scaling) for name, reward in grade.rewards.items()}
            grade.turn_rewards = [scale_reward(reward, scaling) for reward in grade.turn_rewards]
        grade.unshaped_reward = grade.reward
        if not shaping.enabled:
            continue
        if shaping.stop_properly_penalty_coef is None:
            grade.reward -= overlong_penalty(sample.num_gen_tokens, shaping, longest)
        elif sample.finish_reason == "length":
            grade.reward *= shaping.stop_properly_penalty_coef


def scale_reward(reward: float, cfg: RewardScalingConfig) -> float:
    """Linear from [source_min, source_max] to [target_min, target_max]; a reward outside is clamped first."""
    clamped = min(max(reward, cfg.source_min), cfg.source_max)
    share = (clamped - cfg.source_min) / (cfg.source_max - cfg.source_min)
    return cfg.target_min + share * (cfg.target_max - cfg.target_min)


def overlong_penalty(length: int, cfg: RewardShapingConfig, longest: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13) for `length` tokens: >= 0, to be subtracted.

    0 up to max_response_length - overlong_buffer_length tokens, then linear: overlong_buffer_penalty at
    max_response_length, and more beyond, as in NeMo RL and verl (DAPO and TRL stop there). longest: the limit if
    max_response_length is null; set it where max_total_sequence_length ends conversations sooner. Example: max 20,
    buffer 4, penalty 1: 0 at 16 tokens, 0.25 at 17, 1 at 20, 2 at 24.
    """
    if cfg.max_response_length is not None:
        longest = cfg.max_response_length
    first_penalized = longest - cfg.overlong_buffer_length
    share = max(length - first_penalized, 0) / cfg.overlong_buffer_length
    return cfg.overlong_buffer_penalty * share


def filter_overlong(samples: Sequence[Sample]) -> int:
    """Excludes truncated samples from training, in place; returns their number. Their rewards stay in the baseline."""
    truncated = [sample for sample in samples if sample.finish_reason == "length"]
    for sample in truncated:
        sample.is_filtered = True
    return len(truncated)


def step_advantages(samples: list[Sample], grpo: GRPOConfig, loss_fn: LossConfig) -> tuple[list, dict]:
    """(adv_B, metrics: name -> float) of the shaped samples of a step: equal on all ranks, as the samples are. A sample
    that could not be graded has advantage 0 and is in no statistic; one whose group has no other graded one has 0 too.
    With grpo.turn_level_advantages turns take the place of samples: those of one prompt and number are a group, and
    adv_B has a list of each graded sample, with the advantages of its turns."""
    if grpo.adv_estimator.name == "none":
        return [0.0] * len(samples), {}
    graded = [sample for sample in samples if sample.grade.is_valid]
    rows = []
    for sample in graded:
        if grpo.turn_level_advantages:
            rows += _rows_of_turns(sample)
        else:
            num_tokens = sample.num_trained_tokens
            rows.append(Rewarded(sample.prompt, 0, sample.grade.reward, num_tokens, num_tokens))
    prompt_B, turn_B, reward_B, num_tokens_B, sample_tokens_B = map(torch.tensor, zip(*rows, strict=True))
    group_B = prompt_B * (turn_B.max() + 1) + turn_B
    parts = {}
    if grpo.adv_estimator.name == "gdpo":  # it alone needs the same parts from all environments of a batch
        parts = collect_reward_parts(graded)
    adv_B = estimate_advantages(reward_B, group_B, num_tokens_B, grpo, parts)
    _, place_B, size_of_group = group_B.unique(return_inverse=True, return_counts=True)
    is_alone_B = size_of_group[place_B] == 1
    adv_B[is_alone_B] = 0  # gdpo and reinforce_plus_plus whiten, which moves a 0
    weight_B = num_tokens_B
    if not loss_fn.token_level_loss:
        weight_B = num_tokens_B / sample_tokens_B.clamp(min=1)  # a filtered sample has 0 of both
    metrics = gradient_metrics(adv_B, prompt_B, weight_B)
    metrics |= advantage_metrics(reward_B, group_B, adv_B, grpo)
    advs = iter(adv_B.tolist())
    result = []
    for sample in samples:
        if not sample.grade.is_valid:
            result.append(0.0)
        elif grpo.turn_level_advantages:
            result.append([next(advs) for _ in sample.grade.turn_rewards])
        else:
            result.append(next(advs))
    return result, metrics


def _rows_of_turns(sample: Sample) -> list[Rewarded]:
    num_tokens = {}
    for sequence in sample.sequences:
        num_tokens |= zip(sequence.turns, sequence.turn_tokens, strict=True)
    rows = []
    for turn, reward in enumerate(sample.grade.turn_rewards):
        num_trained = num_tokens[turn] if sample.num_trained_tokens > 0 else 0
        rows.append(Rewarded(sample.prompt, turn, reward, num_trained, sample.num_trained_tokens))
    return rows


def estimate_advantages(
    reward_B: Tensor, group_B: Tensor, num_tokens_B: Tensor, grpo: GRPOConfig, parts: Parts
) -> Tensor:
    """adv_B in reward_B's dtype, by grpo.adv_estimator.name, clipped to [advantage_clip_low, advantage_clip_high].

    reward_B: floating. group_B: the group of each sample, in any order. num_tokens_B: trained tokens of each sample.
    """
    estimator = grpo.adv_estimator
    if estimator.name == "grpo":
        adv_B = _by_group(reward_B, group_B, grpo)
    elif estimator.name == "gdpo":
        adv_B = gdpo_advantages(parts, group_B, grpo)
    elif estimator.name == "reinforce_plus_plus":  # a response counts in proportion to its length (Hu et al. 2025)
        adv_B = reward_B
        if estimator.minus_baseline:
            adv_B = group_advantages(reward_B, group_B, leave_one_out=False, normalize=False)
        adv_B = _whiten(adv_B, num_tokens_B)
    elif estimator.name == "max_rl":
        adv_B = _for_each_group(max_rl_advantages, group_B, reward_B)
    elif estimator.name == "opo":
        adv_B = _for_each_group(opo_advantages, group_B, reward_B, num_tokens_B)
    elif estimator.name == "gpg":
        adv_B = gpg_advantages(reward_B, group_B)
    elif estimator.name == "pkpo":
        adv_B = _for_each_group(partial(pkpo_advantages, pass_k=estimator.pass_k), group_B, reward_B)
    elif estimator.name == "grpo_passk":
        of_group = partial(grpo_passk_advantages, normalize=grpo.normalize_rewards)
        adv_B = _for_each_group(of_group, group_B, reward_B)
    else:
        raise AssertionError(f"grpo.adv_estimator.name={estimator.name}: estimate_advantages has no branch for it")
    return _clip(adv_B.to(reward_B.dtype), grpo)


def _for_each_group(of_group: Callable[..., Tensor], group_B: Tensor, *numbers_B: Tensor) -> Tensor:
    """adv_B, float64: of_group of the rewards of each group, and what else it reads of its samples; 0 in a group of
    one."""
    adv_B = torch.zeros(len(group_B), dtype=torch.float64, device=group_B.device)
    for group in group_B.unique():
        is_in_group_B = group_B == group
        numbers_G = [x_B[is_in_group_B].double() for x_B in numbers_B]
        if len(numbers_G[0]) > 1:
            adv_B[is_in_group_B] = of_group(*numbers_G)
    return adv_B


def group_advantages(
    reward_B: Tensor, group_B: Tensor, *, leave_one_out: bool, normalize: bool, std="baseline", std_floor=0.0
) -> Tensor:
    """Advantage of each sample within its group: A_i = r_i - b_i, divided by a standard deviation if `normalize`.

    b_i is the mean reward of i's group (GRPO, Shao et al. 2024), without r_i if `leave_one_out` (RLOO, Ahmadian et
    al. 2024). Without `normalize`: Dr. GRPO (Liu et al. 2025). Standard deviations have Bessel's correction; `std`:
        baseline  of the rewards in b_i: A_i / (s_i + 1e-6) where s_i > 0 (NeMo RL). s_i = 0 where b_i has fewer than
                  two rewards, or equal ones: such samples stay unnormalized, so that one right answer among wrong
                  ones gets A = 1, not a million.
        group     of the whole group: A_i / (s + 1e-4) (TRL, scale_rewards=group)
        batch     of reward_B, all groups together: A_i / (s + 1e-4) (TRL, scale_rewards=batch; Lite PPO)
    std_floor: a leave-one-out s_i > 0 is at least this times the range of the group's rewards, which bounds |A_i| by
    1 / std_floor: peers may be nearly equal, and far from r_i. 0: no floor (NVIDIA-NeMo/RL#1518).
    reward_B: floating; group_B: groups, in any order. Returns adv_B in reward_B's dtype; it is 0 in a group of one.
    Example: rewards [1, 0, 0, 0] of one group, both options on -> [1, -.577349, -.577349, -.577349].
    """
    assert reward_B.is_floating_point() and reward_B.shape == group_B.shape, (reward_B.dtype, group_B.shape)
    assert std in ("baseline", "group", "batch"), std

    def of_group(reward_G: Tensor) -> Tensor:
        size = len(reward_G)
        baseline_GM = reward_G.expand(size, size)
        if leave_one_out:
            is_peer_GG = ~torch.eye(size, dtype=torch.bool, device=reward_G.device)
            baseline_GM = baseline_GM[is_peer_GG].view(size, size - 1)
        adv_G = reward_G - baseline_GM.mean(1)
        if normalize and std == "group":
            adv_G = adv_G / (reward_G.std() + 1e-4)
        elif normalize and std == "baseline" and baseline_GM.shape[1] > 1:
            std_G = baseline_GM.std(1)  # exactly 0 for equal rewards; sqrt(mean of squares - squared mean) is not
            is_spread_G = std_G > 0
            if leave_one_out:
                std_G = std_G.clamp(min=std_floor * (reward_G.max() - reward_G.min()))
            adv_G = torch.where(is_spread_G, adv_G / (std_G + 1e-6), adv_G)
        return adv_G

    adv_B = _for_each_group(of_group, group_B, reward_B)
    if normalize and std == "batch" and len(reward_B) > 1:
        adv_B /= reward_B.double().std() + 1e-4
    return adv_B.to(reward_B.dtype)


def _by_group(reward_B: Tensor, group_B: Tensor, grpo: GRPOConfig) -> Tensor:
    return group_advantages(
        reward_B,
        group_B,
        leave_one_out=grpo.use_leave_one_out_baseline,
        normalize=grpo.normalize_rewards,
        std=grpo.reward_std,
        std_floor=grpo.reward_std_floor,
    )


def max_rl_advantages(reward_G: Tensor) -> Tensor:
    """(r - mean) / mean, as in prime-rl's MaxRL: a problem that is seldom solved weighs more. For rewards
    of at least 0; a group whose mean is not above 0 has advantage 0.

    Example: rewards [1, 0, 0, 0] -> [3, -1, -1, -1]."""
    mean = reward_G.mean()
    return (reward_G - mean) / mean if mean > 0 else torch.zeros_like(reward_G)


def opo_advantages(reward_G: Tensor, length_G: Tensor) -> Tensor:
    """The reward minus the group's mean weighted by length, the baseline of least variance if the gradient's square
    grows with the length (OPO, Hao et al. 2025; verl). length_G: trained tokens of each sample.

    Example: rewards [1, 0], lengths [1, 3] -> [.75, -.25]."""
    return reward_G - (length_G * reward_G).sum() / length_G.sum().clamp(min=1)


def gpg_advantages(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """The reward minus the group's mean, times (samples / samples with a nonzero reward) of the whole step (GPG, Chu et
    al. 2025; verl). So a step with few rewarded samples moves the weights as far as any."""
    adv_B = group_advantages(reward_B, group_B, leave_one_out=False, normalize=False)
    num_rewarded = int((reward_B != 0).sum())
    return adv_B * (len(reward_B) / max(num_rewarded, 1))


def pkpo_advantages(reward_G: Tensor, pass_k: int) -> Tensor:
    """The gradient of pass@k, or of the best of k rewards: k times the mean, over the group's subsets of k samples that
    contain the sample, of what it adds to the best reward of the others.

    This is n s of PKPO for a group of n (Walder and Karkhanis 2025, eq. 33, s^(loo-1)): the paper adds up the gradients
    of a group's samples, the loss here averages them. A group of fewer than k samples is one subset. Best of nothing is
    not defined: pass_k >= 2.

    Example: pass_k 2, rewards [1, 0, 0, 0] -> [2, 0, 0, 0]; [1, 1, 0, 0] -> [4/3, 4/3, 0, 0], as in a third of the
    pairs the other sample is right, too."""
    assert pass_k >= 2, pass_k
    size = len(reward_G)
    k = min(pass_k, size)
    # The number of subsets in which the reward of this rank, from the lowest, is the best of the others.
    num_subsets = [math.comb(rank, k - 2) for rank in range(size)]
    share_G = [number / math.comb(size - 1, k - 1) for number in num_subsets]
    gain_GG = (reward_G[:, None] - reward_G.sort().values).clamp(min=0)
    return k * gain_GG @ reward_G.new_tensor(share_G)


def grpo_passk_advantages(reward_G: Tensor, normalize: bool) -> Tensor:
    """For the best sample of a group what it adds to the second best reward, for all others 0 (Tang et al. 2025, verl):
    `pkpo_advantages` of pass@n for a group of n, divided by n. If `normalize`, it is divided by the group's standard
    deviation, plus 1e-6.

    Example: rewards [1, 0, 0, 0] -> [1, 0, 0, 0], normalized [2, 0, 0, 0]; [1, 1, 0, 0] -> 0."""
    second, best = reward_G.sort().values[-2:]
    gain = best - second
    if normalize:
        gain = gain / (reward_G.std() + 1e-6)
    return torch.where(reward_G == best, gain, 0.0)


def gdpo_advantages(parts: Parts, group_B: Tensor, grpo: GRPOConfig) -> Tensor:
    """GDPO (Liu et al. 2026): `group_advantages` of each part, their weighted sum, whitened over the batch.

    Normalized, parts count by their weights, not their spread. reward_weights follow the alphabetical order of names.
    Whitening is (x - mean) / std with Bessel's correction, or x - mean where all are equal (NeMo RL).
    """
    names = sorted(parts)
    weights = grpo.adv_estimator.reward_weights or [1.0] * len(names)
    total_B = torch.zeros(len(group_B), dtype=torch.float64)
    for name, weight in zip(names, weights, strict=True):
        total_B += weight * _by_group(parts[name].double(), group_B, grpo)
    total_B -= total_B.mean()
    std = total_B.std()
    if std > 0:
        total_B /= std
    return total_B


def collect_reward_parts(samples: Sequence[Sample]) -> Parts:
    """The parts of the rewards, for gdpo. ConfigError if a sample lacks a part, or if there are fewer than two."""
    names = sorted({name for sample in samples for name in sample.grade.rewards})
    for sample in samples:
        if len(names) < 2 or len(sample.grade.rewards) < len(names):
            raise ConfigError(
                f"env_name '{sample.env_name}': StepResult.rewards has {sorted(sample.grade.rewards)}; with "
                f"grpo.adv_estimator.name=gdpo every sample needs the same rewards, at least two; seen: {names}"
            )
    parts = {}
    for name in names:
        parts[name] = torch.tensor([sample.grade.rewards[name] for sample in samples])
    return parts


def rewards_differ(rewards: Iterable[float]) -> bool:
    """Whether rewards differ for the advantages, which read them as float32. 0.6 and 0.6000000000000001 do not: they
    are one sum, rounded in two orders (huggingface/trl#6681)."""
    distinct = set(np.float32([*rewards]).tolist())
    return len(distinct) > 1


def is_mixed(group: Sequence[Sample], by_turn: bool = False) -> bool:
    """Whether rewards before shaping differ: lengths alone must not keep an all-wrong group (NVIDIA-NeMo/RL#2478).
    by_turn: within a turn."""
    grades = [sample.grade for sample in group if sample.grade.is_valid]
    if not by_turn:
        return rewards_differ(grade.unshaped_reward for grade in grades)
    for rewards in zip_longest(*(grade.turn_rewards for grade in grades)):
        if rewards_differ(reward for reward in rewards if reward is not None):
            return True
    return False


def advantage_metrics(reward_B: Tensor, group_B: Tensor, adv_B: Tensor, grpo: GRPOConfig) -> dict[str, float]:
    """advantages/{mean, max, min, sum}, and baseline_reward/{pct_0, pct_1, pct_mixed}: percentage of samples whose
    baseline is 0, 1 or another number (NeMo RL): their peers got the problem all wrong, all right, or some of each."""
    loo = grpo.use_leave_one_out_baseline
    baseline_B = reward_B - group_advantages(reward_B, group_B, leave_one_out=loo, normalize=False)
    percent_0 = (baseline_B == 0).float().mean().item() * 100
    percent_1 = (baseline_B == 1).float().mean().item() * 100
    return {
        "baseline_reward/pct_0": percent_0,
        "baseline_reward/pct_1": percent_1,
        "baseline_reward/pct_mixed": 100 - percent_0 - percent_1,
        "advantages/mean": adv_B.mean().item(),
        "advantages/max": adv_B.max().item(),
        "advantages/min": adv_B.min().item(),
        "advantages/sum": adv_B.sum().item(),
    }


def gradient_metrics(adv_B: Tensor, prompt_B: Tensor, weight_B: Tensor) -> dict[str, float]:
    """advantage_abs_max; how many groups have a part of the gradient, and the share of the group with the largest part,
    if every token's gradient had the same norm. weight_B: trained tokens if the loss is a mean over tokens, else a
    turn's share of its sample's tokens."""
    abs_adv_B = adv_B.abs()
    part_P = torch.zeros(1 + int(prompt_B.max()), dtype=torch.float32)
    part_P.index_add_(0, prompt_B, (abs_adv_B * weight_B).float())
    largest_share = part_P.max() / part_P.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "gradient/num_groups": part_P.count_nonzero().item(),
        "gradient/largest_group_share": largest_share.item(),
        "advantage_abs_max": abs_adv_B.max().item(),
    }


def _whiten(x: Tensor, weight: Tensor) -> Tensor:
    """(x - mean) / sqrt(max(variance, 1e-8)), both weighted and without Bessel's correction (NeMo RL)."""
    weight = weight.double()
    total = weight.sum().clamp(min=1)
    mean = (weight * x.double()).sum() / total
    centered = x.double() - mean
    variance = (weight * centered.square()).sum() / total
    whitened = centered * variance.clamp(min=1e-8).rsqrt()
    return whitened.to(x.dtype)


def _clip(adv: Tensor, grpo: GRPOConfig) -> Tensor:
    low = grpo.advantage_clip_low
    high = grpo.advantage_clip_high
    if low is None and high is None:
        return adv
    return adv.clamp(low, high)
