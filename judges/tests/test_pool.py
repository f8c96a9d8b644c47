"""The pool of graders: right answers in order, whatever single jobs do; nothing overruns, nothing stays behind."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from code_jobs import children

from judges import sandbox
from judges.pool import GraderPool, WorkerError
from judges.worker import ENDING

MAX_SECONDS = 240  # the longest test here takes a quarter of it on a quiet machine


def make_pool(deadline_s=60, num_workers=2):
    return GraderPool("grader_targets:run", num_workers=num_workers, deadline_s=deadline_s, memory_mib=1024)


@pytest.fixture(scope="module")
def pool():
    pool = make_pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def strict():
    """A pool whose jobs may take 0.3 s: only for what must overrun, since a busy machine overruns it too."""
    pool = make_pool(0.3)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def has_an_end():
    """Fails a test that hangs: the pool's own deadline may be what is broken."""

    def fail(signum, frame):
        pytest.fail(f"the test has no end: {MAX_SECONDS} s")  # no OSError, which the pool takes for its worker's

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(MAX_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def gone(pid, seconds=10):
    """Whether a process ends (or is a zombie of another's) soon: the kernel takes a moment."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path("/proc", str(int(pid)), "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def outcomes(pool, *jobs):
    return [graded.outcome for graded in pool.grade(jobs)]


def polled(pool, num, seconds=0.01):
    """The outcomes of the next `num` jobs that end."""
    found = {}
    while len(found) < num:
        found |= pool.poll(seconds)
    return found


def test_an_outcome_is_there_as_soon_as_its_job_has_ended(pool, tmp_path):
    """One of two workers hangs until it is let go; 40 jobs pass it, of which the first is too long to be sent."""
    path = tmp_path / "go"
    slow = pool.submit(("await", str(path)))
    assert pool.poll() == {}
    numbers = [pool.submit(("echo", "x" * (16 << 20))), *(pool.submit(("double", i)) for i in range(40))]
    found = polled(pool, 41)
    assert [found[number].value for number in numbers] == [None, *range(0, 80, 2)]
    assert (found[numbers[0]].outcome, pool.poll()) == ("error", {})
    path.touch()
    assert polled(pool, 1)[slow].value == str(path) and pool.poll(0.3) == {}


def test_a_deadline_is_of_a_job_whatever_else_is_asked_for(strict):
    hanging, number = strict.submit(("hang", 0)), strict.submit(("double", 4))
    found = polled(strict, 2)
    assert (found[hanging].outcome, found[number].value) == ("timeout", 8)


def test_values_come_back_in_the_order_of_the_jobs(pool):
    jobs = [("double", i) for i in range(50)]
    assert [graded.value for graded in pool.grade(jobs)] == [2 * i for i in range(50)]
    assert pool.grade([]) == []
    long = "é\ud800" * 300_000  # more than a socket takes at once; half a surrogate pair crosses too
    assert pool.grade([("echo", long)])[0].value == long


@pytest.mark.parametrize("kind", ["hang", "busy", "locked", "deaf"])
def test_overrun_is_killed_and_its_worker_replaced(strict, kind):
    assert [graded.message for graded in strict.grade([(kind, 0)] * 3)] == ["no answer in 0.3 s"] * 3
    assert outcomes(strict, (kind, 0)) == ["timeout"]


def test_overrun_is_no_matter_of_the_other_jobs():
    pool = make_pool(2)
    start = time.monotonic()
    graded = pool.grade([("double", 1), ("hang", 0), *[("double", i) for i in range(100)]])
    assert time.monotonic() - start < 10  # one deadline, and what it takes to start a worker
    assert len(pool.grade([("gigabyte", 1 << 30), ("double", 1)])) == 2  # far too much to say
    pool.close()
    assert [g.outcome for g in graded] == ["ok", "timeout", *["ok"] * 100]
    assert [g.value for g in graded[2:]] == [2 * i for i in range(100)]


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


@pytest.mark.parametrize("kind", ["daemon", "daemon and hang"])
def test_what_a_grader_starts_dies_with_its_job(pool, kind, tmp_path):
    pool = make_pool(3, num_workers=1) if "hang" in kind else pool
    outcomes(pool, (kind, str(tmp_path / "pid")))
    assert gone((tmp_path / "pid").read_text())


def test_target_that_cannot_be_imported_is_named():
    for target, said in (("no_such_module:f", "No module named"), ("grader_targets:nothing", "no attribute 'nothing'")):
        with pytest.raises(WorkerError, match=f"worker {target}: .*{said}"):
            GraderPool(target, num_workers=1, deadline_s=1, memory_mib=512)
    for first, said in ((["raise", "boo"], "ValueError: boo"), (["os exit", 0], "the worker died: exit code 0")):
        with pytest.raises(WorkerError, match=f"worker grader_targets:run: .*{said}"):
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
    monkeypatch.setattr("judges.pool.MAX_JOBS", 3)
    pool = make_pool(num_workers=1)
    pids = [graded.value for graded in pool.grade([("pid", 0)] * 7)]
    pool.close()
    assert sorted(Counter(pids).values()) == [1, 3, 3]


def test_workers_die_with_their_trainer(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    code = (
        "from judges.pool import GraderPool\n"
        "pool = GraderPool('grader_targets:run', num_workers=2, deadline_s=60, memory_mib=512)\n"
        "print(*(w.process.pid for w in pool.workers), flush=True)\n"
        f"pool.grade([('touch and hang', path) for path in {paths}])"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as trainer:
        pids = trainer.stdout.readline().split()
        end = time.monotonic() + 60
        while not all(map(os.path.exists, paths)) and time.monotonic() < end:
            time.sleep(0.01)
        assert len(pids) == 2 and all(Path("/proc", pid).exists() for pid in pids)
        trainer.kill()
    assert [gone(pid) for pid in pids] == [True, True]


def held():
    """Descriptors of this process, and its workers. (Files in /dev/shm may be those of another test.)"""
    return len(os.listdir("/proc/self/fd")), len(children())


@pytest.mark.parametrize(("num_jobs", "num_hang"), [(100, 10), pytest.param(2000, 200, marks=pytest.mark.long)])
def test_nothing_stays_behind_after_hostile_jobs(strict, tmp_path, num_jobs, num_hang):
    hang = ["hang", "busy", "deaf", "daemon and hang"]
    ends = {"daemon": "ok", "print": "ok", "double": "ok", "echo": "ok"}
    ends |= dict.fromkeys(["raise", "exit", "os exit", "segfault", "memory", "no json"], "error")
    rng = random.Random(0)
    some = [*ends, *["double", "echo", "raise"] * 5]
    kinds = [rng.choice(hang if i < num_hang else some) for i in range(num_jobs)]
    rng.shuffle(kinds)
    outcomes(strict, ("double", 1), ("double", 1))  # every worker is there
    before = held()
    found = outcomes(strict, *[(kind, str(tmp_path / str(i))) for i, kind in enumerate(kinds)])
    assert all(outcome == "timeout" for kind, outcome in zip(kinds, found, strict=True) if kind in hang)
    late = [kind for kind, outcome in zip(kinds, found, strict=True) if outcome != ends.get(kind, "timeout")]
    assert all(outcome in (ends.get(kind), "timeout") for kind, outcome in zip(kinds, found, strict=True))
    assert len(late) < num_jobs / 10, late  # on a busy machine
    outcomes(strict, ("double", 1), ("double", 1))
    end = time.monotonic() + 10
    while held() != before and time.monotonic() < end:
        time.sleep(0.05)
    assert held() == before


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_does_not_end_a_worker_that_starts_just_now(monkeypatch, number):
    def start_and_signal(*args, **how):
        process = popen(*args, **how)
        process.send_signal(number)  # as torchrun does to all of the rank's
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    pool = make_pool(num_workers=1)
    assert [graded.value for graded in pool.grade([("double", 2)])] == [4]
    pool.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the trainer's own are as before"


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from judges.pool import GraderPool
pool = GraderPool("codec:grade", num_workers=1, deadline_s=60, memory_mib=1024)
print(pool.grade([0])[0])
"""


def test_no_module_of_the_user_is_shadowed(tmp_path):
    """Modules of the names that judges/ and its workers use: the function sees the user's, and stdlib's math."""
    names = ("codec", "code_judge", "config", "math_text", "sandbox", "worker", "pool", "base", "run")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"mine = {name!r}\n")
    listed = ", ".join(name for name in names if name != "codec")
    checks = f"all(module.mine == module.__name__ for module in ({listed}))"
    (tmp_path / "codec.py").write_text(
        f"import math, code, {listed}\n"
        f"def grade(job):\n    return {checks} and math.floor(1.5) == 1 and hasattr(code, 'InteractiveConsole')\n"
    )
    shutil.copytree(Path(sandbox.__file__).parent, tmp_path / "lib" / "judges")
    command = [sys.executable, "-c", ALONE, str(tmp_path / "lib")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "Graded(outcome='ok', value=True, message='')\n"


def test_an_interpreter_that_is_named_finds_the_users_judges_first(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text("def grade(job): return 'mine'\n")
    monkeypatch.chdir(tmp_path)
    pool = GraderPool("judges:grade", num_workers=1, deadline_s=60, memory_mib=1024, python=sys.executable)
    assert pool.grade([0])[0].value == "mine"
    pool.close()


def test_a_worker_that_dies_while_it_starts_is_started_again(tmp_path):
    """The system may kill a young worker: here the second to fourth, once the first has been ready."""
    (tmp_path / "starts").touch()
    job = ["starts", [str(tmp_path / "starts"), [2, 3, 4]]]
    pool = GraderPool("grader_targets:run", num_workers=1, deadline_s=60, memory_mib=1024, first=job)
    assert outcomes(pool, ("os exit", 0), ("double", 1)) == ["error", "ok"]
    assert (tmp_path / "starts").read_text() == "x" * 5
    pool.close()


def test_workers_that_die_whenever_they_start_end_the_pool(tmp_path):
    (tmp_path / "starts").touch()
    job = ["starts", [str(tmp_path / "starts"), list(range(2, 100))]]
    pool = GraderPool("grader_targets:run", num_workers=1, deadline_s=60, memory_mib=1024, first=job)
    with pytest.raises(WorkerError, match="did not start: the worker died: exit code 0"):
        outcomes(pool, ("os exit", 0), ("double", 1))
    assert 3 <= len((tmp_path / "starts").read_text()) <= 20


def test_a_worker_that_closes_its_descriptors_holds_nobody_up(pool):
    start = time.monotonic()
    found = pool.grade([("close all", 0), ("double", 1)])
    assert (found[0].outcome, found[1].value) == ("error", 2)
    assert time.monotonic() - start < 5  # most of it the start of another worker
