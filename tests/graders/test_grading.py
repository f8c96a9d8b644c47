"""Turns are graded while replies are drawn: which environment is called where, by whom, with what."""

import signal
import threading
import time
from pathlib import Path

import pytest
from processes import signal_amid

from base.graders import grading as grading_module
from base.graders.grading import Grading
from base.graders.pool import PoolEnvironment
from base.graders.reward_function import RewardFunction
from base.system.exits import Interrupted, StopRun
from config import ConfigError
from envs import Environment, Exact, StepResult, Turn
from judges.pool import GraderPool, WorkerError


def turn(reply, answer="7"):
    return Turn([{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}], answer, "stop")


def turns_of(*names, reply="7"):
    return {name: turn(reply) for name in names}


class Threads(Environment):
    """Says which thread called it with how many turns; waits for `go` before that."""

    def __init__(self, go=None):
        self.go, self.calls = go, []

    def step(self, turns):
        self.calls.append((threading.current_thread(), len(turns)))
        assert self.go is None or self.go.wait(20)
        return [StepResult(float(t.messages[-1]["content"]), "ok") for t in turns]


def collect(grading, num):
    results = {}
    while len(results) < num:
        results |= grading.grade({}, block=True)
    return results


def test_a_slow_environment_gets_all_turns_that_wait_and_holds_up_no_other():
    slow, grading = Threads(threading.Event()), None
    grading = Grading({"slow": slow, "quick": Threads(), "exact": Exact()})
    assert grading.grade({"slow": [turns_of("a")]}) == {}
    while not slow.calls:
        time.sleep(0.001)
    assert grading.grade({"slow": [turns_of("b", "c")], "exact": [turns_of("d")]}).keys() == {"d"}
    assert grading.grade({"slow": [turns_of("e")]}) == {}
    assert grading.grade({"quick": [turns_of("f")]}, block=True)["f"].reward == 7
    slow.go.set()
    assert collect(grading, 4).keys() == {"a", "b", "c", "e"} and grading.grade({}) == {}
    (first, one), (second, rest) = slow.calls
    assert first is second is not threading.main_thread() and (one, rest) == (1, 3)


def test_what_takes_no_time_starts_no_thread_and_what_must_is_called_in_the_main_thread():
    before = threading.active_count()
    here = Threads()
    here.main_thread = True
    grading = Grading({"exact": Exact(), "here": here})
    assert grading.grade({"exact": [turns_of("a", "b")], "here": [turns_of("c")]}).keys() == {"a", "b", "c"}
    assert here.calls == [(threading.main_thread(), 1)] and threading.active_count() == before


class SlowExact(Exact):
    def step(self, turns):
        time.sleep(0.2)
        return super().step(turns)


def test_a_class_derived_from_a_built_in_one_may_be_slow():
    grading = Grading({"e": SlowExact()})
    assert grading.grade({"e": [turns_of("a")]}) == {} and collect(grading, 1)["a"].reward == 1


def alarmed(completions, **columns):
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return [1.0] * len(completions)


def test_code_that_needs_signals_hears_how_it_may_use_them(monkeypatch, capfd):
    """math_verify's time limits, which TRL's users have."""
    grading = Grading({"f": RewardFunction(alarmed, "f")})
    assert grading.grade({"f": [turns_of("a")]}, block=True)["a"].outcome == "error"
    assert "main_thread=True" in grading.raised[0] and "main_thread=True" in capfd.readouterr().err
    monkeypatch.setattr(alarmed, "main_thread", True, raising=False)
    grading = Grading({"f": RewardFunction(alarmed, "f")})
    assert grading.grade({"f": [turns_of("a")]})["a"].reward == 1


class Picky(Environment):
    """Fails on some replies. The first call, on "wait", goes on when `go` is set: until then the others wait."""

    def __init__(self, whole_groups):
        self.go, self.whole_groups = threading.Event(), whole_groups

    def step(self, turns):
        replies = [turn.messages[-1]["content"] for turn in turns]
        if replies == ["wait"]:
            self.go.wait(20)
        if "exit" in replies:
            raise SystemExit(0)
        return [StepResult(1 / int(reply) if reply.isdigit() else 0, "ok") for reply in replies]


@pytest.mark.parametrize("main_thread", [False, True])
def test_a_reply_on_which_an_environment_fails_costs_no_other_its_grade(main_thread, capfd):
    """However many wait together; a group stays together."""
    alone, group = Picky(False), Picky(True)
    alone.main_thread = group.main_thread = main_thread
    grading = Grading({"alone": alone, "group": group})
    if not main_thread:
        assert grading.grade({name: [turns_of(name, reply="wait")] for name in ("alone", "group")}) == {}
    one = [{f"a{reply}": turn(reply)} for reply in ("2", "0", "exit", "4")]
    results = grading.grade({"alone": one, "group": [{"g1": turn("1"), "g0": turn("0")}, turns_of("g2", "g3")]})
    alone.go.set(), group.go.set()
    results |= collect(grading, (0 if main_thread else 10) - len(results))
    assert {name for name, result in results.items() if result.outcome == "error"} == {"a0", "aexit", "g1", "g0"}
    assert [results[name].reward for name in ("a2", "a4", "g2", "g3")] == [1 / 2, 1 / 4, 1 / 7, 1 / 7]
    assert len(grading.raised) == capfd.readouterr().err.count("WARNING") == 3  # each once


@pytest.mark.parametrize("error", [ConfigError("c"), Interrupted(), KeyboardInterrupt()])
def test_what_ends_a_run_crosses_from_the_thread(error):
    class Ends(Environment):
        def step(self, turns):
            raise error

    with pytest.raises(type(error)):
        Grading({"e": Ends()}).grade({"e": [turns_of("a")]}, block=True)


def test_told_to_stop_nobody_waits_for_a_slow_environment():
    slow = Threads(threading.Event())
    with pytest.raises(Interrupted):
        Grading({"slow": slow}, stop=lambda: bool(slow.calls)).grade({"slow": [turns_of("a")]}, block=True)
    slow.go.set()


def test_a_signal_as_a_wait_ends_is_no_wait_without_end(monkeypatch):
    """A run that was told to stop waited for its slow environment."""
    monkeypatch.setattr(grading_module, "WAIT_SECONDS", 0.2)
    slow, stop = Threads(threading.Event()), []
    rescue = threading.Timer(20, slow.go.set)
    rescue.start()
    with signal_amid(0.05, lambda: stop.append(time.sleep(0.3))), pytest.raises(Interrupted):
        Grading({"slow": slow}, stop=lambda: bool(stop)).grade({"slow": [turns_of("a")]}, block=True)
    rescue.cancel()
    slow.go.set()


class Pooled(PoolEnvironment):
    """A job is what the reply says: KIND VALUE for a worker, or nothing."""

    whole_groups = True  # which workers do not have

    def __init__(self):
        self.pool = GraderPool("worker_jobs:run", num_workers=2, deadline_s=20, memory_mib=1024)

    def job(self, turn):
        return turn.messages[-1]["content"].split() or None

    def result(self, turn, graded):
        if graded is None:
            return StepResult(0.5, "wrong")
        if graded.outcome != "ok":
            return StepResult(0.0, "error")
        return StepResult(float(len(graded.value)), "ok")


@pytest.fixture(scope="module")
def pooled():
    environment = Pooled()
    yield environment
    environment.close()


def test_each_turn_of_a_pool_goes_to_a_worker_at_once(pooled, tmp_path):
    grading = Grading({"p": pooled, "exact": Exact()})
    assert not grading.whole_groups and not pooled.self_tests
    path = tmp_path / "go"
    asked = {"slow": turn(f"await {path}"), "none": turn(""), "quick": turn("echo abc"), "bad": turn("raise oh")}
    assert grading.grade({"p": [asked]})["none"].reward == 0.5
    results = collect(grading, 2)
    assert (results["quick"].reward, results["bad"].outcome) == (3, "error")
    path.touch()
    assert collect(grading, 1)["slow"].reward == len(str(path))
    direct = pooled.step([turn("echo abc"), turn(""), turn("echo abcd")])
    assert [result.reward for result in direct] == [3, 0.5, 4]


@pytest.mark.parametrize("method", ["job", "result"])
def test_what_job_and_result_raise_grades_nothing(pooled, method, monkeypatch, capfd):
    def fail(self, turn, graded=None):
        raise ZeroDivisionError(turn.answer)

    monkeypatch.setattr(Pooled, method, fail)
    grading = Grading({"p": pooled})
    assert grading.grade({"p": [{"a": turn("echo abc", "mine")}]}, block=True)["a"].outcome == "error"
    assert "ZeroDivisionError: mine" in grading.raised[0] and Path(__file__).name in grading.raised[0]
    assert "not graded" in capfd.readouterr().err


def test_a_step_of_ones_own_is_what_is_called(pooled):
    class Own(Pooled):
        def step(self, turns):
            return [StepResult(9.0, "ok") for _ in turns]

    own = object.__new__(Own)
    own.pool = pooled.pool
    grading = Grading({"own": own})
    assert grading.whole_groups == {"own"} and grading.grade({"own": [turns_of("a")]}, block=True)["a"].reward == 9


def test_a_pool_that_is_told_to_stop_ends_the_call(pooled):
    answers = iter([True])
    grading = Grading({"p": pooled}, lambda: next(answers, False))
    with pytest.raises(Interrupted):
        grading.grade({"p": [{"a": turn("echo abc")}]})
    assert collect(grading, 1)["a"].reward == 3


def test_workers_that_cannot_start_any_more_end_the_run(pooled, monkeypatch):
    def fail(seconds):
        raise WorkerError("worker f: did not start")

    grading = Grading({"p": pooled})
    grading.begin("p", {"a": turn("echo abc")})
    with monkeypatch.context() as patch:
        patch.setattr(pooled.pool, "poll", fail)
        with pytest.raises(StopRun, match="env_name 'p': worker f: did not start"):
            grading.grade({}, block=True)
    assert collect(grading, 1)["a"].reward == 3
