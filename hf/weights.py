"""Weights in and out of Hugging Face folders, whole or sharded; names are those of the checkpoints."""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from config import ConfigError
from hf.files import read_json
from hf.model_config import weight_files
from system.ranks import local_rows

MAX_FILE_BYTES = 5 * 10**9
# What an HF folder holds beside weights; `save_hf` takes it along from its source.
SIDE_FILES = ("generation_config.json", "*token*", "vocab.json", "merges.txt", "chat_template.*")


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """HF name -> parameter; if sharded the masters, even after a forward that no backward has followed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fills the parameters, whole or sharded, from the folder's safetensors, cast to the parameters' dtype. ConfigError
    names the tensors that only one side has; a tied head's copy and rotary frequencies, which some store, may be there.
    """
    missing, unexpected = sharded_parameters(model), []
    for path in weight_files(Path(folder)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name in missing:
                        _copy_rows(missing.pop(name), file.get_slice(name), f"{path}: {name}")
                    elif not name.endswith(("lm_head.weight", "rotary_emb.inv_freq")):
                        unexpected.append(f"{name} ({path.name})")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file ({error}); fetch it again") from error
    for what, names in (("missing", list(missing)), ("unexpected", unexpected)):
        if names:
            names[5:] = [f"{len(names) - 5} more"] if len(names) > 5 else []
            raise ConfigError(f"{folder}: weights do not match its config.json; {what}: {', '.join(names)}")


def _copy_rows(param: Tensor, stored: Any, where: str) -> None:
    """Copies a stored tensor; into a shard, its rows."""
    if stored.get_shape() != list(param.shape):
        raise ConfigError(f"{where}: shape {stored.get_shape()}, but {list(param.shape)} by config.json")
    local = param.to_local() if isinstance(param, DTensor) else param
    local.copy_(stored[local_rows(param)])


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor in `dtype`), one parameter at a time; a tied head is not repeated. Each item is a
    collective of a sharded model's ranks: all of them must walk the whole iterator."""
    for name, param in sharded_parameters(model).items():
        tensor = param.detach().to(dtype)  # before gathering: bfloat16 is half the traffic
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_hf(model: nn.Module, folder: str | Path, source_folder: str | Path, *, dtype: torch.dtype) -> None:
    """Writes an HF folder that transformers, vLLM and `load_policy` can load; a collective of all ranks.

    Weights in `dtype`: give what the policy computes in, so that the folder scores as the run did. Configs (with that
    dtype) and tokenizer are the source's. Rank 0 writes, and holds no more than one file's tensors (MAX_FILE_BYTES).
    `<folder>.tmp` is renamed at the end, so `folder` is always whole; one that exists is replaced with all it holds.
    """
    folder, source = Path(folder), Path(source_folder)
    hf = read_json(source / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
    hf.pop("torch_dtype", None)  # what transformers 4 called it
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    new, old = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("tmp", "old"))
    if is_writer:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        new.mkdir(parents=True)
        for pattern in SIDE_FILES:
            for path in source.glob(pattern):
                shutil.copyfile(path, new / path.name)
        (new / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    tensors, names_of_file = full_tensors(model, dtype), _plan_files(model, dtype)
    for file, names in names_of_file.items():
        content = {name: tensor.cpu() for name, tensor in islice(tensors, len(names)) if is_writer}
        if is_writer:
            save_file(content, new / file, metadata={"format": "pt"})
            os.chmod(new / file, 0o644)  # safetensors makes files that only their owner can read
    if is_writer:
        if len(names_of_file) > 1:
            size = sum(param.numel() for param in model.parameters()) * dtype.itemsize
            weight_map = {name: file for file, names in names_of_file.items() for name in names}
            index = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2)
            (new / "model.safetensors.index.json").write_text(index + "\n")
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()  # on return, the folder is there for every rank


def _plan_files(model: nn.Module, dtype: torch.dtype) -> dict[str, list[str]]:
    """File -> names, in the order of `full_tensors`."""
    files: list[list[str]] = []
    room = 0
    for name, param in sharded_parameters(model).items():
        room -= param.numel() * dtype.itemsize
        if not files or room < 0:
            files.append([])
            room = MAX_FILE_BYTES - param.numel() * dtype.itemsize
        files[-1].append(name)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}
