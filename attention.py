"""Attention over a pack: which keys each segment sees, and their attention, on CUDA and on a CPU.

    segment            0: a prompt      1: a response     2: another one     3: a whole sequence
    rows of the pack   0 1 2            3 4               5                  6 7
    prefix_S           -1               0                 0                  -1
    keys of a segment  0 1 2            0 1 2 3 4         0 1 2 5            6 7

A query sees the keys of its segment up to its own row: without a window, the last query sees all of them.
docs/walkthrough.md has the picture of a real pack. Rotary positions are in the keys already, so attention needs none.

In examples/naive.py this is `weight_GNTT = score_GNTT.masked_fill(is_future_TT, -torch.inf).softmax(-1)`.

Dims, beside those of grpo.py: M the keys of all segments, one after another; M = T where no segment has a prefix.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from base.hf.model_config import MAX_HEAD_DIM
from base.system.ranks import on_device

# With fewer key than query heads, varlen_attn of torch >= 2.12 needs a flag that 2.11 does not have. (torch's version
# is compared with a tuple number by number.)
VARLEN_GQA = {"enable_gqa": True} if torch.__version__ >= (2, 12) else {}


class RowIndex(NamedTuple):
    """Rows of a tensor, for `of`. A row may repeat. int32, on the model's device."""

    row_M: Tensor
    sorted_M: Tensor  # the stable argsort of row_M
    starts: Tensor  # where in sorted_M each row of the tensor begins, and the end

    @classmethod
    def on(cls, device: torch.device, row_M: np.ndarray, num_rows: int) -> "RowIndex":
        """num_rows: of the tensor."""
        starts = np.append(0, np.bincount(row_M, minlength=num_rows).cumsum())
        arrays = row_M, row_M.argsort(kind="stable"), starts
        return cls(*(on_device(array.astype(np.int32), device) for array in arrays))

    def of(self, x: Tensor) -> Tensor:
        """x[row_M], by `GatherRows`."""
        if x.device.type == "cpu":  # CPUs are faster without the order
            return GatherRows.apply(x, self.row_M)
        return GatherRows.apply(x, *self)


@dataclass(frozen=True, eq=False)
class PackLayout:
    """Where the segments of a pack lie, and the keys that each of them sees. Made once for all forwards of the pack, on
    the host, so that no forward waits for the device. The tensors are int32."""

    bounds: list[int]  # [S+1], of the segments
    prefixes: list[int]  # [S]
    runs: list[tuple[int, int, int]]  # neighbours of one shape: (how many, queries, keys)
    most: tuple[int, int]  # most queries, most keys of a segment
    cu_queries: Tensor  # [S+1] on the model's device, as all tensors here
    cu_keys: Tensor
    key_rows: RowIndex | None  # of all keys; None without a prefix
    experts_TLA: np.ndarray | None = None  # of `pack.Pack`; on the host until a forward, as it is large

    @classmethod
    def of(
        cls, cu_seqlens: np.ndarray, prefix_S: np.ndarray | None, num_tokens: int, device: torch.device
    ) -> "PackLayout":
        """cu_seqlens rises strictly from 0 to num_tokens. prefix_S: as in `pack.Pack`; None is -1 for all."""
        bounds = np.asarray(cu_seqlens)
        queries_S = np.diff(bounds)
        assert bounds[0] == 0 and bounds[-1] == num_tokens and queries_S.min() > 0, (cu_seqlens, num_tokens)
        prefixes = [-1] * len(queries_S) if prefix_S is None else np.asarray(prefix_S).tolist()
        rows_S = []  # the rows of the keys of each segment: of its prefix, then its own
        for segment, prefix in enumerate(prefixes):
            rows = np.arange(bounds[segment], bounds[segment + 1])
            if prefix >= 0:
                rows = np.concatenate([np.arange(bounds[prefix], bounds[prefix + 1]), rows])
            rows_S.append(rows)
        shapes = [(int(queries), len(rows)) for queries, rows in zip(queries_S, rows_S, strict=True)]
        cu_keys = np.cumsum([0, *(keys for _, keys in shapes)])
        key_rows = None
        if max(prefixes) >= 0:
            key_rows = RowIndex.on(device, np.concatenate(rows_S), num_tokens)
        return cls(
            bounds=bounds.tolist(),
            prefixes=prefixes,
            runs=[(len(list(run)), *shape) for shape, run in groupby(shapes)],
            most=(max(queries for queries, _ in shapes), max(keys for _, keys in shapes)),
            cu_queries=on_device(bounds.astype(np.int32), device),
            cu_keys=on_device(cu_keys.astype(np.int32), device),
            key_rows=key_rows,
        )

    def rows(self, segment: int) -> np.ndarray:
        """Of the pack."""
        return np.arange(self.bounds[segment], self.bounds[segment + 1])


class GatherRows(torch.autograd.Function):
    """x[row_M]. A row may repeat: its gradients are then summed in a fixed order, in float32 or the wider type of x.
    (Plain indexing sums 16-bit gradients by atomics.) order: sorted_M and starts of a `RowIndex`. With it the sum is
    one launch on CUDA, without it 14."""

    @staticmethod
    def forward(ctx, x: Tensor, row_M: Tensor, *order: Tensor) -> Tensor:
        ctx.save_for_backward(row_M, *order)
        ctx.shape = x.shape
        return x.index_select(0, row_M)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        row_M, *order = ctx.saved_tensors
        grad_MH = grad.flatten(1)
        wide_dtype = torch.promote_types(grad.dtype, torch.float32)
        if order:
            sorted_M, start_of_row = order
            wide_MH = grad_MH.index_select(0, sorted_M).to(wide_dtype)
            summed = torch.segment_reduce(wide_MH, "sum", offsets=start_of_row, unsafe=True)
        else:
            wide_MH = grad_MH.to(wide_dtype)
            summed = torch.ops.aten.embedding_dense_backward(wide_MH, row_M, ctx.shape[0], -1, False)
        none_of_order = [None for _ in order]
        return summed.to(grad.dtype).view(ctx.shape), None, *none_of_order


def uses_flash_attention(device_type: str, dtype: torch.dtype) -> bool:
    """Whether packs go through varlen_attn, which is for CUDA and 16 bits; else SDPA takes runs of equal lengths."""
    return device_type == "cuda" and dtype.itemsize == 2


def packed_attention(
    query_TNH: Tensor,
    key_TKH: Tensor,
    value_TKH: Tensor,
    layout: PackLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each segment of the pack to its prefix and itself, K <= N (GQA). Values may have a smaller H
    than queries and keys. Returns [T, N * H], with the H of the values.

    scale: of the scores; None is 1 / sqrt(H). window: how many keys a query sees at most, its own included, counted
    back through its segment and on into the prefix; None is all.
    """
    assert window is None or window > 0, window
    is_flash = uses_flash_attention(query_TNH.device.type, query_TNH.dtype) and query_TNH.shape[-1] <= MAX_HEAD_DIM
    key_MKH, value_MKH = key_TKH, value_TKH
    if layout.key_rows:
        key_MKH = layout.key_rows.of(key_TKH)
        value_MKH = layout.key_rows.of(value_TKH)
    if is_flash:
        return _flash_attention(query_TNH, key_MKH, value_MKH, layout, scale, window)
    # In float32: on CPUs the backward pass in bfloat16 takes three times as long.
    wide = torch.promote_types(query_TNH.dtype, torch.float32)
    out = _attention_by_runs(query_TNH.to(wide), key_MKH.to(wide), value_MKH.to(wide), layout, scale, window)
    return out.to(query_TNH.dtype)


def _flash_attention(
    query_TNH: Tensor, key_MKH: Tensor, value_MKH: Tensor, layout: PackLayout, scale: float | None, window: int | None
) -> Tensor:
    """All segments in one call. varlen_attn aligns a segment's last query with its last key, so both the causal order
    and the window reach back through the segment into its prefix."""
    num_before = -1 if window is None else window - 1  # besides the query's own; -1: all
    value_dim = value_MKH.shape[-1]
    if value_dim < key_MKH.shape[-1]:  # varlen_attn wants one size
        value_MKH = F.pad(value_MKH, (0, key_MKH.shape[-1] - value_dim))
    bounds = (layout.cu_queries, layout.cu_keys, *layout.most)
    options = {"scale": scale, "window_size": (num_before, 0), **VARLEN_GQA}
    return varlen_attn(query_TNH, key_MKH, value_MKH, *bounds, **options)[..., :value_dim].flatten(1)


def _attention_by_runs(
    query_TNH: Tensor, key_MKH: Tensor, value_MKH: Tensor, layout: PackLayout, scale: float | None, window: int | None
) -> Tensor:
    """Neighbours of equal shape are one batched call on a view: small models pay for the number of calls."""
    queries_of_runs = [count * queries for count, queries, _ in layout.runs]
    keys_of_runs = [count * keys for count, _, keys in layout.runs]
    parts = zip(
        query_TNH.split(queries_of_runs), key_MKH.split(keys_of_runs), value_MKH.split(keys_of_runs), strict=True
    )
    mask_size = 1 << layout.most[1].bit_length()  # a power of two, so that few packs need another mask
    outs = []
    for (count, queries, keys), run in zip(layout.runs, parts, strict=True):
        query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in run)
        is_plain = queries == keys and (window is None or window >= keys)
        mask = None
        if not is_plain:
            mask = _visible(mask_size, window, query.device)[keys - queries : keys, :keys]
        options = {"attn_mask": mask, "is_causal": is_plain, "scale": scale, "enable_gqa": True}
        out = F.scaled_dot_product_attention(query, key, value, **options)
        outs.append(out.transpose(1, 2).reshape(count * queries, -1))
    return torch.cat(outs)


@lru_cache(maxsize=2)  # a model has at most two windows, and packs of a run nearly always one size; a mask is a slice
def _visible(size: int, window: int | None, device: torch.device) -> Tensor:
    """[query, key]: whether a query sees a key, where both count from the first key."""
    visible = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    return visible
