"""Reads checkpoints: their tensors, onto any number of ranks, and the checksums of their files. run/checkpoint.py says
what a checkpoint holds. A run that resumes none does without this file.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from base.hf.weights import local_shard
from base.inputs.checkpoints import of_this_program, read_meta
from base.inputs.resume import candidates, check_same_reference, damaged
from base.system.optimizer import Optimizer
from base.system.ranks import Ranks, gather, local_rows, on_rank0
from config import CheckpointingConfig, ConfigError
from run.checkpoint import HasState, sha256_of, stored_tensors


def load(
    folder: Path,
    cfg: CheckpointingConfig,
    model: nn.Module,
    optimizer: HasState | None,
    ranks: Ranks,
    reference: dict[str, Tensor],
    base: str | None = None,
) -> dict:
    """Restores the newest checkpoint of `folder`, or the one that resume_step names, on any number of ranks: into the
    model, the `reference` (as in `save`) and a fresh optimizer, or without one the weights alone. Returns its `state`,
    with `step`. resume=auto takes the newest good checkpoint, with a warning for each damaged one; else the newest must
    be good. ConfigError, on all ranks, names the damaged file, or says that `base` is not the state's base_sha256."""
    for path in on_rank0(lambda: candidates(folder, cfg)):  # rank 0's view of a shared disk
        problem = problem_of(path, ranks)
        if problem is None:
            meta = read_meta(path)
            with of_this_program(path):
                return _load(path, meta, model, optimizer, reference, base)
        if cfg.resume != "auto":
            raise ConfigError(damaged(problem, path))
        ranks.print_rank0(f"WARNING: {problem}: continuing from an older checkpoint")
    raise ConfigError(f"checkpointing.resume_from: no complete checkpoint in {folder}; unset the key to start anew")


def _load(
    path: Path, meta: dict, model: nn.Module, optimizer: HasState | None, reference: dict[str, Tensor], base: str | None
) -> dict:
    """The state of a checkpoint whose checksums are right, with `step`; its tensors go where `load` says."""
    state = meta["state"]
    if state.get("base_sha256") != base:
        raise ConfigError(f"{path}: its adapters belong to other weights: name those in policy.model_name")
    _restore(path, sorted(meta["files"]), model, optimizer, reference)
    state["step"] = meta["step"]
    return state


def problem_of(path: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, or None; the same on all ranks, which share the work of reading its files."""
    meta = read_meta(path)
    if isinstance(meta, str):
        own_problem = meta
    else:
        own_problem = _problem_of_files(path, meta["files"], ranks)
    for problem in gather(own_problem):
        if problem is not None:
            return problem
    return None


def _problem_of_files(path: Path, files: dict[str, dict], ranks: Ranks) -> str | None:
    """What is wrong with this rank's share of the files, or None."""
    problem = None
    for name in sorted(files)[ranks.rank :: ranks.world_size]:
        file = path / name
        try:
            if sha256_of(file) != files[name]["sha256"]:
                problem = f"{file}: content differs from its checksum in meta.json"
        except OSError as error:
            problem = f"{file}: {error.strerror}"
    return problem


def _read_state(files: list[safe_open], name: str, kind: str, param: Tensor) -> Tensor:
    """What `checkpoint._describe_state` described."""
    if kind == "replicated":
        return files[0].get_tensor(name).to(param.device)
    rows = _read_rows(files, name, param).to(param.device)
    if kind == "local":
        return rows
    tensor = torch.empty_like(param, dtype=rows.dtype)  # DTensor.from_local would take it from the host to the mesh
    tensor.to_local().copy_(rows)
    return tensor


def _read_rows(files: list[safe_open], name: str, param: Tensor) -> Tensor:
    """This rank's rows of a tensor like `param`, which lies in the files cut into rows, one rank's after another's."""
    rows = local_rows(param)
    parts = []
    start = 0  # the number, in the whole tensor, of the first row of the file
    for file in files:
        stored = file.get_slice(name)
        num_stored, *rest = stored.get_shape()
        if rest != list(param.shape[1:]):
            raise ConfigError(f"{name}: rows of {rest} in the checkpoint, of {list(param.shape[1:])} in the model")
        first = min(max(rows.start - start, 0), num_stored)
        end = min(max(rows.stop - start, first), num_stored)
        parts.append(stored[first:end])
        start += num_stored
    if start != len(param):
        raise ConfigError(f"{name}: {start} rows in the checkpoint, {len(param)} in the model")
    return torch.cat(parts)


@torch.no_grad()
def _restore(
    path: Path, shards: list[str], model: nn.Module, optimizer: HasState | None, reference: dict[str, Tensor]
) -> None:
    files = [safe_open(path / shard, framework="pt") for shard in shards]
    names = sorted(files[0].keys())
    params, buffers = stored_tensors(model)
    in_model = {f"param.{name}" for name in params} | {f"buffer.{name}" for name in buffers}
    in_checkpoint = {name for name in names if name.startswith(("param.", "buffer."))}
    if in_model != in_checkpoint:
        other = min(in_model ^ in_checkpoint)
        raise ConfigError(f"{path}: does not fit policy.model_name: only one of the two has {other}")
    for name, param in params.items():
        local_shard(param).copy_(_read_rows(files, f"param.{name}", param))
    for name, buffer in buffers.items():
        stored = files[0].get_tensor(f"buffer.{name}")  # each rank has written all of it
        if stored.shape != buffer.shape:
            raise ConfigError(f"{name}: {tuple(stored.shape)} in the checkpoint, {tuple(buffer.shape)} in the model")
        buffer.copy_(stored)
    if optimizer is None:
        return
    is_saved = any(name.startswith("reference.") for name in names)
    check_same_reference(path, saved=is_saved, needed=len(reference) > 0)
    for name, rows in reference.items():
        rows.copy_(_read_rows(files, f"reference.{name}", params[name]))
    forms: dict[str, tuple] = {}  # of the tensors that the optimizer keeps under one key
    for stored in names:
        kind, _, rest = stored.partition(".")
        if kind in ("param", "buffer", "reference"):
            continue
        # Of the optimizer, which has no state before its first step.
        key, _, name = rest.partition(".")
        value = _read_state(files, stored, kind, params[name])
        form = kind, value.dtype, value.dim() == 0
        if form != forms.setdefault(key, form):
            raise ConfigError(f"{path}: {stored} is not like the {key} of other parameters")
        if kind in ("sharded", "local") and isinstance(optimizer, Optimizer):
            value = optimizer.at_rest(key, value)  # at once: the device may not have room for all of them
        optimizer.state[params[name]][key] = value
    if isinstance(optimizer, Optimizer):
        _check_keys(path, optimizer)


def _check_keys(path: Path, optimizer: Optimizer) -> None:
    """ConfigError where torch's optimizer of a class has other tensors for a parameter than for the first one."""
    keys_of_class: dict[type, set[str]] = {}
    for part in optimizer.optimizers:
        for param in part.param_groups[0]["params"]:
            keys = set(part.state.get(param, ()))
            if not keys:  # it has had no gradient
                continue
            expected = keys_of_class.setdefault(type(part), keys)
            if keys != expected:
                raise ConfigError(f"{path}: of one parameter it has {sorted(keys)}, of others {sorted(expected)}")
