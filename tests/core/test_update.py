"""From samples to optimizer steps: schedules, minibatches and epochs, old and reference log-probabilities."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import update
from dist_case import CONFIG, make_samples

import config
import data
from hf.tokenizer import Tokenizer
from model import Reference, load_policy

CPU = torch.device("cpu")


@pytest.fixture
def policy(one_rank, tiny):
    _, device, mesh = one_rank
    return load_policy(tiny[0], device=device, mesh=mesh)


@pytest.fixture
def batch(tiny):
    vocab_size = Tokenizer(tiny[0]).vocab_size
    samples, adv_B = make_samples(vocab_size)
    for sample, adv in zip(samples, adv_B, strict=True):
        sample.reward = float(adv > 0.3)
    return samples, adv_B, vocab_size


def settings(**sections):
    """CONFIG with keys of sections changed: settings(grpo={...}, policy={...}, loss_fn={...})."""
    grpo = {"num_prompts_per_step": 5, "num_generations_per_prompt": 4, "logp_gap_limit": None}
    sections["grpo"] = grpo | sections.get("grpo", {})
    sections["loss_fn"] = {"reference_policy_kl_penalty": 0.0} | sections.get("loss_fn", {})
    changed = {name: dataclasses.replace(getattr(CONFIG, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(CONFIG, **changed)


def batches_of(policy, reference, case, cfg, one_rank):
    samples, adv_B, vocab_size = case
    micros = update.make_micro_batches(samples, adv_B, cfg, one_rank[0], CPU)
    return update.score(policy, reference, micros, cfg, vocab_size)[0]


def gradients(policy):
    return {name: param.grad.full_tensor().clone() for name, param in policy.named_parameters()}


def weights(policy):
    return {name: param.full_tensor().detach().clone() for name, param in policy.named_parameters()}


def test_old_logps_that_are_skipped_would_have_been_the_same(policy, batch, one_rank):
    """The condition of needs_old_logps: one optimizer step for the rollout. Then scoring first changes nothing."""
    cfg = settings()
    assert not update.needs_old_logps(cfg)
    for keys in ({"train_global_batch_size": 10}, {"ppo_epochs": 2}):
        assert update.needs_old_logps(settings(policy=keys))
    assert not update.needs_old_logps(settings(policy={"train_global_batch_size": 20}))
    (skipped,) = batches_of(policy, None, batch, cfg, one_rank)
    assert all(micro.old_logp_R is None for micro in skipped.micros)
    metrics = update.compute_gradients(policy, skipped, cfg, batch[2])
    expected = gradients(policy)
    policy.zero_grad()
    (scored,) = batches_of(policy, None, batch, settings(grpo={"seq_logprob_error_threshold": 1e30}), one_rank)
    assert all(micro.old_logp_R is not None for micro in scored.micros)
    assert update.compute_gradients(policy, scored, cfg, batch[2]) == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    for name, gradient in gradients(policy).items():
        assert (gradient - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def test_minibatches_and_epochs_equal_a_loop_by_hand(policy, batch, one_rank, tiny):
    """2 minibatches x 2 epochs with plain SGD, against transformers in float64 with the PPO loss written out."""
    samples, adv_B, vocab_size = batch
    cfg = settings(policy={"train_global_batch_size": 12, "ppo_epochs": 2, "max_grad_norm": 1e9})
    cfg = dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, train_global_batch_size=10))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
    batches = batches_of(policy, None, batch, cfg, one_rank)
    assert [b.num_seqs for b in batches] == [10, 10]
    metrics = update.train_step(policy, optimizer, batches, cfg, vocab_size, 1, 0)

    oracle = copy.deepcopy(tiny[1]).double()

    def logp(s):
        ids = torch.tensor([*s.prompt_ids, *s.output_ids.tolist()])
        logits_TV = oracle(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1, :vocab_size] / 0.8
        return logits_TV.log_softmax(-1).gather(1, ids[len(s.prompt_ids) :, None])[:, 0][torch.from_numpy(s.mask)]

    with torch.no_grad():
        old = [logp(s) for s in samples]
    ratios = []
    for part in [range(10), range(10, 20)] * 2:
        oracle.zero_grad()
        num_tokens = sum(int(samples[i].mask.sum()) for i in part)
        for i in part:
            ratio_T = (logp(samples[i]) - old[i]).exp()
            loss_T = torch.maximum(-adv_B[i] * ratio_T, -adv_B[i] * ratio_T.clamp(0.8, 1.2))
            (loss_T.sum() / num_tokens).backward()
            ratios.append(ratio_T.detach())
        with torch.no_grad():
            for param in oracle.parameters():
                param -= 0.3 * param.grad
    before, after = tiny[1].state_dict(), oracle.state_dict()
    for name, found in weights(policy).items():
        change = after[name] - before[name].double()
        assert (found - before[name] - change).norm() <= 1e-4 * change.norm(), name
    assert metrics["probs_ratio"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-5)
    assert metrics["probs_ratio_max"] == pytest.approx(torch.cat(ratios).max().item(), rel=1e-5)
    assert metrics["probs_ratio_max"] > 1.2 and metrics["ratio_clip_high_fraction"] > 0  # clipping took part
    assert metrics["num_optimizer_steps"] == 4 and metrics["global_valid_seqs"] == 20


def test_reference_keeps_the_first_weights_and_gives_the_policy_back(policy, batch, one_rank):
    cfg = settings(loss_fn={"reference_policy_kl_penalty": 0.1})
    reference = Reference(policy)
    (first,) = batches_of(policy, reference, batch, cfg, one_rank)
    start = torch.cat([micro.ref_logp_R for micro in first.micros])
    assert update.compute_gradients(policy, first, cfg, batch[2])["kl_penalty"] == pytest.approx(0, abs=1e-9)
    with torch.no_grad():
        for param in policy.parameters():
            param.to_local().mul_(1.1)
    moved = weights(policy)
    (second,) = batches_of(policy, reference, batch, cfg, one_rank)
    assert torch.equal(torch.cat([micro.ref_logp_R for micro in second.micros]), start)
    assert all(torch.equal(tensor, moved[name]) for name, tensor in weights(policy).items())
    assert update.compute_gradients(policy, second, cfg, batch[2])["kl_penalty"] > 0.01
    name = "model.norm.weight"
    kept = reference.shards[name].clone()
    reference.update(policy, 0.25)
    assert torch.allclose(reference.shards[name], 0.25 * moved[name] + 0.75 * kept)
    reference.update(policy, 1.0)
    assert torch.equal(reference.shards[name], moved[name])


def test_filtered_samples_and_masked_sequences_leave_gradient_and_denominators(policy, batch, one_rank):
    samples, adv_B, vocab_size = batch
    for i in (0, 7, 19):
        samples[i].mask = np.zeros_like(samples[i].mask)  # what overlong_filtering does
    cfg = settings()
    (filtered,) = batches_of(policy, None, batch, cfg, one_rank)
    kept = [s for i, s in enumerate(samples) if i not in (0, 7, 19)]
    assert filtered.num_seqs == 17 and filtered.num_tokens == sum(int(s.mask.sum()) for s in kept)
    assert sum(len(micro.pack.token_T) for micro in filtered.micros) == sum(s.num_tokens - 1 for s in kept)
    update.compute_gradients(policy, filtered, cfg, vocab_size)
    expected = gradients(policy)
    policy.zero_grad()
    # The same three dropped because sampler and trainer disagree on them.
    samples, adv_B = make_samples(vocab_size)
    with torch.no_grad():
        for i, sample in enumerate(samples):
            (pack,) = data.pack_samples([sample], [0.0], 2048)
            logp_R = update.forward(policy, update.to_device(pack, CPU), cfg, vocab_size)[0].numpy()
            sample.sampler_logps[sample.mask] = logp_R - (3.0 if i in (0, 7, 19) else 0.01)
    (masked,) = batches_of(
        policy, None, (samples, adv_B, vocab_size), settings(grpo={"seq_logprob_error_threshold": 2.0}), one_rank
    )
    assert (masked.num_seqs, masked.num_tokens) == (17, filtered.num_tokens)
    update.compute_gradients(policy, masked, cfg, vocab_size)
    for name, gradient in gradients(policy).items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize(("token_level", "gspo"), [(True, False), (False, False), (False, True)])
def test_tokens_whose_sampler_says_no_number_are_as_if_masked(policy, batch, one_rank, token_level, gspo):
    """Gradient and denominators are those of a batch that never trains on them; one sequence is lost whole."""
    samples, adv_B, vocab_size = batch
    cfg = settings(loss_fn={"token_level_loss": token_level, "sequence_level_importance_ratios": gspo})
    found = []
    for as_masked in (False, True):
        case = [copy.deepcopy(sample) for sample in samples]
        for i, where in ((1, slice(1)), (7, slice(None)), (16, slice(-1, None))):
            case[i].sampler_logps[where] = np.nan if i != 16 else -np.inf
            if as_masked:
                case[i].mask[where], case[i].sampler_logps[where] = False, -1.0
        (step,) = batches_of(policy, None, (case, adv_B, vocab_size), cfg, one_rank)
        metrics = update.compute_gradients(policy, step, cfg, vocab_size)
        found.append((step.num_tokens, step.num_seqs, step.num_positive_tokens, metrics, gradients(policy)))
        policy.zero_grad()
    (*counts, metrics, gradient), (*expected_counts, expected_metrics, expected) = found
    assert counts == expected_counts and counts[1] == 19
    lost = {"num_nonfinite_sampler_logp", "kept_fraction/finite_sampler_logp"}
    assert metrics["num_nonfinite_sampler_logp"] == 2 + int(samples[7].mask.sum())
    left = {name: value for name, value in metrics.items() if name not in lost}
    assert left == pytest.approx({name: expected_metrics[name] for name in left}, rel=1e-5, abs=1e-7)
    for name in expected:
        assert (gradient[name] - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def test_kl_in_reward_whitens_over_all_tokens_of_the_step(policy, batch, one_rank):
    cfg = settings(
        grpo={"adv_estimator": config.AdvEstimatorConfig(name="reinforce_plus_plus")},
        loss_fn={"reference_policy_kl_penalty": 0.5, "use_kl_in_reward": True, "reference_policy_kl_type": "k1"},
    )
    reference = Reference(policy)
    with torch.no_grad():
        for param in policy.parameters():
            param.to_local().mul_(1.05)
    (found,) = batches_of(policy, reference, batch, cfg, one_rank)
    together = {
        name: torch.cat([getattr(micro, name) for micro in found.micros]).double().numpy()
        for name in ("adv_R", "old_logp_R", "ref_logp_R")
    }
    raw = np.concatenate([micro.pack.adv_R for micro in found.micros]).astype(np.float64)
    value = raw - 0.5 * (together["old_logp_R"] - together["ref_logp_R"])  # k1: log policy - log reference
    assert together["adv_R"] == pytest.approx((value - value.mean()) / value.std(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("loss_fn", "moved"),
    [
        ({}, "advantage"),
        ({"positive_example_nll_weight": 0.3}, "advantage or positive"),
        ({"entropy_coef": 0.1, "use_importance_sampling_correction": True}, "all"),
        ({"reference_policy_kl_penalty": 0.2, "token_level_loss": False}, "all"),
        ({"use_cispo": True, "ratio_clip_max": 0.05}, "advantage"),
    ],
)
def test_one_pass_equals_two_and_leaves_out_rows_without_gradient(policy, batch, one_rank, monkeypatch, loss_fn, moved):
    samples, adv_B, vocab_size = batch
    adv_B = [0.0 if i // 4 in (1, 3) else adv for i, adv in enumerate(adv_B)]  # two groups of equal rewards
    cfg = settings(loss_fn=loss_fn, policy={"ppo_epochs": 2})
    reference = None
    if cfg.loss_fn.reference_policy_kl_penalty:
        reference = Reference(policy)
        for shard in reference.shards.values():
            shard.mul_(1.01)
    rows = {
        "advantage": sum(int(s.mask.sum()) for s, adv in zip(samples, adv_B, strict=True) if adv),
        "advantage or positive": sum(
            int(s.mask.sum()) for s, adv in zip(samples, adv_B, strict=True) if adv or s.reward > 0
        ),
        "all": sum(int(s.mask.sum()) for s in samples),
    }
    (step,) = batches_of(policy, reference, (samples, adv_B, vocab_size), cfg, one_rank)
    assert sum(micro.num_grad_rows for micro in step.micros) == rows[moved]
    assert rows["advantage"] < rows["advantage or positive"] < rows["all"]
    with torch.no_grad():  # away from the policy that `old` is of
        for param in policy.parameters():
            param.mul_(1.002)
    found = []
    path = update.loss_path(cfg, CPU)
    assert path.kind == "one pass"
    for kind in ("one pass", "two passes"):
        monkeypatch.setattr(update, "loss_path", lambda *_, kind=kind: dataclasses.replace(path, kind=kind))
        metrics = update.compute_gradients(policy, step, cfg, vocab_size)
        found.append((metrics, gradients(policy)))
        policy.zero_grad(set_to_none=True)
    (metrics, fused), (expected_metrics, expected) = found
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7) and metrics["probs_ratio_max"] > 1.01
    for name, gradient in expected.items():
        assert (fused[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
