"""Worker processes that grade: jobs go in, values come out, and a job that overruns its deadline is killed.

Owns the processes and their deadlines. What grades is a function by dotted path, which the worker imports. A worker has
a session of its own, a small environment, a memory limit and no torch; jobs and values cross a socket as JSON. Nothing
that a job does can hold up the trainer for longer than its deadline: the kernel kills the worker and all processes that
it started, and another worker takes its place. (A thread cannot be killed. SIGALRM can be blocked, as sympy does, and
works in the main thread only.)
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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from config import ConfigError
from system.exits import Interrupted, die_with_parent

MAX_BYTES = 16 << 20  # of a job or a value
MAX_JOBS = 20_000  # then a worker is replaced, which bounds what the libraries of a grader keep in memory
STOP_SECONDS = 0.5  # how often `GraderPool.stop` is called
START_SECONDS = 120.0  # for a worker's imports, on a busy machine
MARK = "GRADER_WORKER"  # in the environment of a worker and of the processes that it starts
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Graded(NamedTuple):
    """How a job ended: "ok" and the function's value, "timeout", or "error" and what happened."""

    outcome: str
    value: Any = None
    message: str = ""


class Worker:
    """A worker process, seen from the trainer: the process and this end of its socket."""

    def __init__(self, target: str, memory_mib: int, first: Any):
        self.socket, worker_end = socket.socketpair()
        self.socket.setblocking(False)
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}.{self.socket.fileno()}"
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", MARK: self.mark}
        arguments = [target, str(worker_end.fileno()), str(memory_mib), json.dumps(first)]
        # A signal of torchrun, which goes to the whole process group, must not end a worker that is just starting.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-m", "graders.pool", *arguments],
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

    def send(self, job: int, payload: bytes, seconds: float) -> None:
        self.job = job
        self.num_jobs += 1
        self.outbox = payload + b"\n"
        self.deadline = time.monotonic() + seconds

    def pump(self) -> Any:
        """Moves bytes both ways; returns a message if a whole one has come, else None. ConnectionError if the worker is
        gone, TimeoutError if it is late, ValueError if it sent no JSON."""
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
        """Ends the process and all that it started. Returns its exit code if it had ended by itself, else None."""
        code = self.process.poll()
        if code is None:
            self.process.send_signal(signal.SIGSTOP)  # a stopped process starts no more processes
        kill_descendants(self.process.pid, None if code is None else self.mark)
        self.process.kill()
        self.process.wait()
        self.socket.close()
        return code


def kill_descendants(pid: int, mark: str | None = None) -> None:
    """Kills all processes below `pid`, whatever their session, until none is left.

    All processes that a worker starts stay below it, since it adopts the orphans among them (PR_SET_CHILD_SUBREAPER).
    If the worker is already dead, `mark` finds them: the environment that they inherited contains it.
    """
    while True:
        children: dict[int, list[int]] = {}
        doomed: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state in "ZX":  # it has ended
                    continue
                children.setdefault(int(parent), []).append(int(entry.name))
                if mark and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                    doomed.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        doomed += children.get(pid, ())
        for process in doomed:  # the list grows while the loop goes down the tree
            doomed += (child for child in children.get(process, ()) if child not in doomed)
        if not doomed:
            return
        for process in doomed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class GraderPool:
    """`num_workers` processes that each call the function `target` ("module:name") on one job at a time.

    Jobs and values are JSON. Each worker does the job `first` before it counts as started, so that the time for imports
    counts against no other job. Make pools before torch and vllm are imported, and use a pool from one thread. `stop`,
    set on the class, tells all pools of the process whether to give up waiting. ConfigError if a worker cannot start.
    """

    stop: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, target: str, *, num_workers: int, deadline_s: float, memory_mib: int, first: Any = None):
        self.target = target
        self.deadline_s = deadline_s
        self.owner = os.getpid()
        self._start_worker = partial(Worker, target, memory_mib, first)
        self.workers = [self._start_worker()]
        atexit.register(self.close)
        while not self.workers[0].ready:
            self._wait([])
        self.workers += [self._start_worker() for _ in range(num_workers - 1)]  # nobody waits for these to be ready

    def grade(self, jobs: Sequence[Any]) -> list[Graded]:
        """The outcome of each job, in order. Takes at most (jobs / workers) deadlines. Raises Interrupted when `stop`
        says so; after that only close() may follow."""
        assert all(worker.job is None for worker in self.workers), "an earlier grade() was interrupted"
        graded: list[Graded | None] = [None] * len(jobs)
        waiting = deque(enumerate(jobs))
        while waiting or any(worker.job is not None for worker in self.workers):
            for place, worker in enumerate(self.workers):
                if not waiting or not worker.ready or worker.job is not None:
                    continue
                if worker.num_jobs >= MAX_JOBS or worker.process.poll() is not None:  # the system killed it
                    worker.kill()
                    self.workers[place] = self._start_worker()
                    continue
                number, job = waiting.popleft()
                payload = json.dumps(job).encode()
                if len(payload) > MAX_BYTES:
                    graded[number] = Graded("error", message=f"a job of more than {MAX_BYTES >> 20} MiB")
                else:
                    worker.send(number, payload, self.deadline_s)
            self._wait(graded)
            if self.stop():
                raise Interrupted
        return graded

    def close(self) -> None:
        if os.getpid() != self.owner:  # a fork of the owner, which ends
            return
        for worker in self.workers:
            worker.kill()
        self.workers = []
        atexit.unregister(self.close)

    def _wait(self, graded: list[Graded | None]) -> None:
        """Waits for a message, a dead worker or the next deadline, and handles them; outcomes go into `graded`."""
        busy = [worker for worker in self.workers if worker.job is not None or not worker.ready]
        poll = select.poll()
        for worker in busy:
            poll.register(worker.socket, select.POLLIN | (select.POLLOUT if worker.outbox else 0))
        seconds = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
        poll.poll(1000 * min(max(0.0, seconds), STOP_SECONDS))
        for worker in busy:
            try:
                message = worker.pump()
            except (ConnectionError, TimeoutError, ValueError) as error:
                self._end_worker(worker, graded, is_late=isinstance(error, TimeoutError))
                continue
            if message is not None and worker.ready:
                graded[worker.job], worker.job = Graded(**message), None
            elif message is not None and message["outcome"] != "ok":
                self._fail(message["message"])
            elif message is not None:
                worker.ready = True

    def _end_worker(self, worker: Worker, graded: list[Graded | None], is_late: bool) -> None:
        """The worker died, or overran its deadline: records the outcome of its job and starts a new worker."""
        if not is_late:  # its socket closes a moment before the process ends
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(0.2)
        code = worker.kill()
        seconds = self.deadline_s if worker.ready else START_SECONDS
        message = f"no answer in {seconds:g} s" if is_late else f"the worker died: exit code {code}"
        if not worker.ready:
            self._fail(f"a worker did not start: {message}")
        graded[worker.job] = Graded("timeout" if is_late else "error", message=message)
        self.workers[self.workers.index(worker)] = self._start_worker()

    def _fail(self, problem: str) -> None:
        self.close()
        raise ConfigError(f"grader {self.target}: {problem}")


# ------------------------------------------------------------------------------------------------ in the worker process


def main(target: str, descriptor: int, memory_mib: int, first: Any) -> None:
    """Imports the function, does the first job, reports that, then answers jobs until the trainer closes the socket."""
    die_with_parent()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when it ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)

    def answer(work: Callable[[], Any]) -> None:
        try:
            payload = json.dumps({"outcome": "ok", "value": work()}).encode()
            if len(payload) > MAX_BYTES:
                raise ValueError("the value is too large")
        except Exception as error:  # any exception of a grader is an outcome, which is counted and bounded
            message = f"{type(error).__name__}: {error}"[:1000]
            payload = json.dumps({"outcome": "error", "message": message}).encode()
        connection.sendall(payload + b"\n")

    function = None

    def start() -> None:
        nonlocal function
        function = pkgutil.resolve_name(target)
        if first is not None:
            function(first)

    answer(start)
    with connection.makefile("rb") as stream:
        for line in stream:
            answer(lambda line=line: function(json.loads(line)))
            _end_children()


def _end_children() -> None:
    """Ends the processes that the last job has started."""
    with suppress(ChildProcessError):  # there is none left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                kill_descendants(os.getpid())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
