"""Samples between ranks, as arrays: the numbers of each to all ranks, its tokens to the ranks that need them.

All ranks hold the same samples in the same order. Only the `holder` of a sample has the tokens, until it sends them.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from data import Sample
from system.ranks import gather

NUMBERS = [(f"num_{name}", "i4") for name in ("output_tokens", "trained_tokens", "env_tokens", "turns")]
NUMBERS += [("weight_version", "i4"), ("newest_version", "i4"), ("reward", "f8")]
NUMBERS += [("finish_reason", "S16"), ("outcome", "S16"), ("extracted", "S16")]  # 80 bytes
TOKEN = np.dtype([("output_ids", "i4"), ("sampler_logps", "f4"), ("versions", "i4"), ("mask", "?")])  # 13 bytes


def share_numbers(samples: Sequence[Sample], part_names: Sequence[str], max_turns: int) -> None:
    """Gives all ranks the NUMBERS of all samples, in place, and the parts of their rewards that have these names: one
    all_reduce. `extracted` becomes a hash of the text, since votes only ask whether two are equal."""
    names = [name for name, _ in NUMBERS]
    parts = [(f"part {name}", "f8") for name in part_names]
    records = np.zeros(len(samples), [*NUMBERS, *parts, ("turns", "f8", (2, max_turns))])
    for i, sample in enumerate(samples):
        if sample.holder == dist.get_rank():
            digest = hashlib.blake2b(repr(sample.extracted).encode(), digest_size=8).hexdigest()
            values = [getattr(sample, name) for name in names[:-1]] + ["" if sample.extracted is None else digest]
            records[i] = (*values, *(sample.rewards.get(name, math.nan) for name in part_names), 0)
            records["turns"][i, :, : sample.num_turns] = sample.turn_rewards, sample.turn_tokens
    dist.all_reduce(torch.from_numpy(records.view(np.int64)))  # of each row all ranks but one have zeros
    for sample, row, (rewards, tokens) in zip(samples, records.tolist(), records["turns"].tolist(), strict=True):
        for name, value in zip(names, row, strict=False):
            setattr(sample, name, value.decode() or None if isinstance(value, bytes) else value)
        sample.turn_rewards, sample.turn_tokens = rewards[: sample.num_turns], [*map(int, tokens[: sample.num_turns])]
        parts = zip(part_names, row[len(names) : -1], strict=True)
        sample.rewards = {name: part for name, part in parts if not math.isnan(part)}


def share_rows(samples: Sequence[Sample]) -> None:
    """Gives all ranks, in place, what `share_numbers` leaves out of the samples of agents: prompt ids, which are not
    the problem's, calls, failures and forks. A collective."""
    rank, no_tokens = dist.get_rank(), {name: np.zeros(0) for name in TOKEN.names}
    held = [replace(each, **no_tokens) for each in samples if each.is_led and each.holder == rank]
    for each in held:
        each.forks = [replace(fork, **no_tokens) for fork in each.forks]
    found = {(each.prompt, each.index): each for part in gather(held) for each in part}
    for sample in samples:
        if sample.is_led and sample.holder != rank:
            for name in ("prompt_ids", "forks", "crashed", "message", "num_calls"):
                setattr(sample, name, getattr(found[sample.prompt, sample.index], name))


def move_tokens(needed: Sequence[Sequence[Sample]]) -> None:
    """Gives rank i the tokens of the samples needed[i], in place: one all_to_all, or none where all ranks have them.
    All ranks pass the same lists; a rank that has no list needs none."""
    if all(sample.holder is None for samples in needed for sample in samples):
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    received = sorted(needed[rank] if rank < len(needed) else [], key=lambda sample: sample.holder)
    sent = [[sample for sample in samples if sample.holder == rank] for samples in needed]
    outgoing = np.empty(sum(sample.num_output_tokens for samples in sent for sample in samples), TOKEN)
    for name in TOKEN.names:
        outgoing[name] = np.concatenate([[], *(getattr(sample, name) for samples in sent for sample in samples)])
    num_bytes = np.zeros((2, size), np.int64)  # from and to each rank
    np.add.at(num_bytes[0], [s.holder for s in received], [TOKEN.itemsize * s.num_output_tokens for s in received])
    num_bytes[1, : len(sent)] = [TOKEN.itemsize * sum(s.num_output_tokens for s in samples) for samples in sent]
    incoming = np.empty(num_bytes[0].sum(), np.uint8)
    dist.all_to_all_single(torch.from_numpy(incoming), torch.from_numpy(outgoing.view(np.uint8)), *num_bytes.tolist())
    ends = np.cumsum([sample.num_output_tokens for sample in received])
    for sample, tokens in zip(received, np.split(incoming.view(TOKEN), ends), strict=False):
        for name in TOKEN.names:
            setattr(sample, name, tokens[name].copy())
