"""Datasets: one pass over the rows of a source finds the usable ones; their split, repetition and fingerprint.

One rank scans the rows once and checks the whole prompt of each. The problems of a small set stay in memory, on all
ranks. Of a larger set only row numbers are kept, and a problem is rebuilt from its row each time it is drawn.
sources.py reads rows, problems.py makes problems, mixing.py orders the problems of several sets.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config import DataError, DatasetConfig
from data import Problem
from support.inputs.problems import ProblemMaker
from support.inputs.sources import open_source, with_preset
from support.inputs.tokenizer import Tokenizer
from support.system.progress import Progress

HELD_ROWS = 100_000
HELD_BYTES = 2**28
CHUNK = 256  # an environment checks the answers of this many rows at once
Check = Callable[[str, list[tuple[str, str, dict]]], None]  # env_name, (where, answer, fields) of rows


@dataclass(frozen=True, slots=True)
class Dataset:
    """The problems of one set. `path` names the source, `name` the set. `left_out`: how many rows, and why."""

    path: str
    problems: Sequence[Problem]
    fingerprint: str  # a resumed run compares it
    name: str = ""
    left_out: str = ""
    is_sample: bool = False  # only some rows were read; the others count as usable
    env_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problems(Sequence):
    """rows: the numbers of the usable rows, each `repeat` times. held: row number -> problem that stays in memory."""

    maker: ProblemMaker
    rows: np.ndarray
    repeat: int
    held: dict[int, Problem]

    def __len__(self) -> int:
        return len(self.rows) * self.repeat

    def __getitem__(self, index: int | slice) -> Any:
        place = range(len(self))[index]
        if isinstance(place, range):
            return [self[i] for i in place]
        row = int(self.rows[place % len(self.rows)])
        if held := self.held.get(row):
            return replace(deepcopy(held), prompt_ids=list(held.prompt_ids))  # an environment may change its fields
        problem = self.maker(row)
        if isinstance(problem, str):
            raise DataError(f"{self.maker.source.where(row)}: was usable when the run began, now left out: {problem}")
        return problem


def load_dataset(
    cfg: DatasetConfig,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    tasks: Mapping[str, str],
    check: Check,
    *,
    max_rows: int | None = None,
    on_rank0: Callable[[Callable[[], Any]], Any] = lambda scan: scan(),
) -> tuple[Dataset, Dataset | None]:
    """The dataset of a section, and the part that split_validation_size takes out of it, or None.

    Rows with a prompt of more than `max_prompt_tokens` are left out and counted, because a cut prompt would ask another
    question; so are rows whose text holds a control token. `tasks`: data.task_to_env. `check` gets the answers of each
    environment in chunks, and one empty chunk on each rank. `max_rows`: scan at most this many rows, the first ones and
    as many drawn at random; the other rows then count as usable. `on_rank0` runs the scan on one rank and returns its
    result, or raises its ConfigError, on all ranks. DataError names the malformed row, or the file without usable rows.
    """
    source = open_source(with_preset(cfg))
    maker = ProblemMaker(cfg, tokenizer, max_prompt_tokens, tasks, source)
    size = len(source.numbers), source.num_bytes
    scanned, held, size_on_rank0 = on_rank0(lambda: (*_scan(maker, max_rows, check), size))
    if size != size_on_rank0:
        raise DataError(f"{source.name}: this rank and rank 0 find different rows: give all machines the same data")
    for env_name in scanned.env_names:
        check(env_name, [])
    whole = replace(scanned, problems=Problems(maker, scanned.problems, cfg.repeat, held))
    return _split(whole, cfg) if cfg.split_validation_size else (whole, None)


def _split(whole: Dataset, cfg: DatasetConfig) -> tuple[Dataset, Dataset]:
    """(the rest, split_validation_size of the rows), both in order. `seed` and the number of rows decide the split."""
    size, rows = cfg.split_validation_size, whole.problems.rows
    count = int(size) if size >= 1 else max(1, round(size * len(rows)))
    if count >= len(rows):
        raise DataError(f"{whole.path}: split_validation_size={size:g} leaves none of {len(rows)} rows to train on")
    order = np.random.Generator(np.random.PCG64([cfg.seed, len(rows)])).permutation(len(rows))

    def part(name: str, indices: np.ndarray) -> Dataset:
        text = f"{whole.fingerprint} {name} {count} {cfg.seed}"
        problems = replace(whole.problems, rows=rows[np.sort(indices)])
        return replace(whole, problems=problems, fingerprint=hashlib.sha256(text.encode()).hexdigest())

    return part("rest", order[count:]), replace(part("part", order[:count]), left_out="")


def _scan(maker: ProblemMaker, max_rows: int | None, check: Check) -> tuple[Dataset, dict[int, Problem]]:
    """Makes and checks the problems. Returns the dataset, with row numbers as problems, and row number -> problem."""
    source, cfg = maker.source, maker.cfg
    numbers = np.asarray(source.numbers)
    picked = numbers
    is_sample = max_rows is not None and len(numbers) > max_rows
    if is_sample:  # half are the first rows, the others are drawn from the rest
        first, generator = max_rows // 2, np.random.Generator(np.random.PCG64(cfg.seed))
        drawn = generator.choice(len(numbers) - first, max_rows - first, replace=False)
        picked = numbers[np.r_[:first, first + np.sort(drawn)]]
    is_held = len(numbers) < HELD_ROWS and source.num_bytes < HELD_BYTES
    usable, held = array("q"), {}
    left_out: dict[str, array] = {}  # reason -> numbers of rows
    digest = hashlib.sha256()
    chunks: dict[str, list[tuple[str, str, dict]]] = {}
    for number in Progress(f"{source.name}: rows checked", picked.tolist()):
        problem = maker(number)
        if isinstance(problem, str):
            left_out.setdefault(problem, array("q")).append(number)
            continue
        usable.append(number)
        content = [number, problem.messages, problem.answer, problem.env_name, problem.loss_multiplier, problem.tools]
        digest.update(json.dumps(content).encode())
        if is_held:
            held[number] = replace(problem, prompt_ids=array("I", problem.prompt_ids))  # 4 bytes a token
        chunk = chunks.setdefault(problem.env_name, [])
        chunk.append((source.where(number), problem.answer, problem.fields))
        if len(chunk) == CHUNK:
            check(problem.env_name, chunk)
            chunk.clear()
    for env_name, chunk in chunks.items():
        check(env_name, chunk)
    reasons = ", ".join(
        f"{len(rows):,} left out: {reason} (first: {source.where(rows[0])})" for reason, rows in left_out.items()
    )
    if not usable:
        raise DataError(f"{source.name}: no usable row: {reasons or 'it is empty'}")
    digest.update(str(cfg.repeat).encode())
    rows = np.setdiff1d(numbers, np.setdiff1d(picked, usable))  # rows that were not picked count as usable
    return Dataset(source.name, rows, digest.hexdigest(), cfg.set_name, reasons, is_sample, tuple(chunks)), held
