"""Samples to ranks and packs, against brute force."""

from itertools import groupby, pairwise

import numpy as np
import pytest
from samples import sampled

from pack import assign_to_ranks, empty_pack, first_fit, num_input_tokens, num_packs, pack_samples, rows_of
from records import TOKEN, Grade

# ----------------------------------------------------------------------------------------------- samples and packs


def sample_of(prompt, prompt_length, response_length, index=0, seed=0):
    rng = np.random.default_rng([seed, prompt, index])
    prompt_ids = np.random.default_rng([seed, prompt]).integers(0, 200, prompt_length).tolist()
    ids, logp = rng.integers(0, 200, response_length), rng.normal(size=response_length)
    mask, grade = rng.random(response_length) < 0.8, Grade(float(rng.integers(2)))
    fields = {"row_id": prompt, "grade": grade, "advantage": float(rng.normal())}
    return sampled(prompt, index, prompt_ids, ids, logp=logp, mask=mask, **fields)


def random_groups(seed):
    """Groups of 1 to 16 samples in any order: prompts and responses of 1 to 40 ids."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt in range(rng.integers(4, 9)):
        prompt_length = int(rng.integers(1, 41))
        for index in range(int(rng.integers(1, 17))):
            samples.append(sample_of(prompt, prompt_length, int(rng.integers(1, 41)), index, seed))
    rng.shuffle(samples)
    return samples


def plain_first_fit(lengths, max_tokens):
    """By its words: the longest first, each into the first pack with room, else into a new one."""
    packs = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        pack = next((pack for pack in packs if sum(lengths[k] for k in pack) + lengths[i] <= max_tokens), None)
        packs += [] if pack else [pack := []]
        pack.append(i)
    return packs


def plain_shares(samples, world_size, max_tokens, share_prefix):
    """By its words: every split of the groups, its parts to the least loaded rank; that of the least peak load."""

    def size(part):
        return len(part[0].sequence.prompt_ids) + sum(len(row.sequence.output_ids) - 1 for row in part)

    splits = []
    for num_parts in (1, 2, 4, 8) if share_prefix else ():
        splits.append([])
        for prompt in dict.fromkeys(sample.prompt for sample in samples):
            group = [row for row in rows_of(samples) if row.sample.prompt == prompt]
            lengths = [len(row.sequence.output_ids) - 1 for row in group]
            room = max(-(-sum(lengths) // num_parts), *lengths)
            room = min(room, max_tokens - len(group[0].sequence.prompt_ids))
            splits[-1] += [[group[i] for i in members] for members in plain_first_fit(lengths, room)]
    best = None
    for split in [*splits, [[row] for row in rows_of(samples)]]:
        loads, shares = [0] * world_size, [[] for _ in range(world_size)]
        for part in sorted(split, key=size, reverse=True):
            rank = min(range(world_size), key=lambda r: (loads[r], len(shares[r]), r))
            loads[rank] += size(part)
            shares[rank].append(part)
        if best is None or max(loads) < best[0]:
            best = (max(loads), shares)
    return best[1]


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 7, 30])
def test_shares_and_packs_are_those_of_the_plain_way(world_size, share_prefix):
    """Also for groups of one, for responses of one id, and where a prompt fills a pack."""
    alone = [sample_of(i, 5 + i % 7, 1 + i % 3) for i in range(40)]
    for samples in (random_groups(2), random_groups(3), alone, [sample_of(0, 80, 1, g) for g in range(3)], []):
        shares = assign_to_ranks(rows_of(samples), world_size, 80, share_prefix)
        expected = plain_shares(samples, world_size, 80, share_prefix)
        parts, expected_parts = (
            [[[id(row.sequence) for row in part] for part in share] for share in found] for found in (shares, expected)
        )
        assert parts == expected_parts
        for share in shares:
            lengths = [num_input_tokens(part) for part in share]
            assert first_fit(lengths, 80) == plain_first_fit(lengths, 80)
            assert num_packs(share, 80) == len(pack_samples(share, 80))


def context(pack, row):
    """The ids that the row sees and their positions: its prefix, then its segment as far as the row."""
    bounds = list(pairwise(pack.cu_seqlens.tolist()))
    segment = next(s for s, (start, end) in enumerate(bounds) if start <= row < end)
    prefix = pack.prefix_S[segment]
    rows = [*(range(*bounds[prefix]) if prefix >= 0 else ()), *range(bounds[segment][0], row + 1)]
    return tuple(pack.token_T[rows].tolist()), pack.position_T[rows].tolist()


@pytest.mark.parametrize("max_tokens", [79, 120, 5000])
@pytest.mark.parametrize("share_prefix", [False, True])
def test_packs_hold_every_sampled_token_once_behind_its_context(max_tokens, share_prefix):
    samples = random_groups(1)
    samples[7].sequence.tokens["mask"][:] = False  # not one token sampled: context only
    (share,) = assign_to_ranks(rows_of(samples), 1, max_tokens, share_prefix)
    packs = pack_samples(share, max_tokens)
    packed = []
    num_sequences = 0
    for pack in packs:
        assert len(pack.token_T) == pack.cu_seqlens[-1] <= max_tokens and pack.cu_seqlens[0] == 0
        columns = (pack.pos_R, pack.tokens_R["id"], pack.tokens_R["logp"], pack.adv_R, pack.reward_R)
        for row, *values in zip(*(column.tolist() for column in columns), strict=True):
            ids, positions = context(pack, row)
            assert positions == list(range(len(ids)))
            packed.append((ids, *values))
        assert (np.diff(pack.seq_R) >= 0).all()
        num_sequences += len(np.unique(pack.seq_R))
        kinds = dict.fromkeys("token_T position_T prefix_S pos_R seq_R".split(), np.int64) | {"tokens_R": TOKEN}
        kinds |= dict.fromkeys(("adv_R", "reward_R"), np.float32)
        kinds["cu_seqlens"] = np.int32
        assert {name: getattr(pack, name).dtype for name in kinds} == kinds
    expected = []
    for sample in samples:
        ids = tuple(sample.sequence.token_ids)
        for k in sample.sequence.tokens["mask"].nonzero()[0]:
            before = ids[: len(sample.sequence.prompt_ids) + k]
            values = (
                sample.sequence.tokens["logp"][k].item(),
                np.float32(sample.advantage).item(),
                sample.grade.reward,
            )
            expected.append((before, ids[len(before)], *values))
    assert sorted(packed) == sorted(expected)
    assert num_sequences == sum(sample.sequence.tokens["mask"].any() for sample in samples)
    assert sum(len(pack.token_T) for pack in packs) == sum(map(num_input_tokens, share))


@pytest.mark.parametrize("share_prefix", [False, True])
def test_a_pack_says_which_ids_of_which_samples_it_holds(share_prefix):
    samples = random_groups(2)
    (share,) = assign_to_ranks(rows_of(samples), 1, 120, share_prefix)
    packs = pack_samples(share, 120)
    assert len(packs) > 2
    for pack in packs:
        for number, sequence in enumerate(pack.sequences):
            assert (pack.tokens_R[pack.seq_R == number] == sequence.tokens[sequence.tokens["mask"]]).all()
        assert (np.diff(pack.seq_R) >= 0).all()
    held = sorted(id(sequence) for pack in packs for sequence in pack.sequences)
    assert held == sorted(id(sample.sequence) for sample in samples)


def test_equal_shapes_lie_side_by_side():
    """So that the CPU attention takes them in few calls: prompts of 3 and 5 ids, responses of 4 and 2 to each."""
    groups = [
        rows_of(sample_of(p, size, length, g) for g, length in enumerate((4, 2, 4))) for p, size in enumerate((3, 5, 3))
    ]
    (pack,) = pack_samples(groups, 1000)
    lengths = np.diff(pack.cu_seqlens)
    prefix_lengths = np.where(pack.prefix_S >= 0, lengths[pack.prefix_S], 0)
    shapes = zip(lengths.tolist(), prefix_lengths.tolist(), strict=True)
    expected = [((5, 0), 1), ((3, 0), 2), ((3, 5), 2), ((1, 5), 1), ((3, 3), 4), ((1, 3), 2)]
    assert [(shape, len(list(run))) for shape, run in groupby(shapes)] == expected


def test_packing_by_hand():
    """First fit, longest first; a sequence of n + 1 ids is n input tokens."""
    packs = pack_samples([rows_of([sample_of(i, 1, n)]) for i, n in enumerate((3, 6, 5, 2, 4))], 10)
    assert [np.diff(pack.cu_seqlens).tolist() for pack in packs] == [[6, 4], [5, 3, 2]]
    assert all((pack.prefix_S == -1).all() for pack in packs)
    with pytest.raises(AssertionError, match="11 tokens, packs of 10"):
        pack_samples([rows_of([sample_of(0, 1, 11)])], 10)


def test_the_samples_of_a_part_have_one_prompt():
    with pytest.raises(AssertionError, match="group 0: prompts differ"):
        pack_samples([rows_of([sample_of(0, 3, 2), sample_of(0, 3, 2, seed=1)])], 10)


def test_empty_pack_is_one_token_without_a_response():
    pack = empty_pack()
    assert pack.token_T.shape == pack.position_T.shape == (1,) and pack.cu_seqlens.tolist() == [0, 1]
    assert pack.prefix_S.tolist() == [-1]
    assert all(len(getattr(pack, name)) == 0 for name in pack.__slots__ if name.endswith("_R"))
