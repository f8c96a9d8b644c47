"""eval.py: the numbers of its report. The command itself is in test_fast_run.py."""

import json

import pytest
from samples import answers

from run.validation import clustered_interval, wilson_interval, with_interval


def test_the_numbers_of_a_report():
    samples = [s for _ in range(3) for s in answers("7", "5", "7", "7")]
    for i, sample in enumerate(samples):
        sample.prompt = i // 4
    samples[0].outcome, samples[1].outcome = "wrong", "wrong"
    report = with_interval(samples, "sampled")
    assert (report["num_problems"], report["num_samples"], report["num_right"]) == (3, 12, 8)
    assert report["accuracy_ci95"] == clustered_interval([0.5, 0.75, 0.75])
    greedy = with_interval([s for s in samples if s.index == 0], "greedy")
    assert greedy["accuracy_ci95"] == wilson_interval(2, 3) and greedy["accuracy"] == pytest.approx(2 / 3)
    assert json.loads(json.dumps(greedy))["ci_method"] == "wilson"
