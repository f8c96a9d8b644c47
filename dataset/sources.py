"""Where rows come from: a file, the Hugging Face hub, or a function of the user's; each a dict, read by its number.

Owns the table of known datasets and the reading of jsonl, json and parquet. Does not own what the fields of a row mean
(rows.py). A jsonl file is streamed once and never held: of a line, its offset and checksum stay (12 bytes), and it is
read again when its turn comes. `datasets` and `pyarrow` are imported only where their data is asked for.
"""

import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from config import DataError, DatasetConfig
from envs import import_attribute

MAX_LINE_BYTES = 64 * 2**20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Known:
    """A public dataset: its name on the hub, what to take of it (subsets joined by +), and the keys of its rows."""

    hub: str
    subset: str | None
    split: str
    input_key: str
    output_key: str


# By NeMo RL's names; case, "-", "_" and blanks do not count. All of them are mathematics, so env_name math.
KNOWN = {
    "gsm8k": Known("openai/gsm8k", "main", "train", "question", "answer"),
    "MATH-500": Known("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "OpenMathInstruct-2": Known("nvidia/OpenMathInstruct-2", None, "train_1M", "problem", "expected_answer"),
    "DeepScaler": Known("agentica-org/DeepScaleR-Preview-Dataset", None, "train", "problem", "answer"),
    "AIME2024": Known("HuggingFaceH4/aime_2024", None, "train", "problem", "answer"),
    "AIME2025": Known("opencompass/AIME2025", "AIME2025-I+AIME2025-II", "test", "question", "answer"),
    "AIME2026": Known("MathArena/aime_2026", None, "train", "problem", "answer"),
    "DAPOMath17K": Known("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", "prompt", "reward_model.ground_truth"),
    "DAPOMathAIME2024": Known("BytedTsinghua-SIA/AIME-2024", None, "train", "prompt", "reward_model.ground_truth"),
}


class Source(Protocol):
    """Rows by number, not necessarily without gaps."""

    name: str

    def scan(self) -> Iterator[tuple[int, dict]]:
        """All rows with their numbers, in order; once."""
        ...

    def __getitem__(self, number: int) -> dict: ...

    def where(self, number: int) -> str:
        """The place of a row, for messages."""
        ...


def with_known_keys(cfg: DatasetConfig) -> DatasetConfig:
    """The section, with what its `dataset_name` implies filled in; that is None then, where it is not the user's own
    function. DataError for a name nobody knows."""
    name = cfg.dataset_name
    if name is None:
        return replace(cfg, env_name=cfg.env_name or "exact")
    if ":" in name:
        return replace(cfg, env_name=cfg.env_name or "exact")
    known = {_plain(key): value for key, value in KNOWN.items()}.get(_plain(name))
    if known is None:
        raise DataError(
            f"dataset_name '{name}' is unknown; known: {', '.join(KNOWN)}, and module:function of yours; or name a "
            "file or a hub dataset with data_path, and no dataset_name"
        )
    own = {key: getattr(cfg, key) or getattr(known, key) for key in ("split", "subset", "input_key", "output_key")}
    path, env_name = cfg.data_path or known.hub, cfg.env_name or "math"
    return replace(cfg, name=cfg.set_name, dataset_name=None, data_path=path, env_name=env_name, **own)


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def open_source(cfg: DatasetConfig) -> Source:
    """The source that a section names; one from `with_known_keys`. DataError where it cannot be read."""
    if cfg.dataset_name:
        return Listed(cfg.dataset_name, import_attribute(cfg.dataset_name, "dataset_name")(cfg))
    name = cfg.data_path
    # os.path: unlike Path's, it says no to a name that is too long for the file system
    looks_local = name.startswith((".", "/")) or Path(name).suffix in (".jsonl", ".json", ".parquet") or "\0" in name
    if not looks_local and name.count("/") == 1 and not os.path.exists(name):
        return Listed(name, _from_hub(name, cfg))
    if name.endswith(".parquet"):
        return Listed(name, _from_parquet(name))
    if "\0" in name:
        raise DataError(f"{name!r}: cannot be read (a byte 0 in the name)")
    try:
        with open(name, "rb") as file:
            start = file.read(4096).removeprefix(BOM).lstrip()
        return Listed(name, _from_json(Path(name))) if start.startswith(b"[") else JsonLines(name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error


class JsonLines:
    """A file with a JSON object in each line; a row's number is its line's, from 0. Blank lines are no rows."""

    def __init__(self, name: str):
        self.name, self.offsets, self.checksums = name, array("Q"), array("I")

    def scan(self) -> Iterator[tuple[int, dict]]:
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
                    yield number, self._parse(number, line)

    def __getitem__(self, number: int) -> dict:
        try:
            with open(self.name, "rb") as file:
                file.seek(self.offsets[number])
                line = file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read any more ({error.strerror})") from error
        if zlib.crc32(line) != self.checksums[number]:
            raise DataError(f"{self.where(number)}: the file was changed after the run began to read it")
        return self._parse(number, line)

    def _parse(self, number: int, line: bytes) -> dict:
        try:
            raw = json.loads((line.removeprefix(BOM) if number == 0 else line).decode("utf-8"))
        except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
            raise DataError(f"{self.where(number)}: not valid JSON ({error})") from error
        return _object(raw, self.where(number))

    def where(self, number: int) -> str:
        return f"{self.name}:{number + 1}"


class Listed:
    """Rows that something else holds: a list, a table, a dataset of the hub's library, mapped from its file."""

    def __init__(self, name: str, rows: Sequence[dict]):
        self.name, self.rows = name, rows

    def scan(self) -> Iterator[tuple[int, dict]]:
        for number in range(len(self.rows)):
            yield number, self[number]

    def __getitem__(self, number: int) -> dict:
        return _object(self.rows[number], self.where(number))

    def where(self, number: int) -> str:
        return f"{self.name}, row {number + 1}"


def _object(raw: Any, where: str) -> dict:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _from_json(path: Path) -> list[dict]:
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


def _from_parquet(name: str) -> Sequence[dict]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{name}: to read parquet, `pip install pyarrow`, or give the rows as jsonl") from error
    try:
        return _Table(pyarrow.parquet.read_table(name, memory_map=True))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{name}: cannot be read as parquet ({error})") from error


def _from_hub(name: str, cfg: DatasetConfig) -> Sequence[dict]:
    """The rows of a dataset of the hub, one subset after the other."""
    instead = "or download it elsewhere and give its file: data_path=FILE, .jsonl, .json or .parquet"
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"'{name}' is no file here; to read it from the Hugging Face hub, `pip install datasets`, {instead}"
        ) from error
    try:
        parts = [
            datasets.load_dataset(name, subset or None, split=cfg.split or "train")
            for subset in (cfg.subset or "").split("+")
        ]
    except Exception as error:  # of datasets, huggingface_hub, its HTTP library and pyarrow: they share no base
        told = " ".join(str(error).split())[:300]
        raise DataError(
            f"'{name}' is no file here, and the Hugging Face hub did not give it ({type(error).__name__}: {told}); "
            f"check data_path, subset={cfg.subset} and split={cfg.split or 'train'}, {instead}"
        ) from error
    return parts[0] if len(parts) == 1 else [row for part in parts for row in part]
