"""Which rows of a training set are taken out of it for validation (split_validation_size)."""

import numpy as np

from config import DataError, DatasetConfig


def split_rows(num_rows: int, cfg: DatasetConfig, path: str) -> tuple[np.ndarray, np.ndarray]:
    """(places of the rest, of split_validation_size rows), both in order. `seed` and the number of rows decide them."""
    size = cfg.split_validation_size
    if size >= 1:
        count = int(size)
    else:
        count = max(1, round(size * num_rows))
    if count >= num_rows:
        raise DataError(f"{path}: split_validation_size={size:g} leaves none of {num_rows} rows to train on")
    generator = np.random.Generator(np.random.PCG64([cfg.seed, num_rows]))
    order = generator.permutation(num_rows)
    return np.sort(order[count:]), np.sort(order[:count])
