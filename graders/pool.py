"""Worker processes that grade: jobs go in, values come out, and a job that overruns its deadline is killed.

Owns the processes and their deadlines, not what is graded: that is a function by dotted path, imported in the worker.
A worker has its own session, a small environment, a memory limit and no torch; jobs and values cross a socket as JSON.
Nothing a job does can hold up the trainer for longer than its deadline: no threads, no SIGALRM, which sympy can block
and which fails off the main thread; the kernel kills the worker and all it has started, and another takes its place.
"""

import atexit
import ctypes
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import ConfigError
from system.exits import Interrupted, die_with_parent

MAX_BYTES = 16 << 20  # of a job or a value
MAX_JOBS = 20_000  # of a worker, which is then replaced: what a grader's libraries keep in memory has a bound
STOP_SECONDS = 0.5  # between two looks at whether the run was told to stop
START_SECONDS = 120.0  # for a worker's imports, on a busy machine
MARK = "GRADER_WORKER"  # in the environment of a worker and of what it starts
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Graded:
    """How a job ended: "ok" and the function's value, "timeout", or "error" and what happened."""

    outcome: str
    value: Any = None
    message: str = ""


class _Worker:
    """One process and our end of its socket."""

    def __init__(self, target: str, memory_mib: int, first: Any):
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}.{self.socket.fileno()}"
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", MARK: self.mark}
        arguments = [target, str(theirs.fileno()), str(memory_mib), json.dumps(first)]
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # torchrun's must not end a worker that starts just now
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-m", "graders.pool", *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a grader prints is nobody's protocol
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()
        self.inbox, self.outbox = bytearray(), b""
        self.ready = False  # has imported the function
        self.job: int | None = None
        self.num_jobs = 0
        self.deadline = time.monotonic() + START_SECONDS

    def send(self, job: int, payload: bytes, seconds: float) -> None:
        self.job, self.deadline = job, time.monotonic() + seconds
        self.num_jobs += 1
        self.outbox = len(payload).to_bytes(4, "big") + payload

    def pump(self) -> Any:
        """Moves bytes both ways; a whole message, if there is one. ConnectionError when the worker is gone."""
        try:
            while self.outbox:
                self.outbox = self.outbox[self.socket.send(self.outbox) :]
        except BlockingIOError:
            pass
        try:
            chunk = self.socket.recv(1 << 20)
        except BlockingIOError:
            return None
        if not chunk:
            raise ConnectionError
        self.inbox += chunk
        size = int.from_bytes(self.inbox[:4], "big")
        if size > MAX_BYTES:
            raise ConnectionError
        if len(self.inbox) < 4 + size or len(self.inbox) < 4:
            return None
        message, self.inbox = json.loads(self.inbox[4 : 4 + size]), self.inbox[4 + size :]
        return message

    def kill(self) -> int | None:
        """Ends the process and everything it has started; the exit code of one that had ended by itself."""
        try:
            code = self.process.wait(0)
        except subprocess.TimeoutExpired:
            code = None
            os.kill(self.process.pid, signal.SIGSTOP)  # or it would go on to start more
        kill_descendants(self.process.pid, None if code is None else self.mark)
        self.process.kill()
        self.process.wait()
        self.socket.close()
        return code


def kill_descendants(pid: int, mark: str | None = None) -> None:
    """Kills all processes below `pid`, whatever their session: what a worker starts stays below it, since it adopts the
    orphans among them (PR_SET_CHILD_SUBREAPER). Of a dead worker's, those that have its mark."""
    while True:
        parents: dict[int, list[int]] = {}
        below: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit():
                    state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                    if state not in "ZX":
                        parents.setdefault(int(parent), []).append(int(entry.name))
                        if mark and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                            below.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        below += parents.get(pid, ())
        for child in below:
            below += (each for each in parents.get(child, ()) if each not in below)
        if not below:
            return
        for child in below:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass


class GraderPool:
    """`num_workers` processes that each call the function `target` ("module:name") on one job at a time.

    A job and what the function makes of it are JSON-able. `first` is a job that each worker does before it counts as
    started: what the function imports is then on no other job's time. Made before torch and vllm are imported; used by
    one thread. ConfigError when a worker cannot start. stop: of all pools of the process, whether to give up waiting.
    """

    stop: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, target: str, *, num_workers: int, deadline_s: float, memory_mib: int, first: Any = None):
        self.deadline_s, self.owner, self.arguments = deadline_s, os.getpid(), (target, memory_mib, first)
        self.workers = [_Worker(*self.arguments)]
        atexit.register(self.close)
        while not self.workers[0].ready:
            self._step([])
        self.workers += [_Worker(*self.arguments) for _ in range(num_workers - 1)]  # ready by the first jobs, or soon

    def grade(self, jobs: Sequence[Any]) -> list[Graded]:
        """The outcome of each job, in order. Takes at most a deadline for each of them over the number of workers.
        Interrupted when told to stop meanwhile; then only close() may follow."""
        assert all(worker.job is None for worker in self.workers), "a grade() before this one was interrupted"
        graded: list[Graded | None] = [None] * len(jobs)
        waiting = deque(enumerate(jobs))
        while waiting or any(worker.job is not None for worker in self.workers):
            for worker in list(self.workers):
                if not waiting or not worker.ready or worker.job is not None:
                    continue
                if worker.num_jobs >= MAX_JOBS or worker.process.poll() is not None:  # the system killed it
                    self._replace(worker)
                    continue
                number, job = waiting.popleft()
                payload = json.dumps(job).encode()
                if len(payload) > MAX_BYTES:
                    graded[number] = Graded("error", message=f"a job of more than {MAX_BYTES >> 20} MiB")
                else:
                    worker.send(number, payload, self.deadline_s)
            self._step(graded)
            if self.stop():
                raise Interrupted
        return graded

    def close(self) -> None:
        if os.getpid() != self.owner:  # a fork of the process, at its end
            return
        for worker in self.workers:
            worker.kill()
        self.workers = []
        atexit.unregister(self.close)

    def _step(self, graded: list[Graded | None]) -> None:
        """Waits until something happens, at most until the next deadline, and sees to it; results go into `graded`."""
        busy = [worker for worker in self.workers if worker.job is not None or not worker.ready]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
                selector.register(worker.socket, events, worker)
            wait = min(worker.deadline for worker in busy) - time.monotonic()
            moved = [key.data for key, _ in selector.select(min(max(0.0, wait), STOP_SECONDS))]
        for worker in busy:
            try:
                message = worker.pump() if worker in moved else None
            except (ConnectionError, ValueError):  # ValueError: what came is no JSON
                self._ended(worker, graded, None)
                continue
            if message is not None and worker.ready:
                graded[worker.job], worker.job = Graded(**message), None
            elif message is not None and message["outcome"] != "ok":
                self._fail(message["message"])
            elif message is not None:
                worker.ready = True
            elif time.monotonic() > worker.deadline:
                self._ended(worker, graded, f"no answer in {self.deadline_s if worker.ready else START_SECONDS:g} s")

    def _ended(self, worker: _Worker, graded: list[Graded | None], late: str | None) -> None:
        """A worker that is dead or must die: its job has an outcome, it a successor."""
        if late is None:  # its socket closes a moment before the process ends
            try:
                worker.process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
        code = worker.kill()
        message = late or f"the worker died: exit code {code}"
        if not worker.ready:
            self._fail(f"a worker did not start: {message}")
        graded[worker.job] = Graded("timeout" if late else "error", message=message)
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        if worker.socket.fileno() >= 0:
            worker.kill()
        self.workers[self.workers.index(worker)] = _Worker(*self.arguments)

    def _fail(self, problem: str) -> None:
        self.close()
        raise ConfigError(f"grader {self.arguments[0]}: {problem}")


# ------------------------------------------------------------------------------------------------ in the worker process


def main(target: str, descriptor: int, memory_mib: int, first: Any) -> None:
    """Imports the function, does the first job, says so, then answers jobs until the other end closes."""
    die_with_parent()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when it ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)

    def answer(work) -> None:
        try:
            payload = json.dumps({"outcome": "ok", "value": work()}).encode()
            if len(payload) > MAX_BYTES:
                raise ValueError("the value is too large")
        except Exception as error:  # whatever a grader raises is an outcome, counted and bounded
            message = f"{type(error).__name__}: {error}"[:1000]
            payload = json.dumps({"outcome": "error", "message": message}).encode()
        connection.sendall(len(payload).to_bytes(4, "big") + payload)

    module, _, name = target.partition(":")
    function = None

    def start() -> None:
        nonlocal function
        function = getattr(importlib.import_module(module), name)
        if first is not None:
            function(first)

    answer(start)
    with connection.makefile("rb") as stream:
        while head := stream.read(4):
            job = json.loads(stream.read(int.from_bytes(head, "big")))
            answer(lambda job=job: function(job))
            _end_children()


def _end_children() -> None:
    """What a job has started ends with it."""
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                kill_descendants(os.getpid())
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
