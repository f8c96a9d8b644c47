"""Fetches models and datasets from the Hugging Face hub. Local files need no network library. No torch."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from config import DataError


def download(
    name: str, patterns: list[str], problem: str, instead: str, repo_type: str = "model", revision: str | None = None
) -> Path:
    """The local copy of a hub repository's files that match `patterns`; without network, an earlier copy. If there is
    neither, raises a DataError that begins with `problem` and ends with `instead`."""
    try:
        copy = huggingface_hub.snapshot_download(name, repo_type=repo_type, revision=revision, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        text = " ".join(str(error).split())
        cause = f"{type(error).__name__}: {text[:200]}"
        raise DataError(f"{problem} and could not be fetched from the hub ({cause}); {instead}") from error
    return Path(copy)
