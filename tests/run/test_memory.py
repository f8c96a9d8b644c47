"""Memory that runs out: one message and exit code 5, whatever the run was at; and what a GPU is logged to have used."""

import importlib.util
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from one_process import run_in_this_process
from small_run import ROOT, arguments, write_rows

import engine as engine_module
import eval as eval_module
import grpo
import rollout
from base.check.memory_fit import changed
from base.hf.folder import read_model_config
from base.inputs import reader
from base.plan.gpus import GIB
from base.plan.memory_plan import CONTEXT, Plan
from base.system import exits
from base.system.ranks import Ranks
from config import ColocatedConfig, ColocatedResourcesConfig, Config, ConfigError, DataConfig, DatasetConfig
from run import build
from run import memory as memory_module
from run.log import Timers
from run.memory import NO_MEMORY, Memory

STARTER = ROOT / "examples/arithmetic/starter"
WORDS = "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.18 GiB"
KV_TOO_SMALL = "To serve at least one request with the model's max seq len (4096), (2.0 GiB KV cache is needed, which"


def fail(*_, **__):
    raise torch.OutOfMemoryError(WORDS)


class Fails(torch.autograd.Function):
    """The identity, whose backward finds no memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError(WORDS)


def in_backward(monkeypatch):
    compute_loss = grpo.compute_loss

    def compute(*args):
        loss, metrics = compute_loss(*args)
        return Fails.apply(loss), metrics

    monkeypatch.setattr(grpo, "compute_loss", compute)


def in_engine(monkeypatch):
    def no_room(*_, **__):
        raise ValueError(KV_TOO_SMALL)

    monkeypatch.setattr(engine_module, "LLM", no_room)


def patched(module, name):
    return lambda monkeypatch: monkeypatch.setattr(module, name, fail)


PHASES = {  # name -> (what fails, the phase, the line of the program, the plan's phase)
    "engine": (in_engine, "start", "raise ValueError", "generate"),
    "generation": (patched(rollout.Sampler, "finish"), "generation", r"raise torch\.Out", "generate"),
    "logprobs": (patched(grpo, "finish_minibatches"), "policy_and_reference_logprobs", r"raise torch\.Out", "score"),
    "backward": (in_backward, "policy_training", r"raise torch\.Out", "train"),
}


@pytest.fixture
def main(one_rank, monkeypatch, tmp_path):
    """A program's main on the smoke task with a stand-in for vLLM: (exit code, exit.json)."""
    run_in_this_process(monkeypatch, one_rank)
    monkeypatch.delenv("GRPO_EXIT_FILE", raising=False)
    write_rows(tmp_path)

    def run(*words, program=grpo):
        monkeypatch.setattr(sys, "argv", ["", *arguments(tmp_path), "grpo.val_at_start=false", *words])
        code = program.main()
        (folder,) = tmp_path.glob("e*_0*")
        return code, json.loads((folder / "exit.json").read_text())

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", PHASES)
def test_out_of_memory_in_each_phase(name, main, monkeypatch, capfd):
    inject, phase, line, planned = PHASES[name]
    inject(monkeypatch)
    code, report = main()
    out, err = capfd.readouterr()
    reason = report["reason"]
    assert code == report["code"] == exits.EXIT_MEMORY == 5, (reason, err)
    assert err == f"{reason} (rank 0 on {exits.host_name()})\n" and "Traceback" not in out + err
    assert reason.startswith(f"out of memory: {phase}, ") and re.search(line, reason)
    assert (KV_TOO_SMALL if name == "engine" else "CUDA out of memory)") in reason
    assert f"Planned for {planned} on a GPU, with packs of up to " in reason and "Measured: " in reason
    fixes = {"engine": "raise policy.generation.vllm_cfg.kvcache_gib, or", "backward": "set policy."}
    assert f". To fix it, {fixes.get(name, '')}" in reason
    assert "memory  " not in out, "on CPU there is no plan"


@pytest.mark.slow
def test_an_evaluation_out_of_memory(main, monkeypatch, capfd):
    """Its plan has nothing of training."""
    PHASES["generation"][0](monkeypatch)
    code, report = main(program=eval_module)
    out, err = capfd.readouterr()
    assert code == report["code"] == 5 and "Traceback" not in out + err
    assert err == f"{report['reason']} (rank 0 on {exits.host_name()})\n"
    assert report["reason"].startswith("out of memory: evaluation, ") and "Planned for generate on a GPU" in err
    assert "moments" not in err


KNOWS_BETTER = ". If you know better, --gpu_memory=GiB overrides what the GPU has"


@pytest.mark.slow
@pytest.mark.parametrize(("given", "code", "program"), [("1", 2, grpo), ("900.5", 5, eval_module)])
def test_a_user_says_what_the_gpu_has(given, code, program, main, monkeypatch, capfd):
    monkeypatch.setattr(build, "load_policy", fail)  # what comes after the plan
    ended, report = main(f"--gpu_memory={given}", "policy.generation.vllm_cfg.kvcache_gib=1", program=program)
    assert ended == report["code"] == code, report
    assert f"memory     GiB on the GPU with {given if code == 2 else 900}, " in capfd.readouterr().out
    assert (code == 2) == report["reason"].endswith(KNOWS_BETTER)


def test_what_a_user_says_comes_before_what_the_gpu_says(one_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    inputs = SimpleNamespace(model_config=read_model_config(STARTER), reward_model=None, reference_model=None)
    inputs.tokenizer = SimpleNamespace(vocab_size=262)
    plan_memory = partial(memory_module.plan_memory, Config(), inputs, one_rank[0])
    with pytest.raises(ConfigError, match=rf"^memory: .* on each GPU, which has 1; .*{re.escape(KNOWS_BETTER)}$"):
        Memory(plan_memory(None), one_rank[0])
    assert plan_memory(900 * GIB).gpu_bytes == 900 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (800 * GIB, 900 * GIB))
    plan = plan_memory(None)
    assert (plan.gpu_bytes, plan.others) == (900 * GIB, (900 - 800 - 0.5) * GIB), "0.5: this process's own context"


def test_a_resumed_run_keeps_its_packs(one_rank, tmp_path):
    """A new run on a large GPU has the plan's number in its config; resumed, that of the folder, on any GPU."""
    data = DataConfig(train=(DatasetConfig(data_path="x"),), validation=())
    plan = Plan(Config(data=data), read_model_config(STARTER), 262, 1, 900 * GIB)
    new = memory_module.with_pack_tokens(plan, one_rank[0])
    assert new.cfg.policy.sequence_packing.train_mb_tokens == plan.tokens == 32_768
    for tokens, expected in ((5000, 5000), (None, 32_768)):
        (tmp_path / "config.yaml").write_text(reader.to_yaml(plan.with_packs(tokens).cfg))
        resumed = changed(plan, {"checkpointing.resume_from": str(tmp_path)})
        assert memory_module.with_pack_tokens(resumed, one_rank[0]).tokens == expected


@pytest.mark.slow
def test_other_errors_stay_what_they_are(main, monkeypatch, capfd):
    def wrong(*_):
        raise ValueError("a shape")

    monkeypatch.setattr(grpo, "finish_minibatches", wrong)
    code, report = main()
    assert code == 1 and report["reason"].startswith("crashed: ValueError: a shape")
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.slow
def test_vllm_still_says_so():
    """In the words of the installed version: the KV cache's, and those of a GPU that is not free."""
    folder = Path(importlib.util.find_spec("vllm").origin).parent / "v1"
    files = (folder / "core/kv_cache_utils.py", folder / "worker/utils.py")
    cache, gpu = (re.sub(r'"\s+f?"', "", file.read_text()) for file in files)
    for text, words in ((cache, "No available memory for the cache"), (cache, "KV cache is needed"), (gpu, "Free mem")):
        assert words in text and NO_MEMORY.search(words)


def test_a_gpu_is_measured_beside_the_plan(monkeypatch):
    """With stand-ins for its counters: each phase has a peak of its own, less what the sleeping engine counts for."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 8.5 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 80 * GIB))
    timer = Timers(lambda phase: calls.append(phase))
    phases = {"generation": "generate", "data_processing": None, "policy_training": "train"}
    phases |= {"policy_and_reference_logprobs": "score", "prepare_for_generation": "sync"}
    for phase in phases:
        with timer(phase):
            pass
    assert calls == [call for phase in phases for call in (phase, "reset")]
    plan = Plan(Config(), read_model_config(STARTER), 262, 1)
    memory = Memory(plan, Ranks(1, 2, 1, 1))
    memory.engine_bytes, memory.engine_reserved = 4 * GIB, 5 * GIB
    expected = {}
    for name, phase in phases.items():
        if phase:
            expected[f"performance/memory/{name}/planned_gib"] = (plan.size(phase) - CONTEXT) / GIB
            awake = {"generate": 4, "sync": plan.engine["engine's weights"] / GIB + 0.8}.get(phase, 0)
            expected[f"performance/memory/{name}/measured_gib"] = 3 + awake
            expected[f"performance/memory/{name}/reserved_gib"] = 5 + awake
    expected["performance/memory/prepare_for_generation/unused_gib"] = 2.5
    assert memory.metrics(timer.peaks) == pytest.approx(expected)
    colocated = ColocatedConfig(enabled=False, resources=ColocatedResourcesConfig(gpus_per_node=1))
    memory.plan = changed(plan, [("policy.generation.colocated", colocated)])
    split = memory.metrics(timer.peaks)
    assert {name.split("/")[2] for name in split} == phases.keys() - {"generation", "data_processing"}
    assert memory_module.measured() == "allocated 6, peak 7, reserved 8.5, free 1, total 80"
    with pytest.raises(ConfigError, match=r"^memory: generate needs .* GiB on each GPU, which has 1"):
        Memory(replace(plan, gpu_bytes=GIB), Ranks(0, 1, 0, 1))
