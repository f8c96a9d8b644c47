"""Run folders and checkpoints: where they are, whether they can be written, and which checkpoints are whole. No torch.

A checkpoint is a folder `step_000010` with the files and file sizes that its `meta.json` lists; anything else under
such a name is damaged. run/checkpoint.py writes the tensors; run/restore.py reads them and compares the checksums of
the files.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from base.system.disk import describe_os_error
from base.system.files import read_json
from config import CheckpointingConfig, Config, ConfigError, DataError

VERSION = 5  # the format of a checkpoint's files
# What reading a file raises that has another form.
FOREIGN = (ValueError, LookupError, TypeError, AttributeError, SafetensorError, msgspec.ValidationError)


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Number -> path of the exp_007 or step_000010 in `folder`, highest number first."""
    paths = {p.name.removeprefix(prefix): p for p in folder.glob(f"{prefix}*")}
    numbers = filter(re.compile("[0-9]+").fullmatch, paths)  # isdecimal() takes other alphabets' digits too
    return {int(number): paths[number] for number in sorted(numbers, key=int, reverse=True)}


def checkpoint_folder(cfg: CheckpointingConfig, run_folder: Path) -> Path:
    """Where a run's checkpoints are. A run deletes old ones, so each has a folder of its own in a `checkpoint_dir`."""
    return Path(cfg.checkpoint_dir) / run_folder.resolve().name if cfg.checkpoint_dir else run_folder / "checkpoints"


def committed(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, newest first. ConfigError where one has another format."""
    return [path for path in numbered(folder, "step_").values() if isinstance(read_meta(path), dict)]


def by_metric(folder: Path, higher_is_better: bool) -> list[Path]:
    """The whole checkpoints in `folder` that have the metric of metric_name, best first, the newer first of equals."""
    sign = -1 if higher_is_better else 1
    rated = []
    for path in committed(folder):
        metric = read_meta(path)["metric"]
        if metric is not None:
            rated.append((sign * metric, path))
    return [path for _, path in sorted(rated, key=lambda pair: pair[0])]


def read_meta(checkpoint: Path) -> dict | str:
    """The content of the checkpoint's meta.json; where the checkpoint is not whole, what is wrong, naming the file.
    ConfigError where another version of the program wrote it: it is whole, but nothing here can read it."""
    file = checkpoint / "meta.json"
    try:
        meta = read_json(file)
        stated = meta.pop("sha256", None)
        if meta["version"] != VERSION:
            versions = f"{json.dumps(meta['version'])}, but this version of the program reads {VERSION}"
            fix = "continue with the commit that the run folder's provenance.json names, or start a new run"
            raise ConfigError(f"{file}: checkpoint format {versions}; {fix}")
        if stated != digest(meta):
            return f"{file}: content differs from its checksum"
        if checkpoint.name != f"step_{meta['step']:06d}":
            return f"{file}: belongs to step {meta['step']}"
        for name, entry in meta["files"].items():
            size = (checkpoint / name).stat().st_size
            if size != entry["bytes"]:
                return f"{checkpoint / name}: {size:,} bytes, but meta.json says {entry['bytes']:,}"
        return meta
    except DataError as error:
        return str(error)
    except OSError as error:
        return describe_os_error(error)
    except FOREIGN as error:
        return foreign(file, error)


def foreign(path: Path, error: Exception) -> str:
    """What is wrong with a file or folder at which reading failed with one of FOREIGN."""
    return f"{path}: not written by this program ({type(error).__name__}: {error})"


@contextmanager
def of_this_program(path: Path) -> Iterator[None]:
    """Within, the content of `path` is read, whose checksums are right: ConfigError where it has another form."""
    try:
        yield
    except FOREIGN as error:
        raise ConfigError(foreign(path, error)) from error


def digest(meta: dict) -> str:
    """The sha256 of all else in a meta.json."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def check_folders(cfg: Config) -> None:
    """ConfigError where a folder that the run writes could not be made or written."""
    check_writable("logger.log_dir", cfg.logger.log_dir)
    if cfg.checkpointing.checkpoint_dir:
        check_writable("checkpointing.checkpoint_dir", cfg.checkpointing.checkpoint_dir)


def check_writable(key: str, folder: str) -> None:
    """Raise ConfigError if `folder`, the value of config key `key`, could not be made or written. Leaves nothing."""
    path = Path(folder).absolute()
    while not os.path.lexists(path):  # unlike Path.exists, also false below a folder that must not be searched
        path = path.parent
    try:
        tempfile.TemporaryFile(dir=path).close()  # os.access says that /proc may be written
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot write in {path} ({error.strerror})") from None
