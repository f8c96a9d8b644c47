"""The real command: 6 steps are bitwise 4 steps, a resume and 2 steps. SIGTERM ends the first run in step 7, so the
checkpoint of a signal is that of a run that ends by itself. `--long` has two ranks."""

import json
import shutil
import signal

import pytest
from run_life import assert_same, at_step, run_to_the_end, steps, told_to_stop
from safetensors.torch import load_file
from torch import equal


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def runs(request, tmp_path_factory):
    """(run folder that SIGTERM ended amid the decoding of step 7, a copy of it, as a kill amid step 6 would have left
    it, that was resumed up to step 6, the output of the resumed run)."""
    work, num_ranks = tmp_path_factory.mktemp("resumed"), f"--nproc_per_node={request.param}"
    words = ("grpo.max_num_steps=9", "checkpointing.save_period=4", num_ranks)
    whole = told_to_stop(work, signal.SIGTERM, ("rollout", 6), *words)
    assert steps(whole) == [1, 2, 3, 4, 5, 6]
    resumed = shutil.copytree(whole, work / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "step_000006")
    with (resumed / "samples.jsonl").open("a") as file:
        file.write('{"step": 7, "cut')
    run_to_the_end(work, 6, num_ranks, resume=resumed)
    return whole, resumed, (work / "life_1.log").read_text()


def records(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_resumed_run_ends_with_the_same_bits(runs):
    whole, resumed, output = runs
    assert f"resumed from {resumed}/checkpoints/step_000004\n" in output
    assert "step 5/6" in output and "step 4/6" not in output
    assert_same(resumed, whole, 6)
    assert records(whole, "samples.jsonl") == records(resumed, "samples.jsonl")  # prompts, sampled text, rewards
    assert at_step(whole, 6)[1]["drawn"] == {"train": 18, "heldout": 6}  # 3 to 1
    (before, *_), (after, *_) = at_step(whole, 4), at_step(whole, 6)
    assert all(not equal(before[name], after[name]) for name in before if ".up_proj" in name)  # else equal says nothing


def test_metrics_are_those_of_the_unbroken_run_but_for_time(runs):
    whole, resumed, _ = runs
    for one, other in zip(records(whole, "metrics.jsonl"), records(resumed, "metrics.jsonl"), strict=True):
        numbers = {k: v for k, v in one.items() if not k.startswith(("timing/", "performance/"))}
        assert numbers == {k: v for k, v in other.items() if not k.startswith(("timing/", "performance/"))}


def test_sampler_and_trainer_agree_after_every_real_update(runs):
    rows = records(runs[0], "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all(r["train/grad_norm"] > 0 and r["train/logp_gap_max"] <= 1e-4 for r in rows), rows


def test_exported_model_is_the_last_checkpoint_and_loads_in_transformers(runs):
    from transformers import AutoModelForCausalLM

    folder = runs[1]
    exported = load_file(folder / "hf_model" / "model.safetensors")
    files = sorted((folder / "checkpoints" / "step_000006").glob("rank_*.safetensors"))
    shards = [load_file(file) for file in files]
    for name, tensor in exported.items():
        rows = sum(len(shard[f"param.{name}"]) for shard in shards)
        assert rows == len(tensor)
        assert equal(tensor[: len(shards[0][f"param.{name}"])], shards[0][f"param.{name}"])
    loaded = AutoModelForCausalLM.from_pretrained(folder / "hf_model", dtype="auto")
    assert equal(loaded.state_dict()["model.norm.weight"], exported["model.norm.weight"])
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (folder / "hf_model").iterdir()}
