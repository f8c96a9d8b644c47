"""The rules of run/health.py: both sides of each threshold by hand, and what real runs fire."""

import re
from pathlib import Path

import numpy as np
import pytest
from health_runs import HEALTHY, SICK, fired, kept, training_steps

import config
from run import health
from run.health import Health
from run.log import RunLog

ROOT = Path(__file__).resolve().parents[2]
FAQ = (ROOT / "docs" / "faq.md").read_text()
NAMES = [rule.__name__ for rule in health.RULES]
NAN, INF = float("nan"), float("inf")
FLAT = {"advantages/min": 0.0, "advantages/max": 0.0, "zero_variance_fraction": 1.0, "grad_norm": 0.0}
WELL = {
    **{"reward": 0.5, "accuracy": 0.5, "outcome/wrong": 0.5, "outcome/parse_fail": 0.0, "truncation_rate": 0.0},
    **{"outcome/timeout": 0.0, "outcome/error": 0.0},
    **{"advantages/min": -1.0, "advantages/max": 1.0, "zero_variance_fraction": 0.25, "grad_norm": 0.5},
    **{"entropy": 0.15, "logp_gap_mean": 1e-3, "ratio_clip_low_fraction": 0.0, "ratio_clip_high_fraction": 0.0},
    **{"gradient/largest_group_share": 0.2, "gradient/num_groups": 12, "advantage_abs_max": 1.0, "lr": 0.5},
}


def well(count, **changes):
    return [WELL | {name.replace("__", "/"): value for name, value in changes.items()} for _ in range(count)]


def flat(count, **changes):
    return [step | FLAT for step in well(count, **changes)]


def wobbling(count, low, high):
    """The last is `high`."""
    return [step for i in range(count) for step in well(1, reward=(low, high)[(count - i) % 2])]


EDGES = [  # (rule, whether it holds after the last of these steps, the steps): both sides of each threshold
    ("logp_gap_grows", True, well(5) + well(5, logp_gap_mean=0.021)),
    ("logp_gap_grows", True, well(5, logp_gap_mean=0.02) + well(5, logp_gap_mean=0.061)),
    ("logp_gap_grows", False, well(5) + well(5, logp_gap_mean=0.0199)),
    ("logp_gap_grows", False, well(5, logp_gap_mean=0.02) + well(5, logp_gap_mean=0.059)),
    ("gradient_explodes", True, well(5) + well(5, grad_norm=15.01)),
    ("gradient_explodes", True, well(5) + well(2) + well(3, grad_norm=NAN)),
    ("gradient_explodes", True, well(9) + well(3, grad_norm=INF)),
    ("gradient_explodes", True, well(5, grad_norm=0.01) + well(5, grad_norm=1.01)),
    ("gradient_explodes", False, well(5) + well(5, grad_norm=14.99)),
    ("gradient_explodes", False, well(5, grad_norm=0.01) + well(5, grad_norm=0.99)),
    ("gradient_explodes", False, well(8) + well(2, grad_norm=99)),
    ("many_clipped", True, well(1) + well(5, ratio_clip_low_fraction=0.2, ratio_clip_high_fraction=0.01)),
    ("many_clipped", False, well(1) + well(5, ratio_clip_low_fraction=0.1, ratio_clip_high_fraction=0.09)),
    ("many_clipped", False, well(4, ratio_clip_low_fraction=1)),
    ("reward_fell", True, well(10) + well(10, reward=0.24)),
    ("reward_fell", True, well(10, reward=-0.2) + well(10, reward=-0.31)),
    ("reward_fell", True, well(1) + flat(3, reward=0.24)),
    ("reward_fell", True, well(1) + flat(3, reward=0.0) + flat(20, reward=0.0)),
    ("reward_fell", True, well(1, zero_variance_fraction=0.6) + flat(3, reward=0.0)),
    ("reward_fell", True, wobbling(10, 0.3, 0.7) + wobbling(10, 0.1, 0.2)),
    ("reward_fell", False, well(10) + well(10, reward=0.26)),
    ("reward_fell", False, well(10, reward=-0.2) + well(10, reward=-0.29)),
    ("reward_fell", False, well(10) + well(9, reward=0.0)),
    ("reward_fell", False, well(3) + flat(2, reward=0.0)),
    ("reward_fell", False, well(1) + flat(3, reward=0.26)),
    ("reward_fell", False, well(1, zero_variance_fraction=0.61) + flat(3, reward=0.0)),
    ("reward_fell", False, wobbling(10, 0.3, 0.7) + wobbling(10, 0.0, 0.4)),
    ("one_group", True, well(1, gradient__largest_group_share=0.51)),
    ("one_group", True, well(3) + well(1, gradient__largest_group_share=0.99, gradient__num_groups=8)),
    ("one_group", False, well(3) + well(1, gradient__largest_group_share=0.99, gradient__num_groups=7)),
    ("one_group", False, well(3) + well(1, gradient__largest_group_share=0.5)),
    ("one_group", False, well(1, gradient__largest_group_share=0.51) + well(1)),
    ("truncated", True, well(3) + well(3, truncation_rate=0.9)),
    ("truncated", False, well(3) + well(3, truncation_rate=0.89)),
    ("truncated", False, well(1, truncation_rate=0.8) + well(2, truncation_rate=1.0)),
    ("truncated", False, well(2, truncation_rate=1.0)),
    ("parse_fail", True, well(3) + well(3, outcome__parse_fail=0.9)),
    ("parse_fail", False, well(3) + well(3, outcome__parse_fail=0.89)),
    ("parse_fail", False, well(2, outcome__parse_fail=1.0)),
    ("parse_fail", False, well(3) + well(3, outcome__parse_fail=1.0, truncation_rate=0.9)),
    ("entropy_gone", True, well(3) + well(5, entropy=0.0049)),
    ("entropy_gone", True, well(5, entropy=0.0, accuracy=0.89)),
    ("entropy_gone", False, well(3) + well(5, entropy=0.0051)),
    ("entropy_gone", False, well(5, entropy=0.0, accuracy=0.9)),
    ("entropy_gone", False, well(4, entropy=0.0)),
    ("no_gradient", True, flat(5)),
    ("no_gradient", True, well(5) + flat(5)),
    ("no_gradient", True, well(5) + flat(5, accuracy=0.89)),
    ("no_gradient", True, flat(9, accuracy=1.0)),
    ("no_gradient", False, flat(4)),
    ("no_gradient", False, well(5) + flat(4)),
    ("no_gradient", False, well(5) + flat(5, accuracy=0.9)),
    ("no_gradient", False, flat(2) + well(1) + flat(4)),
    ("no_gradient", False, well(9, grad_norm=0.0)),
    ("few_groups", True, well(9) + well(30, zero_variance_fraction=0.86)),
    ("few_groups", True, well(30, zero_variance_fraction=0.86, accuracy=0.89)),
    ("few_groups", False, well(30, zero_variance_fraction=0.84)),
    ("few_groups", False, well(29, zero_variance_fraction=1.0)),
    ("few_groups", False, well(30, zero_variance_fraction=0.95, accuracy=0.91)),
]


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_of_a_threshold(name):
    edges = [(holds, steps) for rule, holds, steps in EDGES if rule == name]
    assert {holds for holds, _ in edges} == {True, False}
    for holds, steps in edges:
        said = getattr(health, name)(steps)
        assert bool(said) == holds and "nan" not in said, steps


@pytest.mark.parametrize("value", [NAN, None])
def test_what_is_not_there_fires_nothing(value):
    """A NaN, or a metric that a fork has taken out: but a gradient that is NaN has exploded."""
    for missing in health.READ:
        steps = well(30)
        for step in steps[7:]:
            step[missing] = value
        if value is None:
            steps = [{k: v for k, v in step.items() if v is not None} for step in steps]
        assert set(fired(steps)) <= ({"gradient_explodes"} if missing == "grad_norm" else set()), missing
    assert fired([{}] * 30 if value is None else [dict.fromkeys(health.READ, NAN)] * 30) == {}
    assert fired([dict.fromkeys(health.READ, INF)] * 30).keys() <= set(NAMES)  # nonsense, but no exception


def test_a_solved_task_is_not_sick():
    """Right everywhere, so without a gradient. A reward that never differed is another thing, whatever it is."""
    assert fired(well(5) + flat(5, accuracy=1.0, reward=1.0, entropy=0.0)) == {"solved": 10}
    assert fired(flat(9, accuracy=1.0, reward=1.0)) == {"no_gradient": 5}
    assert fired(well(5) + flat(9, accuracy=0.5)) == {"no_gradient": 10}


def test_noise_is_no_fall():
    """A policy that stays as it is: 8 prompts x 8 samples, a tenth or a third of them right, none of 20 runs in 100
    steps."""
    random = np.random.default_rng(0)
    for share in (0.1, 0.3):
        for _ in range(20):
            right_SP = random.binomial(8, random.beta(share, 1 - share, (100, 8)))
            equal_S = ((right_SP == 0) | (right_SP == 8)).mean(1)
            steps = [step for reward in right_SP.mean(1) / 8 for step in well(1, reward=reward, accuracy=reward)]
            for step, equal in zip(steps, equal_S, strict=True):
                step |= FLAT if equal == 1 else {"zero_variance_fraction": equal}
            assert not any(health.reward_fell(steps[:n]) for n in range(1, 101))


@pytest.mark.parametrize("name", [*HEALTHY, "smollm2"])
def test_healthy_runs_fire_nothing(name):
    steps = kept(name)
    assert len(steps) >= 60 and fired(steps).keys() <= {"solved"}


@pytest.mark.parametrize(("name", "count"), [("rate_0.05", 2), ("rate_10", 3), ("unbounded_reward", 0), ("no_box", 0)])
def test_what_follows_a_fall_of_the_reward_leads_back_to_it(name, count):
    report = Health()
    lines = [line for number, step in enumerate(kept(name), 1) for line in report.add(number, step)[1]]
    follow = [line for line in lines if line.endswith(" (after reward_fell: read that first)")]
    assert len(follow) == count and not any(line.startswith("health: reward_fell") for line in follow)


@pytest.mark.parametrize("name", SICK)
def test_sick_runs_fire_their_rule_first(name):
    assert next(iter(fired(kept(name)))) == SICK[name][0]


def test_each_rule_has_a_sick_run_and_a_place_in_the_docs():
    assert {first for first, _ in SICK.values()} == set(NAMES) == {rule for rule, *_ in EDGES}
    assert {*NAMES, "solved"} <= set(re.findall(r"^### (.+)$", FAQ, re.MULTILINE))


# ---------------------------------------------------------------------------------------------------------- in a run


SECONDS = dict.fromkeys(("generation", "data_processing", "policy_training", "prepare_for_generation"), 0.1)
SECONDS["total_step_time"] = 1.0


def write(folder, steps, first=1):
    log = RunLog(folder, config.LoggerConfig(tensorboard_enabled=False), first_step=first, num_steps=len(steps))
    for number, step in enumerate(steps, 1):
        if number >= first:
            train = {"loss": 0.0, "logp_gap_max": 0.0, "train_tokens": 1, "unshaped_reward": step["reward"], **step}
            log.step(number, train, SECONDS, {"performance/tokens_per_sec": 1.0})
    return log


def values(folder):
    return [{k: v for k, v in step.items() if "health" in k} for step in training_steps(folder / "metrics.jsonl")]


def test_console_metrics_and_table(tmp_path, capsys):
    steps = well(1) + flat(8, reward=0.0, accuracy=0.0, outcome__wrong=0.75, outcome__parse_fail=0.25)
    steps[2]["lr"] = 2.5
    log = write(tmp_path, steps)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("health")] == [lines[4], lines[7]]
    assert lines[4] == (
        "health: reward_fell: reward 0.000, at first 0.500: nearly always because the learning rate is too high, "
        "here train/lr 2.5 (docs/faq.md#reward_fell)"
    )
    assert lines[7].startswith(
        "health: no_gradient: 5 steps without a gradient: no group's rewards differ (accuracy 0%,"
    )
    assert "wrong 75%, parse_fail 25%" in lines[7] and "samples.jsonl" in lines[7]
    assert lines[7].endswith("(docs/faq.md#no_gradient) (after reward_fell: read that first)")
    assert [step["health/reward_fell"] for step in values(tmp_path)] == [0.0] * 3 + [1.0] * 6
    assert [step["health/no_gradient"] for step in values(tmp_path)] == [0.0] * 5 + [1.0] * 4
    assert all(step.keys() == {f"health/{name}" for name in NAMES} for step in values(tmp_path))
    assert log.health.summary() == "reward_fell (6 of steps 4-9), no_gradient (4 of steps 6-9): see docs/faq.md"


def test_a_resumed_run_goes_on_with_its_history(tmp_path, capsys):
    """Its values are the unbroken run's, and what has been said is not said again."""
    steps = kept("wrong_answers")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    summary = write(whole, steps).health.summary()
    for first in (4, 12):  # before and after it is said
        write(cut, steps[:14])
        capsys.readouterr()
        log = write(cut, steps, first=first)
        assert values(cut) == values(whole) and log.health.summary() == summary
        assert ("health: " in capsys.readouterr().out) == (first == 4)
        (cut / "metrics.jsonl").unlink()


def test_what_comes_and_goes_is_not_said_each_time():
    report, said = Health(), []
    for number, step in enumerate(
        3 * (well(4) + well(3, truncation_rate=1.0)) + well(9) + well(3, truncation_rate=1.0), 1
    ):
        said += [number] * len(report.add(number, step)[1])
    assert said == [7, 33]
    assert report.summary() == "truncated (4 of steps 7-33): see docs/faq.md"
