"""What the memory plan says to a user: a table, whether a run fits into its GPUs, and which keys would mend it."""

import json
from dataclasses import replace
from itertools import combinations

from run.memory_plan import GIB, Items, Plan

Fix = tuple[str, object]  # a key, and its value


def table(plan: Plan) -> str:
    """A line for each phase, of its largest moment, what holds most first."""
    limit = "" if plan.gpu_bytes is None else f" of {gib(plan.gpu_bytes)}"
    kind = "GPU" if plan.device == "cuda" else "rank"
    lines = [f"memory     GiB{limit} on each of {plan.num_gpus} {kind}s, packs of {plan.tokens:,} tokens"]
    for phase, (moment, items) in plan.phases.items():
        lines.append(f"  {phase:8} {gib(sum(items.values()))}{moment and f' at {moment}'}: {listed(items)}")
    if host := plan.host():
        lines.append(f"  host     {listed(host)}, pinned, for each {kind}")
    room = f", room for {plan.kv_cache / plan.kv_bytes:,.0f}" if plan.kv_cache > 0 else ""
    lines.append(f"  KV cache {plan.kv_bytes / 1024:,.4g} KiB a token{room}")
    return "\n".join(lines)


def problem(plan: Plan) -> str | None:
    """What is lacking, and the keys that mend it at the least cost; None where it fits, or nobody knows."""
    if plan.lacking <= 0:
        return None
    phase = max(plan.phases, key=plan.size)
    needed = f"{phase} needs {gib(plan.size(phase))} GiB on each GPU, which has {gib(plan.gpu_bytes)}"
    if plan.size(phase) <= plan.gpu_bytes:
        needed = f"the engine's share leaves {gib(plan.kv_cache)} GiB for the KV cache, too few for a sequence"
    costs = _fixes(plan)
    sets = [some for count in (1, 2, 3) for some in combinations(costs, count)]
    fitting = [some for some in sets if changed(plan, some).lacking <= 0]
    if fitting:
        best = min(fitting, key=lambda some: sum(costs[fix] for fix in some))
        return f"memory: {needed}; it fits with {', '.join(_saving(plan, fix, phase) for fix in best)}"
    more = [n for n in (plan.num_gpus << k for k in range(1, 9)) if replace(plan, num_gpus=n).lacking <= 0]
    return f"memory: {needed}; no three keys mend that" + (f", {more[0]} GPUs do" if more else "")


def remedies(plan: Plan, phase: str) -> str:
    """The three keys that save most in this phase."""
    saves = {fix: plan.size(phase) - changed(plan, [fix]).size(phase) for fix in _fixes(plan)}
    best = sorted((fix for fix in saves if saves[fix] > plan.size(phase) / 100), key=saves.get, reverse=True)[:3]
    return ", ".join(_saving(plan, fix, phase) for fix in best) or "more GPUs"


def _fixes(plan: Plan) -> dict[Fix, int]:
    """What saves memory -> its cost, by which they are chosen: least what slows a step little, most what trains
    something else."""
    policy = plan.cfg.policy
    costs: dict[Fix, int] = {
        ("policy.logprob_chunk_size", 1024): 1,
        ("policy.sequence_packing.train_mb_tokens", max(policy.max_total_sequence_length, plan.tokens // 2)): 2,
        ("policy.offload_optimizer_for_logprob", True): 3,
        ("policy.dtensor_cfg.activation_checkpointing", True): 4,
        ("policy.optimizer.kwargs.state_dtype", "bfloat16"): 5,
        ("policy.dtensor_cfg.cpu_offload", True): 30,
    }
    if policy.optimizer.name == "torch.optim.AdamW" and plan.cfg.grpo.ref_policy_update_alpha == 1:  # else refused
        costs["policy.dtensor_cfg.lora_cfg.enabled", True] = 20
    tensor = 2 * policy.generation.vllm_cfg.tensor_parallel_size
    if (policy.generation.num_generators or plan.num_gpus) % tensor == plan.model.num_attention_heads % tensor == 0:
        costs["policy.generation.vllm_cfg.tensor_parallel_size", tensor] = 5
    if plan.gpu_bytes:
        engine = max(0, plan.kv_cache) + sum(plan.engine.values())
        share = int((1 - (plan.size("generate") - engine) / plan.gpu_bytes) * 20) / 20
        costs["policy.generation.vllm_cfg.gpu_memory_utilization", min(0.9, max(0.05, share))] = 2
    return costs


def changed(plan: Plan, fixes: list[Fix] | tuple[Fix, ...]) -> Plan:
    """The plan of the config with these settings."""
    for name, value in fixes:
        plan = _with(plan, f"cfg.{name}", value)
    return plan


def _with(section: object, name: str, value: object) -> object:
    first, _, rest = name.partition(".")
    return replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})


def _saving(plan: Plan, fix: Fix, phase: str) -> str:
    saves = plan.size(phase) - changed(plan, [fix]).size(phase)
    return f"{fix[0]}={json.dumps(fix[1])}" + (f" (saves {gib(saves)} in {phase})" if saves > 0 else "")


def listed(items: Items) -> str:
    """The largest first; what is less than a hundredth is left out."""
    ordered = sorted(items.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size > sum(items.values()) / 100)


def gib(size: float) -> str:
    return f"{size / GIB:.3g}"
