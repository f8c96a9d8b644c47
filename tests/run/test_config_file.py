"""config.py: what a user gets wrong is refused with a message that says where, what and how to mend it.

Messages are compared whole: they are the interface. Run with `pytest tests/test_config.py`.
"""

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import config
from config import Config, ConfigError, LossConfig
from run import config_file
from run.config_check import validate
from run.config_file import load, to_yaml

ROOT = Path(__file__).resolve().parents[2]
VALID = ["data.train.data_path=train.jsonl", "data.validation.data_path=val.jsonl"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a yaml file into the working directory of the test; messages then name it as a user would."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.yaml") -> str:
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    return write


def message_of(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def problems_of(path: str, world_size: int, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(load(path, [*VALID, *overrides]), world_size)
    return str(caught.value).splitlines()


def leaves(cls: type, prefix: str = "") -> list[str]:
    """Full keys of a config class, found without config.py's own table."""
    names = []
    for f in dataclasses.fields(cls):
        kind = typing.get_args(f.type)[0] if typing.get_origin(f.type) is tuple else f.type  # a list of sections
        nested = dataclasses.is_dataclass(kind)
        names += leaves(kind, f"{prefix}{f.name}.") if nested else [prefix + f.name]
    return names


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
            "policy.generation.stop_token_ids: expected list[int, ...] or null, got [...]; the default is null",
        ),
        (
            "policy: {precision: fp16}",
            "policy.precision: expected bfloat16 or float32, got 'fp16' (str); the default is \"bfloat16\"",
        ),
        ("logger: {log_dir: !path x}", "logger.log_dir: expected str, got 'x' (!path); the default is \"logs\""),
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
    assert message_of(write("grpo: {seed: 1}"), "policy.optimizer.kwargs.amsgrad=1") == (
        "command line 'policy.optimizer.kwargs.amsgrad=1': unknown key 'policy.optimizer.kwargs.amsgrad'. "
        "Keys of policy.optimizer.kwargs: lr, weight_decay, betas, eps"
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
        "configs/b.yaml: No such file or directory; yaml files there: configs/a.yaml"
    )
    assert message_of("configs") == "configs: Is a directory; yaml files there: none"
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
        "sub/none.yaml: No such file or directory (named by the defaults of sub/a.yaml); yaml files there: sub/a.yaml"
    )
    assert message_of(write("grpo: {seed: 1}\ndefaults: {a: 1}")) == (
        "run.yaml line 2: defaults: expected a file or a list of files, got a mapping"
    )


def test_wrong_value_in_defaults_names_the_file_it_is_in(write):
    write("grpo:\n  seed: x\n", "base/a.yaml")
    assert message_of(write("defaults: base/a.yaml")) == (
        "base/a.yaml line 2: grpo.seed: expected int, got 'x' (str); the default is 42"
    )


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


def test_help_has_every_key_with_its_default():
    lines = config_file.help_text().splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [line.split(":")[0] for line in heads] == leaves(Config)
    assert "grpo.num_generations_per_prompt: int (>= 2) = 16" in heads
    assert "policy.optimizer.kwargs.betas: list[float, float] (>= 0, < 1) = [0.9, 0.999]" in heads
    assert "policy.generation.vllm_cfg.precision: bfloat16 or float32 or null = null" in heads
    for head in heads:
        assert lines[lines.index(head) + 1].startswith("    "), f"{head} has no meaning"


def test_defaults_are_nemo_rls():
    """grpo_math_1B.yaml of NeMo RL 7ea279a, where the key means the same."""
    cfg = Config()
    assert (cfg.grpo.num_prompts_per_step, cfg.grpo.num_generations_per_prompt, cfg.grpo.seed) == (32, 16, 42)
    assert (cfg.grpo.normalize_rewards, cfg.grpo.use_leave_one_out_baseline) == (True, True)
    assert (cfg.grpo.val_period, cfg.grpo.max_val_samples, cfg.grpo.max_num_steps) == (10, 256, 1_000_000)
    assert cfg.loss_fn == LossConfig(ratio_clip_min=0.2, ratio_clip_max=0.2, ratio_clip_c=None)
    assert cfg.loss_fn.token_level_loss and not cfg.loss_fn.use_importance_sampling_correction
    assert (cfg.loss_fn.reference_policy_kl_penalty, cfg.loss_fn.reference_policy_kl_type) == (0.01, "k3")
    assert (cfg.loss_fn.kl_input_clamp_value, cfg.loss_fn.kl_output_clamp_value) == (20, 10)
    assert (cfg.loss_fn.positive_example_nll_weight, cfg.loss_fn.truncated_importance_sampling_type) == (0, None)
    assert dataclasses.astuple(cfg.grpo.adv_estimator) == ("grpo", True, None)
    assert cfg.grpo.advantage_clip_low is cfg.grpo.advantage_clip_high is cfg.grpo.seq_logprob_error_threshold is None
    assert dataclasses.astuple(cfg.policy.optimizer.kwargs) == (5e-6, 0.01, (0.9, 0.999), 1e-8)
    assert dataclasses.astuple(cfg.policy.scheduler) == ("constant", 50, 0.1, 0.0)
    assert cfg.policy.sequence_packing.train_mb_tokens == 512 * 4


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().grpo.seed = 1


# --- validate -------------------------------------------------------------------------------------

VLLM = "policy.generation.vllm_cfg"


@pytest.mark.parametrize(
    ("world_size", "overrides", "problems"),
    [
        (
            1,
            ["grpo.num_generations_per_prompt=1", "grpo.max_num_steps=0"],
            [
                "grpo.num_generations_per_prompt=1: must be >= 2 (Samples per prompt, compared to each other.)",
                "grpo.max_num_steps=0: must be >= 1 (Optimizer steps, unless max_num_epochs ends the run.)",
            ],
        ),
        (
            8,
            ["grpo.num_prompts_per_step=30", f"{VLLM}.tensor_parallel_size=2"],
            [
                "grpo.num_prompts_per_step=30 is not divisible by the 4 data-parallel groups (world size 8, "
                "policy.generation.vllm_cfg.tensor_parallel_size=2): use 28 or 32"
            ],
        ),
        (
            8,
            ["grpo.num_prompts_per_step=3"],
            [
                "grpo.num_prompts_per_step=3 is not divisible by the 8 data-parallel groups (world size 8, "
                "policy.generation.vllm_cfg.tensor_parallel_size=1): use 8"
            ],
        ),
        (
            2,
            [f"{VLLM}.tensor_parallel_size=4"],
            [
                "policy.generation.vllm_cfg.tensor_parallel_size=4 does not divide the world size 2: "
                "start a multiple of 4 ranks"
            ],
        ),
        (
            1,
            ["policy.sequence_packing.train_mb_tokens=511"],
            [
                "policy.sequence_packing.train_mb_tokens=511 is less than "
                "policy.max_total_sequence_length=512: use 512 or more"
            ],
        ),
        (
            1,
            ["policy.generation.max_new_tokens=513"],
            [
                "policy.generation.max_new_tokens=513 is more than policy.max_total_sequence_length=512: lower it to "
                "512 (what each prompt leaves), or less"
            ],
        ),
        (
            1,
            [
                *("checkpointing.resume=never", "checkpointing.resume_from=logs/exp_001"),
                *("checkpointing.checkpoint_must_save_by=03:45:00", "checkpointing.metric_name=accuracy"),
            ],
            [
                "checkpointing.resume=never and checkpointing.resume_from=logs/exp_001: choose one",
                "checkpointing.checkpoint_must_save_by=03:45:00: must be DD:HH:MM:SS, as 00:03:45:00",
                "checkpointing.metric_name=accuracy: must be a key of metrics.jsonl, as train/reward",
            ],
        ),
        (
            1,
            ["checkpointing.keep_top_k=3", "grpo.val_period=0"],
            ["checkpointing.keep_top_k=3 compares validation/sampled/accuracy, and grpo.val_period=0: no validation"],
        ),
        (
            1,
            ["loss_fn.disable_ppo_ratio=true", "loss_fn.force_on_policy_ratio=true", "loss_fn.ratio_clip_c=3"],
            [
                "loss_fn.disable_ppo_ratio=true and loss_fn.force_on_policy_ratio=true: choose one",
                "loss_fn.ratio_clip_c=3.0 and loss_fn.disable_ppo_ratio=true: there is no ratio to clip",
                "loss_fn.ratio_clip_c=3.0 and loss_fn.force_on_policy_ratio=true: the ratio is 1",
            ],
        ),
        (
            1,
            ["data.train=null", "data.validation=null"],
            [
                "data.train.data_path is not set: name the jsonl file of training problems",
                "data.validation.data_path is not set: name a jsonl file, or ask for no validation with "
                "grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false",
            ],
        ),
    ],
)
def test_validate(write, world_size, overrides, problems):
    assert problems_of(write("grpo: {seed: 1}"), world_size, *overrides) == problems


TIS_KEYS = "truncated_importance_sampling"
CISPO, GSPO = "loss_fn.use_cispo=true", "loss_fn.sequence_level_importance_ratios=true"
PER_SEQUENCE, IS = "loss_fn.token_level_loss=false", "loss_fn.use_importance_sampling_correction=true"
KIND, HIGH, LOW = (f"loss_fn.{TIS_KEYS}_{name}" for name in ("type", "ratio", "ratio_min"))
REINFORCE, GDPO = "grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.name=gdpo"


@pytest.mark.parametrize(
    ("one", "other", "besides"),
    [
        (CISPO, "loss_fn.ratio_clip_c=3.0", []),
        (CISPO, "loss_fn.disable_ppo_ratio=true", []),
        (CISPO, "loss_fn.force_on_policy_ratio=true", []),
        (CISPO, PER_SEQUENCE, []),
        (GSPO, "loss_fn.token_level_loss=true", []),
        ("loss_fn.loss_scale_factor=9.0", "loss_fn.token_level_loss=true", []),
        (f"{KIND}=tis", "loss_fn.use_importance_sampling_correction=false", [f"{HIGH}=2"]),
        (f"{KIND}=tis", f"{HIGH}=null", [IS]),
        (f"{KIND}=sequence-mask", f"{HIGH}=null", [IS]),
        (f"{KIND}=icepop", f"{LOW}=null", [IS, f"{HIGH}=2"]),
        (f"{KIND}=seq-mask-tis", f"{LOW}=null", [IS, f"{HIGH}=2"]),
        (f"{KIND}=null", f"{HIGH}=2.0", [IS]),
        (f"{KIND}=null", f"{LOW}=0.5", [IS]),
        (f"{KIND}=sequence", f"{HIGH}=2.0", [IS]),
        (f"{KIND}=sequence", f"{LOW}=0.0", [IS]),
        (f"{KIND}=seq-mask-tis", GSPO, [IS, PER_SEQUENCE, f"{HIGH}=2", f"{LOW}=0.5"]),
        (f"{KIND}=sequence", GSPO, [IS, PER_SEQUENCE]),
        (GSPO, "loss_fn.disable_ppo_ratio=true", [PER_SEQUENCE]),
        ("loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name=grpo", []),
        ("loss_fn.use_kl_in_reward=true", GDPO, []),
        ("loss_fn.kl_gradient=plain", "loss_fn.use_kl_in_reward=true", [REINFORCE]),
        ("loss_fn.use_on_policy_kl_approximation=true", "loss_fn.use_kl_in_reward=true", [REINFORCE]),
        ("grpo.adv_estimator.reward_weights=[1.0, 2.0]", "grpo.adv_estimator.name=grpo", []),
        ("grpo.adv_estimator.minus_baseline=false", GDPO, []),
        ("grpo.reward_std=batch", "grpo.normalize_rewards=false", []),
        ("grpo.reward_std=group", REINFORCE, []),
        ("policy.optimizer.muon_lr=0.02", "policy.optimizer.name=torch.optim.AdamW", []),
        ("policy.optimizer.muon_momentum=0.9", "policy.optimizer.name=torch.optim.AdamW", []),
    ],
)
def test_keys_that_do_not_go_together(write, one, other, besides):
    (problem,) = problems_of(write("grpo: {seed: 1}"), 1, one, other, *besides)
    assert problem.startswith(f"{one} and {other}: ")


def test_a_forced_ratio_is_for_one_step_per_rollout(write):
    path, forced, batch = (
        write("grpo: {seed: 1}"),
        "loss_fn.force_on_policy_ratio=true",
        "policy.train_global_batch_size",
    )
    told = "loss_fn.force_on_policy_ratio=true is for one optimizer step per rollout, but policy.ppo_epochs="
    assert problems_of(path, 1, forced, "policy.ppo_epochs=2") == [f"{told}2 and {batch}=null make 2"]
    assert problems_of(path, 1, forced, f"{batch}=128") == [f"{told}1 and {batch}=128 make 4"]
    validate(load(path, [*VALID, forced, f"{batch}=512"]), 1)
    validate(load(path, [*VALID, f"{batch}=128", "policy.ppo_epochs=2"]), 1)


def test_bounds_the_wrong_way_round(write):
    bounds = [IS, f"{KIND}=icepop", f"{LOW}=3", f"{HIGH}=2"]
    assert problems_of(write("grpo: {seed: 1}"), 1, *bounds) == [f"{LOW}=3.0 is above {HIGH}=2.0: exchange them"]
    (problem,) = problems_of("run.yaml", 1, "grpo.advantage_clip_low=1", "grpo.advantage_clip_high=1")
    assert problem == "grpo.advantage_clip_low=1.0 is not below grpo.advantage_clip_high=1.0: exchange them"


@pytest.mark.parametrize(
    "overrides",
    [
        [CISPO, IS, f"{KIND}=icepop", f"{HIGH}=2", f"{LOW}=0"],
        [GSPO, PER_SEQUENCE, IS, f"{KIND}=tis", f"{HIGH}=2"],
        [PER_SEQUENCE, "loss_fn.loss_scale_factor=512", "grpo.normalize_rewards=false"],
        [IS, f"{KIND}=sequence"],
        [IS, f"{KIND}=sequence-mask", f"{HIGH}=3"],
        [REINFORCE, "loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.minus_baseline=false"],
        [GDPO, "grpo.adv_estimator.reward_weights=[1, 0.5]", "grpo.reward_std=batch"],
        ["loss_fn.use_on_policy_kl_approximation=true", "loss_fn.reference_policy_kl_penalty=0"],
        ["grpo.advantage_clip_low=-1", "grpo.advantage_clip_high=1"],
    ],
)
def test_keys_that_do(write, overrides):
    validate(load(write("grpo: {seed: 1}"), [*VALID, *overrides]), 1)


@pytest.mark.parametrize(
    ("key", "refused", "accepted"),
    [
        ("loss_fn.ratio_clip_c", ["1", "0.5"], ["1.1", "null"]),
        ("loss_fn.ratio_clip_min", ["-0.1", "1.1"], ["0", "1"]),
        ("policy.generation.temperature", ["0", "-1"], ["0.1"]),
        ("policy.optimizer.kwargs.lr", ["0", "-1e-6"], ["1e-9"]),
        ("policy.optimizer.kwargs.betas", ["[0.9, 1]", "[-0.1, 0.9]"], ["[0, 0]"]),
        ("policy.generation.stop_token_ids", ["[3, -1]"], ["[0]", "null"]),
        (f"{VLLM}.gpu_memory_utilization", ["0", "1"], ["0.9"]),
        (f"{VLLM}.tensor_parallel_size", ["0"], ["1"]),
        ("checkpointing.save_period", ["0"], ["1"]),
        ("checkpointing.keep_latest", ["1"], ["2"]),
        ("grpo.val_period", ["-1"], ["0"]),
        ("grpo.max_bad_steps", ["-1"], ["0"]),
        ("grpo.logp_gap_patience", ["-1"], ["0"]),
        ("grpo.seed", ["-1", "4294967296"], ["0", "4294967295"]),
        ("policy.scheduler.warmup_start_factor", ["0", "1.5"], ["1"]),
    ],
)
def test_bounds(write, key, refused, accepted):
    path = write("grpo: {seed: 1}")
    for text in refused:
        (problem,) = problems_of(path, 1, f"{key}={text}")
        assert problem.startswith(f"{key}=") and ": must be " in problem
    for text in accepted:
        validate(load(path, [*VALID, f"{key}={text}"]), 1)


@pytest.mark.parametrize(("override", "values"), [("top_p=0.9", "0.9, top_k=null"), ("top_k=5", "1.0, top_k=5")])
def test_filtered_sampling_is_refused(write, override, values):
    (problem,) = problems_of(write("grpo: {seed: 1}"), 1, f"policy.generation.{override}")
    assert problem == (
        f"policy.generation.top_p={values}: must be 1 and null; the trainer scores the whole distribution, "
        "and a filtered sampler draws from another"
    )


def test_prompts_are_divided_among_engines_not_ranks(write):
    path = write("grpo: {num_prompts_per_step: 2}")
    validate(load(path, [*VALID, f"{VLLM}.tensor_parallel_size=2"]), 4)
    assert len(problems_of(path, 4)) == 1


def test_empty_text_is_refused(write):
    (problem,) = problems_of(write("logger: {log_dir: ''}"), 1)
    assert problem == "logger.log_dir is empty (Holds the numbered run folders, exp_001 and on.)"


def test_validation_data_is_needed_only_where_validation_is_asked_for(write):
    overrides = ["data.train.data_path=x", "grpo.val_period=0"]
    validate(load(write("grpo: {seed: 1}"), overrides), 1)
    with pytest.raises(ConfigError, match=r"^data\.validation\.data_path is not set"):
        validate(load("run.yaml", [*overrides, "grpo.val_at_end=true"]), 1)


def test_time_to_save_by(write):
    """90,061 s are a day, an hour, a minute and a second."""
    cfg = load(write("checkpointing: {checkpoint_must_save_by: '1:01:01:01'}"))
    assert cfg.checkpointing.must_save_by_seconds == 90_061
    assert load(write("{}")).checkpointing.must_save_by_seconds is None


def test_longest_prompt(write):
    path = write("policy: {max_total_sequence_length: 100, generation: {max_new_tokens: 30}}")
    assert load(path).max_prompt_tokens == 70
    assert load(path, ["data.max_input_seq_length=50"]).max_prompt_tokens == 50
    assert load(path, ["data.max_input_seq_length=71"]).max_prompt_tokens == 70, "room for the response comes first"
    whole = "policy.generation.max_new_tokens=100"
    assert load(path, [whole]).max_prompt_tokens == 99, "a response gets what its prompt leaves"
    assert load(path, [whole, "data.max_input_seq_length=50"]).max_prompt_tokens == 50


# --- what is shipped ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_config_is_valid_and_short(path):
    for world_size in (1, 2, 4, 8):
        validate(load(path), world_size)
    assert len(path.read_text().splitlines()) <= 30


def test_8b_is_the_1b_recipe_with_another_model():
    small, large = load(ROOT / "configs/math_1b.yaml"), load(ROOT / "configs/math_8b.yaml")
    assert large.data == small.data and large.grpo == small.grpo
    assert (small.policy.model_name, large.policy.model_name) == ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-8B-Base")
    assert large.policy.dtensor_cfg.activation_checkpointing and not small.policy.dtensor_cfg.activation_checkpointing


def test_neither_torch_nor_vllm_is_imported():
    code = "import sys, config; print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_deep_nesting_is_an_error_not_a_traceback(tmp_path):
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(tmp_path / "deep.yaml")
