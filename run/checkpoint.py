"""Writes and reads checkpoints. base/inputs/resume.py finds them and tells which are whole, without torch.

A checkpoint is a folder `step_000010/` with one safetensors file per rank and `meta.json`. A rank's file has its rows
of the float32 master weights, of the optimizer's state and of the reference policy, and whole the buffers that belong
to the model. Where several replicas hold the same rows, the first one writes them. Weights that LoRA has frozen are not
stored: a hash identifies them. `meta.json` has step, counters, fingerprints, size and sha256 of every file, and a
sha256 of itself.

Training stops only for a copy to host memory, which a thread of each rank writes into `step_000010.tmp`. When all
ranks have written, at the end of a later step, rank 0 adds meta.json and renames the folder. Older checkpoints go only
after that, so a kill at any instant leaves every committed checkpoint as it was. torch.distributed.checkpoint is not
used: its metadata is a pickle, which can run code, and it keeps no checksums.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from base.hf.model_config import weight_files
from base.hf.weights import ADAPTER, local_shard, sharded_parameters
from base.inputs.resume import (
    VERSION,
    by_metric,
    candidates,
    committed,
    damaged,
    digest,
    numbered,
    of_this_program,
    read_meta,
)
from base.system.disk import flush, replace_folder, write_whole
from base.system.exits import Saved, StopRun
from base.system.optimizer import Optimizer
from base.system.ranks import Ranks, any_rank, gather, local_rows, on_rank0
from config import CheckpointingConfig, ConfigError

MAX_FAILURES = 3  # saves in a row that the disk refused, before the run stops


class HasState(Protocol):
    """An optimizer: parameter -> name -> what it keeps between steps."""

    state: dict[Tensor, dict[str, Tensor | float]]


def write_part(file: Path, write: Callable[[], None]) -> dict | str:
    """Writes one file of a folder. Returns the file's entry of meta.json's "files", or what went wrong."""
    try:
        write()
        flush(file)
        return {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}}
    except Exception as error:  # safetensors raises its own for a full disk; `commit` raises it on all ranks
        return f"{file}: {error}"


def write_folder(temporary: Path, meta: dict, writers: Mapping[Path, Callable[[], None]]) -> None:
    """Writes the folder `step_000010` at once, through `step_000010.tmp`. writers: this rank's files. A collective.
    Raises OSError, on all ranks, where the disk refused something; then nothing is left."""
    try:
        on_rank0(partial(_make_empty, temporary))
        commit(temporary, meta, [write_part(file, write) for file, write in writers.items()])
    except OSError:
        if dist.get_rank() == 0:  # all ranks have written their files, or none has
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it wrote
    folder.mkdir(parents=True)


def commit(temporary: Path, meta: dict, parts: Sequence[dict | str]) -> None:
    """Completes `step_000010.tmp` with meta.json and renames it to `step_000010`. `parts`: what `write_part` returned
    on this rank. A collective. Raises OSError, on all ranks, where the disk refused something."""
    files = {}
    for part in chain.from_iterable(gather(parts)):
        if isinstance(part, str):
            raise OSError(part)
        files |= part
    meta = meta | {"files": files}
    on_rank0(lambda: _publish(temporary, meta))


def _publish(temporary: Path, meta: dict) -> None:
    _write_meta(temporary, meta)
    replace_folder(temporary, temporary.with_suffix(""))  # one is there if the run went back


def _write_meta(folder: Path, meta: dict) -> None:
    content = meta | {"sha256": digest(meta)}
    write_whole(folder / "meta.json", json.dumps(content, indent=1))


class Saver(AbstractContextManager):
    """Writes the checkpoints of a run. Its methods are collectives: all ranks call them at the same point. As a context
    manager it commits the last checkpoint on exit, unless this rank alone may have failed."""

    def __init__(self, folder: Path, cfg: CheckpointingConfig, ranks: Ranks):
        self.folder = folder
        self.cfg = cfg
        self.ranks = ranks
        # Not a daemon: where the run ends in an error, the interpreter still waits for the file to be closed.
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.pending: tuple[Path, dict] | None = None  # folder and meta.json of the checkpoint that is being written
        self.written: Future[dict | str] | None = None  # of `write_part`, for `pending`
        self.saved: int | None = None  # the newest step that is on disk
        self.num_failures = 0

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, (StopRun, Saved)):  # what all ranks raise together
            self.finish()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: HasState,
        state: dict,
        reference: dict[str, Tensor],
        metrics: dict[str, float],
    ) -> None:
        """Begins checkpoint `step`: on return the state is copied, and training may go on. `state`: JSON-able, `load`
        returns it. `reference`: this rank's rows of the reference policy by parameter name, or {}. `metrics`: of the
        last training step; keep_top_k compares one of these or of `state["last_validation"]`. A disk without room costs
        this checkpoint, not the run; MAX_FAILURES in a row end the run (StopRun)."""
        self.finish()
        metric = self._metric(metrics, state.get("last_validation", {}))
        tensors = _copy_to_host(model, optimizer, reference)
        own_size = sum(tensor.nbytes for tensor in tensors.values())
        size = sum(gather(own_size))
        temporary = self.folder / f"step_{step:06d}.tmp"
        try:
            on_rank0(lambda: self._make_room(temporary, size))
        except OSError as error:
            self._give_up(temporary, str(error))
            return
        meta = {"version": VERSION, "step": step, "world_size": self.ranks.world_size, "state": state, "metric": metric}
        copy_of_meta = json.loads(json.dumps(meta))  # the run goes on changing `state`
        self.pending = temporary, copy_of_meta
        file = temporary / f"rank_{self.ranks.rank:05d}.safetensors"
        if tensors:
            self.written = self.writer.submit(write_part, file, partial(save_file, tensors, file))
        else:
            self.written = self.writer.submit(dict)  # no file, no entry

    def poll(self) -> None:
        """Commits the pending checkpoint if all ranks have written their part; else leaves it for later."""
        if self.pending is None:
            return
        is_writing = not self.written.done()
        if not any_rank(is_writing):
            self.finish()

    def finish(self) -> None:
        """Waits for the pending checkpoint and commits it."""
        if self.pending is None:
            return
        temporary, meta = self.pending
        self.pending = None
        try:
            commit(temporary, meta, [self.written.result()])
            self.saved = meta["step"]
            self.num_failures = 0
            on_rank0(lambda: self._prune(meta["step"]))
        except OSError as error:
            self._give_up(temporary, str(error))

    def update(self, state: dict) -> None:
        """Replaces the state in the newest checkpoint, whose weights are still those of the run."""
        path = self.folder / f"step_{self.saved:06d}"
        on_rank0(lambda: _write_meta(path, read_meta(path) | {"state": state}))

    def _metric(self, train: dict[str, float], validation: dict[str, float]) -> float | None:
        """What keep_top_k compares: a number of the last step or the last validation; None if there is none, or NaN."""
        name = self.cfg.metric_name
        train = {f"train/{key}": value for key, value in train.items()}
        if name.startswith("train/"):
            is_measured = len(train) > 0
        else:
            is_measured = len(validation) > 0
        if not is_measured:
            return None
        metrics = train | validation
        if name not in metrics and self.cfg.keep_top_k:
            known = ", ".join(sorted(metrics))
            raise StopRun(f"checkpointing.metric_name={name}: there is no such metric; use one of {known}")
        value = metrics.get(name, math.nan)
        if not math.isfinite(value):
            return None
        return value

    def _make_room(self, temporary: Path, size: int) -> None:
        for leftover in (*self.folder.glob("step_*.tmp"), *self.folder.glob("step_*.old")):  # by a kill
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        needed = 1.05 * size  # headers, meta.json, blocks
        if free < needed:
            needs = f"a checkpoint needs {needed / 2**20:,.1f} MiB"
            raise OSError(f"{self.folder}: {free / 2**20:,.1f} MiB free, {needs}")

    def _prune(self, step: int) -> None:
        """Removes all but the newest keep_latest and the best keep_top_k, and those after `step`: the run went back."""
        later = [path for number, path in numbered(self.folder, "step_").items() if number > step]
        newest = [path for path in committed(self.folder) if path not in later]
        best = [path for path in by_metric(self.folder, self.cfg.higher_is_better) if path not in later]
        kept = newest[: self.cfg.keep_latest]
        if self.cfg.keep_top_k:
            kept += best[: self.cfg.keep_top_k]
        for path in [*later, *newest]:
            if path not in kept:
                removed = path.with_suffix(".old")
                os.rename(path, removed)  # a kill amid rmtree must not leave half a checkpoint
                shutil.rmtree(removed)

    def _give_up(self, temporary: Path, problem: str) -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        self.num_failures += 1
        newest = next(iter(committed(self.folder)), "none")
        failure = f"checkpoint {temporary.stem} was not saved ({problem}); the newest saved one: {newest}"
        if self.num_failures >= MAX_FAILURES:
            raise StopRun(f"{failure}; {self.num_failures} failed in a row: make room in {self.folder}")
        self.ranks.print_rank0(f"WARNING: {failure}; training continues, and the next checkpoint will be tried")


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
            if _sha256(file) != files[name]["sha256"]:
                problem = f"{file}: content differs from its checksum in meta.json"
        except OSError as error:
            problem = f"{file}: {error.strerror}"
    return problem


def _copy_to_host(model: nn.Module, optimizer: HasState, reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name in the file -> copy of this rank's rows, for the thread to write; {} where another replica writes them."""
    params, buffers = _stored(model)
    if not all(map(_is_of_first_replica, params.values())):
        return {}
    tensors = {f"reference.{name}": rows for name, rows in reference.items()}
    for name, buffer in buffers.items():
        tensors[f"buffer.{name}"] = buffer
    for name, param in params.items():
        tensors[f"param.{name}"] = local_shard(param)
        for key, value in optimizer.state.get(param, {}).items():
            kind, tensor = _describe_state(value, param)
            tensors[f"{kind}.{key}.{name}"] = tensor
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _is_of_first_replica(param: Tensor) -> bool:
    if not isinstance(param, DTensor):
        return True
    replica = param.device_mesh.get_coordinate()[:-1]  # () without replicas
    return not any(replica)


def _describe_state(value: Tensor | float, param: Tensor) -> tuple[str, Tensor]:
    """(kind, tensor to store) of what an optimizer keeps for a parameter. sharded: a DTensor like the parameter. local:
    a tensor like this rank's rows. replicated: any other, equal on all ranks; a number is a tensor without dims."""
    if isinstance(value, DTensor):
        assert value.shape == param.shape and value.placements == param.placements, (value.shape, value.placements)
        return "sharded", value.to_local()
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64)
    if value.dim() > 0 and value.shape == local_shard(param).shape:
        return "local", value
    return "replicated", value


def _read_state(files: list[safe_open], name: str, kind: str, param: Tensor) -> Tensor:
    """What `_describe_state` described."""
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
        num_stored = stored.get_shape()[0]
        first = min(max(rows.start - start, 0), num_stored)
        end = min(max(rows.stop - start, first), num_stored)
        parts.append(stored[first:end])
        start += num_stored
    tensor = torch.cat(parts)
    if tensor.shape != local_shard(param).shape or start != len(param):
        raise ConfigError(f"{name}: {(start, *tensor.shape[1:])} in the checkpoint, {(*param.shape,)} in the model")
    return tensor


@torch.no_grad()
def _restore(
    path: Path, shards: list[str], model: nn.Module, optimizer: HasState | None, reference: dict[str, Tensor]
) -> None:
    files = [safe_open(path / shard, framework="pt") for shard in shards]
    names = sorted(files[0].keys())
    params, buffers = _stored(model)
    in_model = {f"param.{name}" for name in params} | {f"buffer.{name}" for name in buffers}
    in_checkpoint = {name for name in names if name.startswith(("param.", "buffer."))}
    if in_model != in_checkpoint:
        other = min(in_model ^ in_checkpoint)
        raise ConfigError(f"{path}: does not fit policy.model_name: only one of the two has {other}")
    for name, param in params.items():
        local_shard(param).copy_(_read_rows(files, f"param.{name}", param))
    for name, buffer in buffers.items():
        buffer.copy_(files[0].get_tensor(f"buffer.{name}"))  # each rank has written all of it
    if optimizer is None:
        return
    has_reference = any(name.startswith("reference.") for name in names)
    needs_reference = len(reference) > 0
    if has_reference != needs_reference:
        saved = f"{path}: was saved {'with' if has_reference else 'without'} a reference policy"
        raise ConfigError(f"{saved}; set loss_fn.reference_policy_kl_penalty as in that run")
    for name, rows in reference.items():
        rows.copy_(_read_rows(files, f"reference.{name}", params[name]))
    for stored in names:
        kind, _, rest = stored.partition(".")
        if kind in ("param", "buffer", "reference"):
            continue
        # Of the optimizer, which has no state before its first step.
        key, _, name = rest.partition(".")
        value = _read_state(files, stored, kind, params[name])
        if kind in ("sharded", "local") and isinstance(optimizer, Optimizer):
            value = optimizer.at_rest(key, value)  # at once: the device may not have room for all of them
        optimizer.state[params[name]][key] = value


def _stored(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters and the buffers that a checkpoint holds: all, frozen routers too; with LoRA only its own."""
    params = {}
    buffers = {}
    for name, tensor in sharded_parameters(model).items():
        if isinstance(tensor, nn.Parameter):
            params[name] = tensor
        else:
            buffers[name] = tensor
    adapters = {name: param for name, param in params.items() if name.endswith(ADAPTER)}
    if adapters:
        return adapters, {}
    return params, buffers


def weights_sha256(folder: Path, ranks: Ranks) -> str:
    """The fingerprint of a model folder's weights. The ranks share the work of reading the files. A collective."""
    own_files = weight_files(folder)[ranks.rank :: ranks.world_size]
    digests = chain.from_iterable(gather([_sha256(file) for file in own_files]))
    text = "".join(sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
