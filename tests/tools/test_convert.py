"""Configs of TRL and verl, from their own examples, become ours: what is written, what is said, and the loss."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import yaml
from small_run import ROOT

from base.check import rules
from base.inputs import reader
from base.inputs.keys import FIELDS, SECTIONS
from config import ConfigError, LoRAConfig
from loss import policy_loss
from tools.convert import (
    CONVERTED,
    DIFFER,
    LEFT,
    NAMES,
    NONE,
    NOT_QUITE,
    OLDER,
    SAME,
    UNKNOWN,
    UNKNOWN_IN_TRAINING,
    _named_as_now,
    _row_of,
    convert,
    load_table,
)

pytestmark = pytest.mark.slow
PEFT = {"enabled": True, "lora_A_init": "uniform"}

PEERS = ROOT / "tests" / "helpers" / "peers"
NO_DATA = "data.train.data_path is not set: name the jsonl file of training problems"
EXAMPLES = sorted(path.name for path in PEERS.iterdir() if path.name.startswith(("trl_", "verl_")))


def converted(name, folder, *overrides):
    """(our config, the sections of the report) of an example or of a file in the folder."""
    out = folder / "ours.yaml"
    out.unlink(missing_ok=True)
    system = Path(name).name.partition("_")[0]
    report = convert(system, str(PEERS / name), overrides, str(out))
    sections, heading = {}, None
    for line in report.splitlines()[1:]:
        if line in (CONVERTED, SAME, NOT_QUITE, NONE, OLDER, DIFFER, LEFT):
            sections[line] = heading = {}
        else:
            key, _, text = line.strip().partition(": " if sections and DIFFER not in sections else "=")
            heading[key] = text
    return reader.read(out).cfg, sections


@pytest.mark.parametrize("system", NAMES)
def test_the_tables_name_keys_of_ours(system):
    rows = load_table(system)["keys"]
    named = set(load_table(system)["always"])
    words = "default before kind to with updates values when unless share computed same none refused but".split()
    for key, row in rows.items():
        assert row.keys() <= {*words}, key
        assert row.keys() & {"to", "values", "computed", "same", "none", "refused"}, key
        assert all(isinstance(value, str) for value in row.get("values", {})), key
        named |= {row["to"]} if "to" in row else set()
        named |= {*row.get("computed", ())}
        named |= {ours for keys in row.get("values", {}).values() for ours in keys} | row.get("with", {}).keys()
        assert set(row.get("when", ())) <= rows.keys() and all("default" in rows[w] for w in row.get("when", ())), key
        assert {*row.get("unless", ()), row.get("share", key)} <= rows.keys(), key
    assert named <= FIELDS.keys() - SECTIONS.keys() | {"data.train", "data.validation"}, named
    assert load_table(system)["assumed"].keys() <= FIELDS.keys()


def test_every_training_argument_has_a_row_and_its_default():
    from transformers import TrainingArguments

    rows = load_table("trl")["keys"]
    theirs = {field.name: field.default for field in fields(TrainingArguments)}
    assert [key for key in theirs if not any(fnmatchcase(key, row) for row in rows)] == []
    of_trl = {"learning_rate", "gradient_checkpointing", "bf16", "remove_unused_columns"}  # has others for these
    differ = {key: rows[key]["default"] for key in rows.keys() & theirs.keys() - of_trl if "default" in rows[key]}
    assert {key: theirs[key] for key in differ} == differ and len(differ) >= 25


CASES = {
    "trl_gspo.yaml": {
        "policy.model_name": "Qwen/Qwen3-0.6B",
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 8,
        "policy.train_global_batch_size": 16,
        "policy.optimizer.kwargs.lr": 1e-05,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        "policy.scheduler.name": "linear",
    },
    "trl_agent.json": {
        "grpo.max_num_steps": 400,
        "loss_fn.token_level_loss": True,
        "loss_fn.use_importance_sampling_correction": True,
        "loss_fn.truncated_importance_sampling_type": "sequence-mask",
        "loss_fn.truncated_importance_sampling_ratio": 3.0,
        "policy.dtensor_cfg.activation_checkpointing": True,
        "policy.generation.vllm_cfg.gpu_memory_utilization": 0.3,
    },
    "trl_intellect2.yaml": {
        "grpo.num_prompts_per_step": 1,
        "grpo.num_generations_per_prompt": 16,
        "loss_fn.ratio_clip_c": 4.0,
        "loss_fn.ratio_clip_max": 0.2,
        "loss_fn.reference_policy_kl_penalty": 0.001,
        "loss_fn.kl_gradient": "plain",
        "loss_fn.kl_output_clamp_value": None,
    },
    "verl_math.yaml": {
        "policy.model_name": "Qwen/Qwen2-7B-Instruct",
        "grpo.num_prompts_per_step": 1024,
        "grpo.num_generations_per_prompt": 5,
        "policy.train_global_batch_size": 1280,
        "policy.max_total_sequence_length": 2048,
        "data.max_input_seq_length": 1024,
        "data.default.output_key": "reward_model.ground_truth",
    },
    "verl_cispo.yaml": {
        "loss_fn.use_cispo": True,
        "loss_fn.ratio_clip_min": 1.0,
        "loss_fn.ratio_clip_max": 0.2,
        "loss_fn.ratio_clip_c": None,
        "policy.train_global_batch_size": 640,
    },
    "verl_gspo.yaml": {
        "loss_fn.sequence_level_importance_ratios": True,
        "loss_fn.token_level_loss": False,
        "loss_fn.ratio_clip_c": None,
        "loss_fn.ratio_clip_max": 0.0004,
        "policy.sequence_packing.train_mb_tokens": 20480,
        "policy.optimizer.kwargs.weight_decay": 0.1,
        "grpo.val_temperature": 1.0,
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_theirs(name, tmp_path):
    cfg, report = converted(name, tmp_path)
    for key, expected in CASES[name].items():
        value = cfg
        for part in key.split("."):
            value = getattr(value, part)
        assert value == expected, key
    if name == "verl_math.yaml":
        assert [(d.name, d.data_path) for d in cfg.data.train] == [
            ("gsm8k", "/data/gsm8k/train.parquet"),
            ("math", "/data/math/train.parquet"),
        ]
        assert (
            report[CONVERTED]["actor_rollout_ref.actor.ppo_mini_batch_size=256"]
            == "policy.train_global_batch_size=1280"
        )
        assert LEFT not in report
        rules.check_config(cfg, 2)
    if name == "trl_gspo.yaml":
        lora = cfg.policy.dtensor_cfg.lora_cfg
        assert lora == LoRAConfig(**PEFT, dim=16, match_all_linear=False, target_modules=("q_proj", "v_proj")), (
            "PEFT's, and TRL's defaults"
        )
        assert report[SAME]["dtype=bfloat16"] == "policy.precision sets it"
        assert report[DIFFER]["policy.optimizer.kwargs.weight_decay"] == "0.0 (ours 0.01)"
        assert [line.partition("=")[0] for line in report[LEFT]] == ["data.default.env_name", NO_DATA]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_loss_is_theirs(name, tmp_path):
    """On one batch, in value and gradient: what their functions gave."""
    cfg, _ = converted(name, tmp_path)
    recorded = json.loads((PEERS / "losses.json").read_text())
    expected = recorded[name]
    mask = torch.tensor(recorded["mask"]) != 0
    t = {key: torch.tensor(rows, dtype=torch.float64) for key, rows in recorded["batch"].items()}
    logp = t["logp"].requires_grad_()
    seq = torch.arange(3)[:, None].expand_as(mask)
    loss, _ = policy_loss(
        logp[mask],
        old_logp_R=t["old"][mask],
        sampler_logp_R=t["sampler"][mask],
        ref_logp_R=t["ref"][mask] if cfg.loss_fn.reference_policy_kl_penalty else None,
        adv_R=t["adv"][:, None].expand_as(mask)[mask],
        mask_R=mask[mask],
        seq_R=seq[mask],
        num_valid_tokens=int(mask.sum()),
        num_valid_seqs=3,
        cfg=cfg.loss_fn,
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-7)
    assert torch.allclose(logp.grad, torch.tensor(expected["gradient"], dtype=torch.float64), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("system", "text", "problem"),
    [
        ("trl", "learning_rat: 1e-6", "TRL has no key 'learning_rat'. Did you mean 'learning_rate'?"),
        ("trl", "{num_generations: 16}", "8 samples of a rollout do not divide into whole groups of num_gen"),
        ("trl", "vllm_gpu_memory_utilisation: 0.5", "Did you mean 'vllm_gpu_memory_utilization'?"),
        ("trl", "eval_step: 5", "Did you mean 'eval_steps'?"),
        ("trl", "max_steps: many", "max_steps=many: expected a number, or -1"),
        ("trl", "eval_steps: [1]", "eval_steps=[1]: expected a number, or null"),
        ("trl", "max_prompt_length: long", "max_prompt_length=long: expected a number, or null"),
        (
            "verl",
            "{actor_rollout_ref: {}, algorithm: {adv_estimatr: grpo}}",
            "has no key 'algorithm.adv_estimatr'. Did you mean 'algorithm.adv",
        ),
        ("verl", "actor_rollout_ref: {rollout: {temprature: 1}}", "mean 'actor_rollout_ref.rollout.temperature'?"),
        ("verl", "actor_rollout_ref: {actor: {lr: 1}}", "mean 'actor_rollout_ref.actor.optim.lr'?"),  # a wrong place
        ("verl", "{actor_rollout_ref: {}, data: {max_respons_length: 9}}", "Did you mean 'data.max_response_length'?"),
        (
            "verl",
            "{actor_rollout_ref: {}, trainer: {balanced_batch: true}}",
            "mean 'trainer.balance_batch'?",
        ),  # ours has no effect either
    ],
)
def test_what_is_refused(system, text, problem, tmp_path):
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        convert(system, str(tmp_path / "theirs.yaml"), [], str(tmp_path / "out.yaml"))
    assert problem in str(error.value)
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(
    ("system", "name", "text"),
    [
        ("trl", "train.py", "from trl import GRPOConfig"),
        ("trl", "train.sh", "accelerate launch train.py --learning_rate 1e-6"),
        ("trl", "notebook.ipynb", '{"cells": []}'),
        ("trl", "grpo", "learning_rate: 1.0e-6"),
        ("trl", "list.json", "[1]"),
        ("trl", "text.yaml", "learning_rate"),
        ("trl", "sections.yaml", "seed: 1\ntraining: {learning_rate: 1.0e-5}"),
        ("verl", "run.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"),
        ("verl", "run.py", "import verl"),
        ("verl", "overrides.yaml", "[algorithm.adv_estimator=grpo]"),
        ("verl", "defaults.yaml", "defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}"),
        ("verl", "hydra.yaml", "hydra: {run: {dir: x}}"),
        ("verl", "other.yaml", "learning_rate: 1"),
        ("verl", "evaluation.yaml", "{data: {path: a.parquet}, custom_reward_function: {path: null}}"),
    ],
)
def test_what_is_no_config_is_refused_with_the_command_that_writes_one(system, name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        convert(system, str(tmp_path / name), [], str(tmp_path / "out.yaml"))
    command = {"trl": "args.to_json_string()", "verl": "--cfg job --resolve"}[system]
    assert command in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out.yaml").exists()


SFT_OF_VERL = "{model: {path: m}, optim: {lr: 1e-5}, data: {train_files: a.parquet}, trainer: {total_epochs: 1}}"
SAMPLES_AHEAD = "{actor_rollout_ref: {rollout: {n: 8}}, algorithm: {adv_estimator: grpo}, rollout: {nnodes: 1}}"


@pytest.mark.parametrize(
    ("system", "text", "program"),
    [
        ("verl", SFT_OF_VERL, "SFT"),
        ("verl", "{model: {path: m}, rollout: {temperature: 1.0}, data: {path: a.parquet}}", "generation"),
        ("verl", SAMPLES_AHEAD, "one_step_off_policy"),
        ("verl", SAMPLES_AHEAD.replace("{actor", "{async_training: {staleness_threshold: 0.1}, actor"), "fully_async"),
        ("trl", "{learning_rate: 1e-6, packing: false, max_length: 1024, loss_type: nll}", "SFTConfig"),
        ("trl", "{beta: 0.1, precompute_ref_log_probs: false, loss_type: [sigmoid]}", "DPOConfig"),
        ("trl", "{beta: 0.1, precompute_ref_log_probs: false, desirable_weight: 1.0}", "KTOConfig"),
        ("trl", "{num_generations: 2, beta: 0.05, epsilon: 0.2, normalize_advantages: false}", "RLOOConfig"),
        ("trl", "{kl_coef: 0.05, cliprange: 0.2, vf_coef: 0.1, missing_eos_penalty: null}", "PPOConfig"),
        ("trl", "{max_length: 1024, center_rewards_coefficient: null}", "RewardConfig"),
        ("trl", "{packing: false, lmbda: 0.5}", "GKDConfig"),
        ("trl", "{num_generations: 8, max_inflight_tasks: 8}", "AsyncGRPOConfig"),
    ],
)
def test_the_config_of_another_trainer_is_refused_by_its_name(system, text, program, tmp_path):
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ConfigError, match=program):
        convert(system, str(tmp_path / "theirs.yaml"), [], str(tmp_path / "ours.yaml"))
    assert not (tmp_path / "ours.yaml").exists()


@pytest.mark.parametrize("system", NAMES)
def test_no_key_of_another_trainer_is_one_of_theirs(system):
    table = load_table(system)
    known = {key.partition(".")[0] for key in (*table["keys"], *table["recorded"])}
    assert table["others"].keys() & known == set()
    assert not any(fnmatchcase(key, row) for key in table["others"] for row in known)


def test_a_default_that_is_not_here_is_refused(tmp_path):
    """verl's main_ppo, and the generation of a config that is the same, have gae where nobody sets it."""
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {rollout: {n: 8}}")
    given = "verl", str(tmp_path / "verl.yaml")
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator=gae"):
        convert(*given, [], str(tmp_path / "ours.yaml"))
    convert(*given, ["algorithm.adv_estimator=grpo"], str(tmp_path / "ours.yaml"))


@pytest.mark.parametrize("key", ["algorithm.reward_gt_coef", "actor_rollout_ref.actor.sppo_eta"])
def test_an_unknown_key_of_what_trains_is_refused(key, tmp_path):
    (tmp_path / "verl.yaml").write_text("{algorithm: {adv_estimator: grpo}, actor_rollout_ref: {rollout: {n: 8}}}")
    given = "verl", str(tmp_path / "verl.yaml")
    with pytest.raises(ConfigError, match=f"{key}=5: .*add {key}=null"):
        convert(*given, [f"{key}=5"], str(tmp_path / "ours.yaml"))
    report = convert(*given, [f"{key}=false", "my_section.key=5"], str(tmp_path / "ours.yaml"))
    assert "my_section.key=5: unknown" in report.partition(NONE)[2]


ACTOR = "actor_rollout_ref.actor"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"


@pytest.mark.parametrize(
    ("key", "value", "off"),
    [
        ("algorithm.adv_estimator", "gae", "grpo"),
        ("algorithm.use_kl_in_reward", "true", "false"),
        ("algorithm.gamma", "0.99", "1.0"),
        ("algorithm.rollout_correction.rollout_rs", "a", "null"),
        (f"{ACTOR}.policy_loss.loss_mode", "clip_cov", "vanilla"),
        (MULTI_TURN, "true", "false"),
        ("actor_rollout_ref.model.lora.rank", "8", "0"),
        ("data.custom_cls.path", "a.py", "null"),
        ("data.sampler.class_path", "a.py", "null"),
        ("reward.reward_manager.module.path", "m.py", "null"),
        ("reward.custom_reward_function.reward_kwargs.k", "2", "null"),
    ],
)
def test_what_decides_the_training_is_not_lost(key, value, off, tmp_path):
    """The command fails, until it is said that the conversion goes without."""
    (tmp_path / "verl.yaml").write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 8}}")
    given = "verl", str(tmp_path / "verl.yaml")
    with pytest.raises(ConfigError) as error:
        convert(*given, [f"{key}={value}"], str(tmp_path / "ours.yaml"))
    assert f"{key}={value}:" in str(error.value) and f"add {key}={off}" in str(error.value)
    assert not (tmp_path / "ours.yaml").exists()
    convert(*given, [f"{key}={off}"], str(tmp_path / "ours.yaml"))


def test_what_is_lost_stands_in_the_file(tmp_path):
    (tmp_path / "trl.yaml").write_text("min_p: 0.1\nmy_key: 3")
    convert("trl", str(tmp_path / "trl.yaml"), [], str(tmp_path / "ours.yaml"))
    comments = [line for line in (tmp_path / "ours.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("min_p=0.1" in line for line in comments) and any("my_key=3" in line for line in comments)


@pytest.mark.parametrize("system", NAMES)
def test_each_key_of_theirs_has_a_row(system):
    """Those of the recorded version, with the defaults of the rows, and those of older versions."""
    table = load_table(system)
    rows, recorded = table["keys"], table["recorded"]
    without = [key for key in recorded if _row_of(key, table) in (UNKNOWN, UNKNOWN_IN_TRAINING)]
    assert without == []
    named_here = {"actor_rollout_ref.rollout.name", "data.train_files", "data.val_files"}  # users have to name these
    defaults = {
        key: rows[key]["default"] for key in rows.keys() & recorded.keys() - named_here if "default" in rows[key]
    }
    assert {key: recorded[key] for key in defaults} == defaults and len(defaults) >= 80
    for section, names in table["older"].items():
        for name in names.split() if "*" not in section else ():
            key = f"{section}.{name}".lstrip(".")
            assert _row_of(key, table) not in (UNKNOWN, UNKNOWN_IN_TRAINING) and key not in recorded, key


WHEELS = {"trl": "trl-1.16.0-py3-none-any.whl", "verl": "verl-0.9.1-py3-none-any.whl"}


@pytest.mark.skipif(
    "PEER_WHEELS" not in os.environ, reason="PEER_WHEELS names no folder with the wheels of TRL and verl"
)
@pytest.mark.parametrize("system", NAMES)
def test_the_recorded_defaults_are_those_of_the_wheel(system):
    wheel = Path(os.environ["PEER_WHEELS"]) / WHEELS[system]
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "their_defaults.py"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    table = load_table(system)
    assert _named_as_now(yaml.safe_load(done.stdout), table) == table["recorded"]
    assert WHEELS[system].split("-")[1] == table["version"]


def test_a_whole_config_is_not_listed_with_its_defaults(tmp_path):
    """Nor is a key of a newer version taken for a mistake in writing, or one that hydra puts in for a new one."""
    recorded = yaml.safe_load((ROOT / "tools" / "trl_1.16.0.yaml").read_text())
    del recorded["dataset_train_split"]  # of TRL's command line, which no dump of the arguments has
    (tmp_path / "trl.json").write_text(json.dumps(recorded | {"beta": 0.1, "learning_rat": 1}))
    report = convert("trl", str(tmp_path / "trl.json"), [], str(tmp_path / "ours.yaml"))
    (tmp_path / "trl.yaml").write_text("beta: 0.1")
    convert("trl", str(tmp_path / "trl.yaml"), [], str(tmp_path / "short.yaml"))
    assert reader.read(tmp_path / "ours.yaml").cfg == reader.read(tmp_path / "short.yaml").cfg
    assert re.findall(r"^  (\w+)=", report.partition(DIFFER)[0], re.M) == ["beta", "learning_rat"]
    (tmp_path / "verl.yaml").write_text("{algorithm: {adv_estimator: grpo}, actor_rollout_ref: {rollout: {n: 8}}}")
    words = ["actor_rollout_ref.rollout.qat.enable=false"]
    report = convert("verl", str(tmp_path / "verl.yaml"), words, str(tmp_path / "verl_ours.yaml"))
    assert words[0] in report.partition(SAME)[2].partition(DIFFER)[0]


def test_a_key_that_is_like_no_other_is_not_said_to_have_no_effect(tmp_path):
    (tmp_path / "verl.yaml").write_text("{algorithm: {adv_estimator: grpo}, actor_rollout_ref: {rollout: {n: 8}}}")
    words = ["data.zzz=1", "actor_rollout_ref.rollout.engine_kwargs.vllm.temprature=2"]
    report = convert("verl", str(tmp_path / "verl.yaml"), words, str(tmp_path / "ours.yaml"))
    same, none = (report.index(heading) for heading in (SAME, NONE))
    assert same < report.index("engine_kwargs") < none < report.index("data.zzz=1")


def test_a_quoted_default_is_the_default(tmp_path):
    written = []
    for quote in ("", "'"):
        text = "\n".join(
            f"{key}: {quote}{json.dumps(row['default'])}{quote}"
            for key, row in load_table("trl")["keys"].items()
            if type(row.get("default")) in (int, float) or row.keys() >= {"default", "computed"}
        )
        (tmp_path / "theirs.yaml").write_text(text)
        (tmp_path / "ours.yaml").unlink(missing_ok=True)
        convert("trl", str(tmp_path / "theirs.yaml"), [], str(tmp_path / "ours.yaml"))
        written.append(reader.read(tmp_path / "ours.yaml").cfg)
    assert written[0] == written[1]


def test_the_command(tmp_path):
    """Without torch: in a second. Its exit codes are those of --check."""
    command = [sys.executable, "-m", "tools.convert", "trl", str(PEERS / "trl_gspo.yaml"), "--write"]
    command += [str(tmp_path / "ours.yaml"), "weight_decay=0.1"]  # their keys may come last
    for code, text in ((0, "use_peft=true: policy.dtensor_cfg.lora_cfg.enabled=true"), (2, "it already exists")):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and text in (done.stdout if code == 0 else done.stderr), done


def test_the_commands_of_the_page(tmp_path):
    """docs/coming_from.md, but for verl's own command, which needs verl: its config is here an example's."""
    page = (ROOT / "docs" / "coming_from.md").read_text().replace(" \\\n        ", " ")
    (dump,) = re.findall(r"`(open\([^`]*)`", page)
    commands = re.findall(r"\.venv/bin/python (-m tools\.convert [^`\n]*)", page)
    assert len(commands) == 3
    script = "from transformers import TrainingArguments\nargs = TrainingArguments('out', learning_rate=3e-6)\n"
    subprocess.run([sys.executable, "-c", script + dump], cwd=tmp_path, check=True)
    (tmp_path / "verl.yaml").write_text((PEERS / "verl_math.yaml").read_text())
    for command in commands:
        (tmp_path / "mine.yaml").unlink(missing_ok=True)
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, *command.split()], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert reader.read(tmp_path / "lora.yaml").cfg.policy.optimizer.kwargs.lr == 3e-6
    assert reader.read(tmp_path / "lora.yaml").cfg.policy.dtensor_cfg.lora_cfg.dim == 16


def test_values_of_several_keys(tmp_path):
    """An override wins over the file; what has no counterpart is said, and what has is what it is there."""
    (tmp_path / "trl.yaml").write_text("{}")
    name = str(tmp_path / "trl.yaml")

    def ours(*overrides):
        (tmp_path / "ours.yaml").unlink(missing_ok=True)
        report = convert("trl", name, overrides, str(tmp_path / "ours.yaml"))
        return reader.read(tmp_path / "ours.yaml").cfg, report

    cfg, _ = ours("loss_type=dr_grpo", "max_completion_length=300", "scale_rewards=false")
    assert (cfg.loss_fn.token_level_loss, cfg.loss_fn.loss_scale_factor) == (False, 300)
    assert not cfg.grpo.normalize_rewards and cfg.grpo.reward_std == "baseline"
    cfg, _ = ours("loss_type=cispo", "epsilon_high=5.0")
    assert cfg.loss_fn.use_cispo and (cfg.loss_fn.ratio_clip_min, cfg.loss_fn.ratio_clip_max) == (1.0, 4.0)
    cfg, _ = ours(
        "sync_ref_model=true",
        "beta=0.1",
        "num_iterations=2",
        "max_steps=100",
        "warmup_steps=10",
        "use_bias_correction_kl=false",
    )
    assert (cfg.grpo.ref_policy_update_period, cfg.grpo.ref_policy_update_alpha) == (256, 0.6)
    assert (cfg.policy.ppo_epochs, cfg.grpo.max_num_steps, cfg.policy.scheduler.warmup_steps) == (2, 50, 5)
    cfg, _ = ours("multi_objective_aggregation=normalize_then_sum", "scale_rewards=none")
    grpo = cfg.grpo
    assert (grpo.adv_estimator.name, grpo.reward_std, grpo.normalize_rewards) == ("gdpo", "group", True)
    cfg, report = ours("min_p=0.1", 'reward_funcs=["accuracy_reward"]', "epsilon=10.0")
    assert f"{NONE}\n  min_p=0.1: the sampler here" in report and cfg.data.default.env_name == "math"
    assert cfg.loss_fn.ratio_clip_min == 1.0
    cfg, _ = ours("use_vllm=true", "vllm_importance_sampling_cap=2.0")
    assert cfg.loss_fn.truncated_importance_sampling_ratio == 2
    refused = ["loss_type=vespo", "reward_weights=[1.0,2.0]", "multi_objective_aggregation=other"]
    for word in [*refused, "scale_rewards=mean", "top_entropy_quantile=0.2", "importance_sampling_level=word"]:
        with pytest.raises(ConfigError) as error:
            ours(word)
        key = word.partition("=")[0]
        assert f"{key}=" in str(error.value) and f"add {key}=" in str(error.value), error.value
    for words, lora in (
        ((), LoRAConfig()),
        (("lora_r=4", "lora_target_modules=[q_proj]"), LoRAConfig()),
        (("use_peft=true",), LoRAConfig(**PEFT, dim=16, match_all_linear=False, target_modules=("q_proj", "v_proj"))),
        (("use_peft=true", "lora_r=4", "lora_target_modules=all-linear"), LoRAConfig(**PEFT, dim=4)),
    ):
        cfg, report = ours(*words)
        assert cfg.policy.dtensor_cfg.lora_cfg == lora, words
        assert ("lora_dropout, 0.05 in TRL's ModelConfig, is not there" in report) == lora.enabled
        assert "lora_cfg.alpha=32" not in report, "which is ours"
