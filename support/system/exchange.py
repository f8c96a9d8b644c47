"""Samples between ranks: what is known of each to all ranks, its tokens to the ranks that need them.

All ranks hold the same samples in the same order. Only the `holder` of a sample has the tokens, until it sends them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from data import Sample
from support.system.ranks import gather

TOKEN = np.dtype([("output_ids", "i4"), ("sampler_logps", "f4"), ("versions", "i4"), ("mask", "?")])  # 13 bytes


def share_samples(samples: list[Sample], part_names: Sequence[str]) -> None:
    """Gives all ranks all samples, in place, but for the tokens: of their rewards the parts that have these names, and
    prompt ids of agents' samples alone, as the others have the problem's. A collective."""
    left_out = {name: np.zeros(0, TOKEN[name]) for name in TOKEN.names}
    held = []
    for each in samples:
        if each.holder == dist.get_rank():
            each.rewards = {name: each.rewards[name] for name in part_names if name in each.rewards}
            forks = [replace(fork, **left_out) for fork in each.forks]
            ids = each.prompt_ids if each.is_led else []
            held.append(replace(each, **left_out, forks=forks, prompt_ids=ids, messages=[]))
    found = {(each.prompt, each.index): each for part in gather(held) for each in part}
    for place, sample in enumerate(samples):
        if sample.holder != dist.get_rank():
            samples[place] = found[sample.prompt, sample.index]
            samples[place].prompt_ids = samples[place].prompt_ids or sample.prompt_ids


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
