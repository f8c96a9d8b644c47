"""Models whose folder or attention is like no other's, random ones, by the real command."""

import json
import shutil

import pytest
from families import make_family
from run_life import assert_same, run_to_the_end
from safetensors.torch import load_file
from torch import equal

from base.hf.families import WHOLE
from examples.moe.upcycle import STARTER

pytestmark = pytest.mark.long
KINDS = ("deepseek_v3", "gemma3", "gemma4", "granitemoehybrid", "lfm2", "nemotron_h", "qwen3_next", "qwen3_5")
PARTS = ("train.0", "train.1", "validation")
WORDS = ["checkpointing.save_period=2", *(f"data.{part}.env_name=on_cpu:plain_characters" for part in PARTS)]

# Routers, and a buffer.
FROZEN = (".gate.weight", ".router.layer.weight", "e_score_correction_bias", "layer_scalar")


def make_model(kind, folder):
    """A random one, with the starter's tokenizer."""
    shutil.copytree(STARTER, folder)
    (folder / "model.safetensors").unlink()
    make_family(kind, eos_token_id=257, pad_token_id=256).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tmp_path_factory):
    """(kind, model folder, working folder of a run of four steps, of one that is resumed after two, on two ranks)."""
    kind = request.param
    work = tmp_path_factory.mktemp(kind)
    folder = work / "model"
    make_model(kind, folder)
    words = [f"policy.model_name={folder}", *WORDS]
    works = [work / name for name in ("unbroken", "resumed", "two_ranks")]
    for number, path in enumerate(works):
        path.mkdir()
        num_steps = 2 if path.name == "resumed" else 4
        run_to_the_end(path, num_steps, *words, f"--nproc_per_node={1 + number // 2}")
    begun = works[1] / "logs" / "exp_001"
    run_to_the_end(works[1], 4, *words, "--nproc_per_node=1", resume=begun)
    return kind, folder, *works


def trained(work):
    text = (work / "logs" / "exp_001" / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "train/loss" in line]


def test_sampler_and_trainer_agree_on_any_number_of_ranks(runs):
    _, _, one, _, two = runs
    for line in (*trained(one), *trained(two)):
        assert line["train/grad_norm"] > 0 and line["train/logp_gap_max"] <= 1e-4, line
    assert len(trained(one)) == len(trained(two)) == 4
    for name in ("train/loss", "train/grad_norm", "train/reward", "train/mean_gen_tokens_per_sample"):
        pairs = zip(trained(one), trained(two), strict=True)
        assert all(a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6) for a, b in pairs), name


def test_a_resumed_run_is_the_unbroken_one(runs):
    _, _, unbroken, resumed, _ = runs
    assert_same(resumed / "logs" / "exp_001", unbroken / "logs" / "exp_001", 4)


def test_a_model_with_state_learns_a_task(tmp_path):
    make_model("granitemoehybrid", tmp_path / "model")
    words = [f"policy.model_name={tmp_path / 'model'}", *WORDS]
    words += ["policy.scheduler.warmup_steps=0", "policy.optimizer.kwargs.lr=3e-3"]
    run_to_the_end(tmp_path, 40, *words, "--nproc_per_node=1")
    rewards = [line["train/reward"] for line in trained(tmp_path)]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.1  # seven standard errors


def test_the_export_is_the_whole_folder(runs):
    kind, folder, work, *_ = runs
    export = work / "logs" / "exp_001" / "hf_model"
    before = load_file(folder / "model.safetensors")
    after = {}
    for file in export.glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == before.keys()
    same = {name for name, tensor in before.items() if equal(tensor, after[name])}
    if kind not in WHOLE:
        assert all(name.endswith(FROZEN) for name in same), same
        return
    kept = {name for name in before if name.startswith(WHOLE[kind].kept) or name.endswith("layer_scalar")}
    assert same == kept
    assert (export / "preprocessor_config.json").exists()
    log = next(work.glob("life_*.log")).read_text()
    assert log.count(f"only the text model of this {kind} is trained") == 1
