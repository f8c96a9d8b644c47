"""Validation: the estimators against enumeration and worked examples, names, options, several sets."""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import FakeEngine, FakeTokenizer
from samples import answers

import config
import envs
from base.inputs.run_inputs import RunInputs
from base.inputs.scan import Dataset
from base.system.ranks import Ranks
from metrics import accuracy_interval, majority, pass_at_k, summarize
from records import Problem, SamplingOptions
from rollout import Sampler
from run.job import RunState
from run.validation import modes, validate

ALONE = Ranks(rank=0, world_size=1, local_rank=0, tp_size=1)


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
    samples[1].grade.outcome = "wrong"
    assert majority(samples) == 0.5


def test_equal_numbers_are_one_vote():
    grader = envs.Exact()
    replies = ["1,234", "#### $1234.0", "+1234.00", "-0", "0.0", "-.5", "-2.50", "1" * 40, "1" * 39 + "2", "many"]
    verdicts = grader.step([envs.Turn([{"role": "assistant", "content": reply}], "1", "stop") for reply in replies])
    expected = ["1234", "1234", "1234", "0", "0", None, "-2.5", "1" * 40, "1" * 39 + "2", None]
    assert [verdict.extracted for verdict in verdicts] == expected
    cut = grader.grade(envs.Turn([{"role": "assistant", "content": "12"}], "1", "length"))
    assert cut.extracted is None


def test_interval_of_one_sample_each_is_wilsons():
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, size, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        means = [1.0] * right + [0.0] * (size - right)
        assert accuracy_interval(means, size) == pytest.approx((low, high), abs=5e-5)


def test_interval_of_several_samples_each():
    """Alike samples tell as much as one; independent ones tell as much as their number; in between, 95 times in 100 the
    interval holds the truth."""
    alike = [1.0] * 30 + [0.0] * 70
    assert accuracy_interval(alike, 400) == pytest.approx(accuracy_interval(alike, 100))
    assert accuracy_interval([0.5, 0.75, 0.75], 12) == pytest.approx(accuracy_interval([1.0] * 8 + [0.0] * 4, 12))
    rng, hits = np.random.default_rng(0), 0
    for _ in range(2000):
        chance_P = rng.uniform(size=100)
        low, high = accuracy_interval((rng.uniform(size=(100, 4)) < chance_P[:, None]).mean(1).tolist(), 400)
        hits += low < 0.5 < high
    assert 0.93 < hits / 2000 < 0.965


# ------------------------------------------------------------------------------------------------ numbers of a set


def test_score_by_hand():
    """Six samples of two problems: k = 1, 2, 4 and 6."""
    problems = [answers("7", "5", "7", "7", "5", None), answers("5", "5", "7", "5", "5", "5")]
    problems[0][3].finish_reason = "length"
    low, high = accuracy_interval([3 / 6, 1 / 6], 12)
    assert summarize(problems) == {
        "accuracy": pytest.approx(4 / 12),
        "accuracy_ci95_low": pytest.approx(low),
        "accuracy_ci95_high": pytest.approx(high),
        "num_problems": 2,
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
    assert not any("_at_" in name for name in summarize([answers("7")]))


# -------------------------------------------------------------------------------------------------------- validate


def inputs_of(**sizes):
    """Validation sets of so many problems, whose answers are 7."""
    rows = [Problem(i, [{"role": "user", "content": "?"}], "7", "exact", [1, 2]) for i in range(50)]
    sets = {name: Dataset(f"{name}.jsonl", rows[:size], "", name) for name, size in sizes.items()}
    return RunInputs(Path(), None, FakeTokenizer(), None, sets, {"exact": envs.Exact()})


def config_of(**grpo):
    return config.Config(grpo=config.GRPOConfig(**grpo))


def validated(cfg, inputs, engine=None, step=1, log=None, state=None):
    """The state of a run after it validated at this step."""
    sampler = Sampler(engine or FakeEngine(), inputs.tokenizer, inputs.environments, ALONE)
    run = SimpleNamespace(cfg=cfg, inputs=inputs, sampler=sampler, log=log)
    run.watchdog = SimpleNamespace(enter=lambda phase: None)
    run.state = state or RunState(cursor={}, fingerprints={}, step=step)
    validate(run)
    return run.state


def test_one_set_keeps_the_short_names(one_rank):
    cfg = config_of(max_val_samples=6, val_num_generations_per_prompt=4)
    values = validated(cfg, inputs_of(held=50)).last_validation
    assert values["validation/greedy/accuracy"] == 1.0 and 0 < values["validation/sampled/accuracy"] < 1
    sampled = {name.removeprefix("validation/sampled/") for name in values if name.startswith("validation/sampled/")}
    assert {"pass_at_1", "pass_at_2", "pass_at_4", "maj_at_2", "maj_at_4", "avg_length", "reward"} <= sampled
    assert values["validation/sampled/pass_at_1"] == pytest.approx(values["validation/sampled/accuracy"])
    assert not any("held" in name for name in values)
    ends = [values[f"validation/greedy/accuracy_ci95_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx(accuracy_interval([1.0] * 6, 6)) and values["validation/greedy/num_problems"] == 6


def test_several_sets_have_their_names_in_front(one_rank):
    values = validated(config_of(), inputs_of(easy=3, hard=2)).last_validation
    accuracies = {name for name in values if name.endswith("/accuracy")}
    sets, kinds = ("easy", "hard"), ("greedy", "sampled")
    of_sets = {f"validation/{name}/{kind}/accuracy" for name in sets for kind in kinds}
    assert accuracies == of_sets | {f"validation/{kind}/accuracy" for kind in kinds}
    for name in ("greedy/accuracy", "sampled/accuracy", "sampled/avg_length"):  # all five problems together
        joint = (3 * values[f"validation/easy/{name}"] + 2 * values[f"validation/hard/{name}"]) / 5
        assert values[f"validation/{name}"] == pytest.approx(joint)
    counts = [values[f"validation/{name}greedy/num_problems"] for name in ("easy/", "hard/", "")]
    ends = [values[f"validation/greedy/accuracy_ci95_{end}"] for end in ("low", "high")]
    assert counts == [3, 2, 5] and ends == pytest.approx(accuracy_interval([1.0] * 5, 5))
    assert validated(config_of(), inputs_of()).last_validation == {}


def test_options_reach_the_engine(one_rank):
    engine = FakeEngine()
    validated(config_of(max_val_samples=2, val_num_generations_per_prompt=3), inputs_of(held=50), engine)
    greedy, sampled = SamplingOptions(0.0, 256), SamplingOptions(1.0, 256)
    assert [request.options for request in engine.started] == [greedy] * 2 + [sampled] * 6
    assert (sampled.top_p, sampled.top_k) == (1.0, None)
    of_validation = {"val_temperature": 0.6, "val_top_p": 0.95, "val_top_k": 20, "val_max_new_tokens": 40}
    assert modes(config_of(**of_validation)) == {
        "greedy": (1, SamplingOptions(temperature=0.0, max_new_tokens=40)),
        "sampled": (1, SamplingOptions(temperature=0.6, max_new_tokens=40, top_p=0.95, top_k=20)),
    }
    cfg = config_of()  # null is what training does, and there is a word for no filter
    cfg = replace(cfg, policy=replace(cfg.policy, generation=replace(cfg.policy.generation, top_p=0.8, top_k=7)))
    assert modes(cfg)["sampled"][1] == SamplingOptions(1.0, 256, 0.8, 7)
    cfg = replace(cfg, grpo=replace(cfg.grpo, val_top_p=1.0, val_top_k=0))
    assert modes(cfg)["sampled"][1] == SamplingOptions(1.0, 256, 1.0, 0)


def test_the_first_validation_is_kept_beside_the_last(one_rank):
    before = validated(config_of(), inputs_of(held=2), step=0)
    assert before.first_validation["validation/greedy/accuracy"] == 1.0 and before.last_validation == {}
    after = validated(config_of(), inputs_of(held=2), step=1)
    assert after.last_validation["validation/greedy/accuracy"] == 1.0 and after.first_validation == {}
