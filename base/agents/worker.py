"""Runs an agent for one rollout, in a worker process of judges/pool.py: a Python function, or a command.

The interpreter may be another one than the trainer's, and a module of any name may be the user's: this file is loaded
by its path, and imports only the standard library, and judges/ by its name in a worker.
"""

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache, partial
from tempfile import TemporaryFile
from typing import IO

from _judges import sandbox
from _judges.codec import Json
from _judges.worker import load

TAIL_BYTES = 1 << 16  # of what a command writes
EXCEPTION = re.compile(r"[\w.]+: ")  # how Python ends
ERROR = re.compile(r"(Uncaught )?[\w.$]*(Error|Exception|panic)\b[^:]*: ")
GIVEN = ("base_url", "row", "messages", "answer", "tools", "seed", "is_validation", "deadline_s")


def run(job: dict) -> Json:
    """What the agent gives, as JSON."""
    function = job["function"] and load_function(job["function"])
    kwargs = job["kwargs"]
    if "base_url" not in job:  # before the run: is the function there, and can it be called?
        if function:
            inspect.signature(function).bind(**_accepted(function, dict.fromkeys(GIVEN)), **kwargs)
        if job["isolation"] == "required":
            sandbox.run("", "", sandbox.Limits(20.0))
        return None
    # Clients read these by themselves; Anthropic's add /v1.
    os.environ.update(OPENAI_BASE_URL=job["base_url"], OPENAI_API_KEY="none")
    os.environ.update(ANTHROPIC_BASE_URL=job["base_url"].removesuffix("/v1"), ANTHROPIC_API_KEY="none")
    if not function:
        return json.loads(run_command(job["command"], job["row"], job["isolation"]))
    with printing_to_a_file() as printed:
        try:
            found = function(**_accepted(function, {name: job[name] for name in GIVEN}), **kwargs)
            if inspect.iscoroutine(found):
                found = event_loop().run(found, context=copy_context())  # what a rollout sets ends with it
        except SystemExit as error:
            _flush()
            raise RuntimeError(f"the agent exited with {error.code}: {error_line(printed):.300}") from error
        except asyncio.CancelledError as error:
            raise RuntimeError("the agent was cancelled") from error
    return json.loads(json.dumps(found, default=_plain))


@cache
def event_loop() -> asyncio.Runner:
    """One for all rollouts of this process: a library may keep a client for the process, which belongs to its loop."""
    return asyncio.Runner()


@contextmanager
def printing_to_a_file() -> Iterator[IO[bytes]]:
    """In this block, what the process writes to its output and its error output goes to the file."""
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    with TemporaryFile() as file:
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield file
        finally:
            _flush()
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed, or an object of the agent's
            stream.flush()


def _plain(value: object) -> float | str:
    """What JSON takes in place of a value that it does not know, such as a number of numpy."""
    if hasattr(value, "__float__"):
        return float(value)
    return str(value)


@cache
def load_function(path: str) -> Callable:
    """ "module:function", or "folder/file.py:function", whose folder comes first, as for `python folder/file.py`."""
    module, _, name = path.rpartition(":")
    if module.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(module))
        sys.path.insert(0, folder)
        path = f"{file.removesuffix('.py')}:{name}"
    return load(path)


def _accepted(function: Callable, given: dict) -> dict:
    """What the function has parameters for."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def run_command(command: list[str], row: dict, isolation: str = "none") -> str:
    """The last line that the command writes. It gets the row as JSON on its standard input."""
    start = partial(isolate, command) if isolation == "required" else None
    given = json.dumps(row).encode()
    with TemporaryFile() as out, TemporaryFile() as err:  # not pipes: a child of the command may hold them
        ended = subprocess.run(command, input=given, stdout=out, stderr=err, preexec_fn=start, check=False)
        if ended.returncode:
            line = error_line(err, out)
            raise RuntimeError(f"{command[0]} ended with exit code {ended.returncode}: {line:.300}")
        _, end_before, last_line = tail_of(out).rpartition("\n")
        if not end_before and out.tell() > TAIL_BYTES:
            raise RuntimeError(f"the last line of {command[0]} is longer than {TAIL_BYTES} bytes: only a reward fits")
        return last_line


def tail_of(file: IO[bytes]) -> str:
    """The end of what was written, without blank lines behind it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return file.read().decode(errors="replace").rstrip()


def error_line(*files: IO[bytes]) -> str:
    """The line that names the error, in the first of the files that is not empty: the last one, or the last that begins
    with the name of an error, as behind it Node writes a stack and its version."""
    texts = [text for text in map(tail_of, files) if text]
    if not texts:
        return "it wrote nothing"
    lines = texts[0].splitlines()
    if EXCEPTION.match(lines[-1]):
        return lines[-1]
    named = [line for line in lines if ERROR.match(line)]
    return (named or lines)[-1]


def isolate(command: list[str]) -> None:
    """Leaves this process, which becomes the command, the system's programs, the interpreter and what the command names
    to read, and no process to see or signal but its own."""
    system = ("/usr", "/bin", "/etc/ssl", "/dev/null", sys.prefix, sys.base_prefix)
    sandbox.enter_namespaces((*system, *command))
    os.chdir("/tmp")
    if child := os.fork():  # the first process of the namespace: with it all others end
        os.closerange(3, 1 << 16)  # Popen waits for them
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
