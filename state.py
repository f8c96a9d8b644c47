"""Layers with state over a pack: a segment starts from the state at the end of its prefix.

Two operators of such a layer look beyond a token, a short causal convolution and a recurrence: Mamba 2 (Dao and Gu
2024, arXiv 2405.21060) or the gated delta rule (Yang et al. 2024, arXiv 2412.06464). All else is computed token by
token, so transformers' mixer computes a whole pack in one call, with these two in place of its own:

    convolution   each segment comes after the last rows of its prefix
    recurrence    first the segments without a prefix, then the others, which start from the states that those end with

A prompt is computed once, and the gradients of its responses reach it through the state. transformers' own function
computes segments that are padded to one length; `PADDING` makes the rows after the end of a segment leave its state as
it is. With the package fla-core its kernel takes them back to back on CUDA.

Dims, beside those of attention.py: B sequences of a launch · L the rows of the longest · C channels · W the width of
the convolution.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from types import FunctionType, MethodType

import numpy as np
import torch
from torch import Tensor, nn

from attention import PackLayout, RowIndex
from base.hf.layers import DELTA_CHUNK, HAS_FLA

PADDING = {"dt": -torch.inf}  # of a padded row: softplus(-inf) = 0, so its state stays; every other input is 0


def over_packs(mixer: nn.Module) -> Callable[..., Tensor]:
    """The forward of a transformers mixer, for packs: it takes `layout` and `seq_idx`, which are both the PackLayout.

    A copy of the function that finds the operators of this file under the names of its module: other models of the
    process keep theirs.
    """
    forward = inspect.unwrap(type(mixer).forward)
    names = dict(forward.__globals__)
    for name, operator in OPERATORS.items():
        if name in names:
            names[name] = partial(operator, names[name])
    packed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    return MethodType(packed, mixer)


def convolve(
    function: Callable,
    x_1CT: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: PackLayout,
    **_,
) -> Tensor:
    """In place of causal_conv1d_fn. seq_idx: what LFM2's layers hand on; it is the layout."""
    tails = Tails.of(seq_idx, weight_CW.shape[1] - 1)
    x_MC = tails.row_M.of(_with_row(x_1CT[0].T, 0))
    out_1CM = _of_device(function, x_1CT)(x_MC.T[None], weight_CW, bias_C, activation=activation)
    return tails.own_T.of(out_1CM[0].T).T[None]


def scan(
    function: Callable,
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    layout: PackLayout,
    **_,
) -> Tensor:
    """In place of mamba2_chunk_scan. hidden: [1, T, N, H]; dt: [1, T, N]. Its limits of dt are left out: vLLM has none,
    whatever config.json says."""
    options = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias, "dt_softplus": True, "return_final_states": True}

    def launch(inputs: dict[str, Tensor], state: Tensor | None, _) -> tuple[Tensor, Tensor]:
        steps = inputs["hidden"], inputs["dt"], A, inputs["B"], inputs["C"]
        return _of_device(function, dt)(*steps, initial_states=state, **options)

    inputs = {"hidden": hidden, "dt": dt, "B": B, "C": C}
    return _by_segments(launch, inputs, Launches.of(layout, chunk_size))


def delta_rule(
    function: Callable, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, layout: PackLayout, **_
) -> tuple[Tensor, None]:
    """In place of torch_chunk_gated_delta_rule. query, key, value: [1, T, N, H]; g, the logarithm of the decay, and
    beta: [1, T, N]."""
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}

    def launch(inputs: dict[str, Tensor], state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        qkv = inputs["query"], inputs["key"], inputs["value"]
        gates = {"g": inputs["g"], "beta": inputs["beta"]}
        return _of_device(function, query)(*qkv, **gates, initial_state=state, cu_seqlens=bounds, **options)

    inputs = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    chunk = None if takes_bounds(query.device.type) else DELTA_CHUNK
    return _by_segments(launch, inputs, Launches.of(layout, chunk)), None


OPERATORS = {"causal_conv1d_fn": convolve, "mamba2_chunk_scan": scan, "torch_chunk_gated_delta_rule": delta_rule}


def takes_bounds(device_type: str) -> bool:
    """Whether the gated delta rule takes segments back to back, with their bounds."""
    return HAS_FLA and device_type == "cuda"


def _of_device(function: Callable, x: Tensor) -> Callable:
    """On CUDA the kernel of a package that is installed, as transformers chooses; on a CPU always torch's operators."""
    return inspect.unwrap(function) if x.device.type == "cpu" else function


@dataclass(frozen=True, eq=False)
class Tails:
    """What a convolution reads. row_M: of each segment the last rows of its prefix, then its own; T where there are
    none. own_T: where in these the rows of the pack are."""

    row_M: RowIndex
    own_T: RowIndex

    @classmethod
    @lru_cache(maxsize=2)  # of this pack, for all layers and the backward
    def of(cls, layout: PackLayout, width: int) -> "Tails":
        """width: rows before a segment."""
        num_tokens = layout.bounds[-1]
        rows_S = []
        own_S = []
        num_rows = 0
        for segment, prefix in enumerate(layout.prefixes):
            before = np.full(width, num_tokens)
            if prefix >= 0:
                tail = layout.rows(prefix)[-width:]
                before[width - len(tail) :] = tail
            own = layout.rows(segment)
            rows_S += [before, own]
            own_S.append(num_rows + width + np.arange(len(own)))
            num_rows += width + len(own)
        device = layout.cu_queries.device
        row_M = RowIndex.on(device, np.concatenate(rows_S), num_tokens + 1)
        return cls(row_M, RowIndex.on(device, np.concatenate(own_S), num_rows))


@dataclass(frozen=True, eq=False)
class Launch:
    """Sequences that are computed in one call. row_BL: their rows of the pack, T after the end of a sequence; state_B:
    of each of them which final state it starts from, None for zeros. bounds: int32, [B + 1], if they lie back to back,
    as one row of a batch."""

    num_rows: int  # of the batch
    row_BL: RowIndex
    state_B: RowIndex | None
    bounds: Tensor | None


@dataclass(frozen=True, eq=False)
class Launches:
    """The calls for a pack, those for segments without a prefix first. own_T: where in the outputs of all of them the
    rows of the pack are."""

    launches: list[Launch]
    is_padded: bool
    own_T: RowIndex

    @classmethod
    @lru_cache(maxsize=2)
    def of(cls, layout: PackLayout, chunk_size: int | None) -> "Launches":
        """chunk_size: None for back to back. Else a call's segments have, in chunks, four fifths of the longest."""
        num_tokens = layout.bounds[-1]
        device = layout.cu_queries.device
        launches = []
        place_T = np.empty(num_tokens, np.int64)
        num_places = 0
        number_of_state: dict[int, int] = {}
        for members in _members(layout, chunk_size):
            rows_B = [layout.rows(segment) for segment in members]
            prefixes = [layout.prefixes[segment] for segment in members]
            state_B = None
            if prefixes[0] >= 0:
                numbers = np.array([number_of_state[prefix] for prefix in prefixes])
                state_B = RowIndex.on(device, numbers, len(number_of_state))
            else:
                for segment in members:
                    number_of_state[segment] = len(number_of_state)
            bounds = None
            longest = max(map(len, rows_B))
            batch_BL = np.full((len(members), longest), num_tokens)
            for row, rows in zip(batch_BL, rows_B, strict=True):
                row[: len(rows)] = rows
            if chunk_size is None:
                bounds = torch.tensor(np.cumsum([0, *map(len, rows_B)]), dtype=torch.int32, device=device)
                batch_BL = np.concatenate(rows_B)[None]
            is_row_BL = batch_BL < num_tokens
            place_T[batch_BL[is_row_BL]] = num_places + np.flatnonzero(is_row_BL)
            num_places += batch_BL.size
            num_rows = num_tokens if chunk_size is None else num_tokens + 1
            row_BL = RowIndex.on(device, batch_BL.flatten(), num_rows)
            launches.append(Launch(len(batch_BL), row_BL, state_B, bounds))
        return cls(launches, chunk_size is not None, RowIndex.on(device, place_T, num_places))


def _members(layout: PackLayout, chunk_size: int | None) -> list[list[int]]:
    """The numbers of the segments of each call."""

    def call_of(segment: int) -> tuple[bool, int]:
        size = 0
        if chunk_size is not None:
            chunks = math.ceil(len(layout.rows(segment)) / chunk_size)
            step = 2 ** max(0, chunks.bit_length() - 3)
            size = math.ceil(chunks / step) * step
        return layout.prefixes[segment] >= 0, size

    segments = sorted(range(len(layout.prefixes)), key=call_of)
    return [list(members) for _, members in groupby(segments, call_of)]


def _by_segments(
    launch: Callable[[dict[str, Tensor], Tensor | None, Tensor | None], tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor],
    plan: Launches,
) -> Tensor:
    """launch: inputs [B, L, ...], states at the start [B, ...] or None, bounds -> outputs [B, L, ...], states at the
    end. inputs: [1, T, ...]. Returns the outputs, [1, T, ...]."""
    rows = {name: x[0] for name, x in inputs.items()}
    if plan.is_padded:
        rows = {name: _with_row(x, PADDING.get(name, 0)) for name, x in rows.items()}
    outputs = []
    ends = []
    for call in plan.launches:
        batch = {name: call.row_BL.of(x).unflatten(0, (call.num_rows, -1)) for name, x in rows.items()}
        start = None
        if call.state_B:
            start = call.state_B.of(torch.cat(ends))
        output, end = launch(batch, start, call.bounds)
        outputs.append(output.flatten(0, 1))
        if not call.state_B:
            ends.append(end)
    return plan.own_T.of(torch.cat(outputs))[None]


def _with_row(x: Tensor, value: float) -> Tensor:
    """x and a row more, of this value."""
    return torch.cat([x, x.new_full((1, *x.shape[1:]), value)])
