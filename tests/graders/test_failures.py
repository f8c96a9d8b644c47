"""When failures of a step stop the run."""

import pytest

from base.graders.failures import Failures
from base.system.exits import StopRun
from records import Grade, Sample, TokenSequence


def samples_of(**outcomes):
    """Of each agent, rollouts that end so, by the first letter: o, c, e or w."""
    names = {"o": "ok", "c": "crashed", "e": "error", "w": "wrong"}
    samples = []
    for agent, letters in outcomes.items():
        for index, letter in enumerate(letters):
            message = f"why {index}" if letter in "ce" else ""
            grade = Grade(0.0, names[letter], message=message)
            samples.append(Sample(0, index, 0, [TokenSequence([1])], grade=grade, env_name=agent, by_agent=True))
    return samples


@pytest.mark.parametrize(
    ("steps", "stops"),
    [
        ([{"a": "cc"}], False),
        ([{"a": "cc"}, {"a": "cc"}], True),
        ([{"a": "cc"}, {"a": "co"}, {"a": "cc"}], False),
        ([{"a": "cw"}, {"a": "cc"}], False),
        ([{"a": "cc", "b": "oo"}, {"a": "cc", "b": "oo"}], True),
        ([{"a": "cc", "b": "oo"}, {"a": "oo", "b": "cc"}], False),
        ([{"a": "cc"}, {"b": "oo"}, {"a": "cc"}], True),  # no rollout of it in the step between
        ([{"a": "ce"}, {"a": "ce"}], False),
    ],
)
def test_an_agent_that_only_crashes_in_two_steps_running_stops_the_run(steps, stops):
    failures = Failures(1.0, 1.0)
    for step in steps[:-1]:
        failures.check(samples_of(**step), [], is_training=True)
        failures.check(samples_of(a="cc"), [], is_training=False)  # a validation is no step
    if not stops:
        failures.check(samples_of(**steps[-1]), [], is_training=True)
        return
    with pytest.raises(StopRun, match=r"two steps running.*a: why 0"):
        failures.check(samples_of(**steps[-1]), [], is_training=True)


def test_crashes_and_errors_have_bounds_of_their_own(one_rank):
    some = samples_of(a="ccoooooo", b="eooooooo")
    Failures(1 / 16, 2 / 16).check(some, [], is_training=True)
    with pytest.raises(StopRun, match=r"1 of 16 .*env.max_error_fraction=0.05: b: why 0"):
        Failures(0.05, 1.0).check(some, [], is_training=True)
    with pytest.raises(StopRun, match=r"env.max_error_fraction=0.05: b raised it"):
        Failures(0.05, 1.0).check(some, ["b raised it"], is_training=True)
    with pytest.raises(StopRun, match=r"2 of 16 .*env.max_crashed_fraction=0.1: a: why 0"):
        Failures(1.0, 0.1).check(some, [], is_training=False)
