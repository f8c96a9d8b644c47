"""Whole runs in this process: `grpo.main` and `eval.main` on the smoke task, with a stand-in for vLLM."""

import dataclasses
import inspect
import json
import shutil
import sys

import fake_vllm
import pytest
import torch
from safetensors.torch import load_file
from small_run import ROOT, STARTER, arguments, write_rows

import config
import engine as engine_module
import envs
import eval as eval_module
import grpo
from graders.environments import make_environment
from graders.pool import GraderPool
from hf.tokenizer import Tokenizer
from hf.weights import full_tensors
from model import load_policy

SAMPLED = engine_module.SamplingOptions(temperature=1.0, max_new_tokens=4)
GREEDY = engine_module.SamplingOptions(temperature=0.0, max_new_tokens=30)


def use_stand_in(monkeypatch):
    """In a whole session engine.py has the real vLLM by now."""
    for name in ("LLM", "EngineArgs", "SamplingParams", "RequestOutputKind"):
        monkeypatch.setattr(engine_module, name, getattr(fake_vllm, name))


@pytest.fixture
def stand_in(monkeypatch):
    use_stand_in(monkeypatch)


@pytest.fixture
def run(stand_in, one_rank, monkeypatch, tmp_path):
    """A program's `main` with these overrides of configs/smoke.yaml: its newest run folder."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(GraderPool, "stop", GraderPool.stop)
    # The session has its process group already, and keeps its signal handlers.
    monkeypatch.setattr("signal.signal", lambda number, handler: None)

    write_rows(tmp_path)

    def run(program, *overrides):
        monkeypatch.setattr(program, "start_process_group", lambda tp_size: one_rank[:2])
        monkeypatch.setattr(sys, "argv", ["", *arguments(tmp_path), *overrides])
        assert program.main() == 0
        return sorted(tmp_path.glob("exp_*"))[-1]

    return run


def records(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "rank_00000.safetensors")


def test_a_run_trains_saves_resumes_and_is_scored(run, tmp_path):
    whole = run(grpo)
    steps = [record for record in records(whole) if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(record["train/grad_norm"] > 0 and record["train/logp_gap_max"] <= 1e-4 for record in steps)
    before, after = weights(whole, 2), weights(whole, 4)
    moved = [name for name in after if name.startswith("param.") and not torch.equal(before[name], after[name])]
    assert len(moved) == sum(name.startswith("param.") for name in after)

    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step_000004")  # as if it had been killed in step 3
    run(grpo, f"checkpointing.resume_from={cut}")
    again = weights(cut, 4)
    assert again.keys() == after.keys() and all(torch.equal(again[name], after[name]) for name in after)
    assert records(cut, "samples.jsonl") == records(whole, "samples.jsonl")

    scored = run(eval_module, f"checkpointing.resume_from={whole}")
    report = json.loads((scored / "eval.json").read_text())
    (numbers,) = report["sets"].values()
    last = records(whole)[-1]
    for mode in ("greedy", "sampled"):
        assert numbers[mode]["accuracy"] == last[f"validation/{mode}/accuracy"]


def test_a_run_with_muon_and_a_reference_that_follows(run, capfd):
    words = ("grpo.max_num_steps=2", "checkpointing.enabled=false", "grpo.val_at_start=false", "grpo.val_at_end=false")
    words += ("policy.optimizer.name=torch.optim.Muon", "loss_fn.reference_policy_kl_penalty=0.1")
    folder = run(grpo, *words, "grpo.ref_policy_update_period=1", "policy.scheduler.warmup_steps=1")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "warmup_steps" in line]
    assert line.startswith("WARNING: policy.scheduler.warmup_steps=1 is more than a third of the run's 2 steps: ")
    steps = [record for record in records(folder) if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["train/grad_norm"] > 0 and record["train/logp_gap_max"] <= 1e-4 for record in steps)


GRADED = {
    "math": ("\\frac{1}{2}", {}, "So it is \\boxed{0.5}.", "So it is \\boxed{2}."),
    "code": (
        "",
        {"tests": [{"input": "2\n", "output": "4\n"}]},
        "```python\nprint(2 * int(input()))\n```",
        "```python\nprint(7)\n```",
    ),
}


@pytest.mark.parametrize("name", GRADED)
def test_workers_grade(name):
    """All cases are in tests/graders/, where workers also hang and crash."""
    answer, fields, right, wrong = GRADED[name]
    cfg = config.EnvConfig(code=config.CodeEnvConfig(isolation="none"))
    environment = make_environment(name, cfg)
    try:
        environment.check_answers([("train.jsonl:1", answer, fields)])
        turns = [
            envs.Turn([{"role": "assistant", "content": reply}], answer, "stop", fields=fields)
            for reply in (right, wrong)
        ]
        assert [(result.reward, result.outcome) for result in environment.step(turns)] == [(1.0, "ok"), (0.0, "wrong")]
    finally:
        environment.close()


def test_an_environment_without_a_step_says_so():
    with pytest.raises(NotImplementedError):
        envs.Environment().step([])


def make_engine(folder, max_total_tokens=64):
    policy = config.PolicyConfig(precision="float32", max_total_sequence_length=max_total_tokens)
    return engine_module.Engine(folder, Tokenizer(folder), config.Config(policy=policy))


def test_the_engine_on_cuda_sleeps_and_wakes_in_order(stand_in, one_rank, monkeypatch):
    """Weights wake, are sent, and only then does the KV cache get its memory; fake_vllm asserts what it is used for."""
    policy = load_policy(STARTER, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine = make_engine(STARTER)
    assert engine.param_names == {name for name, _ in policy.named_parameters()}, "tied: the head has no name"
    engine.sleep()
    with pytest.raises(AssertionError, match="weights are sent to where none are"):
        engine.sync(full_tensors(policy, torch.float32), 0)
    engine.wake("weights")
    engine.sync(full_tensors(policy, torch.float32), 0)
    with pytest.raises(AssertionError, match="generates while"):
        engine.generate([[5, 6]], [1], SAMPLED)
    engine.llm.llm_engine.requests.clear()
    engine.wake("kv_cache")
    assert len(engine.generate([[5, 6]], [1], SAMPLED)) == 1
    with pytest.raises(AssertionError, match="the KV cache holds the memory"):
        engine.sync(full_tensors(policy, torch.float32), 1)


@pytest.mark.slow
def test_the_stand_in_is_like_vllm(engine, one_rank, tiny, monkeypatch):
    """Arguments and names are vLLM's; the same greedy tokens, finish reasons, and log-probabilities up to rounding."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    _, device, mesh = one_rank
    assert set(inspect.signature(fake_vllm.LLM).parameters) <= {field.name for field in dataclasses.fields(EngineArgs)}
    params = {field.name for field in dataclasses.fields(fake_vllm.SamplingParams)}
    assert params <= inspect.signature(vllm.SamplingParams).parameters.keys()
    policy = load_policy(tiny[0], device=device, mesh=mesh)
    prompts = [list(range(3, 8 + i)) for i in range(20)]
    engine.sync(full_tensors(policy, torch.float32), 0)
    real = engine.generate(prompts, range(20), GREEDY)
    use_stand_in(monkeypatch)
    other = make_engine(tiny[0], max_total_tokens=256)
    assert other.param_names == engine.param_names
    other.sync(full_tensors(policy, torch.float32), 0)
    fake = other.generate(prompts, range(20), GREEDY)
    assert [c.ids.tolist() for c in fake] == [c.ids.tolist() for c in real]
    assert [c.finish_reason for c in fake] == [c.finish_reason for c in real]
    assert max(abs(a.logps - b.logps).max() for a, b in zip(fake, real, strict=True)) < 1e-4
