"""What the memory plan says to a user: a table, whether a run fits into its GPUs, and which keys would fix it."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from base.check.rules import check_config
from base.plan.memory_plan import CONTEXT, GIB, SPARE, Items, Plan
from config import ConfigError

Fixes = dict[str, object]  # a key -> its new value
FSDP = "policy.dtensor_cfg"
VLLM = "policy.generation.vllm_cfg"
LORA = f"{FSDP}.lora_cfg.enabled"
OFFLOAD = "policy.offload_optimizer_for_logprob"
SHARE = f"{VLLM}.gpu_memory_utilization"
FREE = 2  # remedies that are tried before the engine's share is lowered
FEW = 8  # whole sequences at once


def table(plan: Plan) -> str:
    """A line for each phase, of its largest moment, what holds most first."""
    limit = "" if plan.gpu_bytes is None else f" with {gib(plan.gpu_bytes)}"
    packs = f"packs of {plan.tokens:,} tokens"
    if plan.chooses_packs and plan.gpu_bytes is None:
        packs += " (chosen at the start, more where a GPU has room)"
    gpus = "the GPU" if plan.num_gpus == 1 else f"each of {plan.num_gpus} GPUs"
    lines = [f"memory     GiB on {gpus}{limit}, {packs}"]
    for phase, (moment, items) in plan.phases.items():
        where = f" at {moment}" if moment else ""
        lines.append(f"  {phase:8} {gib(sum(items.values()))}{where}: {listed(items)}")
    if plan.host():
        lines.append(f"  host     {listed(plan.host())}, pinned, for each GPU")
    lines.append(f"  KV cache {plan.kv_bytes / 1024:,.4g} KiB a token{room(plan)}")
    return "\n".join(lines)


def room(plan: Plan) -> str:
    """How many whole sequences the KV cache holds, and what to do if they are FEW: a decode step takes about as long
    for one sequence as for eight, since it reads all weights once."""
    grpo = plan.cfg.grpo
    length = plan.cfg.policy.max_total_sequence_length
    drawn = -(-grpo.prompts_per_batch // plan.num_engines) * grpo.num_generations_per_prompt
    room = plan.kv_cache / plan.kv_bytes
    held = int(room // length)
    if held < 1:
        return ""
    text = f", room for {room:,.0f}: {held:,} sequences of {length:,} at once"
    if held >= min(FEW, drawn):
        return text
    fixes = f"raise {SHARE} or lower policy.max_total_sequence_length if you can"
    return f"{text}, of the {drawn:,} that an engine samples in a step, so sampling is slow: {fixes}"


def problem(plan: Plan) -> str | None:
    """What is lacking, and keys that fix it together; None if the run fits, or nobody knows."""
    if plan.lacking() <= 0:
        return None
    phase = max(plan.phases, key=plan.size)
    size = math.ceil(plan.size(phase) / GIB * 100) / 100
    has = math.floor(plan.gpu_bytes / GIB * 100) / 100
    needed = f"memory: {phase} needs {size} GiB on each GPU, which has {has:g}"
    if plan.size(phase) <= plan.gpu_bytes:
        left = gib(max(0, plan.kv_cache))
        needed = f"memory: the engine's share leaves {left} GiB of KV cache, too little for a sequence"
    for spare in (SPARE, 0.03, 0.01, 0):
        fixes = fix(plan, (1 - spare) * plan.gpu_bytes)
        if fixes:
            rest = "" if spare == SPARE else f" and {spare:.0%} to spare"
            return f"{needed}; it fits with {_named(plan, fixes, phase)}{rest}"
    problem = f"{needed}; no setting tried makes this model, batch and length fit"
    for doublings in range(1, 9):
        num_gpus = plan.num_gpus << doublings
        if replace(plan, num_gpus=num_gpus).lacking() <= 0:
            return f"{problem}; {num_gpus} GPUs would be enough"
    return problem


def remedies(plan: Plan, phase: str) -> str:
    """Keys with which this phase needs a tenth less than planned."""
    fixes = fix(plan, CONTEXT + 0.9 * (plan.size(phase) - CONTEXT), phase)
    return f"set {_named(plan, fixes, phase)}" if fixes else "use more GPUs"


def fix(plan: Plan, most: float, *phases: str) -> Fixes:
    """Settings with which these phases, or all, need at most so many bytes; {} where none are found.

    The remedies are tried in their order, one on top of the other: each stays, at its strongest, that takes something
    off what is too much. Once all fits, each is given up, or made weaker, as far as that does not matter, the last one
    first."""
    taken: list[tuple[list[Fixes], Fixes]] = []  # (a remedy, weakest first; the strength taken)
    settings: Fixes = {}
    enough: Fixes = {}
    for number, remedy in enumerate(_remedies(plan)):
        accepted = [strength for strength in remedy if _is_accepted(plan, settings | strength)]
        if not accepted:
            continue
        stronger = settings | accepted[-1]
        lowers_share = number >= FREE
        before = _excess(changed(plan, settings), most, phases, lowers_share=lowers_share)
        if _excess(changed(plan, stronger), most, phases, lowers_share=lowers_share) >= before:
            continue
        taken.append((remedy, accepted[-1]))
        settings = stronger
        enough = _fitting(plan, settings, most, phases, lowers_share=lowers_share)
        if enough:
            break
    else:
        enough = _fitting(plan, settings, most, phases, lowers_share=True)
    if not enough:
        return {}
    share = {SHARE: enough[SHARE]} if SHARE in enough else {}
    for number in reversed(range(len(taken))):
        remedy, strength = taken[number]
        for weaker in ({}, *remedy):
            taken[number] = remedy, weaker
            if _fitting(plan, _joined(taken) | share, most, phases, lowers_share=False):
                break
        else:
            taken[number] = remedy, strength
    found = _joined(taken) | share
    return {key: value for key, value in found.items() if value != attrgetter(key)(plan.cfg)}


def _joined(taken: Iterable[tuple[list[Fixes], Fixes]]) -> Fixes:
    """The settings of several remedies; a later one wins."""
    joined: Fixes = {}
    for _, strength in taken:
        joined.update(strength)
    return joined


def _is_accepted(plan: Plan, fixes: Fixes) -> bool:
    """Whether the config may have these settings together, and LoRA its rank."""
    try:
        new = changed(plan, fixes)
        check_config(new.cfg, plan.num_gpus + plan.cfg.policy.generation.num_generators)
        return new.shards["weights"] > 0
    except ConfigError:
        return False


def _fitting(plan: Plan, fixes: Fixes, most: float, phases: tuple[str, ...], *, lowers_share: bool) -> Fixes:
    """The settings, with another share for the engine where they need one and may have it; {} if they do not do."""
    new = changed(plan, fixes)
    others = new.size("generate") - sum(new.engine.values()) - max(0, new.kv_cache)
    share = max(1, math.floor(100 * (most - others) / (plan.gpu_bytes or math.inf))) / 100
    ways = [fixes, fixes | {SHARE: share}] if lowers_share else [fixes]
    for settings in ways:
        if changed(plan, settings).lacking(most, *phases) <= 0 and _is_accepted(plan, settings):
            return settings
    return {}


def _excess(plan: Plan, most: float, phases: tuple[str, ...], *, lowers_share: bool) -> float:
    """By how much the phases, or all, are too large together. With lowers_share the KV cache holds one sequence."""
    excess = 0.0
    for phase in phases or plan.phases:
        size = plan.size(phase)
        if phase == "generate" and lowers_share:
            size += plan.kv_bytes * plan.cfg.policy.max_total_sequence_length - max(0, plan.kv_cache)
        excess += max(0, size - most)
    return excess


def _remedies(plan: Plan) -> list[list[Fixes]]:
    """What is tried, in this order: what slows a step little comes first, what trains something else last. Of each
    remedy the weakest form comes first. Of settings that save nothing, none is kept."""
    policy = plan.cfg.policy
    most_rows = policy.logprob_chunk_size or 1025
    computed_again = policy.dtensor_cfg.activation_checkpointing
    blocks = [] if computed_again is True else range(computed_again + 1, plan.model.num_hidden_layers + 1)
    num_ranks = policy.generation.num_generators or plan.num_gpus
    tensor = policy.generation.vllm_cfg.tensor_parallel_size
    heads = plan.model.num_attention_heads
    tensors = [n for n in range(tensor + 1, heads + 1) if num_ranks % n == 0 and heads % n == 0]
    adapters = {LORA: True, "policy.optimizer.name": "torch.optim.AdamW"}  # Muon trains no adapters
    offload = {f"{FSDP}.cpu_offload": True, OFFLOAD: False}  # the first offloads the moments, too
    remedies = [
        [{"policy.logprob_chunk_size": rows} for rows in (1024, 512, 256, 128) if rows < most_rows],
        [{OFFLOAD: True}],
        [{f"{FSDP}.defer_fsdp_grad_sync": False}],
        [{f"{FSDP}.activation_checkpointing": number} for number in blocks],
        [{"policy.sequence_packing.share_prefix": False}],
        [{"policy.optimizer.kwargs.state_dtype": "bfloat16"}],
        [{"policy.precision": "bfloat16"}],
        [{f"{VLLM}.precision": "bfloat16"}],
        [{"policy.sequence_packing.train_mb_tokens": size} for size in _pack_sizes(plan)],
        [{f"{FSDP}.dp_replicate_size": 1}],
        [{f"{VLLM}.tensor_parallel_size": number} for number in tensors],
        [{"policy.optimizer.name": "torch.optim.AdamW"}],
        [offload],
    ]
    if plan.trains:  # else the adapters belong to what is scored
        remedies.insert(-1, [adapters])
    return [remedy for remedy in remedies if remedy]


def _pack_sizes(plan: Plan) -> list[int]:
    """Smaller packs, the largest first: halves, and the longest sequence alone."""
    longest = plan.cfg.policy.max_total_sequence_length
    sizes = []
    size = plan.tokens // 2
    while size > longest:
        sizes.append(size)
        size //= 2
    if longest < plan.tokens:
        sizes.append(longest)
    return sizes


def changed(plan: Plan, fixes: Fixes | Iterable[tuple[str, object]]) -> Plan:
    """The plan of the config with these settings."""
    for name, value in dict(fixes).items():
        plan = _with(plan, f"cfg.{name}", value)
    return plan


def _with(section: object, name: str, value: object) -> object:
    first, _, rest = name.partition(".")
    new = _with(getattr(section, first), rest, value) if rest else value
    return replace(section, **{first: new})


def _named(plan: Plan, fixes: Fixes, phase: str) -> str:
    """The settings, and what each saves by itself."""
    texts = []
    for key, value in fixes.items():
        saved = plan.size(phase) - changed(plan, {key: value}).size(phase)
        text = f"{key}={json.dumps(value)}"
        texts.append(f"{text} (saves {gib(saved)} in {phase})" if saved > 0 else text)
    return ", ".join(texts)


def listed(items: Items) -> str:
    """The largest first; what is less than a hundredth is left out."""
    ordered = sorted(items.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size > sum(items.values()) / 100)


def gib(size: float) -> str:
    return f"{size / GIB:.3g}"
