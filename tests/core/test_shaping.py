"""shaping.py: NeMo RL's numbers, the other systems' by option, and which samples are left out of the loss."""

import numpy as np
import pytest

from config import GRPOConfig, RewardScalingConfig, RewardShapingConfig
from data import Sample
from shaping import filter_overlong, overlong_penalty, scale, shape_rewards

OVERLONG = {"enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 1.0, "max_response_length": 20}


def sample(length, reward=1.0, *, finish_reason="stop", num_env_tokens=0, rewards=None):
    zeros = np.zeros(length)
    found = Sample(0, 0, 0, [5] * 100, zeros.astype(np.int32), zeros.astype(np.float32), zeros == 0, finish_reason, 0)
    found.reward, found.num_env_tokens, found.rewards = reward, num_env_tokens, rewards or {}
    return found


def shaped(samples, max_new_tokens=99, scaling=None, **shaping):
    grpo = GRPOConfig(reward_scaling=scaling or RewardScalingConfig(), reward_shaping=RewardShapingConfig(**shaping))
    shape_rewards(samples, grpo, max_new_tokens)
    return [s.reward for s in samples]


GOLDEN = {16: 1, 17: 0.75, 18: 0.5, 20: 0, 24: -1}  # peers.md 2.9, of NeMo RL's code


def test_overlong_penalty_is_nemo_rls():
    assert shaped([sample(length) for length in GOLDEN], **OVERLONG) == list(GOLDEN.values())
    assert shaped([sample(1), sample(15)], **OVERLONG) == [1, 1]


def test_floored_as_trl():
    lengths = (16, 17, 20, 21, 24, 400)
    floored = shaped([sample(length) for length in lengths], floor_overlong_penalty=True, **OVERLONG)
    assert floored == [1, 0.75, 0, 0, 0, 0]


def test_penalty_scales_and_the_longest_response_is_that_of_the_engine():
    cfg = RewardShapingConfig(enabled=True, overlong_buffer_length=10, overlong_buffer_penalty=0.3)
    assert [overlong_penalty(length, cfg, 50) for length in (40, 45, 50, 60)] == pytest.approx([0, 0.15, 0.3, 0.6])
    assert overlong_penalty(45, cfg, 99) == 0


def test_lengths_are_the_policys_own_tokens():
    """Neither the prompt's nor the environment's, whatever the mask says."""
    long = sample(24, num_env_tokens=6)
    long.mask[:] = False
    assert shaped([long], **OVERLONG) == [GOLDEN[18]]


def test_stop_properly_takes_the_place_of_the_penalty():
    samples = [sample(24, 0.8), sample(24, 0.8, finish_reason="length"), sample(24, -1.0, finish_reason="length")]
    assert shaped(samples, stop_properly_penalty_coef=0.25, **OVERLONG) == [0.8, 0.2, -0.25]
    assert shaped([sample(4, 0.8, finish_reason="length")], stop_properly_penalty_coef=0, **OVERLONG) == [0]


def test_scaling_by_hand():
    cfg = RewardScalingConfig(enabled=True, source_min=-1, source_max=3, target_min=10, target_max=20)
    assert [scale(reward, cfg) for reward in (-5, -1, 0, 1, 3, 8)] == [10, 10, 12.5, 15, 20, 20]


def test_scale_comes_first_and_its_result_is_kept():
    """Reward 1 becomes 5, less the penalty .5: 4.5. The other order would scale .5 to 4."""
    scaling = RewardScalingConfig(enabled=True, target_min=3, target_max=5)
    graded = sample(18, rewards={"format": 0.5, "answer": 7})
    assert shaped([graded], scaling=scaling, **OVERLONG) == [4.5]
    assert (graded.unshaped_reward, graded.rewards) == (5, {"format": 4, "answer": 5})


def test_disabled_is_nothing():
    samples = [sample(30, 7.0, finish_reason="length", rewards={"a": 9})]
    assert shaped(samples, **OVERLONG | {"enabled": False}, stop_properly_penalty_coef=0.5) == [7]
    assert samples[0].unshaped_reward == 7 and samples[0].rewards == {"a": 9}


def test_overlong_filtering_masks_and_keeps_the_reward():
    shared = np.ones(8, bool)
    samples = [sample(8), sample(8, finish_reason="length"), sample(8)]
    for s in samples:
        s.mask = shared
    assert filter_overlong(samples) == 1
    assert [int(s.mask.sum()) for s in samples] == [8, 0, 8] and samples[1].mask.dtype == bool
    assert [s.reward for s in samples] == [1, 1, 1] and samples[1].num_gen_tokens == 8
