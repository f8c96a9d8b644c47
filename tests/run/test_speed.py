"""How fast a step was: its FLOPs against torch's counter and by hand; rates, utilisation."""

from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
import torch
from dist_case import make_samples, settings
from loop import CPU
from real_models import GEMMA3_1B, QWEN3_30B_A3B
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import config
import grpo
from attention import PackLayout
from base.hf.folder import from_hf
from head import HeadOptions, LossOptions
from lora import LoRALinear, add_adapters
from model import Decoder
from pack import MicroBatch, Minibatch, finish_minibatches, make_minibatches
from run.build import loss_path_of
from run.speed import performance_metrics, train_flops

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 97}
FAMILIES = {  # grouped and plain heads, heads wider than the hidden size, biases, tied and untied
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 3, "head_dim": 10, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 6, "attention_bias": True},
}
SCORES = 2 * 2 * 3  # of a pair, a head and one of its dims: q k and p v; with their gradients


def model_of(family):
    fields = SIZES | FAMILIES[family] | {"model_type": family, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    model = Decoder(from_hf(fields))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.normal_(0, 0.1, generator=generator)
    return model


def batch_of(model, ranks, share_prefix, kind="one pass"):
    """A minibatch of several packs in which two groups of five have no gradient."""
    samples, adv_B = make_samples(model.config.vocab_size)
    adv_B = [0.0 if i // 4 in (1, 3) else adv for i, adv in enumerate(adv_B)]
    cfg = settings(
        policy={"sequence_packing": config.SequencePackingConfig(train_mb_tokens=64, share_prefix=share_prefix)}
    )
    head_options = HeadOptions(loss=LossOptions(path=replace(loss_path_of(cfg), kind=kind)))
    (minibatch,) = make_minibatches(samples, adv_B, cfg, ranks, CPU)
    finish_minibatches([minibatch], head_options.loss.path, 0)
    return head_options, minibatch, cfg


def computed(model, head_options, minibatch, cfg):
    """(FLOPs of matrices, of attention) that torch sees in a forward and backward: attention in full rectangles."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.backward = lambda loss, *, is_last: loss.backward()  # FSDP's, on one process, is that alone
        grpo.compute_gradients(model, head_options, minibatch, cfg)
    flops = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    assert set(flops) == {"aten.mm", "aten.bmm"} | {"aten.addmm"} & set(flops), flops
    return counter.get_total_flops() - flops["aten.bmm"], flops["aten.bmm"]


def pairs(minibatch):
    """Queries and keys, counted one by one: (that see each other, in the rectangles of segments)."""
    seen = full = 0
    for micro in minibatch.micros:
        rows_S = np.split(np.arange(len(micro.token_T)), micro.layout.bounds[1:-1])
        for rows, prefix in zip(rows_S, micro.layout.prefixes, strict=True):
            keys = [*(rows_S[prefix] if prefix >= 0 else ()), *rows]
            full += len(rows) * len(keys)
            seen += sum(key <= row for row in rows for key in keys)
    return seen, full


@pytest.mark.slow
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_that_torch_counts(family, share_prefix, one_rank):
    """Equal: matrices as they are, attention after its rectangles are replaced by what the causal mask leaves."""
    model = model_of(family)
    head_options, minibatch, cfg = batch_of(model, one_rank[0], share_prefix)
    matrices, attention = computed(model, head_options, minibatch, cfg)
    seen, full = pairs(minibatch)
    per_pair = SCORES * model.config.num_attention_heads * model.config.head_dim * model.config.num_hidden_layers
    assert attention == per_pair * full > per_pair * seen
    assert train_flops(model.config, minibatch.micros) == matrices + per_pair * seen
    rows = sum(len(micro.pos_R) for micro in minibatch.micros)
    assert 0 < sum(micro.num_grad_rows for micro in minibatch.micros) < rows and len(minibatch.micros) > 2
    assert any(max(micro.layout.prefixes) >= 0 for micro in minibatch.micros) == share_prefix


@pytest.mark.slow
def test_with_lora_no_gradient_of_a_frozen_weight_is_counted(one_rank):
    """The gradient of the first block's input, which nothing needs, is counted like that of all others. torch's counter
    does not see the merging, which is done in place."""
    lora, model = config.LoRAConfig(enabled=True, dim=5), model_of("qwen3")
    full = train_flops(model.config, [micro_of(40)])
    add_adapters(model, lora, torch.float32)
    head_options, minibatch, cfg = batch_of(model, one_rank[0], True)
    matrices, attention = computed(model, head_options, minibatch, cfg)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    first = sum(layers[f"model.layers.0.self_attn.{name}_proj"].weight.numel() for name in "qkv")
    num_tokens = sum(len(micro.token_T) for micro in minibatch.micros)
    seen, rectangles = pairs(minibatch)
    counted = matrices + 2 * first * num_tokens + attention * seen // rectangles
    assert train_flops(model.config, minibatch.micros, lora) == counted
    assert train_flops(model.config, [micro_of(40)], config.LoRAConfig()) == full


def micro_of(length, head_rows=None, grad_rows=None):
    """A sequence alone. By default all of its rows reach the head, with a gradient."""
    rows = length if head_rows is None else head_rows
    tokens = torch.zeros(length, dtype=torch.int64)
    of_rows = {f.name: torch.zeros(rows) for f in fields(MicroBatch) if f.name.endswith("_R") and f.default is MISSING}
    layout, num_grad_rows = PackLayout.of([0, length], None, length, CPU), rows if grad_rows is None else grad_rows
    return MicroBatch(tokens, tokens, layout, num_grad_rows=num_grad_rows, **of_rows)


QWEN3_8B = {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 151_936}
QWEN3_8B |= {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_8B |= {"num_key_value_heads": 8, "head_dim": 128}


def test_a_token_meets_eight_experts_of_128_worked_out_by_hand():
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    experts = 8 * 3 * 2048 * 768
    router = 128 * 2048
    weights = 48 * (attention + experts + router)
    assert weights == 2_730_491_904  # with the embedding or the head, the 3 billion of its name
    seen = 12 * 32 * 128 * 48 * (1000 * 1001 // 2)
    assert train_flops(from_hf(QWEN3_30B_A3B), [micro_of(1000, 0, 0)]) == 6 * weights * 1000 + seen


def test_a_window_bounds_attention_worked_out_by_hand():
    """Four layers of Gemma 3 1B see all keys. In the others the first 512 queries see 1 to 512, and 488 see 512."""
    weights = 26 * (2 * 1152 * 1024 + 2 * 1152 * 256 + 3 * 1152 * 6912)
    seen = 4 * 1000 * 1001 // 2 + 22 * (512 * 513 // 2 + 488 * 512)
    flops = 6 * weights * 1000 + 12 * 4 * 256 * seen
    assert train_flops(from_hf(GEMMA3_1B), [micro_of(1000, 0, 0)]) == flops


@pytest.mark.parametrize("window", [1, 3, 10, 12, 40])
def test_a_window_reaches_into_the_prefix(window):
    """Against a count, one by one, of a prompt of 10 tokens and two responses."""
    one = from_hf(GEMMA3_1B | {"num_hidden_layers": 1, "sliding_window": window})
    micro = replace(micro_of(17, 0, 0), layout=PackLayout.of([0, 10, 15, 17], [-1, 0, 0], 17, CPU))
    seen = sum(min(position + 1, window) for position in (*range(10), *range(10, 15), *range(10, 12)))
    matrices = 6 * (2 * 1152 * 1024 + 2 * 1152 * 256 + 3 * 1152 * 6912) * 17
    assert train_flops(one, [micro]) == matrices + 12 * 4 * 256 * seen


def test_int32_bounds_do_not_overflow():
    model = from_hf(QWEN3_8B)
    length = 131_072
    pairs_of_attention = 12 * 32 * 128 * 36 * (length * (length + 1) // 2)
    blocks = 6 * 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288)
    assert train_flops(model, [micro_of(length, 0, 0)]) == pairs_of_attention + blocks * length


TRAIN = {"total_num_tokens": 1200, "global_valid_toks": 500, "train_tokens": 900, "total_gen_tokens": 600}
TRAIN |= {"global_valid_seqs": 24}
SECONDS = {"generation": 1.5, "policy_and_reference_logprobs": 0.5, "policy_training": 2.0, "total_step_time": 4.0}
NAMES_OF_NEMO = """samples_per_sec tokens_per_sec samples_per_sec_per_gpu tokens_per_sec_per_gpu
    policy_training_tokens_per_sec_per_gpu policy_and_reference_logprobs_tokens_per_sec_per_gpu
    training_worker_group_tokens_per_sec_per_gpu generation_tokens_per_sec_per_gpu
    training_worker_group_tokens_per_sec generation_tokens_per_sec train_flops_per_gpu train_fp_utilization""".split()


def numbers(minibatches, precision="bfloat16", **policy):
    model = from_hf(QWEN3_8B)
    return performance_metrics(TRAIN, SECONDS, minibatches, model, config.PolicyConfig(precision=precision, **policy))


@pytest.fixture
def two_ranks_of_one(one_rank, monkeypatch):
    """A second rank that has done as much as this one."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("run.speed.gather", lambda value: [value] * 2)


def test_rates_of_a_split_job_are_by_the_gpus_at_work(two_ranks_of_one):
    """2 ranks train and 3 generate: a step is work of 5, a rollout of 3, an update of 2."""
    resources = config.ColocatedResourcesConfig(gpus_per_node=3)
    generation = config.GenerationConfig(colocated=config.ColocatedConfig(enabled=False, resources=resources))
    whole, split = (numbers([Minibatch([micro_of(64)], 64)], **options) for options in ({}, {"generation": generation}))
    ratios = {name.rpartition("/")[2]: whole[name] / split[name] for name in whole if whole[name] != split[name]}
    of_all = {f"{name}_per_sec_per_gpu": 5 / 2 for name in ("tokens", "samples", "valid_tokens")}
    assert ratios == pytest.approx(of_all | {"generation_tokens_per_sec_per_gpu": 3 / 2})


def test_rates_of_a_step_by_hand(two_ranks_of_one):
    minibatches = [Minibatch([micro_of(64), micro_of(32)], 96), Minibatch([micro_of(128, 100, 10)], 128)]
    minibatches[0].micros[0].ref_logp_R = torch.zeros(64)
    flops = 3 * train_flops(from_hf(QWEN3_8B), [m for minibatch in minibatches for m in minibatch.micros])
    assert not any("logprobs" in name for name in numbers([Minibatch([micro_of(64)], 64)])), "nothing was scored"
    assert numbers(minibatches, ppo_epochs=3) == {
        "performance/tokens_per_sec": 300.0,
        "performance/tokens_per_sec_per_gpu": 150.0,
        "performance/samples_per_sec": 6.0,
        "performance/samples_per_sec_per_gpu": 3.0,
        "performance/generation_tokens_per_sec": 400.0,
        "performance/generation_tokens_per_sec_per_gpu": 200.0,
        "performance/training_worker_group_tokens_per_sec": 480.0,
        "performance/training_worker_group_tokens_per_sec_per_gpu": 240.0,
        "performance/policy_training_tokens_per_sec_per_gpu": 300.0,
        "performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu": 1200.0,
        "performance/train_flops_per_gpu": pytest.approx(flops / 2.0 / 1e12, rel=1e-12),  # 2 x flops in 2 s on 2 ranks
        "performance/train_tokens": 900,
        "timing/train/valid_tokens_per_sec_per_gpu": 62.5,
    }


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
    ],
)
def test_utilisation_only_of_a_device_whose_peak_is_known(name, precision, peak, two_ranks_of_one, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    minibatch = Minibatch([replace(micro_of(64), old_logp_R=torch.zeros(64))], 64)
    values = numbers([minibatch], precision)
    utilisation = values.get("performance/train_fp_utilization")
    assert utilisation == (peak and values["performance/train_flops_per_gpu"] / peak)
    if peak:
        ours = {"performance/train_tokens", "timing/train/valid_tokens_per_sec_per_gpu"}
        assert values.keys() - ours == {f"performance/{name}" for name in NAMES_OF_NEMO}
