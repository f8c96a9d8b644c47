"""Dumps: what a dump holds, that it changes nothing, and that replay.py trains the step again to the bit."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from one_process import run_in_this_process
from safetensors.numpy import load_file
from small_run import ROOT, STARTER, arguments, write_rows

import grpo
import replay
from base.hf.tokenizer import Tokenizer
from base.inputs.checkpoints import digest
from base.system.exits import StopRun
from config import ConfigError
from run import checkpoint, dump, steps

pytestmark = pytest.mark.slow

QUIET = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.save_hf_at_end=false")
QUIET += ("logger.tensorboard_enabled=false", "grpo.max_num_steps=2", "checkpointing.save_period=1")
DUMP = "logger.dump_rollouts=1"
THREE_STEPS = (*QUIET, "grpo.max_num_steps=3", "checkpointing.keep_latest=3", "policy.scheduler.name=cosine")
TWO_TURNS = ("examples/arithmetic/two_turns.yaml", "data.train.output_key=answer", "data.validation.output_key=answer")
CASES = {
    "dapo, minibatches": [
        *("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=99", "policy.ppo_epochs=2"),
        *("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=3"),
        *("grpo.overlong_filtering=true", "policy.train_global_batch_size=32", "policy.generation.max_new_tokens=3"),
        *("policy.scheduler.name=cosine", "grpo.num_prompts_per_step=8", "grpo.batch_multiplier=2"),
    ],
    "two turns, filters, lora, async": [
        "grpo.turn_level_advantages=true",
        *("policy.generation.top_k=20", "policy.generation.top_p=0.95", "loss_fn.reference_policy_kl_penalty=0.1"),
        *("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4", "grpo.max_num_epochs=9"),
        *("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"),
    ],
    "async, old is the sampler": [
        *("grpo.async_grpo.enabled=true", "grpo.max_num_epochs=9"),
        *("loss_fn.old_logprobs=sampler", "policy.ppo_epochs=2"),
    ],
    "gspo": ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false", "policy.ppo_epochs=2"],
    "cispo": ["loss_fn.use_cispo=true", "policy.train_global_batch_size=16"],
    "agents": [
        *("env.agents.name=fork", "env.agents.function=forking_agent:solve", "env.agents.num_workers=2"),
        *("env.agents.deadline_s=60", "data.train.env_name=fork", "policy.max_total_sequence_length=64"),
        *("policy.ppo_epochs=2", f"env.custom.fork.keys_file={os.devnull}"),
    ],
    "entropy at a target": ["loss_fn.entropy_target=9", "policy.train_global_batch_size=16"],
    "kl": ["loss_fn.reference_policy_kl_penalty=0.1", "policy.train_global_batch_size=16", "policy.ppo_epochs=2"],
}
for old in ("trainer", "sampler"):
    for num_steps in (1, 3):  # of an epoch
        for epochs in (1, 2):
            CASES[f"old {old}, {num_steps} steps, {epochs} epochs"] = [
                *("grpo.num_prompts_per_step=3", f"policy.train_global_batch_size={24 // num_steps}"),
                *(f"loss_fn.old_logprobs={old}", f"policy.ppo_epochs={epochs}"),
            ]
# By --long: a quarter of what one of the daily cases has, and a process of agents.
LATER = {"agents", "old sampler, 1 steps, 1 epochs"}
LATER |= {f"old trainer, {n} epochs" for n in ("1 steps, 1", "1 steps, 2", "3 steps, 1")}


@pytest.fixture(scope="module")
def start(one_rank):
    """grpo.main in this process: (its exit code, the weights and moments that it left, by name, and its metrics)."""
    with pytest.MonkeyPatch.context() as patch:
        run_in_this_process(patch, one_rank)
        ends, finish = [], steps.finish

        def note(run):
            ends.append((tensors_of(run.model, run.optimizer), run.metrics))
            return finish(run)

        patch.setattr(steps, "finish", note)

        def start(*words):
            patch.setattr(sys, "argv", ["", *words])
            ends.append(({}, {}))
            return grpo.main(), *ends[-1]

        yield start


def tensors_of(model, optimizer):
    """Copies of the weights, and of what the optimizer keeps for each."""
    tensors = {}
    for name, param in model.named_parameters():
        of_param = {"weight": param.detach(), **optimizer.state.get(param, {})}
        tensors |= {f"{name}/{key}": getattr(x, "full_tensor", x.clone)().clone() for key, x in of_param.items()}
    return tensors


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def plain(start, tmp_path_factory):
    """(folder of a run of three steps with dumps, what it left)."""
    folder = tmp_path_factory.mktemp("plain")
    write_rows(folder)
    code, *left = start(*arguments(folder), *THREE_STEPS, DUMP)
    assert code == 0
    return folder / "exp_001", left


def read_dump(folder):
    """(records of samples.jsonl, columns of the only rank)"""
    (file,) = folder.glob("rank_*.safetensors")
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()], load_file(file)


def test_training_is_the_same_with_and_without_a_dump(start, plain, tmp_path):
    write_rows(tmp_path)
    code, tensors, metrics = start(*arguments(tmp_path), *THREE_STEPS)
    assert code == 0 and not (tmp_path / "exp_001" / "rollouts").exists()
    assert_equal(tensors, plain[1][0])
    assert {k: repr(x) for k, x in metrics.items()} == {k: repr(x) for k, x in plain[1][1].items()}


def test_what_a_dump_holds(plain):
    """Its numbers are those that the run logged; log-probabilities and entropies are transformers', in float64."""
    from transformers import AutoModelForCausalLM

    folder, _ = plain
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == [f"step_00000{step}" for step in (1, 2, 3)]
    records, columns = read_dump(folder / "rollouts" / "step_000001")
    logged = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()][:32]
    assert columns["sample_S"].tolist() == list(range(32)) == [8 * r["prompt"] + r["index"] for r in records]
    for record, line in zip(records, logged, strict=True):
        for name in ("row_id", "reward", "unshaped_reward", "outcome", "finish_reason"):
            assert record[name] == line[name], name
        assert record["oldest_version"] == record["newest_version"] == line["weight_version"]
        assert record["prompt_text"] == line["prompt"] and "".join(record["tokens"]) == line["reply"]
        assert {"env_name": "exact", "dataset": "train", "num_turns": 1, "num_env_tokens": 0}.items() <= record.items()
    assert sum(abs(record["advantage"]) for record in records) > 0
    model = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float64)
    ends, vocab_size = np.cumsum(columns["num_tokens_S"]), Tokenizer(STARTER).vocab_size
    dtypes = {"id": np.int32, "logp": np.float32, "version": np.int32, "trainer_logp": np.float32}
    assert all(columns[f"{name}_T"].dtype == dtype for name, dtype in dtypes.items()) and columns["mask_T"].all()
    for record, start, end in list(zip(records, [0, *ends], ends, strict=False))[::5]:
        ids = torch.tensor([[*record["prompt_ids"], *columns["id_T"][start:end]]])
        with torch.no_grad():
            logp_TV = model(ids).logits[0, len(record["prompt_ids"]) - 1 : -1, :vocab_size].log_softmax(-1)
        logp_T = logp_TV.gather(1, ids[0, len(record["prompt_ids"]) :, None])[:, 0]
        assert columns["trainer_logp_T"][start:end] == pytest.approx(logp_T.numpy(), abs=2e-5)
        assert columns["logp_T"][start:end] == pytest.approx(logp_T.numpy(), abs=2e-5)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        assert columns["entropy_T"][start:end] == pytest.approx(entropy_T.numpy(), abs=2e-5)


def test_token_texts():
    """Byte-level ids: a character is with the id that ends it; what is no character is decoded all the same."""
    tokenizer = Tokenizer(STARTER)
    ids = tokenizer.backend.encode("1+\u00e9\u65e5 \U0001f9ee=2", add_special_tokens=False).ids
    texts = tokenizer.token_texts(ids)
    assert "".join(texts) == "1+\u00e9\u65e5 \U0001f9ee=2" and [text for text in texts if text] == list("".join(texts))
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, 258, rng.integers(1, 20)).tolist()
        texts = tokenizer.token_texts(ids)
        assert len(texts) == len(ids) and "".join(texts) == tokenizer.backend.decode(ids, skip_special_tokens=False)


def test_what_the_disk_refuses_costs_the_dump_alone(start, plain, tmp_path, monkeypatch, capfd):
    """In the first two steps. What a kill has left is no dump; the third writes over it."""
    half = tmp_path / "exp_001" / "rollouts" / "step_000003.tmp"
    write, write_part, begun = dump.write, checkpoint.write_part, []
    refused = {1: "rank_000.safetensors", 2: "samples.jsonl"}

    def write_step(run, samples, adv_B, step):
        begun.append(step)
        if step == 3:
            half.mkdir()
            (half / "rank_007.safetensors").touch()
        write(run, samples, adv_B, step)

    def refuse(file, work):
        is_refused = refused.get(begun[-1]) == file.name
        return f"{file}: No space left on device" if is_refused else write_part(file, work)

    monkeypatch.setattr(checkpoint, "write_part", refuse)
    monkeypatch.setattr(dump, "write", write_step)
    write_rows(tmp_path)
    code, tensors, _ = start(*arguments(tmp_path), *THREE_STEPS, DUMP, "checkpointing.enabled=false")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("WARNING: the rollouts of step")]
    assert code == 0 and len(lines) == 2 and all("No space left on device" in line for line in lines)
    assert_equal(tensors, plain[1][0])
    assert [path.name for path in half.parent.iterdir()] == ["step_000003"]
    names = ["meta.json", "rank_000.safetensors", "samples.jsonl"]
    assert sorted(path.name for path in (half.parent / "step_000003").iterdir()) == names


# ------------------------------------------------------------------------------------------------------------ replay


def replayed(one_rank, folder, step, *words):
    """(weights and moments, metrics) of the step, trained again."""
    rollouts = folder / "rollouts" / f"step_{step:06d}"
    cfg = replay.read_config(rollouts, list(words))
    done = replay.replay(rollouts, cfg, *one_rank[:2])
    assert done.step == step
    return tensors_of(done.model, done.optimizer), done.metrics


def assert_same_metrics(metrics, logged):
    """The replay has all metrics of training; NaN equals NaN."""
    assert {name: repr(value) for name, value in metrics.items()} == {name: repr(logged[name]) for name in metrics}
    assert metrics.keys() >= {"loss", "grad_norm", "lr", "approx_entropy", "logp_gap_mean", "num_bad_steps"}


def test_a_replay_is_the_step_to_the_bit(one_rank, plain):
    """The last of three; it writes nothing into the run's folder."""
    folder, (tensors, metrics) = plain
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again, same = replayed(one_rank, folder, 3)
    assert_equal(tensors, again)
    assert_same_metrics(same, metrics)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    table = replay.compare(folder, 3, same).splitlines()
    assert len(table) == 2 and table[-1].startswith("0 of ")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.long) if c in LATER else c for c in CASES])
def test_a_replay_of_every_kind_of_step(start, one_rank, tmp_path, case):
    write_rows(tmp_path)
    words = [*arguments(tmp_path), *QUIET, DUMP, *CASES[case]]
    words = [TWO_TURNS[0], *words[1:], *TWO_TURNS[1:]] if "two turns" in case else words
    code, tensors, metrics = start(*words)
    assert code == 0
    folder = tmp_path / "exp_001"
    records, columns = read_dump(folder / "rollouts" / "step_000002")
    is_nan = np.isnan(columns["trainer_logp_T"])
    assert is_nan.tolist() == np.isnan(columns["entropy_T"]).tolist() == (~columns["mask_T"]).tolist()
    trained = sum(record["num_trained_tokens"] for record in records)
    if case == "dapo, minibatches":
        assert len(records) == 64 and metrics["num_overlong_filtered"] > 0
        assert 0 < trained < columns["mask_T"].sum() and metrics["num_optimizer_steps"] == 4
    elif "two turns" in case:
        assert not columns["mask_T"].all() and trained == columns["mask_T"].sum() == metrics["global_valid_toks"]
        assert {record["oldest_version"] for record in records} == {0}, "a step old"
    again, same = replayed(one_rank, folder, 2)
    assert_equal(tensors, again)
    assert_same_metrics(same, metrics)
    if case == "dapo, minibatches":
        other, changed = replayed(one_rank, folder, 2, "loss_fn.ratio_clip_max=0.01")
        assert any(not torch.equal(tensors[name], other[name]) for name in tensors)
        assert changed["ratio_clip_high_fraction"] > metrics["ratio_clip_high_fraction"]
        assert "\nratio_clip_high_fraction " in replay.compare(folder, 2, changed)


def test_the_step_that_stopped_a_run_stops_again_until_its_reason_is_gone(start, one_rank, tmp_path, monkeypatch):
    def stop(*arguments):
        raise StopRun("a check of the step")

    write_rows(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "judge_step", stop)
        assert start(*arguments(tmp_path), *QUIET, DUMP)[0] == 3
        with pytest.raises(StopRun):
            replayed(one_rank, tmp_path / "exp_001", 1)
    _, metrics = replayed(one_rank, tmp_path / "exp_001", 1)
    assert "differ" not in replay.compare(tmp_path / "exp_001", 1, metrics)  # the run logged nothing of the step


def test_a_damaged_dump_and_one_whose_checkpoint_is_gone_are_refused(one_rank, plain, tmp_path):
    shutil.copytree(plain[0] / "rollouts", tmp_path / "exp_001" / "rollouts")
    copy = tmp_path / "exp_001" / "rollouts" / "step_000001"
    (tmp_path / "exp_001" / "config.yaml").write_text((plain[0] / "config.yaml").read_text())
    with pytest.raises(ConfigError, match=r"checkpoints/step_000002, .*keep_latest.*dump_rollouts.*save_period"):
        replayed(one_rank, tmp_path / "exp_001", 3)
    tokens = copy / "rank_000.safetensors"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"rank_000\.safetensors: .*checksum"):
        replayed(one_rank, tmp_path / "exp_001", 1)
    tokens.write_bytes(content)
    line = json.loads((plain[0] / "rollouts" / "step_000001" / "samples.jsonl").read_text().splitlines()[0])
    for text in ("null", "{", json.dumps(line | {"reward": "x"}), json.dumps(line | {"row_id": None})):
        (copy / "samples.jsonl").write_text(text + "\n")  # by another program, with right checksums
        seal(copy)
        with pytest.raises(ConfigError, match=r"step_000001: not written by this program"):
            replayed(one_rank, tmp_path / "exp_001", 1)


def seal(folder):
    """Right checksums in meta.json."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["sha256"]
    for name in meta["files"]:
        content = (folder / name).read_bytes()
        meta["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "meta.json").write_text(json.dumps(meta | {"sha256": digest(meta)}))


def test_a_log_with_a_line_that_a_kill_cut(plain, tmp_path):
    (tmp_path / "metrics.jsonl").write_text((plain[0] / "metrics.jsonl").read_text() + '{"step": 1, "train/lo')
    assert replay.logged_metrics(tmp_path, 1) == replay.logged_metrics(plain[0], 1) != {}


@pytest.mark.long
def test_the_command(plain):
    folder, _ = plain
    command = [sys.executable, "replay.py", str(folder / "rollouts" / "step_000001")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "\n0 of " in done.stdout and "replayed step 1\n" in done.stdout, done.stderr


def test_a_folder_that_is_no_saved_step(plain, monkeypatch, capsys):
    folder, _ = plain
    monkeypatch.delenv("GRPO_EXIT_FILE", raising=False)
    monkeypatch.setattr(sys, "argv", ["replay.py", str(folder)])
    assert replay.main() == 2 and "RUN/rollouts/step_000001" in capsys.readouterr().err
