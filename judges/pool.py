"""Worker processes that grade: jobs go in, values come out, and a job that overruns its deadline is killed.

The function that grades is named by a dotted path, and the worker (worker.py) imports it. A worker has a session of
its own, a small environment, a memory limit and no torch; jobs and values cross a socket as JSON. No job can hold up
its owner for longer than its deadline: then the worker and all processes that it started are killed, and another worker
takes its place. (A thread cannot be killed. SIGALRM can be blocked, as sympy does, and works in the main thread only.)
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple

from . import worker as worker_script
from .codec import Json
from .worker import ENDING, FOLDER, MAX_BYTES, kill_descendants

MAX_JOBS = 20_000  # then a worker is replaced, because the libraries of a grader leak memory
MAX_FAILED_STARTS = 5  # in a row, once a worker has been ready: the system may kill a young worker, too
POLL_SECONDS = 0.5  # between two looks of `grade`
START_SECONDS = 120.0  # for a worker's imports, on a busy machine
END_SECONDS = 0.9  # for the exit code of a worker whose socket has closed


class WorkerError(RuntimeError):
    """No worker can be started; the message says why."""


class Graded(NamedTuple):
    """How a job ended: "ok" and the function's value, "timeout", or "error" and what happened."""

    outcome: str
    value: Json = None
    message: str = ""


class Worker:
    """A worker process, seen from its owner: the process and this end of its socket."""

    def __init__(
        self, target: str, first: Json, memory_mib: int | None, python: str = "", pass_env: Sequence[str] = ()
    ):
        self.socket, worker_end = socket.socketpair()
        self.socket.setblocking(False)
        # -P: the folder of the script, which has a math.py and a code.py, is no place to look for modules.
        command = [python or sys.executable, "-P", "-B", worker_script.__file__]
        arguments = [target, str(worker_end.fileno()), str(memory_mib or 0), json.dumps(first)]
        arguments.append(json.dumps(search_path(target, python)))
        # torchrun signals the whole process group: that must not end a worker that is just starting.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=worker_environment(pass_env),
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a grader may print; answers go through the socket
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        worker_end.close()
        self.inbox = bytearray()
        self.outbox = b""
        self.ready = False  # whether it has imported the function
        self.job: int | None = None  # the number of the job that it works on
        self.work: Json = None  # this job
        self.num_jobs = 0
        self.deadline = time.monotonic() + START_SECONDS

    def pump(self) -> dict[str, Json] | None:
        """Sends and receives what the socket takes; returns a message once it is whole, else None. Raises
        ConnectionError if the worker is gone, TimeoutError if it is late, ValueError if it sent no JSON."""
        with suppress(BlockingIOError):
            while self.outbox:
                num_sent = self.socket.send(self.outbox)
                self.outbox = self.outbox[num_sent:]
        with suppress(BlockingIOError):
            chunk = self.socket.recv(1 << 20)
            self.inbox += chunk
            if not chunk or len(self.inbox) > MAX_BYTES + 1:
                raise ConnectionError
        if self.inbox.endswith(b"\n"):
            message = self.inbox
            self.inbox = bytearray()
            return json.loads(message)
        if time.monotonic() > self.deadline:
            raise TimeoutError
        return None

    def kill(self) -> int | None:
        """Ends the process and all that it started. Returns its exit code if it had ended by itself, else None; what it
        had started then ends by PR_SET_PDEATHSIG, as all processes of sandbox.py do."""
        code = self.process.poll()
        if code is None:
            self.process.send_signal(signal.SIGSTOP)  # a stopped process starts no more processes
            kill_descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
        self.socket.close()
        return code


def search_path(target: str, python: str) -> list[str]:
    """Where a worker looks for modules first: for the user's, in the working directory; then where this process does.
    FOLDER is left out: see worker.py. Another interpreter has packages of its own."""
    paths = []
    if not target.startswith("."):
        paths.append(os.getcwd())
    if not python:
        paths += map(os.path.abspath, sys.path)
    return [path for path in paths if os.path.realpath(path) != FOLDER]


def worker_environment(pass_env: Sequence[str]) -> dict[str, str]:
    """The whole environment of a worker; pass_env: variables of this process that it gets."""
    environment = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "PYTHONPATH", *pass_env):
        if name in os.environ:
            environment[name] = os.environ[name]
    return environment


class GraderPool:
    """`num_workers` processes that each call the function `target` on one job at a time.

    target: "module:name" of the user; ".module:name" of this package, as in ".math:grade"; or "/folder/file.py:name".
    Jobs and values are JSON. Each worker does the job `first` before it counts as started, so that no deadline has to
    cover the imports. Make pools before torch and vllm are imported, and use a pool from one thread. memory_mib: of a
    worker; None for no limit. python: another interpreter. pass_env: variables of the environment that a worker gets.
    Raises WorkerError if no worker can start, later too.
    """

    def __init__(
        self,
        target: str,
        *,
        num_workers: int,
        deadline_s: float,
        memory_mib: int | None,
        first: Json = None,
        python: str = "",
        pass_env: Sequence[str] = (),
    ):
        self.target = target
        self.deadline_s = deadline_s
        self.owner = os.getpid()
        self._start_worker = partial(Worker, target, first, memory_mib, python, pass_env)
        self.workers = [self._start_worker()]
        self.has_been_ready = False  # whether a worker has
        self.num_failed_starts = 0  # in a row
        atexit.register(self.close)
        self.may_start: Callable[[Sequence[Json]], bool] = lambda jobs: True  # another job, beside those under way
        self.stood_still = 0.0
        self.numbers = count()
        self.waiting: deque[tuple[int, Json]] = deque()  # jobs that no worker has, by number
        while not self.has_been_ready:
            self._wait({}, POLL_SECONDS)
        for _ in range(num_workers - 1):  # nobody waits for these to be ready
            self.workers.append(self._start_worker())

    def grade(self, jobs: Sequence[Json]) -> list[Graded]:
        """The outcome of each job, in order. Takes at most (jobs / workers) deadlines."""
        busy = [worker.job for worker in self.workers if worker.job is not None]
        assert not busy and not self.waiting, f"jobs {busy} and {len(self.waiting)} others are under way"
        numbers = [self.submit(job) for job in jobs]
        graded: dict[int, Graded] = {}
        while len(graded) < len(jobs):
            graded |= self.poll(POLL_SECONDS)
        return [graded[number] for number in numbers]

    def submit(self, job: Json) -> int:
        """Queues a job; returns its number, for `poll`."""
        number = next(self.numbers)
        self.waiting.append((number, job))
        return number

    def poll(self, seconds: float = 0.0) -> dict[int, Graded]:
        """The outcomes, by number, that came since the last call; with none, waits for one up to `seconds`. A free
        worker gets a job, and a late one is killed, in this call only."""
        graded: dict[int, Graded] = {}
        num_before = -1
        while len(graded) > num_before:  # whoever has just answered gets a job
            num_before = len(graded)
            self._hand_out(graded)
            self._wait(graded, 0.0 if graded else seconds)
        return graded

    def stand_still(self, seconds: float) -> None:
        """The clock of the jobs stood still while the engine slept, for so many seconds since the start of the run."""
        for worker in self.workers:
            worker.deadline += seconds - self.stood_still
        self.stood_still = seconds

    def close(self) -> None:
        """Ends all workers. A fork of the owner leaves them alone."""
        if os.getpid() != self.owner:
            return
        for worker in self.workers:
            worker.kill()
        self.workers = []
        atexit.unregister(self.close)

    def _hand_out(self, graded: dict[int, Graded]) -> None:
        """Gives each free worker a job, and replaces those that are used up or gone."""
        for place, worker in enumerate(self.workers):
            if not self.waiting or not worker.ready or worker.job is not None:
                continue
            if worker.num_jobs >= MAX_JOBS or worker.process.poll() is not None:  # the system killed it
                worker.kill()
                self.workers[place] = self._start_worker()
                continue
            if not self.may_start([worker.work for worker in self.workers if worker.job is not None]):
                return
            number, job = self.waiting.popleft()
            payload = json.dumps(job).encode()
            if len(payload) > MAX_BYTES:
                graded[number] = Graded("error", message=f"the job is larger than {MAX_BYTES >> 20} MiB")
                continue
            worker.job = number
            worker.work = job
            worker.outbox = payload + b"\n"
            worker.num_jobs += 1
            worker.deadline = time.monotonic() + self.deadline_s

    def _wait(self, graded: dict[int, Graded], seconds: float) -> None:
        """Waits up to `seconds` for a message, a dead worker or the next deadline, and handles them; outcomes go into
        `graded`."""
        busy = [worker for worker in self.workers if worker.job is not None or not worker.ready]
        poll = select.poll()
        for worker in busy:
            events = select.POLLIN
            if worker.outbox:
                events |= select.POLLOUT
            poll.register(worker.socket, events)
        next_deadline = min((worker.deadline for worker in busy), default=0.0)
        left = max(0.0, next_deadline - time.monotonic())
        events = poll.poll(1000 * min(left, seconds))
        spoke = {descriptor for descriptor, _ in events}
        for worker in busy:
            if worker.socket.fileno() not in spoke and time.monotonic() <= worker.deadline:
                continue
            try:
                message = worker.pump()
            except TimeoutError:
                seconds_given = self.deadline_s if worker.ready else START_SECONDS
                self._replace(worker, Graded("timeout", message=f"no answer in {seconds_given:g} s"), graded)
            except (ConnectionError, ValueError):
                self._replace(worker, self._why_it_ended(worker), graded)
            else:
                self._read(worker, message, graded)

    def _read(self, worker: Worker, message: dict | None, graded: dict[int, Graded]) -> None:
        """Takes what a worker said, if it said something: how its start or its job ended."""
        if message is None:
            return
        if worker.ready:
            graded[worker.job] = Graded(**message)
            worker.job = None
            return
        if message["outcome"] != "ok":  # an exception, which the next worker would raise, too
            self._fail(message["message"])
        worker.ready = True
        self.has_been_ready = True
        self.num_failed_starts = 0

    @staticmethod
    def _why_it_ended(worker: Worker) -> Graded:
        """Waits for the exit code of a worker whose socket has closed, which comes a moment later. A worker that lives
        on has closed its socket itself."""
        with suppress(subprocess.TimeoutExpired):
            return Graded("error", message=f"the worker died: exit code {worker.process.wait(END_SECONDS)}")
        return Graded("error", message="the worker closed its connection")

    def _replace(self, worker: Worker, ended: Graded, graded: dict[int, Graded]) -> None:
        """Puts another worker in the place of one that died or is late: this is how its job ended."""
        worker.kill()
        if worker.ready:
            graded[worker.job] = ended
        else:
            self.num_failed_starts += 1
            if not self.has_been_ready or self.num_failed_starts > MAX_FAILED_STARTS:
                self._fail(f"a worker did not start: {ended.message}")
        self.workers[self.workers.index(worker)] = self._start_worker()

    def _fail(self, problem: str) -> None:
        self.close()
        raise WorkerError(f"worker {self.target}: {problem}")
