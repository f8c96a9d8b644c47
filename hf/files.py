"""Reads the JSON and text files of a model folder, with errors that name the file."""

import json
from pathlib import Path

from config import DataError


def read_json(path: Path) -> dict:
    """A JSON object from `path`; DataError names the file (and line) when it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_text(name: str | Path) -> str:
    """The text of a file; DataError where there is none."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a byte 0 in the name
        raise DataError(f"{name}: cannot be read ({error})") from error
