"""The machine's processes, what one has started, and signals to it."""

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path


def children():
    """Processes below this one, zombies too."""
    parents, found = {}, set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[process.name] = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    above = {str(os.getpid())}
    while above:
        above = {pid for pid, parent in parents.items() if parent in above}
        found |= above
    return found


def command_lines():
    """Of all processes, one a line; a container may have no `ps`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.append(" ".join(file.read_text(errors="replace").split("\0")))
    return "\n".join(found)


@contextmanager
def signal_amid(seconds, handler):
    """A signal after so many seconds, which this handler answers."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
