"""reader.py: what a user gets wrong in a file or an override is refused with the place, the reason and the fix.

Messages are compared whole: they are the interface.
"""

import dataclasses
from pathlib import Path

import pytest

import config
from check.reader import load, to_yaml
from config import Config, ConfigError, LossConfig


def message_of(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo: {seed: true}", "grpo.seed: expected int, got 'true' (bool); the default is 42"),
        ("grpo: {seed: 3.5}", "grpo.seed: expected int, got '3.5' (float); the default is 42"),
        ("grpo: {seed: null}", "grpo.seed: expected int, got null; the default is 42"),
        ("logger: {log_dir: null}", 'logger.log_dir: expected str, got null; the default is "logs"'),
        ("grpo: {seed: {a: 1}}", "grpo.seed: expected int, got a mapping; the default is 42"),
        ("grpo: {val_at_end: 1}", "grpo.val_at_end: expected true or false, got '1' (int); the default is false"),
        ("grpo: {val_at_end: yes}", "grpo.val_at_end: expected true or false, got 'yes' (bool); the default is false"),
        (
            "grpo: {logp_gap_limit: true}",
            "grpo.logp_gap_limit: expected finite float or null, got 'true' (bool); the default is 0.1",
        ),
        (
            "policy: {optimizer: {kwargs: {lr: 1e-6x}}}",
            "policy.optimizer.kwargs.lr: expected finite float, got '1e-6x' (str); the default is 5e-06",
        ),
        (
            "policy: {optimizer: {kwargs: {lr: .inf}}}",
            "policy.optimizer.kwargs.lr: expected finite float, got '.inf' (float); the default is 5e-06",
        ),
        (
            "policy: {optimizer: {kwargs: {lr: nan}}}",
            "policy.optimizer.kwargs.lr: expected finite float, got 'nan' (str); the default is 5e-06",
        ),
        (
            "policy: {optimizer: {kwargs: {betas: [0.9]}}}",
            "policy.optimizer.kwargs.betas: expected list[float, float], got ['0.9' (float)]; "
            "the default is [0.9, 0.999]",
        ),
        (
            "policy: {generation: {stop_token_ids: [1, x]}}",
            "policy.generation.stop_token_ids: expected list[int, ...] or null, got ['1' (int), 'x' (str)]; "
            "the default is null",
        ),
        (
            "policy: {generation: {stop_token_ids: &a [*a]}}",
            f"policy.generation.stop_token_ids{'.0' * 24}: too much: over 20,000 values, counting all that aliases "
            "stand for, or over 200 characters of a key",
        ),
        (
            "policy: {precision: fp16}",
            "policy.precision: expected bfloat16 or float32, got 'fp16' (str); the default is \"bfloat16\"",
        ),
        (
            "logger: {log_dir: !path x}",
            "logger.log_dir: the tag '!path' has no meaning here; write the value without it",
        ),
        (
            "policy: {scheduler: no}",
            "policy.scheduler is a section, got 'no' (bool); set its keys: name, warmup_steps, warmup_start_factor, "
            "min_factor",
        ),
    ],
)
def test_wrong_type(write, text, message):
    assert message_of(write(text)) == f"run.yaml line 1: {message}"


def test_wrong_override(write):
    path = write("grpo: {seed: 1}")
    assert message_of(path, "grpo.seed=1", "grpo.seed=x") == (
        "command line 'grpo.seed=x': grpo.seed: expected int, got 'x' (str); the default is 42"
    )
    assert message_of(path, "--grpo.seed") == ("command line '--grpo.seed': expected key.sub=value, as in grpo.seed=1")
    assert message_of(path, "policy.optimizer.kwargs.betas=[1") == (
        "command line 'policy.optimizer.kwargs.betas=[1' line 1: not yaml: expected ',' or ']', but got '<stream end>'"
    )


# --- keys -----------------------------------------------------------------------------------------


def test_unknown_key_names_the_nearest_and_the_keys_of_its_section(write):
    assert message_of(write("policy:\n  scheduler:\n    warmup_steps: 1\n    warmup_factor: 1\n")) == (
        "run.yaml line 4: unknown key 'policy.scheduler.warmup_factor'. "
        "Did you mean 'policy.scheduler.warmup_start_factor'? "
        "Keys of policy.scheduler: name, warmup_steps, warmup_start_factor, min_factor"
    )


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("grpo.num_promts_per_step", "grpo.num_prompts_per_step"),
        ("polcy.optimizer.kwargs.lr", "policy.optimizer.kwargs.lr"),
        ("lr", "policy.optimizer.kwargs.lr"),
        ("data.validation.data_pth", "data.validation.data_path"),
        ("generation.vllm_cfg.precison", "policy.generation.vllm_cfg.precision"),
        ("polcy", "policy"),
        ("++grpo.seed", "grpo.seed"),
    ],
)
def test_nearest_key(write, key, nearest):
    assert f"unknown key '{key}'. Did you mean '{nearest}'? Keys of" in message_of(write("grpo: {seed: 1}"), f"{key}=1")


def test_no_nearest_key_is_invented(write):
    assert message_of(write("grpo: {seed: 1}"), "policy.optimizer.kwargs.nesterov=1") == (
        "command line 'policy.optimizer.kwargs.nesterov=1': unknown key 'policy.optimizer.kwargs.nesterov'. "
        "Keys of policy.optimizer.kwargs: lr, weight_decay, betas, eps, state_dtype"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo:\n  seed: 1\n  seed: 1\n", "line 3: grpo.seed is set again, first in line 2; remove one"),
        ("grpo:\n  seed: 1\ngrpo:\n  val_period: 1\n", "line 3: grpo is set again, first in line 1; remove one"),
        ("grpo.seed: 1\ngrpo:\n  seed: 2\n", "line 3: grpo.seed is set again, first in line 1; remove one"),
    ],
)
def test_key_set_twice_in_a_file(write, text, message):
    assert message_of(write(text)) == f"run.yaml {message}"


# --- files ----------------------------------------------------------------------------------------


def test_unreadable_files(write):
    write("grpo: {seed: 1}", "configs/a.yaml")
    assert message_of("configs/b.yaml") == (
        "configs/b.yaml: cannot be read (No such file or directory); yaml files there: configs/a.yaml"
    )
    assert message_of("configs") == "configs: cannot be read (Is a directory); yaml files there: none"
    assert message_of(write("grpo:\n\tseed: 1\n")) == (
        "run.yaml line 2: not yaml: found character '\\t' that cannot start any token"
    )
    assert message_of(write("a: 1\n---\nb: 1\n")) == "run.yaml line 2: not yaml: but found another document"
    Path("latin.yaml").write_bytes(b"logger: {log_dir: caf\xe9}")
    assert message_of("latin.yaml").startswith("latin.yaml: not yaml: unacceptable character #x00e9: ")
    shape = "run.yaml: expected sections of keys, as in 'grpo: {seed: 1}', got"
    assert message_of(write("- 1\n")) == f"{shape} ['1' (int)]"
    assert message_of(write("# nothing\n")) == f"{shape} null"


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


def test_wrong_defaults(write):
    write("defaults: b.yaml", "a.yaml")
    assert message_of(write("defaults: [a.yaml]", "b.yaml")) == (
        "b.yaml: defaults go in a circle: b.yaml -> a.yaml -> b.yaml"
    )
    write("defaults: ../b.yaml", "sub/a.yaml")
    assert "go in a circle" in message_of(write("defaults: sub/a.yaml", "b.yaml")), "seen through ../ too"
    assert message_of(write("defaults: none.yaml", "sub/a.yaml")) == (
        "sub/none.yaml: cannot be read (No such file or directory) (named by the defaults of sub/a.yaml); yaml files "
        "there: sub/a.yaml"
    )
    assert message_of(write("grpo: {seed: 1}\ndefaults: {a: 1}")) == (
        "run.yaml line 2: defaults: expected a file or a list of files, got a mapping"
    )


def test_wrong_value_in_defaults_names_the_file_it_is_in(write):
    write("grpo:\n  seed: x\n", "base/a.yaml")
    assert message_of(write("defaults: base/a.yaml")) == (
        "base/a.yaml line 2: grpo.seed: expected int, got 'x' (str); the default is 42"
    )


def test_deep_nesting_is_an_error_not_a_traceback(tmp_path):
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(tmp_path / "deep.yaml")


# --- Config -> text -------------------------------------------------------------------------------


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
