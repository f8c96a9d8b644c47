"""A mixture of experts by the real command: the upcycled starter, killed and resumed, and with the options whose code
treats experts in a way of its own. In each, sampler and trainer agree, or `grpo.logp_gap_limit` would stop the run."""

import json
import os
import signal
import subprocess
import sys

import pytest
from run_life import ROOT, Life, assert_same, at_step, newest_step, run_to_the_end, steps

from examples.moe.upcycle import STARTER, upcycle

pytestmark = pytest.mark.long
LORA = "policy.dtensor_cfg.lora_cfg"
AGENT = {"name": "fork", "function": "forking_agent:solve", "num_workers": 4, "deadline_s": 60}
OPTIONS = {
    "lora on attention": [
        *(f"{LORA}.{setting}" for setting in ("enabled=true", "dim=4", "match_all_linear=false")),
        f"{LORA}.target_modules=[q_proj,k_proj,v_proj,o_proj]",
    ],
    "lora on all": [f"{LORA}.enabled=true", f"{LORA}.dim=4"],
    "async": [
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.max_trajectory_age_steps=1",
        "loss_fn.use_importance_sampling_correction=true",
    ],
    "agents": [
        *(f"env.agents.{name}={value}" for name, value in AGENT.items()),
        *(f"data.{part}.env_name=fork" for part in ("train.0", "train.1", "validation")),
        "policy.max_total_sequence_length=64",
    ],
    "trained routers, recompute": [
        "policy.freeze_moe_router=false",
        "policy.dtensor_cfg.activation_checkpointing=true",
    ],
    "muon": ["policy.optimizer.name=torch.optim.Muon"],
    "an engine on two ranks": ["policy.generation.vllm_cfg.tensor_parallel_size=2"],
    "replicas": ["policy.dtensor_cfg.dp_replicate_size=2"],
    "offload": ["policy.dtensor_cfg.cpu_offload=true"],
    "split": ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"],
    "kl": ["loss_fn.reference_policy_kl_penalty=0.01"],
}
REPLAY = "policy.router_replay.enabled=true"
BFLOAT16 = ["policy.precision=bfloat16", "grpo.logp_gap_limit=0.1"]
FLIPS = "train/router_flip_fraction"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """As an override of the config."""
    folder = tmp_path_factory.mktemp("moe")
    upcycle(STARTER, folder)
    return f"policy.model_name={folder}"


def assert_healthy(folder, num_steps):
    assert steps(folder) == [*range(1, num_steps + 1)]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    assert all(line["train/grad_norm"] > 0 and line["train/logp_gap_max"] <= 1e-4 for line in trained), trained
    assert all(0.25 <= line["train/busiest_expert_share"] <= 1 for line in trained)


@pytest.mark.parametrize("options", [[], [REPLAY]], ids=["plain", "replayed choice"])
def test_killed_and_resumed_it_is_the_unbroken_run(options, model, tmp_path):
    options = [model, *options]
    works = [tmp_path / "unbroken", tmp_path / "killed"]
    for work in works:
        work.mkdir()
    unbroken = run_to_the_end(works[0], 6, *options)
    life = Life(works[1], 6, *options, slow=("update", 5))
    folder = works[1] / "logs" / "exp_001"
    life.wait_for(lambda: newest_step(folder) == 3 and life.mark.exists(), 300)
    for pid in life.processes():
        os.kill(pid, signal.SIGKILL)
    life.process.wait()
    run_to_the_end(works[1], 6, *options, resume=folder)
    assert_same(folder, unbroken, 6)
    assert_healthy(folder, 6)
    (before, *_), (after, *_) = at_step(unbroken, 3), at_step(unbroken, 6)
    moved = {
        name for name in before if name.partition("/")[2].startswith("param.") and not before[name].equal(after[name])
    }
    assert any(".experts.gate_up_proj" in name for name in moved)  # else equal says nothing
    assert not any(".gate.weight" in name for name in moved)  # routers are there, and frozen
    assert any(".gate.weight" in name for name in before)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_works(option, model, tmp_path):
    assert_healthy(run_to_the_end(tmp_path, 3, model, *OPTIONS[option]), 3)


def metrics_of(folder):
    """Of each step what the loop logged, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: repr(x) for name, x in line.items() if name.startswith("train/")} for line in lines]


@pytest.mark.parametrize("option", [None, "trained routers, recompute", "async", "agents", "kl"])
def test_in_float32_a_replayed_choice_changes_no_bit(option, model, tmp_path):
    """Agents answer when they like, and ranks that share an engine draw the same as others: the rest is determined."""
    options = OPTIONS.get(option, [])
    works = [tmp_path / "plain", tmp_path / "replayed"]
    for work in works:
        work.mkdir()
    plain = metrics_of(run_to_the_end(works[0], 3, model, *options))
    replayed = metrics_of(run_to_the_end(works[1], 3, model, REPLAY, *options))
    for line in replayed:
        if "train/loss" in line:
            assert line.pop(FLIPS) == "0.0" and line.pop("train/router_fallback_fraction") == "0.0"
    assert replayed == plain


@pytest.mark.parametrize("option", ["an engine on two ranks", "split"])
def test_a_choice_arrives_from_other_ranks(option, model, tmp_path):
    folder = run_to_the_end(tmp_path, 3, model, REPLAY, *OPTIONS[option])
    assert_healthy(folder, 3)
    lines = [line for line in metrics_of(folder) if "train/loss" in line]
    assert all(line[FLIPS] == line["train/router_fallback_fraction"] == "0.0" for line in lines), lines


def test_in_bfloat16_a_replayed_choice_narrows_the_gap(model, tmp_path):
    """To the bit when it is resumed."""
    found = {}
    for name, options in {"own": ["policy.router_replay.measure_only=true"], "sampler's": []}.items():
        (tmp_path / name).mkdir()
        folder = run_to_the_end(tmp_path / name, 6, model, REPLAY, *BFLOAT16, *options)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[name] = [line for line in lines if "train/loss" in line]
    for lines in found.values():
        print([(line[FLIPS], line["train/logp_gap_mean"], line["train/logp_gap_max"]) for line in lines])
        assert all(0 < line[FLIPS] < 0.1 for line in lines)
    assert sum(line["train/logp_gap_mean"] for line in found["sampler's"]) < sum(
        line["train/logp_gap_mean"] for line in found["own"]
    )


@pytest.mark.parametrize("options", [[], [REPLAY, *BFLOAT16]], ids=["plain", "replayed choice"])
def test_a_saved_step_is_replayed_to_the_bit(options, model, tmp_path):
    options = [*options, "logger.dump_rollouts=1", "checkpointing.save_period=1", "checkpointing.keep_latest=9"]
    folder = run_to_the_end(tmp_path, 3, model, *options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "replay.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests" / "helpers")}
    command.append(str(folder / "rollouts" / "step_000003"))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "\n0 of " in done.stdout, (done.stdout + done.stderr)[-3000:]
