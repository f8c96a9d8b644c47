"""Whether the engine samples from the weights that it was sent: a fixed prompt, scored again by the trainer."""

import numpy as np
import torch
import torch.distributed as dist

from engine import Engine, SamplingOptions
from model import Decoder, PackLayout
from system.exits import StopRun

NUM_PROMPT_TOKENS = 160  # more than a block of the prefix cache: vLLM's have 16 tokens, on CPU 128
NUM_NEW_TOKENS = 32


def check_canary(model: Decoder, engine: Engine, limit: float | None, device: torch.device, when: str) -> float:
    """Mean |sampler - trainer| log-probability, in nats per token, on a fixed prompt that every engine continues: this
    rank's engine, or in a split job all engines.

    It finds weights, a cache or a compute path that stayed old before a whole rollout is drawn from them, and whatever
    the data are: its prompt is longer than a block of the prefix cache. No filter: top_k=1 would hide every gap. One
    forward without gradients; a collective of all ranks. Raises StopRun above `limit` (grpo.logp_gap_limit).
    """
    total = engine.max_total_tokens
    num_new = min(NUM_NEW_TOKENS, max(1, total // 2))
    random = np.random.Generator(np.random.PCG64(0))
    prompt = random.integers(0, engine.vocab_size, min(NUM_PROMPT_TOKENS, total - num_new)).tolist()
    sum_and_count = torch.zeros(2, dtype=torch.float64)
    for reply in engine.generate([prompt], [0], SamplingOptions(model.temperature, num_new), may_stop=False):
        ids = torch.tensor([*prompt, *reply.ids.tolist()], device=device)
        position_T = torch.arange(len(ids) - 1, device=device)
        layout = PackLayout.of(np.array([0, len(position_T)]), None, len(position_T), device)
        with torch.no_grad():
            replied = (position_T[len(prompt) - 1 :], ids[len(prompt) :])
            logp_R, _ = model(ids[:-1], position_T, layout, *replied, filtered=False)
        gap_R = (logp_R.cpu().double() - torch.from_numpy(reply.logps)).abs()
        sum_and_count += torch.tensor([gap_R.sum(), len(gap_R)], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    gap = float(sum_and_count[0] / sum_and_count[1])
    if limit is not None and not gap <= limit:
        raise StopRun(
            f"{when}: on a fixed prompt sampler and trainer disagree by {gap:.4f} nats per token (grpo.logp_gap_limit="
            f"{limit}). Likely causes: the engine holds old weights (a parameter that the sync does not reach, a tied "
            "head), a stale prefix cache, another vocabulary on one side, or a wrong attention kernel"
        )
    return gap
