"""Reads the files of a model folder or of the Hugging Face hub, with errors that name the file. No torch."""

import json
from pathlib import Path
from typing import Any

from config import DataError


def parse_json(content: bytes, where: str | Path, encoding: str = "utf-8") -> Any:
    """The value of a JSON text. DataError, which begins with `where`, for what is no JSON."""
    try:
        return json.loads(content.decode(encoding))
    except (ValueError, RecursionError) as error:  # ValueError: wrong encoding, or no JSON
        raise DataError(f"{where}: not valid JSON ({error})") from error


def read_json(path: Path) -> dict:
    """A JSON object from `path`; DataError names the file (and line) when it is missing or malformed."""
    try:
        value = parse_json(path.read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_text(name: str | Path) -> str:
    """The text of a file; DataError where there is none."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a byte 0 in the name
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
