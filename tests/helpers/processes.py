"""What a process has started."""

import os
from pathlib import Path

from graders.pool import MARK


def children():
    """Processes below this one, zombies too, and those that its workers have started, whoever has adopted them."""
    parents, found, mark = {}, set(), f"{MARK}={os.getpid()}.".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[process.name] = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if mark in (process / "environ").read_bytes():
                found.add(process.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    above = {str(os.getpid())}
    while above:
        above = {pid for pid, parent in parents.items() if parent in above}
        found |= above
    return found
