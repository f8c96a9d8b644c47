"""The line of a long phase on the terminal of rank 0. Where standard output is no terminal, nothing is written."""

import sys
import threading
from collections.abc import Iterable

from tqdm import tqdm

import base.system.exits


class Progress(tqdm):
    """`with Progress(name): ...`, or `for item in Progress(name, items)`."""

    monitor_interval = 0  # no thread of tqdm's

    def __init__(self, name: str, items: Iterable | None = None):
        layout = "{desc}" if items is None else None
        is_hidden = None  # where the file is no terminal
        if base.system.exits.job_rank != 0:
            is_hidden = True
        super().__init__(items, name, leave=False, file=sys.stdout, disable=is_hidden, bar_format=layout)


Progress.set_lock(threading.RLock())  # tqdm's own lock is one of multiprocessing: only rank 0 writes
