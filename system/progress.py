"""How far a long phase is: one line of a terminal, rewritten in place by a thread. Where standard output is none, and
on other ranks than 0, nothing is shown."""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import system.exits

CLEAR = "\r\x1b[2K"  # takes the line away
SECONDS = 0.5  # so often the line is written, first after as long


class Progress:
    """`with Progress(name, total, num_done):` shows `num_done()`, else `done`, of the total, and the time left; without
    a total, the seconds since the start. What Python code prints meanwhile comes above."""

    def __init__(self, name: str, total: int = 0, num_done: Callable[[], int] | None = None):
        self.name = name
        self.total = total
        self.done = 0
        self.num_done = num_done or (lambda: self.done)
        self.is_shown = system.exits.job_rank == 0 and sys.stdout.isatty()

    def __enter__(self) -> "Progress":
        if self.is_shown:
            self.streams = sys.stdout, sys.stderr
            self.lock, self.end = threading.RLock(), threading.Event()
            self.is_line_open = False  # one of others
            sys.stdout, sys.stderr = (_Above(self, each) if each.isatty() else each for each in self.streams)
            self.thread = threading.Thread(target=self._show, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        if self.is_shown:
            self.end.set()
            self.thread.join()
            sys.stdout, sys.stderr = self.streams
            print(CLEAR, end="", flush=True)

    def _show(self) -> None:
        start = time.monotonic()
        while not self.end.wait(SECONDS):
            text = self.text(time.monotonic() - start)[: shutil.get_terminal_size().columns - 1]
            with self.lock:
                if not self.is_line_open:
                    print(f"{CLEAR}{text}\r", end="", file=self.streams[0], flush=True)  # others may write over it

    def text(self, seconds: float) -> str:
        done = self.done = min(self.total, max(self.done, self.num_done()))
        if not done:
            return f"{self.name}, {seconds:.0f} s"
        left = seconds * (self.total - done) / done
        return f"{self.name}: {done:,} of {self.total:,} ({done / self.total:.0%}), {left:.0f} s left"


class _Above:
    """A stream of the terminal that takes the line away before it writes."""

    def __init__(self, progress: Progress, stream: TextIO):
        self.progress, self.stream = progress, stream

    def write(self, text: str) -> int:
        with self.progress.lock:
            if not self.progress.is_line_open:
                self.stream.write(CLEAR)
            self.progress.is_line_open = not text.endswith("\n")
            return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
