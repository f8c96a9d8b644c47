"""validation.py and eval.py: the estimators against enumeration and worked examples, names, options, several sets."""

import json
import math
from itertools import combinations, product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from fakes import FakeEngine, FakeTokenizer
from validation import clustered_interval, majority, modes, pass_at_k, score, validate, wilson_interval

import config
import envs
from data import Problem, Sample
from dataset.scan import Dataset
from run import config_check, config_file
from run.preflight import RunInputs
from system.ranks import Ranks

ALONE = Ranks(rank=0, world_size=1, local_rank=0, tp_size=1)


def answers(*given, right="7"):
    """One problem's samples by their answers; None: no answer was found."""
    samples = []
    for i, answer in enumerate(given):
        outcome = "parse_fail" if answer is None else "ok" if answer == right else "wrong"
        ids, logps = np.zeros(2 + i, np.int32), np.zeros(2 + i, np.float32)
        samples.append(Sample(0, i, 0, [1], ids, logps, ids == 0, "stop", 0, float(outcome == "ok"), outcome))
        samples[-1].extracted = answer
    return samples


# ------------------------------------------------------------------------------------------------------ estimators


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for size in range(1, 8):
        for right, k in product(range(size + 1), range(1, size + 1)):
            subsets = list(combinations([True] * right + [False] * (size - right), k))
            assert pass_at_k(size, right, k) == pytest.approx(fmean(map(any, subsets)), abs=1e-15), (size, right, k)


def test_pass_at_k_of_large_numbers_is_exact():
    assert pass_at_k(10_000, 1, 5_000) == 0.5 and pass_at_k(10_000, 9_999, 2) == 1
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - (100 * 99 * 98) / (200 * 199 * 198), rel=1e-14)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["7", "7", "5"], 1),
        (["5", "7", "5"], 0),
        (["5", "7"], 1 / 2),  # a tie: the right one is drawn every other time
        (["7", "5"], 1 / 2),  # whoever came first
        (["5", "7", "6"], 1 / 3),
        (["7", "7", "5", "5", "6"], 1 / 2),
        ([None, None, None, "7"], 1),  # no answer is no vote
        ([None, None, "5", "7"], 1 / 2),
        ([None, None], 0),
    ],
)
def test_majority(given, expected):
    assert majority(answers(*given)) == pytest.approx(expected)


def test_majority_of_an_answer_graded_both_ways_is_its_share():
    samples = answers("7", "7", "5")
    samples[1].outcome = "wrong"
    assert majority(samples) == 0.5


def test_equal_numbers_are_one_vote():
    grader = envs.Exact()
    replies = ["1,234", "#### $1234.0", "+1234.00", "-0", "0.0", "-.5", "-2.50", "1" * 40, "1" * 39 + "2", "many"]
    verdicts = grader.step([envs.Turn([{"role": "assistant", "content": reply}], "1", "stop") for reply in replies])
    expected = ["1234", "1234", "1234", "0", "0", None, "-2.5", "1" * 40, "1" * 39 + "2", None]
    assert [verdict.extracted for verdict in verdicts] == expected
    cut = grader.grade(envs.Turn([{"role": "assistant", "content": "12"}], "1", "length"))
    assert cut.extracted is None


def test_wilson_interval_worked():
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, size, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson_interval(right, size) == pytest.approx((low, high), abs=5e-5)


def test_clustered_interval_worked():
    """Means .25, .5, .75, 1: mean .625, s = sqrt(5/48), half width 1.959964 s / 2 = .31630; the upper end is cut."""
    half = 1.959964 * math.sqrt(5 / 48) / 2
    assert clustered_interval([0.25, 0.5, 0.75, 1.0]) == pytest.approx((0.625 - half, 0.625 + half))
    assert half == pytest.approx(0.316291, abs=1e-5)
    assert clustered_interval([1.0, 0.5]) == (pytest.approx(0.75 - 1.959964 * 0.25), 1.0)
    assert clustered_interval([0.5]) is None


def test_clustered_interval_covers():
    """Per-problem chances spread over [0, 1], 4 samples of each: the interval holds the truth 95 times in 100."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(2000):
        chance_P = rng.uniform(size=100)
        low, high = clustered_interval((rng.uniform(size=(100, 4)) < chance_P[:, None]).mean(1).tolist())
        hits += low < 0.5 < high
    assert 0.93 < hits / 2000 < 0.965


# ----------------------------------------------------------------------------------------------------------- score


def test_score_by_hand():
    """Six samples of two problems: k = 1, 2, 4 and 6."""
    problems = [answers("7", "5", "7", "7", "5", None), answers("5", "5", "7", "5", "5", "5")]
    samples = [s for prompt, group in enumerate(problems) for s in group]
    for i, sample in enumerate(samples):
        sample.prompt = i // 6
    samples[3].finish_reason = "length"
    assert score(samples) == {
        "accuracy": pytest.approx(4 / 12),
        "reward": pytest.approx(4 / 12),
        "avg_length": pytest.approx(4.5),
        "truncation_rate": pytest.approx(1 / 12),
        "outcome/parse_fail": pytest.approx(1 / 12),
        "pass_at_1": pytest.approx((3 / 6 + 1 / 6) / 2),
        "pass_at_2": pytest.approx((1 - 3 / 15 + 1 - 10 / 15) / 2),
        "pass_at_4": pytest.approx((1 + 1 - 5 / 15) / 2),
        "pass_at_6": 1.0,
        "maj_at_2": pytest.approx((1 / 2 + 0) / 2),
        "maj_at_4": 0.5,
        "maj_at_6": 0.5,
    }


def test_one_sample_has_no_k():
    assert set(score(answers("7"))) == {"accuracy", "reward", "avg_length", "truncation_rate", "outcome/parse_fail"}


# -------------------------------------------------------------------------------------------------------- validate


def inputs_of(**sizes):
    """Validation sets of so many problems, whose answers are 7."""
    rows = [Problem(i, [{"role": "user", "content": "?"}], "7", "exact", [1, 2]) for i in range(50)]
    sets = {name: Dataset(f"{name}.jsonl", rows[:size], "", name) for name, size in sizes.items()}
    return RunInputs(Path(), FakeTokenizer(), None, sets, {"exact": envs.Exact()})


def config_of(**grpo):
    return config.Config(grpo=config.GRPOConfig(**grpo))


def validated(cfg, inputs, engine=None):
    return validate(cfg, inputs, engine or FakeEngine(), ALONE, None, step=1)


def test_one_set_keeps_the_short_names(one_rank):
    values = validated(config_of(max_val_samples=6, val_num_generations_per_prompt=4), inputs_of(held=50))
    assert values["validation/greedy/accuracy"] == 1.0 and 0 < values["validation/sampled/accuracy"] < 1
    sampled = {name.removeprefix("validation/sampled/") for name in values if name.startswith("validation/sampled/")}
    assert {"pass_at_1", "pass_at_2", "pass_at_4", "maj_at_2", "maj_at_4", "avg_length", "reward"} <= sampled
    assert values["validation/sampled/pass_at_1"] == pytest.approx(values["validation/sampled/accuracy"])
    assert not any("held" in name for name in values)


def test_several_sets_have_their_names_in_front(one_rank):
    values = validated(config_of(), inputs_of(easy=3, hard=2))
    accuracies = {name for name in values if name.endswith("/accuracy")}
    sets, kinds = ("easy", "hard"), ("greedy", "sampled")
    assert accuracies == {f"validation/{name}/{kind}/accuracy" for name in sets for kind in kinds}
    assert validated(config_of(), inputs_of()) == {}


def test_options_reach_the_engine(one_rank):
    engine = FakeEngine()
    validated(config_of(max_val_samples=2, val_num_generations_per_prompt=3), inputs_of(held=50), engine)
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 256}
    assert engine.calls == [(2, {"temperature": 0.0, "max_new_tokens": 256}), (6, sampled)]
    own = {"val_temperature": 0.6, "val_top_p": 0.95, "val_top_k": 20, "val_max_new_tokens": 40}
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 40, "num_samples": 1}
    found = modes(config_of(**own))
    assert found["sampled"] == expected
    assert found["greedy"] == {"temperature": 0.0, "max_new_tokens": 40, "num_samples": 1}


def test_eval_report_numbers(one_rank):
    import eval as eval_file

    samples = [s for _ in range(3) for s in answers("7", "5", "7", "7")]
    for i, sample in enumerate(samples):
        sample.prompt = i // 4
    samples[0].outcome, samples[1].outcome = "wrong", "wrong"
    found = eval_file.numbers(samples, "sampled")
    assert (found["num_problems"], found["num_samples"], found["num_right"]) == (3, 12, 8)
    assert found["accuracy_ci95"] == clustered_interval([0.5, 0.75, 0.75])
    greedy = eval_file.numbers([s for s in samples if s.index == 0], "greedy")
    assert greedy["accuracy_ci95"] == wilson_interval(2, 3) and greedy["accuracy"] == pytest.approx(2 / 3)
    assert json.loads(json.dumps(greedy))["ci_method"] == "wilson"


# ---------------------------------------------------------------------------------------------------------- config

TRAIN = ["data.train.data_path=train.jsonl"]


def load(tmp_path, text, *overrides, parent=None):
    if parent is not None:
        (tmp_path / "parent.yaml").write_text(parent)
        text = "defaults: parent.yaml\n" + text
    (tmp_path / "run.yaml").write_text(text)
    return config_file.load(tmp_path / "run.yaml", [*TRAIN, *overrides])


def paths(cfg):
    return [dataset.data_path for dataset in cfg.data.validation]


TWO = "data: {validation: [{data_path: a/x.jsonl, env_name: e}, {data_path: b.jsonl, name: hard}]}"


def test_validation_is_one_mapping_or_a_list(tmp_path):
    assert paths(load(tmp_path, "data: {validation: {data_path: a.jsonl}}")) == ["a.jsonl"]
    cfg = load(tmp_path, TWO)
    assert paths(cfg) == ["a/x.jsonl", "b.jsonl"] and [d.set_name for d in cfg.data.validation] == ["x", "hard"]
    assert cfg.data.validation[0].env_name == "e" and cfg.data.validation[1].env_name is None
    assert load(tmp_path, config_file.to_yaml(cfg)) == cfg


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
            "grpo.batch_multiplier=2.0 and grpo.use_dynamic_sampling=false: only dynamic sampling draws spare prompts",
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
        config_check.validate(load(tmp_path, text, *overrides), 1)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(problem) if problem.endswith(" ") else line == problem


def test_nemo_rls_yaml_with_shaping_off_is_accepted(tmp_path):
    """Its files set keys of what is off, max_response_length to the whole sequence among them."""
    off = ["grpo.reward_shaping.max_response_length=512", "grpo.reward_scaling.source_max=0"]
    config_check.validate(load(tmp_path, ONE, *off), 1)
