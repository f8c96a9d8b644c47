"""A pass over all rows of a source: which of them are usable, how many are not and why, and their fingerprint.

One rank scans the rows once, with all their tokens, and checks each; what stays of a row is its number. Its problem is
made again when its turn comes. Owns datasets: their split, repetition and fingerprint. problems.py makes problems,
sources.py reads rows, mixing.py orders the problems of several sets.
"""

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from config import DataError, DatasetConfig
from data import Problem
from dataset.problems import ProblemMaker
from dataset.sources import open_source, with_preset
from hf.tokenizer import ControlTokenInText, Tokenizer

CHUNK = 256  # rows whose fields are in memory at once, for each environment
MANY_ROWS = 10_000  # a scan of more says how far it is, every PROGRESS_SECONDS
PROGRESS_SECONDS = 5.0
NAMED = 3  # rows with a control token that are named
Check = Callable[[str, list[tuple[str, str, dict]]], None]  # env_name, (where, answer, fields) of rows


@dataclass(slots=True)
class Counts:
    """What became of the rows of a source: `num_read` of the `num_rows` were looked at, and each of these is usable, or
    left out for one of three reasons.

    Example: Counts(num_rows=10, num_read=10, num_too_long=2, num_with_token=1, examples=["a.jsonl:7 '<|end|>'"]).
    """

    num_rows: int
    num_read: int
    num_too_long: int = 0
    num_filtered: int = 0  # by min_reward or processor
    num_with_token: int = 0  # with a control token in their text
    examples: list[str] = field(default_factory=list)  # place and token of the first NAMED of these

    def left_out(self, max_prompt_tokens: int) -> str:
        """How many rows were left out, and why; "" for none."""
        places = ", ".join(self.examples) + ", ..." * (self.num_with_token > NAMED)
        reasons = [
            (self.num_too_long, f"over {max_prompt_tokens} tokens"),
            (self.num_filtered, "by min_reward or processor"),
            (self.num_with_token, f"a control token in their text ({places})"),
        ]
        return ", ".join(f"{count:,} left out: {reason}" for count, reason in reasons if count)


@dataclass(frozen=True, slots=True)
class Dataset:
    """The problems of one set. `path` names their source, `name` the set; a resumed run compares the fingerprint."""

    path: str
    problems: Sequence[Problem]
    fingerprint: str
    name: str = ""
    counts: Counts = field(default_factory=lambda: Counts(0, 0))
    env_names: tuple[str, ...] = ()  # of its rows, in the order of their first


class Problems(Sequence):
    """Problems made when asked for. `kept`: their rows' numbers in the source; each is there `repeat` times."""

    def __init__(self, make: Callable[[int], Problem | None], kept: array, repeat: int):
        self.make = make
        self.kept = kept
        self.repeat = repeat

    def __len__(self) -> int:
        return len(self.kept) * self.repeat

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.make(self.kept[index % len(self.kept)])


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
    and gives its result, or raises its ConfigError, on all of them.

    Raises DataError with file and line for anything malformed, for an `id` that two rows share, and where no row is
    usable.
    """
    cfg = with_preset(cfg)
    source = open_source(cfg)
    maker = ProblemMaker(cfg, tokenizer, tasks, source)
    numbers = source.numbers()
    scan = partial(_scan, maker, numbers, max_rows, max_prompt_tokens, check)
    kept, env_names, fingerprint, counts, checksum = on_rank0(scan)
    if checksum != source.checksum():
        raise DataError(f"{source.name}: this rank finds other rows there than rank 0: give all machines the same data")
    for env_name in env_names:
        check(env_name, [])
    whole = Dataset(source.name, kept, fingerprint, cfg.set_name, counts, env_names)
    parts = split(whole, cfg) if cfg.split_validation_size else (whole, None)
    return tuple(part and replace(part, problems=Problems(maker.again, part.problems, cfg.repeat)) for part in parts)


def _pick(numbers: Sequence[int], max_rows: int | None, seed: int) -> Sequence[int]:
    """All numbers, or `max_rows` of them: the first half of these in order, the others drawn from the rest."""
    if max_rows is None or len(numbers) <= max_rows:
        return numbers
    first = max_rows // 2
    rest = np.random.Generator(np.random.PCG64(seed)).choice(len(numbers) - first, max_rows - first, replace=False)
    return [*numbers[:first], *(numbers[first + i] for i in np.sort(rest).tolist())]


def _scan(
    maker: ProblemMaker, numbers: Sequence[int], max_rows: int | None, max_prompt_tokens: int, check: Check
) -> tuple[array, tuple[str, ...], str, Counts, int]:
    """Makes and checks problems: (numbers without those of unusable rows, names of the environments, fingerprint,
    counts, checksum of the source)."""
    source, picked = maker.source, _pick(numbers, max_rows, maker.cfg.seed)
    counts = Counts(len(numbers), len(picked))
    dropped: set[int] = set()
    first_with_id: dict[int, int] = {}
    digest = hashlib.sha256()
    chunks: dict[str, list[tuple[str, str, dict]]] = {}
    last_progress = time.monotonic()
    for i, number in enumerate(picked):
        if len(picked) > MANY_ROWS and time.monotonic() > last_progress + PROGRESS_SECONDS:
            last_progress = time.monotonic()
            print(f"{source.name}: checked {i:,} of {len(picked):,} rows", flush=True)
        try:
            problem = maker(number)
        except ControlTokenInText as error:
            counts.num_with_token += 1
            counts.examples += [f"{source.where(number)} {error.token!r}"][: NAMED - len(counts.examples)]
            dropped.add(number)
            continue
        if problem is None:
            counts.num_filtered += 1
            dropped.add(number)
            continue
        id_hash = _id_hash(problem.fields)
        if id_hash is not None and first_with_id.setdefault(id_hash, number) != number:
            first = source.where(first_with_id[id_hash])
            raise DataError(f"{source.where(number)}: the `id` of {first}; give each row its own, or none")
        if len(problem.prompt_ids) > max_prompt_tokens:
            counts.num_too_long += 1
            dropped.add(number)
            continue
        content = [number, problem.messages, problem.answer, problem.env_name, problem.loss_multiplier, problem.tools]
        digest.update(json.dumps(content).encode())
        chunk = chunks.setdefault(problem.env_name, [])
        chunk.append((source.where(number), problem.answer, problem.fields))
        if len(chunk) == CHUNK:
            check(problem.env_name, chunk)
            chunk.clear()
    for env_name, chunk in chunks.items():
        check(env_name, chunk)
    if len(dropped) == len(picked):
        raise DataError(f"{source.name}: no usable row: {counts.left_out(max_prompt_tokens) or 'it is empty'}")
    digest.update(str(maker.cfg.repeat).encode())
    kept = array("Q", (number for number in numbers if number not in dropped))
    return kept, tuple(chunks), digest.hexdigest(), counts, source.checksum()


def _id_hash(fields: Mapping[str, Any]) -> int | None:
    """64 bits of a row's `id`; None where it has none. Rollouts have none: one task has many of them."""
    if fields.get("id") is None or "responses_create_params" in fields:
        return None
    text = json.dumps(fields["id"], sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def split(whole: Dataset, cfg: DatasetConfig) -> tuple[Dataset, Dataset]:
    """(the rest, split_validation_size of the rows), both in order. `seed` and the number of rows decide which ones."""
    size, num_rows = cfg.split_validation_size, len(whole.problems)
    count = int(size) if size >= 1 else max(1, round(size * num_rows))
    if count >= num_rows:
        raise DataError(f"{whole.path}: split_validation_size={size:g} leaves none of {num_rows} rows to train on")
    order = np.random.Generator(np.random.PCG64([cfg.seed, num_rows])).permutation(num_rows)
    numbers = np.array(whole.problems, np.uint64)
    parts = []
    for which, indices in (("rest", order[count:]), ("part", order[:count])):
        fingerprint = hashlib.sha256(f"{whole.fingerprint} {which} {count} {cfg.seed}".encode()).hexdigest()
        kept = array("Q", numbers[np.sort(indices)].tobytes())
        parts.append(replace(whole, problems=kept, fingerprint=fingerprint))
    return parts[0], replace(parts[1], counts=Counts(count, count))
