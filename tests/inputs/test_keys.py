"""keys.py and key_help.py: every key of config.py has a full name, a meaning, and its lines in --help."""

import dataclasses
import re
import typing
from pathlib import Path

import keys_page
import pytest

import config
from base.inputs import key_help, keys
from config import Config


def leaves(cls: type, prefix: str = "") -> list[str]:
    """Full keys of a config class, found without config.py's own table."""
    names = []
    for f in dataclasses.fields(cls):
        kind = typing.get_args(f.type)[0] if typing.get_origin(f.type) is tuple else f.type  # a list of sections
        nested = dataclasses.is_dataclass(kind)
        names += leaves(kind, f"{prefix}{f.name}.") if nested else [prefix + f.name]
    return names


@pytest.mark.house
def test_the_page_of_keys_is_what_its_command_writes():
    assert keys_page.PAGE.read_text(encoding="utf-8") == keys_page.text_of_page()


def test_help_has_every_key_with_its_default():
    lines = key_help.help_text().splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [line.split(":")[0] for line in heads] == leaves(Config)
    assert "grpo.num_generations_per_prompt: int (>= 2) = 16" in heads
    assert "policy.optimizer.kwargs.betas: list[float, float] (>= 0, < 1) = [0.9, 0.999]" in heads
    assert "policy.generation.vllm_cfg.precision: bfloat16 or float32 or null = null" in heads
    assert "env.custom: mapping = {}" in heads
    for head in heads:
        assert lines[lines.index(head) + 1].startswith("    "), f"{head} has no meaning"


def test_a_fork_may_add_a_key_without_a_meaning(tmp_path, monkeypatch):
    source, fork = Path(config.__file__).read_text(), tmp_path / "config.py"
    fork.write_text(re.sub(r"(?<=    use_cispo: bool = False\n)    .*\n", "", source))
    monkeypatch.setattr(config, "__file__", str(fork))
    before, after = key_help.meanings(), key_help.meanings.__wrapped__()
    assert after.keys() == before.keys() and {name for name in after if after[name] != before[name]} == {
        "loss_fn.use_cispo"
    }


@pytest.mark.house
def test_a_meaning_is_the_text_below_the_field():
    """Against the lines of config.py, read without its syntax tree."""
    source = Path(config.__file__).read_text()
    assert list(key_help.meanings()) == leaves(Config)
    for name, meaning in key_help.meanings().items():
        section = keys.SECTIONS[name.rpartition(".")[0]].__name__
        body = source.partition(f"class {section}(Section):")[2]
        below = re.split(rf"^    {name.rpartition('.')[2]}: ", body, maxsplit=1, flags=re.MULTILINE)[1]
        assert meaning == " ".join(below.split('"""')[1].split()), name
