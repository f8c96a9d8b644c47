"""Training state on disk: the only writer and reader of checkpoints; which folder is one, resume.py says without torch.

A checkpoint is a folder `step_000010/` with one safetensors file per rank (its rows of the float32 master weights, of
the optimizer's moments and of the reference policy) and `meta.json`, written last: step, cursor, counters,
fingerprints, and size and sha256 of every file. Training stops only for a copy to host memory: a thread of each rank
writes and flushes it as `step_000010.tmp`; at the end of a later step, when all ranks have, rank 0 adds meta.json and
renames. Older ones go only after that. So a kill at any instant leaves every committed checkpoint as it was.
"""

import hashlib
import json
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from config import CheckpointingConfig, ConfigError
from run.resume import VERSION, committed, damaged, read_meta, steps
from system.exits import Saved, StopRun
from system.ranks import Ranks, any_rank, broadcast_from_rank0

MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_FAILURES = 3  # saves in a row that the disk refused, before the run stops


@dataclass(slots=True)
class Pending:
    """A checkpoint on its way: what its meta.json will say, this rank's writer, and how that ended."""

    temporary: Path
    meta: dict
    thread: threading.Thread | None = None
    entry: dict | None = None
    error: str | None = None

    def write(self, tensors: dict[str, torch.Tensor], file: Path) -> None:
        try:
            save_file(tensors, file)
            flush(file)
            self.entry = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        except Exception as error:  # safetensors raises its own for a full disk; told to all ranks by `poll`
            self.error = f"{file}: {error}"


class Saver:
    """Writes the checkpoints of a run. Its methods are collectives: all ranks call them at the same point. As a context
    manager it ends with the last one committed, unless this rank alone may have failed."""

    def __init__(self, folder: Path, cfg: CheckpointingConfig, ranks: Ranks, saved: int | None = None):
        self.folder, self.cfg, self.ranks = folder, cfg, ranks
        self.pending: Pending | None = None
        self.saved = saved  # the newest step that is on disk
        self.num_failures = 0

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, (StopRun, Saved)):  # what all ranks raise together
            self.finish()

    def save(self, step: int, model, optimizer, state: dict, extra: dict[str, torch.Tensor], metric: float | None):
        """Begins checkpoint `step`: on return the state is copied, and training may go on.

        `state`: JSON-able counters and fingerprints, handed back by `load`. `extra`: further row shards by parameter
        name (the reference policy's). `metric`: what keep_top_k compares. A disk without room costs this checkpoint,
        not the run; MAX_FAILURES of them in a row end it (StopRun).
        """
        self.finish()
        tensors = _shards(model, optimizer, extra)
        temporary = self.folder / f"step_{step:06d}.tmp"
        meta = {"version": VERSION, "step": step, "world_size": self.ranks.world_size, "state": state, "metric": metric}
        self.pending = Pending(temporary, json.loads(json.dumps(meta)))  # the run goes on changing `state`
        size = torch.tensor(sum(tensor.nbytes for tensor in tensors.values()))
        dist.all_reduce(size)
        if problem := self._on_rank_0(lambda: self._make_room(temporary, int(size))):
            return self._give_up(problem)
        file = temporary / _shard_name(self.ranks.rank)
        # Not a daemon: where the run ends in an error, the interpreter still waits for the file to be closed.
        self.pending.thread = threading.Thread(target=self.pending.write, args=(tensors, file), name="checkpoint")
        self.pending.thread.start()

    def poll(self) -> None:
        """Commits the pending checkpoint if all ranks have written theirs; else leaves it for later."""
        if self.pending is not None and self.pending.thread is not None:
            if not any_rank(self.pending.thread.is_alive()):
                self.finish()

    def finish(self) -> None:
        """Waits for the pending checkpoint and commits it."""
        if self.pending is None or self.pending.thread is None:
            return
        self.pending.thread.join()
        answers: list = [None] * self.ranks.world_size
        dist.all_gather_object(answers, (self.pending.entry, self.pending.error))
        problem = next((error for _, error in answers if error), None)
        self.pending.meta["files"] = {_shard_name(rank): entry for rank, (entry, _) in enumerate(answers)}
        problem = problem or self._on_rank_0(self._commit)
        if problem:
            self._give_up(problem)
        else:
            self.saved, self.pending, self.num_failures = self.pending.meta["step"], None, 0

    def _make_room(self, temporary: Path, size: int) -> None:
        for leftover in (*self.folder.glob("step_*.tmp"), *self.folder.glob("step_*.old")):  # of a kill
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < 1.05 * size:  # headers, meta.json, blocks
            raise OSError(f"{self.folder}: {free / 2**20:,.0f} MiB free, a checkpoint needs {size / 2**20:,.0f} MiB")

    def _commit(self) -> None:
        temporary = self.pending.temporary
        final = temporary.with_suffix("")
        (temporary / "meta.json").write_text(json.dumps(self.pending.meta, indent=1))
        flush(temporary / "meta.json")
        flush(temporary)
        shutil.rmtree(final, ignore_errors=True)  # only a run resumed from before this step gets here with one
        os.rename(temporary, final)
        flush(self.folder)
        self._prune()

    def _prune(self) -> None:
        """Removes all but the newest keep_latest and the best keep_top_k (of equal ones the newer)."""
        sign = 1 if self.cfg.higher_is_better else -1
        whole = committed(self.folder)
        rated = [(sign * metric, path) for path in whole if (metric := read_meta(path)["metric"]) is not None]
        best = [path for _, path in sorted(rated, key=lambda pair: -pair[0])][: self.cfg.keep_top_k or 0]
        for path in whole[self.cfg.keep_latest :]:
            if path not in best:
                os.rename(path, gone := path.with_suffix(".old"))  # a kill amid rmtree must not leave half a checkpoint
                shutil.rmtree(gone)

    def _on_rank_0(self, action) -> str | None:
        """Has rank 0 do it; every rank learns of what the disk said to it."""
        problem = None
        if self.ranks.rank == 0:
            try:
                action()
            except OSError as error:
                problem = str(error)
        return broadcast_from_rank0(problem)

    def _give_up(self, problem: str) -> None:
        temporary, self.pending = self.pending.temporary, None
        if self.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        self.num_failures += 1
        newest = next(iter(committed(self.folder)), None)
        what = f"checkpoint {temporary.stem} was not saved ({problem}); the newest is {newest}"
        if self.num_failures >= MAX_FAILURES:
            raise StopRun(f"{what}; {self.num_failures} failed in a row: make room in {self.folder}")
        self.ranks.print_rank0(f"WARNING: {what}; training goes on, the next one is due as configured")


def metric(saving: CheckpointingConfig, state: dict, train: dict[str, float]) -> float | None:
    """What keep_top_k compares, of the last step's and validation's numbers; None as long as there are none."""
    kind = train if saving.metric_name.startswith("train/") else state["last_validation"]
    if saving.keep_top_k is None or not kind:
        return None
    known = {f"train/{name}": value for name, value in train.items()} | state["last_validation"]
    if saving.metric_name not in known:
        raise StopRun(
            f"checkpointing.metric_name={saving.metric_name} is no metric here; known: {', '.join(sorted(known))}"
        )
    return known[saving.metric_name]


def load(
    folder: Path, model, optimizer, ranks: Ranks, extra: dict[str, torch.Tensor] | None = None, *, mode: str | None
) -> dict:
    """Restores the newest checkpoint of `folder` into model and optimizer, on any number of ranks. A collective.

    mode "auto" takes the newest that is good, with a loud line for each that is not; else the newest must be. Returns
    its `state` with `step` in it. Raises ConfigError, on all ranks, that names the damaged file.
    """
    for path in broadcast_from_rank0(steps(folder)):  # rank 0's view of a shared disk
        problem = _problem(path, ranks)
        if problem is None:
            meta = read_meta(path)
            _restore(_Files(path, meta), model, optimizer, extra or {})
            return {"step": meta["step"], **meta["state"]}
        if mode != "auto":
            raise ConfigError(damaged(problem, path))
        ranks.print_rank0(f"WARNING: {problem}: going on from an older checkpoint")
    raise ConfigError(f"checkpointing.resume_from: no whole checkpoint in {folder}; start a new run without it")


def _problem(path: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, the same on all ranks; its files are divided among them."""
    meta, problem = read_meta(path), None
    if isinstance(meta, str):
        problem = meta
    else:
        for name in sorted(meta["files"])[ranks.rank :: ranks.world_size]:
            problem = problem or _damage(path / name, meta["files"][name]["sha256"])
    problems: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), None)


class _Files:
    """The tensors of a checkpoint, whose rows lie one rank after another in its files."""

    def __init__(self, path: Path, meta: dict):
        self.path = path
        self.files = [safe_open(path / name, framework="pt") for name in sorted(meta["files"])]
        self.names = set(self.files[0].keys())

    def scalar(self, name: str) -> torch.Tensor:
        return self.files[0].get_tensor(name)

    def read_rows(self, name: str, target: torch.Tensor, first: int) -> None:
        """Copies rows [first, first + len(target)) of the whole tensor."""
        done, start = 0, 0
        for file in self.files:
            stored = file.get_slice(name)
            end = start + stored.get_shape()[0]
            low, high = max(first, start), min(first + len(target), end)
            if low < high:
                target[low - first : high - first].copy_(stored[low - start : high - start])
                done += high - low
            start = end
        assert done == len(target), (self.path, name, done, target.shape, start)


def _shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _shards(model, optimizer, extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory: the thread writes them while training changes the originals."""
    tensors = {f"extra.{name}": tensor for name, tensor in extra.items()}
    for name, param in model.named_parameters():
        tensors[f"param.{name}"] = _local(param)
        if param in optimizer.state:
            tensors[f"step.{name}"] = optimizer.state[param]["step"]
            tensors |= {f"{moment}.{name}": _local(optimizer.state[param][moment]) for moment in MOMENTS}
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def _restore(files: _Files, model, optimizer, extra: dict[str, torch.Tensor]) -> None:
    stored = {name.removeprefix("extra.") for name in files.names if name.startswith("extra.")}
    if stored != extra.keys():
        raise ConfigError(
            f"{files.path}: was saved {'with' if stored else 'without'} a reference policy; set "
            "loss_fn.reference_policy_kl_penalty as in that run"
        )
    for name, param in model.named_parameters():
        first = _first_row(param)
        files.read_rows(f"param.{name}", _local(param), first)
        if name in extra:
            files.read_rows(f"extra.{name}", extra[name], first)
        if f"step.{name}" in files.names:  # else saved before the first optimizer step
            state = optimizer.state[param]
            state["step"] = files.scalar(f"step.{name}").to(param.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(param)
                files.read_rows(f"{moment}.{name}", _local(state[moment]), first)


def _first_row(param: torch.Tensor) -> int:
    """Of this rank's shard, in the whole tensor: shards are those of torch.chunk."""
    if not isinstance(param, DTensor):
        return 0
    return min(param.device_mesh.get_local_rank() * -(-len(param) // param.device_mesh.size()), len(param))


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


def flush(path: Path) -> None:
    """To the disk, for files and folders: a rename can survive a power cut that its content does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
