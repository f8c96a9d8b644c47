"""Training state on disk: the only writer and reader of checkpoints; what is one, inputs.py says without torch.

A checkpoint is a folder `step_000010/` with one safetensors file per rank (its shards of the float32 master weights
and of the optimizer's moments, its torch RNG) and `meta.json`, written last: step, cursor, counters, fingerprints, and
size and sha256 of every file. It is written as `step_000010.tmp`, flushed to the disk, and renamed when whole; older
ones go only after that. What has a readable meta.json whose file sizes agree is a checkpoint, anything else is not.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from config import ConfigError
from inputs import committed, read_meta
from runtime import Ranks

VERSION = 1
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    step: int,
    model,
    optimizer,
    state: dict,
    ranks: Ranks,
    *,
    keep_latest: int,
    extra: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Writes checkpoint `step`, then removes all but the newest `keep_latest`. A collective of all ranks.

    `state`: JSON-able counters and fingerprints, handed back by `load`. `extra`: further tensors of this rank (the
    reference policy's shards), which `load` copies back into tensors of the same names.
    """
    final, temporary = folder / f"step_{step:06d}", folder / f"step_{step:06d}.tmp"
    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    file = temporary / _shard_name(ranks.rank)
    extra = {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}
    save_file(_shards(model, optimizer) | extra, file)
    _flush(file)
    entries: list = [None] * ranks.world_size
    dist.all_gather_object(entries, (file.name, file.stat().st_size, _sha256(file)))
    if ranks.rank == 0:
        files = {name: {"bytes": size, "sha256": digest} for name, size, digest in entries}
        meta = {"version": VERSION, "step": step, "world_size": ranks.world_size, "files": files, "state": state}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
        _flush(temporary / "meta.json")
        _flush(temporary)
        shutil.rmtree(final, ignore_errors=True)  # only a run resumed from before this step gets here with one
        os.rename(temporary, final)
        _flush(folder)
        for old in committed(folder)[keep_latest:]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load(folder: Path, model, optimizer, ranks: Ranks, extra: dict[str, torch.Tensor] | None = None) -> dict:
    """Restores the newest whole checkpoint of `folder` into model and optimizer, and this rank's torch RNG.

    Rank 0 chooses, so that all ranks load the same one. Returns its `state` with `step` in it. Raises ConfigError, on
    all ranks, when there is none, when it is damaged, or when it was written by another number of ranks.
    """
    choice = [str(next(iter(committed(folder)), "")) if ranks.rank == 0 else ""]
    dist.broadcast_object_list(choice, src=0)
    if not choice[0]:
        raise ConfigError(f"checkpointing.resume_from: no whole checkpoint in {folder}; start a new run without it")
    path = Path(choice[0])
    meta = read_meta(path)
    if meta["version"] != VERSION:
        raise ConfigError(f"{path}: checkpoint format {meta['version']}, this program reads {VERSION}")
    if meta["world_size"] != ranks.world_size:
        raise ConfigError(
            f"{path}: written by {meta['world_size']} ranks, this run has {ranks.world_size}; use --nproc_per_node="
            f"{meta['world_size']}"
        )
    file, problems = path / _shard_name(ranks.rank), [None] * ranks.world_size
    # Every rank learns of every rank's damage: or they would wait for that one in the next collective.
    dist.all_gather_object(problems, _damage(file, meta["files"][file.name]["sha256"]))
    if any(problems):
        raise ConfigError(f"{'; '.join(filter(None, problems))}: the checkpoint is damaged; remove {path}")
    tensors = load_file(file)
    torch.set_rng_state(tensors.pop("rng.torch"))
    stored = {name: tensors.pop(name) for name in list(tensors) if name.startswith("extra.")}
    if stored.keys() != {f"extra.{name}" for name in extra or {}}:
        raise ConfigError(
            f"{path}: was saved {'with' if stored else 'without'} a reference policy; set "
            "loss_fn.reference_policy_kl_penalty as in that run"
        )
    for name, tensor in (extra or {}).items():
        tensor.copy_(stored[f"extra.{name}"])
    _restore(tensors, model, optimizer)
    return {"step": meta["step"], **meta["state"]}


def _shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _shards(model, optimizer) -> dict[str, torch.Tensor]:
    tensors = {"rng.torch": torch.get_rng_state()}
    for name, param in model.named_parameters():
        tensors[f"param.{name}"] = _local(param)
        for moment in MOMENTS:
            if param in optimizer.state:
                tensors[f"{moment}.{name}"] = _local(optimizer.state[param][moment])
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def _restore(tensors: dict[str, torch.Tensor], model, optimizer) -> None:
    for name, param in model.named_parameters():
        _local(param).copy_(tensors.pop(f"param.{name}"))
        if f"exp_avg.{name}" not in tensors:
            continue  # saved before the first optimizer step
        state = optimizer.state[param]
        state["step"] = tensors.pop(f"step.{name}").to(param.device)
        for moment in MOMENTS[1:]:
            state[moment] = torch.zeros_like(param)
            _local(state[moment]).copy_(tensors.pop(f"{moment}.{name}"))
    assert not tensors, f"left over: {list(tensors)[:5]}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _damage(file: Path, sha256: str) -> str | None:
    try:
        return None if _sha256(file) == sha256 else f"{file}: content differs from its checksum in meta.json"
    except OSError as error:
        return f"{file}: {error.strerror}"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """To the disk, for files and folders: a rename can survive a power cut that its content does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
