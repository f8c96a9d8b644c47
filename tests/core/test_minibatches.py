"""From samples to packs on the device: who gets what, which rows come first, what is masked, what is counted."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from dist_case import make_samples, settings
from loop import CPU

import config
from base.system.ranks import Ranks
from gap import mask_disagreements
from pack import finish_minibatches, make_minibatches
from run.build import loss_path_of

PACKS_OF_64 = {"sequence_packing": config.SequencePackingConfig(train_mb_tokens=64, share_prefix=False)}


@pytest.fixture
def step():
    """(samples, advantages), with rewards 0 and 1."""
    samples, adv_B = make_samples(250)
    for sample, adv in zip(samples, adv_B, strict=True):
        sample.grade.reward = float(adv > 0.3)
    return samples, adv_B


def rank(number, world_size=1):
    return Ranks(number, world_size, number, 1)


def with_logps(minibatches, seed=0):
    """Fills in log-probabilities as a policy and a reference might give them."""
    generator = torch.Generator().manual_seed(seed)
    for micro in (micro for minibatch in minibatches for micro in minibatch.micros):
        micro.old_logp_R = micro.sampler_logp_R + 0.1 * torch.randn(len(micro.pos_R), generator=generator)
        micro.ref_logp_R = micro.old_logp_R + 0.2 * torch.randn(len(micro.pos_R), generator=generator)
    return minibatches


def test_when_the_policy_is_scored_before_it_is_trained():
    assert not settings().needs_old_logps
    assert not settings(policy={"train_global_batch_size": 20}).needs_old_logps
    assert settings(policy={"train_global_batch_size": 10}).needs_old_logps
    assert settings(policy={"ppo_epochs": 2}).needs_old_logps
    assert settings(grpo={"seq_logprob_error_threshold": 2.0}).needs_old_logps
    by_sampler, ages = {"loss_fn": {"old_logprobs": "sampler"}}, {"async_grpo": config.AsyncGRPOConfig(enabled=True)}
    assert settings(grpo=ages).needs_old_logps
    assert not settings(grpo=ages, policy={"ppo_epochs": 2}, **by_sampler).needs_old_logps
    assert settings(grpo={"seq_logprob_error_threshold": 2.0}, **by_sampler).needs_old_logps


def sequences(micro):
    """The input ids of each sequence of a pack."""
    return [tuple(ids.tolist()) for ids in np.split(micro.token_T.numpy(), micro.layout.bounds[1:-1])]


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_every_sample_is_in_one_pack_of_its_minibatch(step, world_size):
    samples, adv_B = step
    samples[3].is_filtered = True  # filtered out
    cfg = settings(policy=PACKS_OF_64 | {"train_global_batch_size": 8})
    of_ranks = [make_minibatches(samples, adv_B, cfg, rank(r, world_size), CPU) for r in range(world_size)]
    for i, members in enumerate((range(8), range(8, 16), range(16, 20))):
        minibatches = [of_rank[i] for of_rank in of_ranks]
        assert len({len(minibatch.micros) for minibatch in minibatches}) == 1, "each pack is a collective"
        micros = [micro for minibatch in minibatches for micro in minibatch.micros]
        assert all(len(micro.token_T) <= 64 for micro in micros)
        packed = [ids for micro in micros for ids in sequences(micro) if len(micro.pos_R)]
        whole = [tuple(samples[k].sequence.token_ids) for k in members if k != 3]
        assert sorted(packed) == sorted(ids[:-1] for ids in whole)
        empty = [micro for micro in micros if not len(micro.pos_R)]
        assert all(micro.token_T.tolist() == [0] and micro.num_grad_rows == 0 for micro in empty)
        assert bool(empty) == (world_size == 16)
    assert all(len(of_rank) == 3 for of_rank in of_ranks)


def test_a_minibatch_without_a_sample_to_train_on_is_one_empty_pack(step, one_rank):
    samples, adv_B = step
    for sample in samples[10:]:
        sample.is_filtered = True
    cfg = settings(policy={"train_global_batch_size": 10})
    minibatches = make_minibatches(samples, adv_B, cfg, rank(0), CPU)
    finish_minibatches(minibatches, loss_path_of(cfg), 0)
    assert [len(minibatch.micros) for minibatch in minibatches] == [1, 1]
    full, empty = minibatches
    assert full.num_trained_samples == 10 and (
        empty.num_tokens,
        empty.num_trained_samples,
        empty.num_positive_tokens,
    ) == (0, 0, 0)
    assert empty.micros[0].token_T.tolist() == [0] and len(empty.micros[0].pos_R) == 0


def test_counts_of_each_minibatch_by_hand(step, one_rank):
    samples, adv_B = step
    tokens = samples[2].sequence.tokens
    tokens["logp"][tokens["mask"].nonzero()[0][0]] = np.nan  # a token that the loss drops
    samples[12].sequence.tokens["logp"] = -np.inf  # a sequence of such tokens
    cfg = settings(
        policy={"train_global_batch_size": 10, "sequence_packing": config.SequencePackingConfig(train_mb_tokens=40)}
    )
    minibatches = make_minibatches(samples, adv_B, cfg, rank(0), CPU)
    assert all(minibatch.num_tokens == 0 for minibatch in minibatches), "not known yet"
    finish_minibatches(minibatches, loss_path_of(cfg), 0)
    for minibatch, part in zip(minibatches, (samples[:10], samples[10:]), strict=True):
        assert len(minibatch.micros) > 1
        trained = {}
        for s in part:
            tokens = s.sequence.tokens
            trained[s.index + 4 * s.prompt] = int((tokens["mask"] & np.isfinite(tokens["logp"])).sum())
        assert minibatch.num_tokens == sum(trained.values())
        assert minibatch.num_trained_samples == sum(count > 0 for count in trained.values())
        positive = [s for s in part if s.grade.reward > 0]
        assert minibatch.num_positive_tokens == sum(trained[s.index + 4 * s.prompt] for s in positive) > 0
    assert [minibatch.num_trained_samples for minibatch in minibatches] == [10, 9]


@pytest.mark.parametrize(
    ("loss_fn", "reference", "moved"),
    [
        ({}, False, lambda sample, adv: adv != 0),
        ({"positive_example_nll_weight": 0.3}, False, lambda sample, adv: True),
        ({"entropy_coef": 0.1}, False, lambda sample, adv: True),
        ({"reference_policy_kl_penalty": 0.1}, True, lambda sample, adv: True),
    ],
)
def test_rows_with_a_gradient_come_first(step, one_rank, loss_fn, reference, moved):
    """The others stay, for the metrics; what belongs to a row goes with it."""
    samples, adv_B = step
    adv_B = [0.0 if i // 4 in (1, 3) else adv for i, adv in enumerate(adv_B)]  # two groups of equal rewards
    cfg = settings(loss_fn=loss_fn, policy=PACKS_OF_64)
    minibatches = with_logps(make_minibatches(samples, adv_B, cfg, rank(0), CPU))
    (minibatch,) = minibatches
    for micro in minibatch.micros:
        if not reference:
            micro.ref_logp_R = None
    names = [name for name in row_fields(minibatch.micros[0]) if name != "tokens_R"]

    def rows(micro):
        return sorted(zip(*(getattr(micro, name).tolist() for name in names), strict=True))

    before = [rows(micro) for micro in minibatch.micros]
    finish_minibatches(minibatches, loss_path_of(cfg), 0)
    assert [rows(micro) for micro in minibatch.micros] == before and len(before) > 2
    by_ids = {tuple(s.sequence.token_ids)[:-1]: (s, adv) for s, adv in zip(samples, adv_B, strict=True)}
    for micro in minibatch.micros:
        members = [by_ids[ids] for ids in sequences(micro)]
        has_gradient = [bool(moved(*members[seq])) for seq in micro.seq_R.tolist()]
        assert has_gradient == sorted(has_gradient, reverse=True) and sum(has_gradient) == micro.num_grad_rows
        for part in micro.pos_R.tensor_split([micro.num_grad_rows]):
            assert (part.diff() > 0).all(), "within each part the order is that of the pack"


def row_fields(micro):
    """The names of what a micro-batch has of each of its rows."""
    names = [field.name for field in fields(micro) if field.name.endswith(("_R", "_RJ"))]
    return [name for name in names if getattr(micro, name) is not None]


def test_all_that_belongs_to_a_row_moves_with_it(step, one_rank):
    """A field that `reorder` leaves behind would be another token's."""
    (minibatch,) = with_logps(make_minibatches(*step, settings(policy=PACKS_OF_64), rank(0), CPU))
    (micro, *_) = minibatch.micros
    micro.share_R, micro.ref_ids_RJ, micro.ref_logp_RJ = micro.old_logp_R, micro.pos_R[:, None], micro.adv_R[:, None]
    names = row_fields(micro)
    assert len(names) == 12
    before = {name: getattr(micro, name) for name in names} | {"tokens_R": dict(micro.tokens_R)}
    order_R = np.random.default_rng(0).permutation(len(micro.pos_R))
    micro.reorder(order_R)
    for name in names:
        now, then = getattr(micro, name), before[name]
        if name == "tokens_R":
            assert len(now) > 2 and all(torch.equal(now[column], then[column][order_R]) for column in then)
        else:
            assert torch.equal(now, then[order_R])


def test_masked_sequences_are_behind_the_rows_with_a_gradient(step, one_rank):
    """Sampler and trainer disagree by 1 nat on two samples: mean exp(1) > 2."""
    samples, adv_B = step
    cfg = settings(grpo={"seq_logprob_error_threshold": 2.0}, policy=PACKS_OF_64)
    minibatches = make_minibatches(samples, adv_B, cfg, rank(0), CPU)
    off = {tuple(samples[i].sequence.token_ids)[:-1] for i in (4, 11)}
    for micro in minibatches[0].micros:
        is_off = torch.tensor([ids in off for ids in sequences(micro)])
        micro.old_logp_R = micro.sampler_logp_R + is_off[micro.seq_R].float()
    metrics = mask_disagreements(minibatches[0].micros, 2.0)
    assert metrics["num_masked_seqs_by_logprob_error"] == 2 and len(minibatches[0].micros) > 2
    finish_minibatches(minibatches, loss_path_of(cfg), 0)
    kept = [sample for i, sample in enumerate(samples) if i not in (4, 11)]
    assert minibatches[0].num_trained_samples == 18
    assert minibatches[0].num_tokens == sum(s.num_trained_tokens for s in kept)
    for micro in minibatches[0].micros:
        is_off = torch.tensor([ids in off for ids in sequences(micro)])[micro.seq_R]
        assert torch.equal(micro.mask_R, ~is_off) and micro.num_grad_rows == int((~is_off).sum())
        assert micro.mask_R[: micro.num_grad_rows].all()
