"""reader.py: yaml files and overrides become a Config. What is refused: test_wrong_inputs.py."""

import dataclasses
import os
import time
from pathlib import Path

import pytest

import config
from base.check.rules import load_checked
from base.inputs.reader import load, to_yaml
from config import Config, ConfigError, LossConfig

ROOT = Path(__file__).resolve().parents[2]

# --- values are read by the type of their field ---------------------------------------------------


@pytest.mark.parametrize("place", ["file", "command line"])
@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("policy.optimizer.kwargs.lr", "1e-6", 1e-6),
        ("policy.max_grad_norm", "2", 2.0),
        ("logger.log_dir", "no", "no"),
        ("logger.log_dir", "010", "010"),
        ("logger.log_dir", "2024-01-01", "2024-01-01"),
        ("data.default.data_path", "null", None),
        ("data.default.data_path", "off", "off"),
        ("grpo.seed", "010", 10),
        ("grpo.normalize_rewards", "false", False),
        ("loss_fn.ratio_clip_c", "3", 3.0),
        ("loss_fn.ratio_clip_c", "null", None),
        ("policy.precision", "float32", "float32"),
        ("policy.generation.vllm_cfg.precision", "null", None),
        ("policy.optimizer.kwargs.betas", "[0, 1e-1]", (0.0, 0.1)),
        ("policy.generation.stop_token_ids", "[7, 8, 9]", (7, 8, 9)),
        ("policy.generation.stop_token_ids", "null", None),
        ("policy.dtensor_cfg.activation_checkpointing", "True", True),
        ("policy.dtensor_cfg.activation_checkpointing", "1", 1),
    ],
)
def test_value_takes_the_type_of_its_field(write, place, key, text, expected):
    if place == "file":
        sections = key.split(".")
        lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(sections)]
        value = load(write("\n".join(lines) + f" {text}\n"))
    else:
        value = load(write("grpo: {seed: 1}"), [f"{key}={text}"])
    for name in key.split("."):
        value = getattr(value, name)
    assert value == expected and type(value) is type(expected)


def test_quotes_make_null_text_in_a_file(write):
    assert load(write("data: {train: {data_path: 'null'}}")).data.train[0].data_path == "null"


@pytest.mark.parametrize("text", ["a: b", "[x]", "{x}", "x #y", "a=b", "&x", "'x'"])
def test_text_override_is_taken_as_typed(write, text):
    assert load(write("grpo: {seed: 1}"), [f"logger.log_dir={text}"]).logger.log_dir == text


# --- sets of validation: one mapping, or a list ---------------------------------------------------

TWO = "data: {validation: [{data_path: a/x.jsonl, env_name: e}, {data_path: b.jsonl, name: hard}]}"
ONLY_Z = "defaults: parent.yaml\ndata: {validation: [{data_path: z}]}"


def paths(cfg):
    return [dataset.data_path for dataset in cfg.data.validation]


def test_validation_is_one_mapping_or_a_list(write):
    assert paths(load(write("data: {validation: {data_path: a.jsonl}}"))) == ["a.jsonl"]
    cfg = load(write(TWO))
    assert paths(cfg) == ["a/x.jsonl", "b.jsonl"] and [d.set_name for d in cfg.data.validation] == ["x", "hard"]
    assert cfg.data.validation[0].env_name == "e" and cfg.data.validation[1].env_name is None
    assert load(write(to_yaml(cfg))) == cfg


def test_overrides_of_a_list(write):
    write(TWO, "parent.yaml")
    assert paths(load("parent.yaml", ["data.validation.1.data_path=c"])) == ["a/x.jsonl", "c"]
    assert paths(load("parent.yaml", ["data.validation.data_path=c"])) == ["c", "b.jsonl"]
    cfg = load(write(ONLY_Z))  # a list is one value
    assert paths(cfg) == ["z"] and cfg.data.validation[0].env_name is None
    assert paths(load(write(ONLY_Z.replace("[{", "{").replace("}]", "}")))) == ["z", "b.jsonl"]


# --- files ----------------------------------------------------------------------------------------


def test_defaults_are_below_the_file_in_order(write):
    write("grpo: {seed: 1, val_period: 1, max_num_steps: 1}\nloss_fn: {ratio_clip_max: 0.1}", "base/a.yaml")
    write("defaults: a.yaml\ngrpo: {val_period: 2, max_num_steps: 2}", "base/b.yaml")
    write("policy: {optimizer: {kwargs: {betas: [0, 0]}}}\ngrpo: {max_num_steps: 3}", "c.yaml")
    own = "grpo: {max_val_samples: 9}\n"
    cfg = load(write(own + "defaults: [base/b.yaml, c.yaml]"), ["grpo.max_num_epochs=7"])
    expected = config.GRPOConfig(seed=1, val_period=2, max_num_steps=3, max_val_samples=9, max_num_epochs=7)
    assert cfg.grpo == expected
    assert cfg.loss_fn == LossConfig(ratio_clip_max=0.1)
    assert cfg.policy.optimizer.kwargs.betas == (0.0, 0.0)
    assert load(write(own + "defaults: [c.yaml, base/b.yaml]")).grpo.max_num_steps == 2
    assert load(write("grpo: {seed: 5}\ndefaults: base/b.yaml")).grpo.seed == 5, "the file wins wherever it says so"


def test_one_file_may_be_the_default_of_two(write):
    write("grpo: {seed: 3}", "a.yaml")
    write("defaults: a.yaml", "b.yaml")
    assert load(write("defaults: [a.yaml, b.yaml]")).grpo.seed == 3


# --- Config -> text -------------------------------------------------------------------------------


def test_a_pipe_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(config.ConfigError, match=r"run\.yaml: cannot be read \(not a regular file\)"):
        load(tmp_path / "run.yaml")


def test_round_trip(write):
    overrides = ["policy.optimizer.kwargs.lr=1.7e-13", "policy.generation.stop_token_ids=[1]"]
    cfg = load(write("grpo: {seed: 1}"), [*overrides, "loss_fn.ratio_clip_c=3"])
    nasty = "no null ~ true 1e-6 010 a:_b {} [x] #x &x !x <<".split()
    for text in [*nasty, "a: b", " x ", "ü", "two\nlines\n", "'\"", "x" * 200 + " y"]:
        logger = dataclasses.replace(cfg.logger, log_dir=text)
        cfg = dataclasses.replace(cfg, logger=logger)
        assert load(write(to_yaml(cfg), "config.yaml")) == cfg
    assert load(write(to_yaml(Config()), "config.yaml")) == Config()
    top = [line.rstrip(":") for line in to_yaml(cfg).splitlines() if not line.startswith(" ")]
    assert top == [f.name for f in dataclasses.fields(Config)], "in the order of the code"


# --- mistakes and bounds ---------------------------------------------------------------------------

WRONG = """
grpo: {num_prompt_per_step: 4, num_generations_per_prompt: 1}
loss: {ratio_clip_max: 0.3}
policy: {precision: fp8, generation: {max_new_tokens: 600, top_p: 2}}
checkpointing: {resume_step: 5}
"""


def test_all_mistakes_are_told_at_once(write):
    """Keys, types, bounds and rules, a line each, each with its place; what a doubtful key decides is not judged."""
    data = ["data.train.data_path=a", "data.validation.data_path=b"]
    with pytest.raises(ConfigError) as refused:
        load_checked(write(WRONG), [*data, "grpo.seed=x", "policy.optimizer.kwargs.lr=0"], world_size=3)
    lines = str(refused.value).splitlines()
    named = [
        ("run.yaml line 2", "grpo.num_prompt_per_step", "grpo.num_prompts_per_step"),
        ("run.yaml line 2", "grpo.num_generations_per_prompt=1"),
        ("run.yaml line 3", "'loss'", "loss_fn"),
        ("run.yaml line 4", "policy.precision", "fp8"),
        ("run.yaml line 4", "policy.generation.top_p=2"),
        ("command line", "grpo.seed"),
        ("command line", "policy.optimizer.kwargs.lr=0"),
        ("policy.generation.max_new_tokens=600", "policy.max_total_sequence_length=512"),
        ("checkpointing.resume_step=5", "checkpointing.resume_from=null"),
    ]
    assert len(lines) == len(named)
    for names in named:
        assert [all(name in line for name in names) for line in lines].count(True) == 1, (names, lines)


def test_of_many_mistakes_the_first_are_told(write):
    text = "\n".join(f"grpo_{number}: {{seed: 1}}" for number in range(3000))
    with pytest.raises(ConfigError) as refused:
        load(write(text))
    lines = str(refused.value).splitlines()
    assert "run.yaml line 1:" in lines[0] and "2,980" in lines[-1] and len(lines) == 21


BOMB = "\n".join(["a: &a0 [1, 2, 3]", *(f"b{n}: &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]" for n in range(30))])
MERGES = "\n".join(["a: &a0 {x: 1}", *(f"b{n}: &a{n + 1} {{p: *a{n}, q: *a{n}}}" for n in range(40))])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (BOMB, r"b\d+\."),
        (MERGES, r"b\d+\."),
        ("grpo: " + "[" * 100_000, "line 1"),
        ("grpo: " + "{a: " * 100_000, "line 1"),
        ("grpo:\n" + "".join(" " * n + "-\n" for n in range(1, 400)), "line 3."),
        ("a: &a {b: *a}", "line 1"),
        ("a: &a [*a]", "line 1"),
        ("x: y\n" * 300_000, "bytes"),
        ("env: {custom: {" + ", ".join(f"k{n}: 1" for n in range(30_000)) + "}}", "env.custom.k"),
        ("env: {custom: {a: " + "9" * 5_000 + "}}", "env.custom.a"),
        ("logger: {log_dir: '${.log_dir}${.log_dir}'}", "logger.log_dir"),
        ("logger: {log_dir: '" + "${.log_dir}" * 40_000 + "'}", "logger.log_dir"),
        ('a: "\\UFFFFFFFF"', "run.yaml"),
    ],
    ids=lambda text: text[:12],
)
def test_what_no_config_is_ends_at_once(write, text, named):
    """Nodes are bounded with aliases written out, and so are depth and bytes."""
    start = time.process_time()
    with pytest.raises(ConfigError, match=named) as refused:
        load(write(text))
    assert "run.yaml" in str(refused.value) and len(str(refused.value)) < 2000
    assert time.process_time() - start < 20  # without the bounds, hours


@pytest.mark.parametrize(
    "path", ["config/smoke.yaml", "smoke.yml", "configs/smoke", "conf/a/b.yaml", "smoke.yaml", "configs", "\0/a"]
)
def test_trials4_f10_a_file_that_is_not_there_names_those_that_are(path):
    with pytest.raises(ConfigError, match=r"yaml files in \S*configs: .*math_8b.yaml.* smoke.yaml"):
        load(Path(path))


def test_trials4_f10_a_choice_that_is_none_shows_what_the_key_means():
    """GSPO is no token loss: the text of the key names its own."""
    with pytest.raises(ConfigError, match=r"got 'gspo'.*sequence_level_importance_ratios"):
        load(ROOT / "configs/smoke.yaml", ["loss_fn.token_loss=gspo"])
