"""The samples, the config and the prompts of tests that train: by hand, on one rank and on two."""

from dataclasses import replace

import numpy as np
import torch
from samples import sampled

import config
from base.system.ranks import local_rows
from model import Decoder, load_policy
from pack import Part, rows_of
from records import Sample

# Gradients are compared as they are, so nothing clips them; the log-probabilities are made up, so they have no limit.
CONFIG = config.Config(
    grpo=config.GRPOConfig(
        num_prompts_per_step=5, num_generations_per_prompt=4, logp_gap_limit=None, canary_period=0, val_period=0
    ),
    loss_fn=config.LossConfig(reference_policy_kl_penalty=0.0),
    policy=config.PolicyConfig(
        max_total_sequence_length=64,
        max_grad_norm=1e9,
        scheduler=config.SchedulerConfig(warmup_steps=0),
        generation=config.GenerationConfig(temperature=0.8, max_new_tokens=24),
    ),
)
PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(5 + 4 * i)] for i in range(12)]
# By hand, so that the ranks get very different numbers of tokens, packs, and an empty pack to fill up.
rank_share = [[0, 1, 2], list(range(3, 20))]


def settings(**sections) -> config.Config:
    """CONFIG with keys of sections changed: settings(grpo={...}, policy={...}, loss_fn={...})."""
    return replace(CONFIG, **{name: replace(getattr(CONFIG, name), **keys) for name, keys in sections.items()})


def packs_of(max_tokens: int) -> config.Config:
    """CONFIG with packs of at most so many tokens."""
    return settings(policy={"sequence_packing": config.SequencePackingConfig(train_mb_tokens=max_tokens)})


def adapted_policy(folder, mesh, precision: str = "float32") -> Decoder:
    """With adapters of rank 3, which two ranks cannot halve, as steps would have left them: B is no longer 0."""
    lora = config.LoRAConfig(enabled=True, dim=3)
    model = load_policy(folder, device="cpu", mesh=mesh, precision=precision, lora=lora, seed=7)
    for i, (name, param) in enumerate(model.named_parameters()):
        if name.endswith("lora_B"):
            whole = 0.05 * np.random.default_rng(i).standard_normal(param.shape, np.float32)
            param.detach().to_local().copy_(torch.from_numpy(whole)[local_rows(param)])
    return model


def alone(samples: list[Sample], adv_B: list[float]) -> list[Part]:
    """Parts of one sample each, with their advantages: packs in which no prompt is shared."""
    for sample, adv in zip(samples, adv_B, strict=True):
        sample.advantage = adv
    return [[row] for row in rows_of(samples)]


def make_samples(vocab_size: int) -> tuple[list[Sample], list[float]]:
    """5 groups of 4 samples of random ids, lengths 2..30, some with observation tokens in the middle; advantages."""
    rng = np.random.default_rng(5)
    samples: list[Sample] = []
    for i in range(20):
        ids, length = rng.integers(0, vocab_size, rng.integers(1, 12)), int(rng.integers(1, 19))
        prompt = ids.tolist() if i % 4 == 0 else samples[-1].sequence.prompt_ids
        mask = np.ones(length, bool)
        if i % 3 == 0:
            mask[1 : length // 2] = False
        output_ids, logp = rng.integers(0, vocab_size, length), rng.normal(-5, 1, length)
        samples.append(sampled(i // 4, i % 4, prompt, output_ids, logp=logp, mask=mask, row_id=i // 4))
    return samples, rng.normal(size=20).tolist()
