"""Samples between ranks: what is known of them to all ranks, their tokens to the ranks that need them.

All ranks hold the same samples in the same order. Only the `holder` of a sample has the tokens, until it sends them.
No other file reads `Sample.holder`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from base.system.ranks import gather
from records import Sample

TOKEN = np.dtype([("output_ids", "i4"), ("sampler_logps", "f4"), ("versions", "i4"), ("mask", "?")])  # 13 bytes


def held_here(samples: Iterable[Sample]) -> list[Sample]:
    """The samples of which this rank has to pass on the tokens, or what is made of them: each is one rank's. Those that
    all ranks have are dealt to them."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    held = []
    for number, sample in enumerate(samples):
        holder = number % size if sample.holder is None else sample.holder
        if holder == rank:
            held.append(sample)
    return held


def share_samples(samples: list[Sample], part_names: Sequence[str]) -> None:
    """Gives all ranks all samples, in place, but for the tokens: of their rewards the parts that have these names, and
    prompt ids of agents' samples alone, as the others have the problem's. A collective."""
    rank = dist.get_rank()
    told = [_without_tokens(sample, part_names) for sample in samples if sample.holder == rank]
    found = {}
    for told_by_a_rank in gather(told):
        for sample in told_by_a_rank:
            found[sample.prompt, sample.index] = sample
    for place, sample in enumerate(samples):
        if sample.holder == rank:
            continue
        samples[place] = found[sample.prompt, sample.index]
        if not samples[place].is_led:
            samples[place].prompt_ids = sample.prompt_ids


def _without_tokens(sample: Sample, part_names: Sequence[str]) -> Sample:
    """What all ranks are told of a sample."""
    grade = sample.grade
    grade.rewards = {name: grade.rewards[name] for name in part_names if name in grade.rewards}
    no_tokens = {name: np.zeros(0, TOKEN[name]) for name in TOKEN.names}
    forks = [replace(fork, **no_tokens, calls=[]) for fork in sample.forks]
    prompt_ids = sample.prompt_ids if sample.is_led else []
    return replace(sample, **no_tokens, forks=forks, prompt_ids=prompt_ids, messages=[], calls=[])


def move_tokens(needed: Sequence[Sequence[Sample]]) -> None:
    """Gives rank i the tokens of the samples needed[i], in place: one all_to_all, or none where all ranks have them.
    All ranks pass the same lists; a rank that has no list needs none."""
    if all(sample.holder is None for samples in needed for sample in samples):
        return
    rank = dist.get_rank()
    size = dist.get_world_size()
    lists = [_each_once(samples) for samples in needed]
    lists += [[] for _ in range(size - len(lists))]
    sent: list[Sample] = []  # in the order of the ranks that get them
    bytes_out = []
    for samples in lists:
        held = [sample for sample in samples if sample.holder == rank]
        sent += held
        bytes_out.append(TOKEN.itemsize * _num_tokens(held))
    received = sorted(lists[rank], key=lambda sample: sample.holder)
    bytes_in = [0] * size
    for sample in received:
        bytes_in[sample.holder] += TOKEN.itemsize * sample.num_output_tokens
    outgoing = _tokens_of(sent).view(np.uint8)
    incoming = np.empty(sum(bytes_in), np.uint8)
    dist.all_to_all_single(torch.from_numpy(incoming), torch.from_numpy(outgoing), bytes_in, bytes_out)
    tokens = incoming.view(TOKEN)
    start = 0
    for sample in received:
        end = start + sample.num_output_tokens
        for name in TOKEN.names:
            setattr(sample, name, tokens[name][start:end].copy())
        start = end


def _tokens_of(samples: Sequence[Sample]) -> np.ndarray:
    """The tokens of the samples, back to back."""
    tokens = np.empty(_num_tokens(samples), TOKEN)
    start = 0
    for sample in samples:
        end = start + sample.num_output_tokens
        for name in TOKEN.names:
            tokens[name][start:end] = getattr(sample, name)
        start = end
    return tokens


def move_calls(samples: Sequence[Sample]) -> None:
    """Gives all ranks what agents asked in these samples, in place. A collective if an agent led one of them."""
    rows = [row for sample in samples if sample.is_led for row in sample.sequences]
    if not rows:
        return
    rank = dist.get_rank()
    held = {number: row.calls for number, row in enumerate(rows) if row.holder == rank}
    for held_by_a_rank in gather(held):
        for number, calls in held_by_a_rank.items():
            rows[number].calls = calls


def _each_once(samples: Sequence[Sample]) -> list[Sample]:
    by_id = {id(sample): sample for sample in samples}
    return list(by_id.values())


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.num_output_tokens for sample in samples)
