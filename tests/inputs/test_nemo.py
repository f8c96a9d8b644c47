"""nemo.py: the YAML of NeMo RL's GRPO guides means here what it means there; the files are in nemo_yaml/."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path

import pytest

import config
from base.check.rules import check_config
from base.inputs import keys, nemo
from base.inputs.reader import load, to_yaml
from config import ConfigError, DatasetConfig

UNUSED = "without effect here: 1 keys of the config (data.num_workers); --check --explain says why"
ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests/helpers/nemo_yaml"
MATH = {"env_name": "math"}  # their processor math_hf_data_processor is what happens here without one
COT = MATH | {"prompt_file": "examples/prompts/cot.txt"}


def test_response_dataset_with_defaults():
    data = load(FILES / "response_dataset.yaml").data
    common = {"output_key": "output"} | MATH
    train = DatasetConfig(data_path="train.jsonl", input_key="question", split="train", split_validation_size=0.05)
    assert data.train == (replace(train, **common),)
    assert data.validation == (DatasetConfig(data_path="val.jsonl", input_key="input", **common),)
    assert (data.max_input_seq_length, data.shuffle) == (512, True)


def test_two_datasets_that_override_the_section(capsys):
    data = load(FILES / "multiple_datasets.yaml").data
    assert data.train == (
        DatasetConfig(dataset_name="OpenMathInstruct-2", split_validation_size=0.05, seed=42, **COT),
        DatasetConfig(dataset_name="DeepScaler", **COT),
    )
    assert data.validation == (
        DatasetConfig(dataset_name="AIME2024", repeat=16, **COT),
        DatasetConfig(dataset_name="DAPOMathAIME2024", **COT),
    )
    assert (data.use_multiple_dataloader, data.num_prompts_per_dataloader) == (False, 16)
    assert data.custom_dataloader is None, "NeMo RL's example takes turns, as we do without one"
    assert load(FILES / "multiple_datasets.yaml", ["grpo.seed=7"]).data.train[0].seed == 7, "${grpo.seed} is read last"


def test_flat_data_section(capsys):
    cfg = load(FILES / "flat.yaml")
    common = {"input_key": "problem", "output_key": "expected_answer"}
    common["env_name"] = "math"
    assert cfg.data.train == (DatasetConfig(data_path="rollouts/train.jsonl", **common),)
    assert cfg.data.validation == (DatasetConfig(data_path="rollouts/validation.jsonl", **common),)
    assert cfg.env.math.num_workers == 4
    assert capsys.readouterr().out.splitlines() == [UNUSED]


def test_the_whole_recipe(capsys):
    """Every key of grpo_math_1B.yaml: used, or in the table."""
    cfg = load(FILES / "math_1b.yaml")
    assert cfg.policy.sequence_packing.train_mb_tokens == 512 * 4, "${mul:...}, of a key that we do not have"
    assert (cfg.policy.scheduler.warmup_steps, cfg.policy.scheduler.warmup_start_factor) == (40, 0.2)
    assert (cfg.policy.generation.max_new_tokens, cfg.policy.generation.vllm_cfg.precision) == (512, "bfloat16")
    assert cfg.data.validation == () and cfg.data.train[0].split_validation_size == 0.05
    assert cfg.grpo.reward_shaping.max_response_length == 512
    assert (cfg.checkpointing.metric_name, cfg.checkpointing.keep_top_k) == ("validation/sampled/accuracy", 3)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"without effect here: \d+ keys of the config \(", line) and len(line) < 300
    check_config(cfg, 8)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("val:accuracy", "validation/sampled/accuracy"),
        ("val_reward", "validation/sampled/accuracy"),
        ("validation/greedy/accuracy", "validation/greedy/accuracy"),
    ],
)
def test_names_of_metrics(theirs, ours, tmp_path):
    (tmp_path / "run.yaml").write_text(f"checkpointing: {{metric_name: {theirs!r}}}\n")
    assert load(tmp_path / "run.yaml").checkpointing.metric_name == ours


@pytest.mark.parametrize(
    ("theirs", "other"),
    [
        ("end_factor: 1.0", "end_factor: 0.5"),
        ("end_factor: 1.0, ", ""),
        ("start_factor: 0.2, ", ""),  # PyTorch's 1/3, and not our default
        ("factor: 1.0, total_iters: 10000000000", "factor: 0.5, total_iters: 10000000000"),
        ("{factor: 1.0, total_iters: 10000000000}", "{total_iters: 5}"),  # PyTorch's 1/3
        ("milestones: [40]", "milestones: [10]"),
        ("milestones: [40]", "milestones: [40, 80]"),
        ("lr_scheduler.ConstantLR", "lr_scheduler.CosineAnnealingLR"),
    ],
)
def test_schedules_that_would_train_otherwise_are_refused(theirs, other, tmp_path):
    text = (FILES / "math_1b.yaml").read_text()
    assert theirs in text
    (tmp_path / "run.yaml").write_text(text.replace(theirs, other))
    with pytest.raises(ConfigError, match="the only list supported is a LinearLR up to"):
        load(tmp_path / "run.yaml")


PUZZLE = "env.custom.examples.envs.sliding_puzzle:SlidingPuzzle.max_moves"


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("data: {add_system_prompt: true}", "policy.tokenizer.chat_template_kwargs.add_system_prompt=false"),
        ("env: {sliding_puzzle_game: {cfg: {max_moves: 5, game_config: {size: 3, shuffle_moves: 5}}}}", f"{PUZZLE}=7"),
    ],
)
def test_a_key_of_theirs_beside_the_free_key_that_it_means(text, ours, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    key = ours.partition("=")[0]
    assert load(tmp_path / "run.yaml", [ours], explain=True) != load(tmp_path / "run.yaml")
    lines = capsys.readouterr().out
    assert re.search(rf"^\S+=.*: does not matter: {re.escape(key)} decides$", lines, re.MULTILINE)
    assert re.search(rf"^{re.escape(ours)}: used$", lines, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_was_read_is_written_as_plain_values(path, tmp_path, capsys):
    cfg = load(path)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    capsys.readouterr()
    assert load(tmp_path / "config.yaml") == cfg and capsys.readouterr().out == ""
    assert "${" not in to_yaml(cfg)


@pytest.mark.parametrize(
    "line",
    [
        *(f"dataset_name: {name}" for name in ("ResponseDataset", "NemoGymDataset", "nemo_gym", "openai_format")),
        *(f"processor: {name}_data_processor" for name in ("math", "math_hf")),
        "processor: default",
    ],
)
def test_names_of_what_happens_here_anyway(line, tmp_path):
    (tmp_path / "run.yaml").write_text(f"data: {{train: {{data_path: a.jsonl, {line}}}, default: {{{line}}}}}\n")
    data = load(tmp_path / "run.yaml").data
    assert data.train == (DatasetConfig(data_path="a.jsonl"),) and data.default == DatasetConfig()


# ------------------------------------------------------------------------------------------- what is not taken over


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("grpo: {val_period: -1}", "grpo.val_period", 0),
        (
            "grpo: {use_leave_one_out_baseline: true, adv_estimator: {use_leave_one_out_baseline: false}}",
            "grpo.use_leave_one_out_baseline",
            False,
        ),
        ("grpo: {adv_estimator: {normalize_rewards: false}}", "grpo.normalize_rewards", False),
        ("policy: {generation: {temperature: 0.8, val_temperature: '${.temperature}'}}", "grpo.val_temperature", 0.8),
        ("policy: {generation: {val_top_k: 50}}", "grpo.val_top_k", 50),
        ("policy: {generation: {top_k: 9, val_top_k: null}}", "grpo.val_top_k", 0),
        ("policy: {generation: {top_k: -1, val_top_k: -1}}", "grpo.val_top_k", 0),
        ("policy: {generation: {top_k: -1}}", "policy.generation.top_k", None),
        ("policy: {generation: {top_p: 0.9}}", "policy.generation.top_p", 0.9),
        ("policy: {tokenizer: {name: a/b}}", "policy.tokenizer.name", "a/b"),
        ("policy: {hf_config_overrides: null}", "policy.hf_config_overrides", config.HFConfigOverrides()),
        ("data: {add_system_prompt: false}", "policy.tokenizer.chat_template_kwargs", {"add_system_prompt": False}),
        (
            "env: {reward_model: {tokenizer: {name: '${env.reward_model.model_name}'}, model_name: m}}",
            "env.reward_model.tokenizer.name",
            "m",
        ),
    ],
)
def test_taken_as_another_key_or_value(write, text, key, value):
    assert attrgetter(key)(load(write(text))) == value


def test_the_command_line_wins_over_what_a_file_says_by_another_name(write, capsys):
    text = "grpo: {adv_estimator: {use_leave_one_out_baseline: false, normalize_rewards: false}}\n"
    words = ["grpo.use_leave_one_out_baseline=true", "grpo.normalize_rewards=true"]
    cfg = load(write(text), words, explain=True)
    assert cfg.grpo.use_leave_one_out_baseline and cfg.grpo.normalize_rewards
    decides = "grpo.adv_estimator.normalize_rewards=false: does not matter: grpo.normalize_rewards decides"
    assert {decides, "grpo.normalize_rewards=true: used"} <= set(capsys.readouterr().out.splitlines())
    cfg = load(write("grpo: {normalize_rewards: true}\n"), ["grpo.adv_estimator.normalize_rewards=false"])
    assert not cfg.grpo.normalize_rewards


THEIRS = "policy: {generation: {val_temperature: 0.3, val_top_k: 3}}\n"
OURS = "grpo: {val_temperature: 0.7, val_top_k: 7}\n"
OF_THE_ESTIMATOR = "grpo: {adv_estimator: {normalize_rewards: false}}\n"
PLAIN = "grpo: {normalize_rewards: true}\n"


@pytest.mark.parametrize(
    ("base", "child", "words", "key", "value"),
    [
        (THEIRS, OURS, [], "val_temperature", 0.7),
        (OURS, THEIRS, [], "val_temperature", 0.3),
        (THEIRS, OURS, [], "val_top_k", 7),
        (OURS, THEIRS, [], "val_top_k", 3),
        ("", THEIRS + OURS, [], "val_temperature", 0.3),  # within a file no order is meant
        ("", "", ["policy.generation.val_temperature=0.3", "grpo.val_temperature=0.7"], "val_temperature", 0.7),
        ("", "", ["grpo.val_temperature=0.7", "policy.generation.val_temperature=0.3"], "val_temperature", 0.3),
        # NeMo RL has both keys, and its estimators read the second.
        (OF_THE_ESTIMATOR, PLAIN, [], "normalize_rewards", False),
        (PLAIN, OF_THE_ESTIMATOR, [], "normalize_rewards", False),
        (OF_THE_ESTIMATOR, "", ["grpo.normalize_rewards=true"], "normalize_rewards", True),
    ],
)
def test_of_two_spellings_the_last_to_be_set_wins(base, child, words, key, value, tmp_path):
    (tmp_path / "base.yaml").write_text(base or "{}")
    (tmp_path / "child.yaml").write_text(f"defaults: base.yaml\n{child}")
    assert getattr(load(tmp_path / "child.yaml", words).grpo, key) == value


def test_a_value_that_is_overridden_is_not_judged(write):
    Path("base.yaml").write_text("policy: {generation: {backend: sglang}}\ngrpo: {sed: 1}\n")
    with pytest.raises(ConfigError, match="backend=sglang is not supported"):
        load(write("defaults: base\n"))
    with pytest.raises(ConfigError, match=r"base\.yaml line 2: unknown key 'grpo.sed'. Did you mean 'grpo.seed'"):
        load(write("defaults: [base]\n"), ["policy.generation.backend=vllm"])
    text = "grpo: {adv_estimator: {normalize_rewards: maybe}}"
    assert not load(write(text), ["grpo.normalize_rewards=false"]).grpo.normalize_rewards, "nor one of another spelling"


def test_explain(write, capsys):
    text = "grpo: {seed: 1, use_leave_one_out_baseline: true, adv_estimator: {use_leave_one_out_baseline: false}}\n"
    text += "policy: {megatron_cfg: {enabled: False, x: {y: [1, 2], z: {}}}, generation: {top_k: 5, backend: sglang}}\n"
    text += "data: {train: [{data_path: a}, {data_path: b}], validation: null}\n"
    text += "grp: 1\nlogger: {mlflow: {name: '${oc.env:NAME}'}, wandb: {name: mine}}\npolicy2: 3\n"
    with pytest.raises(ConfigError, match="backend=sglang is not supported here, only vllm"):
        load(write(text), ["grpo.seed=7"], explain=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "15 keys: 3 refused, 1 mapped to, 4 does not matter, 7 used" and not lines[-1]
    found = {}
    for line in lines[1:-1]:
        key, _, text = line.partition(": ")
        found[key.partition("=")[0]] = text
    assert "policy.generation.top_k=5: used" in lines and "logger.wandb.name=mine: used" in lines
    kinds = [re.match("refused|mapped to|does not matter|used", text)[0] for text in found.values()]
    assert list(dict.fromkeys(kinds)) == ["refused", "mapped to", "does not matter", "used"] == list(nemo.KINDS)
    assert sorted(kinds, key=nemo.KINDS.index) == kinds
    assert found == {
        "grpo.use_leave_one_out_baseline": "does not matter: grpo.adv_estimator.use_leave_one_out_baseline decides",
        "grpo.adv_estimator.use_leave_one_out_baseline": "mapped to grpo.use_leave_one_out_baseline=false",
        "policy.megatron_cfg.enabled": "used; it is what happens here anyway",
        "policy.megatron_cfg.x.y": "does not matter: the feature that the key configures is off",
        "policy.megatron_cfg.x.z": "does not matter: the feature that the key configures is off",
        "policy.generation.top_k": "used",
        "policy.generation.backend": f"refused: {found['policy.generation.backend'].removeprefix('refused: ')}",
        "data.train.0.data_path": "used",
        "data.train.1.data_path": "used",
        "data.validation": "used",
        "grp": f"refused: {found['grp'].removeprefix('refused: ')}",
        "logger.wandb.name": "used",
        "logger.mlflow.name": "does not matter: metrics.jsonl and TensorBoard have the metrics",
        "policy2": f"refused: {found['policy2'].removeprefix('refused: ')}",
        "grpo.seed": "used",
    }


def test_references_to_other_keys(write):
    text = "grpo: {val_period: 3, max_val_samples: '${.val_period}', seed: '${ mul: ${grpo.val_period}, 7 }'}"
    grpo = load(write(text), ["grpo.val_period=4", "grpo.max_bad_steps=${grpo.max_val_samples}"]).grpo
    assert (grpo.max_val_samples, grpo.seed, grpo.max_bad_steps) == (4, 28, 4)


def test_an_overridden_section_starts_from_the_defaults(write):
    Path("base.yaml").write_text("data: {shuffle: false, train: {data_path: a}, task_to_env: {x: math}}\n")
    data = load(write("defaults: base.yaml\ndata: {_override_: true, train: {data_path: b}}\n")).data
    assert data == config.DataConfig(train=(DatasetConfig(data_path="b"),))
    assert load(write("defaults: base.yaml\ndata: {train: null}\n")).data.train == ()


def test_defaults_fill_what_a_set_does_not_say(write):
    text = (
        "data: {train: {input_key: null}, validation: [{seed: 1}, {env_name: code}], default: {input_key: q, seed: 7}}"
    )
    data = load(write(text), ["data.default.env_name=math"]).data
    assert [(d.input_key, d.seed, d.env_name) for d in (*data.train, *data.validation)] == [
        (None, 7, "math"),
        ("q", 1, "math"),
        ("q", 7, "code"),
    ]


def test_free_mappings(write):
    text = (
        "env: {custom: {'m:C': {a: 1e-6, b: [x, 010, no]}}}\npolicy: {tokenizer: {chat_template_kwargs: {k: 'true'}}}"
    )
    overrides = ["policy.tokenizer.chat_template_kwargs.enable_thinking=false", "env.custom.m.n:C.a=2"]
    cfg = load(write(text), overrides)
    assert cfg.env.custom == {"m:C": {"a": 1e-6, "b": ["x", 8, False]}, "m.n:C": {"a": 2}}
    assert cfg.policy.tokenizer.chat_template_kwargs == {"k": "true", "enable_thinking": False}
    assert load(write(to_yaml(cfg))) == cfg
    assert load("run.yaml", ["data.task_to_env={algebra: math}"]).data.task_to_env == {"algebra": "math"}


def test_no_key_of_ours_is_said_not_to_matter():
    rows = [(pattern, row) for pattern, row in nemo.PATTERNS if row.why and not row.when]
    assert not [name for name in keys.FIELDS for pattern, _ in rows if fnmatchcase(name, pattern)]
