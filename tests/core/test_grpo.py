"""The loop itself (tests/helpers/loop.py runs `grpo.train`): gradients, optimizer steps, old and reference policies."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dist_case import make_samples, settings
from fakes import FakeEngine
from loop import CPU, head_of, make_run, train, train_once, weights
from samples import of_version
from tiny import VOCAB_SIZE
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import config
import grpo
from attention import PackLayout
from base.system.exits import StopRun
from head import response_logps
from model import load_policy
from pack import make_minibatches
from reference import Reference


@pytest.fixture
def ranks(one_rank):
    return one_rank[0]


@pytest.fixture
def policy(one_rank, tiny):
    _, device, mesh = one_rank
    return load_policy(tiny[0], device=device, mesh=mesh)


@pytest.fixture
def step():
    """(samples, advantages), with rewards."""
    samples, adv_B = make_samples(VOCAB_SIZE)
    for sample, adv in zip(samples, adv_B, strict=True):
        sample.grade.reward = float(adv > 0.3)
    return samples, adv_B


def scored(policy, reference, step, cfg, ranks):
    """The minibatches of a step, with everything that the loss needs."""
    minibatches = make_minibatches(*step, cfg, ranks, CPU)
    grpo.compute_logprobs(policy, head_of(cfg), reference, minibatches, cfg, 1)
    return minibatches


def assert_close(gradients, expected, limit):
    assert gradients.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= limit * gradient.norm(), name


def shifted(policy, factor):
    with torch.no_grad():
        for param in policy.parameters():
            param.to_local().mul_(factor)


def test_old_logps_that_are_skipped_would_have_been_the_same(policy, step, ranks):
    """One optimizer step for the rollout: scoring first, which a threshold asks for, changes nothing."""
    forwards = []
    policy.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    skipped, expected = train_once(policy, *step, settings(), ranks)
    assert all(forwards)
    forwards.clear()
    cfg = settings(grpo={"seq_logprob_error_threshold": 1e30})
    metrics, gradients = train_once(policy, *step, cfg, ranks)
    assert forwards.count(True) == forwards.count(False) > 0
    known = {name: value for name, value in metrics.items() if name in skipped}
    assert known == pytest.approx(skipped, rel=1e-6, abs=1e-7, nan_ok=True)
    assert_close(gradients, expected, 1e-6)


@pytest.mark.slow("1000")
@pytest.mark.parametrize("max_norm", [1e9, 0.7])
def test_minibatches_and_epochs_equal_a_loop_by_hand(policy, step, ranks, tiny, max_norm):
    """2 minibatches x 2 epochs with plain SGD, against transformers in float64 with the PPO loss written out."""
    samples, adv_B = step
    packing = config.SequencePackingConfig(train_mb_tokens=100)  # several packs to a minibatch
    keys = {"train_global_batch_size": 10, "ppo_epochs": 2, "max_grad_norm": max_norm, "sequence_packing": packing}
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
    metrics, _ = train_once(policy, samples, adv_B, settings(policy=keys), ranks, optimizer=optimizer)

    oracle = copy.deepcopy(tiny[1]).double()

    def logp(s):
        ids = torch.tensor(s.sequence.token_ids)
        logits_TV = oracle(ids[None]).logits[0, len(s.sequence.prompt_ids) - 1 : -1, :VOCAB_SIZE] / 0.8
        return logits_TV.log_softmax(-1).gather(1, ids[len(s.sequence.prompt_ids) :, None])[:, 0][
            torch.from_numpy(s.sequence.tokens["mask"])
        ]

    with torch.no_grad():
        old = [logp(s) for s in samples]
    ratios, norms = [], []
    for part in [range(10), range(10, 20)] * 2:
        oracle.zero_grad()
        num_tokens = sum(int(samples[i].sequence.tokens["mask"].sum()) for i in part)
        for i in part:
            ratio_T = (logp(samples[i]) - old[i]).exp()
            loss_T = torch.maximum(-adv_B[i] * ratio_T, -adv_B[i] * ratio_T.clamp(0.8, 1.2))
            (loss_T.sum() / num_tokens).backward()
            ratios.append(ratio_T.detach())
        norms.append(math.sqrt(sum(float(param.grad.square().sum()) for param in oracle.parameters())))
        with torch.no_grad():
            for param in oracle.parameters():
                param -= 0.3 * param.grad * min(1, max_norm / norms[-1])
    before, after = tiny[1].state_dict(), oracle.state_dict()
    for name, weight in weights(policy).items():
        change = after[name] - before[name].double()
        assert (weight - before[name] - change).norm() <= 1e-4 * change.norm(), name
    assert metrics["grad_norm"] == pytest.approx(norms[-1], rel=1e-4) and max(norms) > 0.7 > min(norms)
    assert metrics["probs_ratio"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-5)
    assert metrics["probs_ratio_max"] == pytest.approx(torch.cat(ratios).max().item(), rel=1e-5)
    if max_norm == 1e9:
        assert metrics["probs_ratio_max"] > 1.2 and metrics["ratio_clip_high_fraction"] > 0  # clipping took part
    assert metrics["num_optimizer_steps"] == 4 and metrics["global_valid_seqs"] == 20
    assert metrics["global_valid_toks"] == sum(int(s.sequence.tokens["mask"].sum()) for s in samples)


class WakesWithNothingGathered(FakeEngine):
    """An engine whose `wake` finds how many of the model's units are gathered then."""

    def __init__(self, units):
        super().__init__()
        self.units = units
        self.found = []

    def wake(self, part):
        super().wake(part)
        self.found.append(num_gathered(self.units))


def num_gathered(units):
    return sum(not unit._get_fsdp_state()._fsdp_param_group.is_sharded for unit in units)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_that_stay_gathered_change_no_bit(step, one_rank, tiny, monkeypatch, precision):
    """Two steps of two optimizer steps, each of several packs, with old and reference logps. Scoring gathers each unit
    once for both models that score, training once an optimizer step; the engine wakes beside nothing gathered."""
    samples, adv_B = step
    ranks, device, mesh = one_rank
    gathers = []
    gather = FSDPParamGroup._to_unsharded
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", lambda group: gathers.append(group) or gather(group))
    packing = config.SequencePackingConfig(train_mb_tokens=100)
    cfg = settings(
        policy={"train_global_batch_size": 10, "sequence_packing": packing},
        loss_fn={"reference_policy_kl_penalty": 0.1},
    )
    found = []
    for keeps in (False, True):
        policy = load_policy(tiny[0], device=device, mesh=mesh, precision=precision, keeps_gathered=keeps)
        assert policy.defers_sync
        policy.defers_sync = keeps
        units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.2)
        run = make_run(policy, cfg, ranks, optimizer=optimizer, reference=Reference(policy))
        run.engine = WakesWithNothingGathered(units)
        gathers.clear()
        for number in (1, 2):
            run.num_steps = number
            train(run, [of_version(sample, number - 1) for sample in samples], adv_B)
        assert run.engine.found == [0] * 4
        found.append(weights(policy))
        if keeps:
            assert len(gathers) == 2 * (2 + 2) * len(units)
        with torch.no_grad():
            ids = torch.arange(9)
            layout = PackLayout.of(np.array([0, 9]), None, 9, device)
            response_logps(policy, (ids, ids, layout, ids), ids, head_of(cfg))
        assert num_gathered(units) == 0
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    assert any((weight - tiny[1].state_dict()[name]).abs().max() > 1e-4 for name, weight in found[0].items())


def test_loss_and_counts_are_means_over_optimizer_steps(policy, step, ranks):
    """The loss of each half by itself, with the same weights: their mean is that of two minibatches."""
    samples, adv_B = step
    halves = [train_once(policy, samples[part], adv_B[part], settings(), ranks) for part in (slice(10), slice(10, 20))]
    metrics, last = train_once(policy, *step, settings(policy={"train_global_batch_size": 10}), ranks)
    assert metrics["loss"] == pytest.approx((halves[0][0]["loss"] + halves[1][0]["loss"]) / 2, rel=1e-5)
    assert_close(last, halves[1][1], 1e-6)  # nothing of the first half is left in it


def test_steps_of_a_run(policy, step, ranks):
    """Three steps: each with its rate, sampled from the weights of the one before, synced, counted."""
    cfg = settings(
        policy={"scheduler": config.SchedulerConfig(warmup_steps=2, warmup_start_factor=0.5)},
        grpo={"ref_policy_update_period": 2, "ref_policy_update_alpha": 0.25},
        loss_fn={"reference_policy_kl_penalty": 0.1},
    )
    samples, _ = step
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.2)
    run = make_run(policy, cfg, ranks, optimizer=optimizer, reference=Reference(policy))
    reference, rates, moved = weights(policy), [], weights(policy)
    for number in (1, 2, 3):
        run.num_steps = number
        train(run, [of_version(s, number - 1) for s in samples], None)
        rates.append(run.metrics["lr"])
        before, moved = moved, weights(policy)
        assert not any(torch.equal(before[name], moved[name]) for name in moved)
        if number == 2:
            reference = {name: 0.25 * moved[name] + 0.75 * tensor for name, tensor in reference.items()}
        for name, tensor in reference.items():
            assert torch.allclose(run.reference.shards[name], tensor, atol=1e-7), (number, name)
        assert run.engine.calls == ["sleep", "wake weights", f"sync {number}", "wake kv_cache"]
        assert all(torch.equal(run.engine.weights[name], tensor) for name, tensor in moved.items())
        assert "advantages/mean" in run.metrics and "reward" in run.metrics
        run.engine.calls.clear()
    assert rates == pytest.approx([0.1, 0.15, 0.2]) and run.watchdog.step == 3
    tokens = sum(int(s.sequence.tokens["mask"].sum()) for s in samples)
    assert (run.state.step, run.state.num_bad_steps, run.state.total_valid_tokens) == (3, 0, 3 * tokens)


def test_a_bad_step_moves_nothing_and_too_many_stop_the_run(policy, step, ranks):
    samples, adv_B = step
    bad_B = [*adv_B[:-1], math.inf]
    cfg = settings(grpo={"max_bad_steps": 2})
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.2)
    before = weights(policy)
    metrics, _ = train_once(policy, samples, bad_B, cfg, ranks, optimizer=optimizer, num_bad_steps=1)
    assert metrics["num_bad_steps"] == 2 and not math.isfinite(metrics["loss"])
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())
    run = make_run(policy, cfg, ranks, optimizer=optimizer, num_bad_steps=2)
    with pytest.raises(
        StopRun, match=r"step 1: .* must both be finite\. Bad steps in a row: 3 \(grpo\.max_bad_steps=2\)"
    ):
        train(run, samples, bad_B)
    assert run.engine.calls == ["sleep"] and run.state.step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())


def test_a_bad_minibatch_leaves_the_other_as_it_is(policy, step, ranks):
    """The second is applied, with a gradient that has nothing of the first; the count begins anew."""
    samples, adv_B = step
    cfg = settings(policy={"train_global_batch_size": 10}, grpo={"max_bad_steps": 2})
    _, expected = train_once(policy, samples[10:], adv_B[10:], settings(), ranks)
    metrics, gradients = train_once(policy, samples, [math.nan, *adv_B[1:]], cfg, ranks, num_bad_steps=1)
    assert metrics["num_bad_steps"] == 0 and math.isnan(metrics["loss"])
    assert_close(gradients, expected, 1e-6)
    metrics, gradients = train_once(policy, samples, [*adv_B[:-1], math.nan], cfg, ranks, num_bad_steps=1)
    assert metrics["num_bad_steps"] == 1  # of the last optimizer step, after a sound one


def test_a_gap_to_the_sampler_is_a_bad_step(policy, step, ranks):
    samples, adv_B = step
    cfg = settings(grpo={"logp_gap_limit": 1e-3, "max_bad_steps": 0})
    run = make_run(policy, cfg, ranks)
    with pytest.raises(StopRun, match=r"sampler and trainer disagree by .* The step was not applied"):
        train(run, samples, adv_B)
    assert run.optimizer.gradients == {}


@pytest.mark.slow
def test_reference_keeps_the_first_weights_and_gives_the_policy_back(policy, step, ranks):
    cfg = settings(loss_fn={"reference_policy_kl_penalty": 0.1})
    reference = Reference(policy)
    (first,) = scored(policy, reference, step, cfg, ranks)
    assert train_once(policy, *step, cfg, ranks, reference=reference)[0]["kl_penalty"] == pytest.approx(0, abs=1e-9)
    shifted(policy, 1.1)
    moved = weights(policy)
    (second,) = scored(policy, reference, step, cfg, ranks)
    for before, after in zip(first.micros, second.micros, strict=True):
        assert torch.equal(before.ref_logp_R, after.ref_logp_R)
    assert train_once(policy, *step, cfg, ranks, reference=reference)[0]["kl_penalty"] > 0.01
    assert all(torch.equal(tensor, moved[name]) for name, tensor in weights(policy).items())


def test_the_reference_is_scored_without_filter(policy, step, ranks):
    """And so is the policy that the KL compares with it: of equal weights it is 0, also where tokens are cut."""
    cfg = settings(loss_fn={"reference_policy_kl_penalty": 0.1})
    reference = Reference(policy)
    (plain,) = scored(policy, reference, step, cfg, ranks)
    generation = replace(cfg.policy.generation, top_p=0.5, top_k=10)
    cfg = replace(cfg, policy=replace(cfg.policy, generation=generation))
    (filtered,) = scored(policy, reference, step, cfg, ranks)
    for one, other in zip(plain.micros, filtered.micros, strict=True):
        assert torch.equal(one.ref_logp_R, other.ref_logp_R)
    metrics, _ = train_once(policy, *step, cfg, ranks, reference=reference)
    assert metrics["kl_penalty"] == pytest.approx(0, abs=1e-9) and 0 < metrics["kept_fraction/sampling_filter"] < 0.5


def test_filtered_samples_and_masked_sequences_leave_gradient_and_denominators(policy, step, ranks):
    samples, adv_B = step
    for i in (0, 7, 19):
        samples[i].sequence.tokens["mask"] = np.zeros_like(samples[i].sequence.tokens["mask"])
        samples[i].is_filtered = True  # what overlong_filtering does
    metrics, expected = train_once(policy, *step, settings(), ranks)
    num_tokens = sum(int(s.sequence.tokens["mask"].sum()) for s in samples)
    assert (metrics["global_valid_seqs"], metrics["global_valid_toks"]) == (17, num_tokens)
    # The same three dropped because sampler and trainer disagree on them.
    samples, adv_B = make_samples(VOCAB_SIZE)
    for i, sample in enumerate(samples):
        sample.grade.reward = float(adv_B[i] > 0.3)
        (minibatch,) = make_minibatches([sample], [0.0], settings(), ranks, CPU)
        (micro,) = minibatch.micros
        with torch.no_grad():
            logp_R, _ = response_logps(policy, micro.model_inputs, micro.target_R, head_of(settings()))
        tokens = sample.sequence.tokens
        tokens["logp"][tokens["mask"]] = logp_R.numpy() - (3.0 if i in (0, 7, 19) else 0.01)
    cfg = settings(grpo={"seq_logprob_error_threshold": 2.0})
    metrics, gradients = train_once(policy, samples, adv_B, cfg, ranks)
    assert (metrics["global_valid_seqs"], metrics["global_valid_toks"]) == (17, num_tokens)
    assert_close(gradients, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("token_level", "gspo"), [(True, False), (False, False), (False, True)])
def test_tokens_whose_sampler_says_no_number_are_as_if_masked(policy, step, ranks, token_level, gspo):
    """Gradient and denominators are those of a batch that never trains on them; one sequence is lost whole."""
    samples, adv_B = step
    cfg = settings(loss_fn={"token_level_loss": token_level, "sequence_level_importance_ratios": gspo})
    results = []
    for as_masked in (False, True):
        copies = [copy.deepcopy(sample) for sample in samples]
        for i, where in ((1, slice(1)), (7, slice(None)), (16, slice(-1, None))):
            copies[i].sequence.tokens["logp"][where] = np.nan if i != 16 else -np.inf
            if as_masked:
                copies[i].sequence.tokens["mask"][where], copies[i].sequence.tokens["logp"][where] = False, -1.0
        (minibatch,) = scored(policy, None, (copies, adv_B), cfg, ranks)
        counts = (minibatch.num_tokens, minibatch.num_trained_samples, minibatch.num_positive_tokens)
        results.append((counts, *train_once(policy, copies, adv_B, cfg, ranks)))
    (counts, metrics, gradients), (expected_counts, expected_metrics, expected) = results
    assert counts == expected_counts and counts[1] == 19
    lost = {"num_nonfinite_sampler_logp", "kept_fraction/finite_sampler_logp", "train_tokens"}
    assert metrics["num_nonfinite_sampler_logp"] == 2 + int(samples[7].sequence.tokens["mask"].sum())
    left = {name: value for name, value in metrics.items() if name not in lost}
    assert left == pytest.approx({name: expected_metrics[name] for name in left}, rel=1e-5, abs=1e-7, nan_ok=True)
    assert_close(gradients, expected, 1e-6)
