"""Where the rows of a dataset come from: a file, the Hugging Face hub, or a function of the user's.

Owns the table of dataset presets and the reading of jsonl, json and parquet. Does not own what the fields of a row mean
(problems.py). A jsonl file is never held in memory: of each line, its offset and checksum stay (12 bytes), and the line
is read again when its turn comes. Rows of other forms are held; pyarrow is imported only to read parquet.
"""

import json
import os
import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from config import DataError, DatasetConfig
from hf.files import download
from system.imports import import_attribute

PARQUET_BRANCH = "refs/convert/parquet"  # where the hub keeps each dataset as SUBSET/SPLIT/0000.parquet, 0001, ...
GROUND_TRUTH = "reward_model.ground_truth"
MAX_LINE_BYTES = 64 * 2**20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class DatasetPreset:
    """A public dataset: its name on the hub, what to take of it (subsets joined by +), and the keys of its rows."""

    hub: str
    subset: str | None
    split: str
    input_key: str
    output_key: str


# By NeMo RL's names; case, "-", "_" and blanks do not count. All of them are mathematics, so env_name math.
PRESETS = {
    "gsm8k": DatasetPreset("openai/gsm8k", "main", "train", "question", "answer"),
    "MATH-500": DatasetPreset("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "OpenMathInstruct-2": DatasetPreset("nvidia/OpenMathInstruct-2", None, "train_1M", "problem", "expected_answer"),
    "DeepScaler": DatasetPreset("agentica-org/DeepScaleR-Preview-Dataset", None, "train", "problem", "answer"),
    "AIME2024": DatasetPreset("HuggingFaceH4/aime_2024", None, "train", "problem", "answer"),
    "AIME2025": DatasetPreset("opencompass/AIME2025", "AIME2025-I+AIME2025-II", "test", "question", "answer"),
    "AIME2026": DatasetPreset("MathArena/aime_2026", None, "train", "problem", "answer"),
    "DAPOMath17K": DatasetPreset("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", "prompt", GROUND_TRUTH),
    "DAPOMathAIME2024": DatasetPreset("BytedTsinghua-SIA/AIME-2024", None, "train", "prompt", GROUND_TRUTH),
}


def with_preset(cfg: DatasetConfig) -> DatasetConfig:
    """The section with the keys that its `dataset_name` implies. `dataset_name` is None in the result, except where it
    is a function of the user's. Raises DataError for an unknown name."""
    name = cfg.dataset_name
    if name is None:
        return replace(cfg, env_name=cfg.env_name or "exact")
    if ":" in name:
        return replace(cfg, env_name=cfg.env_name or "exact")
    preset = {_plain(key): value for key, value in PRESETS.items()}.get(_plain(name))
    if preset is None:
        raise DataError(
            f"dataset_name '{name}' is unknown; known: {', '.join(PRESETS)}, and module:function of yours; or name a "
            "file or a hub dataset with data_path, and no dataset_name"
        )
    keys = {key: getattr(cfg, key) or getattr(preset, key) for key in ("split", "subset", "input_key", "output_key")}
    path, env_name = cfg.data_path or preset.hub, cfg.env_name or "math"
    return replace(cfg, name=cfg.set_name, dataset_name=None, data_path=path, env_name=env_name, **keys)


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def open_source(cfg: DatasetConfig) -> "Source":
    """The source that a section names; the section is one from `with_preset`. DataError where it cannot be read."""
    if cfg.dataset_name:
        return InMemorySource(cfg.dataset_name, import_attribute(cfg.dataset_name, "dataset_name")(cfg))
    name, suffix = cfg.data_path, Path(cfg.data_path).suffix
    if suffix == ".csv":
        raise DataError(f"{name}: csv is not read: use jsonl, json or parquet")
    # os.path.exists says no to a name that is too long for the file system; Path.exists raises.
    is_local = name.startswith((".", "/")) or suffix in (".jsonl", ".json", ".parquet") or "\0" in name
    if not is_local and name.count("/") == 1 and not os.path.exists(name):
        return InMemorySource(name, _read_hub(name, cfg))
    if suffix == ".parquet":
        return InMemorySource(name, _read_parquet(name, [name]))
    if "\0" in name:
        raise DataError(f"{name!r}: cannot be read (a byte 0 in the name)")
    try:
        with open(name, "rb") as file:
            start = file.read(4096).removeprefix(BOM).lstrip()
        return InMemorySource(name, _read_json(Path(name))) if start.startswith(b"[") else JsonLines(name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error


class JsonLines:
    """A file with a JSON object in each line. A row's number is its line's, from 0; blank lines are no rows."""

    def __init__(self, name: str):
        self.name = name
        self.offsets = array("Q")
        self.checksums = array("I")

    def numbers(self) -> Sequence[int]:
        """The numbers of all rows, in order. To be called once, before any row is read: it reads the file through."""
        numbers = array("Q")
        offset = 0
        with open(self.name, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number = len(self.offsets)
                self.offsets.append(offset)
                self.checksums.append(zlib.crc32(line))
                offset += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(f"{self.where(number)}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
                if line.strip():
                    numbers.append(number)
        return numbers

    def checksum(self) -> int:
        """Differs where two ranks find different rows under the same name."""
        return zlib.crc32(self.checksums)

    def __getitem__(self, number: int) -> dict:
        try:
            with open(self.name, "rb") as file:
                file.seek(self.offsets[number])
                line = file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read any more ({error.strerror})") from error
        where = self.where(number)
        if zlib.crc32(line) != self.checksums[number]:
            raise DataError(f"{where}: the file was changed after the run began to read it")
        try:
            row = json.loads((line.removeprefix(BOM) if number == 0 else line).decode("utf-8"))
        except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
            raise DataError(f"{where}: not valid JSON ({error})") from error
        return _object(row, where)

    def where(self, number: int) -> str:
        return f"{self.name}:{number + 1}"


class InMemorySource:
    """Rows that a sequence holds: a list, a table, or what a function of the user's returned."""

    def __init__(self, name: str, rows: Sequence[dict]):
        self.name = name
        self.rows = rows

    def numbers(self) -> Sequence[int]:
        return range(len(self.rows))

    def checksum(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict:
        return _object(self.rows[number], self.where(number))

    def where(self, number: int) -> str:
        return f"{self.name}, row {number + 1}"


Source = JsonLines | InMemorySource


def _object(row: Any, where: str) -> dict:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _read_json(path: Path) -> list[dict]:
    """A JSON array of objects. It is parsed as a whole: jsonl is the form for large data."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error


class _Table(Sequence):
    """A pyarrow table, which stays in its columns: far smaller than its rows as dicts."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: int) -> dict:
        return self.table.slice(number, 1).to_pylist()[0]


def _read_parquet(name: str, files: Sequence[str | Path]) -> Sequence[dict]:
    """The rows of the files, one file after the other; a field that some files lack is None there."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{name}: to read parquet, `pip install pyarrow`, or give the rows as jsonl") from error
    try:
        tables = [pyarrow.parquet.read_table(file, memory_map=True) for file in files]
        return _Table(pyarrow.concat_tables(tables, promote_options="default"))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{name}: cannot be read as parquet ({error})") from error


def _read_hub(name: str, cfg: DatasetConfig) -> Sequence[dict]:
    """The rows of a dataset of the hub, one subset after the other, from the hub's own parquet copy of it."""
    instead = "or download it elsewhere and give its file: data_path=FILE, .jsonl, .json or .parquet"
    folders = [f"{subset or 'default'}/{cfg.split or 'train'}" for subset in (cfg.subset or "").split("+")]
    patterns = [f"{folder}/*.parquet" for folder in folders]
    options = {"repo_type": "dataset", "revision": PARQUET_BRANCH}
    copy = download(name, patterns, f"data_path: '{name}' is no local file", f"check its name, {instead}", **options)
    files = [sorted(copy.glob(pattern)) for pattern in patterns]
    for folder, found in zip(folders, files, strict=True):
        if not found:
            raise DataError(
                f"data_path: '{name}' has no {folder} in the hub's parquet copy of it (branch {PARQUET_BRANCH}): set "
                f"subset and split to a folder that is there, {instead}"
            )
    return _read_parquet(name, [file for found in files for file in found])
