"""Where the rows of a dataset come from: a file, the Hugging Face hub, or a function of the user's.

Owns the dataset presets and the reading of jsonl, csv, json and parquet; problems.py knows what the fields of a row
mean. A jsonl or csv file is never held in memory: of each line, its offset and checksum stay (12 bytes), and the line
is read again when its turn comes. Rows of other forms are held.
"""

import csv
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from config import DataError, DatasetConfig
from hf.files import download, open_regular, parse_json, read_bytes
from system.imports import call, import_attribute
from system.progress import Progress

PARQUET_BRANCH = "refs/convert/parquet"  # where the hub keeps each dataset as SUBSET/SPLIT/0000.parquet, 0001, ...
GROUND_TRUTH = "reward_model.ground_truth"
MAX_LINE_BYTES = 64 * 2**20
MAX_ARRAY_BYTES = 256 * 2**20  # in memory it is ten times as large
BOM = b"\xef\xbb\xbf"
SUFFIXES = (".jsonl", ".csv", ".json", ".parquet")  # of files, which so need not be there to be taken for one


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
    # os.path.exists says no to a name that is too long for the file system; Path.exists raises.
    is_local = name.startswith((".", "/")) or suffix in SUFFIXES or os.path.exists(name)
    if not is_local and name.count("/") == 1:
        return _read_hub(name, cfg)
    if suffix == ".parquet":
        return _read_parquet(name, [name])
    with open_regular(name) as file:
        if suffix == ".csv":
            return _read_csv(name, file)
        pieces = (piece.removeprefix(BOM).strip() for piece in iter(lambda: file.readline(4096), b""))
        if not next(filter(None, pieces), b"").startswith(b"["):
            return _read_jsonl(name, file)
        if file.seek(0, os.SEEK_END) > MAX_ARRAY_BYTES:
            raise DataError(f"{name}: a JSON array of more than {MAX_ARRAY_BYTES >> 20} MiB: write its rows as jsonl")
    return _held(name, parse_json(read_bytes(name, MAX_ARRAY_BYTES), name, "utf-8-sig", unique_keys=True))


def _read_lines(name: str, file: BinaryIO, rows_of: Callable[[Iterable[bytes], int], Iterator]) -> Source:
    """The rows that `rows_of` makes of lines and the number of the first one, counted from 0, as pairs (number of its
    first line, row). The file is read through once, and a row's lines again when it is asked for."""
    offsets = array("Q", [0])
    checksums = array("I")
    size = file.seek(0, os.SEEK_END)  # no further: another process may go on writing
    file.seek(0)

    def scan() -> Iterator[bytes]:
        while offsets[-1] < size and (line := file.readline(MAX_LINE_BYTES + 1)):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{name}:{len(offsets)}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
            checksums.append(zlib.crc32(line))
            offsets.append(file.tell())
            bar.update(len(line))
            yield line

    def again(number: int) -> Iterator[bytes]:
        with open_regular(name) as file:
            file.seek(offsets[number])
            for i in range(number, len(checksums)):
                line = file.readline(MAX_LINE_BYTES)
                if zlib.crc32(line) != checksums[i]:
                    raise DataError(f"{name}:{i + 1}: the file was changed after the run began to read it")
                yield line

    with Progress(f"{name}: bytes read", size) as bar:
        numbers = array("q", (number for number, _ in rows_of(scan(), 0)))
    return Source(name, numbers, lambda number: next(rows_of(again(number), number))[1], zlib.crc32(checksums), ":")


def _read_jsonl(name: str, file: BinaryIO) -> Source:
    """A file with a JSON object in each line; blank lines are no rows."""
    source = _read_lines(name, file, lambda lines, first: ((i, x) for i, x in enumerate(lines, first) if x.strip()))

    def read(number: int) -> Any:
        encoding = "utf-8" if number else "utf-8-sig"
        return parse_json(source.read(number), f"{name}:{number + 1}", encoding, unique_keys=True)

    return replace(source, read=read)


def _read_csv(name: str, file: BinaryIO) -> Source:
    """A file of the form that spreadsheets write (RFC 4180), whose first row names the fields; all values are texts,
    and an empty one is None. Blank lines are no rows."""
    source = _read_lines(name, file, partial(_csv_rows, name))
    header = source.read(source.numbers[0]) if source.numbers else []
    if len(set(header)) < len(header):
        raise DataError(
            f"{source.where(source.numbers[0])}: two fields have one name: {', '.join(map(repr, header)):.200}"
        )

    def read(number: int) -> dict[str, str | None]:
        fields = source.read(number)
        if len(fields) != len(header):
            raise DataError(f"{source.where(number)}: {len(fields)} fields, and the first row names {len(header)}")
        return {key: value or None for key, value in zip(header, fields, strict=True)}

    return replace(source, numbers=source.numbers[1:], read=read)


def _csv_rows(name: str, lines: Iterable[bytes], number: int) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of this process; csv's own limit is 128 KiB
    texts = (str(line, "utf-8" if i else "utf-8-sig") for i, line in enumerate(lines, number))
    reader, first = csv.reader(texts, strict=True), number
    try:
        for fields in reader:
            if fields:
                yield first, fields
            first = number + reader.line_num
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{name}:{first + 1}: not valid csv ({error})") from error


def _held(name: str, rows: Sequence[dict]) -> Source:
    def read(number: int) -> Any:  # a copy: a processor may change it
        return call(f"{name}, row {number + 1}", lambda: deepcopy(rows[number]))

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
    instead = "or download it elsewhere and give its file: data_path=FILE, .jsonl, .csv, .json or .parquet"
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
