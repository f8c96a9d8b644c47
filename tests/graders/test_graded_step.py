"""A step whose graders hang, crash, fork or answer far too much: it ends in time, and every outcome is counted."""

import time
from collections import Counter

import pytest
from fakes import FakeEngine, FakeTokenizer
from processes import children

import envs
from data import Problem
from engine import SamplingOptions
from graders.pool import GraderPool
from rollout import Sampler
from system.exits import StopRun

DEADLINE = 2.0
JOBS = {  # what the row's answer asks of the grader (tests/helpers/grader_targets.py) -> the outcome of the sample
    "double": "ok",
    "hang": "timeout",
    "deaf": "timeout",
    "raise": "error",
    "os exit": "error",
    "segfault": "error",
    "memory": "error",
    "gigabyte": "error",
    "daemon": "ok",
    "daemon and hang": "timeout",
}


class Hostile(envs.Environment):
    """Has every reply graded by the job that its row names."""

    def __init__(self, folder):
        self.folder = folder
        self.pool = GraderPool("grader_targets:run", num_workers=4, deadline_s=DEADLINE, memory_mib=1024)

    def step(self, turns):
        values = {"double": 1, "gigabyte": 1 << 30}
        jobs = [
            (turn.answer, values.get(turn.answer, f"{self.folder}/{i}" if "daemon" in turn.answer else "x"))
            for i, turn in enumerate(turns)
        ]
        graded = self.pool.grade(jobs)
        return [envs.StepResult(float(each.outcome == "ok"), each.outcome) for each in graded]


@pytest.fixture
def environment(tmp_path):
    environment = Hostile(tmp_path)
    yield environment
    environment.pool.close()


def rows(names):
    return [
        (i, Problem(i, [{"role": "user", "content": "?"}], name, "hostile", [1, 2])) for i, name in enumerate(names)
    ]


def graded(environment, names, ranks, max_error_fraction=1.0):
    """A sample for each row, which the environment has graded."""
    sampler = Sampler(
        FakeEngine(), FakeTokenizer(), {"hostile": environment}, ranks, max_error_fraction=max_error_fraction
    )
    return sampler.sample(rows(names), 1, SamplingOptions(1.0, 4), (0,))


def test_step_ends_and_counts(environment, one_rank):
    before = len(children())
    start = time.monotonic()
    samples = graded(environment, JOBS, one_rank[0])
    seconds = time.monotonic() - start
    assert [s.outcome for s in samples] == [outcome for outcome in JOBS.values()]
    assert Counter(s.reward for s in samples) == {1.0: 2, 0.0: 8}
    num_late = Counter(JOBS.values())["timeout"]
    assert seconds < DEADLINE * (num_late / 4 + 1) + 10, (
        "deadlines, over 4 workers; and what it takes to start new ones"
    )
    assert len(children()) == before, "as many workers as before, and nothing that they started"


def test_errors_above_the_bound_end_the_run(environment, one_rank):
    names = ["double", "raise", "raise", "double"]
    with pytest.raises(StopRun, match=r"2 of 4 answers could not be graded \({'hostile': 2}\), more than"):
        graded(environment, names, one_rank[0], max_error_fraction=0.3)
    assert len(graded(environment, names, one_rank[0], max_error_fraction=0.5)) == 4
