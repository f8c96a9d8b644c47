"""Datasets: one pass over the rows of a source finds which are usable; their split, repetition and fingerprint.

One rank scans the rows once and checks each with all its tokens. The problems of a small set stay in memory, on all
ranks. Of a larger set the numbers of the rows stay, and a problem is made from its row each time it is drawn.
sources.py reads rows, problems.py makes problems, mixing.py orders the problems of several sets.
"""

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config import DataError, DatasetConfig
from data import Problem
from dataset.problems import ProblemMaker, to_json
from dataset.sources import Source, open_source, with_preset
from hf.tokenizer import ControlTokenInText, Tokenizer
from system.imports import call
from system.progress import Progress

HELD_ROWS = 100_000
HELD_BYTES = 2**28
CHUNK = 256  # an environment checks the answers of so many rows at once
PROGRESS_SECONDS = 5.0  # a scan says this often how far it is
NAMED = 3  # so many rows with a control token are named
Check = Callable[[str, list[tuple[str, str, dict]]], None]  # env_name, (where, answer, fields) of rows


@dataclass(frozen=True, slots=True)
class Dataset:
    """The problems of one set. `path` names the source, `name` the set; a resumed run compares the fingerprint. Of the
    source's `num_rows` rows `num_read` were read; `left_out` says how many of these were left out and why."""

    path: str
    problems: Sequence[Problem]
    fingerprint: str
    name: str = ""
    num_rows: int = 0
    num_read: int = 0
    left_out: str = ""
    env_names: tuple[str, ...] = ()
    is_trained: bool = True  # False: all rows have loss_multiplier 0


@dataclass(frozen=True, slots=True)
class Problems(Sequence):
    """`rows`: the numbers of the usable rows in the source; each is there `repeat` times. held: number -> problem of
    the rows that stay in memory; the others are made each time."""

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
        if problem is None or len(problem.prompt_ids) > self.maker.limit:
            raise DataError(f"{self.maker.source.where(row)}: usable when the run began, and now left out or too long")
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
    as many drawn at random; the others then count as usable. `on_rank0` runs the scan on one rank and gives its result,
    or raises its ConfigError, on all ranks. Raises DataError with file and line for a malformed row and for an `id` of
    an earlier row, and with the file if no row is usable.
    """
    source = open_source(with_preset(cfg))
    maker = ProblemMaker(cfg, tokenizer, max_prompt_tokens, tasks, source)
    scanned, held, checksum = on_rank0(lambda: (*_scan(maker, max_rows, check), source.checksum))
    if checksum != source.checksum:
        raise DataError(f"{source.name}: this rank finds other rows there than rank 0: give all machines the same data")
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

    held_out = replace(part("part", order[:count]), num_rows=count, num_read=count, left_out="")
    return part("rest", order[count:]), held_out


def _pick(numbers: Sequence[int], max_rows: int | None, seed: int) -> Sequence[int]:
    """All numbers, or `max_rows` of them: half are the first ones, the others are drawn from the rest."""
    if max_rows is None or len(numbers) <= max_rows:
        return numbers
    first = max_rows // 2
    rest = np.random.Generator(np.random.PCG64(seed)).choice(len(numbers) - first, max_rows - first, replace=False)
    return [*numbers[:first], *(numbers[first + i] for i in np.sort(rest).tolist())]


def _scan(maker: ProblemMaker, max_rows: int | None, check: Check) -> tuple[Dataset, dict[int, Problem]]:
    """Makes and checks the problems. Returns the dataset, with row numbers in place of problems, and the problems that
    stay in memory, by row number."""
    source, cfg = maker.source, maker.cfg
    picked = _pick(source.numbers, max_rows, cfg.seed)
    is_held = len(source.numbers) < HELD_ROWS and source.num_bytes < HELD_BYTES
    is_trained = len(picked) < len(source.numbers)  # a row that is not read may be trained on
    usable, held = array("q"), {}
    left_out: Counter[str] = Counter()  # reason -> rows
    first_with_id: dict[int, int] = {}
    digest = hashlib.sha256()
    chunks: dict[str, list[tuple[str, str, dict]]] = {}
    for number, where, problem in _made(maker, picked, left_out):
        _check_id(problem, source, first_with_id)
        if len(problem.prompt_ids) > maker.limit:
            left_out[f"over {maker.limit} tokens"] += 1
            continue
        usable.append(number)
        is_trained |= problem.loss_multiplier > 0
        content = [number, problem.messages, problem.answer, problem.env_name, problem.loss_multiplier, problem.tools]
        digest.update(to_json(content, f"{where}: a part of messages or tools").encode())
        if is_held:
            held[number] = replace(problem, prompt_ids=array("I", problem.prompt_ids))  # 4 bytes a token
        chunk = chunks.setdefault(problem.env_name, [])
        chunk.append((where, problem.answer, problem.fields))
        if len(chunk) == CHUNK:
            check(problem.env_name, chunk)
            chunk.clear()
    for env_name, chunk in chunks.items():
        check(env_name, chunk)
    reasons = ", ".join(f"{count:,} left out: {reason}" for reason, count in left_out.items())
    if not usable:
        raise DataError(f"{source.name}: no usable row: {reasons or 'it is empty'}")
    digest.update(str(cfg.repeat).encode())
    rows = np.setdiff1d(source.numbers, np.setdiff1d(picked, usable))  # without the unusable ones among the picked
    fingerprint, sizes = digest.hexdigest(), (len(source.numbers), len(picked))
    found = Dataset(source.name, rows, fingerprint, cfg.set_name, *sizes, reasons, tuple(chunks), is_trained)
    return found, held


def _made(maker: ProblemMaker, numbers: Sequence[int], left_out: Counter[str]) -> Iterator[tuple[int, str, Problem]]:
    """(number, place, problem) of each row that gives a problem; the others are counted in `left_out`."""
    token_places: list[str] = []
    last_progress = time.monotonic()
    rows = Progress(f"{maker.source.name}: rows checked", iterable=numbers)
    for num_done, number in enumerate(rows):
        if rows.disable and time.monotonic() > last_progress + PROGRESS_SECONDS:
            last_progress = time.monotonic()
            print(f"{maker.source.name}: checked {num_done:,} of {len(numbers):,} rows", flush=True)
        where = maker.source.where(number)
        try:
            problem = call(f"{where}: a value in the row", maker, number)  # a user's object may raise
        except ControlTokenInText as error:
            token_places.append(f"{where} {error.token!r}")
            continue
        if problem is None:
            left_out["by min_reward or processor"] += 1
        else:
            yield number, where, problem
    if token_places:
        places = ", ".join(token_places[:NAMED]) + ", ..." * (len(token_places) > NAMED)
        left_out[f"a control token in their text ({places})"] = len(token_places)


def _check_id(problem: Problem, source: Source, first_with_id: dict[int, int]) -> None:
    """DataError if an earlier row has the same `id`. first_with_id: hash of an id -> row number; this row is added."""
    row_id, where = problem.fields.get("id"), source.where(problem.row_id)
    if row_id is not None and "responses_create_params" not in problem.fields:  # rollouts of one task share its id
        first = first_with_id.setdefault(hash(call(f"{where}: the `id`", repr, row_id)), problem.row_id)
        if first != problem.row_id:
            raise DataError(f"{where}: the `id` of {source.where(first)}; give each row its own, or none")
