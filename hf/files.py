"""Reads the files of a model folder or of the Hugging Face hub, with errors that name the file. No torch."""

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from config import DataError

MAX_FILE_BYTES = 32 * 2**20  # of a file that is read whole: ten times the largest index or template in use


@contextmanager
def open_regular(name: str | Path) -> Iterator[BinaryIO]:
    """A regular file, open for its bytes. DataError for anything else, and at once: to open a pipe would wait for its
    writer, and a device has no end; and where the file cannot be read in the `with` block."""
    try:
        with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file; pipes and devices are not read")
            yield file
    except (OSError, ValueError) as error:  # ValueError: a byte 0 or half a surrogate pair in the name
        raise DataError(f"{name}: cannot be read ({getattr(error, 'strerror', error)})") from error


def read_bytes(name: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file. DataError where there is none, or more than `max_bytes` of it."""
    with open_regular(name) as file:
        content = file.read(max_bytes + 1) or b""  # None: a file below /proc that would wait
    if len(content) > max_bytes:
        raise DataError(f"{name}: more than {max_bytes >> 20} MiB")
    return content


def parse_json(content: bytes, where: str | Path, encoding: str = "utf-8", *, unique_keys: bool = False) -> Any:
    """The value of a JSON text. DataError, which begins with `where`, for what is no JSON, and with `unique_keys` for
    an object with a key twice."""
    try:
        return json.loads(content.decode(encoding), object_pairs_hook=_unique if unique_keys else None)
    except (ValueError, RecursionError, MemoryError) as error:  # ValueError: wrong encoding, no JSON, or a key twice
        raise DataError(f"{where}: not valid JSON ({str(error) or 'too much for the memory'})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {key!r:.80} twice")
    return value


def read_json(path: Path) -> dict:
    """A JSON object from `path`; DataError names the file (and line) when it is missing or malformed."""
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_text(name: str | Path) -> str:
    """The text of a file; DataError where there is none."""
    try:
        return read_bytes(name).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: cannot be read ({error})") from error


def download(
    name: str, patterns: list[str], problem: str, instead: str, repo_type: str = "model", revision: str | None = None
) -> Path:
    """The local copy of a repository of the hub, of its files that match `patterns`; without network, the copy that was
    made before. DataError begins with `problem` and ends with `instead` where neither can be had."""
    import huggingface_hub  # on demand: local files need no network library
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    options = {"repo_type": repo_type, "revision": revision, "allow_patterns": patterns}
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(f"{problem} and could not be fetched from the hub ({cause}); {instead}") from error
