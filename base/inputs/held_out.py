"""Takes validation rows out of a training set (split_validation_size)."""

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from config import DataError, DatasetConfig

if TYPE_CHECKING:
    from base.inputs.scan import Dataset


def split(whole: "Dataset", cfg: DatasetConfig) -> "tuple[Dataset, Dataset]":
    """(the rest, split_validation_size of the rows), both in order. `seed` and the number of rows decide the split."""
    size = cfg.split_validation_size
    num_rows = len(whole.problems.rows)
    if size >= 1:
        count = int(size)
    else:
        count = max(1, round(size * num_rows))
    if count >= num_rows:
        raise DataError(f"{whole.path}: split_validation_size={size:g} leaves none of {num_rows} rows to train on")
    generator = np.random.Generator(np.random.PCG64([cfg.seed, num_rows]))
    order = generator.permutation(num_rows)
    rest = _part(whole, f"rest {count} {cfg.seed}", order[count:])
    part = _part(whole, f"part {count} {cfg.seed}", order[:count])
    return rest, replace(part, left_out="")


def _part(whole: "Dataset", name: str, indices: np.ndarray) -> "Dataset":
    fingerprint = hashlib.sha256(f"{whole.fingerprint} {name}".encode()).hexdigest()
    rows = whole.problems.rows[np.sort(indices)]
    problems = replace(whole.problems, rows=rows)
    return replace(whole, problems=problems, fingerprint=fingerprint)
