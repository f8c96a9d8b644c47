"""What the memory plan says to a user: a table, whether a run fits into its GPUs, and which keys would fix it."""

import json
from collections.abc import Sequence
from dataclasses import replace

from check.memory_plan import GIB, Items, Plan
from check.rules import check_config
from config import ConfigError

Fix = tuple[str, object]  # a key, and its value
SPARE = 0.05  # of the GPU, which a fix leaves free: the plan is not exact, and torch's segments have gaps
OFFLOAD = "policy.offload_optimizer_for_logprob"
RECOMPUTE, RECOMPUTE_COST = "policy.dtensor_cfg.activation_checkpointing", 4


def table(plan: Plan) -> str:
    """A line for each phase, of its largest moment, what holds most first."""
    limit = "" if plan.gpu_bytes is None else f" of {gib(plan.gpu_bytes)}"
    lines = [f"memory     GiB{limit} on each of {plan.num_gpus} GPUs, packs of {plan.tokens:,} tokens"]
    for phase, (moment, items) in plan.phases.items():
        lines.append(f"  {phase:8} {gib(sum(items.values()))}{moment and f' at {moment}'}: {listed(items)}")
    if host := plan.host():
        lines.append(f"  host     {listed(host)}, pinned, for each GPU")
    room = f", room for {plan.kv_cache / plan.kv_bytes:,.0f}" if plan.kv_cache > 0 else ""
    lines.append(f"  KV cache {plan.kv_bytes / 1024:,.4g} KiB a token{room}")
    return "\n".join(lines)


def problem(plan: Plan) -> str | None:
    """What is lacking, and keys of little cost that fix it together; None if the run fits, or nobody knows."""
    if plan.lacking() <= 0:
        return None
    phase = max(plan.phases, key=plan.size)
    needed = f"{phase} needs {gib(plan.size(phase))} GiB on each GPU, which has {gib(plan.gpu_bytes)}"
    if plan.size(phase) <= plan.gpu_bytes:
        needed = f"the engine's share leaves {gib(plan.kv_cache)} GiB for the KV cache, too few for a sequence"
    costs = _fixes(plan)
    # Also without the offload of the moments, which rules out cpu_offload, and with a few blocks before other keys.
    orders = [[fix for fix in costs if fix[0] != OFFLOAD]]
    orders += list(costs), sorted(costs, key=lambda fix: fix[0] != RECOMPUTE)

    def cost(fixes: Sequence[Fix]) -> float:
        share = sum(value for key, value in fixes if key == RECOMPUTE) / plan.model.num_hidden_layers
        return sum(costs.get(fix, share * RECOMPUTE_COST) for fix in fixes)

    if best := min(filter(None, (_search(plan, order) for order in orders)), key=cost, default=None):
        return f"memory: {needed}; it fits with {', '.join(_saving(plan, fix, phase) for fix in best)}"
    more = [n for n in (plan.num_gpus << k for k in range(1, 9)) if replace(plan, num_gpus=n).lacking(SPARE) <= 0]
    return f"memory: {needed}; no keys fix that" + (f", {more[0]} GPUs do" if more else "")


def _search(plan: Plan, order: Sequence[Fix]) -> list[Fix]:
    """Takes fixes in this order until the plan fits, then drops those that it fits without, and recomputes no more
    blocks than it has to; [] if it never fits."""

    def fits(fixes: Sequence[Fix]) -> bool:
        return changed(plan, fixes).lacking(SPARE) <= 0

    taken: list[Fix] = []
    for fix in order:
        if not fits(taken) and _is_accepted(changed(plan, [*taken, fix])):
            taken.append(fix)
    if not fits(taken):
        return []
    for fix in reversed(taken):
        rest = [each for each in taken if each != fix]
        taken = rest if fits(rest) else taken
    if (RECOMPUTE, True) in taken:
        at = taken.index((RECOMPUTE, True))
        fewer = ([*taken[:at], (RECOMPUTE, n), *taken[at + 1 :]] for n in range(1, plan.model.num_hidden_layers))
        taken = next(filter(fits, fewer), taken)
    return taken


def remedies(plan: Plan, phase: str) -> str:
    """The first three keys, by cost, that save in this phase and go together."""
    best: list[Fix] = []
    for fix in _fixes(plan):
        is_saving = changed(plan, [fix]).size(phase) < 0.99 * plan.size(phase)
        if len(best) < 3 and is_saving and fix[0] not in dict(best) and _is_accepted(changed(plan, [*best, fix])):
            best.append(fix)
    return "set " + ", ".join(_saving(plan, fix, phase) for fix in best) if best else "use more GPUs"


def _is_accepted(plan: Plan) -> bool:
    """Whether `--check` takes its config."""
    try:
        check_config(plan.cfg, plan.num_gpus + plan.cfg.policy.generation.num_generators)
        return bool(plan.trained)  # LoRA refuses a rank that is more than a layer's
    except ConfigError:
        return False


def _fixes(plan: Plan) -> dict[Fix, int]:
    """What may be set to save memory -> its cost, lowest first: low if it slows a step little, high if it trains
    something else."""
    policy = plan.cfg.policy
    costs: dict[Fix, int] = {
        ("policy.logprob_chunk_size", 1024): 1,
        ("policy.sequence_packing.train_mb_tokens", max(policy.max_total_sequence_length, plan.tokens // 2)): 2,
        (OFFLOAD, True): 3,
        ("policy.dtensor_cfg.defer_fsdp_grad_sync", False): 4,
        (RECOMPUTE, True): RECOMPUTE_COST,
        ("policy.optimizer.kwargs.state_dtype", "bfloat16"): 5,
        ("policy.dtensor_cfg.dp_replicate_size", 1): 10,
        ("policy.dtensor_cfg.cpu_offload", True): 30,
    }
    if plan.trains:  # else the adapters belong to what is scored
        costs["policy.dtensor_cfg.lora_cfg.enabled", True] = 20
    tensor = 2 * policy.generation.vllm_cfg.tensor_parallel_size
    if plan.model.num_attention_heads % tensor == 0:
        costs["policy.generation.vllm_cfg.tensor_parallel_size", tensor] = 5
    engine = max(0, plan.kv_cache) + sum(plan.engine.values())
    for base in (plan, changed(plan, [(OFFLOAD, True)])) if plan.gpu_bytes else ():
        share = min(0.9, int((1 - SPARE - (base.size("generate") - engine) / plan.gpu_bytes) * 20) / 20)
        is_less = share < policy.generation.vllm_cfg.gpu_memory_utilization  # then the KV cache pays
        if share * plan.gpu_bytes > sum(plan.engine.values()):
            costs["policy.generation.vllm_cfg.gpu_memory_utilization", share] = 6 if is_less else 2
    return {fix: costs[fix] for fix in sorted(costs, key=costs.get) if _is_accepted(changed(plan, [fix]))}


def changed(plan: Plan, fixes: Sequence[Fix]) -> Plan:
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
