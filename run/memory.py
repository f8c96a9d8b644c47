"""The memory of a run beside its plan: what its phases took, and what is said when there was not enough."""

import re
import resource
import traceback

import torch

from check.memory_fit import gib, listed, problem, remedies, table
from check.memory_plan import CONTEXT, GIB, Plan
from config import ConfigError
from system.exits import LIBRARIES, OutOfMemory
from system.ranks import Ranks

PHASES = {"generation": "generate", "policy_and_reference_logprobs": "score"}
PHASES |= {"policy_training": "train", "prepare_for_generation": "sync"}
# What torch says of a GPU and of host memory, and vLLM of a KV cache too small for one sequence, or of a GPU that does
# not have its share free.
NO_MEMORY = re.compile(
    "out of memory|can't allocate memory|No available memory for the cache|KV cache is needed|Free mem"
)


class Memory:
    """Rank 0 prints the plan; ConfigError where the GPU is too small for it. asleep: bytes that torch counts of a
    sleeping engine, because vLLM's allocator gives them back without telling it."""

    def __init__(self, plan: Plan, ranks: Ranks):
        self.plan = plan
        self.asleep = 0.0
        if ranks.job_rank == 0:
            print(table(plan), flush=True)
        if too_small := problem(plan):
            raise ConfigError(f"{too_small}. If you know better, --gpu_memory=GiB takes the place of what the GPU has")

    def metrics(self, peaks: dict[str, int]) -> dict[str, float]:
        """GiB by the plan, and as measured, of the phases that have a peak: {} without CUDA."""
        values = {}
        awake = {"generate": self.asleep, "sync": self.plan.sync()["engine's weights"]}
        for name in PHASES.keys() & peaks.keys():
            phase = PHASES[name]
            if phase == "generate" and self.plan.cfg.policy.generation.num_generators:  # planned for other GPUs
                continue
            planned = self.plan.size(phase) - CONTEXT["cuda"]  # which torch does not see
            values[f"performance/memory/{name}/planned_gib"] = planned / GIB
            values[f"performance/memory/{name}/measured_gib"] = (peaks[name] - self.asleep + awake.get(phase, 0)) / GIB
        return values

    def explained(self, error: BaseException, phase: str) -> BaseException:
        """`error`, or where it says that memory ran out in `phase`, one that says of what, and what mends it."""
        is_one = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_one and not (isinstance(error, RuntimeError | ValueError) and NO_MEMORY.search(str(error))):
            return error
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
        frame = next((f for f in reversed(frames) if f.name == "train"), frames[-1])  # the line of the loop
        name = PHASES.get(phase, "generate")
        text = str(error).split(". ")[0] or "MemoryError"
        keys = remedies(self.plan, name)
        if "cache" in text:  # vLLM's, of its KV cache
            share = "kvcache_gib" if self.plan.device == "cpu" else "gpu_memory_utilization"
            keys = f"raise policy.generation.vllm_cfg.{share}, or lower policy.max_total_sequence_length"
        return OutOfMemory(
            f"{phase}, {frame.filename}:{frame.lineno}: {frame.line} ({text}). Planned for {name}, with packs of up to "
            f"{self.plan.tokens:,} tokens: {gib(self.plan.size(name))} GiB ({listed(self.plan.phases[name][1])}). "
            f"Measured: {measured()}. To mend it, {keys}"
        )


def measured() -> str:
    """GiB: of this process's GPU, or of host memory."""
    if not torch.cuda.is_available():
        return f"{gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} at most"
    free, total = torch.cuda.mem_get_info()
    allocated, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return f"allocated {gib(allocated)}, at most {gib(most)}, free {gib(free)}, in all {gib(total)}"
