"""Whole runs in this process: `grpo.main` and `eval.main` on the smoke task, with a stand-in for vLLM."""

import dataclasses
import inspect
import json
import shutil
import sys
from functools import partial
from statistics import fmean

import fake_vllm
import pytest
import torch
from metrics_page import undocumented
from one_process import run_in_this_process, use_stand_in
from safetensors.torch import load_file, save_file
from small_run import STARTER, arguments, write_rows

import config
import engine as engine_module
import eval as eval_module
import grpo
import rollout
from base.hf.folder import read_model_config
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors
from model import load_policy
from tools import export

QUIET = ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "checkpointing.save_hf_at_end=false")
WRITTEN: set[str] = set()  # metrics of this file's runs
GREEDY = engine_module.SamplingOptions(temperature=0.0, max_new_tokens=30)


@pytest.fixture
def run(one_rank, monkeypatch, tmp_path):
    """A program's `main` with these overrides of configs/smoke.yaml: its newest run folder."""
    run_in_this_process(monkeypatch, one_rank)
    write_rows(tmp_path)

    def run(program, *overrides, code=0):
        monkeypatch.setattr(sys, "argv", ["", *arguments(tmp_path), *overrides])
        assert program.main() == code
        folder = sorted(tmp_path.glob("exp_*" if program is grpo else "eval_*"))[-1]
        WRITTEN.update(key for record in records(folder) * (program is grpo) for key in record)
        return folder

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


@pytest.mark.slow
def test_a_run_that_cannot_fill_a_step_is_saved_and_exported_and_goes_on_with_other_prompts(run, monkeypatch, capfd):
    """volcengine/verl#953: dynamic sampling that ran out of mixed groups lost the steps since the last checkpoint, and
    a resumed run drew the same prompts again."""
    rows, failing = [], {2, 3}  # batches of 4 prompts

    def is_mixed(group, by_turn):
        rows.append(group[0].row_id)
        return (len(rows) - 1) // 4 not in failing

    monkeypatch.setattr(rollout, "is_mixed", is_mixed)
    words = ["grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1", "grpo.val_at_start=false"]
    words += ["checkpointing.save_period=99", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"]
    folder = run(grpo, *words, code=3)
    said = capfd.readouterr().err.splitlines()[-1]
    assert "gave 0 groups" in said and "Step 2: saved, exported; continue with" in said and str(folder) in said
    assert [record["step"] for record in records(folder)] == [1, 2]
    saved, exported = weights(folder, 2), load_file(folder / "hf_model" / "model.safetensors")
    assert all(torch.equal(saved[f"param.{name}"], tensor) for name, tensor in exported.items())
    resume = f"checkpointing.resume_from={folder}"
    run(grpo, *words, resume, code=3)  # the next batch cannot fill a step either
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    run(grpo, *words, resume)
    assert [record["step"] for record in records(folder)] == [1, 2, 3, 4]
    assert len(set(rows)) == len(rows) == 24, "no prompt twice in the epoch"


@pytest.mark.slow
def test_any_checkpoint_that_is_kept_is_scored_exported_and_resumed(run, monkeypatch, one_rank, capfd):
    """PrimeIntellect-ai/prime-rl#1160, NVIDIA-NeMo/RL#142: keep_top_k kept what nothing could use."""
    words = ["checkpointing.save_period=1", "checkpointing.keep_latest=9", "checkpointing.metric_name=train/lr"]
    words += ["checkpointing.higher_is_better=false", "policy.scheduler.warmup_steps=2", "policy.scheduler.name=linear"]
    words += ["grpo.val_at_start=false", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"]
    folder = run(grpo, *words)
    rates = [record["train/lr"] for record in records(folder)]
    best = 1 + rates.index(min(rates))
    assert best != 4
    resume = f"checkpointing.resume_from={folder}"
    scored = run(eval_module, resume, "checkpointing.resume_step=best", "checkpointing.higher_is_better=false")
    assert json.loads((scored / "eval.json").read_text())["checkpoint"].endswith(f", step {best}")
    for asked, step in (("best", best), ("3", 3)):
        monkeypatch.setattr(export, "start_process_group", lambda *_: one_rank[:2])
        monkeypatch.setattr(sys, "argv", ["", str(folder), asked])
        assert export.main() == 0
        exported = load_file(folder / "exports" / f"step_{step:06d}" / "hf_model" / "model.safetensors")
        saved = weights(folder, step)
        assert all(torch.equal(saved[f"param.{name}"], tensor.float()) for name, tensor in exported.items())
    last = weights(folder, 4)
    capfd.readouterr()
    run(grpo, *words, resume, "checkpointing.resume_step=7", code=2)
    assert "resume_step=7: " in (said := capfd.readouterr().err) and "4, 3, 2, 1" in said
    run(grpo, *words, resume, "policy.kernel_backend=triton", code=2)
    assert "policy.kernel_backend=triton" in capfd.readouterr().err
    run(grpo, *words, resume, "checkpointing.resume_step=2", "grpo.max_num_steps=3", "policy.scheduler.name=constant")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_000001", "step_000002", "step_000003"], "the run has gone back before step 4"
    run(grpo, *words, resume, "checkpointing.resume_step=2")
    again = weights(folder, 4)
    assert all(torch.equal(again[name], last[name]) for name in last)
    assert [record["step"] for record in records(folder)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_weight_of_the_entropy_bonus_rises_from_0_and_goes_on_after_a_resume(run, tmp_path):
    """huggingface/trl#6140."""
    words = ["loss_fn.entropy_target=9", *QUIET]
    whole = run(grpo, *words)
    steps = records(whole)
    assert [record["train/entropy_coef"] for record in steps] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step_000004")
    run(grpo, *words, f"checkpointing.resume_from={cut}")
    again, after = weights(cut, 4), weights(whole, 4)
    assert all(torch.equal(again[name], after[name]) for name in after)
    other = weights(run(grpo, *QUIET), 4)
    assert not any(torch.equal(other[name], after[name]) for name in after if name.startswith("param."))


LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4")


@pytest.mark.slow
def test_a_run_with_lora_trains_saves_resumes_exports_and_is_scored(run, tmp_path, capfd):
    whole = run(grpo, *LORA, "policy.optimizer.kwargs.lr=1e-2")
    closing = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert any(line.startswith(f"run folder {whole}: ") and "hf_model, hf_adapter" in line for line in closing)
    steps = [record for record in records(whole) if "train/loss" in record]
    assert all(record["train/grad_norm"] > 0 and record["train/logp_gap_max"] <= 1e-4 for record in steps)
    after = weights(whole, 4)
    assert {name.rpartition(".")[2] for name in after if name.startswith("param.")} == {"lora_A", "lora_B"}
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for name in ("checkpoints/step_000004", "hf_model", "hf_adapter"):  # as if it had been killed in step 3
        shutil.rmtree(cut / name)
    run(grpo, *LORA, "policy.optimizer.kwargs.lr=1e-2", f"checkpointing.resume_from={cut}")
    again = weights(cut, 4)
    assert again.keys() == after.keys() and all(torch.equal(again[name], after[name]) for name in after)
    for name in ("hf_model/model.safetensors", "hf_adapter/adapter_model.safetensors"):
        one, other = load_file(whole / name), load_file(cut / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert records(cut, "samples.jsonl") == records(whole, "samples.jsonl")

    scored = [
        run(eval_module, *LORA, f"checkpointing.resume_from={whole}"),
        run(eval_module, f"policy.model_name={whole / 'hf_model'}"),
    ]
    reports = [json.loads((folder / "eval.json").read_text())["sets"] for folder in scored]
    assert reports[0] == reports[1] != {}
    last, (numbers,) = records(whole)[-1], reports[0].values()
    assert numbers["sampled"]["accuracy"] == last["validation/sampled/accuracy"]


ASYNC = ("grpo.async_grpo.enabled=true", "grpo.max_num_steps=10", "checkpointing.save_period=5", "grpo.val_period=4")
SIX_STEPS = ("grpo.max_num_steps=6", "checkpointing.save_period=3", "grpo.val_period=2", "grpo.canary_period=3")


@pytest.mark.slow
def test_age_0_is_the_synchronous_run_to_the_bit(run):
    """With validations and canaries between the steps."""
    old = run(grpo, *SIX_STEPS)
    new = run(grpo, *SIX_STEPS, "grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0")
    assert old != new
    before, after = weights(old, 6), weights(new, 6)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)
    assert records(old, "samples.jsonl") == records(new, "samples.jsonl")
    ages = [record["train/max_trajectory_age"] for record in records(new) if "train/loss" in record]
    assert ages == [0] * 6


@pytest.mark.slow
def test_a_run_that_carries_over(run, tmp_path):
    """Killed and resumed: every prompt is trained once in the epoch, by tokens of the last two steps; the newest of
    them agree with the trainer as in a synchronous run. What was under way is drawn again, with newer weights."""
    words = (*ASYNC, "loss_fn.use_importance_sampling_correction=true", "grpo.max_num_epochs=4")
    words += ("checkpointing.save_period=1", "checkpointing.keep_latest=11")
    whole = run(grpo, *words)
    steps = [record for record in records(whole) if "train/loss" in record]
    assert {record["train/max_trajectory_age"] for record in steps} == {0, 1} and len(steps) > 4
    assert all(record["train/logp_gap_max"] <= 1e-4 and record["train/grad_norm"] > 0 for record in steps)
    for name in ("buffer_size", "carried_groups"):
        assert any(record[f"train/{name}"] for record in steps), name
    assert 0 < fmean(record["train/avg_trajectory_age"] for record in steps) < 1
    old = (record for record in records(whole, "samples.jsonl") if record["weight_version"] == record["step"] - 2)
    at = next(record["step"] - 1 for record in old if record["kind"] == "train")
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for path in cut.glob("checkpoints/step_*"):
        if path.name != f"step_{at:06d}":
            shutil.rmtree(path)  # as if it had been killed after this step
    run(grpo, *words, f"checkpointing.resume_from={cut}")
    for folder, is_resumed in ((whole, False), (cut, True)):
        samples = [record for record in records(folder, "samples.jsonl") if record["kind"] == "train"]
        ages = {at - record["weight_version"] for record in samples if record["step"] == at + 1}
        assert ages == {0} if is_resumed else 1 in ages
        assert sorted(record["row_id"] for record in samples) == sorted(list(range(40)) * 8)


@pytest.mark.slow
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_run_with_a_filter(run, capfd, kl):
    """Two optimizer steps per rollout: old, current, unfiltered and the reference's log-probabilities."""
    words = ["grpo.max_num_steps=2", "checkpointing.enabled=false", "policy.ppo_epochs=2"]
    words += ["policy.generation.top_p=0.9", "policy.generation.top_k=20"]
    words += [f"loss_fn.reference_policy_kl_penalty={kl}", "grpo.val_temperature=1"]
    folder = run(grpo, *words)
    path = "two passes, autograd of loss.py (the KL is of log-prob" if kl else "one pass, autograd of loss.py"
    assert f"loss: {path}" in capfd.readouterr().out
    steps = [record for record in records(folder) if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["train/grad_norm"] > 0 and record["train/logp_gap_max"] <= 1e-4
        assert record["train/kept_fraction/sampling_filter"] > 0.98
        assert (record["train/kl_penalty"] != 0) == (kl > 0)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_asynchronous_run_whose_ratio_is_to_the_sampler(run, epochs):
    """NovaSky-AI/SkyRL#1315: the clip acts on older weights; the gap is that of the newest, at the step's start."""
    words = ["grpo.async_grpo.enabled=true", "loss_fn.old_logprobs=sampler", "policy.optimizer.kwargs.lr=0.01"]
    words += ["grpo.max_num_steps=3", "checkpointing.enabled=false", "policy.scheduler.warmup_steps=0"]
    folder = run(grpo, *words, f"policy.ppo_epochs={epochs}", "grpo.logp_gap_limit=1e-4", *QUIET)
    steps = [record for record in records(folder) if "train/loss" in record]
    assert [record["train/logp_gap_max"] for record in steps if record["train/logp_gap_max"] > 1e-4] == []
    assert steps[0]["train/grad_norm"] > 0
    old = [record for record in steps if record["train/max_trajectory_age"] > 0]
    assert old and all(record["train/token_mult_prob_error"] > 1.01 for record in old)
    assert any(record["train/ratio_clip_low_fraction"] + record["train/ratio_clip_high_fraction"] > 0 for record in old)


@pytest.mark.slow
def test_a_teacher_that_is_the_initial_policy_is_its_reference(run):
    """prime-rl#2189: the same numbers, whichever module computes them; and advantages off, it is all that trains."""
    words = ["grpo.max_num_steps=2", "loss_fn.reference_policy_kl_penalty=0.1", "checkpointing.enabled=false", *QUIET]
    found = []
    for teacher in ([], [f"policy.reference_model_name={STARTER}"]):
        steps = [record for record in records(run(grpo, *words, *teacher)) if "train/loss" in record]
        found.append([{name: step[name] for name in step if name.startswith("train/")} for step in steps])
    assert found[0] == found[1] and found[0][-1]["train/kl_penalty"] > 0
    words += ["loss_fn.reference_policy_kl_penalty=1", "grpo.adv_estimator.name=none", *teacher]
    first = next(record for record in records(run(grpo, *words)) if "train/loss" in record)
    assert abs(first["train/kl_penalty"]) < 1e-6 and first["train/grad_norm"] < 1e-3


@pytest.mark.slow
def test_without_advantages_a_teacher_alone_trains(run, tmp_path):
    """NVIDIA-NeMo/RL#3584: on-policy distillation, from a copy that random noise has moved away. No rule calls it sick:
    that rewards give no gradient is meant."""
    shutil.copytree(STARTER, tmp_path / "teacher")
    generator = torch.Generator().manual_seed(0)
    moved = load_file(STARTER / "model.safetensors")
    moved = {name: x + 0.1 * x.std() * torch.randn(x.shape, generator=generator).to(x) for name, x in moved.items()}
    save_file(moved, tmp_path / "teacher" / "model.safetensors", metadata={"format": "pt"})
    words = [f"policy.reference_model_name={tmp_path}/teacher", "loss_fn.reference_policy_kl_penalty=1"]
    words += ["grpo.adv_estimator.name=none", "grpo.max_num_steps=6", "checkpointing.enabled=false", *QUIET]
    steps = [record for record in records(run(grpo, *words)) if "train/loss" in record]
    assert all(record["train/kl_penalty"] > 0 and record["train/grad_norm"] > 1e-3 for record in steps)
    assert not any(value for step in steps for name, value in step.items() if name.startswith("train/health/"))


def make_engine(folder, max_total_tokens=64):
    policy = config.PolicyConfig(precision="float32", max_total_sequence_length=max_total_tokens)
    return engine_module.VLLMEngine(folder, read_model_config(folder), Tokenizer(folder), config.Config(policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["stand-in", "vllm"])
def test_a_reply_ends_with_the_token_that_completes_a_stop_string(which, request, one_rank, tiny, monkeypatch):
    """huggingface/trl#2820: ids and log-probabilities are those without stop strings, up to that token and with it."""
    if which == "vllm":
        engine = request.getfixturevalue("engine")
    else:
        use_stand_in(monkeypatch)
        engine = make_engine(tiny[0], max_total_tokens=256)
    policy = load_policy(tiny[0], device=one_rank[1], mesh=one_rank[2])
    engine.sync(full_tensors(policy, torch.float32), 0)
    options = engine_module.SamplingOptions(temperature=1.0, max_new_tokens=30)
    draw = partial(engine.generate, [list(range(3, 8 + i % 9)) for i in range(48)], range(48), options)
    whole, tokenizer = draw(), Tokenizer(tiny[0])
    texts = [tokenizer.decode(completion.ids[n % 25 : n % 25 + 2]) for n, completion in enumerate(whole)]
    strings = ("nowhere", *(text for text in texts if text.strip() and "\ufffd" not in text))
    assert len(strings) > 4
    monkeypatch.setattr(engine, "stop_strings", strings)
    num_cut = 0
    for before, after in zip(whole, draw(), strict=True):
        heads = [tokenizer.backend.decode(before.ids[: n + 1]) for n in range(len(before.ids))]
        length = next((n + 1 for n, head in enumerate(heads) if any(s in head for s in strings)), len(heads))
        assert after.ids == before.ids[:length]
        assert abs(after.tokens["logp"] - before.tokens["logp"][:length]).max() < 1e-4 and len(after.tokens) == length
        stops = any(string in heads[length - 1] for string in strings)
        assert after.finish_reason == ("stop" if stops else before.finish_reason)
        num_cut += length < len(heads)
    assert num_cut > 2 and engine.is_idle


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
    assert [c.ids for c in fake] == [c.ids for c in real]
    assert [c.finish_reason for c in fake] == [c.finish_reason for c in real]
    assert max(abs(a.tokens["logp"] - b.tokens["logp"]).max() for a, b in zip(fake, real, strict=True)) < 1e-4


@pytest.mark.house
def test_the_page_has_all_metrics_of_these_runs():
    assert undocumented(WRITTEN) == []
