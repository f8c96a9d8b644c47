"""Where the rows of a dataset come from: a file, the Hugging Face hub, or a function of the user's.

Owns the dataset presets and the reading of jsonl, json and parquet; problems.py knows what the fields of a row mean. A
jsonl file is never held in memory: of each line, its offset and checksum stay (12 bytes), and the line is read again
when its turn comes. Rows of other forms are held.
"""

import os
import re
import zlib
from array import array
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import getitem
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from config import DataError, DatasetConfig
from hf.files import download, open_regular, parse_json, read_bytes
from system.imports import call, import_attribute

PARQUET_BRANCH = "refs/convert/parquet"  # where the hub keeps each dataset as SUBSET/SPLIT/0000.parquet, 0001, ...
GROUND_TRUTH = "reward_model.ground_truth"
MAX_LINE_BYTES = 64 * 2**20
MAX_ARRAY_BYTES = 256 * 2**20  # in memory it is ten times as large
BOM = b"\xef\xbb\xbf"


class DatasetPreset(NamedTuple):
    """A public dataset: config keys, with the values that its name implies. Subsets are joined by +."""

    data_path: str
    subset: str | None
    split: str
    input_key: str
    output_key: str
    env_name: str = "math"


# By NeMo RL's names; case, "-", "_" and blanks do not count.
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
    if name is None or ":" in name:
        return replace(cfg, env_name=cfg.env_name or "exact")
    preset = next((preset for key, preset in PRESETS.items() if _plain(key) == _plain(name)), None)
    if preset is None:
        raise DataError(
            f"dataset_name '{name}' is unknown; known: {', '.join(PRESETS)}, and module:function of yours; or name a "
            "file or a hub dataset with data_path, and no dataset_name"
        )
    keys = {key: getattr(cfg, key) or implied for key, implied in preset._asdict().items()}
    return replace(cfg, name=cfg.set_name, dataset_name=None, **keys)


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that are read one by one. `checksum` differs where two ranks find different rows under the same name."""

    name: str
    numbers: Sequence[int]  # of its rows, in order
    read: Callable[[int], Any]  # number -> row
    checksum: int
    separator: str = ", row "

    def where(self, number: int) -> str:
        """A row's place, for messages."""
        return f"{self.name}{self.separator}{number + 1}"


def open_source(cfg: DatasetConfig) -> Source:
    """The source that a section names; the section is one from `with_preset`. DataError where it cannot be read."""
    if cfg.dataset_name:
        function = import_attribute(cfg.dataset_name, "dataset_name")
        problem = f"dataset_name '{cfg.dataset_name}', which is to give a sequence of rows,"
        return call(problem, _held, cfg.dataset_name, call(problem, function, cfg))
    name, suffix = cfg.data_path, Path(cfg.data_path).suffix
    if suffix == ".csv":
        raise DataError(f"{name}: csv is not read: use jsonl, json or parquet")
    # os.path.exists says no to a name that is too long for the file system; Path.exists raises.
    is_local = name.startswith((".", "/")) or suffix in (".jsonl", ".json", ".parquet") or os.path.exists(name)
    if not is_local and name.count("/") == 1:
        return _read_hub(name, cfg)
    if suffix == ".parquet":
        return _read_parquet(name, [name])
    with open_regular(name) as file:
        pieces = (piece.removeprefix(BOM).strip() for piece in iter(lambda: file.readline(4096), b""))
        if not next(filter(None, pieces), b"").startswith(b"["):
            return _json_lines(name, file)
        if file.seek(0, os.SEEK_END) > MAX_ARRAY_BYTES:
            raise DataError(f"{name}: a JSON array of more than {MAX_ARRAY_BYTES >> 20} MiB: write its rows as jsonl")
    return _held(name, parse_json(read_bytes(name, MAX_ARRAY_BYTES), name, "utf-8-sig", unique_keys=True))


def _json_lines(name: str, file: BinaryIO) -> Source:
    """A file with a JSON object in each line, here read through once. A row's number is its line's, from 0; blank lines
    are no rows."""
    numbers = array("q")
    offsets = array("Q", [0])
    checksums = array("I")
    size = file.seek(0, os.SEEK_END)  # no further: another process may go on writing
    file.seek(0)
    while offsets[-1] < size and (line := file.readline(MAX_LINE_BYTES + 1)):
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{name}:{len(offsets)}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
        if line.strip():
            numbers.append(len(checksums))
        checksums.append(zlib.crc32(line))
        offsets.append(file.tell())

    def read(number: int) -> Any:
        with open_regular(name) as file:
            file.seek(offsets[number])
            line = file.readline(MAX_LINE_BYTES)
        where = f"{name}:{number + 1}"
        if zlib.crc32(line) != checksums[number]:
            raise DataError(f"{where}: the file was changed after the run began to read it")
        return parse_json(line, where, "utf-8" if number else "utf-8-sig", unique_keys=True)

    return Source(name, numbers, read, zlib.crc32(checksums), ":")


def _held(name: str, rows: Sequence[dict]) -> Source:
    def read(number: int) -> Any:
        row = call(f"{name}, row {number + 1}", getitem, rows, number)
        return deepcopy(row)  # a processor may change it

    return Source(name, range(len(rows)), read, len(rows))


def _read_parquet(name: str, files: Sequence[str | Path]) -> Source:
    """The rows of the files, one file after the other; a field that some files lack is None there."""
    try:
        import pyarrow.parquet  # on demand: only parquet needs it
    except ImportError as error:
        raise DataError(f"{name}: to read parquet, `pip install pyarrow`, or give the rows as jsonl") from error
    for file in files:
        with open_regular(file):
            pass
    try:
        tables = [pyarrow.parquet.read_table(file, memory_map=True) for file in files]
        table = pyarrow.concat_tables(tables, promote_options="default")
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{name}: cannot be read as parquet ({error})") from error
    # The table stays in its columns: it is far smaller than its rows as dicts.
    return Source(name, range(len(table)), lambda number: table.slice(number, 1).to_pylist()[0], len(table))


def _read_hub(name: str, cfg: DatasetConfig) -> Source:
    """The rows of a dataset of the hub, one subset after the other, from the hub's own parquet copy of it."""
    instead = "or download it elsewhere and give its file: data_path=FILE, .jsonl, .json or .parquet"
    folders = [f"{subset or 'default'}/{cfg.split or 'train'}" for subset in (cfg.subset or "").split("+")]
    patterns = [f"{folder}/*.parquet" for folder in folders]
    problem = f"data_path: '{name}' is no local file"
    copy = download(name, patterns, problem, f"check its name, {instead}", "dataset", PARQUET_BRANCH)
    files: list[Path] = []
    for folder, pattern in zip(folders, patterns, strict=True):
        files_of_folder = sorted(copy.glob(pattern))
        if not files_of_folder:
            raise DataError(
                f"data_path: '{name}' has no {folder} in the hub's parquet copy of it (branch {PARQUET_BRANCH}): set "
                f"subset and split to a folder that is there, {instead}"
            )
        files += files_of_folder
    return _read_parquet(name, files)
