"""The batch and the prompts that tests/system/test_ranks.py computes on one rank and on two."""

import numpy as np
import torch

import config
from batch import Minibatch, to_device
from data import Pack, Sample

CONFIG = config.Config(
    loss_fn=config.LossConfig(reference_policy_kl_penalty=0.0),
    policy=config.PolicyConfig(
        max_total_sequence_length=64, generation=config.GenerationConfig(temperature=0.8, max_new_tokens=24)
    ),
)
PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(5 + 4 * i)] for i in range(12)]
# By hand, so that the ranks get very different numbers of tokens, packs, and an empty pack to fill up.
rank_share = [[0, 1, 2], list(range(3, 20))]


def make_samples(vocab_size: int) -> tuple[list[Sample], list[float]]:
    """20 samples of random ids, lengths 2..30, some with observation tokens in the middle; and their advantages."""
    rng = np.random.default_rng(5)
    samples = []
    for i in range(20):
        prompt, length = rng.integers(0, vocab_size, rng.integers(1, 12)), int(rng.integers(1, 19))
        mask = np.ones(length, bool)
        if i % 3 == 0:
            mask[1 : length // 2] = False
        samples.append(
            Sample(
                prompt=i // 4,
                index=i % 4,
                row_id=i // 4,
                prompt_ids=prompt.tolist(),
                output_ids=rng.integers(0, vocab_size, length).astype(np.int32),
                sampler_logps=rng.normal(-5, 1, length).astype(np.float32),
                mask=mask,
                finish_reason="stop",
                weight_version=0,
            )
        )
    return samples, rng.normal(size=20).tolist()


def batch_of(packs: list[Pack], samples: list[Sample]) -> Minibatch:
    """The optimizer batch of `samples` whose packs on this rank are `packs`."""
    num_tokens = sum(int(s.mask.sum()) for s in samples)
    num_positive_tokens = sum(int(s.mask.sum()) for s in samples if s.reward > 0)
    micros = [to_device(pack, torch.device("cpu")) for pack in packs]
    return Minibatch(micros, num_tokens, sum(bool(s.mask.any()) for s in samples), num_positive_tokens)
