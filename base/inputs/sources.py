"""Where the rows of a dataset come from: a file, the Hugging Face hub, or a user's function.

This module owns the dataset presets and reads jsonl and json; tables.py reads parquet, and problems.py knows what the
fields of a row mean. Of a jsonl file only the offset of each line stays in memory; of other forms, the rows.
"""

import os
import re
from array import array
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from base.system.files import open_file, parse_json, read_bytes
from base.system.users_code import call
from config import DataError, DatasetConfig

GROUND_TRUTH = "reward_model.ground_truth"
BOM = b"\xef\xbb\xbf"
SUFFIXES = (".jsonl", ".json", ".parquet")  # a name that ends so is a file, even where there is none


class DatasetPreset(NamedTuple):
    """A public dataset: the values of the config keys that its name implies. Subsets are joined by +."""

    data_path: str
    subset: str | None
    split: str
    input_key: str
    output_key: str
    env_name: str = "math"


# The names are NeMo RL's; case, "-", "_" and blanks are ignored.
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
    """The section with the keys that its `dataset_name` implies; only a user's function stays as `dataset_name`."""
    name = cfg.dataset_name
    if name is None or ":" in name:
        return replace(cfg, env_name=cfg.env_name or "exact")
    presets = {_plain(key): preset for key, preset in PRESETS.items()}
    preset = presets.get(_plain(name))
    if preset is None:
        raise DataError(
            f"dataset_name '{name}' is unknown; known: {', '.join(PRESETS)}, and your own module:function; or "
            "remove dataset_name and set data_path to a file or a hub dataset"
        )
    return replace(
        cfg,
        name=cfg.set_name,
        dataset_name=None,
        data_path=cfg.data_path or preset.data_path,
        subset=cfg.subset or preset.subset,
        split=cfg.split or preset.split,
        input_key=cfg.input_key or preset.input_key,
        output_key=cfg.output_key or preset.output_key,
        env_name=cfg.env_name or preset.env_name,
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that are read one by one."""

    name: str
    numbers: Sequence[int]  # the rows' numbers, in order
    read: Callable[[int], Any]  # number -> row
    num_bytes: int  # the size of the file, or of the rows in memory; 0: unknown
    separator: str = ", row "

    def where(self, number: int) -> str:
        """A row's place, for messages."""
        return f"{self.name}{self.separator}{number + 1}"


def open_source(cfg: DatasetConfig) -> Source:
    """The source that a section (after `with_preset`) names. DataError if it cannot be read."""
    if cfg.dataset_name:
        from base.system.imports import import_attribute

        function = import_attribute(cfg.dataset_name, "dataset_name")
        problem = f"dataset_name '{cfg.dataset_name}', which must return a sequence of rows,"
        return _held(cfg.dataset_name, call(problem, function, cfg))
    name = cfg.data_path
    suffix = Path(name).suffix
    is_local = name.startswith((".", "/")) or suffix in SUFFIXES or os.path.exists(name)
    is_on_hub = not is_local and name.count("/") == 1
    if is_on_hub or suffix == ".parquet":
        from base.inputs.tables import Table, hub_files  # other forms do without

        files = hub_files(name, cfg) if is_on_hub else [name]
        table = Table(name, files)
        return Source(name, range(len(table)), table.read, table.num_bytes)
    with open_file(name) as file:
        start = file.read(4096).removeprefix(BOM).lstrip()
        if not start.startswith(b"["):
            return _read_jsonl(name, file)
    rows = parse_json(read_bytes(name), name)
    return _held(name, rows)


def _read_jsonl(name: str, file: BinaryIO) -> Source:
    """A file with a JSON object in each line; blank lines are no rows."""
    offsets = array("Q")
    numbers = array("q")
    start = file.seek(0)
    for line in file:
        if line.strip().removeprefix(BOM).strip():
            numbers.append(len(offsets))
        offsets.append(start)
        start += len(line)

    def read(number: int) -> Any:
        with open_file(name) as file:
            file.seek(offsets[number])
            return parse_json(file.readline(), f"{name}:{number + 1}")

    return Source(name, numbers, read, start, ":")


def _held(name: str, rows: Sequence[dict]) -> Source:
    """Rows in memory. A read gives a copy, because a processor may change its row."""
    return Source(name, range(len(rows)), lambda number: deepcopy(rows[number]), 0)
