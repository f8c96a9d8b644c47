"""The lock on a run folder: of two runs in one, each would delete the checkpoints that the other is writing. No torch.

All ranks hold a POSIX record lock on `run.lock` as long as they live. Unlike flock's, a process that a rank has forked
does not inherit it, so an orphan keeps nobody out; but it ends when its process closes any descriptor of the file, so
no rank may open that again. docs/reliability.md says how far it reaches on NFS.
"""

import errno
import fcntl
import os
import socket
import struct
import time
from pathlib import Path

from config import ConfigError

NAME = "run.lock"


def lock(folder: Path, *, leads: bool) -> None:
    """Keeps other runs out of `folder` until this process ends. `leads`: rank 0, which comes first; the other ranks of
    its run then share the lock. ConfigError names the run that has it. OSError where the folder cannot be written."""
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)  # never closed
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_EX if leads else fcntl.LOCK_SH))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(_in_use(folder)) from error
        if leads:
            print(f"WARNING: {folder}: no locks on this disk ({error.strerror}): start no second run there", flush=True)
        return
    if leads:
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
        fcntl.lockf(descriptor, fcntl.LOCK_SH)


def check_not_running(folder: Path) -> None:
    """ConfigError names the run that holds the lock of `folder`. Not for a process that has locked it."""
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of fcntl(2): the whole file
    try:
        with (folder / NAME).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, request)
    except OSError:  # no such file, or no locks there: nobody is known to run it
        return
    if struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK:
        raise ConfigError(_in_use(folder))


def _in_use(folder: Path) -> str:
    time.sleep(0.5)  # who has just taken it may not have written yet who it is
    holder = (folder / NAME).read_text(errors="replace")[:200].strip()
    return f"{folder} is in use by another run ({holder}): wait for its end, or stop it"
