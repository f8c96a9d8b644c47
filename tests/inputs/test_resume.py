"""Which run goes on, and from which of its checkpoints: read without torch, damaged ones refused by name."""

import itertools
import json
import os
import shutil
from dataclasses import replace

import pytest

import config
from base.check.command_line import parse_command_line
from base.inputs import checkpoints, reader, resume
from config import ConfigError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with a checkpoint of 2 ranks, and the config that resumes it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = tmp_path / "logs" / "exp_001"
    cfg = config.Config(policy=config.PolicyConfig(model_name="models/one"))
    write_checkpoint(folder / "checkpoints" / "step_000009", world_size=8)
    write_checkpoint(folder / "checkpoints" / "step_000010", world_size=2)
    (folder / "config.yaml").write_text(reader.to_yaml(cfg))
    return folder, replace(cfg, checkpointing=config.CheckpointingConfig(resume_from=str(folder)))


def write_checkpoint(folder, **changes):
    folder.mkdir(parents=True)
    (folder / "rank_00000.safetensors").write_bytes(b"12345")
    files = {"rank_00000.safetensors": {"bytes": 5, "sha256": ""}}
    step = int(folder.name.removeprefix("step_"))
    meta = {"version": checkpoints.VERSION, "step": step, "world_size": 2, "files": files, "state": {}, "metric": None}
    (folder / "meta.json").write_text(json.dumps(meta | changes | {"sha256": checkpoints.digest(meta | changes)}))


def refused(cfg, **kwargs):
    with pytest.raises(ConfigError) as error:
        resume.check_resumable(cfg, **kwargs)
    return str(error.value)


def test_same_run_may_go_on(run, monkeypatch):
    _, cfg = run
    resume.check_resumable(cfg)
    resume.check_resumable(replace(cfg, grpo=replace(cfg.grpo, max_num_steps=7)))
    resume.check_resumable(replace(cfg, policy=replace(cfg.policy, model_name="./models/one/")))
    monkeypatch.setenv("WORLD_SIZE", "4")  # shards are read by any number of ranks
    resume.check_resumable(cfg)


@pytest.mark.parametrize(
    ("section", "key", "value", "old"),
    [
        ("policy", "model_name", "models/two", '"models/one"'),
        ("grpo", "seed", 43, "42"),
        ("grpo", "num_prompts_per_step", 8, "32"),
        ("grpo", "num_generations_per_prompt", 8, "16"),
        ("policy", "tokenizer.chat_template", None, '"default"'),
        ("data", "shuffle", False, "true"),
        ("data", "use_multiple_dataloader", True, "false"),
        ("data", "num_prompts_per_dataloader", 4, "null"),
        ("data", "custom_dataloader", "m:f", "null"),
    ],
)
def test_settings_that_must_stay(run, section, key, value, old):
    folder, cfg = run
    name, _, inner = key.partition(".")
    part = config.TokenizerConfig(**{inner: value}) if inner else value
    changed = replace(cfg, **{section: replace(getattr(cfg, section), **{name: part})})
    named = f"{section}.{key}={json.dumps(value)} (was {old})"
    fix = f"./train.sh {folder}/config.yaml checkpointing.resume_from={folder}"
    for said in (named, f"checkpointing.resume_from={folder}", fix, "checkpointing.allow_changes=true"):
        assert said in refused(changed)
    resume.check_resumable(replace(changed, checkpointing=replace(changed.checkpointing, allow_changes=True)))
    if key == "model_name":
        assert named in refused(changed, to_train=False)
    else:
        resume.check_resumable(changed, to_train=False)  # a score with another seed is a score


def test_a_reference_that_no_checkpoint_has_is_refused(run):
    """Before any model is loaded. A teacher is in a folder of its own, so that it may come, change and go."""
    folder, cfg = run
    with_kl = replace(cfg, loss_fn=config.LossConfig(reference_policy_kl_penalty=0.1))
    with_teacher = replace(with_kl, policy=replace(cfg.policy, reference_model_name="models/two"))
    without_kl = replace(cfg, loss_fn=config.LossConfig(reference_policy_kl_penalty=0.0))
    cases = ((without_kl, False), (with_kl, True), (with_teacher, False))
    for (before, was_saved), (now, is_saved) in itertools.product(cases, repeat=2):
        (folder / "config.yaml").write_text(reader.to_yaml(before))
        now = replace(now, checkpointing=replace(cfg.checkpointing, allow_changes=True))
        resume.check_resumable(now, to_train=False)
        if was_saved == is_saved:
            resume.check_resumable(now)
        else:
            assert "reference_policy_kl_penalty" in refused(now)

    routers = replace(with_kl, policy=replace(cfg.policy, freeze_moe_router=False))
    (folder / "config.yaml").write_text(reader.to_yaml(routers))
    assert "freeze_moe_router" in refused(with_kl)  # the reference has no weights of routers then
    (folder / "config.yaml").write_text(reader.to_yaml(replace(routers, loss_fn=without_kl.loss_fn)))
    resume.check_resumable(without_kl)


def with_lora(cfg, lora):
    return replace(cfg, policy=replace(cfg.policy, dtensor_cfg=config.DTensorConfig(lora_cfg=lora)))


@pytest.mark.slow
def test_what_a_checkpoint_cannot_mean_is_refused_even_where_changes_are_allowed(run):
    """Another optimizer's state, and tensors of other adapters. Adapters count for a score, too."""
    folder, cfg = run
    one = config.LoRAConfig(enabled=True, match_all_linear=False, target_modules=("q_proj",))
    cfg = with_lora(cfg, one)
    (folder / "config.yaml").write_text(reader.to_yaml(cfg))
    resume.check_resumable(with_lora(cfg, replace(one, lora_A_init="uniform")))
    muon = replace(cfg, policy=replace(cfg.policy, optimizer=config.OptimizerConfig(name="torch.optim.Muon")))
    cases = [(muon, 'policy.optimizer.name="torch.optim.Muon" (was "torch.optim.AdamW")')]
    for key, value, old in (
        ("enabled", False, "true"),
        ("dim", 4, "8"),
        ("alpha", 4.0, "32.0"),
        ("match_all_linear", True, "false"),
        ("target_modules", ("q_proj", "v_proj"), '["q_proj"]'),
        ("exclude_modules", ("v_proj",), "[]"),
    ):
        named = f"policy.dtensor_cfg.lora_cfg.{key}={json.dumps(value)} (was {old})"
        cases.append((with_lora(cfg, replace(one, **{key: value})), named))
    for changed, named in cases:
        allowed = replace(changed, checkpointing=replace(cfg.checkpointing, allow_changes=True))
        assert named in refused(changed) and named in refused(allowed) and "allow_changes" not in refused(allowed)
        if changed is muon:
            resume.check_resumable(changed, to_train=False)
        else:
            assert named in refused(changed, to_train=False)


def test_a_run_of_another_version_is_refused_with_a_sentence(run, tmp_path):
    folder, cfg = run
    for step in (9, 10):
        meta = folder / "checkpoints" / f"step_{step:06d}" / "meta.json"
        meta.write_text(meta.read_text().replace('"version": 5', '"version": 4'))
    auto = config.CheckpointingConfig(resume="auto")
    logs = config.LoggerConfig(log_dir=str(tmp_path / "logs"))
    for refuse in (
        lambda: resume.check_resumable(cfg),
        lambda: resume.check_resumable(cfg, to_train=False),
        lambda: resume.check_resumable(replace(cfg, checkpointing=replace(cfg.checkpointing, resume="auto"))),
        lambda: resume.resolve(replace(cfg, logger=logs, checkpointing=auto)),  # no new run in silence
    ):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert str(error.value).startswith(f"{folder}/checkpoints/step_000010/meta.json: checkpoint format 4, ")
        assert "provenance.json" in str(error.value) and "start a new run" in str(error.value)
    shutil.copytree(folder, tmp_path / "logs" / "exp_002")
    write_checkpoint(tmp_path / "logs" / "exp_002" / "checkpoints" / "step_000011")
    found = checkpoints.numbered(tmp_path / "logs", "exp_")
    assert list(found.items()) == [(2, tmp_path / "logs" / "exp_002"), (1, folder)]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("[]", "meta.json: expected a JSON object, got list"),
        ("{}", "meta.json: not written by this program (KeyError: 'version')"),
        ("[" * 100_000, "meta.json: not valid JSON ("),
        ("edited", "meta.json: content differs from its checksum"),
        ("renamed", "meta.json: belongs to step 9"),
        ("pipe", "meta.json: cannot be read (not a regular file)"),
        ("no shard", "rank_00000.safetensors: No such file or directory"),
        ("cut shard", "rank_00000.safetensors: 4 bytes, but meta.json says 5"),
        ("no meta", "meta.json: cannot be read (No such file or directory)"),
    ],
)
def test_damaged_newest_is_refused_by_name_and_auto_goes_on_before_it(run, spoil, said):
    folder, cfg = run
    newest = folder / "checkpoints" / "step_000010"
    shard, meta = newest / "rank_00000.safetensors", newest / "meta.json"
    if spoil == "cut shard":
        shard.write_bytes(b"1234")
    elif spoil == "no shard":
        shard.unlink()
    elif spoil == "edited":
        meta.write_text(meta.read_text().replace('"world_size": 2', '"world_size": 3'))
    elif spoil == "renamed":
        shutil.rmtree(newest)
        shutil.copytree(folder / "checkpoints" / "step_000009", newest)
    elif spoil in ("no meta", "pipe"):
        meta.unlink()
        os.mkfifo(meta) if spoil == "pipe" else None
    else:
        meta.write_text(spoil)
    problem = refused(cfg)
    assert f"{newest}/{said}" in problem and "checkpointing.resume=auto" in problem and f"remove {newest}" in problem
    auto = replace(cfg, checkpointing=replace(cfg.checkpointing, resume="auto"))
    resume.check_resumable(auto)
    assert [path.name for path in checkpoints.committed(folder / "checkpoints")] == ["step_000009"]
    (folder / "checkpoints" / "step_000009" / "meta.json").unlink()
    for wanted in (cfg, auto):
        assert f"no complete checkpoint in {folder}/checkpoints ({newest}/{said}" in refused(wanted)


def test_newest_run_with_a_checkpoint_is_found(run, tmp_path, capsys):
    folder, cfg = run
    logs = config.LoggerConfig(log_dir=str(tmp_path / "logs"))

    def found(mode, *words):
        asked = [f"logger.log_dir={logs.log_dir}", f"checkpointing.resume={mode}", *words]
        return parse_command_line([f"{tmp_path}/recipe.yaml", *asked], "", False).checkpointing.resume_from

    (tmp_path / "recipe.yaml").write_text(reader.to_yaml(replace(cfg, checkpointing=config.CheckpointingConfig())))

    (tmp_path / "logs" / "exp_003").mkdir()  # killed before its first checkpoint
    assert found("auto") == found("must") == str(folder)
    said = capsys.readouterr().out
    assert folder.name in said and "exp_003" in said
    shutil.copytree(folder, tmp_path / "logs" / "exp_010")
    assert found("auto") == found("must") == str(tmp_path / "logs" / "exp_010")
    assert found("auto", f"checkpointing.resume_from={folder}") == str(folder)
    assert found("never") is found("null") is None
    assert resume.newest_step(replace(cfg, checkpointing=config.CheckpointingConfig(), logger=logs)) == 10
    assert resume.newest_step(cfg) == 10, "the run that is named"
    logs = config.LoggerConfig(log_dir=str(tmp_path / "none"))
    assert found("auto") is None
    assert resume.newest_step(replace(cfg, checkpointing=config.CheckpointingConfig(), logger=logs)) == 0
    assert "new" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(ConfigError, match=r"checkpointing\.resume=must: no run in logger\.log_dir=.*none has"):
        found("must")


def test_run_folder_that_must_not_be_written(run, monkeypatch):
    folder, cfg = run
    make = checkpoints.tempfile.TemporaryFile

    def make_elsewhere(dir):
        if dir == folder:
            raise PermissionError(13, "Permission denied")
        return make(dir=dir)

    monkeypatch.setattr(checkpoints.tempfile, "TemporaryFile", make_elsewhere)  # root may write anywhere
    assert refused(cfg) == f"checkpointing.resume_from={folder}: cannot write in {folder} (Permission denied)"
    resume.check_resumable(cfg, to_train=False)


def test_runs_that_share_a_checkpoint_dir_have_a_folder_each(run, tmp_path, monkeypatch):
    folder, cfg = run
    assert checkpoints.checkpoint_folder(config.CheckpointingConfig(), folder) == folder / "checkpoints"
    shared = config.CheckpointingConfig(checkpoint_dir=str(tmp_path / "big"), resume_from=str(folder))
    assert checkpoints.checkpoint_folder(shared, folder) == tmp_path / "big" / "exp_001"
    assert checkpoints.checkpoint_folder(shared, folder.parent / "exp_002") == tmp_path / "big" / "exp_002"
    monkeypatch.chdir(folder)
    assert checkpoints.checkpoint_folder(shared, checkpoints.Path(".")) == tmp_path / "big" / "exp_001"
    assert f"no complete checkpoint in {tmp_path}/big/exp_001" in refused(replace(cfg, checkpointing=shared))
    (tmp_path / "big").mkdir()
    (folder / "checkpoints").rename(tmp_path / "big" / "exp_001")
    resume.check_resumable(replace(cfg, checkpointing=shared))
