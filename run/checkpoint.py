"""Writes checkpoints. run/restore.py reads them; base/inputs/checkpoints.py finds them and tells which are whole.

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from base.hf.folder import weight_files
from base.hf.weights import ADAPTER, local_shard, sharded_parameters
from base.inputs.checkpoints import VERSION, by_metric, committed, digest, numbered, read_meta
from base.system.disk import flush, replace_folder, write_whole
from base.system.exits import Saved, StopRun
from base.system.ranks import Ranks, any_rank, gather, on_rank0
from config import CheckpointingConfig

MAX_FAILURES = 3  # saves in a row that the disk refused, before the run stops


class HasState(Protocol):
    """An optimizer: parameter -> name -> what it keeps between steps."""

    state: dict[Tensor, dict[str, Tensor | float]]


def write_part(file: Path, write: Callable[[], None]) -> dict | str:
    """Writes one file of a folder. Returns the file's entry of meta.json's "files", or what went wrong."""
    try:
        write()
        flush(file)
        return {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}}
    except Exception as error:  # safetensors raises its own for a full disk; `commit` raises it on all ranks
        return f"{file}: {error}"


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
        """Begins checkpoint `step`: on return the state is copied, and training may go on. `state`: JSON-able;
        `restore.load` returns it. `reference`: this rank's rows of the reference policy by parameter name, or {}.
        `metrics`: of the last training step; keep_top_k compares one of these or of `state["last_validation"]`. A disk
        without room costs this checkpoint, not the run; MAX_FAILURES in a row end the run (StopRun)."""
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


def _copy_to_host(model: nn.Module, optimizer: HasState, reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name in the file -> copy of this rank's rows, for the thread to write; {} where another replica writes them."""
    params, buffers = stored_tensors(model)
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


def stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
    digests = chain.from_iterable(gather([sha256_of(file) for file in own_files]))
    text = "".join(sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
