"""Dump and replay: what a dump holds, that it changes nothing, and that a step trained again is the same to the bit."""

import json
import subprocess
import sys
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from one_process import run_in_this_process
from safetensors.numpy import load_file
from small_run import ROOT, STARTER, arguments, write_rows

import grpo
from check import preflight
from check.preflight import parse_command_line, read_inputs
from config import ConfigError
from hf.tokenizer import Tokenizer
from run import checkpoint, rollouts, setup
from system.exits import StopRun

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
        *("policy.generation.top_k=20", "policy.generation.top_p=0.95", "loss_fn.reference_policy_kl_penalty=0.1"),
        *("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4", "grpo.max_num_epochs=9"),
        *("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"),
    ],
}


@pytest.fixture(scope="module")
def start(one_rank, tmp_path_factory):
    """grpo.main in this process: (its exit code, the weights and moments that it left, by name, and its metrics)."""
    with pytest.MonkeyPatch.context() as patch:
        run_in_this_process(patch, one_rank)
        ends, finish = [], setup.finish
        patch.setattr(setup, "finish", lambda run: ends.append((tensors_of(run), run.metrics)) or finish(run))

        def start(*words):
            patch.setattr(sys, "argv", ["", *words])
            ends.append(({}, {}))
            return grpo.main(), *ends[-1]

        yield start


def tensors_of(run):
    """Copies of the weights, and of what the optimizer keeps for each."""
    tensors = {}
    for name, param in run.model.named_parameters():
        of_param = {"weight": param.detach(), **run.optimizer.state.get(param, {})}
        tensors |= {f"{name}/{key}": getattr(x, "full_tensor", x.clone)().clone() for key, x in of_param.items()}
    return tensors


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def numbers(metrics):
    """Without what a replay has no engine for; NaN equals NaN."""
    return {name: repr(value) for name, value in metrics.items() if not name.startswith(rollouts.NOT_OF_TRAINING)}


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


def files_in(folder):
    return {path: sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------------- dump


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
        for name in ("row_id", "reward", "unshaped_reward", "outcome", "finish_reason", "weight_version"):
            assert record[name] == line[name], name
        assert record["prompt_text"] == line["prompt"] and "".join(record["tokens"]) == line["reply"]
        assert {"env_name": "exact", "dataset": "train", "num_turns": 1, "num_env_tokens": 0}.items() <= record.items()
    assert sum(abs(record["advantage"]) for record in records) > 0
    model = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float64)
    ends, vocab_size = np.cumsum(columns["num_tokens_S"]), Tokenizer(STARTER).vocab_size
    dtypes = {"output_ids": np.int32, "sampler_logp": np.float32, "version": np.int32, "logp": np.float32}
    assert all(columns[f"{name}_T"].dtype == dtype for name, dtype in dtypes.items()) and columns["mask_T"].all()
    for record, start, end in list(zip(records, [0, *ends], ends, strict=False))[::5]:
        ids = torch.tensor([[*record["prompt_ids"], *columns["output_ids_T"][start:end]]])
        with torch.no_grad():
            logp_TV = model(ids).logits[0, len(record["prompt_ids"]) - 1 : -1, :vocab_size].log_softmax(-1)
        logp_T = logp_TV.gather(1, ids[0, len(record["prompt_ids"]) :, None])[:, 0]
        assert columns["logp_T"][start:end] == pytest.approx(logp_T.numpy(), abs=2e-5)
        assert columns["sampler_logp_T"][start:end] == pytest.approx(logp_T.numpy(), abs=2e-5)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        assert columns["entropy_T"][start:end] == pytest.approx(entropy_T.numpy(), abs=2e-5)


def test_token_texts():
    """Byte-level ids: a character is with the id that ends it; what is no character is decoded all the same."""
    tokenizer = Tokenizer(STARTER)
    ids = tokenizer.backend.encode("1+\u00e9\u65e5 \U0001f9ee=2", add_special_tokens=False).ids
    texts = rollouts.token_texts(tokenizer, ids)
    assert "".join(texts) == "1+\u00e9\u65e5 \U0001f9ee=2" and [text for text in texts if text] == list("".join(texts))
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, 258, rng.integers(1, 20)).tolist()
        texts = rollouts.token_texts(tokenizer, ids)
        assert len(texts) == len(ids) and "".join(texts) == tokenizer.backend.decode(ids, skip_special_tokens=False)


def test_token_texts_where_a_word_depends_on_what_is_before_it():
    """A decoder that drops the first space, and one that no window explains."""
    words = {0: " one", 1: " two", 2: "s"}
    decode = lambda ids, skip_special_tokens: "".join(words[i] for i in ids).removeprefix(" ")  # noqa: E731
    tokenizer = SimpleNamespace(backend=SimpleNamespace(decode=decode))
    assert rollouts.token_texts(tokenizer, [0, 1, 2, 0]) == ["one", " two", "s", " one"]
    tokenizer.backend.decode = lambda ids, skip_special_tokens: "".join(words[i] for i in reversed(ids))
    assert "".join(rollouts.token_texts(tokenizer, [0, 1, 2])) == "s two one"


def test_what_the_disk_refuses_costs_the_dump_alone(start, plain, tmp_path, monkeypatch, capfd):
    """A rank's file in the first step, what rank 0 writes in the second. What a kill has left is no dump; the third
    writes over it."""
    half = tmp_path / "exp_001" / "rollouts" / "step_000003.tmp"
    steps, dump, write = [], rollouts.dump, checkpoint.write_part

    def write_part(file, *rest):
        full = {1: "rank_000.safetensors", 2: "samples.jsonl"}.get(steps[-1]) == file.name
        return f"{file}: No space left on device" if full else write(file, *rest)

    def dump_step(folder, samples, step, *rest):
        steps.append(step)
        if step == 3:
            half.mkdir()
            (half / "rank_007.safetensors").touch()
        dump(folder, samples, step, *rest)

    monkeypatch.setattr(checkpoint, "write_part", write_part)
    monkeypatch.setattr(rollouts, "dump", dump_step)
    write_rows(tmp_path)
    code, tensors, _ = start(*arguments(tmp_path), *THREE_STEPS, DUMP, "checkpointing.enabled=false")
    warnings = [
        line for line in capfd.readouterr().out.splitlines() if line.startswith("WARNING: the rollouts of step")
    ]
    assert code == 0 and len(warnings) == 2 and all("No space left on device" in line for line in warnings)
    assert_equal(tensors, plain[1][0])
    assert [path.name for path in half.parent.iterdir()] == ["step_000003"]
    names = ["meta.json", "rank_000.safetensors", "samples.jsonl"]
    assert sorted(path.name for path in (half.parent / "step_000003").iterdir()) == names


# ------------------------------------------------------------------------------------------------------------ replay


@pytest.mark.parametrize("step", [2, 3])
def test_a_replay_is_the_step_to_the_bit(start, plain, step, capfd):
    """From the run's own config.yaml; it writes nothing into the run's folder, and saves nothing."""
    folder, (tensors, metrics) = plain
    meta = folder / "checkpoints" / f"step_{step - 1:06d}" / "meta.json"  # as where the run had validated
    meta.write_text(
        meta.read_text().replace('"last_validation": {}', '"last_validation": {"validation/a/accuracy": 1}')
    )
    before = files_in(folder)
    replay = f"grpo.replay_rollouts={folder}/rollouts/step_{step:06d}"
    code, again, replayed = start(str(folder / "config.yaml"), replay, "checkpointing.checkpoint_dir=null")
    out = capfd.readouterr().out
    assert code == 0 and files_in(folder) == before
    assert f"all {len(numbers(metrics)) - 1} metrics are equal" in out, "all but train_tokens"
    assert f"replayed step {step}\n" in out and "accuracy, a" not in out, "the replay has not validated"
    assert "first      row" not in out, "nor drawn a prompt"
    assert f"step {step}/{step} | " in out and "| ETA 0m00s\n" in out, "no step comes after it"
    if step == 3:
        assert_equal(tensors, again)
        assert numbers(replayed) == numbers(metrics)
    newest = sorted(folder.parent.glob("exp_*"))[-1]
    assert newest != folder and not (newest / "checkpoints").exists() and not (newest / "hf_model").exists()
    assert [json.loads(line)["step"] for line in (newest / "metrics.jsonl").read_text().splitlines()] == [step]


@pytest.mark.parametrize("case", CASES)
def test_a_replay_of_every_kind_of_step(start, tmp_path, capfd, case):
    write_rows(tmp_path)
    words = [*arguments(tmp_path), *QUIET, DUMP, *CASES[case]]
    words = [TWO_TURNS[0], *words[1:], *TWO_TURNS[1:]] if "two turns" in case else words
    code, tensors, metrics = start(*words)
    assert code == 0, capfd.readouterr()
    folder = tmp_path / "exp_001"
    records, columns = read_dump(folder / "rollouts" / "step_000002")
    assert (
        np.isnan(columns["logp_T"]).tolist() == np.isnan(columns["entropy_T"]).tolist() == (~columns["mask_T"]).tolist()
    )
    trained = sum(record["num_trained_tokens"] for record in records)
    if case == "dapo, minibatches":
        assert len(records) == 64 and metrics["num_overlong_filtered"] > 0
        assert 0 < trained < columns["mask_T"].sum() and metrics["num_optimizer_steps"] == 4
    else:
        assert not columns["mask_T"].all() and trained == columns["mask_T"].sum() == metrics["global_valid_toks"]
        assert {record["weight_version"] for record in records} == {0}, "a step old"
    replay = f"grpo.replay_rollouts={folder}/rollouts/step_000002"
    code, again, replayed = start(str(folder / "config.yaml"), replay)
    assert code == 0, capfd.readouterr()
    assert_equal(tensors, again)
    assert numbers(replayed) == numbers(metrics)
    if case == "dapo, minibatches":
        code, other, replayed = start(str(folder / "config.yaml"), replay, "loss_fn.ratio_clip_max=0.01")
        assert code == 0 and any(not torch.equal(tensors[name], other[name]) for name in tensors)
        assert replayed["ratio_clip_high_fraction"] > metrics["ratio_clip_high_fraction"]
        assert " metrics differ\n" in capfd.readouterr().out


def test_the_step_that_stopped_a_run_stops_again_until_its_reason_is_gone(start, tmp_path, monkeypatch, capfd):
    def stop(*arguments):
        raise StopRun("a check of the step")

    write_rows(tmp_path)
    words = (f"{tmp_path}/exp_001/config.yaml", f"grpo.replay_rollouts={tmp_path}/exp_001/rollouts/step_000001")
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "count_bad_steps", stop)
        assert start(*arguments(tmp_path), *QUIET, DUMP)[0] == 3
        assert start(*words)[0] == 3
    assert start(*words)[0] == 0
    assert "\nthe run has not logged the step: it ended there\n" in capfd.readouterr().out


def refusal(folder, *words, step=2):
    """What a command line that replays is told."""
    with pytest.raises(ConfigError) as error:
        replay = f"grpo.replay_rollouts={folder}/rollouts/step_{step:06d}"
        read_inputs(parse_command_line([str(folder / "config.yaml"), replay, *words], ""))
    return str(error.value)


def test_the_check_of_a_replay_names_no_prompt_that_is_drawn(plain):
    folder, _ = plain
    words = ["--check", str(folder / "config.yaml")]
    run = preflight.check(parse_command_line(words, ""))
    replay = preflight.check(parse_command_line([*words, f"grpo.replay_rollouts={folder}/rollouts/step_000002"], ""))
    assert "\nfirst      row " in run and "\nreplay     step 2 of " in replay and "\nfirst " not in replay


def test_what_cannot_be_replayed(plain, tmp_path):
    folder, _ = plain
    assert "no such folder; a run with logger.dump_rollouts=N has rollouts/step_000001" in refusal(folder, step=7)
    told = refusal(folder, "grpo.num_prompts_per_step=2", "grpo.reward_scaling.enabled=true")
    assert "grpo.num_prompts_per_step=2 (was 4)" in told and "change keys of the loss, the advantages or" in told
    assert 'grpo.reward_scaling={"enabled": true, ' in told
    assert "policy.model_name=" in refusal(folder, f"policy.model_name={tmp_path}")
    assert "starts from the checkpoint before its rollouts" in refusal(folder, f"checkpointing.resume_from={folder}")
    for words in (("grpo.max_num_steps=2",), ("data.train.split_validation_size=30", "grpo.max_num_epochs=1")):
        told = refusal(folder, *words, step=3)
        assert told.startswith("grpo.replay_rollouts: step 3 is none of this run's 2 steps: let grpo.max_num_steps, ")
    for name in ("/", "/tmp", "."):
        assert f"grpo.replay_rollouts={name}: " in refusal(folder, f"grpo.replay_rollouts={name}"), "no run's folder"
    replay = f"grpo.replay_rollouts={folder}/rollouts/step_000001"
    cfg = parse_command_line([str(folder / "config.yaml"), replay, "logger.wandb_enabled=true"], "")
    assert not cfg.logger.wandb_enabled, "a step is no run at W&B"
    other = tmp_path / "exp_001"
    other.mkdir()
    (other / "config.yaml").write_text((folder / "config.yaml").read_text())
    (other / "rollouts").symlink_to(folder / "rollouts")
    told = refusal(other)
    assert "no whole checkpoint of step 1 in " in told and "steps that can be replayed: 1. A run keeps more" in told
    assert (
        "logger.dump_rollouts a multiple of checkpointing.save_period, and a larger checkpointing.keep_latest" in told
    )


def test_a_damaged_dump_is_refused_before_and_at_the_start(start, plain, tmp_path, capfd):
    folder = tmp_path / "exp_001"
    (folder / "rollouts" / "step_000001").mkdir(parents=True)
    for file in (plain[0] / "rollouts" / "step_000001").iterdir():
        (folder / "rollouts" / "step_000001" / file.name).write_bytes(file.read_bytes())
    (folder / "config.yaml").write_text((plain[0] / "config.yaml").read_text())
    tokens = folder / "rollouts" / "step_000001" / "rank_000.safetensors"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    words = (str(folder / "config.yaml"), f"grpo.replay_rollouts={folder}/rollouts/step_000001")
    assert start(*words)[0] == 2
    end = json.loads(sorted(plain[0].parent.glob("exp_*"))[-1].joinpath("exit.json").read_text())
    assert (
        "rank_000.safetensors: content differs from its checksum in meta.json: the rollouts are damaged"
        in end["reason"]
    )
    tokens.write_bytes(content[:-1])
    done = subprocess.run([sys.executable, "grpo.py", "--check", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "bytes, " in done.stderr and "these rollouts are not whole" in done.stderr
    tokens.write_bytes(content)
    meta = folder / "rollouts" / "step_000001" / "meta.json"
    meta.write_text(meta.read_text().replace('"world_size": 1', '"world_size": 2'))
    capfd.readouterr()
    assert start(*words)[0] == 0
    assert "WARNING: the replay is on 1 ranks instead of 2, whose packs and sums are others" in capfd.readouterr().out


def test_a_run_that_is_finished_asks_a_sampler_for_no_more(start, tmp_path, monkeypatch):
    """As a job that is queued again with checkpointing.resume=auto."""
    write_rows(tmp_path)
    (tmp_path / "two_steps.py").write_text(
        "def pick(num_prompts, position, **_):\n    assert position < 8\n    return ['train'] * num_prompts\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("data.use_multiple_dataloader=true", "data.custom_dataloader=two_steps:pick")
    words = (*arguments(tmp_path), *QUIET, *words, "checkpointing.resume=auto")
    assert start(*words)[0] == start(*words)[0] == 0
    assert [path.name for path in tmp_path.glob("exp_*")] == ["exp_001"]
