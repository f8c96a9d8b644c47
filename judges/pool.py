"""Worker processes that grade: jobs go in, values come out, and a job that overruns its deadline is killed.

The function that grades is named by a dotted path, and the worker imports it. A worker has a session of its own, a
small environment, a memory limit and no torch; jobs and values cross a socket as JSON. No job can hold up the trainer
for longer than its deadline: then the worker and all processes that it started are killed, and another worker takes its
place. (A thread cannot be killed. SIGALRM can be blocked, as sympy does, and works in the main thread only.)
"""

import atexit
import ctypes
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from config import ConfigError
from support.system.exits import Interrupted, die_with_parent

MAX_BYTES = 16 << 20  # of a job or a value
MAX_JOBS = 20_000  # then a worker is replaced, because the libraries of a grader leak memory
REPOSITORY = str(Path(__file__).resolve().parents[1])
STOP_SECONDS = 0.5  # how often `GraderPool.stop` is called
START_SECONDS = 120.0  # for a worker's imports, on a busy machine
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Graded(NamedTuple):
    """How a job ended: "ok" and the function's value, "timeout", or "error" and what happened."""

    outcome: str
    value: Any = None
    message: str = ""


class Worker:
    """A worker process, seen from the trainer: the process and this end of its socket."""

    def __init__(self, target: str, first: Any, memory_mib: int | None, python: str = "", pass_env: Sequence[str] = ()):
        self.socket, worker_end = socket.socketpair()
        self.socket.setblocking(False)
        names = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", *pass_env)
        environment = {name: os.environ[name] for name in names if name in os.environ}
        # Another interpreter has packages of its own: from here it gets this program and the user's modules.
        paths = [os.getcwd(), REPOSITORY] if python else [path or os.getcwd() for path in sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        arguments = [target, str(worker_end.fileno()), str(memory_mib or 0), json.dumps(first)]
        # torchrun signals the whole process group: that must not end a worker that is just starting.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self.process = subprocess.Popen(
                [python or sys.executable, "-P", "-B", "-m", "judges.pool", *arguments],
                env=environment,
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
        self.num_jobs = 0
        self.deadline = time.monotonic() + START_SECONDS

    def pump(self) -> Any:
        """Sends and receives what the socket takes; returns a message once it is whole, else None. Raises
        ConnectionError if the worker is gone, TimeoutError if it is late, ValueError if it sent no JSON."""
        with suppress(BlockingIOError):
            while self.outbox:
                self.outbox = self.outbox[self.socket.send(self.outbox) :]
        with suppress(BlockingIOError):
            chunk = self.socket.recv(1 << 20)
            self.inbox += chunk
            if not chunk or len(self.inbox) > MAX_BYTES + 1:
                raise ConnectionError
        if self.inbox.endswith(b"\n"):
            message, self.inbox = self.inbox, bytearray()
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


def kill_descendants(pid: int) -> None:
    """Kills all processes below `pid`, whatever their session, until none is left: a worker adopts the orphans among
    the processes that it started (PR_SET_CHILD_SUBREAPER), so they all stay below it."""
    while True:
        children = defaultdict(list)
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile, or is hidden from us
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state not in "ZX":  # it has not ended
                    children[int(parent)].append(int(entry.name))
        doomed = [*children[pid]]
        for process in doomed:  # the list grows while the loop goes down the tree
            doomed += [child for child in children[process] if child not in doomed]
        if not doomed:
            return
        for process in doomed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class GraderPool:
    """`num_workers` processes that each call the function `target` ("module:name") on one job at a time.

    Jobs and values are JSON. Each worker does the job `first` before it counts as started, so that no deadline has to
    cover the imports. Make pools before torch and vllm are imported, and use a pool from one thread. `stop`, set on the
    class, tells all pools of the process whether to give up waiting. worker: memory_mib, or None for no limit; python,
    another interpreter; pass_env, variables of the environment. Raises ConfigError if a worker cannot start.
    """

    stop: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, target: str, *, num_workers: int, deadline_s: float, first: Any = None, **worker: Any):
        self.target = target
        self.deadline_s = deadline_s
        self.owner = os.getpid()
        self._start_worker = partial(Worker, target, first, **worker)
        self.workers = [self._start_worker()]
        atexit.register(self.close)
        self.stood_still = 0.0
        self.numbers = count()
        self.waiting: deque[tuple[int, Any]] = deque()  # jobs that no worker has, by number
        while not self.workers[0].ready:
            self._wait({}, STOP_SECONDS)
        self.workers += [self._start_worker() for _ in range(num_workers - 1)]  # nobody waits for these to be ready

    @classmethod
    def of(cls, target: str, cfg: Any, num_ranks: int, **worker: Any) -> "GraderPool":
        """With this rank's share of the workers of a section of `env`, its deadline and its memory limit."""
        shared = {"num_workers": max(1, cfg.num_workers // num_ranks), "deadline_s": cfg.deadline_s}
        return cls(target, memory_mib=cfg.memory_mib, **shared, **worker)

    def grade(self, jobs: Sequence[Any]) -> list[Graded]:
        """The outcome of each job, in order. Takes at most (jobs / workers) deadlines. Raises Interrupted when `stop`
        says so; only close() may follow."""
        busy = [*(worker.job for worker in self.workers if worker.job is not None), *self.waiting]
        assert not busy, f"{len(busy)} jobs are under way: an earlier call was interrupted"
        numbers = [self.submit(job) for job in jobs]
        graded: dict[int, Graded] = {}
        while len(graded) < len(jobs):
            graded |= self.poll(STOP_SECONDS)
        return [graded[number] for number in numbers]

    def submit(self, job: Any) -> int:
        """Queues a job; returns its number, for `poll`."""
        number = next(self.numbers)
        self.waiting.append((number, job))
        return number

    def poll(self, seconds: float = 0.0) -> dict[int, Graded]:
        """The outcomes, by number, that came since the last call; with none, waits for one up to `seconds`. A free
        worker gets a job, and a late one is killed, in this call only. Raises Interrupted as `grade` does."""
        if self.stop():
            raise Interrupted
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

    def _hand_out(self, graded: dict[int, Graded]) -> None:
        for place, worker in enumerate(self.workers):
            if not self.waiting or not worker.ready or worker.job is not None:
                continue
            if worker.num_jobs >= MAX_JOBS or worker.process.poll() is not None:  # the system killed it
                worker.kill()
                self.workers[place] = self._start_worker()
                continue
            number, job = self.waiting.popleft()
            payload = json.dumps(job).encode()
            if len(payload) > MAX_BYTES:
                graded[number] = Graded("error", message=f"the job is larger than {MAX_BYTES >> 20} MiB")
            else:
                worker.job, worker.outbox = number, payload + b"\n"
                worker.num_jobs += 1
                worker.deadline = time.monotonic() + self.deadline_s

    def close(self) -> None:
        if os.getpid() != self.owner:  # a fork of the owner, which ends
            return
        for worker in self.workers:
            worker.kill()
        self.workers = []
        atexit.unregister(self.close)

    def _wait(self, graded: dict[int, Graded], seconds: float) -> None:
        """Waits up to `seconds` for a message, a dead worker or the next deadline, and handles them; outcomes go into
        `graded`."""
        busy = [worker for worker in self.workers if worker.job is not None or not worker.ready]
        poll = select.poll()
        for worker in busy:
            poll.register(worker.socket, select.POLLIN | (select.POLLOUT if worker.outbox else 0))
        until_deadline = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
        spoke = {descriptor for descriptor, _ in poll.poll(1000 * min(max(0.0, until_deadline), seconds))}
        for worker in busy:
            if worker.socket.fileno() not in spoke and time.monotonic() <= worker.deadline:
                continue
            try:
                message = worker.pump()
            except (ConnectionError, TimeoutError, ValueError) as error:
                self._end_worker(worker, graded, is_late=isinstance(error, TimeoutError))
                continue
            if message is None:
                continue
            if worker.ready:
                graded[worker.job], worker.job = Graded(**message), None
            elif message["outcome"] != "ok":
                self._fail(message["message"])
            worker.ready = True

    def _end_worker(self, worker: Worker, graded: dict[int, Graded], is_late: bool) -> None:
        """The worker died, or overran its deadline: records the outcome of its job and starts a new worker."""
        if not is_late:  # the socket closes a moment before the process ends
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)  # on a machine with much to do
        code = worker.kill()
        seconds = self.deadline_s if worker.ready else START_SECONDS
        message = f"no answer in {seconds:g} s" if is_late else f"the worker died: exit code {code}"
        if not worker.ready:
            self._fail(f"a worker did not start: {message}")
        graded[worker.job] = Graded("timeout" if is_late else "error", message=message)
        self.workers[self.workers.index(worker)] = self._start_worker()

    def _fail(self, problem: str) -> None:
        self.close()
        raise ConfigError(f"worker {self.target}: {problem}")


# ------------------------------------------------------------------------------------------------ in the worker process


def main(target: str, descriptor: int, memory_mib: int, first: str) -> None:
    """Imports the function, does the first job, reports that, then answers jobs until the trainer closes the socket."""
    die_with_parent()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in ENDING:
        # The trainer decides when it ends. Unlike SIG_IGN, no program that the worker starts inherits this.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    if memory_mib:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)

    def answer(line: str | bytes) -> None:
        try:
            job = json.loads(line)
            function = pkgutil.resolve_name(target)
            value = None if job is None else function(job)
            payload = json.dumps({"outcome": "ok", "value": value}).encode()
            if len(payload) > MAX_BYTES:
                raise ValueError("the value is too large")
        except Exception as error:  # any exception of a grader is an outcome, which is counted and bounded
            message = f"{type(error).__name__}: {error}"[:1000]
            payload = json.dumps({"outcome": "error", "message": message}).encode()
        connection.sendall(payload + b"\n")

    answer(first)
    with connection.makefile("rb") as stream:
        for line in stream:
            answer(line)
            with suppress(ChildProcessError):  # none is left of the processes that the job started
                while True:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        kill_descendants(os.getpid())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
