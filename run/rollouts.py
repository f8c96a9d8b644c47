"""The samples of a step on disk (`logger.dump_rollouts`), and what trains them again (`grpo.replay_rollouts`).

`rollouts/step_000012/` in the run folder has a line of samples.jsonl for each sample that the step trains, from each
rank a safetensors file with the tokens of those that it holds, and a meta.json like a checkpoint's. It is written
before the step trains, so a step that ends the run leaves its samples, and has another name until it is whole.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from batch import to_device
from check.resume import VERSION, read_meta
from config import Config, ConfigError
from data import Sample, assign_to_ranks, empty_pack, pack_samples
from hf.tokenizer import Tokenizer
from metrics import Numbers, sample_metrics
from model import Decoder
from rollout import StepSamples
from run import checkpoint
from system.exchange import move_tokens
from system.ranks import Ranks, gather, on_rank0

# Of `Sample` -> in a rank's file, where the samples lie back to back.
COLUMNS = {"output_ids": "output_ids_T", "mask": "mask_T", "sampler_logps": "sampler_logp_T", "versions": "version_T"}
TOKENS = np.dtype([*zip(COLUMNS.values(), ("i4", "?", "f4", "i4"), strict=True), ("logp_T", "f4"), ("entropy_T", "f4")])
RECORDED = [field.name for field in fields(Sample) if field.name not in (*COLUMNS, "messages", "holder")]
NOT_OF_TRAINING = ("weight_sync_bytes", "canary_logp_gap", "buffer_size", "carried_groups", "health/")
ALWAYS_SHOWN = ("loss", "grad_norm", "lr", "reward", "approx_entropy", "logp_gap_mean")
MAX_ROWS = 25


def dump(
    folder: Path, samples: StepSamples, step: int, model: Decoder, cfg: Config, tokenizer: Tokenizer, ranks: Ranks
) -> None:
    """Writes the samples that `step` is to train to step_000012 in `folder`. What the disk refuses costs this dump, not
    the run. A collective of all ranks that train, between their advantages and the first optimizer step."""
    temporary = folder / f"step_{step:06d}.tmp"
    trained = samples.trained
    holders = [i % ranks.world_size if each.holder is None else each.holder for i, each in enumerate(trained)]
    held = [i for i, holder in enumerate(holders) if holder == ranks.rank]
    tensors = _columns([trained[i] for i in held], model, cfg) | {"sample_S": torch.tensor(held, dtype=torch.int32)}
    move_tokens([trained])  # rank 0 writes the texts of all
    try:
        on_rank0(lambda: shutil.rmtree(temporary, ignore_errors=True))  # of a run that was killed while it wrote
        on_rank0(lambda: temporary.mkdir(parents=True))
        file = temporary / f"rank_{ranks.rank:03d}.safetensors"
        parts = [checkpoint.write_part(file, partial(save_file, tensors, file))]
        if ranks.rank == 0:
            file = temporary / "samples.jsonl"
            parts.append(checkpoint.write_part(file, lambda: _write_texts(file, trained, tokenizer)))
        drawn = sample_metrics(samples.generated, trained) | samples.metrics
        meta = {"version": VERSION, "step": step, "world_size": ranks.world_size, "state": drawn, "metric": None}
        checkpoint.commit(temporary, meta, parts)
    except OSError as error:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        ranks.print_rank0(f"WARNING: the rollouts of step {step} were not written ({error}); training goes on")


def _write_texts(file: Path, samples: Sequence[Sample], tokenizer: Tokenizer) -> None:
    with file.open("w") as stream:
        for sample in samples:
            record = {name: getattr(sample, name) for name in RECORDED}
            record["prompt_text"] = tokenizer.backend.decode(sample.prompt_ids, skip_special_tokens=False)
            record["tokens"] = token_texts(tokenizer, sample.output_ids.tolist())
            stream.write(json.dumps(record) + "\n")


@torch.no_grad()
def _columns(samples: Sequence[Sample], model: Decoder, cfg: Config) -> dict[str, torch.Tensor]:
    """The tensors of a rank's file, with log-probability and entropy of each trained token under the policy as it is,
    in nats, and NaN for the others. A collective: all ranks make as many forwards."""
    lengths = [sample.num_output_tokens for sample in samples]
    tokens = np.empty(sum(lengths), TOKENS)
    for name, column in COLUMNS.items():
        tokens[column] = np.concatenate([[], *(getattr(sample, name) for sample in samples)])
    tokens["logp_T"] = tokens["entropy_T"] = np.nan
    # A pack does not say which sample a row is of: places in the file, in place of the versions, do.
    ends = np.cumsum(lengths)
    placed = [replace(s, versions=np.arange(end - len(s.mask), end)) for s, end in zip(samples, ends, strict=True)]
    device = next(model.parameters()).device
    max_tokens, share_prefix = cfg.policy.pack_tokens(device.type), cfg.policy.sequence_packing.share_prefix
    (parts,) = assign_to_ranks([each for each in placed if each.mask.any()], 1, max_tokens, share_prefix)
    packs = pack_samples(parts, max_tokens)
    packs += [empty_pack()] * (max(1, *gather(len(packs))) - len(packs))
    for pack in packs:
        logp_R, entropy_R = model(*to_device(pack, device).model_inputs)
        tokens["logp_T"][pack.version_R] = logp_R.cpu().numpy()
        tokens["entropy_T"][pack.version_R] = entropy_R.cpu().numpy()
    tensors = {name: torch.from_numpy(tokens[name].copy()) for name in TOKENS.names}
    return tensors | {"num_tokens_S": torch.tensor(lengths, dtype=torch.int32)}


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each id adds; joined, they are the decoded ids. An id that ends amid a character adds nothing."""
    decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
    texts: list[str] = []
    start = middle = 0  # ids[start:middle] are whole characters, and say how the next one begins
    for end in range(1, len(ids) + 1):
        before, after = decode(ids[start:middle]), decode(ids[start:end])
        is_whole = after.startswith(before) and not after.endswith("\ufffd")
        texts.append(after.removeprefix(before) if is_whole else "")
        start, middle = (middle, end) if is_whole else (start, middle)
    whole, joined = decode(ids), "".join(texts)
    if whole.startswith(joined):
        return [*texts[:-1], texts[-1] + whole.removeprefix(joined)]
    return [*[""] * (len(ids) - 1), whole]  # a decoder that looks further back


class NoEngine:
    """Stands in a replay where the loop has an engine and a sampler, and does nothing."""

    dtype = None
    ahead = ()

    def sleep(self) -> None:
        """There is nothing to send to sleep."""

    def wake(self, part: str) -> None:
        """There is nothing to wake."""

    def sync(self, weights: Iterable, version: int) -> int:
        return 0


def load(folder: Path, ranks: Ranks) -> StepSamples:
    """What `dump` wrote, on any number of ranks: all have all tokens. ConfigError where a file is damaged."""
    if problem := checkpoint.problem_of(folder, ranks):
        raise ConfigError(f"grpo.replay_rollouts={folder}: {problem}: the rollouts are damaged; replay others")
    samples: dict[int, Sample] = {}
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for file in sorted(folder.glob("rank_*.safetensors")):
        columns = load_file(file)
        ends = np.cumsum(columns["num_tokens_S"])
        for i, number in enumerate(columns["sample_S"].tolist()):
            rows = slice(ends[i] - columns["num_tokens_S"][i], ends[i])
            tokens = {name: columns[column][rows] for name, column in COLUMNS.items()}
            samples[number] = Sample(**{name: records[number][name] for name in RECORDED}, **tokens)
            samples[number].num_trained_tokens = records[number]["num_trained_tokens"]  # 0 for one that was filtered
    trained = [samples[number] for number in range(len(records))]
    return StepSamples(trained, trained, {"position": 0}, read_meta(folder)["state"])


def compare(run_folder: Path, step: int, metrics: Numbers) -> str:
    """The metrics of a replayed step beside those that the run logged, but for those of its engine."""
    file = run_folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    logged = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may have cut the last one
    before = next((each for each in reversed(logged) if each["step"] == step and "train/loss" in each), {})
    names = [n for n in metrics if f"train/{n}" in before and not n.startswith(NOT_OF_TRAINING)]
    pairs = {name: (before[f"train/{name}"], metrics[name]) for name in names}
    differ = [name for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])]  # NaN is NaN
    shown = [*(n for n in ALWAYS_SHOWN if n in pairs), *(n for n in differ if n not in ALWAYS_SHOWN)]
    rows = [f"{name:<42} {a:>16.9g} {b:>16.9g}" for name in shown[:MAX_ROWS] for a, b in [pairs[name]]]
    verdict = f"all {len(pairs)} metrics are equal" if pairs else "the run has not logged the step: it ended there"
    verdict = f"{len(differ)} of {len(pairs)} metrics differ" if differ else verdict
    return "\n".join([f"{f'step {step} of {run_folder}':<42} {'logged':>16} {'replayed':>16}", *rows, verdict])
