"""Reads the files of a model folder, a dataset or a run, with errors that name the file. No torch."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from config import ConfigError, DataError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
MAX_BYTES = 1 << 30  # of a file that is read whole, or of a line


@contextmanager
def open_file(name: str | Path) -> Iterator[BinaryIO]:
    """The file, open for its bytes. DataError if it cannot be opened or read, or is no regular file (a pipe)."""
    try:
        try:
            file = open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
        except ValueError as error:  # a null, or half a character
            raise OSError(None, "not a file's name") from error
        with file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(None, "not a regular file")
            yield file
    except OSError as error:
        tried = ""
        if not os.path.isabs(name):
            tried = f"; relative paths start in {os.getcwd()}: give an absolute one"
        raise DataError(f"{name}: cannot be read ({error.strerror}{tried})") from error


def read_bytes(name: str | Path) -> bytes:
    """The content of a file; DataError if it cannot be read, or has more than MAX_BYTES."""
    with open_file(name) as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise OSError(None, f"more than {MAX_BYTES:,} bytes")
        return file.read()


def parse_json(content: bytes, where: str | Path) -> Json:
    """The value of a JSON text. Raises DataError, beginning with `where`, for anything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or not UTF-8
        raise DataError(f"{where}: not valid JSON ({error})") from error


def read_json(path: Path) -> dict:
    """The JSON object in a file; DataError names the file, and the line, if it is missing or malformed."""
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_text(name: str | Path) -> str:
    """The text of a file; DataError if it cannot be read."""
    try:
        text = read_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: cannot be read ({error})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_records(file: Path, bad_lines: list[int] | None = None) -> Iterator[tuple[int, dict]]:
    """(offset of its end, object) of each line. The last line is skipped if a kill cut it. Any other line that the
    program cannot have written raises ConfigError; with `bad_lines`, its number is appended there instead."""
    end = 0
    with open_file(file) as lines:  # of bytes: text has other line ends too, and a cut line may be no text
        for number, line in enumerate(iter(partial(lines.readline, MAX_BYTES), b""), 1):
            end += len(line)
            is_cut = not line.endswith(b"\n")
            try:
                record = _record_of(line)
            except (ValueError, RecursionError) as error:
                if bad_lines is not None:
                    bad_lines.append(number)
                elif not is_cut:
                    raise ConfigError(f"{file}:{number}: not written by grpo.py ({error}): remove the line") from error
                continue
            if not is_cut:
                yield end, record


def _record_of(line: bytes) -> dict:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
        raise ValueError("not an object with a step")
    return record
