"""The simulation of bench/async_sim.py: its engine against one that counts tokens, its pacing on worked cases."""

from dataclasses import replace

import numpy as np
import pytest

from bench import async_sim
from bench.async_sim import Engine, Job, simulate

JOB = Job("worked", 2, 1, 4, 10, 20, 1.0, 0, 6, 1, 1)  # 2 GPUs, 4 samples a step, training 6 s, 1 s of sync


def token_by_token(lengths, slots, floor, cost):
    """Seconds after which each request ends: every decode step is one turn of a loop."""
    left, waiting, running, clock, ended = list(lengths), list(range(len(lengths))), [], 0.0, {}
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        clock += floor + cost * len(running)
        for request in [request for request in running if left[request] == 1]:
            running.remove(request)
            ended[request] = clock
        left = [n - (i in running or i in ended) for i, n in enumerate(left)]
    return [ended[i] for i in range(len(lengths))]


def test_an_engine_takes_the_seconds_of_its_decode_steps():
    lengths = np.random.default_rng(0).geometric(0.05, 60)
    ends = token_by_token(lengths, 8, 0.5, 0.25)
    engine = Engine(8, 0.5, 0.25)
    for step in range(3):
        engine.begin(step, lengths[20 * step : 20 * step + 20])
    for step in range(3):
        assert engine.run(step) == pytest.approx(max(ends[20 * step : 20 * step + 20]))
    assert engine.run(until=1000) == 1000 and engine.idle == pytest.approx(1000 - max(ends))
    halted = Engine(8, 0.5, 0.25)
    halted.begin(0, lengths)
    for until in np.arange(0.3, max(ends), 0.7):  # stopped amid decode steps, as a weight sync does
        halted.run(until=until)
    assert halted.run(0) == pytest.approx(max(ends))


@pytest.fixture
def lengths(monkeypatch):
    """Two engines of two samples: the first has the long one, of 20 tokens; all others have 10."""
    monkeypatch.setattr(async_sim, "lengths_of", lambda _: np.array([[20, 10, 10, 10]] * (async_sim.NUM_STEPS + 9)))


def test_seconds_of_a_step_by_hand(lengths):
    """A decode step takes a second, however many run; one GPU of two trains for 6 * 2^0.6 = 9.09 s."""
    training = 6 * 2**async_sim.SCALING
    assert simulate(JOB, 0.0, 0) == pytest.approx(
        {"step": 20 + 6 + 1, "generation": 20, "generators idle": 5 / 27, "trainers idle": 20 / 27}
    )
    carried = simulate(JOB, 0.0, 1)  # the long one begins where the short one of the step before has ended
    assert carried["step"] < 27 and carried["generation"] == pytest.approx(carried["step"] - 7)
    # A batch begins with the weights of two steps before it is trained, and the sync between stops it for a second: two
    # steps have the 20 s of the long one, two syncs and one training.
    split = simulate(JOB, 0.0, 1, generators=1)
    step = (20 + 1 + training + 1) / 2
    assert split["step"] == pytest.approx(step) and split["trainers idle"] == pytest.approx(1 - (training + 1) / step)
    slow = simulate(replace(JOB, training=60), 0.0, 1, generators=1)
    assert slow["step"] == pytest.approx(60 * 2**async_sim.SCALING + 1) and slow["trainers idle"] == 0
    assert slow["generators idle"] > 0.7


def test_the_bound_on_the_age_is_what_a_long_response_waits_for(lengths):
    """With a longer window the generator works ahead: as fast as its places allow, the trainer never waits."""
    crowded = replace(JOB, training=8)
    seconds = [simulate(crowded, 0.2, age, generators=1)["step"] for age in (1, 2, 4)]
    assert seconds[0] >= seconds[1] >= seconds[2]


def test_the_cost_is_that_of_the_published_generation():
    job = replace(async_sim.LLAMA, samples=64, generation=60.0, longest=2000)
    assert simulate(job, async_sim.cost_of(job), 0)["generation"] == pytest.approx(60, rel=0.01)
