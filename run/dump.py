"""The samples of a step on the disk: written before the step trains (`logger.dump_rollouts`), read by replay.py.

`rollouts/step_000012/` in the run folder has

    samples.jsonl          a line for each sample that the step trains, in the step's order; the forks of an agent's
                           sample follow it, with `is_fork`. Its fields are those of `Sample` and `Grade`, and texts
    rank_000.safetensors   the tokens of the samples that the rank drew, back to back: sample_S (lines of
                           samples.jsonl), num_tokens_S, output_ids_T, mask_T (trained or not), sampler_logp_T,
                           version_T; and logp_T and entropy_T of the trainer before the step, in nats, NaN where
                           mask_T is False
    meta.json              as a checkpoint has it: the step, the number of ranks, size and sha256 of each file

Writing is here and not in replay.py because the loop writes, and a replay calls the loop.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from base.hf.tokenizer import Tokenizer
from base.inputs.resume import VERSION, of_this_program
from base.system.exchange import held_here, move_tokens
from base.system.ranks import gather
from head import response_logps
from pack import assign_to_ranks, empty_pack, pack_samples, to_device
from records import Grade, Sample
from run import checkpoint
from run.start import Run

# Of `Sample` -> in a rank's file, where the samples lie back to back.
COLUMNS = {"output_ids": "output_ids_T", "mask": "mask_T", "sampler_logps": "sampler_logp_T", "versions": "version_T"}
TOKENS = np.dtype([*zip(COLUMNS.values(), ("i4", "?", "f4", "i4"), strict=True), ("logp_T", "f4"), ("entropy_T", "f4")])
NOT_RECORDED = (*COLUMNS, "messages", "calls", "holder", "engine", "forks", "grade", "is_filtered", "number")
NOT_RECORDED += ("num_mask_tokens",)
RECORDED = [field.name for field in fields(Sample) if field.name not in NOT_RECORDED]
RECORDED_OF_GRADE = [field.name for field in fields(Grade)]


def write_if_due(run: Run, trained: Sequence[Sample], adv_B: Sequence[float], step: int) -> None:
    """Writes the samples to the disk before the step trains, in step 1 and then in one step of every dump_rollouts."""
    period = run.cfg.logger.dump_rollouts
    if period and (step - 1) % period == 0:
        with run.timer("dump_rollouts"):
            write(run, trained, adv_B, step)


def write(run: Run, trained: Sequence[Sample], adv_B: Sequence[float], step: int) -> None:
    """Writes the samples that `step` is to train to rollouts/step_000012. A disk without room costs this dump, not the
    run. A collective of all ranks that train, before the first optimizer step."""
    rank = run.ranks.rank
    temporary = run.folder / "rollouts" / f"step_{step:06d}.tmp"
    rows = [row for sample in trained for row in sample.sequences]
    held = held_here(rows)
    move_tokens([rows])  # rank 0 writes the texts of all
    tensors = _columns(run, held)
    number_of_row = {id(row): number for number, row in enumerate(rows)}
    tensors["sample_S"] = torch.tensor([number_of_row[id(row)] for row in held], dtype=torch.int32)
    tensor_file = temporary / f"rank_{rank:03d}.safetensors"
    text_file = temporary / "samples.jsonl"
    writers = {tensor_file: partial(save_file, tensors, tensor_file)}
    if rank == 0:
        writers[text_file] = partial(_write_texts, text_file, trained, adv_B, run.inputs.tokenizer)
    meta = {"version": VERSION, "step": step, "world_size": run.ranks.world_size, "state": {}, "metric": None}
    try:
        checkpoint.write_folder(temporary, meta, writers)
    except OSError as error:
        run.ranks.print_rank0(f"WARNING: the rollouts of step {step} were not written ({error}); training continues")


def read(folder: Path) -> list[Sample]:
    """The samples that `write` wrote, in their order, with their forks. Every rank gets all tokens. ConfigError where
    the files have another form."""
    with of_this_program(folder):
        return _read(folder)


def _read(folder: Path) -> list[Sample]:
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    rows: dict[int, Sample] = {}  # by the number of the line
    for file in sorted(folder.glob("rank_*.safetensors")):
        columns = load_file(file)
        for column in COLUMNS.values():
            if columns[column].shape != (columns["num_tokens_S"].sum(),):
                raise ValueError(f"{file.name}: {column} has the shape {columns[column].shape}")
        end = 0
        for number, num_tokens in zip(columns["sample_S"].tolist(), columns["num_tokens_S"].tolist(), strict=True):
            start = end
            end = end + num_tokens
            tokens = {name: columns[column][start:end] for name, column in COLUMNS.items()}
            rows[number] = _row_of(records[number], tokens)
    samples: list[Sample] = []
    for number, record in enumerate(records):
        row = rows[number]
        if record.get("is_fork"):
            row.prompt = samples[-1].prompt
            row.grade = samples[-1].grade
            samples[-1].forks.append(row)
        else:
            samples.append(row)
    for sample in samples:
        sample.count_tokens()
    return samples


def _row_of(record: dict, tokens: dict[str, np.ndarray]) -> Sample:
    """The sequence of a line. A dump of an older version lacks fields, which keep their defaults."""
    fields_of_sample = {name: record[name] for name in RECORDED if name in record}
    fields_of_grade = {name: record[name] for name in RECORDED_OF_GRADE if name in record}
    row = msgspec.convert(fields_of_sample | {"grade": fields_of_grade}, Sample)
    for name, values in tokens.items():
        setattr(row, name, values)
    row.is_filtered = record["num_trained_tokens"] == 0
    row.count_tokens()
    return row


def _write_texts(file: Path, samples: Sequence[Sample], adv_B: Sequence[float], tokenizer: Tokenizer) -> None:
    with file.open("w") as stream:
        for sample, adv in zip(samples, adv_B, strict=True):
            for row in sample.sequences:
                record = {name: getattr(row, name) for name in RECORDED}
                for name in RECORDED_OF_GRADE:
                    record[name] = getattr(row.grade, name)
                record["num_trained_tokens"] = row.num_trained_tokens  # 0: it is filtered out
                record["advantage"] = adv
                if row is not sample:
                    record["is_fork"] = True  # of the line before that has no such key
                record["prompt_text"] = tokenizer.backend.decode(row.prompt_ids, skip_special_tokens=False)
                record["tokens"] = tokenizer.token_texts(row.output_ids.tolist())
                stream.write(json.dumps(record) + "\n")


@torch.no_grad()
def _columns(run: Run, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """The tensors of a rank's file, with log-probability and entropy of each trained token under the policy as it is,
    in nats, and NaN for the others. A collective: all ranks make as many forwards."""
    places = _places(samples)
    lengths = [sample.num_output_tokens for sample in samples]
    tokens = np.empty(sum(lengths), TOKENS)
    for name, column in COLUMNS.items():
        tokens[column] = np.concatenate([[], *(getattr(sample, name) for sample in samples)])
    tokens["logp_T"] = np.nan
    tokens["entropy_T"] = np.nan
    max_tokens = run.cfg.policy.pack_tokens(run.device.type)
    scored = [sample for sample in samples if sample.mask.any()]
    (parts,) = assign_to_ranks(scored, 1, max_tokens, run.cfg.policy.sequence_packing.share_prefix)
    packs = pack_samples(parts, max_tokens)
    most_packs = max(1, *gather(len(packs)))
    while len(packs) < most_packs:
        packs.append(empty_pack())
    # `Pack.source_R` counts the ids of the samples in the order in which they were packed.
    packed = [sample for part in parts for sample in part]
    place_of_source = np.concatenate([np.zeros(0, np.int64), *(places[id(sample)] for sample in packed)])
    for pack in packs:
        micro = to_device(pack, run.device)
        logp_R, entropy_R = response_logps(run.model, micro.model_inputs, micro.target_R, run.head_options)
        place_R = place_of_source[pack.source_R]
        tokens["logp_T"][place_R] = logp_R.cpu().numpy()
        tokens["entropy_T"][place_R] = entropy_R.cpu().numpy()
    tensors = {name: torch.from_numpy(tokens[name].copy()) for name in TOKENS.names}
    tensors["num_tokens_S"] = torch.tensor(lengths, dtype=torch.int32)
    return tensors


def _places(samples: Sequence[Sample]) -> dict[int, np.ndarray]:
    """id of a sample -> the places of its output ids in the columns."""
    places = {}
    start = 0
    for sample in samples:
        end = start + sample.num_output_tokens
        places[id(sample)] = np.arange(start, end)
        start = end
    return places
