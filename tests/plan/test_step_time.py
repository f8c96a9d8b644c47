"""The seconds of a step and the bytes of a checkpoint, before a run: against numbers worked out by hand."""

from dataclasses import replace

import pytest
from real_models import GEMMA3_1B, QWEN3_30B_A3B

from base.check import memory_fit
from base.hf.folder import from_hf
from base.plan import gpus
from base.plan.step_time import Step, checkpoint_bytes, disk_line, phase_seconds, seconds_between_replicas, time_line
from bench.fits import GPUS, RECIPE, base_plan, cell

H100 = gpus.GPUS["h100"]
# Qwen3-8B: a block has 192,946,432 weights, 192,937,984 of them in matrices; embedding and head have 622,329,856 each.
BLOCKS, HEAD, WEIGHTS = 6_946_071_552, 622_329_856, 8_190_735_360
MATRICES = 36 * 192_937_984


@pytest.fixture
def plan():
    """configs/math_1b.yaml with Qwen3-8B on eight H100."""
    return base_plan("Qwen3-8B", 8, 80, GPUS[80])


def test_a_step_worked_out_by_hand(plan):
    """19,840 tokens on each GPU: of 64 samples, 300 of the response and 10 as a sixteenth of the prompt."""
    assert Step.of(plan.cfg, 160) == RECIPE
    flops, memory, link = 0.35 * 989.5e12, 0.8 * 3350e9, 0.8 * 450e9
    attention = 4 * 32 * 128 * 36 * 461 / 2  # of a token
    blocks, head = 19_840 * (2 * MATRICES + attention), 19_840 * 2 * HEAD
    decoding = 768 * (2 * (BLOCKS + HEAD) / memory + 0.003)
    cache = 64 * 147_456 * 300 * 460 / memory
    expected = {
        "generate": decoding + cache + 2 * (MATRICES + HEAD) * 64 * 310 / flops,  # 7.99
        "score": (blocks + head) / flops,  # 0.87
        "train": 3 * (blocks + head) / flops + 28 * WEIGHTS / 8 / memory,  # 2.64
        "sync": 2 * WEIGHTS * (1 / link + 1 / memory),  # 0.05
    }
    found = phase_seconds(plan, H100, RECIPE)
    assert found == pytest.approx(expected, rel=1e-6)
    assert sum(found.values()) == pytest.approx(11.557, abs=1e-3) and cell("Qwen3-8B", 80, 8) == "**12**"
    assert time_line(plan, H100, RECIPE, 1000).startswith(
        "time       12 s a step on 8 H100 SXM (generate 8.0, score 0.87"
    )
    assert "3.2 h for 1,000 steps" in time_line(plan, H100, RECIPE, 1000)


def test_of_experts_only_those_that_a_token_meets_are_computed(plan):
    """Worked out by hand for Qwen3-30B-A3B: 2,730,491,904 weights of matrices for a token, 29,909,790,720 in blocks to
    read; and for Gemma 3 1B with windows of 8 keys in 22 of 26 layers. Small packs would wait for gathers, and a small
    cache for room."""
    flops, memory, link = 0.35 * 989.5e12, 0.8 * 3350e9, 0.8 * 450e9
    large = replace(plan, gpu_bytes=200 * 2**30).with_packs(32_768)
    experts = replace(large, model=from_hf(QWEN3_30B_A3B))
    attention = 4 * 32 * 128 * 48 * 461 / 2
    head = 151_936 * 2048
    found = phase_seconds(experts, H100, RECIPE)
    assert found["score"] == pytest.approx(19_840 * (2 * (2_730_491_904 + head) + attention) / flops)
    read = 768 * (2 * (29_909_790_720 + head) / memory + 0.003) + 64 * 98_304 * 300 * 460 / memory
    assert found["generate"] == pytest.approx(read + 2 * (2_730_491_904 + head) * 64 * 310 / flops)
    assert found["sync"] == pytest.approx(2 * 30_532_122_624 * (1 / link + 1 / memory))
    near = replace(large, model=from_hf(GEMMA3_1B | {"sliding_window": 8}))
    pairs = (4 * 460 * 461 / 2 + 22 * (8 * 9 / 2 + 452 * 8)) / 460
    weights = 26 * 26_836_992 + 262_144 * 1152
    found = phase_seconds(near, H100, RECIPE)
    assert found["score"] == pytest.approx(19_840 * (2 * weights + 4 * 4 * 256 * pairs) / flops)


def test_two_nodes_send_over_the_network(plan):
    """Eight cards of 50 GB/s are slower than the link; a replica for each node sums over one card for each GPU."""
    nodes = replace(memory_fit.changed(plan, {"cluster.num_nodes": 2}), num_gpus=16)
    sync = phase_seconds(nodes, H100, RECIPE)["sync"]
    assert sync == pytest.approx(2 * WEIGHTS * (1 / (0.8 * 400e9) + 1 / (0.8 * 3350e9)))
    copies = memory_fit.changed(nodes, {"policy.dtensor_cfg.dp_replicate_size": 2})
    assert phase_seconds(copies, H100, RECIPE)["sync"] == pytest.approx(phase_seconds(plan, H100, RECIPE)["sync"])
    assert seconds_between_replicas(copies, H100, 2) == pytest.approx(4 * WEIGHTS / 8 / (0.8 * 50e9))
    assert " on 16 H100 SXM in 2 nodes (" in time_line(copies, H100, RECIPE, 10)


def test_bytes_on_the_disk(plan):
    """Weights and two moments in float32; the KL's reference is saved, too, in bfloat16."""
    assert checkpoint_bytes(plan) == (12 + 2) * WEIGHTS
    without = memory_fit.changed(plan, {"loss_fn.reference_policy_kl_penalty": 0.0})
    assert checkpoint_bytes(without) == 12 * WEIGHTS
    assert disk_line(without) == (
        "disk       98 GB a checkpoint; 2 kept and one being written: 295 GB; the exported weights 16 GB"
    )
