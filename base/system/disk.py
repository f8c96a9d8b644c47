"""The files that a run writes, whatever the disk does: a file is replaced whole, or grows by whole lines. No torch."""

import contextlib
import errno
import io
import os
import shutil
import sys
from pathlib import Path

from config import printable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_whole(file: Path, text: str, *, replace: bool = True, encoding: str = "utf-8") -> None:
    """Writes a file that readers see whole or not at all. Without `replace`, FileExistsError where it is there."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding=encoding)
        flush(temporary)
        if replace:
            os.replace(temporary, file)
        else:
            os.link(temporary, file)
    finally:
        with contextlib.suppress(OSError):  # it could not be made, or was renamed
            temporary.unlink()


def replace_folder(new: Path, folder: Path) -> None:
    """Renames `new` to `folder`. What was there is removed after that, so a disk that refuses costs neither."""
    old = folder.with_name(f"{folder.name}.old")
    flush(new)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def append(file: Path, lines: bytes) -> None:
    """Adds lines to a file, all or none. The file is open only meanwhile: it may have been removed or replaced."""
    with file.open("ab", buffering=0) as stream:
        end = stream.tell()
        try:
            while lines:
                lines = lines[stream.write(lines) :]
        except OSError:
            stream.truncate(end)
            raise


def flush(path: Path) -> None:
    """Writes a file or folder through to the disk: else a rename can survive a power cut, and the content not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_os_error(error: OSError) -> str:
    """What is wrong, and with which file if the error knows."""
    problem = error.strerror or str(error)
    if error.errno in NO_ROOM:
        problem = "the disk is full"
    name = error.filename2 or error.filename  # of a copy, the file that is written
    if name:
        return f"{name}: {problem}"
    return problem


class Console(io.FileIO):
    """Standard output or error. Where its disk is full or its reader is gone, the text is lost and nothing else."""

    def write(self, data) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def keep_console() -> None:
    """From here on no `print` of this process raises OSError or UnicodeError, in users' code and libraries either."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = io.BufferedWriter(Console(stream.fileno(), "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))


def say(text: str, *, is_error: bool = False) -> None:
    """Prints a line of the run. It may quote what agents, graders, datasets or replies wrote: nothing in it clears the
    user's screen, and nothing cannot be encoded."""
    lines = [printable(line) for line in text.split("\n")]
    print("\n".join(lines), file=sys.stderr if is_error else sys.stdout, flush=True)
