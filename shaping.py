"""Rewards between the grader and the advantages: scaled, shaped by length; truncated samples left out of the loss.

Order: scale, then shape (NeMo RL). `Sample.unshaped_reward` keeps the scaled reward: what the answer is worth, whatever
its length. Dynamic sampling goes by it, and metrics show both. Pure Python over `data.Sample`s.
"""

from collections.abc import Sequence

import numpy as np

from config import GRPOConfig, RewardScalingConfig, RewardShapingConfig
from data import Sample


def shape_rewards(samples: Sequence[Sample], grpo: GRPOConfig, max_new_tokens: int) -> None:
    """Grader's rewards -> the rewards to train on, in place; once per sample.

    Scaling covers the parts in `rewards` too; shaping the one `reward`. stop_properly_penalty_coef takes the place of
    the overlong penalty for all samples (NeMo RL): rewards of truncated ones are multiplied by it, so a negative one
    shrinks. Lengths count all tokens the policy sampled, the end token included; NeMo RL's those of the first turn.
    """
    scaling, shaping = grpo.reward_scaling, grpo.reward_shaping
    for sample in samples:
        if scaling.enabled:
            sample.reward = scale(sample.reward, scaling)
            sample.rewards = {name: scale(reward, scaling) for name, reward in sample.rewards.items()}
        sample.unshaped_reward = sample.reward
        if shaping.enabled and shaping.stop_properly_penalty_coef is None:
            sample.reward -= overlong_penalty(sample.num_gen_tokens, shaping, max_new_tokens)
        elif shaping.enabled and sample.finish_reason == "length":
            sample.reward *= shaping.stop_properly_penalty_coef


def scale(reward: float, cfg: RewardScalingConfig) -> float:
    """Linear from [source_min, source_max] to [target_min, target_max]; rewards outside are clamped first."""
    share = (min(max(reward, cfg.source_min), cfg.source_max) - cfg.source_min) / (cfg.source_max - cfg.source_min)
    return cfg.target_min + share * (cfg.target_max - cfg.target_min)


def overlong_penalty(length: int, cfg: RewardShapingConfig, max_new_tokens: int) -> float:
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13) of a response of `length` tokens: >= 0, to be subtracted.

    0 until max_response_length - overlong_buffer_length, then linear: overlong_buffer_penalty at max_response_length.
    Past it DAPO has -1 for all; NeMo RL and verl go on along the line, TRL stays: floor_overlong_penalty.
    Example: max 20, buffer 4, penalty 1: 0 at 16 tokens, .25 at 17, 1 at 20, 2 at 24 (1 with the floor).
    """
    longest = max_new_tokens if cfg.max_response_length is None else cfg.max_response_length
    share = max(length - (longest - cfg.overlong_buffer_length), 0) / cfg.overlong_buffer_length
    return cfg.overlong_buffer_penalty * (min(share, 1.0) if cfg.floor_overlong_penalty else share)


def filter_overlong(samples: Sequence[Sample]) -> int:
    """Clears the mask of truncated samples, in place, and counts them. No token of theirs is trained on or counted in a
    denominator; their reward stays in the baseline of their group (NeMo RL)."""
    truncated = [sample for sample in samples if sample.finish_reason == "length"]
    for sample in truncated:
        sample.mask = np.zeros_like(sample.mask)
    return len(truncated)
