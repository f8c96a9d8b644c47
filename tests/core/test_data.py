"""Samples to ranks and packs, against naive loops."""

from itertools import chain

import numpy as np
import pytest
from dist_case import make_samples

import data

# ----------------------------------------------------------------------------------------------- samples and packs


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 30])
def test_ranks_get_every_sample_once_and_equal_loads(world_size):
    lengths = np.random.default_rng(0).integers(1, 100, 25).tolist()
    shares = data.assign_to_ranks(lengths, world_size)
    assert sorted(chain(*shares)) == list(range(25)) and len(shares) == world_size
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths) and shares == data.assign_to_ranks(lengths, world_size)


def test_rank_shares_by_hand():
    assert data.assign_to_ranks([5, 9, 5, 4], 2) == [[1, 3], [0, 2]]
    assert data.assign_to_ranks([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]
    assert data.assign_to_ranks([3], 3) == [[0], [], []]


def naive_tokens(sample, adv):
    """(row, target, sampler's logp, advantage) of each sampled token, one at a time."""
    prompt, found = len(sample.prompt_ids), []
    for k in range(len(sample.output_ids)):
        if sample.mask[k]:
            found.append((prompt + k - 1, int(sample.output_ids[k]), sample.sampler_logps[k], np.float32(adv)))
    return found


@pytest.mark.parametrize("max_tokens", [29, 40, 64, 1000])
def test_packs_hold_every_sampled_token_once(max_tokens):
    samples, adv_B = make_samples(100_000)
    samples[7].mask[:] = False  # not one token sampled: context only
    packs, seen = data.pack_samples(samples, adv_B, max_tokens), []
    by_ids = {(*s.prompt_ids, *map(int, s.output_ids)): (s, adv) for s, adv in zip(samples, adv_B, strict=True)}
    by_inputs = {ids[:-1]: ids for ids in by_ids}
    assert len(by_inputs) == len(samples)
    for pack in packs:
        starts, lengths = pack.cu_seqlens[:-1], np.diff(pack.cu_seqlens)
        assert len(pack.token_T) == pack.cu_seqlens[-1] <= max_tokens and pack.cu_seqlens[0] == 0
        assert sorted(lengths, reverse=True) == lengths.tolist()
        assert pack.position_T.tolist() == [p for length in lengths for p in range(length)]
        for s, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            ids = by_inputs[tuple(pack.token_T[start : start + length].tolist())]  # whole, or a KeyError
            of_s = pack.seq_R == s
            columns = (pack.pos_R - start, pack.target_R, pack.sampler_logp_R, pack.adv_R)
            assert list(zip(*(x[of_s].tolist() for x in columns), strict=True)) == naive_tokens(*by_ids[ids])
            seen.append(ids)
        kinds = {name: getattr(pack, name).dtype for name in pack.__slots__}
        floats = dict.fromkeys(("sampler_logp_R", "adv_R", "reward_R"), np.float32)
        assert kinds == {name: np.int64 for name in kinds} | {"cu_seqlens": np.int32} | floats
    assert sorted(seen) == sorted(by_ids)


def sample_of(length):
    ids = np.arange(length, dtype=np.int32)
    return data.Sample(0, 0, 0, [1], ids, np.zeros(length, np.float32), np.ones(length, bool), "stop", 0)


def test_packing_by_hand():
    """First fit, longest first; a sequence of n + 1 ids is n input tokens."""
    packs = data.pack_samples([sample_of(n) for n in (3, 6, 5, 2, 4)], [0.0] * 5, 10)
    assert [np.diff(pack.cu_seqlens).tolist() for pack in packs] == [[6, 4], [5, 3, 2]]
    with pytest.raises(AssertionError, match="sample of 11 tokens, packs of 10"):
        data.pack_samples([sample_of(11)], [0.0], 10)


def test_empty_pack_is_one_token_without_a_response():
    pack = data.empty_pack()
    assert pack.token_T.shape == pack.position_T.shape == (1,) and pack.cu_seqlens.tolist() == [0, 1]
    assert all(len(getattr(pack, name)) == 0 for name in pack.__slots__ if name.endswith("_R"))
