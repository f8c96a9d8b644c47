"""metrics.py: reduction over micro-batches and ranks, and the numbers of a step's samples by hand."""

import math
from dataclasses import replace

import pytest
import torch
from ranks import ranks
from samples import sample, with_grade, with_tokens

from base.system.ranks import start_process_group
from loss import Max, Min
from metrics import reduce_over_ranks, sample_metrics, total_of

NAN, INF = float("nan"), float("inf")


def scalar(value):
    return torch.tensor(float(value))


MICRO_BATCHES = [  # a micro-batch a row, the third without a token, which two ranks share unevenly below
    {"loss": scalar(0.5), "ratio": (scalar(6), scalar(3)), "low": Min(scalar(0.9)), "high": Max(scalar(1.1))},
    {"loss": scalar(-2), "ratio": (scalar(1), scalar(1)), "low": Min(scalar(0.7)), "high": Max(scalar(1.0))},
    {"loss": scalar(4), "ratio": (scalar(0), scalar(0)), "low": Min(scalar(INF)), "high": Max(scalar(-INF))},
    {"loss": scalar(1), "ratio": (scalar(5), scalar(4)), "low": Min(scalar(0.8)), "high": Max(scalar(1.3))},
]
# 12 / 8, not the mean of 2, 1 and 1.25; in float32, as the micro-batches are
REDUCED = {"loss": 3.5, "ratio": 1.5, "low": float(scalar(0.7)), "high": float(scalar(1.3))}
EMPTY = {"mean": (scalar(0), scalar(0)), "n": torch.tensor(3)}


def test_one_rank_by_hand(one_rank):
    assert reduce_over_ranks(total_of(MICRO_BATCHES)) == REDUCED
    assert reduce_over_ranks({}) == {}
    empty = reduce_over_ranks(EMPTY)
    assert math.isnan(empty["mean"]) and empty["n"] == 3  # no token: no mean, rather than 0


def test_accumulate_leaves_the_micro_batches_as_they_are():
    before = MICRO_BATCHES[0]["loss"].clone(), MICRO_BATCHES[0]["ratio"][0].clone()
    total_of(MICRO_BATCHES)
    assert (MICRO_BATCHES[0]["loss"], MICRO_BATCHES[0]["ratio"][0]) == before


@pytest.mark.slow
@ranks(2)
def test_two_ranks_equal_one_and_every_nan_stays_visible():
    rank = start_process_group(tp_size=1)[0].rank
    total = total_of(MICRO_BATCHES[:1] if rank == 0 else MICRO_BATCHES[1:])
    assert reduce_over_ranks(total) == REDUCED
    assert reduce_over_ranks(dict(reversed(total.items())) if rank else total) == REDUCED  # names in another order
    for bad in range(2):
        value = scalar(NAN if rank == bad else 1)
        names = {"pair": (value, scalar(1)), "sum": value, "low": Min(value), "high": Max(value), "fine": scalar(1)}
        values = reduce_over_ranks(names)
        assert values.pop("fine") == 2 and all(map(math.isnan, values.values())), (rank, bad, values)
    # One rank without a token: the mean of the other rank stands.
    zero = reduce_over_ranks({"mean": (scalar(3 * rank), scalar(2 * rank)), "none": (scalar(0), scalar(0))})
    assert zero["mean"] == 1.5 and math.isnan(zero["none"])


SAMPLES = [
    sample(0, 1.0, "ok", 2),
    sample(0, 1.0, "ok", 4),
    sample(1, 0.0, "wrong", 6, unsampled=4),
    sample(1, 0.0, "parse_fail", 8, finish_reason="length"),
    sample(2, 1.0, "ok", 1, finish_reason="max_turns", num_turns=4),
    sample(2, 0.0, "timeout", 3),
    sample(3, 0.5, "ok", 1),  # no variance, neither all right nor all wrong
    sample(3, 0.5, "error", 1),
]


def test_numbers_of_a_step_by_hand():
    """tests/core/test_metrics_page.py computes those that docs/metrics.md has a formula of."""
    by_hand = {
        "reward": 0.5,
        "filtered_reward": 0.5,
        "accuracy": 0.5,
        "outcome/wrong": 0.125,
        "outcome/parse_fail": 0.125,
        "outcome/timeout": 0.125,
        "outcome/error": 0.125,
        "reward_by_env/games": 1 / 3,
        "reward_by_env/math": 1.0,
        "reward_by_dataset/a": 1.0,  # the others' has no name
        "num_samples_by_env/games": 6,
        "outcome_by_env/games/ok": 1 / 3,
        **{f"outcome_by_env/games/{name}": 1 / 6 for name in ("wrong", "parse_fail", "timeout", "error")},
        "num_samples_by_env/math": 2,
        "outcome_by_env/math/ok": 1.0,
        **{f"outcome_by_env/math/{name}": 0.0 for name in ("wrong", "parse_fail", "timeout", "error")},
        "reward_by_finish_reason/length": 0.0,
        "reward_by_finish_reason/max_turns": 1.0,
        "reward_by_finish_reason/stop": 0.5,
        "reward_by_gen_tokens/000000-000001": 2 / 3,
        "reward_by_gen_tokens/000002-000002": 0.5,  # of the 6 ids of one, 4 are the environment's
        "reward_by_gen_tokens/000003-000004": 0.5,
        "reward_by_gen_tokens/000005-000008": 0.0,
        "mean_gen_tokens_per_sample": 22 / 8,  # 4 of the 26 were not sampled
        "total_gen_tokens": 22,
        "total_num_tokens": 20,  # of the 4 that are trained on
    }
    found = sample_metrics(SAMPLES, SAMPLES[4:])
    assert {name: found[name] for name in by_hand} == by_hand


def test_r9_tokens_of_all_sequences_of_a_rollout_count():
    """SkyRL#1351: two sequences of 10 + 20 and 30 + 40 tokens, of which 5 and 10 are results of tools."""
    rollout = sample(0, 1.0, "ok", 20, unsampled=5)
    other = sample(0, 1.0, "ok", 40, unsampled=10)
    rollout.sequence.prompt_ids, other.sequence.prompt_ids = [1] * 10, [1] * 30
    rollout.sequences += other.sequences
    found = sample_metrics([rollout], [rollout])
    names = ("total_num_tokens", "mean_total_tokens_per_sample", "mean_env_tokens_per_sample", "total_gen_tokens")
    assert [found[name] for name in names] == [100, 100, 15, 45]


def test_each_part_of_a_reward_is_a_metric_of_its_environment():
    """TRL#5352, NeMo-RL#2681. Of samples that could be graded; of a part that only some have, of those."""
    parts = [{"a": 1.0, "b": 0.0}, {"a": 3.0}, {"b": 2.0}, {"b": 0.0}, {"b": 4.0}, {}, {}, {"b": 9.0, "c": 1.0}]
    samples = [with_grade(s, rewards=rewards) for s, rewards in zip(SAMPLES, parts, strict=True)]
    found = {k: x for k, x in sample_metrics(samples, samples).items() if k not in sample_metrics(SAMPLES, SAMPLES)}
    prefix = "reward_part_by_env"
    assert found == pytest.approx(
        {
            **{f"{prefix}/math/a/{key}": x for key, x in (("mean", 2.0), ("std", 1.0), ("nonzero", 1.0))},
            **{f"{prefix}/math/b/{key}": 0.0 for key in ("mean", "std", "nonzero")},
            f"{prefix}/games/b/mean": 2.0,
            f"{prefix}/games/b/std": math.sqrt(8 / 3),
            f"{prefix}/games/b/nonzero": 2 / 3,
        }
    )


def test_how_long_engines_wait_for_the_busiest_one():
    """TRL#4707: what whole groups cost. Of the engines' tokens 4, 4 and 14, mean 22 / 3."""
    samples = [replace(s, engine=engine) for s, engine in zip(SAMPLES, (2, 2, 0, 2, 1, 1, 0, 0), strict=True)]
    assert sample_metrics(samples, samples)["idle_engine_fraction"] == pytest.approx(1 - 22 / 3 / 14)


def test_groups_by_the_reward_that_matters():
    """Shaping makes all groups unequal: the shaped reward trains, how hard a prompt is says the unshaped one."""
    samples = [with_grade(with_tokens(s, mask=False), reward=s.grade.reward - 0.01 * i) for i, s in enumerate(SAMPLES)]
    found = sample_metrics(samples, samples[:2])
    assert found["zero_variance_fraction"] == 0.25, "of the last group one was graded: nothing to compare it with"
    assert found["unshaped_zero_variance_fraction"] == 0.75
    assert (found["unshaped_reward"], found["total_gen_tokens"]) == (0.5, 22)  # masks say what is trained, not more
    assert found["reward"] == pytest.approx(0.5 - 0.035) and found["filtered_reward"] == pytest.approx(0.995)
    samples[3].grade.reward = NAN
    assert math.isnan(sample_metrics(samples, samples[:2])["reward"])
