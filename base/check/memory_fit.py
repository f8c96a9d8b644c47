"""What the memory plan says to a user: a table, whether a run fits into its GPUs, and which keys would fix it."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace

from base.check.rules import check_config
from base.plan.gpus import GIB
from base.plan.memory_plan import CONTEXT, SPARE, Items, Plan
from config import ConfigError, num_recomputed

Fixes = dict[str, object]  # a key -> its new value
FSDP = "policy.dtensor_cfg"
VLLM = "policy.generation.vllm_cfg"
LORA = f"{FSDP}.lora_cfg.enabled"
OFFLOAD = "policy.offload_optimizer_for_logprob"
SHARE = f"{VLLM}.gpu_memory_utilization"
LEAST = GIB / 100  # what saves less is not named
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
        pinned = "pinned"
        if plan.cfg.policy.dtensor_cfg.cpu_offload:
            pinned = "pinned but for moments and reference"
        lines.append(f"  host     {listed(plan.host())}, {pinned}, for each GPU")
    lines.append(f"  KV cache {plan.kv_bytes / 1024:,.4g} KiB a token{room(plan)}")
    if plan.lacking() > 0:
        lines += ["it does not fit; by itself", *savings(plan)]
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
    """What is lacking, and one or two settings that fix it; None if the run fits, or nobody knows."""
    if plan.lacking() <= 0:
        return None
    phase = max(plan.phases, key=plan.size)
    size = math.ceil(plan.size(phase) / GIB * 100) / 100
    has = math.floor(plan.gpu_bytes / GIB * 100) / 100
    needed = f"memory: {phase} needs {size} GiB on each GPU, which has {has:g}"
    if plan.size(phase) <= plan.gpu_bytes:
        left = gib(max(0, plan.kv_cache))
        needed = f"memory: the engine's share leaves {left} GiB of KV cache, too little for a sequence"
    fixes = smallest_fix(plan, (1 - SPARE) * plan.gpu_bytes)
    if fixes:
        text = f"{needed}; it fits with {_named(plan, fixes, phase)}"
        if plan.trains and fixes.get(f"{FSDP}.cpu_offload"):
            host = sum(changed(plan, fixes).host().values())
            less = "configs/math_8b_lora_24gb.yaml trains an adapter with less"
            text += f"; the host then holds {gib(host)} GiB for each GPU, and a step is slow: {less}"
        return text
    problem = f"{needed}; no two settings of those above are enough"
    for doublings in range(1, 9):
        num_gpus = plan.num_gpus << doublings
        if replace(plan, num_gpus=num_gpus).lacking() <= 0:
            return f"{problem}; {num_gpus} GPUs would be enough"
    return problem


def savings(plan: Plan) -> list[str]:
    """A line for each remedy that saves memory by itself, in its strongest form: GiB in each phase."""
    lines = []
    for remedy in _remedies(plan):
        fixes = _with_share(plan, remedy[-1], (1 - SPARE) * plan.gpu_bytes)
        new = changed(plan, fixes)
        saved = {f"in {phase}": plan.size(phase) - new.size(phase) for phase in plan.phases}
        saved["for the KV cache"] = new.kv_cache - plan.kv_cache
        parts = [f"{gib(size)} {where}" for where, size in saved.items() if size >= LEAST]
        if parts:
            lines.append(f"  {' and '.join(_written(fixes))} saves {', '.join(parts)}")
    return lines


def remedies(plan: Plan, phase: str) -> str:
    """One or two settings with which this phase needs a tenth less than planned."""
    fixes = smallest_fix(plan, CONTEXT + 0.9 * (plan.size(phase) - CONTEXT), phase)
    return f"set {_named(plan, fixes, phase)}" if fixes else "use more GPUs"


def smallest_fix(plan: Plan, most: float, *phases: str) -> Fixes:
    """One setting, or two, with which these phases, or all, need at most so many bytes; {} if no two are enough. What
    comes late in `_remedies` is named only if nothing before it is enough."""
    before: list[list[Fixes]] = [[{}]]
    for remedy in _remedies(plan):
        for other in before:
            fixes = _weakest(plan, other, remedy, most, phases)
            if fixes:
                return fixes
        before.append(remedy)
    return {}


def _weakest(plan: Plan, first: list[Fixes], second: list[Fixes], most: float, phases: tuple[str, ...]) -> Fixes:
    """The weakest forms of two remedies that are enough together; {} if the strongest are not."""

    def joined(one: Fixes, other: Fixes) -> Fixes:
        return _with_share(plan, one | other, most)

    def is_enough(one: Fixes, other: Fixes) -> bool:
        fixes = joined(one, other)
        return _is_accepted(plan, fixes) and changed(plan, fixes).lacking(most, *phases) <= 0

    if not is_enough(first[-1], second[-1]):
        return {}
    weak_first = next(form for form in first if is_enough(form, second[-1]))
    weak_second = next(form for form in second if is_enough(weak_first, form))
    return joined(weak_first, weak_second)


def _with_share(plan: Plan, fixes: Fixes, most: float) -> Fixes:
    """The settings, with a number in place of None for the engine's share: the largest with which generation needs at
    most so many bytes."""
    if SHARE not in fixes:
        return fixes
    others = {key: value for key, value in fixes.items() if key != SHARE}
    new = changed(plan, others)
    beside = new.size("generate") - sum(new.engine.values()) - max(0, new.kv_cache)
    share = max(1, math.floor(100 * (most - beside) / plan.gpu_bytes)) / 100
    return others | {SHARE: share}


def _is_accepted(plan: Plan, fixes: Fixes) -> bool:
    """Whether the config may have these settings together, and LoRA its rank."""
    try:
        new = changed(plan, fixes)
        check_config(new.cfg, plan.num_gpus + plan.cfg.policy.generation.num_generators)
        return new.shards["weights"] > 0
    except ConfigError:
        return False


def _remedies(plan: Plan) -> list[list[Fixes]]:
    """Settings that may save memory: what slows a step little comes first, what trains something else near the end. Of
    each remedy the weakest form comes first."""
    policy = plan.cfg.policy
    most_rows = policy.logprob_chunk_size or 1025
    computed_again = policy.dtensor_cfg.activation_checkpointing
    num_layers = plan.model.num_hidden_layers
    blocks = range(num_recomputed(computed_again, num_layers) + 1, num_layers + 1)
    num_ranks = policy.generation.num_generators or plan.num_gpus
    tensor = policy.generation.vllm_cfg.tensor_parallel_size
    heads = plan.model.num_attention_heads
    tensors = [n for n in range(tensor + 1, heads + 1) if num_ranks % n == 0 and heads % n == 0]
    adapters: Fixes = {LORA: True}
    if policy.optimizer.name == "torch.optim.Muon":  # which trains no adapters
        adapters["policy.optimizer.name"] = "torch.optim.AdamW"
    offload: Fixes = {f"{FSDP}.cpu_offload": True}
    if policy.offload_optimizer_for_logprob:  # the first offloads the moments, too
        offload[OFFLOAD] = False
    remedies = [
        [{"policy.logprob_chunk_size": rows} for rows in (1024, 512, 256, 128) if rows < most_rows],
        [{OFFLOAD: True}],
        [{SHARE: None}] if plan.gpu_bytes else [],  # its value: _with_share
        [{f"{FSDP}.defer_fsdp_grad_sync": False}],
        [{f"{FSDP}.activation_checkpointing": number} for number in blocks],
        [{"policy.sequence_packing.share_prefix": False}],
        [{"policy.optimizer.kwargs.state_dtype": "bfloat16"}],
        [{"policy.precision": "bfloat16"}],
        [{f"{VLLM}.precision": "bfloat16"}],
        [{"policy.sequence_packing.train_mb_tokens": size} for size in _pack_sizes(plan)],
        [{f"{FSDP}.activation_checkpointing": "offload"}],
        [{f"{FSDP}.dp_replicate_size": 1}],
        [{f"{VLLM}.tensor_parallel_size": number} for number in tensors],
        [adapters] if plan.trains else [],  # else the adapters belong to what is scored
        [offload],
    ]
    accepted = [[fixes for fixes in remedy if _is_accepted(plan, fixes)] for remedy in remedies]
    return [remedy for remedy in accepted if remedy]


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
    for text, (key, value) in zip(_written(fixes), fixes.items(), strict=True):
        saved = plan.size(phase) - changed(plan, {key: value}).size(phase)
        texts.append(f"{text} (saves {gib(saved)} in {phase})" if saved > 0 else text)
    return " and ".join(texts)


def _written(fixes: Fixes) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in fixes.items()]


def listed(items: Items) -> str:
    """The largest first; what is less than a hundredth is left out."""
    ordered = sorted(items.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size > sum(items.values()) / 100)


def gib(size: float) -> str:
    return f"{size / GIB:.3g}"
