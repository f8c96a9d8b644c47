"""The samples of a step on the disk: written before the step trains (`logger.dump_rollouts`), read by replay.py.

`rollouts/step_000012/` in the run folder has

    samples.jsonl          a line for each sequence of the samples that the step trains, in the step's order; those
                           behind the first of a sample have `is_fork`. Its fields are those of `Sample`,
                           `TokenSequence` and `Grade`, and texts
    rank_000.safetensors   the tokens of the sequences that the rank drew, back to back: sample_S (lines of
                           samples.jsonl), num_tokens_S, the columns of `records.TOKEN` (id_T, logp_T, version_T,
                           mask_T); and trainer_logp_T and entropy_T of the trainer before the step, in nats, NaN where
                           mask_T is False. With policy.router_replay also experts_TLA, of prompts too: of each
                           sequence num_routed_tokens ids
    meta.json              as a checkpoint has it: the step, the number of ranks, size and sha256 of each file

Writing is here and not in replay.py because the loop writes (run.steps.dump_if_due), and a replay calls the loop.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from safetensors.torch import save_file

from base.hf.tokenizer import Tokenizer
from base.inputs.checkpoints import VERSION, of_this_program
from base.system.exchange import holders_of, move_tokens
from base.system.ranks import gather, on_rank0
from head import response_logps
from pack import Row, assign_to_ranks, empty_pack, pack_samples, rows_of, to_device
from records import TOKEN, Grade, Sample, TokenSequence
from run import checkpoint
from run.job import Run

T = TypeVar("T")

# Of each token in a rank's file, where the sequences lie back to back; a column is called as here with `_T`.
COLUMNS = [(name, TOKEN[name]) for name in TOKEN.names]
DUMPED = np.dtype([*COLUMNS, ("trainer_logp", np.float32), ("entropy", np.float32)])
NOT_RECORDED = ("sequences", "grade", "messages", "engine", "is_filtered", "number", "advantage")
NOT_RECORDED += ("tokens", "experts_TLA", "calls", "holder", "place", "num_mask_tokens")
RECORDED = {
    kind: [field.name for field in fields(kind) if field.name not in NOT_RECORDED]
    for kind in (Sample, TokenSequence, Grade)
}


def write(run: Run, trained: Sequence[Sample], adv_B: Sequence[float], step: int) -> None:
    """Writes the samples that `step` is to train to rollouts/step_000012. A disk without room costs this dump, not the
    run. A collective of all ranks that train, before the first optimizer step."""
    rank = run.ranks.rank
    temporary = run.folder / "rollouts" / f"step_{step:06d}.tmp"
    rows = rows_of(trained)
    sequences = [row.sequence for row in rows]
    held_by: list[list[int]] = [[] for _ in range(run.ranks.world_size)]
    for number, holder in enumerate(holders_of(sequences)):
        held_by[holder].append(number)
    needed = [[sequences[number] for number in numbers] for numbers in held_by]
    needed[0] = sequences  # rank 0 writes the texts of all
    move_tokens(needed, run.ranks.bridge)
    held = held_by[rank]
    tensors = _columns(run, [rows[number] for number in held])
    tensors["sample_S"] = torch.tensor(held, dtype=torch.int32)
    tensor_file = temporary / f"rank_{rank:03d}.safetensors"
    text_file = temporary / "samples.jsonl"
    writers = {tensor_file: partial(save_file, tensors, tensor_file)}
    if rank == 0:
        writers[text_file] = partial(_write_texts, text_file, trained, adv_B, run.inputs.tokenizer)
    meta = {"version": VERSION, "step": step, "world_size": run.ranks.world_size, "state": {}, "metric": None}
    try:
        _write_folder(temporary, meta, writers)
    except OSError as error:
        run.ranks.print_rank0(f"WARNING: the rollouts of step {step} were not written ({error}); training continues")


def _write_folder(temporary: Path, meta: dict, writers: Mapping[Path, Callable[[], None]]) -> None:
    """Writes the folder `step_000010` at once, through `step_000010.tmp`. writers: this rank's files. A collective.
    Raises OSError, on all ranks, where the disk refused something; then nothing is left."""
    try:
        on_rank0(partial(_make_empty, temporary))
        checkpoint.commit(temporary, meta, [checkpoint.write_part(file, write) for file, write in writers.items()])
    except OSError:
        if dist.get_rank() == 0:  # all ranks have written their files, or none has
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it wrote
    folder.mkdir(parents=True)


def read(folder: Path) -> list[Sample]:
    """The samples that `write` wrote, in their order, with their forks. Every rank gets all tokens. ConfigError where
    the files have another form."""
    with of_this_program(folder):
        return _read(folder)


def _read(folder: Path) -> list[Sample]:
    text = (folder / "samples.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    tokens_of: dict[int, np.ndarray] = {}  # by the number of the line
    experts_of: dict[int, np.ndarray] = {}
    for file in sorted(folder.glob("rank_*.safetensors")):
        columns = load_file(file)
        num_tokens = columns["num_tokens_S"].sum()
        tokens = np.empty(num_tokens, TOKEN)
        for name in TOKEN.names:
            column = columns[f"{name}_T"]
            if column.shape != (num_tokens,):
                raise ValueError(f"{file.name}: {name}_T has the shape {column.shape}")
            tokens[name] = column
        numbers = columns["sample_S"].tolist()
        ends = columns["num_tokens_S"].cumsum()
        parts = np.split(tokens, ends[:-1])
        tokens_of.update(zip(numbers, parts, strict=True))
        if "experts_TLA" in columns:
            experts_TLA = columns["experts_TLA"]
            ends = np.cumsum([records[number]["num_routed_tokens"] for number in numbers])
            if len(experts_TLA) != ends[-1]:
                raise ValueError(f"{file.name}: experts_TLA has {len(experts_TLA)} rows, not {ends[-1]}")
            parts = np.split(experts_TLA, ends[:-1])
            experts_of.update(zip(numbers, parts, strict=True))
    samples: list[Sample] = []
    for number, record in enumerate(records):
        sequence = _recorded(TokenSequence, record)
        sequence.tokens = tokens_of[number]
        sequence.experts_TLA = experts_of.get(number)
        sequence.count_tokens()
        if record.get("is_fork"):
            samples[-1].sequences.append(sequence)
        else:
            grade = _recorded(Grade, record)
            is_filtered = record["num_trained_tokens"] == 0
            samples.append(_recorded(Sample, record, sequences=[sequence], grade=grade, is_filtered=is_filtered))
    return samples


def _recorded(kind: type[T], record: dict, **others: object) -> T:
    """The record's part of a line, with these other fields. A dump of an older version lacks fields, which keep their
    defaults."""
    known = {name: record[name] for name in RECORDED[kind] if name in record}
    return msgspec.convert(known | others, kind)


def _write_texts(file: Path, samples: Sequence[Sample], adv_B: Sequence[float], tokenizer: Tokenizer) -> None:
    with file.open("w") as stream:
        for sample, adv in zip(samples, adv_B, strict=True):
            for number, sequence in enumerate(sample.sequences):
                record: dict = {}
                for owner in (sample, sequence, sample.grade):
                    for name in RECORDED[type(owner)]:
                        record[name] = getattr(owner, name)
                record["num_trained_tokens"] = sample.num_trained_tokens  # 0: it is filtered out
                record["advantage"] = adv
                if number > 0:
                    record["is_fork"] = True  # of the line before that has no such key
                record["prompt_text"] = tokenizer.backend.decode(sequence.prompt_ids, skip_special_tokens=False)
                record["tokens"] = tokenizer.token_texts(sequence.output_ids)
                stream.write(json.dumps(record) + "\n")


@torch.no_grad()
def _columns(run: Run, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """The tensors of a rank's file, with log-probability and entropy of each trained token under the policy as it is,
    in nats, and NaN for the others. A collective: all ranks make as many forwards."""
    lengths = [row.sequence.num_output_tokens for row in rows]
    dumped = np.empty(sum(lengths), DUMPED)
    of_sequences = [row.sequence.tokens for row in rows]
    tokens = np.concatenate([np.empty(0, TOKEN), *of_sequences])
    for name in TOKEN.names:
        dumped[name] = tokens[name]
    dumped["trainer_logp"] = np.nan
    dumped["entropy"] = np.nan
    places = _places(rows)
    max_tokens = run.cfg.policy.pack_tokens(run.device.type)
    scored = [row for row in rows if row.sequence.tokens["mask"].any()]
    (parts,) = assign_to_ranks(scored, 1, max_tokens, run.cfg.policy.sequence_packing.share_prefix)
    packs = pack_samples(parts, max_tokens)
    most_packs = max(1, *gather(len(packs)))
    while len(packs) < most_packs:
        packs.append(empty_pack())
    for pack in packs:
        micro = to_device(pack, run.device)
        logp_R, entropy_R = response_logps(run.model, micro.model_inputs, micro.target_R, run.head_options)
        of_sequences = [places[id(sequence)] for sequence in pack.sequences]
        place_R = np.concatenate([np.empty(0, np.int64), *of_sequences])
        dumped["trainer_logp"][place_R] = logp_R.cpu().numpy()
        dumped["entropy"][place_R] = entropy_R.cpu().numpy()
    tensors = {f"{name}_T": torch.from_numpy(dumped[name].copy()) for name in DUMPED.names}
    tensors["num_tokens_S"] = torch.tensor(lengths, dtype=torch.int32)
    experts = [row.sequence.experts_TLA for row in rows if row.sequence.experts_TLA is not None]
    if experts:
        tensors["experts_TLA"] = torch.from_numpy(np.concatenate(experts))
    return tensors


def _places(rows: Sequence[Row]) -> dict[int, np.ndarray]:
    """id of a sequence -> the places of its sampled ids in the columns."""
    places = {}
    start = 0
    for row in rows:
        places[id(row.sequence)] = start + np.flatnonzero(row.sequence.tokens["mask"])
        start += row.sequence.num_output_tokens
    return places
