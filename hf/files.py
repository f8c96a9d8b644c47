"""Reads the files of a model folder or of the Hugging Face hub, with errors that name the file. No torch."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from config import DataError


@contextmanager
def open_file(name: str | Path) -> Iterator[BinaryIO]:
    """The file, open for its bytes. DataError where it cannot be opened, or read in the `with` block."""
    try:
        with open(name, "rb") as file:
            yield file
    except (OSError, ValueError) as error:  # ValueError: a byte 0 or half a surrogate pair in the name
        raise DataError(f"{name}: cannot be read ({getattr(error, 'strerror', error)})") from error


def read_bytes(name: str | Path) -> bytes:
    """The content of a file; DataError where there is none."""
    with open_file(name) as file:
        return file.read()


def parse_json(content: bytes, where: str | Path, encoding: str = "utf-8", *, unique_keys: bool = False) -> Any:
    """The value of a JSON text. Raises DataError, beginning with `where`, for anything else, and with `unique_keys` for
    an object that has a key twice."""
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
    """The local copy of a hub repository's files that match `patterns`; without network, the copy made before. If there
    is neither, raises a DataError that begins with `problem` and ends with `instead`."""
    import huggingface_hub  # on demand: local files need no network library
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    options = {"repo_type": repo_type, "revision": revision, "allow_patterns": patterns}
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(f"{problem} and could not be fetched from the hub ({cause}); {instead}") from error
