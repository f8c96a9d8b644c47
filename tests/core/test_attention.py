"""attention.py: who sees whom in a pack, on CUDA and on a CPU, against naive attention in float64."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from count_memory import LiveBytes
from samples import groups_that_share_prompts

import attention
from attention import GatherRows, PackLayout, packed_attention
from pack import assign_to_ranks, pack_samples, rows_of, to_device
from run import build


@pytest.mark.parametrize("cu_seqlens", [[0, 4], [0, 3, 3, 6], [1, 6]])
def test_cu_seqlens_must_cover_the_pack(cu_seqlens):
    with pytest.raises(AssertionError):
        PackLayout.of(np.array(cu_seqlens), None, 6, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gathered_rows_sum_their_gradients_in_float32(dtype):
    """Row 2 is there 300 times: a sum in bfloat16 would stop growing at 256."""
    x = torch.randn(5, 3, 2, dtype=dtype, requires_grad=True)
    row_M = torch.tensor([4, *[2] * 300, 0, 4])
    gathered = GatherRows.apply(x, row_M)
    assert torch.equal(gathered, x[row_M])
    gathered.backward(torch.ones_like(gathered))
    assert x.grad.dtype == dtype and x.grad[:, 0, 0].tolist() == [1, 0, 300, 0, 2]


def test_rows_that_are_sorted_once_sum_their_gradients_to_the_same_bits():
    """The way of CUDA and the way of CPUs add the same numbers in the same order, as a plain loop does."""
    generator = torch.Generator().manual_seed(0)
    row_M = torch.randint(0, 40, (500,), generator=generator)
    start_T = torch.cat([torch.zeros(1, dtype=torch.int64), row_M.bincount(minlength=43).cumsum(0)])
    orders = [(), (row_M.argsort(stable=True), start_T)]
    grad = torch.randn(500, 3, 2, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = [], torch.zeros(43, 3, 2)
        for order in orders:
            x = torch.zeros(43, 3, 2, dtype=dtype, requires_grad=True)
            GatherRows.apply(x, row_M, *order).backward(grad.to(dtype))
            found.append(x.grad)
        for row, grad_of_row in zip(row_M.tolist(), grad.to(dtype).float(), strict=True):
            expected[row] += grad_of_row
        assert all(torch.equal(out, expected.to(dtype)) for out in found)


@pytest.mark.parametrize("num_tokens", [32_768, 65_536])
def test_a_long_pack_needs_no_mask_on_cuda(num_tokens, monkeypatch):
    """A prompt of a quarter of the pack and two responses: neither the layout nor a call of attention holds a tensor
    of queries by keys."""
    monkeypatch.setattr(attention, "uses_flash_attention", lambda *_: True)
    cu_seqlens = np.array([0, num_tokens // 4, num_tokens // 2, num_tokens])
    meta = torch.device("meta")
    with LiveBytes("meta") as live:
        layout = PackLayout.of(cu_seqlens, np.array([-1, 0, 0]), num_tokens, meta)
        key_TKH = torch.zeros(num_tokens, 1, 8, dtype=torch.bfloat16, device=meta)
        packed_attention(key_TKH, key_TKH, key_TKH, layout)
    num_keys = num_tokens * 3 // 2
    assert live.largest_one <= 16 * num_keys and live.largest <= 128 * num_tokens


def test_layout_of_segments_by_hand():
    """Prompts of 2 and 1 tokens; a response of 2 and one of 1 to the first, one of 1 to the second."""
    cu_seqlens, prefix_S = np.int32([0, 2, 3, 5, 6, 7]), np.array([-1, -1, 0, 0, 1])
    layout = PackLayout.of(cu_seqlens, prefix_S, 7, torch.device("cpu"))
    row_M, order_M, start_T = (x.tolist() for x in layout.key_rows)
    assert row_M == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 2, 6]
    assert order_M == [0, 3, 7, 1, 4, 8, 2, 10, 5, 6, 9, 11] and start_T == [0, 3, 6, 8, 9, 10, 11, 12]
    assert layout.cu_queries.tolist() == [0, 2, 3, 5, 6, 7] and layout.cu_keys.tolist() == [0, 2, 3, 7, 10, 12]
    assert layout.runs == [(1, 2, 2), (1, 1, 1), (1, 2, 4), (1, 1, 3), (1, 1, 2)] and layout.most == (2, 4)


def packs_of(samples, max_tokens, share_prefix):
    return [
        to_device(pack, torch.device("cpu"))
        for share in assign_to_ranks(rows_of(samples), 2, max_tokens, share_prefix)
        for pack in pack_samples(share, max_tokens)
    ]


def visible_keys(cu_queries, cu_keys, before=-1):
    """For each query, the keys that varlen_attn shows it with the window (before, 0).

    The rule for unequal numbers is flash-attention's, to whose kernel torch/nn/attention/varlen.py hands the window and
    both bounds as they are. It is stated beside its function flash_attn_varlen_func (vLLM ships the file,
    vllm_flash_attn/flash_attn_interface.py): query i of q sees, of k keys, those from i + k - q - left to
    i + k - q + right, where -1 is no limit. So the last query sees the last key, and all before it.
    """
    for (query, query_end), (key, key_end) in zip(pairwise(cu_queries), pairwise(cu_keys), strict=True):
        num_queries, num_keys = query_end - query, key_end - key
        for i in range(num_queries):
            own = i + num_keys - num_queries
            yield [key + j for j in range(num_keys) if j <= own and (before < 0 or j >= own - before)]


def varlen_by_the_rule(query_TNH, key_MKH, value_MKH, cu_queries, cu_keys, most_queries, most_keys, **options):
    """In varlen_attn's place: one query after another."""
    (before, after), scale = options.pop("window_size"), options.pop("scale")
    assert after == 0 and options == attention.VARLEN_GQA
    assert cu_queries.dtype == cu_keys.dtype == torch.int32 and cu_keys[-1] == len(key_MKH) == len(value_MKH)
    assert (most_queries, most_keys) == (cu_queries.diff().max(), cu_keys.diff().max())
    repeat = query_TNH.shape[1] // key_MKH.shape[1]
    key_MNH, value_MNH = (x.repeat_interleave(repeat, dim=1) for x in (key_MKH, value_MKH))
    out = []
    visible = visible_keys(cu_queries.tolist(), cu_keys.tolist(), before)
    for query_NH, keys in zip(query_TNH, visible, strict=True):
        score_NM = torch.einsum("nh,mnh->nm", query_NH, key_MNH[keys]) * (scale or 1 / math.sqrt(query_NH.shape[-1]))
        out.append(torch.einsum("nm,mnh->nh", score_NM.softmax(-1), value_MNH[keys]))
    return torch.stack(out)


@pytest.mark.slow("False")
@pytest.mark.parametrize("share_prefix", [False, True])
def test_index_tensors_show_each_row_its_own_sequence(share_prefix):
    """Of each row that predicts a sampled token, the keys are the sample's ids before it; and each of these rows sees
    what comes before it in the same rows: nothing of another sample reaches it through the layers either."""
    extremes = set()
    for seed, max_tokens in product(range(6), (79, 300, 4000)):
        samples = groups_that_share_prompts(seed)
        num_seen = 0
        for micro in packs_of(samples, max_tokens, share_prefix):
            layout = micro.layout
            if layout.key_rows:
                rows, order, starts = (x.tolist() for x in layout.key_rows)
                assert order == sorted(range(len(rows)), key=rows.__getitem__)
                assert starts == np.searchsorted(sorted(rows), range(len(micro.token_T) + 1)).tolist()
            row_M = layout.key_rows[0].tolist() if layout.key_rows else range(len(micro.token_T))
            visible = [
                [row_M[key] for key in keys]
                for keys in visible_keys(layout.cu_queries.tolist(), layout.cu_keys.tolist())
            ]
            for row, adv, target in zip(*(x.tolist() for x in (micro.pos_R, micro.adv_R, micro.target_R)), strict=True):
                sample, rows = samples[int(adv)], visible[row]
                ids = sample.sequence.token_ids
                assert rows[-1] == row and micro.token_T[rows].tolist() == ids[: len(rows)] and ids[len(rows)] == target
                assert micro.position_T[rows].tolist() == list(range(len(rows))) and len(rows) >= len(
                    sample.sequence.prompt_ids
                )
                assert all(visible[earlier] == rows[: i + 1] for i, earlier in enumerate(rows))
                num_seen += 1
                extremes.add((len(sample.sequence.prompt_ids) == 1, len(sample.sequence.output_ids) == 1))
        assert num_seen == sum(sample.sequence.tokens["mask"].sum() for sample in samples)
    assert len(extremes) == 4, "prompts and responses of one token, and longer ones"


def naive_attention(qkv, micro, scale, window):
    """[T, N, H], by its words: each row alone, over the ids before it in its own sequence, in float64."""
    query_TNH, key_TNH, value_TNH = (x.repeat_interleave(4 // x.shape[1], dim=1) for x in qkv)
    bounds, out = micro.layout.bounds, []
    for segment, prefix in enumerate(micro.layout.prefixes):
        before = list(range(bounds[prefix], bounds[prefix + 1])) if prefix >= 0 else []
        for row in range(bounds[segment], bounds[segment + 1]):
            sequence = [*before, *range(bounds[segment], row + 1)]
            seen = sequence if window is None else sequence[-window:]
            score_NM = (query_TNH[row][:, None] * key_TNH[seen].transpose(0, 1)).sum(-1) * scale
            out.append((score_NM.softmax(-1)[..., None] * value_TNH[seen].transpose(0, 1)).sum(1))
    return torch.stack(out)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("window", [None, 1, 3, 20, 1000])
def test_a_query_sees_a_window_of_its_own_sequence(window, scale, monkeypatch):
    """Both branches, output and gradients, against `naive_attention`. A window of 3 behind a shared prompt ends in the
    prompt for the first two rows of a response; one of 20 is longer than some prompts, and shorter than others."""
    generator = torch.Generator().manual_seed(0)
    (micro,) = packs_of(groups_that_share_prompts(3), 4000, True)[:1]
    lengths = np.diff(micro.layout.bounds)
    assert micro.layout.key_rows and lengths.min() < 3 and lengths.max() > 20
    shapes = [(len(micro.token_T), heads, 8) for heads in (4, 2, 2)]
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weight = torch.randn(len(micro.token_T), 32, generator=generator, dtype=torch.float64)
    want = naive_attention(qkv, micro, scale or 1 / math.sqrt(8), window).flatten(1)
    expected = [want, *torch.autograd.grad((want * weight).sum(), qkv)]
    for is_cuda in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(attention, "uses_flash_attention", lambda *_: is_cuda)  # noqa: B023
            patch.setattr(attention, "varlen_attn", varlen_by_the_rule)
            out = packed_attention(*qkv, micro.layout, scale=scale, window=window)
        found = [out, *torch.autograd.grad((out * weight).sum(), qkv)]
        for ours, naive in zip(found, expected, strict=True):
            assert (ours - naive).norm() <= 1e-12 * max(naive.norm(), want.norm())


@pytest.mark.parametrize("window", [0, -1])
def test_a_query_sees_itself(window):
    layout = PackLayout.of(np.array([0, 2]), None, 2, torch.device("cpu"))
    x = torch.zeros(2, 1, 8)
    with pytest.raises(AssertionError, match=str(window)):
        packed_attention(x, x, x, layout, window=window)


@pytest.mark.parametrize("is_installed", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention_3_is_for_hopper_where_it_is_installed(dtype, capability, is_installed, monkeypatch):
    activated = []
    monkeypatch.setattr(
        build, "find_spec", lambda name: "spec" if is_installed and "flash_attn_inter" in name else None
    )
    monkeypatch.setattr(build, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    words = build.choose_attention(torch.device("cuda", 0), dtype)
    is_third = dtype == torch.bfloat16 and capability == (9, 0) and is_installed
    assert activated == ["FA3"] * is_third and ("FlashAttention 3" in words) == is_third
    assert ("SDPA" in words) == (dtype == torch.float32)
