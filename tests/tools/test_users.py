"""Sixty files as users write them: most give a config that `--check` accepts, and no key is passed over."""

import ast
import json
import re

import pytest
import yaml
from small_run import ROOT
from tiny import make_tiny

from base.check import preflight
from base.inputs import reader
from config import ConfigError
from tools.convert import _named_as_now, convert, load_table

pytestmark = pytest.mark.slow
USERS = yaml.safe_load((ROOT / "tests" / "tools" / "users.yaml").read_text())
ACCEPTED = [user for user in USERS if "refused" not in user]


def system_of(user):
    return "verl" if user["file"].endswith(".sh") or user["file"].startswith(("verl_", "overrides")) else "trl"


def nested(flat):
    tree = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return tree


def written(user, folder):
    """The user's file."""
    text, system = user["text"], system_of(user)
    if user.get("dump"):
        version = load_table(system)["version"]
        defaults = yaml.safe_load((ROOT / "tools" / f"{system}_{version}.yaml").read_text())
        values = {**defaults, **yaml.safe_load(text)}
        text = json.dumps(values) if system == "trl" else yaml.safe_dump(nested(values))
    (folder / user["file"]).write_text(text)
    return str(folder / user["file"])


def keys_in(user):
    """The keys that the file sets, found in another way than the converter's."""
    text, name = user["text"], user["file"]
    if name.endswith(".py"):
        keys = set()
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.search(r"(GRPOConfig|MyConfig|ModelConfig)$", called):
                keys |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif called == "LoraConfig":
                keys |= {keyword.arg if "lora" in keyword.arg else f"lora_{keyword.arg}" for keyword in node.keywords}
        return keys
    if name.endswith(".sh") or name.startswith("overrides"):
        lines = "\n".join(line.partition("  #")[0] for line in text.splitlines())
        return set(re.findall(r"(?<![\w./$])\+*([a-z]\w*(?:\.[a-zA-Z_]\w*)+)=", lines))
    values = yaml.safe_load(text)
    return set(keys_of_tree(values, "", name.startswith("verl_"))) - {"hydra", "defaults"}


def keys_of_tree(tree, prefix, is_nested):
    for key, value in tree.items():
        if prefix + key == "hydra":
            continue
        if is_nested and isinstance(value, dict):
            yield from keys_of_tree(value, f"{prefix}{key}.", is_nested)
        else:
            yield prefix + key


def test_there_are_sixty():
    assert len(USERS) == 60 and len({user["file"] for user in USERS}) == 60 and len(ACCEPTED) >= 45


@pytest.mark.parametrize("user", USERS, ids=[user["file"] for user in USERS])
def test_each_key_is_accounted_for(user, tmp_path):
    system = system_of(user)
    try:
        said = convert(system, written(user, tmp_path), [], str(tmp_path / "ours.yaml"))
    except ConfigError as error:
        assert f"\n{user['refused']}=" in str(error), error
        return
    assert "refused" not in user
    missing = []
    for key in keys_in(user):
        (now,) = _named_as_now({key: 1}, load_table(system))
        parts = now.split(".")
        is_said = f"\n  {now}=" in said or f"{now}: left out" in said
        is_part = any(
            f"\n  {'.'.join(parts[:n])}=" in said for n in range(2, len(parts))
        )  # of a mapping that is a value
        if not is_said and not is_part:
            missing.append(now)
    assert missing == [], said


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


@pytest.mark.parametrize("user", ACCEPTED, ids=[user["file"] for user in ACCEPTED])
def test_the_check_accepts_the_config(user, at_hand, tmp_path, monkeypatch):
    """With a model, data and a reward in place of those that only the user has, and what `left` names."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GRPO_DEVICE"):  # of this test run: the user has other machines
        monkeypatch.delenv(name, raising=False)
    convert(system_of(user), written(user, tmp_path), [], str(tmp_path / "ours.yaml"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"defaults": "ours.yaml", **at_hand}))
    preflight.check(reader.load(tmp_path / "run.yaml", user.get("left", [])))
