"""eval.py: the numbers of its report. The command itself is in test_fast_run.py."""

import json

import pytest
from samples import answers

from run.validation import accuracy_interval, with_interval


def test_the_numbers_of_a_report():
    samples = [s for _ in range(3) for s in answers("7", "5", "7", "7")]
    for i, sample in enumerate(samples):
        sample.prompt = i // 4
    samples[0].outcome, samples[1].outcome = "wrong", "wrong"
    report = with_interval(samples)
    assert (report["num_problems"], report["num_samples"], report["num_right"]) == (3, 12, 8)
    assert report["accuracy_ci95"] == accuracy_interval([0.5, 0.75, 0.75], 12)
    greedy = json.loads(json.dumps(with_interval([s for s in samples if s.index == 0])))
    assert greedy["accuracy_ci95"] == list(accuracy_interval([0.0, 1.0, 1.0], 3))
    assert greedy["accuracy"] == pytest.approx(2 / 3)
