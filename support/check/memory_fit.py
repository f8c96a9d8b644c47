"""What the memory plan says to a user: a table, whether a run fits into its GPUs, and which keys would fix it."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from operator import attrgetter

from config import ConfigError
from support.check.memory_plan import CONTEXT, GIB, Items, Plan
from support.check.rules import check_config

Fixes = dict[str, object]  # a key -> its new value
Options = dict[str, tuple[int, list]]  # a key -> its cost, and values that save memory, the strongest last
SPARE = 0.05  # of the GPU, which a fix leaves free where it can: the plan is not exact, and torch's segments have gaps
FSDP, VLLM = "policy.dtensor_cfg", "policy.generation.vllm_cfg"
SHARE = f"{VLLM}.gpu_memory_utilization"
FEW = 8  # whole sequences at once


def table(plan: Plan) -> str:
    """A line for each phase, of its largest moment, what holds most first."""
    limit = "" if plan.gpu_bytes is None else f" with {gib(plan.gpu_bytes)}"
    lines = [f"memory     GiB on each of {plan.num_gpus} GPUs{limit}, packs of {plan.tokens:,} tokens"]
    for phase, (moment, items) in plan.phases.items():
        lines.append(f"  {phase:8} {gib(sum(items.values()))}{moment and f' at {moment}'}: {listed(items)}")
    if host := plan.host():
        lines.append(f"  host     {listed(host)}, pinned, for each GPU")
    lines.append(f"  KV cache {plan.kv_bytes / 1024:,.4g} KiB a token{room(plan)}")
    return "\n".join(lines)


def room(plan: Plan) -> str:
    """How many whole sequences the KV cache holds, and what to do if they are FEW: a decode step takes about as long
    for one sequence as for eight, since it reads all weights once."""
    grpo, length = plan.cfg.grpo, plan.cfg.policy.max_total_sequence_length
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
    """What is lacking, and keys of little cost that fix it together; None if the run fits, or nobody knows."""
    if plan.lacking() <= 0:
        return None
    phase = max(plan.phases, key=plan.size)
    size, has = math.ceil(plan.size(phase) / GIB * 100) / 100, math.floor(plan.gpu_bytes / GIB * 100) / 100
    needed = f"memory: {phase} needs {size} GiB on each GPU, which has {has:g}"
    if plan.size(phase) <= plan.gpu_bytes:
        left = gib(max(0, plan.kv_cache))
        needed = f"memory: the engine's share leaves {left} GiB of KV cache, too little for a sequence"
    for spare in (SPARE, 0.03, 0.01, 0):
        if best := _cheapest(plan, (1 - spare) * plan.gpu_bytes):
            rest = "" if spare == SPARE else f" and {spare:.0%} to spare"
            return f"{needed}; it fits with {_named(plan, best, phase)}{rest}"
    more = [n for n in (plan.num_gpus << k for k in range(1, 9)) if replace(plan, num_gpus=n).lacking() <= 0]
    enough = f"; {more[0]} GPUs would be enough" if more else ""
    return f"{needed}; no setting makes this model, batch and length fit{enough}"


def remedies(plan: Plan, phase: str) -> str:
    """Keys of little cost with which this phase needs a tenth less than planned."""
    best = _cheapest(plan, CONTEXT + 0.9 * (plan.size(phase) - CONTEXT), phase)
    return f"set {_named(plan, best, phase)}" if best else "use more GPUs"


def _cheapest(plan: Plan, most: float, *phases: str) -> Fixes:
    """Settings of little cost with which these phases, or all, need at most so many bytes; {} only if there are none.

    Every combination of choices is tried with the strongest values of the other keys, which save whatever else is set:
    where that does not fit, nothing does. Then each key, the last first, gets the weakest value that is enough."""
    choices, others = _fixes(plan)
    strongest = {key: values[-1] for key, (_, values) in others.items() if values}
    now = {key: attrgetter(key)(plan.cfg) for key in choices}

    def fitting(fixes: Fixes) -> Fixes:
        """These, and the largest share for the engine beside them if they need another; {} if that is not enough."""
        new = changed(plan, fixes)
        try:
            room = most - new.size("generate") + sum(new.engine.values()) + max(0, new.kv_cache)
            share = max(1, math.floor(100 * room / (plan.gpu_bytes or math.inf))) / 100
            ways = (fixes, fixes | {SHARE: share})
            enough = next((way for way in ways if changed(plan, way).lacking(most, *phases) <= 0), {})
            if enough:
                check_config(new.cfg, plan.num_gpus + plan.cfg.policy.generation.num_generators)
            return enough
        except ConfigError:  # two do not go together, or LoRA's rank is more than a layer's
            return {}

    def cost(fixes: Fixes) -> float:
        options = [(value, *(choices | others | {SHARE: (4, [value])})[key]) for key, value in fixes.items()]
        return sum(cost * (values.index(value) + 1) / len(values) for value, cost, values in options)

    best: Fixes = {}
    new = ([{}, *({key: value} for value in values if value != now[key])] for key, (_, values) in choices.items())
    for chosen in product(*new):
        base = {key: value for fix in chosen for key, value in fix.items()}
        if (best and cost(base) >= cost(best)) or not fitting(taken := base | strongest):
            continue
        for key, (_, values) in reversed(others.items()):
            without = {other: value for other, value in taken.items() if other != key}
            ways = [without, *(without | {key: value} for value in values)]
            taken = ways[bisect_left(ways[:-1], True, key=lambda fixes: bool(fitting(fixes)))]
        fewer = ({other: value for other, value in taken.items() if other != key} for key in base)
        best = min(filter(None, (best, *map(fitting, (taken, *fewer)))), key=cost)
    return best


def _fixes(plan: Plan) -> tuple[Options, Options]:
    """Choices, which may save only beside others; and the other keys. A cost is low for what slows a step little, and
    high for what trains something else."""
    policy = plan.cfg.policy
    longest, again = policy.max_total_sequence_length, policy.dtensor_cfg.activation_checkpointing
    blocks = range(again + 1, plan.model.num_hidden_layers + 1) if again is not True else ()
    chunks = (rows for rows in (1024, 512, 256, 128) if rows < (policy.logprob_chunk_size or 1025))
    packs = *(size for n in range(1, 30) if (size := plan.tokens >> n) > longest), min(longest, plan.tokens)
    num_ranks, heads = policy.generation.num_generators or plan.num_gpus, plan.model.num_attention_heads
    choices: Options = {
        "policy.offload_optimizer_for_logprob": (3, [not policy.offload_optimizer_for_logprob]),
        f"{VLLM}.tensor_parallel_size": (16, [n for n in range(1, heads + 1) if num_ranks % n == heads % n == 0]),
        f"{FSDP}.dp_replicate_size": (10, [1, plan.num_gpus]),
        "policy.optimizer.name": (20, ["torch.optim.AdamW"]),
        f"{FSDP}.lora_cfg.enabled": (20, [True] * plan.trains),  # else the adapters belong to what is scored
        f"{FSDP}.cpu_offload": (30, [True]),
    }
    others: Options = {
        f"{FSDP}.activation_checkpointing": (4, [*blocks]),
        "policy.logprob_chunk_size": (1, [*chunks]),
        f"{FSDP}.defer_fsdp_grad_sync": (4, [False]),
        "policy.sequence_packing.share_prefix": (4, [False]),
        "policy.optimizer.kwargs.state_dtype": (5, ["bfloat16"]),
        "policy.precision": (6, ["bfloat16"]),
        f"{VLLM}.precision": (6, ["bfloat16"]),
        "policy.sequence_packing.train_mb_tokens": (6, [*packs]),
    }
    return choices, others


def changed(plan: Plan, fixes: Fixes | Iterable[tuple[str, object]]) -> Plan:
    """The plan of the config with these settings."""
    for name, value in dict(fixes).items():
        plan = _with(plan, f"cfg.{name}", value)
    return plan


def _with(section: object, name: str, value: object) -> object:
    first, _, rest = name.partition(".")
    return replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})


def _named(plan: Plan, fixes: Fixes, phase: str) -> str:
    """The settings, and what each saves by itself where a ConfigError, which is short, has room for it."""
    saves = {key: plan.size(phase) - changed(plan, {key: value}).size(phase) for key, value in fixes.items()}
    texts = {key: f" (saves {gib(size)} in {phase})" for key, size in saves.items() if size > 0 and len(saves) < 5}
    return ", ".join(f"{key}={json.dumps(value)}{texts.get(key, '')}" for key, value in fixes.items())


def listed(items: Items) -> str:
    """The largest first; what is less than a hundredth is left out."""
    ordered = sorted(items.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size > sum(items.values()) / 100)


def gib(size: float) -> str:
    return f"{size / GIB:.3g}"
