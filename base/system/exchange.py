"""Samples between ranks: what is known of them to all ranks, their tokens to the ranks that need them.

All ranks hold the same samples in the same order. Only the `holder` of a sequence has its tokens, until it sends them;
a sample's sequences have one holder, which is a generator in a split job. Beside run/split and the agents'
endpoint no other file reads `TokenSequence.holder`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from base.system.ranks import Bridge, gather
from records import TOKEN, Sample, TokenSequence


def holders_of(sequences: Iterable[TokenSequence]) -> list[int]:
    """Of each sequence the rank that has to pass on its tokens, or what is made of them. Those that all ranks have, or
    a generator of a split job, are dealt."""
    size = dist.get_world_size()
    holders = []
    for number, sequence in enumerate(sequences):
        is_dealt = sequence.holder is None or sequence.holder >= size
        holders.append(number % size if is_dealt else sequence.holder)
    return holders


def share_samples(samples: list[Sample], part_names: Sequence[str]) -> None:
    """Gives all ranks all samples, in place, but for the tokens: of their rewards the parts that have these names, and
    prompt ids of agents' samples alone, as the others have the problem's. A collective."""
    rank = dist.get_rank()
    told = [_without_tokens(sample, part_names) for sample in samples if sample.sequence.holder == rank]
    found = {}
    for told_by_a_rank in gather(told):
        for sample in told_by_a_rank:
            found[sample.prompt, sample.index] = sample
    for place, sample in enumerate(samples):
        if sample.sequence.holder == rank:
            continue
        samples[place] = found[sample.prompt, sample.index]
        if not sample.by_agent:
            samples[place].sequence.prompt_ids = sample.sequence.prompt_ids


def _without_tokens(sample: Sample, part_names: Sequence[str]) -> Sample:
    """What all ranks are told of a sample."""
    grade = sample.grade
    grade.rewards = {name: grade.rewards[name] for name in part_names if name in grade.rewards}
    told = without_tokens(sample)
    for sequence in told.sequences:
        sequence.calls = []
        if not sample.by_agent:
            sequence.prompt_ids = []
    return told


def without_tokens(sample: Sample) -> Sample:
    """A copy of the sample with the numbers of tokens alone."""
    sequences = []
    for sequence in sample.sequences:
        experts_TLA = sequence.experts_TLA
        if experts_TLA is not None:
            experts_TLA = experts_TLA[:0]  # which tells shape and dtype
        sequences.append(replace(sequence, tokens=np.zeros(0, TOKEN), experts_TLA=experts_TLA))
    return replace(sample, sequences=sequences, messages=[])


def move_tokens(needed: Sequence[Sequence[TokenSequence]], bridge: Bridge | None = None) -> None:
    """Gives rank i the tokens of the sequences needed[i], in place: one all_to_all, or none where all ranks have them.
    All ranks pass the same lists; a rank that has no list needs none. bridge: of a split job, in which all trainers
    call this, and the generators send."""
    if all(sequence.holder is None for sequences in needed for sequence in sequences):
        return
    group = None
    if bridge is not None:
        bridge.ask_for_tokens(needed)
        group = bridge.objects
    send_tokens(needed, group)


def send_tokens(needed: Sequence[Sequence[TokenSequence]], group: dist.ProcessGroup | None = None) -> None:
    """As `move_tokens`, among the ranks of the group, whose ranks the holders are. A collective."""
    group = group or dist.group.WORLD
    rank = group.rank()
    size = group.size()
    lists = [_each_once(sequences) for sequences in needed]
    lists += [[] for _ in range(size - len(lists))]
    sent: list[np.ndarray] = [np.zeros(0, np.uint8)]  # in the order of the ranks that get them
    bytes_out = []
    for sequences in lists:
        held = [sequence for sequence in sequences if sequence.holder == rank]
        sent += map(_bytes_of, held)
        bytes_out.append(sum(map(_num_bytes, held)))
    received = sorted(lists[rank], key=lambda sequence: sequence.holder)
    bytes_in = [0] * size
    for sequence in received:
        bytes_in[sequence.holder] += _num_bytes(sequence)
    outgoing = np.concatenate(sent)
    incoming = np.empty(sum(bytes_in), np.uint8)
    dist.all_to_all_single(torch.from_numpy(incoming), torch.from_numpy(outgoing), bytes_in, bytes_out, group)
    start = 0
    for sequence in received:
        end = start + _num_bytes(sequence)
        _take_bytes(sequence, incoming[start:end])
        start = end


def _num_bytes(sequence: TokenSequence) -> int:
    """Of `_bytes_of`, on any rank."""
    num_bytes = TOKEN.itemsize * sequence.num_output_tokens
    if sequence.experts_TLA is not None:
        _, num_layers, num_chosen = sequence.experts_TLA.shape
        num_bytes += sequence.num_routed_tokens * num_layers * num_chosen * sequence.experts_TLA.itemsize
    return num_bytes


def _bytes_of(sequence: TokenSequence) -> np.ndarray:
    """Its tokens, then its experts."""
    parts = [sequence.tokens.view(np.uint8)]
    if sequence.experts_TLA is not None:
        parts.append(sequence.experts_TLA.reshape(-1).view(np.uint8))
    return np.concatenate(parts)


def _take_bytes(sequence: TokenSequence, received: np.ndarray) -> None:
    """As `_bytes_of` makes them."""
    tokens, experts = np.split(received, [TOKEN.itemsize * sequence.num_output_tokens])
    sequence.tokens = tokens.copy().view(TOKEN)
    if sequence.experts_TLA is not None:
        of_token = sequence.experts_TLA.shape[1:]
        sequence.experts_TLA = experts.copy().view(sequence.experts_TLA.dtype).reshape(-1, *of_token)


def move_to_log(samples: Sequence[Sample], bridge: Bridge | None) -> None:
    """Gives rank 0, which writes the log, these samples' tokens, and all ranks what agents asked. A collective."""
    move_tokens([[sequence for sample in samples for sequence in sample.sequences]], bridge)
    move_calls(samples)


def move_calls(samples: Sequence[Sample]) -> None:
    """Gives all ranks what agents asked in these samples, in place. A collective if one of them is an agent's."""
    sequences = [sequence for sample in samples if sample.by_agent for sequence in sample.sequences]
    if not sequences:
        return
    rank = dist.get_rank()
    held = {number: sequence.calls for number, sequence in enumerate(sequences) if sequence.holder == rank}
    for held_by_a_rank in gather(held):
        for number, calls in held_by_a_rank.items():
            sequences[number].calls = calls


def _each_once(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    by_id = {id(sequence): sequence for sequence in sequences}
    return list(by_id.values())
