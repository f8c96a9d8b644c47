"""Configs as people have them, in configs.yaml: what is written, and said of each key, and that --check accepts it."""

import json

import pytest
import yaml
from small_run import ROOT
from tiny import make_tiny

from base.check import preflight
from base.inputs import reader
from base.inputs.keys import SECTIONS
from config import ConfigError
from tools.config_files import assigned, resolved
from tools.convert import _named_as_now, convert, load_table

pytestmark = pytest.mark.slow
CONFIGS = yaml.safe_load((ROOT / "tests" / "tools" / "configs.yaml").read_text(encoding="utf-8"))
CONVERTED = [row for row in CONFIGS if "refused" not in row]


def name_of(row):
    return f"{row['system']}: {row['name']}"


def nested(flat):
    tree = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return tree


def written(row, folder):
    """The file of a row: what to_json_string() or --cfg job writes, or a yaml file of one's own."""
    table = load_table(row["system"])
    values = row["config"]
    if row.get("dump"):
        recorded = yaml.safe_load((ROOT / "tools" / f"{row['system']}_{table['version']}.yaml").read_text())
        values = recorded | values
    if row["system"] == "verl":
        values = nested(values)
    if row["system"] == "trl" and row.get("dump"):
        (folder / "theirs.json").write_text(json.dumps(values, indent=2))
        return str(folder / "theirs.json")
    (folder / "theirs.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "theirs.yaml")


def value_of(cfg, key):
    for part in key.split("."):
        cfg = cfg[int(part)] if part.isdigit() else getattr(cfg, part)
    return list(cfg) if isinstance(cfg, tuple) else cfg


def keys_of(tree, prefix=""):
    """The full keys of a config, but no section."""
    for key, value in tree.items():
        is_section = isinstance(value, dict) and f"{prefix}{key}" in SECTIONS
        yield from keys_of(value, f"{prefix}{key}.") if is_section else [f"{prefix}{key}"]


@pytest.mark.parametrize("row", CONFIGS, ids=map(name_of, CONFIGS))
def test_each_key_is_accounted_for(row, tmp_path):
    try:
        report = convert(row["system"], written(row, tmp_path), [], str(tmp_path / "ours.yaml"))
    except ConfigError as error:
        assert f"\n{row['refused']}=" in str(error), error
        assert not (tmp_path / "ours.yaml").exists()
        return
    assert "refused" not in row
    for key, value in row["config"].items():
        if row.get("dump") and load_table(row["system"])["recorded"][key] == value:
            continue
        (now,) = _named_as_now({key: 1}, load_table(row["system"]))
        assert f"\n  {now}=" in report, report
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert {key: value_of(cfg, key) for key in row.get("keys", {})} == row.get("keys", {}), report
    assert [words for words in row.get("says", []) if words not in report] == [], report
    assert bool(cfg.env.reward_model.model_name) == (cfg.data.default.env_name == "reward_model")
    tree = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert [key for key in keys_of(tree) if f"{key}=" not in report] == [], "set, and not said"


@pytest.fixture(scope="module")
def at_hand(tmp_path_factory):
    """What a user has and this machine has not: keys that name a model, data and a reward function."""
    folder = tmp_path_factory.mktemp("at_hand")
    make_tiny(folder / "model", max_position_embeddings=65536)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2000)
    rows = [{"data_path": str(folder / "rows.jsonl")}]
    default = {"env_name": "exact", "output_key": "answer", "input_key": "prompt", "processor": None}
    return {
        "policy": {"model_name": str(folder / "model")},
        "data": {"train": rows, "validation": rows, "default": default},
        "logger": {"log_dir": str(folder / "runs"), "wandb_enabled": False},  # W&B's package is not installed
    }


@pytest.mark.parametrize("row", CONVERTED, ids=map(name_of, CONVERTED))
def test_the_check_accepts_the_config(row, at_hand, tmp_path, monkeypatch):
    """With a model, data and a reward in place of those that only the user has, and what `left` names."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GRPO_DEVICE"):  # of this test run: the user has other machines
        monkeypatch.delenv(name, raising=False)
    convert(row["system"], written(row, tmp_path), [], str(tmp_path / "ours.yaml"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"defaults": "ours.yaml", **at_hand}))
    preflight.check(reader.load(tmp_path / "run.yaml", row.get("left", [])))


def test_the_number_of_processes_follows_from_two_arguments(tmp_path):
    own = {"num_generations": 8, "per_device_train_batch_size": 4, "generation_batch_size": 64, "max_steps": 50}
    own |= {"steps_per_generation": 2, "warmup_steps": 0.1}
    theirs = written({"system": "trl", "dump": True, "config": own}, tmp_path)
    convert("trl", theirs, [], str(tmp_path / "ours.yaml"))
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert cfg.cluster.gpus_per_node == 8
    assert (cfg.grpo.num_prompts_per_step, cfg.policy.scheduler.warmup_steps) == (8, 3), "two optimizer steps of one"


def test_references():
    values = {"a.b": 3, "a.c": "${a.b}", "f": "x${a.b}y${a.b}", "g": "${nobody}", "h": "${a.c}", "i": "${oc.env:HOME}"}
    found = resolved(values)
    assert found == values | {"a.c": 3, "f": "x3y3", "h": "${a.b}"}, "one step; what hydra alone knows is left"
    assert assigned(["a=[1,x]", "b={c: 1}", "d="]) == {"a": [1, "x"], "b": {"c": 1}, "d": None}


@pytest.mark.parametrize("reference", ["${oc.env:HOME}", "${.n}", "a${now:%Y}", "${nobody}", ["${my.key}"], "${"])
def test_a_reference_that_only_hydra_knows_is_refused_where_it_counts(reference, tmp_path):
    def report_of(key, words=()):
        (tmp_path / "ours.yaml").unlink(missing_ok=True)
        config = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8, key: reference}
        theirs = written({"system": "verl", "config": config}, tmp_path)
        return convert("verl", theirs, words, str(tmp_path / "ours.yaml"))

    with pytest.raises(ConfigError) as error:
        report_of("data.train_files")
    assert "data.train_files=" in str(error.value) and "--cfg job --resolve" in str(error.value)
    assert "data.train_files=a.parquet" in report_of("data.train_files", ["data.train_files=a.parquet"])
    assert "trainer.default_hdfs_dir=" in report_of("trainer.default_hdfs_dir"), "it has no effect here"
