"""Datasets: one pass over the rows of a source finds which are usable; their split, repetition and fingerprint.

One rank scans the rows once and checks each with all its tokens. Of a row, its number stays; its problem is made again
when its turn comes. sources.py reads rows, problems.py makes problems, mixing.py orders those of several sets.
"""

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config import DataError, DatasetConfig, shortened
from data import Problem
from dataset.problems import ProblemMaker, to_json
from dataset.sources import Source, open_source, with_preset
from hf.tokenizer import ControlTokenInText, Tokenizer
from system.imports import call
from system.progress import Progress

CHUNK = 256  # rows whose fields are in memory at once, for each environment
PROGRESS_SECONDS = 5.0  # so often, a scan says how far it is
NAMED = 3  # rows with a control token that are named
Check = Callable[[str, list[tuple[str, str, dict]]], None]  # env_name, (where, answer, fields) of rows


@dataclass(frozen=True, slots=True)
class Dataset:
    """The problems of one set. `path` names their source, `name` the set; a resumed run compares the fingerprint. Of
    the source's `num_rows`, `num_read` were looked at; `left_out` says how many of these were left out, and why."""

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
    """Problems made when asked for. `rows`: their numbers in the source; each is there `repeat` times."""

    maker: ProblemMaker
    rows: np.ndarray
    repeat: int

    def __len__(self) -> int:
        return len(self.rows) * self.repeat

    def __getitem__(self, index: int | slice) -> Any:
        place = range(len(self))[index]
        if isinstance(place, range):
            return [self[i] for i in place]
        row = int(self.rows[place % len(self.rows)])
        problem = self.maker(row)
        if problem is None:
            raise DataError(f"{self.maker.source.where(row)}: processor left out a row that it gave before")
        if len(problem.prompt_ids) > self.maker.limit:
            raise DataError(f"{self.maker.source.where(row)}: over {self.maker.limit} tokens; it was shorter before")
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
    """The dataset of a section, and the part of it that split_validation_size takes out, or None.

    Rows with a prompt of more than `max_prompt_tokens` are left out and counted, because a cut prompt would ask another
    question; so are rows whose text holds a control token. `tasks`: data.task_to_env. `check` gets the answers of each
    environment, in chunks, and once an empty chunk on each rank. `max_rows`: scan no more than so many rows, half of
    them the first ones and half drawn at random; the others then count as usable. `on_rank0` runs the scan on one rank
    and gives its result, or raises its ConfigError, on all of them. Raises DataError with file and line for anything
    malformed and for an `id` that two rows share, and with the file where no row is usable.
    """
    source = open_source(with_preset(cfg))
    maker = ProblemMaker(cfg, tokenizer, max_prompt_tokens, tasks, source)
    scanned, checksum = on_rank0(lambda: (_scan(maker, max_rows, check), source.checksum))
    if checksum != source.checksum:
        raise DataError(f"{source.name}: this rank finds other rows there than rank 0: give all machines the same data")
    for env_name in scanned.env_names:
        check(env_name, [])
    whole = replace(scanned, problems=Problems(maker, scanned.problems, cfg.repeat))
    return _split(whole, cfg) if cfg.split_validation_size else (whole, None)


def _split(whole: Dataset, cfg: DatasetConfig) -> tuple[Dataset, Dataset]:
    """(the rest, split_validation_size of the rows), both in order. `seed` and the number of rows decide which ones."""
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
    """All numbers, or `max_rows` of them: the first half of these in order, the others drawn from the rest."""
    if max_rows is None or len(numbers) <= max_rows:
        return numbers
    first = max_rows // 2
    rest = np.random.Generator(np.random.PCG64(seed)).choice(len(numbers) - first, max_rows - first, replace=False)
    return [*numbers[:first], *(numbers[first + i] for i in np.sort(rest).tolist())]


def _scan(maker: ProblemMaker, max_rows: int | None, check: Check) -> Dataset:
    """Makes and checks problems: the dataset, with numbers of rows for problems."""
    source, cfg = maker.source, maker.cfg
    picked = _pick(source.numbers, max_rows, cfg.seed)
    usable = array("q")
    num_too_long, num_filtered = 0, 0
    is_trained = len(picked) < len(source.numbers)  # a row that is not looked at may be
    token_places: list[str] = []
    foreign_tasks: Counter[str] = Counter()
    first_with_id: dict[int, int] = {}
    digest = hashlib.sha256()
    chunks: dict[str, list[tuple[str, str, dict]]] = {}
    last_progress = time.monotonic()
    rows = Progress(f"{source.name}: rows checked", iterable=picked)
    for num_done, number in enumerate(rows):
        if rows.disable and time.monotonic() > last_progress + PROGRESS_SECONDS:
            last_progress = time.monotonic()
            print(f"{source.name}: checked {num_done:,} of {len(picked):,} rows", flush=True)
        where = source.where(number)
        try:
            problem = call(f"{where}: a value in the row", maker, number)  # one that is a user's object
        except ControlTokenInText as error:
            token_places += [f"{where} {error.token!r}"][: NAMED - len(token_places)]
            continue
        if problem is None:
            num_filtered += 1
            continue
        _check_id(problem, source, first_with_id)
        if len(problem.prompt_ids) > maker.limit:
            num_too_long += 1
            continue
        usable.append(number)
        foreign_tasks.update({problem.fields.get("task_name")} - maker.env_names.keys())
        is_trained |= problem.loss_multiplier > 0
        content = [number, problem.messages, problem.answer, problem.env_name, problem.loss_multiplier, problem.tools]
        digest.update(to_json(content, f"{where}: a part of messages or tools").encode())
        chunk = chunks.setdefault(problem.env_name, [])
        chunk.append((where, problem.answer, problem.fields))
        if len(chunk) == CHUNK:
            check(problem.env_name, chunk)
            chunk.clear()
    for env_name, chunk in chunks.items():
        check(env_name, chunk)
    num_with_token = len(picked) - len(usable) - num_too_long - num_filtered
    places = ", ".join(token_places) + ", ..." * (num_with_token > NAMED)
    reasons = [
        (num_too_long, f"over {maker.limit} tokens"),
        (num_filtered, "by min_reward or processor"),
        (num_with_token, f"a control token in their text ({places})"),
    ]
    left_out = ", ".join(f"{count:,} left out: {reason}" for count, reason in reasons if count)
    if not usable:
        raise DataError(f"{source.name}: no usable row: {left_out or 'it is empty'}")
    if foreign_tasks:
        rows = f"{foreign_tasks.total():,} rows with a task_name that is no environment: {shortened([*foreign_tasks])}"
        print(f"{source.name}: env_name '{cfg.env_name}' of the dataset scores {rows}", flush=True)
    digest.update(str(cfg.repeat).encode())
    rows = np.setdiff1d(source.numbers, np.setdiff1d(picked, usable))  # without the unusable ones among the picked
    fingerprint, sizes = digest.hexdigest(), (len(source.numbers), len(picked))
    return Dataset(source.name, rows, fingerprint, cfg.set_name, *sizes, left_out, tuple(chunks), is_trained)


def _check_id(problem: Problem, source: Source, first_with_id: dict[int, int]) -> None:
    """DataError for the `id` of a row before. first_with_id: hash of an id -> number of its row; this one is added."""
    row_id, where = problem.fields.get("id"), source.where(problem.row_id)
    if row_id is not None and "responses_create_params" not in problem.fields:  # rollouts of one task share its id
        first = first_with_id.setdefault(hash(call(f"{where}: the `id`", repr, row_id)), problem.row_id)
        if first != problem.row_id:
            raise DataError(f"{where}: the `id` of {source.where(first)}; give each row its own, or none")
