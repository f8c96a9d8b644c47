"""Files as people have them: Python with a GRPOConfig or a dataclass; verl's yaml, hydra's overrides, scripts."""

import json
from dataclasses import MISSING, fields

import pytest
import yaml
from small_run import ROOT

from base.inputs import reader
from base.inputs.keys import SECTIONS
from config import ConfigError
from tools.convert import COMPUTED, convert
from tools.theirs import Unread, assigned, resolved

CALL = "from trl import GRPOConfig, GRPOTrainer\n"


USERS = yaml.safe_load((ROOT / "tests/tools/theirs.yaml").read_text(encoding="utf-8"))
SYSTEM_OF = {"py": "trl", "json": "trl", "yaml": "verl", "overrides.yaml": "verl", "sh": "verl"}


def value_of(cfg, key):
    for part in key.split("."):
        cfg = cfg[int(part)] if part.isdigit() else getattr(cfg, part)
    return list(cfg) if isinstance(cfg, tuple) else cfg


def keys_of(tree, prefix):
    """The full keys of a config, but no section."""
    for key, value in tree.items():
        is_section = isinstance(value, dict) and f"{prefix}{key}" in SECTIONS
        yield from keys_of(value, f"{prefix}{key}.") if is_section else [f"{prefix}{key}"]


@pytest.mark.parametrize("row", USERS, ids=[f"{row['file']}: {row['case']}" for row in USERS])
def test_what_is_read(row, tmp_path, monkeypatch):
    monkeypatch.setenv("HERE", "/here")
    monkeypatch.delenv("F", raising=False)
    theirs = tmp_path / f"theirs.{row['file']}"
    theirs.write_text(row["text"])
    report = convert(SYSTEM_OF[row["file"]], str(theirs), [], str(tmp_path / "ours.yaml"))
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert {key: value_of(cfg, key) for key in row["keys"]} == row["keys"], report
    assert [words for words in row.get("says", []) if words not in report] == [], report
    assert [words for words in row.get("silent", []) if words in report] == [], report
    assert bool(cfg.env.reward_model.model_name) == (cfg.data.default.env_name == "reward_model")
    tree = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert [key for key in keys_of(tree, "") if f"{key}=" not in report] == [], "set, and not said"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "x = 1", ["no GRPOConfig", "to_json_string"]),
        ("a.py", "def f(:", ["line 1", "not Python"]),
        ("a.py", CALL + "GRPOConfig(beta=1)\nGRPOConfig(beta=2)", ["lines 2, 3", "to_json_string"]),
        ("a.py", CALL + "GRPOConfig(learning_rat=1)", ["learning_rat", "Did you mean 'learning_rate'"]),
        ("a.py", CALL + "GRPOConfig(num_generations=16)", ["num_generations=16", "num_processes=8"]),
        ("a.ipynb", '{"cells": []}', ["Python file", "to_json_string"]),
        ("a.json", "[1]", ["to_json_string"]),
        ("a.yaml", "seed: 1\ntraining: {learning_rate: 1.0e-5}", ["not in sections", "to_json_string"]),
        ("verl.py", "import verl", ["hydra's", "config.yaml"]),
        ("verl.yaml", "hydra: {run: {dir: x}}", ["no key of verl's", ".hydra/config.yaml"]),
        ("verl.yaml", "learning_rate: 1", ["no key of verl's", "overrides.yaml"]),
        ("verl.yaml", "- data", ["expected key=value"]),
        (
            "verl.sh",
            "A='$A$A$A'\n" * 2
            + "B=$A$A$A$A$A$A$A$A\n" * 3
            + "".join(f"A{i + 1}=$A{i}$A{i}\n" for i in range(40))
            + "A0=long;"
            + "".join(f"A{i + 1}=$A{i}$A{i}\n" for i in range(40)),
            ["more than 1,000,000 characters"],
        ),
    ],
)
def test_what_is_refused_says_the_way_out(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        convert("verl" if name.startswith("verl") else "trl", str(tmp_path / name), [], str(tmp_path / "out.yaml"))
    assert all(word in str(error.value) for word in words), error.value


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / "a.py").write_text(f"{CALL}open({str(mark)!r}, 'w')\nGRPOConfig(seed=open({str(mark)!r}, 'w'), beta=1)")
    convert("trl", str(tmp_path / "a.py"), [], str(tmp_path / "out.yaml"))
    assert not mark.exists()


@pytest.mark.slow
def test_a_dump_of_the_arguments_is_read(tmp_path):
    """The way out that the refusals name: a file with every key. The number of processes follows from two of them."""
    from transformers import TrainingArguments

    own = {"num_generations": 8, "per_device_train_batch_size": 4, "generation_batch_size": 64, "max_steps": 50}
    own |= {"steps_per_generation": 2, "warmup_steps": 0.1, "accelerator_config": {"even_batches": True}}
    values = {field.name: field.default for field in fields(TrainingArguments) if field.default is not MISSING} | own
    (tmp_path / "grpo.json").write_text(json.dumps(values))
    convert("trl", str(tmp_path / "grpo.json"), [], str(tmp_path / "ours.yaml"))
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert (cfg.grpo.num_prompts_per_step, cfg.policy.scheduler.warmup_steps) == (8, 3), "two optimizer steps of one"


def test_an_override_settles_what_must_be_computed(tmp_path):
    (tmp_path / "a.py").write_text(CALL + "GRPOConfig(learning_rate=args.lr)")
    report = convert("trl", str(tmp_path / "a.py"), ["learning_rate=3e-6"], str(tmp_path / "ours.yaml"))
    assert COMPUTED not in report and reader.read(tmp_path / "ours.yaml").cfg.policy.optimizer.kwargs.lr == 3e-6


def test_interpolations_one_by_one():
    values = {"a.b": 3, "a.c": "${.b}", "a.d.e": "${..b}", "f": "${a.c}${a.b}", "g": ["${a.b}", 1], "h": "${nobody}"}
    found = resolved(values | {"i": "${j}"}, {"j": 9, "k": 1})
    assert found == {"a.b": 3, "a.c": 3, "a.d.e": 3, "f": 33, "g": [3, 1], "h": "${nobody}", "i": 9}
    assert isinstance(found["h"], Unread)
    assert assigned(["a=[1,x]", "+b={c:1}", "d="]) == {"a": [1, "x"], "b": {"c": 1}, "d": None}


def trainer(reward, more=""):
    return f"GRPOTrainer('Qwen/Qwen3-0.6B', {reward}, GRPOConfig(beta=0.1){more})"


ACTOR = "actor_rollout_ref.actor"
OF_THE_LOSS = [("policy_loss.loss_mode", "clip_cov", "vanilla"), ("policy_loss.loss_mode", "kl_cov", "vanilla")]


@pytest.mark.parametrize(
    ("suffix", "text", "key", "off"),
    [
        ("py", CALL + trainer("f", ", tools=[g]"), "tools", "null"),
        ("py", CALL + trainer("f", ", rollout_func=g"), "rollout_func", "null"),
        ("py", CALL + "class S:\n  seed: int = 1\na, s = parse(S)\nGRPOTrainer('m', f, a)", "args", "null"),
        ("py", CALL + "b = GRPOConfig(beta=0.1)\nGRPOTrainer('m', f, replace(b, beta=0.2))", "args", "null"),
        ("py", CALL + trainer("f", ", environment_factory=E"), "environment_factory", "null"),
        ("py", CALL + trainer("f", ", optimizers=(o, s)"), "optimizers", "null"),
        ("py", f"{CALL}class Mine(GRPOTrainer): pass\nMine(args=GRPOConfig(beta=0.1))", "trainer", "GRPOTrainer"),
        ("py", "from trl import GRPOConfig\nfrom mine import GRPOTrainer\n" + trainer("f"), "trainer", "GRPOTrainer"),
        ("sh", "data.custom_cls.path=a.py", "data.custom_cls.path", "null"),
        ("sh", "data.custom_cls.path=$HERE/a.py", "data.custom_cls.path", "null"),
        ("sh", "data.sampler.class_path=a.py", "data.sampler.class_path", "null"),
        (
            "sh",
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "actor_rollout_ref.rollout.multi_turn.enable",
            "false",
        ),
        ("sh", "reward.reward_manager.module.path=m.py", "reward_manager.module.path", "null"),
        ("sh", "custom_reward_function.reward_kwargs.k=2", "custom_reward_function.reward_kwargs.k", "null"),
        ("sh", "algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward", "false"),
        ("sh", "algorithm.gamma=0.99", "algorithm.gamma", "1.0"),
        ("sh", "algorithm.adv_estimator=gae", "algorithm.adv_estimator", "grpo"),
        *(("sh", f"{ACTOR}.{key}={value}", f"{ACTOR}.{key}", off) for key, value, off in OF_THE_LOSS),
        ("sh", "algorithm.rollout_correction.rollout_rs=a", "algorithm.rollout_correction.rollout_rs", "null"),
        ("sh", "actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.rank", "0"),
    ],
)
def test_what_decides_the_training_is_not_lost(suffix, text, key, off, tmp_path):
    """The command fails, until it is said that the conversion goes without."""
    (tmp_path / f"theirs.{suffix}").write_text(text)
    given = "trl" if suffix == "py" else "verl", str(tmp_path / f"theirs.{suffix}")
    with pytest.raises(ConfigError) as error:
        convert(*given, [], str(tmp_path / "ours.yaml"))
    assert f"{key}=" in str(error.value) and f"{key}={off}" in str(error.value)
    assert not (tmp_path / "ours.yaml").exists()
    convert(*given, [f"{key}={off}"], str(tmp_path / "ours.yaml"))


def test_what_is_lost_stands_in_the_file(tmp_path):
    (tmp_path / "a.py").write_text(f"{CALL}d = load('x').map(g)\n{trainer('f', ', train_dataset=d')}; GRPOConfig")
    convert("trl", str(tmp_path / "a.py"), ["min_p=0.1", "seed=${X}"], str(tmp_path / "ours.yaml"))
    comments = [line for line in (tmp_path / "ours.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("min_p=0.1" in line for line in comments) and any("seed=" in line for line in comments)
    assert reader.read(tmp_path / "ours.yaml").cfg.data.default.processor == "your_module:your_function"
