"""The pool of graders: right answers in order, whatever single jobs do; nothing overruns, nothing stays behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from config import ConfigError
from grader import GraderPool

DEADLINE = 0.3


@pytest.fixture(scope="module")
def pool():
    pool = GraderPool("grader_targets:run", num_workers=2, deadline_s=DEADLINE, memory_mib=1024)
    yield pool
    pool.close()


def gone(pid, seconds=10):
    """Whether a process ends (or is a zombie of another's) soon: the kernel takes a moment."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def outcomes(pool, *jobs):
    return [graded.outcome for graded in pool.grade(jobs)]


def test_values_come_back_in_the_order_of_the_jobs(pool):
    jobs = [("double", i) for i in range(50)]
    assert [graded.value for graded in pool.grade(jobs)] == [2 * i for i in range(50)]
    assert pool.grade([]) == []
    long = "é\ud800" * 300_000  # more than a socket takes at once; half a surrogate pair crosses too
    assert pool.grade([("echo", long)])[0].value == long


@pytest.mark.parametrize("kind", ["hang", "busy", "locked", "deaf"])
def test_overrun_is_killed_and_the_others_are_graded(pool, kind):
    start = time.monotonic()
    graded = pool.grade([("double", 1), (kind, 0), ("double", 3), ("double", 4)])
    assert [g.outcome for g in graded] == ["ok", "timeout", "ok", "ok"]
    assert graded[3].value == 8 and graded[1].message == "no answer in 0.3 s"
    assert time.monotonic() - start < 20  # a hang would take forever; seconds are for bench/


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", "ValueError: boo"),
        ("exit", "the worker died: exit code 0"),
        ("os exit", "the worker died: exit code 0"),
        ("segfault", "the worker died: exit code -11"),
        ("memory", "MemoryError: "),
        ("long value", "ValueError: the value is too large"),
        ("no json", "TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_what_goes_wrong_is_an_error_with_its_reason(pool, kind, said):
    bad, good = pool.grade([(kind, "boo"), ("double", 2)])
    assert (bad.outcome, good.value) == ("error", 4) and bad.message.startswith(said)


def test_what_a_grader_prints_is_no_answer(pool):
    assert pool.grade([("print", 0)])[0].value == "printed"


@pytest.mark.parametrize("kind", ["daemon", "daemon and hang", "daemon and die"])
def test_what_a_grader_starts_dies_with_its_job(pool, kind, tmp_path):
    outcomes(pool, (kind, str(tmp_path / "pid")), ("double", 1))
    assert gone((tmp_path / "pid").read_text())


def test_target_that_cannot_be_imported_is_named():
    for target, said in (("no_such_module:f", "No module named"), ("grader_targets:nothing", "no attribute 'nothing'")):
        with pytest.raises(ConfigError, match=f"grader {target}: .*{said}"):
            GraderPool(target, num_workers=1, deadline_s=1, memory_mib=512)
    for first, said in ((["raise", "boo"], "ValueError: boo"), (["os exit", 0], "the worker died: exit code 0")):
        with pytest.raises(ConfigError, match=f"grader grader_targets:run: .*{said}"):
            GraderPool("grader_targets:run", num_workers=2, deadline_s=1, memory_mib=512, first=first)


def test_worker_killed_while_idle_costs_no_job(pool):
    pids = {graded.value for graded in pool.grade([("pid", 0)] * 20)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        while Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)
    again = pool.grade([("pid", 0)] * 20)
    assert all(graded.outcome == "ok" and graded.value not in pids for graded in again)


def test_worker_is_replaced_after_so_many_jobs(monkeypatch):
    monkeypatch.setattr("grader.MAX_JOBS", 3)
    pool = GraderPool("grader_targets:run", num_workers=1, deadline_s=5, memory_mib=512)
    pids = [graded.value for graded in pool.grade([("pid", 0)] * 7)]
    pool.close()
    assert sorted(Counter(pids).values()) == [1, 3, 3]


def test_workers_die_with_their_trainer():
    code = (
        "import grader\n"
        "pool = grader.GraderPool('grader_targets:run', num_workers=2, deadline_s=60, memory_mib=512)\n"
        "print(*(w.process.pid for w in pool.workers), flush=True); pool.grade([('hang', 0)] * 2)"
    )
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=paths) as trainer:
        pids = trainer.stdout.readline().split()
        assert len(pids) == 2 and all(Path("/proc", pid).exists() for pid in pids)
        trainer.kill()
    gone_in_time = [gone(pid) for pid in pids]
    assert gone_in_time == [True, True]


def children():
    """Processes below this one, zombies too."""
    found, pids = [], [os.getpid()]
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" ", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(rest.rsplit(")", 1)[1].split()[1]), []).append(int(pid))
    for pid in pids:
        found += parents.get(pid, [])
        pids += parents.get(pid, [])
    return found


def held():
    """(descriptors, processes, temporary and shared-memory files) of this process and its workers."""
    return len(os.listdir("/proc/self/fd")), len(children()), len(os.listdir("/dev/shm"))


@pytest.mark.parametrize(("num_jobs", "num_hang"), [(100, 10), pytest.param(2000, 200, marks=pytest.mark.long)])
def test_nothing_stays_behind_after_hostile_jobs(pool, tmp_path, num_jobs, num_hang):
    hostile = [
        "daemon and die",
        "daemon",
        "raise",
        "exit",
        "os exit",
        "segfault",
        "print",
        "memory",
        "no json",
        "double",
        "echo",
    ]
    rng = random.Random(0)
    jobs = [(rng.choice(["hang", "busy", "deaf", "daemon and hang"]), str(tmp_path / f"{i}")) for i in range(num_hang)]
    kinds = [rng.choice(hostile) for _ in range(num_jobs - num_hang)]
    jobs += [(kind, str(tmp_path / f"d{i}") if "daemon" in kind else 3) for i, kind in enumerate(kinds)]
    rng.shuffle(jobs)
    outcomes(pool, ("double", 1), ("double", 1))  # every worker is there
    before = held()
    found = Counter(outcomes(pool, *jobs))
    assert found["timeout"] == num_hang and found.total() == num_jobs
    answer = sum(kind in ("daemon", "print", "double", "echo") for kind, _ in jobs)
    assert found["ok"] == answer and found["error"] == num_jobs - num_hang - answer
    outcomes(pool, ("double", 1), ("double", 1))
    end = time.monotonic() + 10
    while held() != before and time.monotonic() < end:
        time.sleep(0.05)
    assert held() == before
