"""gap.py: which tokens are measured, what their gap is, and what the limit says. The canary: test_engine.py."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from dist_case import make_samples, settings
from loop import CPU
from loss_cases import golden_batch, reduced, token_columns

import config
from base.system.exits import StopRun
from base.system.ranks import Ranks
from gap import StepGap, gap_of_pack, gap_problem, judge_step, newest_tokens, seq_logp_error_mask
from pack import make_minibatches

ASYNC = config.GRPOConfig(async_grpo=config.AsyncGRPOConfig(enabled=True))
KEPT_CACHE = replace(ASYNC, async_grpo=replace(ASYNC.async_grpo, recompute_kv_cache_after_weight_updates=False))


def gap_of(mean, largest):
    return {"logp_gap_mean": mean, "logp_gap_max": largest}


def gap_alone(metrics):
    """Without what a fork measures beside it."""
    return {name: value for name, value in metrics.items() if name in ("logp_gap_mean", "logp_gap_max")}


def gap_of_golden_batch(newest_R=None, **changed):
    """The reduced gap of the worked example: |sampler - old| is .1, .1, 0, 0, .3; the sixth token is masked."""
    batch = golden_batch() | changed
    names = ("sampler_logp_R", "old_logp_R", "adv_R", "seq_R")
    pack = SimpleNamespace(mask_R=batch["mask_R"] != 0, **{name: batch[name] for name in names})
    ages = config.AsyncGRPOConfig(enabled=newest_R is not None, max_trajectory_age_steps=1)
    pack.tokens_R = token_columns(6)
    pack.version_R = torch.full_like(pack.seq_R, 7) if newest_R is None else 6 + newest_R.int()
    return gap_alone(reduced(gap_of_pack(pack, batch["logp_R"].detach(), 7, config.GRPOConfig(async_grpo=ages))))


def test_the_gap_is_over_the_trained_tokens():
    gap = gap_of_golden_batch()
    assert gap == pytest.approx(gap_of(0.5 / 5, 0.3))


def test_a_minibatch_without_a_trained_token_has_no_gap():
    """All its samples were filtered: there is nothing to compare, and so no reason to stop."""
    gap = gap_of_golden_batch(mask_R=torch.zeros(6))
    assert gap == pytest.approx(gap_of(0, 0)) and gap_problem(gap, num_nonfinite=0, limit=1e-4) is None


def test_without_old_log_probabilities_those_of_the_training_forward_are_compared():
    gap = gap_of_golden_batch(old_logp_R=None)
    assert gap == pytest.approx(gap_of((0.1 + 0.1 + 0.5 + 0.1 + 0.7) / 5, 0.7))


@pytest.mark.parametrize("name", ["logp_R", "old_logp_R", "sampler_logp_R"])
def test_a_token_without_a_log_probability_is_not_measured(name):
    """Cut by top_p or top_k on one side (-inf). The second token's gap is .1."""
    changed = golden_batch()[name].detach().clone()
    changed[1] = -math.inf
    assert gap_of_golden_batch(**{name: changed})["logp_gap_mean"] == pytest.approx(0.4 / 4)


def test_only_the_newest_tokens_count():
    gap = gap_of_golden_batch(newest_R=torch.tensor([True, False, False, True, False, True]))
    assert gap == pytest.approx(gap_of(0.1 / 2, 0.1))
    nothing = gap_of_golden_batch(newest_R=torch.zeros(6, dtype=torch.bool))
    assert nothing == pytest.approx(gap_of(0, 0))


@pytest.fixture
def micro(one_rank):
    """The first pack of samples whose tokens alternate between weights 3 and 4 from sample to sample."""
    samples, adv_B = make_samples(250)
    for number, sample in enumerate(samples):
        sample.sequence.tokens["version"] = 3 + number % 2
        sample.sequence.tokens["version"][-1] = 4
    (minibatch,) = make_minibatches(samples, adv_B, settings(), Ranks(0, 1, 0, 1), CPU)
    micro = minibatch.micros[0]
    generator = torch.Generator().manual_seed(0)
    micro.old_logp_R = micro.sampler_logp_R + 0.1 * torch.randn(len(micro.pos_R), generator=generator)
    return micro


def by_hand(micro, is_measured):
    gaps = [
        abs(float(sampler) - float(old))
        for row, (sampler, old) in enumerate(zip(micro.sampler_logp_R, micro.old_logp_R, strict=True))
        if is_measured(row)
    ]
    return sum(gaps) / len(gaps), max(gaps), len(gaps)


def gap_before_training(micro, grpo):
    return gap_alone(StepGap.before_training([micro], 4, config.Config(grpo=grpo)).of_all)


def test_the_gap_before_training_is_that_of_the_newest_tokens(micro):
    newest = [row for row in range(len(micro.pos_R)) if micro.version_R[row] == 4]
    micro.old_logp_R[newest[0]] = -torch.inf  # the trainer's filter cut the token
    micro.sampler_logp_R[newest[1]] = -torch.inf
    mean, largest, count = by_hand(micro, lambda row: row in newest[2:])
    assert 2 < count < len(micro.pos_R) - 2
    gap = gap_before_training(micro, ASYNC)
    assert gap == pytest.approx(gap_of(mean, largest))


def test_where_keys_and_values_were_kept_the_gap_is_that_of_whole_responses(micro):
    """Behind a token of older weights, one of the newest is of a mixture: sampler and trainer differ by right."""
    old_seqs = {int(micro.seq_R[row]) for row in range(len(micro.pos_R)) if micro.version_R[row] != 4}
    mean, largest, count = by_hand(micro, lambda row: int(micro.seq_R[row]) not in old_seqs)
    assert 0 < count < int((micro.version_R == 4).sum())
    gap = gap_before_training(micro, KEPT_CACHE)
    assert gap == pytest.approx(gap_of(mean, largest))


def test_the_loss_measures_where_nothing_was_measured_before(micro):
    assert gap_before_training(micro, config.GRPOConfig()) == {}
    assert newest_tokens(micro, 4, config.GRPOConfig()) is None
    micro.old_logp_R = None
    assert gap_before_training(micro, ASYNC) == {}


@pytest.mark.parametrize(
    ("gap", "num_nonfinite", "limit", "is_problem"),
    [
        (gap_of(1e-3, 9.0), 0, 1e-3, False),
        (gap_of(1.1e-3, 1.1e-3), 0, 1e-3, True),
        (gap_of(math.nan, 0.0), 0, 1e-3, True),
        (gap_of(0.0, 0.0), 1, 1e-3, True),
        (gap_of(9.0, 9.0), 3, None, False),
    ],
)
def test_the_limit(gap, num_nonfinite, limit, is_problem):
    assert bool(gap_problem(gap, num_nonfinite, limit)) == is_problem


SOUND = {"loss": 0.1, "num_nonfinite_sampler_logp": 0.0, "one_pass_deviation_max": 0.0}


def measured(mean, largest):
    return StepGap(gap_of(mean, largest), first_is_for_all=False)


SMALL = measured(1e-6, 1e-5)
LIMIT = config.GRPOConfig(logp_gap_limit=1e-3, max_bad_steps=2)


@pytest.mark.parametrize(
    ("metrics", "gap", "grad_norm", "told"),
    [
        ({"loss": math.nan}, SMALL, 1.0, "loss nan"),
        ({}, SMALL, math.inf, "gradient norm inf"),
        ({}, measured(2e-3, 0.0), 1.0, "0.0020 nats"),
        ({}, measured(math.nan, 0.0), 1.0, "nan nats"),
        ({"num_nonfinite_sampler_logp": 3.0}, SMALL, 1.0, "3 non-finite"),
    ],
)
def test_bad_steps_of_any_kind_share_a_counter_and_stop_the_run(metrics, gap, grad_norm, told):
    def count(num_bad_steps, cfg=LIMIT):
        return judge_step(SOUND | metrics, gap, grad_norm, num_bad_steps, cfg, 7)

    assert (count(0), count(1)) == ((False, 1), (False, 2))
    assert judge_step(SOUND, SMALL, 1.0, 2, LIMIT, 7) == (True, 0)  # a sound one begins the count anew
    with pytest.raises(StopRun, match=r"^step 7: ") as error:
        count(2)
    assert told in str(error.value)
    with pytest.raises(StopRun):
        count(0, replace(LIMIT, max_bad_steps=0))


def test_a_loss_that_one_pass_cannot_train_stops_the_run_at_once():
    with pytest.raises(StopRun, match=r"^step 7: .*The step was not applied$"):
        judge_step(SOUND | {"one_pass_deviation_max": 1.0}, SMALL, 1.0, 0, LIMIT, 7)


def test_without_a_limit_the_gap_is_only_logged():
    cfg = replace(LIMIT, logp_gap_limit=None)
    bad = SOUND | {"num_nonfinite_sampler_logp": 3.0}
    assert judge_step(bad, measured(9.0, 9.0), 1.0, 0, cfg, 1) == (True, 0)
    assert judge_step(bad | {"loss": math.inf}, measured(9.0, 9.0), 1.0, 0, cfg, 1) == (False, 1)


# ---------------------------------------------------------------- sequences whose sampler is far off


@pytest.mark.parametrize(
    "threshold, kept", [(math.inf, [1, 1, 1, 1, 1, 0]), (1.12, [1, 1, 1, 0, 0, 0]), (1.0, [0] * 6)]
)
def test_seq_logp_error_mask(threshold, kept):
    batch = golden_batch()
    micro = SimpleNamespace(**batch | {"mask_R": batch["mask_R"] != 0})
    micro.sampler_logp_R[5] = math.nan  # masked
    micro.reward_R = torch.tensor([0, 0, 0, 1, 1, 1])
    mask_R, metrics = seq_logp_error_mask(micro, threshold)
    assert mask_R.tolist() == [bool(k) for k in kept]
    errors = [(math.exp(0.1) + math.exp(0.1) + 1) / 3, (1 + math.exp(0.3)) / 2]  # 1.070, 1.175
    left = errors[: {5: 2, 3: 1, 0: 0}[sum(kept)]]
    want = {
        "mean_seq_mult_prob_error": sum(errors) / 2,
        "min_seq_mult_prob_error": errors[0],
        "max_seq_mult_prob_error": errors[1],
        "mean_seq_mult_prob_error_after_mask": sum(left) / len(left) if left else math.nan,
        "min_seq_mult_prob_error_after_mask": min(left, default=math.inf),
        "max_seq_mult_prob_error_after_mask": max(left, default=-math.inf),
        "num_masked_seqs_by_logprob_error": 2 - len(left),
        "kept_fraction/seq_logprob_error": sum(kept) / 5,
        "masked_correct_pct": [0.5, 1, math.nan][len(left)],
    }
    assert reduced(metrics) == pytest.approx(want, rel=1e-6, nan_ok=True)
    micro.old_logp_R[0] = -math.inf  # cut by the filter: 1.052 of the two others, and the threshold is for these
    mask_R, of_cut = seq_logp_error_mask(micro, 1.06)
    assert mask_R.tolist() == [True] * 3 + [False] * 3
    assert reduced(of_cut)["min_seq_mult_prob_error"] == pytest.approx((math.exp(0.1) + 1) / 2)


def test_seq_logp_error_drops_a_sequence_by_its_finite_tokens():
    batch = golden_batch()
    batch["sampler_logp_R"][4] = -math.inf
    micro = SimpleNamespace(**batch | {"mask_R": batch["mask_R"] != 0})
    micro.reward_R = torch.ones(6)
    mask_R, metrics = seq_logp_error_mask(micro, 1.05)
    assert mask_R.tolist() == [False, False, False, True, True, False]  # the second's other token has error 1
    assert float(metrics["min_seq_mult_prob_error"]) == 1
