"""The samples of a step on the disk: written before the step trains (`logger.dump_rollouts`), read by replay.py.

`rollouts/step_000012/` in the run folder has samples.jsonl with a line for each sample that the step trains, a
safetensors file of each rank with the tokens of the samples that it holds, and meta.json as a checkpoint has it.

Writing is here and not in replay.py because the loop writes, and a replay calls the loop.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tokenizers.decoders import DecodeStream

from head import response_logps
from pack import assign_to_ranks, empty_pack, pack_samples, to_device
from records import Grade, Sample
from support.inputs.resume import VERSION
from support.inputs.tokenizer import Tokenizer
from support.run import checkpoint
from support.run.start import Run
from support.system.exchange import held_here, move_tokens
from support.system.ranks import gather, on_rank0

# Of `Sample` -> in a rank's file, where the samples lie back to back.
COLUMNS = {"output_ids": "output_ids_T", "mask": "mask_T", "sampler_logps": "sampler_logp_T", "versions": "version_T"}
TOKENS = np.dtype([*zip(COLUMNS.values(), ("i4", "?", "f4", "i4"), strict=True), ("logp_T", "f4"), ("entropy_T", "f4")])
NOT_RECORDED = (*COLUMNS, "messages", "calls", "holder", "engine", "forks", "grade", "is_filtered", "number")
RECORDED = [field.name for field in fields(Sample) if field.name not in NOT_RECORDED]
RECORDED_OF_GRADE = [field.name for field in fields(Grade)]


def write(run: Run, trained: Sequence[Sample], adv_B: Sequence[float], step: int) -> None:
    """Writes the samples that `step` is to train to rollouts/step_000012. A disk without room costs this dump, not the
    run. A collective of all ranks that train, before the first optimizer step."""
    ranks = run.ranks
    temporary = run.folder / "rollouts" / f"step_{step:06d}.tmp"
    rows = [row for sample in trained for row in sample.sequences]
    number_of_row = {id(row): number for number, row in enumerate(rows)}
    held = held_here(rows)
    tensors = _columns(run, held)
    tensors["sample_S"] = torch.tensor([number_of_row[id(row)] for row in held], dtype=torch.int32)
    move_tokens([rows])  # rank 0 writes the texts of all
    try:
        on_rank0(lambda: shutil.rmtree(temporary, ignore_errors=True))  # of a run that was killed while it wrote
        on_rank0(lambda: temporary.mkdir(parents=True))
        file = temporary / f"rank_{ranks.rank:03d}.safetensors"
        parts = [checkpoint.write_part(file, partial(save_file, tensors, file))]
        if ranks.rank == 0:
            file = temporary / "samples.jsonl"
            parts.append(checkpoint.write_part(file, lambda: _write_texts(file, trained, adv_B, run.inputs.tokenizer)))
        meta = {"version": VERSION, "step": step, "world_size": ranks.world_size, "state": {}, "metric": None}
        checkpoint.commit(temporary, meta, parts)
    except OSError as error:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        ranks.print_rank0(f"WARNING: the rollouts of step {step} were not written ({error}); training continues")


def read(folder: Path) -> list[Sample]:
    """The samples that `write` wrote, in their order, with their forks. Every rank gets all tokens."""
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    rows: dict[int, Sample] = {}  # by the number of the line
    for file in sorted(folder.glob("rank_*.safetensors")):
        columns = load_file(file)
        end = 0
        for number, num_tokens in zip(columns["sample_S"].tolist(), columns["num_tokens_S"].tolist(), strict=True):
            start = end
            end = end + num_tokens
            tokens = {name: columns[column][start:end] for name, column in COLUMNS.items()}
            recorded = {name: records[number][name] for name in RECORDED if name in records[number]}
            grade = Grade(**{name: records[number][name] for name in RECORDED_OF_GRADE if name in records[number]})
            is_filtered = records[number]["num_trained_tokens"] == 0
            rows[number] = Sample(**recorded, **tokens, grade=grade, is_filtered=is_filtered)
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


def _write_texts(file: Path, samples: Sequence[Sample], adv_B: Sequence[float], tokenizer: Tokenizer) -> None:
    with file.open("w") as stream:
        for sample, adv in zip(samples, adv_B, strict=True):
            for row in sample.sequences:
                record = {name: getattr(row, name) for name in RECORDED}
                for name in RECORDED_OF_GRADE:
                    record[name] = getattr(row.grade, name)
                record["num_trained_tokens"] = row.num_loss_tokens  # 0: it is filtered out
                record["advantage"] = adv
                if row is not sample:
                    record["is_fork"] = True  # of the line before that has no such key
                record["prompt_text"] = tokenizer.backend.decode(row.prompt_ids, skip_special_tokens=False)
                record["tokens"] = token_texts(tokenizer, row.output_ids.tolist())
                stream.write(json.dumps(record) + "\n")


@torch.no_grad()
def _columns(run: Run, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """The tensors of a rank's file, with log-probability and entropy of each trained token under the policy as it is,
    in nats, and NaN for the others. A collective: all ranks make as many forwards."""
    lengths = [sample.num_output_tokens for sample in samples]
    tokens = np.empty(sum(lengths), TOKENS)
    for name, column in COLUMNS.items():
        tokens[column] = np.concatenate([[], *(getattr(sample, name) for sample in samples)])
    tokens["logp_T"] = tokens["entropy_T"] = np.nan
    model = run.model
    policy = run.cfg.policy
    device = run.device
    max_tokens = policy.pack_tokens(device.type)
    share_prefix = policy.sequence_packing.share_prefix
    scored = [sample for sample in samples if sample.mask.any()]
    (parts,) = assign_to_ranks(scored, 1, max_tokens, share_prefix)
    packs = pack_samples(parts, max_tokens)
    packs += [empty_pack()] * (max(1, *gather(len(packs))) - len(packs))
    places = _places(samples, [sample for part in parts for sample in part])
    for pack in packs:
        micro = to_device(pack, device)
        logp_R, entropy_R = response_logps(model, micro.model_inputs, micro.target_R, run.head_options)
        tokens["logp_T"][places[pack.source_R]] = logp_R.cpu().numpy()
        tokens["entropy_T"][places[pack.source_R]] = entropy_R.cpu().numpy()
    tensors = {name: torch.from_numpy(tokens[name].copy()) for name in TOKENS.names}
    tensors["num_tokens_S"] = torch.tensor(lengths, dtype=torch.int32)
    return tensors


def _places(samples: Sequence[Sample], packed: Sequence[Sample]) -> np.ndarray:
    """Of each output id of the packed samples, as `Pack.source_R` counts them, the place among those of all samples."""
    place_of = {}
    start = 0
    for sample in samples:
        place_of[id(sample)] = np.arange(start, start + sample.num_output_tokens)
        start += sample.num_output_tokens
    return np.concatenate([np.zeros(0, np.int64), *(place_of[id(sample)] for sample in packed)])


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each id adds; joined, they are the decoded ids. An id that ends inside a character adds nothing."""
    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer.backend, token_id) or "" for token_id in ids]
    rest = tokenizer.backend.decode(ids, skip_special_tokens=False).removeprefix("".join(texts))
    return [*texts[:-1], texts[-1] + rest] if ids else []
