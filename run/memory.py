"""The memory of a run beside its plan: what each phase took, and the message when there was not enough."""

import re
import resource
from dataclasses import replace
from pathlib import Path

import torch

from base.check.memory_fit import gib, listed, problem, remedies, table
from base.inputs import reader
from base.inputs.run_inputs import RunInputs
from base.plan.gpus import GIB
from base.plan.memory_plan import CONTEXT, OWN_CONTEXT, Plan
from base.system.exits import OutOfMemory
from base.system.failure import own_frames
from base.system.ranks import Ranks, gather, on_rank0
from config import Config, ConfigError

PHASES = {"generation": "generate", "policy_and_reference_logprobs": "score"}
PHASES |= {"policy_training": "train", "prepare_for_generation": "sync"}
# The words of torch for a GPU and for host memory; of vLLM for a KV cache too small for one sequence, and for a GPU
# whose share is not free.
NO_MEMORY = re.compile("out of memory|can't allocate memory|No available memory|KV cache is needed|Free mem")


class Memory:
    """Rank 0 prints the plan of a GPU whose memory is known; ConfigError if that is too small. The peaks leave out
    engine_bytes and engine_reserved: what torch still counts of the sleeping engine, though vLLM has freed it."""

    def __init__(self, plan: Plan, ranks: Ranks):
        self.plan = plan
        self.engine_bytes = 0.0
        self.engine_reserved = 0.0
        if plan.gpu_bytes is None:
            return
        if ranks.job_rank == 0:
            print(table(plan), flush=True)
        too_small = problem(plan)
        if too_small:
            raise ConfigError(f"{too_small}. If you know better, --gpu_memory=GiB overrides what the GPU has")

    def note_engine(self) -> None:
        """What torch counts of the engine, which sleeps: all but the policy's weights."""
        weights = self.plan.states().get("weights", 0)
        self.engine_bytes = torch.cuda.memory_allocated() - weights
        self.engine_reserved = torch.cuda.memory_reserved() - weights

    def metrics(self, peaks: dict[str, tuple[int, int, int]]) -> dict[str, float]:
        """GiB by the plan, and as allocated and reserved, of the phases that `Timers` has peaks of."""
        values = {}
        awake = {"generate": self.engine_bytes, "sync": self.plan.woken, "score": 0, "train": 0}  # of the engine
        for name in PHASES.keys() & peaks.keys():
            phase = PHASES[name]
            if phase == "generate" and self.plan.cfg.policy.generation.num_generators:  # planned for other GPUs
                continue
            prefix = f"performance/memory/{name}"
            planned = self.plan.size(phase) - CONTEXT  # which torch does not see
            values[f"{prefix}/planned_gib"] = planned / GIB
            allocated, reserved, unused = peaks[name]
            measured = allocated - self.engine_bytes + awake[phase]
            values[f"{prefix}/measured_gib"] = measured / GIB
            reserved = reserved - self.engine_reserved + awake[phase]
            values[f"{prefix}/reserved_gib"] = reserved / GIB
            if phase == "sync":  # what torch keeps from the engine while that generates
                values[f"{prefix}/unused_gib"] = unused / GIB
        return values

    def explained(self, error: BaseException, phase: str) -> BaseException:
        """`error`; or if it says that memory ran out in `phase`, an OutOfMemory that says where, and how to fix it."""
        if not says_no_memory(error):
            return error
        last = own_frames(error)[-1]
        name = PHASES.get(phase, "generate")
        text = str(error).split(". ")[0] or "MemoryError"
        if "cache" in text:  # vLLM's, of its KV cache
            share = "gpu_memory_utilization" if torch.cuda.is_available() else "kvcache_gib"
            keys = f"raise policy.generation.vllm_cfg.{share}, or lower policy.max_total_sequence_length"
        else:
            keys = remedies(self.plan, name)
        return OutOfMemory(
            f"{phase}, {last.filename}:{last.lineno}: {last.line} ({text}). Planned for {name} "
            f"on a GPU, with packs of up to {self.plan.tokens:,} tokens: {gib(self.plan.size(name))} GiB "
            f"({listed(self.plan.phases[name][1])}). Measured: {measured()}. To fix it, {keys}"
        )


def plan_memory(cfg: Config, inputs: RunInputs, ranks: Ranks, gpu_bytes: float | None, trains=True) -> Plan:
    """How much memory the run needs on each GPU, which has gpu_bytes; None: what torch says. On GPUs its config has a
    number for train_mb_tokens. A collective."""
    others = 0  # bytes that other processes hold
    if gpu_bytes is None and torch.cuda.is_available():
        free_bytes, gpu_bytes = torch.cuda.mem_get_info()
        held = gpu_bytes - free_bytes - OWN_CONTEXT
        # The smallest GPU, and what others hold at most: all ranks have one plan.
        gpu_bytes = min(gather(gpu_bytes, ranks.job))
        others = max(0, *gather(held, ranks.job))
    plan = Plan.of_run(cfg, inputs, ranks.job_size, gpu_bytes)
    plan = replace(plan, trains=trains, others=others)
    return with_pack_tokens(plan, ranks) if torch.cuda.is_available() else plan


def with_pack_tokens(plan: Plan, ranks: Ranks) -> Plan:
    """With a number for train_mb_tokens where that is null: of the run which is resumed, else the plan's choice. So the
    run's config has it. A collective."""
    if not plan.chooses_packs:
        return plan
    run = plan.cfg.checkpointing.resume_from
    tokens = None
    if run is not None:
        before = on_rank0(lambda: reader.load(Path(run) / "config.yaml"), ranks.job)
        tokens = before.policy.sequence_packing.train_mb_tokens
    return plan.with_packs(tokens or plan.tokens)


def says_no_memory(error: BaseException) -> bool:
    """Whether memory ran out. vLLM and torch on a CPU have no type of error for that, only words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | ValueError) and NO_MEMORY.search(str(error)) is not None


def measured() -> str:
    """GiB of this process's GPU, or of host memory."""
    if not torch.cuda.is_available():
        return f"peak {gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}"
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    most = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.memory_reserved()
    return (
        f"allocated {gib(allocated)}, peak {gib(most)}, reserved {gib(reserved)}, free {gib(free)}, total {gib(total)}"
    )
