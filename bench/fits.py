"""What fits into which GPUs, with which keys, by the memory plan; and the seconds of a step, computed, not measured
(base/plan/step_time.py). Prints the table of docs/gpus.md, and that of bench/results/step_time.md.

    .venv/bin/python -m bench.fits
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from base.check import memory_fit
from base.hf.folder import from_hf
from base.hf.model_config import ModelConfig
from base.inputs import reader
from base.plan.gpus import GIB, Gpu
from base.plan.gpus import GPUS as GPU_BY_WORD
from base.plan.memory_plan import SPARE, Plan
from base.plan.step_time import Step, number, phase_seconds

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FIELDS += ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
MODELS = {  # fields of their config.json
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151_936, True),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, True),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151_936, False),
    "Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151_936, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128_256, False),
}
VOCAB = 151_669  # ids of Qwen's tokenizer
COUNTS = (1, 2, 4, 8)
OFFLOAD = "policy.offload_optimizer_for_logprob"
PACKS = "policy.sequence_packing.train_mb_tokens"
CHUNK = "policy.logprob_chunk_size"
TENSOR = "policy.generation.vllm_cfg.tensor_parallel_size"
LORA = "policy.dtensor_cfg.lora_cfg.enabled"
HOST = "policy.dtensor_cfg.cpu_offload"
LETTERS = {
    OFFLOAD: "o",
    "policy.dtensor_cfg.activation_checkpointing": "r",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "u",
    PACKS: "p",
    CHUNK: "c",
    "policy.optimizer.kwargs.state_dtype": "b",
    "policy.sequence_packing.share_prefix": "s",
    TENSOR: "t",
    "policy.dtensor_cfg.dp_replicate_size": "d",
    LORA: "LoRA",
    HOST: "h",
}
LAST_RESORTS = {LORA, HOST}
LADDER = (  # fast ones first; an engine over all GPUs
    {},
    {OFFLOAD: True, CHUNK: 1024},
    {OFFLOAD: True, CHUNK: 1024, PACKS: 4096},
    {OFFLOAD: True, CHUNK: 1024, TENSOR: "all"},
    {OFFLOAD: True, CHUNK: 1024, TENSOR: "all", PACKS: 4096},
    {LORA: True, CHUNK: 1024},
    {LORA: True, CHUNK: 1024, OFFLOAD: True, TENSOR: "all"},
    {HOST: True, CHUNK: 1024, TENSOR: "all"},
    {HOST: True, CHUNK: 1024, TENSOR: "all", PACKS: 4096},
    {HOST: True, CHUNK: 1024, TENSOR: "all", LORA: True},
)


GPUS = {
    GPU_BY_WORD[word].gib: GPU_BY_WORD[word] for word in ("rtx4080", "rtx4090", "a100_40gb", "l40s", "h100", "h200")
}
A6000 = Gpu("RTX A6000", 48, 154.8e12, 768e9, 32e9, 32e9, 12.5e9 / 8)
RECIPE = Step(512, 160, 300, 768)  # configs/math_1b.yaml on GSM8K: 32 prompts x 16 samples; lengths assumed


@lru_cache
def model_config(name: str) -> ModelConfig:
    fields = dict(zip(FIELDS, MODELS[name], strict=True)) | {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
    return from_hf(fields)


@lru_cache
def base_plan(name: str, num_gpus: int, gib: float, gpu: Gpu, lora: bool = False) -> Plan:
    cfg = reader.load(ROOT / "configs/math_1b.yaml", [f"policy.dtensor_cfg.lora_cfg.enabled={json.dumps(lora)}"])
    return Plan(cfg, model_config(name), VOCAB, num_gpus, gib * GIB)


@lru_cache(None)
def fitted(name: str, gib: int, num_gpus: int) -> tuple[Plan, dict[str, object]] | None:
    """The plan on the first rung of LADDER on which it fits, or one or two more keys make it fit, and all its keys."""
    base = base_plan(name, num_gpus, gib, GPUS[gib])
    for rung in LADDER:
        keys = dict(rung)
        if num_gpus == 1:
            keys.pop(TENSOR, None)
        elif TENSOR in keys:
            keys[TENSOR] = num_gpus
        plan = memory_fit.changed(base, keys)
        if plan.lacking() <= 0:
            return plan, keys
        fixes = memory_fit.smallest_fix(plan, (1 - SPARE) * plan.gpu_bytes)
        if fixes and not fixes.keys() & LAST_RESORTS:
            return memory_fit.changed(plan, fixes), keys | fixes
    return None


def named(fixes: dict[str, object]) -> str:
    """The keys by their letters: r22 u.55."""
    values = {}
    for key, value in fixes.items():
        values[key] = str(value).removeprefix("0")
        if value in (True, False, "bfloat16"):
            values[key] = ""
        elif value == "offload":
            values[key] = "h"
    return " ".join(LETTERS[key] + values[key] for key in LETTERS if key in fixes)


def cell(name: str, gib: int, num_gpus: int) -> str:
    """Keys and seconds of the recipe with all weights trained, or with LoRA where that alone fits."""
    found = fitted(name, gib, num_gpus)
    if not found:
        return "-"
    plan, fixes = found
    return f"{named(fixes)} **{number(sum(phase_seconds(plan, GPUS[gib], RECIPE).values()))}**".strip()


def rows(names: tuple[str, ...] = tuple(MODELS)[:5]) -> Iterator[list[str]]:
    for name in names:
        for gib in GPUS:
            yield [name, str(gib), *(cell(name, gib, n) for n in COUNTS)]


def published() -> Iterator[tuple[str, str, float, float]]:
    """(run, part, seconds published or measured here, seconds computed)."""
    here = phase_seconds(base_plan("Qwen2.5-1.5B", 1, 141, GPUS[141]), GPUS[141], Step(256, 144, 768, 768))
    for part, seconds in (("generate", 10.9), ("score", 1.43), ("train", 4.12)):  # medians of gpu_2026-11-28
        yield "here, vLLM 0.24, Qwen2.5-1.5B, 1 H200", part, seconds, here[part]
    nemo = replace(base_plan("Llama-3.1-8B", 8, 80, GPUS[80]), vocab=128_256)
    for title, response, parts, whole in (
        ("NeMo RL 0.3, FSDP2, Llama-3.1-8B, 8 H100", 777, (57, 19, 38, 4), 122),
        ("the same, rerun by SB Intuitions", 802, (55, 19, 40, 6), 129),
    ):
        step = Step(2048, 120, response, 4096, scorings=2, group=32, shared=False)
        computed = phase_seconds(nemo, GPUS[80], step)
        for part, theirs in zip(computed, parts, strict=True):
            yield title, part, theirs, computed[part]
        yield title, "step", whole, sum(computed.values())
    sixteen = replace(memory_fit.changed(nemo, {"cluster.num_nodes": 2}), num_gpus=16)
    step = Step(2048, 120, 1019 - 120, 4096, scorings=2, group=32, shared=False)
    yield (
        "NeMo RL 0.5, Megatron, Llama-3.1-8B, 16 H100",
        "step",
        92.8,
        sum(phase_seconds(sixteen, GPUS[80], step).values()),
    )
    for title, name, n, gpu, length, tokens_per_second in (
        ("prime-rl, Qwen3-4B, 8 H100, 64k tokens, MFU 35 %", "Qwen3-4B", 8, GPUS[80], 65_536, 28_966),
        ("prime-rl, Qwen3-0.6B, 1 H100, 16k tokens, MFU 11 %", "Qwen3-0.6B", 1, GPUS[80], 16_384, 11_896),
        ("prime-rl, Qwen3-0.6B, 1 A6000, 16k tokens", "Qwen3-0.6B", 1, A6000, 16_384, 3_687),
    ):
        keys = {"policy.dtensor_cfg.activation_checkpointing": True, "policy.sequence_packing.train_mb_tokens": length}
        plan = memory_fit.changed(base_plan(name, n, 80, gpu), keys)
        step = Step(2 * n, 0, length, length, shared=False)
        yield title, "train", step.tokens / tokens_per_second, phase_seconds(plan, gpu, step)["train"]
    verl = memory_fit.changed(nemo, {"policy.dtensor_cfg.activation_checkpointing": True})
    computed = phase_seconds(verl, GPUS[80], Step(512, 100, 4000, 20_480, shared=False))
    yield "verl, FSDP2, Qwen2.5-Math-7B, H20", "score / train", 88 / 286, computed["score"] / computed["train"]


def table(header: list[str], lines: list[list[str]]) -> str:
    rows = [f"| {' | '.join(line)} |" for line in [header, *lines]]
    rows.insert(1, "|" + "---|" * len(header))
    return "\n".join(rows) + "\n"


def fits() -> str:
    """The table of docs/gpus.md."""
    return table(["model", "GiB", "1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"], [*rows()])


def errors() -> str:
    """The table of bench/results/step_time.md."""
    lines = []
    for run, part, theirs, ours in published():
        computed = f"{ours:.2g}" if ours < 10 else f"{ours:.0f}"
        lines.append([run, part, f"{theirs:.3g}", computed, f"{ours / theirs - 1:+.0%}"])
    return table(["run", "part", "seconds", "computed", "error"], lines)


if __name__ == "__main__":
    print(fits())
    print(errors())
