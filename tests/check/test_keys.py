"""keys.py: every key of config.py has a full name, a meaning in whole sentences, and its lines in --help."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

import config
from check import keys
from config import Config


def leaves(cls: type, prefix: str = "") -> list[str]:
    """Full keys of a config class, found without config.py's own table."""
    names = []
    for f in dataclasses.fields(cls):
        kind = typing.get_args(f.type)[0] if typing.get_origin(f.type) is tuple else f.type  # a list of sections
        nested = dataclasses.is_dataclass(kind)
        names += leaves(kind, f"{prefix}{f.name}.") if nested else [prefix + f.name]
    return names


def test_help_has_every_key_with_its_default():
    lines = keys.help_text().splitlines()
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
    before, after = keys.meanings(), keys.meanings.__wrapped__()
    assert after.keys() == before.keys() and {name for name in after if after[name] != before[name]} == {
        "loss_fn.use_cispo"
    }


@pytest.mark.house
def test_a_meaning_is_the_text_below_the_field():
    """Against the lines of config.py, read without its syntax tree."""
    source = Path(config.__file__).read_text()
    assert list(keys.meanings()) == leaves(Config)
    for name, meaning in keys.meanings().items():
        section = keys.SECTIONS[name.rpartition(".")[0]].__name__
        body = source.partition(f"class {section}(Section):")[2]
        below = re.split(rf"^    {name.rpartition('.')[2]}: ", body, maxsplit=1, flags=re.MULTILINE)[1]
        assert meaning == " ".join(below.split('"""')[1].split()), name


@pytest.mark.house
@pytest.mark.parametrize(("name", "meaning"), keys.meanings().items())
def test_a_meaning_is_made_of_whole_sentences(name, meaning):
    """What a test can see of it: an end, no fragment's beginning, no turn that has to be read twice."""
    assert meaning.endswith(".") and len(meaning.split()) >= 5, meaning
    for sentence in re.split(r"(?<=[.;]) ", meaning):
        assert not re.match(r"(Of|The same of|Only|But|Which|Like|Not) ", sentence), sentence
    assert not re.search(r"\bbut for\b|\bso many\b|\b(engine|group)'s\b(?! \w)", meaning), meaning


@pytest.mark.house
def test_a_step_is_a_rollout_not_an_optimizer_step():
    """ppo_epochs and train_global_batch_size make several optimizer steps of one step."""
    meanings = keys.meanings()
    assert meanings["grpo.num_prompts_per_step"].startswith("A step is one rollout ")
    with_optimizer_steps = [name for name, meaning in meanings.items() if "optimizer step" in meaning]
    assert with_optimizer_steps == [
        "grpo.num_prompts_per_step",
        "grpo.logp_gap_limit",
        "loss_fn.force_on_policy_ratio",
        "policy.train_global_batch_size",
    ]
