"""The process of a worker, started by pool.py as a script: answers jobs until its owner closes the socket.

The user's modules come first. This package has the name PACKAGE here, and FOLDER, which holds it, is searched last, and
only for what the user's module lacks: a user's judges, math or config is imported under its own name. Standard library
only: the interpreter may be another one than the owner's.
"""

import ctypes
import importlib
import importlib.util
import json
import operator
import os
import resource
import signal
import socket
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PACKAGE = "_judges"
FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
MAX_BYTES = 16 << 20  # of a job or a value
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Options of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(target: str, descriptor: int, memory_mib: int, first: str) -> None:
    """Imports the function, does the first job, reports that, then answers jobs until the owner closes the socket."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in ENDING:
        # The owner decides when it ends. Unlike SIG_IGN, no program that the worker starts inherits this.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    if memory_mib:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    connection.sendall(answer(target, first))
    with connection.makefile("rb") as stream:
        for line in stream:
            connection.sendall(answer(target, line))
            end_children()


def answer(target: str, line: str | bytes) -> bytes:
    """The outcome of a job, as a line of JSON. null asks only for the import."""
    try:
        job = json.loads(line)
        function = load(target)
        value = None if job is None else function(job)
        payload = json.dumps({"outcome": "ok", "value": value}).encode()
        if len(payload) > MAX_BYTES:
            raise ValueError("the value is too large")
    except Exception as error:  # any exception of a grader is an outcome, which is counted and bounded
        message = f"{type(error).__name__}: {error}"[:1000]
        payload = json.dumps({"outcome": "error", "message": message}).encode()
    return payload + b"\n"


def load(target: str) -> Callable:
    """The function "module:name" of the user, ".module:name" of this package, or "/folder/file.py:name"."""
    module, _, name = target.rpartition(":")
    if module.startswith("."):
        found = importlib.import_module(module, PACKAGE)
    elif module.endswith(".py"):
        found = load_file(module)
    else:
        found = import_users(module)
    return operator.attrgetter(name)(found)


def load_file(path: str) -> types.ModuleType:
    """A file of the owner's, as a module that no module of the user's can be confused with."""
    name = f"{PACKAGE}_file"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def import_users(name: str) -> types.ModuleType:
    """A module of the user's. If it, or what it imports, is found nowhere else, it may lie beside this package."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if FOLDER in sys.path:
            raise
    sys.path.append(FOLDER)
    return importlib.import_module(name)


def end_children() -> None:
    """Kills what the job started and left behind."""
    with suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                kill_descendants(os.getpid())


def kill_descendants(pid: int) -> None:
    """Kills all processes below `pid`, whatever their session, until none is left: a worker adopts the orphans among
    the processes that it started (PR_SET_CHILD_SUBREAPER), so they all stay below it."""
    while doomed := descendants(pid):
        for process in doomed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes below `pid` that have not ended."""
    children = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is hidden from us
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state not in "ZX":
                children[int(parent)].append(int(entry.name))
    below = list(children[pid])
    for process in below:  # the list grows while the loop goes down the tree
        below += [child for child in children[process] if child not in below]
    return below


if __name__ == "__main__":
    package = types.ModuleType(PACKAGE)
    package.__path__ = [os.path.dirname(os.path.realpath(__file__))]
    sys.modules[PACKAGE] = package
    sys.modules[f"{PACKAGE}.worker"] = sys.modules["__main__"]
    sys.path[:] = dict.fromkeys([*json.loads(sys.argv[5]), *sys.path])
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
