"""Keys of validation, shaping and scaling: sets in a list, overrides of them, settings that contradict each other."""

import pytest

import config
from check import reader, rules

TRAIN = ["data.train.data_path=train.jsonl"]


def load(tmp_path, text, *overrides, parent=None):
    if parent is not None:
        (tmp_path / "parent.yaml").write_text(parent)
        text = "defaults: parent.yaml\n" + text
    (tmp_path / "run.yaml").write_text(text)
    return reader.load(tmp_path / "run.yaml", [*TRAIN, *overrides])


def paths(cfg):
    return [dataset.data_path for dataset in cfg.data.validation]


TWO = "data: {validation: [{data_path: a/x.jsonl, env_name: e}, {data_path: b.jsonl, name: hard}]}"


def test_validation_is_one_mapping_or_a_list(tmp_path):
    assert paths(load(tmp_path, "data: {validation: {data_path: a.jsonl}}")) == ["a.jsonl"]
    cfg = load(tmp_path, TWO)
    assert paths(cfg) == ["a/x.jsonl", "b.jsonl"] and [d.set_name for d in cfg.data.validation] == ["x", "hard"]
    assert cfg.data.validation[0].env_name == "e" and cfg.data.validation[1].env_name is None
    assert load(tmp_path, reader.to_yaml(cfg)) == cfg


def test_overrides_of_a_list(tmp_path):
    assert paths(load(tmp_path, TWO, "data.validation.1.data_path=c")) == ["a/x.jsonl", "c"]
    assert paths(load(tmp_path, TWO, "data.validation.data_path=c")) == ["c", "b.jsonl"]
    assert paths(load(tmp_path, "data: {validation: [{data_path: z}]}", parent=TWO)) == ["z"]  # a list is one value
    assert load(tmp_path, "data: {validation: [{data_path: z}]}", parent=TWO).data.validation[0].env_name is None
    assert paths(load(tmp_path, "data: {validation: {data_path: z}}", parent=TWO)) == ["z", "b.jsonl"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {validation: [a.jsonl]}", "expected a list of mappings, got 'a.jsonl' (str) in it"),
        ("data: {validation: a.jsonl}", "data.validation is a section, got 'a.jsonl' (str)"),
        ("data: {validation: [{data_pth: a}]}", "Did you mean 'data.validation.data_path'?"),
        ("data: {validation: [{env_name: 3.5, env_name: b}]}", "data.validation.0.env_name is set again"),
    ],
)
def test_wrong_lists(tmp_path, text, message):
    with pytest.raises(config.ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value) and "run.yaml line 1: " in str(caught.value)


ONE = "data: {validation: {data_path: v.jsonl}}"


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        (
            "data: {validation: [{data_path: a/x.jsonl}, {data_path: b/x.jsonl}]}",
            [],
            "data.validation: 2 sets are called 'x': tell them apart by their key `name`",
        ),
        (
            "data: {validation: [{data_path: a}, {env_name: exact}]}",
            [],
            "data.validation.1.data_path is not set: name a jsonl file, or ask for no validation with "
            "grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false",
        ),
        (
            ONE,
            ["grpo.val_max_new_tokens=400"],
            "grpo.val_max_new_tokens=400 and prompts of 256 tokens do not fit in policy.max_total_sequence_length=512: "
            "raise it to 656, or lower data.max_input_seq_length",
        ),
        (ONE, ["grpo.val_top_p=0"], "grpo.val_top_p=0.0: must be > 0, <= 1 (Sampled validation draws from the "),
        (
            ONE,
            ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_max=0"],
            "grpo.reward_scaling.source_min=0.0 is not below source_max=0.0: exchange them",
        ),
        (
            ONE,
            ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_min=2"],
            "grpo.reward_scaling.target_min=2.0 is not below target_max=1.0: exchange them",
        ),
        (
            ONE,
            ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.max_response_length=300"],
            "grpo.reward_shaping.max_response_length=300 is above policy.generation.max_new_tokens=256: no response "
            "gets there; use 256",
        ),
        (
            ONE,
            ["grpo.reward_shaping.enabled=true", "policy.generation.max_new_tokens=100"],
            "grpo.reward_shaping.overlong_buffer_length=128 is longer than a response of 100 tokens "
            "(grpo.reward_shaping.max_response_length=null, policy.generation.max_new_tokens=100): every response "
            "would be penalized",
        ),
        (
            ONE,
            ["grpo.reward_shaping.enabled=true", "grpo.adv_estimator.name=gdpo"],
            "grpo.reward_shaping.enabled=true has no effect with grpo.adv_estimator.name=gdpo: it reads each reward, "
            "not their shaped sum; set grpo.reward_shaping.enabled=false",
        ),
        (
            ONE,
            ["grpo.batch_multiplier=2"],
            "grpo.batch_multiplier=2.0 has no effect with grpo.use_dynamic_sampling=false: only dynamic sampling draws "
            "spare prompts; set grpo.batch_multiplier=1.0",
        ),
        (
            ONE,
            ["grpo.batch_multiplier=1.3", "grpo.use_dynamic_sampling=true"],
            "grpo.batch_multiplier=1.3 x grpo.num_prompts_per_step=32: 41.6 is not a whole number",
        ),
        (ONE, ["grpo.batch_multiplier=0.5"], "grpo.batch_multiplier=0.5: must be >= 1 (use_dynamic_sampling draws "),
    ],
)
def test_impossible_settings(tmp_path, text, overrides, problem):
    with pytest.raises(config.ConfigError) as caught:
        rules.validate(load(tmp_path, text, *overrides), 1)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(problem) if problem.endswith(" ") else line == problem


def test_nemo_rls_yaml_with_shaping_off_is_accepted(tmp_path):
    """Its files set keys of what is off, max_response_length to the whole sequence among them."""
    off = ["grpo.reward_shaping.max_response_length=512", "grpo.reward_scaling.source_max=0"]
    rules.validate(load(tmp_path, ONE, *off), 1)
