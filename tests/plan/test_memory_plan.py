"""The memory plan's formulas against counted bytes: of a step of this program, whose GPU is the device `meta`, and of
its parts at full size. tests/system/test_ranks.py has the same of two ranks."""

import json
import math
import random
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, product
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from count_memory import (
    CASES,
    LiveBytes,
    count_kept,
    count_kept_by_transformers,
    differences,
    model_config,
    patch_delta_rule,
    planned_and_counted,
    run_config,
)
from families import BASE, OF_FAMILY, hf_config
from ranks import ranks
from real_models import GEMMA3_1B, GEMMA3_4B, MISTRAL_7B, MOONLIGHT, NEMOTRON_3_NANO, QWEN3_5_4B, QWEN3_30B_A3B
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import attention
from base.check import memory_fit
from base.check.rules import check_config
from base.hf.families import FAMILIES
from base.hf.folder import from_hf
from base.inputs import reader
from base.plan.gpus import GIB
from base.plan.memory_plan import Plan, count, rounded_up
from base.system.host_inputs import ParkedInput
from config import (
    ColocatedConfig,
    ColocatedResourcesConfig,
    Config,
    ConfigError,
    GenerationConfig,
    GRPOConfig,
    LoRAConfig,
    LossConfig,
    SequencePackingConfig,
)
from head import HeadOptions, LossOptions, LossPath, linear_loss
from kernels import sizes
from kernels.backend import KernelBackend
from kernels.filter import SamplingFilter
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from loss import policy_loss

FSDP, VLLM = "policy.dtensor_cfg", "policy.generation.vllm_cfg"
OFFLOAD, EVERYTHING = "policy.offload_optimizer_for_logprob", f"{FSDP}.cpu_offload"
RECOMPUTE = f"{FSDP}.activation_checkpointing"
ROOT = Path(__file__).resolve().parents[2]
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN3_8B |= {"head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 36}
QWEN2_1B = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
QWEN2_1B |= {"head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 28}
LARGE = {
    "1.5B": model_config("qwen2", True, **QWEN2_1B),
    "8B": model_config("qwen3", False, **QWEN3_8B),
    "llama 8B": model_config("llama", False, **QWEN3_8B | {"intermediate_size": 14336, "vocab_size": 128256}),
}


OFFLOADS = {"none": {}, "moments": {"offload_optimizer_for_logprob": True}, "all": {"cpu_offload": True}}
# Between them, each value of each key; tests/system/test_ranks.py has three of the others.
NORMAL = {(name, "none", 4096) for name in ("lora float32 tied, all kept", "bfloat16 moments", "muon")}
NORMAL |= {("qwen3, one block of two", "none", 4096), ("qwen3, inputs on the host", "none", 4096)}
NORMAL |= {("qwen3", "all", 4095), ("qwen3 tied", "moments", 4096)}
STEPS = NORMAL | {(name, "none", 4096) for name in CASES} | {*product(("qwen3 tied", "lora"), OFFLOADS, (4095,))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "offload", "vocab"),
    [pytest.param(*case, marks=() if case in NORMAL else pytest.mark.long) for case in sorted(STEPS)],
)
def test_a_step_and_a_sync_on_one_gpu(name, offload, vocab, one_rank):
    """What lies in host memory is not there, but its part that is on the way is. 4,095: a vocabulary that vLLM pads."""
    assert differences(name, one_rank[2], vocab, **OFFLOADS[offload]) == {}


IN_HOST_MEMORY = [pytest.param("qwen3", False)]
IN_HOST_MEMORY += [
    pytest.param(family, lora, marks=pytest.mark.long)
    for family, lora in [("qwen3", True), ("qwen3_moe", False), ("qwen3_moe", True), ("gemma3_text", False)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lora"), IN_HOST_MEMORY)
def test_inputs_in_host_memory(family, lora, one_rank, monkeypatch):
    """Of 8 blocks, whose inputs would be 6% or more of what is held: on the GPU and on the host."""
    on_host = []  # of each input
    park = ParkedInput.__init__

    def park_and_count(self, *given):
        park(self, *given)
        on_host.append(sum(rounded_up(part.nbytes) for part in self.on_host))

    monkeypatch.setattr(ParkedInput, "__init__", park_and_count)
    model = model_config(family, num_hidden_layers=8)
    packs = SequencePackingConfig(train_mb_tokens=2048)
    cfg = run_config(recompute="offload", lora=lora, compile=False, sequence_packing=packs)
    plan = Plan(cfg, model, model.vocab_size, 1)
    planned, counted = planned_and_counted(plan, one_rank[2])["train"]
    assert planned == pytest.approx(counted, rel=0.015)
    assert plan.host()["inputs of the blocks"] == sum(on_host[-8:])
    on_gpu = memory_fit.changed(plan, {RECOMPUTE: True})
    assert on_gpu.size("train") - plan.size("train") == 7 * 2048 * 4 * model.hidden_size > 0.05 * counted


def test_128k_of_8b_train_on_80_gb_with_their_inputs_in_host_memory():
    """With all on the GPU the longest sequence has 79,000 tokens. Nothing is chosen, but the refusal names the key."""
    length = 132_096
    keys = {RECOMPUTE: True, "policy.max_total_sequence_length": length, "policy.generation.max_new_tokens": 131_072}
    keys["policy.sequence_packing.train_mb_tokens"] = length
    cfg = reader.load(ROOT / "configs/math_8b.yaml", [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    plan = Plan(cfg, LARGE["8B"], 151_665, 8, 79.2 * GIB)
    assert plan.size("train") > 110 * GIB and "inputs of the blocks" not in plan.host()
    assert f'{RECOMPUTE}="offload"' in memory_fit.problem(plan)
    offloaded = memory_fit.changed(plan, {RECOMPUTE: "offload"})
    assert offloaded.lacking() <= 0 and offloaded.size("train") < 65 * GIB
    assert offloaded.host()["inputs of the blocks"] == pytest.approx(36 * length * 4 * 4096, rel=0.01)


def test_what_a_block_keeps_where_a_prompt_is_shared(monkeypatch):
    monkeypatch.setattr(attention, "uses_flash_attention", lambda *_: True)
    cfg = run_config(recompute=False, compile=False, max_total_sequence_length=96)
    generation = GenerationConfig(max_new_tokens=32)
    cfg = replace(cfg, policy=replace(cfg.policy, generation=generation), grpo=GRPOConfig(num_generations_per_prompt=8))
    plan = Plan(cfg, model_config(), 4096, 1)
    shared = count_kept(plan.model, prefix=64, responses=[32] * 8)
    alone = count_kept(plan.model, responses=[32] * 10)
    assert max(plan.kept_by_blocks) == pytest.approx(shared, rel=0.02) and shared > 1.02 * alone
    whole = replace(cfg.policy, sequence_packing=SequencePackingConfig(share_prefix=False))
    assert max(replace(plan, cfg=replace(cfg, policy=whole)).kept_by_blocks) == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("name", LARGE)
def test_what_a_block_keeps_on_cuda(name, monkeypatch):
    monkeypatch.setattr(attention, "uses_flash_attention", lambda *_: True)
    plan = Plan(run_config(compile=False), LARGE[name], 151_665, 1)
    assert max(plan.kept_by_blocks) == pytest.approx(count_kept(LARGE[name], responses=[2048]), rel=0.002)


OF_TRANSFORMERS = {  # and the number of parameters that their authors name
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Gemma 3 1B": (GEMMA3_1B, 999_885_952),
    "Mistral 7B v0.3": (MISTRAL_7B, 7_248_023_552),
    "Gemma 3 4B": (GEMMA3_4B, 3_880_263_168),  # of the text model
    "Moonlight 16B-A3B": (MOONLIGHT, 15_960_110_208),
    "Qwen3.5-4B": (QWEN3_5_4B, 4_205_751_296),
    "Nemotron 3 Nano": (NEMOTRON_3_NANO, 31_577_940_288),
}
# Of each kind of layers at least one.
FEW_LAYERS = {"num_hidden_layers": 2, "vocab_size": 64}
FEW_OF = {
    "Qwen3.5-4B": {"num_hidden_layers": 4},
    "Nemotron 3 Nano": {"num_hidden_layers": 3, "hybrid_override_pattern": "M*E"},
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_what_a_block_of_transformers_keeps_on_cuda(name, monkeypatch):
    monkeypatch.setattr(attention, "uses_flash_attention", lambda *_: True)
    patch_delta_rule(monkeypatch)
    hf, num_parameters = OF_TRANSFORMERS[name]
    plan = Plan(run_config(), from_hf(hf), 32_000, 1)
    assert count(plan.shapes) == num_parameters
    few = plan.model.hf | FEW_LAYERS | FEW_OF.get(name, {})
    assert_blocks_keep(Plan(run_config(), from_hf(few), 64, 1), rel=0.01)


def assert_blocks_keep(plan, rel):
    kinds = {parts: number for number, parts in enumerate(plan.model.layers)}
    for parts, number in kinds.items():
        counted = count_kept_by_transformers(plan.model, block_number=number)
        assert plan.kept_by_blocks[number] == pytest.approx(counted, rel=rel), parts


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "phi3" else pytest.mark.long) for name in FAMILIES]
)
def test_what_a_block_of_each_family_keeps_on_cuda(family, monkeypatch):
    """Within 2.5%: left out are sums of rows, and cosines and sines that a layer makes itself, 2.1% in ERNIE 4.5."""
    monkeypatch.setattr(attention, "uses_flash_attention", lambda *_: True)
    patch_delta_rule(monkeypatch, has_fla=family != "qwen3_next")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 384, "head_dim": 64, "vocab_size": 64}
    sizes |= {"global_head_dim": 128}  # larger ones are not counted
    sizes |= {"moe_shared_expert_intermediate_size": 384, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_ssm": 1024}
    # Between chunks the scan keeps the square of their number, which is much for chunks of 8.
    sizes |= {"mamba_num_heads": 16, "mamba_head_dim": 64, "chunk_size": 64}
    hf = hf_config(family, **sizes).to_dict()
    hf.pop("time_step_limit", None)
    plan = Plan(run_config(compile=False), from_hf(hf, force_hf=True), 64, 1)
    assert_blocks_keep(plan, rel=0.025)


def test_layers_of_several_sizes():
    """By hand, of a Gemma 4 as it is published and as transformers saves it: two layers with windows of 6 and 2 heads
    of 32 dims with keys; one with a head of 512 dims; one that takes that one's keys, with an MLP twice as wide."""
    fields = {**BASE, **OF_FAMILY["gemma4_text"], "model_type": "gemma4_text"}
    published, saved = from_hf(fields), from_hf(hf_config("gemma4_text").to_dict())
    assert "per_layer_config" in saved.hf and "per_layer_config" not in published.hf
    assert dict(saved.tensor_shapes()) == dict(published.tensor_shapes())
    for model in (published, saved):
        assert model.attention_flops(10) == 2 * 4 * (64 * (45 + 45) + 1024 * (55 + 55))
        plan = Plan(run_config(), model, 300, 1)
        assert plan.kv_bytes == plan.engine_precision * (2 * 2 * 2 * 32 + 2 * 512)
        assert plan.ends == 300 * 64 + 300 * 4 * 32
        assert [model.intermediate_size for model in model.of_layers] == [96, 96, 96, 192]


# How many GPUs, and keys of `run_config`: as in configs/math_30b_a3b.yaml and configs/gemma3_1b.yaml.
AT_FULL_SIZE = {
    "Qwen3-30B-A3B": (8, {"recompute": 32, "offload_optimizer_for_logprob": True}),
    "Gemma 3 1B": (1, {"recompute": False}),
    "Mistral 7B v0.3": (4, {"recompute": True}),
    "Gemma 3 4B": (2, {"recompute": 17}),
    "Moonlight 16B-A3B": (8, {"recompute": True}),
    "Qwen3.5-4B": (4, {"recompute": True}),
    "Nemotron 3 Nano": (16, {"recompute": True, "offload_optimizer_for_logprob": True}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", AT_FULL_SIZE)
def test_a_step_at_full_size(name):
    """Weights, moments, gradients, and each phase within 2%, of one rank of all; of models with state within 5%."""
    (found,) = step_at_full_size(name)
    rel = 0.05 if name in ("Qwen3.5-4B", "Nemotron 3 Nano") else 0.02
    for item, (planned, counted) in found.items():
        assert planned == pytest.approx(counted, rel=rel), (item, planned / GIB, counted / GIB)
    assert found["train"][1] > 15 * GIB


@ranks(1, seconds=600)
def step_at_full_size(name):
    num_gpus, keys = AT_FULL_SIZE[name]
    model = from_hf(OF_TRANSFORMERS[name][0])
    torch.distributed.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
    mesh = init_device_mesh("cpu", (num_gpus,))
    cfg = run_config(**keys, sequence_packing=SequencePackingConfig(train_mb_tokens=8192))
    plan = Plan(cfg, model, model.vocab_size, num_gpus, 79.2 * GIB)
    return planned_and_counted(plan, mesh)


@pytest.mark.parametrize(
    ("name", "file", "num_gpus"),
    [
        ("Qwen3-30B-A3B", "math_30b_a3b.yaml", 8),
        ("Gemma 3 1B", "gemma3_1b.yaml", 1),
        ("Gemma 3 4B", "gemma3_4b.yaml", 2),
        ("Qwen3.5-4B", "qwen3_5_4b.yaml", 4),
        ("Nemotron 3 Nano", "nemotron3_nano.yaml", 8),
    ],
)
def test_the_recipes_of_transformers_blocks_fit(name, file, num_gpus):
    model = from_hf(OF_TRANSFORMERS[name][0])
    cfg = reader.load(ROOT / "configs" / file, [])
    plan = Plan(cfg, model, model.vocab_size, num_gpus, 79.2 * GIB)
    assert plan.lacking() <= 0
    if name == "Qwen3-30B-A3B":
        # F7: of each of 48 layers a rank has 192 and 96 MiB of experts, for which torch pins 256 and 128. Twice.
        assert 36 * GIB <= plan.host()["moments"] <= 38 * GIB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8B", pytest.param("1.5B", marks=pytest.mark.long)])
def test_what_a_compiled_block_keeps_on_cuda(name, monkeypatch):
    """By the partitioner that inductor has too."""
    monkeypatch.setattr(attention, "uses_flash_attention", lambda *_: True)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    wrap = partial(torch.compile, dynamic=True, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch._dynamo.config.patch(disable=False):  # engine.py disables it on CPU
        counted = count_kept(LARGE[name], responses=[2048], wrap=wrap)
    torch._dynamo.reset()
    plan = Plan(run_config(), LARGE[name], 151_665, 1)
    assert max(plan.kept_by_blocks) == pytest.approx(counted, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, chunk, sampling_filter",
    [
        ("one pass", None, None),
        ("one pass", 1024, None),
        ("one pass", None, SamplingFilter(0.9, 50)),
        ("two passes", None, None),
        ("two passes", None, SamplingFilter(0.9, 50)),
    ],
)
def test_the_head_on_cuda(kind, chunk, sampling_filter, monkeypatch):
    """The logits and the gradients of linear_loss, with stand-ins for the kernels, which allocate nothing."""
    for kernel in ("row_stats_kernel", "dlogits_kernel"):
        monkeypatch.setattr(f"kernels.row_kernels.{kernel}", defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setitem(sizes.SORT_ELEMENTS, "meta", sizes.SORT_ELEMENTS["cuda"])
    top_p, top_k = (sampling_filter.top_p, sampling_filter.top_k) if sampling_filter else (1.0, None)
    cfg = run_config(
        logprob_chunk_size=chunk,
        sequence_packing=SequencePackingConfig(train_mb_tokens=8192),
        generation=GenerationConfig(top_p=top_p, top_k=top_k),
    )
    plan = Plan(cfg, LARGE["8B"], 151_665, 8)
    inputs = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    hidden_RD, weight_VD = torch.empty(8192, 4096, **inputs), torch.empty(151_936, 4096, **inputs)
    x_R, target_R = torch.empty(8192, device="meta"), torch.empty(8192, device="meta", dtype=torch.int64)
    pack = {"old_logp_R": x_R, "sampler_logp_R": x_R, "adv_R": x_R, "mask_R": x_R, "seq_R": target_R}
    ref_logp_R = x_R if kind == "two passes" else None
    pack |= {"ref_logp_R": ref_logp_R, "num_valid_tokens": 8192, "num_valid_seqs": 16, "cfg": LossConfig()}
    loss_of, needs_unfiltered = partial(policy_loss, **pack), ref_logp_R is not None
    options = HeadOptions(
        1.0, 151_665, sampling_filter, KernelBackend("triton", chunk), loss=LossOptions(path=LossPath(kind))
    )
    rows = {"num_grad_rows": 8192, "needs_unfiltered": needs_unfiltered}
    with LiveBytes() as live:
        loss, *_ = linear_loss(hidden_RD, weight_VD, target_R, loss_of, options, **rows)
        torch.autograd.grad(loss, (hidden_RD, weight_VD))
    named = ("the head", "logits and gradient of the head")
    (planned,) = (row.size for row in plan.train(keeps=False) if row[1:3] == named)
    twice = weight_VD.nbytes * (kind == "two passes" and sampling_filter is not None)  # dW, which the plan leaves out
    assert planned - hidden_RD.nbytes + twice == pytest.approx(live.largest, rel=0.02)
    rows = sizes.triton_rows(8192, 151_936, chunk)
    if sampling_filter is None:
        assert plan.logits(True) == plan.logits(False) == 4 * rows * 151_936


@pytest.mark.slow
@pytest.mark.parametrize("top_p, top_k", [(0.9, None), (1.0, 50)])
def test_scoring_with_a_filter_on_cuda(top_p, top_k, monkeypatch):
    """It needs rows of logits, and for top_p what sorting takes."""
    monkeypatch.setattr("kernels.row_kernels.row_stats_kernel", defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setitem(sizes.SORT_ELEMENTS, "meta", sizes.SORT_ELEMENTS["cuda"])
    cfg = run_config(
        sequence_packing=SequencePackingConfig(train_mb_tokens=8192),
        generation=GenerationConfig(top_p=top_p, top_k=top_k),
    )
    hidden_RD, weight_VD = (torch.empty(n, 64, device="meta", dtype=torch.bfloat16) for n in (8192, 151_936))
    target_R = torch.empty(8192, device="meta", dtype=torch.int64)
    options = LogitOptions(1.0, 151_665, SamplingFilter(top_p, top_k), KernelBackend("triton"))
    with LiveBytes() as live:
        linear_logp(hidden_RD, weight_VD, target_R, options)
    plan = Plan(cfg, LARGE["8B"], 151_665, 8)
    assert plan.logits(False) == pytest.approx(live.largest, rel=0.02)
    assert plan.logits(False) == plan.logits(True)


def large_plan(name, num_gpus, lora=0, **policy):
    """Packs of 8,192 tokens, recomputing."""
    cfg = run_config(sequence_packing=SequencePackingConfig(train_mb_tokens=8192), **policy)
    dtensor = replace(cfg.policy.dtensor_cfg, lora_cfg=LoRAConfig(enabled=lora > 0, dim=max(1, lora)))
    cfg = replace(cfg, policy=replace(cfg.policy, dtensor_cfg=dtensor))
    return Plan(cfg, LARGE[name], 151_665, num_gpus)


# ------------------------------------------------------------------------------------------------- what a user is told


def test_a_table_of_what_fits():
    plan = replace(large_plan("8B", 8), gpu_bytes=80 * GIB)
    assert memory_fit.problem(plan) is None
    first, *phases, cache = memory_fit.table(plan).splitlines()
    assert " on each of 8 GPUs with 80" in first and "8,192 tokens" in first
    assert [line.split()[0] for line in phases] == ["train", "score", "generate", "sync"]
    assert f"{plan.size('train') / GIB:.3g} at the head: gathered 14.1, moments 7.63" in phases[0]
    assert "144 KiB a token" in cache
    unknown = replace(plan, gpu_bytes=None, num_gpus=1)
    assert memory_fit.problem(unknown) is None and "room" not in memory_fit.table(unknown).splitlines()[-1]


def settings(text):
    """The keys that a message or a line names, with their values."""
    return {key: json.loads(value) for key, value in re.findall(r"(policy\.[\w.]+)=([\w.\"]+)", text)}


@pytest.mark.parametrize(
    "num_gpus, needed, fixes",
    [
        (2, r"generate needs 98\.\d+ GiB on each GPU, which has 80; ", {OFFLOAD: True}),
        (
            1,
            r"generate needs 14[\d.]+ GiB on each GPU, which has 80; ",
            {OFFLOAD: True, f"{VLLM}.gpu_memory_utilization": 0.5},
        ),
    ],
)
def test_what_does_not_fit_and_what_mends_it(num_gpus, needed, fixes):
    plan = replace(large_plan("8B", num_gpus), gpu_bytes=80 * GIB)
    said = memory_fit.problem(plan)
    assert re.search(needed, said) and settings(said) == fixes
    assert settings(memory_fit.remedies(plan, "train")) == {OFFLOAD: True}


def test_the_table_has_each_key_alone_with_what_it_saves():
    """By the plan with that key alone; a run that fits has no such lines."""
    plan = recipe("math_8b.yaml", 2, 80)
    lines = memory_fit.table(plan).splitlines()
    number = next(number for number, line in enumerate(lines) if line.endswith("by itself"))
    saved_by = {}
    for line in lines[number + 1 :]:
        ((key, value),) = settings(line).items()
        new = memory_fit.changed(plan, {key: value})
        for size, phase in re.findall(r"([\d.]+) in (\w+)", line):
            saved = plan.size(phase) - new.size(phase)
            assert float(size) == float(f"{saved / GIB:.3g}") > 0, line
            saved_by.setdefault(key, []).append(phase)
        if "KV cache" in line:
            (size,) = re.findall(r"([\d.]+) for the KV cache", line)
            assert float(size) == float(f"{(new.kv_cache - plan.kv_cache) / GIB:.3g}") > 0
    everywhere = ["train", "score", "generate", "sync"]
    assert saved_by[OFFLOAD] == saved_by[EVERYTHING] == everywhere
    assert saved_by[RECOMPUTE] == ["train", "train"], "all blocks, and with their inputs on the host"
    assert saved_by[f"{VLLM}.gpu_memory_utilization"] == ["generate"]
    assert f"{FSDP}.dp_replicate_size" not in saved_by, "there is one replica"
    assert "by itself" not in memory_fit.table(recipe("math_8b.yaml", 8, 80))


def recipe(name, num_gpus, gib, *words):
    cfg = reader.load(ROOT / "configs" / name, [*words])
    return Plan(cfg, LARGE["1.5B" if "_1b" in name else "8B"], 151_665, num_gpus, gib * GIB)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (("math_1b.yaml", 1, 23.6), (45.7, 28.3, 34.8, 24.3)),
        (("math_1b.yaml", 8, 79.2), (28.0, 10.7, 53.2, 9.2)),
        (("math_8b.yaml", 8, 79.2), (65.5, 22.5, 64.1, 33.6)),
        (("math_8b.yaml", 8, 79.2, "policy.dtensor_cfg.activation_checkpointing=true"), (42.6, 36.6, 64.1, 33.6)),
    ],
)
def test_sizes_by_hand(plan, sizes):
    """train, score, generate and sync in GiB, as they were worked out by hand from the sources of torch and vLLM."""
    plan = recipe(*plan).with_packs(8192)
    assert [plan.size(phase) / GIB for phase in ("train", "score", "generate", "sync")] == pytest.approx(
        sizes, rel=3e-3
    )


@pytest.mark.parametrize(
    ("name", "num_gpus", "gib", "words", "tokens"),
    [
        ("math_1b.yaml", 1, 79.2, (), 16_384),
        ("math_1b.yaml", 2, 79.2, (), 24_576),
        ("math_1b.yaml", 8, 79.2, (), 24_576),
        ("math_8b.yaml", 8, 79.2, (), 8_192),
        ("math_1b.yaml", 1, 23.6, (), 8_192),
        ("math_1b.yaml", 8, 79.2, ("grpo.num_prompts_per_step=16",), 16_384),
        ("math_1b.yaml", 8, 79.2, ("policy.train_global_batch_size=128",), 8_192),
        ("math_1b.yaml", 8, 79.2, ("policy.sequence_packing.train_mb_tokens=5000",), 5_000),
    ],
)
def test_packs_are_as_large_as_the_plan_and_a_minibatch_allow(name, num_gpus, gib, words, tokens):
    """A minibatch of 256 samples of 1,024 tokens over 8 ranks has two packs of 16,384; of 128, of 8,192."""
    plan = recipe(name, num_gpus, gib, *words)
    assert plan.tokens == tokens
    unknown = replace(plan, gpu_bytes=None)
    assert unknown.tokens == min(tokens, 8_192)
    assert ("chosen at the start" in memory_fit.table(unknown)) == (not words or "train_mb" not in words[0])
    assert "chosen at the start" not in memory_fit.table(plan)


@pytest.mark.parametrize("name", ["math_1b_24gb.yaml", "math_8b_lora_24gb.yaml"])
def test_the_recipes_for_24_gb_fit(name):
    """Also where torch sees 23.5 GiB, as on an RTX 4090."""
    plan = recipe(name, 1, 24)
    assert memory_fit.problem(plan) is None and plan.kv_cache / plan.kv_bytes > 10_000
    assert replace(plan, gpu_bytes=23.5 * GIB).lacking() <= 0
    assert memory_fit.problem(recipe(name.replace("_24gb", ""), 1, 24)), "without its keys it does not"


@pytest.mark.slow
def test_a_fix_leaves_room_and_computes_no_block_again_without_need():
    """By hand: moments in host memory and blocks computed again take 23.3 of 23.6 GiB to generate, too near."""
    near = ("policy.offload_optimizer_for_logprob=true", "policy.dtensor_cfg.activation_checkpointing=true")
    plan = recipe("math_1b.yaml", 1, 23.6, *near)
    assert (
        plan.size("generate") / GIB == pytest.approx(23.3, rel=3e-3)
        and plan.lacking(0.95 * plan.gpu_bytes) > 0 > plan.lacking()
    )
    assert memory_fit.problem(plan) is None, "what a user has set is theirs"
    assert 13 < plan.host()["moments"] / GIB < 15 and plan.shards["moments"] / GIB == pytest.approx(11.5, rel=3e-3)
    given = [("math_1b.yaml", 1, gib) for gib in (16, 22.1, 23.6, 40)] + [("math_8b.yaml", 8, gib) for gib in (40, 48)]
    numbers = []
    for name, num_gpus, gib in [*given, ("math_8b.yaml", 4, 79.2), ("math_8b.yaml", 2, 79.2), ("math_8b.yaml", 1, 141)]:
        plan = recipe(name, num_gpus, gib)
        fixes = settings(memory_fit.problem(plan))
        assert plan.lacking() > 0 and len(fixes) <= 2
        if not fixes:
            continue
        assert memory_fit.changed(plan, fixes).lacking(0.95 * plan.gpu_bytes) <= 0
        if number := fixes.get(RECOMPUTE):
            numbers.append(number)
            fewer = fixes | {RECOMPUTE: number - 1}
            assert memory_fit.changed(plan, fewer).lacking(0.95 * plan.gpu_bytes) > 0
    assert len(numbers) >= 3 and all(type(number) is int and 0 < number < 36 for number in numbers)


def test_what_other_processes_hold_is_not_there(monkeypatch):
    plan = recipe("math_8b.yaml", 8, 79.2)
    others = replace(plan, others=20 * GIB)
    assert all(others.size(phase) == plan.size(phase) + 20 * GIB for phase in plan.phases)
    assert others.kv_cache == plan.kv_cache, "vLLM takes its share of the whole GPU"
    assert "other processes 20" in memory_fit.table(others) and memory_fit.problem(others)


def test_an_evaluation_has_no_canary_and_keeps_its_adapters():
    plan = large_plan("8B", 1, lora=32)
    scored = replace(plan, trains=False)
    left_out = ("moments", "canary's forward")
    assert {row for row in plan.generate() if row.item not in left_out} == set(scored.generate())
    assert {row.item for row in plan.generate()} >= {*left_out}
    assert "lora" not in memory_fit.problem(replace(scored, gpu_bytes=24 * GIB))


def test_a_kv_cache_without_room():
    cfg = run_config(max_total_sequence_length=8192, sequence_packing=SequencePackingConfig(train_mb_tokens=8192))
    vllm_cfg = replace(cfg.policy.generation.vllm_cfg, gpu_memory_utilization=0.2)
    generation = replace(cfg.policy.generation, vllm_cfg=vllm_cfg)
    plan = Plan(replace(cfg, policy=replace(cfg.policy, generation=generation)), LARGE["8B"], 151_665, 8, 80 * GIB)
    assert plan.kv_cache < 0 and "GiB of KV cache, too little for a sequence" in memory_fit.problem(plan)
    assert "gpu_memory_utilization=" in memory_fit.problem(plan)


@pytest.mark.parametrize(("share", "is_few"), [(0.6, True), (0.9, False)])
def test_a_kv_cache_for_few_sequences_says_so(share, is_few):
    """By a count of whole sequences: the cache over the bytes of one."""
    cfg = run_config(max_total_sequence_length=32768, sequence_packing=SequencePackingConfig(train_mb_tokens=32768))
    vllm_cfg = replace(cfg.policy.generation.vllm_cfg, gpu_memory_utilization=share)
    generation = replace(cfg.policy.generation, vllm_cfg=vllm_cfg)
    plan = Plan(replace(cfg, policy=replace(cfg.policy, generation=generation)), LARGE["8B"], 151_665, 8, 80 * GIB)
    held = int(plan.kv_cache / (2 * 36 * 8 * 128 * 2 * 32768))
    (line,) = (line for line in memory_fit.table(plan).splitlines() if line.startswith("  KV cache"))
    assert f"{held} sequences of 32,768" in line and (held < memory_fit.FEW) == is_few
    assert ("gpu_memory_utilization" in line) == is_few


def test_offloads_leave_the_gpu_and_arrive_in_host_memory():
    plan = large_plan("8B", 8)
    moments = memory_fit.changed(plan, [("policy.offload_optimizer_for_logprob", True)])
    everything = memory_fit.changed(plan, [("policy.dtensor_cfg.cpu_offload", True)])
    size = plan.shards["moments"]
    assert plan.size("score") - moments.size("score") == size <= moments.host()["moments"] < 2 * size
    assert set(everything.host()) == {"weights", "moments", "gradients"} and not everything.states(gradients=True)


def test_trials4_f6_what_offloading_everything_takes_is_said():
    """8.19 billion parameters on one GPU: two moments of four bytes each, in memory that is not pinned."""
    plan = recipe("math_8b.yaml", 1, 32)
    said = memory_fit.problem(plan)
    assert f"{EVERYTHING}=true" in said and "math_8b_lora_24gb.yaml" in said
    host = memory_fit.changed(plan, [(EVERYTHING, True)]).host()
    num_trained = sum(math.prod(shape) for shape in plan.trained.values())
    assert host["moments"] == 8 * num_trained and host["weights"] >= 4 * num_trained
    (total,) = re.findall(r"host then holds (\d+) GiB", said)
    assert abs(int(total) - sum(host.values()) / GIB) < 1


@pytest.mark.parametrize("num_generators, is_named", [(1, False), (2, True)])
def test_an_engine_is_divided_among_ranks_that_generate(num_generators, is_named):
    """Eight ranks train; the keys that are named must be ones that the config takes."""
    plan = large_plan("8B", 8)
    colocated = ColocatedConfig(enabled=False, resources=ColocatedResourcesConfig(gpus_per_node=num_generators))
    plan = memory_fit.changed(plan, [("policy.generation.colocated", colocated)])
    assert ("tensor_parallel_size=2" in memory_fit.remedies(plan, "generate")) == is_named


def test_replicas_take_the_memory_of_as_many_ranks_as_one_has():
    """Sixteen GPUs in two replicas are two times eight, but for the engine's share of the prompts."""
    replicas = [("policy.dtensor_cfg.dp_replicate_size", 2)]
    for name, lora, size in (("8B", 0, 8), ("8B", 32, 8), ("1.5B", 0, 8), ("1.5B", 0, 1)):
        two, one = (memory_fit.changed(large_plan(name, n, lora), its) for n, its in ((2 * size, replicas), (size, ())))
        assert (two.num_shards, two.shards, two.keeps_gathered) == (size, one.shards, one.keeps_gathered)
        assert all(two.train(keeps) == one.train(keeps) for keeps in (False, True))
        assert all(two.score(keeps) == one.score(keeps) for keeps in (False, True))
        assert two.sync() == one.sync() and two.host() == one.host()
        assert two.shards["weights"] > 1.8 * large_plan(name, 2 * size, lora).shards["weights"]


def test_with_everything_offloaded_replicas_keep_gradients_until_they_are_added_up():
    replicas, offload = ("policy.dtensor_cfg.dp_replicate_size", 2), ("policy.dtensor_cfg.cpu_offload", True)
    two = memory_fit.changed(large_plan("8B", 16), [replicas, offload])
    one = memory_fit.changed(large_plan("8B", 8), [offload])
    assert two.states(gradients=True) == {"gradients": one.shards["gradients"]} and two.states() == {}
    assert one.states(gradients=True) == {} and two.host() == one.host()


# The oracle tries every pair of these: more values than a message names, by the plan alone.
FIXES = {
    OFFLOAD: (True, False),
    EVERYTHING: (True, False),
    f"{FSDP}.lora_cfg.enabled": (True, False),
    RECOMPUTE: (True,),
    f"{FSDP}.defer_fsdp_grad_sync": (False,),
    f"{FSDP}.dp_replicate_size": (1, 2, 4, 8),
    f"{VLLM}.tensor_parallel_size": (1, 2, 4, 8),
    f"{VLLM}.gpu_memory_utilization": (0.2, 0.3, 0.4, *(n / 20 for n in range(9, 20))),
    f"{VLLM}.precision": ("bfloat16",),
    "policy.precision": ("bfloat16",),
    "policy.logprob_chunk_size": (128, 1024),
    "policy.optimizer.name": ("torch.optim.AdamW",),
    "policy.optimizer.kwargs.state_dtype": ("bfloat16",),
    "policy.sequence_packing.share_prefix": (False,),
    "policy.sequence_packing.train_mb_tokens": (512, 1024, 2048, 4096, 16384),
}
RUNS = {RECOMPUTE: (False, 8), "policy.precision": ("bfloat16", "float32"), "policy.generation.top_p": (0.9, 1.0)}
RUNS |= {"grpo.num_prompts_per_step": (8, 32, 128), "loss_fn.reference_policy_kl_penalty": (0.0, 0.01)}
RUNS |= {"policy.optimizer.name": (*["torch.optim.AdamW"] * 5, "torch.optim.Muon")}


def fits(plan, fixes=(), share=1):
    new = memory_fit.changed(plan, fixes)
    try:
        return new.lacking(share * new.gpu_bytes) <= 0 and not check_config(new.cfg, new.num_gpus)
    except (ConfigError, ZeroDivisionError):  # refused, by LoRA for its rank, or more replicas than GPUs
        return False


def random_plan(seed):
    """A run on 16 to 80 GB that does not fit as it is."""
    rng = random.Random(seed)
    while True:
        num_gpus, length = rng.choice((1, 1, 2, 4, 8)), rng.choice((512, 1024, 4096, 16384))
        set_to = {key: (*values, *[attrgetter(key)(Config())] * 3) for key, values in FIXES.items()} | RUNS
        fixes = {key: rng.choice(values) for key, values in set_to.items()}
        fixes |= {"policy.max_total_sequence_length": length, "policy.generation.max_new_tokens": length // 2}
        fixes["policy.sequence_packing.train_mb_tokens"] = length * rng.choice((1, 2, 4))
        gpu_bytes = rng.choice((16, 24, 40, 48, 80)) * GIB
        plan = replace(large_plan(rng.choice([*LARGE]), num_gpus), gpu_bytes=gpu_bytes)
        plan = memory_fit.changed(plan, fixes)
        if not fits(plan) and fits(replace(plan, gpu_bytes=9999 * GIB)):
            return plan


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(7, 14), pytest.param(range(200), marks=pytest.mark.long)])
def test_no_two_keys_fit_what_is_called_impossible(seeds):
    """By brute force; and what is proposed fits, is accepted, and names no key without which it fits as well."""
    num_impossible = 0
    for plan in map(random_plan, seeds):
        text = memory_fit.problem(plan)
        fixes = settings(text)
        assert ("no two settings" in text) == (not fixes), text
        assert not fixes or fits(plan, fixes, 0.95), text
        for key in fixes:
            assert not fits(plan, {other: fixes[other] for other in fixes if other != key}, 0.95), (key, text)
        num_impossible += not fixes
        if not fixes:
            new = [(key, value) for key, its in FIXES.items() for value in its if value != attrgetter(key)(plan.cfg)]
            for found in chain.from_iterable(combinations(new, n) for n in (1, 2)):
                assert len(dict(found)) < len(found) or not fits(plan, found, 0.95), (found, text)
    assert num_impossible > len(seeds) // 20


def test_a_lack_that_rounding_would_hide():
    """By three digits train would need 65.5 GiB of 65.5."""
    plan = recipe("math_8b.yaml", 8, 79.2)
    text = memory_fit.problem(replace(plan, gpu_bytes=plan.size("train") - 0.004 * GIB))
    needed, has = re.search(r"train needs ([\d.]+) GiB on each GPU, which has ([\d.]+)", text).groups()
    assert float(needed) > float(has)
