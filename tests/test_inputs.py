"""Model against config, and what may be resumed: checked without torch, on folders made by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import config
import config_file
import inputs
from config import ConfigError
from model_config import ModelConfig

MODEL = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 100,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
)


def fits(tmp_path, model=MODEL, *, length=64, tensor=1, vocab_size=100):
    vllm_cfg = config.VllmConfig(tensor_parallel_size=tensor)
    policy = config.PolicyConfig(
        max_total_sequence_length=length, generation=config.GenerationConfig(vllm_cfg=vllm_cfg)
    )
    try:
        inputs.check_fits(config.Config(policy=policy), tmp_path, model, SimpleNamespace(vocab_size=vocab_size))
    except ConfigError as error:
        return str(error)
    return "fits"


def test_length_and_vocabulary_against_the_model(tmp_path):
    assert fits(tmp_path) == fits(tmp_path, vocab_size=80) == "fits"
    assert fits(tmp_path, replace(MODEL, max_position_embeddings=None), length=10**6) == "fits"
    message = fits(tmp_path, length=65)
    assert message.startswith("policy.max_total_sequence_length=65 is more than the model's max_position_embeddings=64")
    assert message.endswith("use 64 or less")
    assert "tokenizer.json has ids up to 100, config.json vocab_size=100" in fits(tmp_path, vocab_size=101)


def test_tensor_parallel_sizes_are_those_that_vllm_takes(tmp_path):
    """vLLM: ranks divide the query heads, and divide the key heads or are a multiple of them."""

    def taken(model):
        return [tensor for tensor in range(1, 13) if fits(tmp_path, model, tensor=tensor) == "fits"]

    assert taken(MODEL) == [1, 2, 4, 6, 12]
    assert taken(replace(MODEL, num_key_value_heads=6)) == [1, 2, 3, 6, 12]
    assert taken(replace(MODEL, num_key_value_heads=1)) == [1, 2, 3, 4, 6, 12]
    assert taken(replace(MODEL, num_attention_heads=4)) == [1, 2, 4]
    assert taken(replace(MODEL, intermediate_size=98)) == [1, 2]
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    assert fits(tmp_path, tensor=5).startswith(f"{key}=5 does not divide the model's num_attention_heads=12")
    assert fits(tmp_path, tensor=3).startswith(f"{key}=3 does not divide the model's num_key_value_heads=2")


# ---------------------------------------------------------------------------------------------------------- resuming


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with a checkpoint of 2 ranks, and the config that resumes it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = tmp_path / "logs" / "exp_001"
    cfg = config.Config(policy=config.PolicyConfig(model_name="models/one"))
    write_checkpoint(folder / "checkpoints" / "step_000009", world_size=8)
    write_checkpoint(folder / "checkpoints" / "step_000010", world_size=2)
    (folder / "config.yaml").write_text(config_file.to_yaml(cfg))
    return folder, replace(cfg, checkpointing=config.CheckpointingConfig(resume_from=str(folder)))


def write_checkpoint(folder, **changes):
    folder.mkdir(parents=True)
    (folder / "rank_00000.safetensors").write_bytes(b"12345")
    files = {"rank_00000.safetensors": {"bytes": 5, "sha256": ""}}
    meta = {"version": 1, "step": 1, "world_size": 2, "files": files, "state": {}} | changes
    (folder / "meta.json").write_text(json.dumps(meta))


def refused(cfg, **kwargs):
    with pytest.raises(ConfigError) as error:
        inputs.check_resumable(cfg, **kwargs)
    return str(error.value)


def test_same_run_may_go_on(run, monkeypatch):
    _, cfg = run
    inputs.check_resumable(cfg)
    inputs.check_resumable(replace(cfg, grpo=replace(cfg.grpo, max_num_steps=7)))
    inputs.check_resumable(replace(cfg, policy=replace(cfg.policy, model_name="./models/one/")))
    monkeypatch.delenv("WORLD_SIZE")  # --check alone: how many ranks there will be is not known
    inputs.check_resumable(cfg)


def test_other_world_size(run, monkeypatch):
    folder, cfg = run
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert refused(cfg) == (
        f"{folder}/checkpoints/step_000010: written by 2 ranks, this run has 4; use --nproc_per_node=2"
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("policy", "model_name", "models/two", 'policy.model_name="models/two" (there "models/one")'),
        ("grpo", "seed", 43, "grpo.seed=43 (there 42)"),
        ("grpo", "num_prompts_per_step", 8, "grpo.num_prompts_per_step=8 (there 32)"),
        ("grpo", "num_generations_per_prompt", 8, "grpo.num_generations_per_prompt=8 (there 16)"),
        (
            *("policy", "tokenizer", config.TokenizerConfig(chat_template=None)),
            'policy.tokenizer.chat_template=null (there "default")',
        ),
        ("data", "shuffle", False, "data.shuffle=false (there true)"),
        ("data", "use_multiple_dataloader", True, "data.use_multiple_dataloader=true (there false)"),
        ("data", "num_prompts_per_dataloader", 4, "data.num_prompts_per_dataloader=4 (there null)"),
        ("data", "custom_dataloader", "m:f", 'data.custom_dataloader="m:f" (there null)'),
    ],
)
def test_settings_that_must_stay(run, section, key, value, named):
    folder, cfg = run
    changed = replace(cfg, **{section: replace(getattr(cfg, section), **{key: value})})
    assert refused(changed) == (
        f"not as in the run that checkpointing.resume_from={folder} continues: {named}; use "
        f"./train.sh {folder}/config.yaml checkpointing.resume_from={folder}"
    )
    if key == "model_name":
        assert named in refused(changed, to_train=False)
    else:
        inputs.check_resumable(changed, to_train=False)  # a score with another seed is a score


def test_run_folder_without_its_config(run):
    folder, cfg = run
    (folder / "config.yaml").unlink()
    assert refused(cfg).startswith(f"{folder}/config.yaml: No such file or directory")


@pytest.mark.parametrize("meta", ["[]", "{}", "[" * 100_000, '{"files": {}}', '{"files": {"gone": {"bytes": 1}}}'])
def test_what_is_no_checkpoint_is_passed_over(run, meta):
    folder, cfg = run
    (folder / "checkpoints" / "step_000011").mkdir()
    (folder / "checkpoints" / "step_000011" / "meta.json").write_text(meta)
    inputs.check_resumable(cfg)
    for step in (9, 10):
        (folder / "checkpoints" / f"step_{step:06d}" / "rank_00000.safetensors").write_bytes(b"1234")
    message = f"checkpointing.resume_from={folder}: no whole checkpoint in {folder}/checkpoints; start a new run"
    assert refused(cfg).startswith(message)


def test_run_folder_that_must_not_be_written(run, monkeypatch):
    folder, cfg = run
    allowed = inputs.data.os.access
    monkeypatch.setattr(inputs.data.os, "access", lambda path, mode: path != folder and allowed(path, mode))
    assert refused(cfg) == f"checkpointing.resume_from={folder}: no permission to write in {folder}"
    inputs.check_resumable(cfg, to_train=False)


def test_runs_that_share_a_checkpoint_dir_have_a_folder_each(run, tmp_path, monkeypatch):
    folder, cfg = run
    assert inputs.checkpoint_folder(config.CheckpointingConfig(), folder) == folder / "checkpoints"
    shared = config.CheckpointingConfig(checkpoint_dir=str(tmp_path / "big"), resume_from=str(folder))
    assert inputs.checkpoint_folder(shared, folder) == tmp_path / "big" / "exp_001"
    assert inputs.checkpoint_folder(shared, folder.parent / "exp_002") == tmp_path / "big" / "exp_002"
    monkeypatch.chdir(folder)
    assert inputs.checkpoint_folder(shared, inputs.Path(".")) == tmp_path / "big" / "exp_001"
    assert f"no whole checkpoint in {tmp_path}/big/exp_001" in refused(replace(cfg, checkpointing=shared))
    (tmp_path / "big").mkdir()
    (folder / "checkpoints").rename(tmp_path / "big" / "exp_001")
    inputs.check_resumable(replace(cfg, checkpointing=shared))
