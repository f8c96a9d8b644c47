"""Samples and advantages -> the minibatches of a rollout, as packs on this rank's device.

A rollout of B = P * G samples is cut into minibatches of `train_global_batch_size`, one for each optimizer step (by
default the whole rollout is one). A minibatch is cut into packs, the same number on every rank, because a pack's
forward runs FSDP's collectives. The loss divides by counts over a whole minibatch: all ranks, all packs.

In examples/naive.py this is `for (group, _), adv_G in zip(attempts, adv_B.split(SAMPLES), strict=True):`: a group is
computed at a time, with its prompt once for each sample.

    make_minibatches     samples -> parts of groups -> ranks -> packs -> micro-batches on the device
    finish_minibatches   after the log-probabilities: what is counted, which rows come first

A pack of a prompt with two responses, as in docs/walkthrough.md, which has the picture of a real one:

    segment      0: the prompt    1: a response   2: another
    token_T      5  7  2          9               8            inputs: all ids of a sequence but its last
    position_T   0  1  2          3               3
    prefix_S     -1               0               0
    pos_R        2, 3 (response 1) and 2, 4 (response 2): the rows that predict the ids
    target_R     9, 3              and 8, 6
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heapreplace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention import PackLayout
from base.system.exchange import move_tokens
from base.system.ranks import Ranks, on_device
from config import Config
from head import LossPath
from records import TOKEN, Sample, TokenSequence, groups_of


class Row(NamedTuple):
    """A sequence, and the sample that it is of. Advantages and train_global_batch_size count samples; packs hold
    sequences, and most samples have one."""

    sample: Sample
    sequence: TokenSequence


Part = list[Row]  # of a group, which share a prompt in a pack; one that shares none


@dataclass(slots=True)
class Pack:
    """Sequences as segments back to back, without padding. A shared prompt appears once.

    A segment is a whole sequence, a shared prompt, or the response to one; prefix_S is the segment that a response
    continues, else -1. Inputs are ids[:-1] of each sequence, targets ids[1:]. T counts input tokens, R the sampled
    targets: prompt and observation targets never reach the head. pos_R: the row in T that predicts the target; the last
    row of a shared prompt predicts several. tokens_R: the targets, with all that `records.TOKEN` has of a token. adv_R:
    of the token's sample, or turn; reward_R: of its sample; seq_R: the number of its sequence in `sequences`; sample_R:
    of its sample within the minibatch. The targets of a sequence are back to back. experts_TLA: of each input the
    experts that the sampler sent it to, int16, -1 where it did not say; None without policy.router_replay.
    """

    sequences: list[TokenSequence]
    token_T: np.ndarray  # int64, as every array without a type here
    position_T: np.ndarray
    cu_seqlens: np.ndarray  # int32, [S + 1]: bounds of the segments
    prefix_S: np.ndarray
    experts_TLA: np.ndarray | None
    pos_R: np.ndarray
    tokens_R: np.ndarray  # of TOKEN
    adv_R: np.ndarray  # float32, as reward_R
    seq_R: np.ndarray
    sample_R: np.ndarray
    reward_R: np.ndarray


@dataclass(slots=True)
class MicroBatch:
    """A `Pack` on the device, and what the trainer adds about its R response tokens.

    layout: what the model needs of the segments, for all its forwards. tokens_R: name of a column of TOKEN -> tensor,
    without the mask. mask_R: tokens that may be trained on. num_grad_rows: only the first num_grad_rows rows can have a
    gradient; the rest serve the metrics. share_R: the fraction of its sample's trained tokens that the token's
    sequence has, float64; None until `finish_minibatches`. old_logp_R, ref_logp_R: under the policy at the start of the
    step and under the reference policy, ref_logp_RJ of its likeliest ids, ref_ids_RJ; None where the run does not need
    them.
    """

    token_T: Tensor
    position_T: Tensor
    layout: PackLayout
    pos_R: Tensor
    tokens_R: dict[str, Tensor]
    mask_R: Tensor
    adv_R: Tensor
    seq_R: Tensor
    sample_R: Tensor
    reward_R: Tensor
    num_grad_rows: int
    share_R: Tensor | None = None
    old_logp_R: Tensor | None = None
    ref_logp_R: Tensor | None = None
    ref_ids_RJ: Tensor | None = None
    ref_logp_RJ: Tensor | None = None

    @property
    def target_R(self) -> Tensor:
        return self.tokens_R["id"]

    @property
    def sampler_logp_R(self) -> Tensor:
        return self.tokens_R["logp"]

    @property
    def version_R(self) -> Tensor:
        return self.tokens_R["version"]

    @property
    def model_inputs(self) -> tuple[Tensor, Tensor, PackLayout, Tensor]:
        """The arguments of `model.Decoder.forward` but its head."""
        return self.token_T, self.position_T, self.layout, self.pos_R

    @property
    def inputs_of_reference(self) -> tuple[Tensor, Tensor, PackLayout, Tensor]:
        """As `model_inputs`, for a model that chooses its experts itself: the sampler had other weights."""
        return self.token_T, self.position_T, replace(self.layout, experts_TLA=None), self.pos_R

    def reorder(self, order_R: np.ndarray) -> None:
        """Puts the rows into another order: row i is the row order_R[i] of before."""
        index_R = on_device(order_R, self.mask_R.device)
        for name, column_R in self.tokens_R.items():
            self.tokens_R[name] = column_R[index_R]
        for field in fields(self):
            value_R = getattr(self, field.name)
            if field.name.endswith(("_R", "_RJ")) and torch.is_tensor(value_R):
                setattr(self, field.name, value_R[index_R])


@dataclass(slots=True)
class Minibatch:
    """What one optimizer step sees: this rank's micro-batches, and counts over all ranks.

    num_input_tokens: tokens that the model computes. num_samples: sample_R is below it. `finish_minibatches` sets the
    rest. num_tokens: trained tokens. num_trained_samples: samples with a trained token. num_positive_tokens: trained
    tokens with a reward > 0. version: of the newest weights.
    """

    micros: list[MicroBatch]
    num_input_tokens: int
    num_samples: int = 0
    num_tokens: int = 0
    num_trained_samples: int = 0
    num_positive_tokens: int = 0
    version: int = -1


def make_minibatches(
    samples: Sequence[Sample], adv_B: Sequence[float | list[float]], cfg: Config, ranks: Ranks, device: torch.device
) -> list[Minibatch]:
    """This rank's minibatches of a rollout. A collective: the tokens of each sequence move to the rank that trains on
    it."""
    size = cfg.policy.train_global_batch_size or len(samples)
    max_tokens = cfg.policy.pack_tokens(device.type)
    share_prefix = cfg.policy.sequence_packing.share_prefix
    for number, (sample, adv) in enumerate(zip(samples, adv_B, strict=True)):
        sample.advantage = adv
        sample.number = number % size
    minibatch_shares = []  # minibatch -> rank -> its parts of groups
    for first in range(0, len(samples), size):
        trained = [sample for sample in samples[first : first + size] if sample.num_trained_tokens]
        minibatch_shares.append(assign_to_ranks(rows_of(trained), ranks.world_size, max_tokens, share_prefix))
    needed: list[list[TokenSequence]] = [[] for _ in range(ranks.world_size)]
    for shares in minibatch_shares:
        for rank, share in enumerate(shares):
            needed[rank] += [row.sequence for part in share for row in part]
    move_tokens(needed, ranks.bridge)
    minibatches = []
    for shares in minibatch_shares:
        packs = pack_samples(shares[ranks.rank], max_tokens)
        most_packs = max(1, *(num_packs(share, max_tokens) for share in shares))  # 1 even without samples
        while len(packs) < most_packs:
            packs.append(empty_pack())
        num_computed = sum(num_input_tokens(part) for share in shares for part in share)
        micros = [to_device(pack, device) for pack in packs]
        minibatches.append(Minibatch(micros, num_input_tokens=num_computed, num_samples=size))
    return minibatches


def rows_of(samples: Iterable[Sample]) -> list[Row]:
    return [Row(sample, sequence) for sample in samples for sequence in sample.sequences]


def to_device(pack: Pack, device: torch.device) -> MicroBatch:
    """The pack as a micro-batch, of which nothing is masked yet."""
    tokens_R = {}
    for name in TOKEN.names:
        column_R = pack.tokens_R[name].copy()
        if np.issubdtype(column_R.dtype, np.integer):
            column_R = column_R.astype(np.int64)  # torch indexes with these
        tokens_R[name] = on_device(column_R, device)
    layout = PackLayout.of(pack.cu_seqlens, pack.prefix_S, len(pack.token_T), device)
    mask_R = tokens_R.pop("mask")
    return MicroBatch(
        token_T=on_device(pack.token_T, device),
        position_T=on_device(pack.position_T, device),
        layout=replace(layout, experts_TLA=pack.experts_TLA),
        pos_R=on_device(pack.pos_R, device),
        tokens_R=tokens_R,
        mask_R=mask_R,
        adv_R=on_device(pack.adv_R, device),
        seq_R=on_device(pack.seq_R, device),
        sample_R=on_device(pack.sample_R, device),
        reward_R=on_device(pack.reward_R, device),
        num_grad_rows=len(pack.pos_R),
    )


@torch.no_grad()
def finish_minibatches(minibatches: list[Minibatch], path: LossPath, version: int) -> None:
    """Completes the minibatches in place, once their masks are final: counts trained tokens over all ranks, and puts
    rows with a gradient first. A collective. version: of the newest weights."""
    for minibatch in minibatches:
        rows_of_micros = rows_on_host(minibatch.micros)
        num_positive = torch.tensor(sum(rows.num_positive_tokens for rows in rows_of_micros))
        num_tokens_B = torch.zeros(minibatch.num_samples, dtype=torch.int64)
        for rows in rows_of_micros:
            num_tokens_B += torch.from_numpy(rows.num_tokens_of_samples(minibatch.num_samples))
        dist.all_reduce(num_positive)
        dist.all_reduce(num_tokens_B)
        minibatch.num_positive_tokens = int(num_positive)
        minibatch.num_tokens = int(num_tokens_B.sum())
        minibatch.num_trained_samples = int((num_tokens_B > 0).sum())
        minibatch.version = version
        for micro, rows in zip(minibatch.micros, rows_of_micros, strict=True):
            share_R = shares_of_samples(rows, num_tokens_B.numpy())
            order_R, micro.num_grad_rows = gradient_order(rows, path)
            micro.reorder(order_R)
            micro.share_R = on_device(share_R[order_R], micro.mask_R.device)


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host reads of a micro-batch's rows."""

    adv_R: np.ndarray
    reward_R: np.ndarray
    seq_R: np.ndarray
    sample_R: np.ndarray
    sampler_logp_R: np.ndarray
    mask_R: np.ndarray

    @property
    def trained_R(self) -> np.ndarray:
        """Tokens that `policy_loss` trains: it drops those whose sampler log-probability is not finite."""
        return self.mask_R & np.isfinite(self.sampler_logp_R)

    @property
    def num_positive_tokens(self) -> int:
        """Trained tokens with a reward > 0."""
        return int((self.trained_R & (self.reward_R > 0)).sum())

    def num_tokens_of_samples(self, num_samples: int) -> np.ndarray:
        """[num_samples], int64: the trained tokens of each sample of the minibatch."""
        return np.bincount(self.sample_R[self.trained_R], minlength=num_samples)


def rows_on_host(micros: Sequence[MicroBatch]) -> list[HostRows]:
    """Of each micro-batch. One copy for all of them: the host waits for the device once."""
    columns = []
    for field in fields(HostRows):
        columns.append(torch.cat([getattr(micro, field.name) for micro in micros]))
    as_doubles = torch.stack([column.double() for column in columns]).cpu()  # exact: float64 holds all of them
    host_columns = []
    for column, doubles in zip(columns, as_doubles, strict=True):
        host_columns.append(doubles.to(column.dtype).numpy())
    rows_of_micros = []
    start = 0
    for micro in micros:
        end = start + len(micro.mask_R)
        rows_of_micros.append(HostRows(*(column[start:end] for column in host_columns)))
        start = end
    return rows_of_micros


def gradient_order(rows: HostRows, path: LossPath) -> tuple[np.ndarray, int]:
    """(the order in which rows that may have a gradient come first, how many these are). Two thirds of the output
    layer's work is gradients. At advantage 0 there is one only from a KL, an entropy bonus or an NLL: `path` says so,
    from probes of the loss."""
    has_grad_R = rows.mask_R
    if not path.zero_adv_has_grad:
        has_grad_R = has_grad_R & (rows.adv_R != 0)
    return np.argsort(~has_grad_R, kind="stable"), int(has_grad_R.sum())


def shares_of_samples(rows: HostRows, num_tokens_B: np.ndarray) -> np.ndarray:
    """[R], float64: the share that the token's sequence has of the trained tokens of its sample. num_tokens_B: trained
    tokens of each sample, over all ranks."""
    num_tokens_of_sequence = np.bincount(rows.seq_R, weights=rows.trained_R)
    return num_tokens_of_sequence[rows.seq_R] / num_tokens_B[rows.sample_R].clip(min=1)


# --------------------------------------------------------------------------------------------- who packs what


def num_input_tokens(part: Part) -> int:
    """Input tokens of a part: the prompt once, each response without its last token."""
    return len(part[0].sequence.prompt_ids) + sum(row.sequence.num_output_tokens - 1 for row in part)


def assign_to_ranks(rows: Sequence[Row], world_size: int, max_tokens: int, share_prefix: bool) -> list[list[Part]]:
    """The parts of groups that each rank trains on. The sequences of a part share their prompt in a pack of <=
    `max_tokens` input tokens; without `share_prefix` each sequence is a part.

    Few large parts save tokens, many small ones balance the ranks. The split whose busiest rank has fewest tokens wins.
    """
    groups = groups_of(rows, _prompt_of)
    splits: list[list[Part]] = []
    some_share_a_prompt = len(groups) < len(rows)
    if share_prefix and some_share_a_prompt:
        for num_parts in (1, 2, 4, 8):
            splits.append([part for group in groups for part in _split(group, num_parts, max_tokens)])
    splits.append([[row] for row in rows])
    shares_of_splits = [balance(split, world_size) for split in splits]
    return min(shares_of_splits, key=_load_of_busiest)


def _prompt_of(row: Row) -> tuple[int, ...]:
    """Equal for rows that share a prompt in a pack: two sequences of a group may begin in different ways."""
    return (row.sample.prompt, *row.sequence.prompt_ids)


def _load_of_busiest(shares: Sequence[Sequence[Part]]) -> int:
    return max(sum(map(num_input_tokens, share)) for share in shares)


def _split(group: list[Row], num_parts: int, max_tokens: int) -> list[Part]:
    """The group in about `num_parts` equal parts of <= `max_tokens` input tokens. A response is never cut."""
    lengths = [row.sequence.num_output_tokens - 1 for row in group]
    even_share = math.ceil(sum(lengths) / num_parts)
    room_beside_prompt = max_tokens - len(group[0].sequence.prompt_ids)
    room = min(room_beside_prompt, max(even_share, *lengths))  # the longest response fits, whatever an even share is
    return [[group[i] for i in members] for members in first_fit(lengths, room)]


def balance(parts: Sequence[Part], world_size: int) -> list[list[Part]]:
    """The parts of each rank: longest first to the least loaded rank; ties to the rank with the fewest
    parts, then to the lowest."""
    shares: list[list[Part]] = [[] for _ in range(world_size)]
    heap = [(0, 0, rank) for rank in range(world_size)]  # (tokens, parts, rank)
    for part in sorted(parts, key=num_input_tokens, reverse=True):
        load, num_parts, rank = heap[0]
        heapreplace(heap, (load + num_input_tokens(part), num_parts + 1, rank))
        shares[rank].append(part)
    return shares


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the items in each pack of <= `max_tokens`: first-fit decreasing."""
    packs: list[list[int]] = [[] for _ in lengths]
    room = np.full(len(lengths), max_tokens)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[i] <= max_tokens, f"an item of {lengths[i]} tokens, packs of {max_tokens}"
        number = (room >= lengths[i]).argmax()
        packs[number].append(i)
        room[number] -= lengths[i]
    return [pack for pack in packs if pack]


def num_packs(parts: Sequence[Part], max_tokens: int) -> int:
    """How many packs `pack_samples` makes of the parts, from their lengths only."""
    return len(first_fit([num_input_tokens(part) for part in parts], max_tokens))


def pack_samples(parts: Sequence[Part], max_tokens: int) -> list[Pack]:
    """Packs of <= `max_tokens` input tokens, which no sequence exceeds; those of a part share their prompt."""
    lengths = [num_input_tokens(part) for part in parts]
    return [_pack([parts[i] for i in members]) for members in first_fit(lengths, max_tokens)]


# --------------------------------------------------------------------------------------------- the layout of a pack


@dataclass(slots=True, eq=False)
class Segment:
    """Neighbouring rows of a pack: a whole sequence, a shared prompt, or the response to one. prefix: the number of the
    prompt's segment, or -1. start: its first row in the pack, once the segments have their order."""

    ids: np.ndarray
    prefix: int = -1
    first_position: int = 0
    start: int = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a sequence lies. first: the segment that begins with its prompt. response: a segment of its own, or None
    where the response follows the prompt in `first`, or has one id and so no input."""

    row: Row
    first: Segment
    response: Segment | None


def place(parts: Sequence[Part]) -> tuple[list[Segment], list[Placed]]:
    """The segments of a pack in their order, and where each sequence lies.

    First whole sequences and shared prompts, longest first; then the responses to the prompts. Equal shapes are
    neighbours, which CPU attention computes in one call.
    """
    firsts = [(_first_segment(part), part) for part in parts]
    firsts.sort(key=lambda first: -len(first[0].ids))
    responses: list[Segment] = []
    placed: list[Placed] = []
    for number, (first, part) in enumerate(firsts):  # these are the segments 0, 1, ...: `prefix` is the number
        for row in part:
            sequence = row.sequence
            response = None
            if len(part) > 1 and sequence.num_output_tokens > 1:  # a response of one id has no input
                ids = sequence.tokens["id"][:-1].astype(np.int64)
                response = Segment(ids, number, len(sequence.prompt_ids))
                responses.append(response)
            placed.append(Placed(row, first, response))
    responses.sort(key=lambda segment: (-segment.first_position, -len(segment.ids)))
    segments = [first for first, _ in firsts] + responses
    start = 0
    for segment in segments:
        segment.start = start
        start += len(segment.ids)
    return segments, placed


def _first_segment(part: Part) -> Segment:
    """A shared prompt, or the inputs of a sequence that shares none."""
    prompt_ids = part[0].sequence.prompt_ids
    for sample, sequence in part:
        assert sequence.prompt_ids == prompt_ids, f"group {sample.prompt}: prompts differ"
        assert len(sequence.tokens) == sequence.num_output_tokens, f"tokens of group {sample.prompt} are not here"
    ids = np.array(prompt_ids, np.int64)
    if len(part) == 1:
        ids = np.concatenate([ids, part[0].sequence.tokens["id"][:-1]])
    return Segment(ids)


def _pack(parts: Sequence[Part]) -> Pack:
    segments, placed = place(parts)
    positions = [segment.first_position + np.arange(len(segment.ids)) for segment in segments]
    columns = [_columns_of(where, number) for number, where in enumerate(placed)]
    rows = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    token_T = np.concatenate([segment.ids for segment in segments])
    starts = [segment.start for segment in segments]
    return Pack(
        sequences=[where.row.sequence for where in placed],
        token_T=token_T,
        position_T=np.concatenate(positions),
        cu_seqlens=np.int32([*starts, len(token_T)]),
        prefix_S=np.array([segment.prefix for segment in segments]),
        experts_TLA=_experts(placed, len(token_T)),
        **rows,
    )


def _experts(placed: Sequence[Placed], num_tokens: int) -> np.ndarray | None:
    """`Pack.experts_TLA`. A prompt that several sequences share goes where the first of them sent it."""
    known_TLA = placed[0].row.sequence.experts_TLA
    if known_TLA is None:
        return None
    experts_TLA = np.full((num_tokens, *known_TLA.shape[1:]), -1, np.int16)
    for where in reversed(placed):
        sequence = where.row.sequence
        segments = [(where.first, 0), (where.response, len(sequence.prompt_ids))]
        for segment, first_input in segments:
            if segment is not None:
                known_TLA = sequence.experts_TLA[first_input : first_input + len(segment.ids)]
                experts_TLA[segment.start : segment.start + len(known_TLA)] = known_TLA
    return experts_TLA


def _columns_of(placed: Placed, number: int) -> dict[str, np.ndarray]:
    """The columns of a pack for the sampled ids of its sequence `number`."""
    sample, sequence = placed.row
    sampled = np.flatnonzero(sequence.tokens["mask"])
    prompt_end = placed.first.start + len(sequence.prompt_ids)
    response_start = placed.response.start if placed.response else prompt_end
    if isinstance(sample.advantage, list):  # one for each turn
        advantages = [sample.advantage[turn] for turn in sequence.turns]
        adv_R = np.repeat(np.float32(advantages), sequence.turn_tokens)
    else:
        adv_R = np.full(len(sampled), sample.advantage, np.float32)
    return {
        # Input j - 1 of the response predicts its id j; the prompt's last row predicts id 0.
        "pos_R": np.where(sampled > 0, response_start + sampled, prompt_end) - 1,
        "tokens_R": sequence.tokens[sampled],
        "adv_R": adv_R,
        "seq_R": np.full(len(sampled), number),
        "sample_R": np.full(len(sampled), sample.number),
        "reward_R": np.full(len(sampled), sample.grade.reward, np.float32),
    }


def empty_pack() -> Pack:
    """One token, no response token: a rank with fewer packs runs it, so that every rank joins every collective."""
    nothing = Row(Sample(0, 0, 0, []), TokenSequence([0]))
    return replace(_pack([[nothing]]), sequences=[])
