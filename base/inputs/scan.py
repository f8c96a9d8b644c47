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
from typing import TypeVar, overload

import numpy as np

from base.hf.tokenizer import Tokenizer
from base.inputs.problems import ProblemMaker
from base.inputs.sources import open_source, with_preset
from base.system.progress import Progress
from config import DataError, DatasetConfig
from envs import Answers
from records import Problem

HELD_ROWS = 100_000
HELD_BYTES = 2**28
CHUNK = 256  # an environment checks the answers of this many rows at once
T = TypeVar("T")
Check = Callable[[str, Answers], None]  # by an environment's name
OnRank0 = Callable[[Callable[[], T]], T]


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
    mean_prompt_tokens: float = 0.0  # of the usable rows that were read
    hides_tools_at: str = ""  # the first row whose tools the chat template leaves out


@dataclass(frozen=True, slots=True)
class Problems(Sequence):
    """rows: the numbers of the usable rows, each `repeat` times. held: row number -> problem that stays in memory."""

    maker: ProblemMaker
    rows: np.ndarray
    repeat: int
    held: dict[int, Problem]

    def __len__(self) -> int:
        return len(self.rows) * self.repeat

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...

    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        row = int(self.rows[place % len(self.rows)])
        held = self.held.get(row)
        if held is not None:
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
    on_rank0: OnRank0 = lambda scan: scan(),
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
    (scanned, held), size_on_rank0 = on_rank0(lambda: (_scan(maker, max_rows, check), size))
    if size != size_on_rank0:
        raise DataError(f"{source.name}: this rank and rank 0 find different rows: give all machines the same data")
    for env_name in scanned.env_names:
        check(env_name, [])
    whole = replace(scanned, problems=Problems(maker, scanned.problems, cfg.repeat, held))
    if cfg.split_validation_size:
        from base.inputs.held_out import split_rows

        rest, part = split_rows(len(whole.problems.rows), cfg, whole.path)
        key = f"{len(part)} {cfg.seed}"
        return _part(whole, f"rest {key}", rest), replace(_part(whole, f"part {key}", part), left_out="")
    return whole, None


def _part(whole: Dataset, name: str, places: np.ndarray) -> Dataset:
    fingerprint = hashlib.sha256(f"{whole.fingerprint} {name}".encode()).hexdigest()
    problems = replace(whole.problems, rows=whole.problems.rows[places])
    return replace(whole, problems=problems, fingerprint=fingerprint)


def _picked(numbers: np.ndarray, max_rows: int, seed: int) -> np.ndarray:
    """`max_rows` of the rows: half are the first ones, the others are drawn from the rest."""
    num_first = max_rows // 2
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.choice(len(numbers) - num_first, max_rows - num_first, replace=False)
    return np.concatenate([numbers[:num_first], numbers[num_first + np.sort(drawn)]])


def _scan(maker: ProblemMaker, max_rows: int | None, check: Check) -> tuple[Dataset, dict[int, Problem]]:
    """Makes and checks the problems. Returns the dataset, with row numbers as problems, and row number -> problem."""
    source = maker.source
    cfg = maker.cfg
    numbers = np.asarray(source.numbers)
    picked = numbers
    is_sample = max_rows is not None and len(numbers) > max_rows
    if is_sample:
        picked = _picked(numbers, max_rows, cfg.seed)
    is_held = len(numbers) < HELD_ROWS and source.num_bytes < HELD_BYTES
    usable = array("q")
    held = {}
    left_out: dict[str, array] = {}  # reason -> numbers of rows
    digest = hashlib.sha256()
    chunks: dict[str, list] = {}
    num_prompt_tokens = 0
    forms = set()
    hides_tools_at = ""
    for number in Progress(f"{source.name}: rows checked", picked.tolist()):
        problem = maker(number)
        if isinstance(problem, str):
            left_out.setdefault(problem, array("q")).append(number)
            continue
        usable.append(number)
        num_prompt_tokens += len(problem.prompt_ids)
        form = _form_of_tools(problem)
        if problem.tools and not hides_tools_at and form not in forms:
            forms.add(form)
            if not maker.tokenizer.shows_tools(problem.messages, problem.tools):
                hides_tools_at = source.where(number)
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
    reasons = []
    for reason, rows in left_out.items():
        reasons.append(f"{len(rows):,} left out: {reason} (first: {source.where(rows[0])})")
    if not usable:
        raise DataError(f"{source.name}: no usable row: {', '.join(reasons) or 'it is empty'}")
    digest.update(str(cfg.repeat).encode())
    refused = np.setdiff1d(picked, usable)
    dataset = Dataset(
        path=source.name,
        problems=np.setdiff1d(numbers, refused),  # rows that were not picked count as usable
        fingerprint=digest.hexdigest(),
        name=cfg.set_name,
        left_out=", ".join(reasons),
        is_sample=is_sample,
        env_names=tuple(chunks),
        mean_prompt_tokens=num_prompt_tokens / len(usable),
        hides_tools_at=hides_tools_at,
    )
    return dataset, held


def _form_of_tools(problem: Problem) -> tuple:
    """By which a template may write a row's tools or leave them out; to render each row twice more would be slow."""
    roles = tuple(message["role"] for message in problem.messages)
    keys_of_tools = tuple(tuple(tool) for tool in problem.tools or ())
    return roles, keys_of_tools
