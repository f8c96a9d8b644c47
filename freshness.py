"""Whether the engine samples from the weights that are trained: a canary, looked at outside of training.

Each step compares the log-probabilities of its samples on both sides anyway (optim.count_bad_steps), which costs
nothing, but comes after a whole rollout and sees only what was sampled. The canary is a fixed prompt of more than a
block of the prefix cache: it comes before the first rollout, and finds weights, a cache or a compute path that stayed
old, whatever the data are.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

import config
import data
from model import Decoder
from rollout import Engine
from system.exits import StopRun
from update import forward, to_device

NUM_PROMPT_TOKENS = 160  # vLLM's blocks are 16 tokens, on CPU 128
NUM_NEW_TOKENS = 32


def check_versions(samples: Sequence[data.Sample], version: int) -> None:
    """StopRun where a sample was drawn from other weights than those of step `version`, which are to be trained."""
    found = {sample.weight_version for sample in samples}
    if found - {version}:
        raise StopRun(f"samples are of the weights of steps {sorted(found)}, to train those of step {version}: no sync")


def check_canary(cfg: config.Config, model: Decoder, engine: Engine, device: torch.device, when: str) -> float:
    """Mean |sampler - trainer| log-probability, in nats, of NUM_NEW_TOKENS tokens that every engine samples after the
    canary; one forward without gradients. A collective of all ranks. StopRun above grpo.logp_gap_limit."""
    total = cfg.policy.max_total_sequence_length
    num_new = min(NUM_NEW_TOKENS, max(1, total // 2))
    random = np.random.Generator(np.random.PCG64(0))
    prompt = random.integers(0, engine.vocab_size, min(NUM_PROMPT_TOKENS, total - num_new)).tolist()
    how = {"temperature": cfg.policy.generation.temperature, "max_new_tokens": num_new}
    (completion,) = engine.generate([prompt], [0], interruptible=False, **how)
    mask, version = np.ones(len(completion.ids), bool), engine.weight_version
    sample = data.Sample(0, 0, 0, prompt, completion.ids, completion.logps, mask, "length", version)
    (pack,) = data.pack_samples([sample], [0.0], total)
    with torch.no_grad():
        logp_R = forward(model, to_device(pack, device), cfg, engine.vocab_size)[0]
    gap_R = (logp_R.cpu().double() - torch.from_numpy(pack.sampler_logp_R)).abs()
    sum_and_count = torch.tensor([gap_R.sum(), len(gap_R)], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    gap, limit = float(sum_and_count[0] / sum_and_count[1]), cfg.grpo.logp_gap_limit
    if limit is not None and not gap <= limit:
        raise StopRun(
            f"{when}: on a fixed prompt sampler and trainer disagree by {gap:.4f} nats per token (grpo.logp_gap_limit="
            f"{limit}). Likely causes: the engine holds old weights (a parameter that the sync does not reach, a tied "
            "head), a stale prefix cache, another vocabulary on one side, or a wrong attention kernel"
        )
    return gap
