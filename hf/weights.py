"""Weights in and out of Hugging Face folders, whole or sharded; names are those of the checkpoints."""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from config import ConfigError
from hf.files import read_json
from hf.model_config import check_weights, open_weights, weight_files
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
    where the folder holds other tensors, or one with a number that is not finite."""
    params = sharded_parameters(model)
    check_weights(Path(folder), ((name, param.shape) for name, param in params.items()))
    for path in weight_files(Path(folder)):
        with open_weights(path, "pt") as file:
            for name in filter(params.__contains__, file.keys()):
                param = params[name]
                local = param.to_local() if isinstance(param, DTensor) else param
                local.copy_(file.get_slice(name)[local_rows(param)])
                if not local.isfinite().all():
                    raise ConfigError(f"{path}: {name} holds NaN or infinity; fetch it again")


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor in `dtype`), parameter by parameter; a tied head is not repeated. One all-gather brings
    those of a block, one those before the blocks, one those behind. So each item may be a collective of a sharded
    model's ranks: all of them must walk the whole iterator."""
    params = sharded_parameters(model)
    for _, names in groupby(params, lambda name: name.partition(".layers.")[2].partition(".")[0]):
        yield from _whole({name: params[name] for name in names}, dtype)


def _whole(params: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """By one all-gather if sharded. Not by FSDP's `unshard`: that gathers in the policy's precision, which need not be
    the engine's, and its `reshard` frees tensors that vLLM may still hold: the embedding, until the sync ends."""
    first = next(iter(params.values()))
    if not isinstance(first, DTensor):
        yield from ((name, param.detach().to(dtype)) for name, param in params.items())
        return
    num_ranks = first.device_mesh.size()
    # Every rank sends as many rows as the one that has the most: those of the last ones end in zeros.
    sizes = [-(-len(param) // num_ranks) * param.shape[1:].numel() for param in params.values()]
    sent = torch.zeros(sum(sizes), dtype=dtype, device=first.device)  # cast before: bfloat16 is half the traffic
    for part, param in zip(sent.split(sizes), params.values(), strict=True):
        rows = param.detach().to_local().flatten()
        part[: len(rows)] = rows
    gathered = DTensor.from_local(sent, first.device_mesh, [Shard(0)]).full_tensor()
    parts = gathered.view(num_ranks, -1).split(sizes, dim=1)
    for (name, param), part in zip(params.items(), parts, strict=True):
        yield name, part.flatten()[: param.numel()].view(param.shape)


def save_hf(
    model: nn.Module, folder: str | Path, source_folder: str | Path, *, dtype: torch.dtype, hf: dict | None = None
) -> None:
    """Writes an HF folder that transformers, vLLM and `load_policy` can load; a collective of all ranks.

    Weights in `dtype`: give what the policy computes in, so that the folder scores as the run did. Configs (with that
    dtype) and tokenizer are the source's; `hf` takes the place of its config.json. Rank 0 writes, and holds no more
    than one file's tensors (MAX_FILE_BYTES). `<folder>.tmp` is renamed at the end, so `folder` is always whole; one
    that exists is replaced with all it holds.
    """
    folder, source = Path(folder), Path(source_folder)
    hf = (hf or read_json(source / "config.json")) | {"dtype": str(dtype).removeprefix("torch.")}
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
    params = sharded_parameters(model)
    plan = split_state_dict_into_shards_factory(
        params,
        get_storage_size=lambda param: param.numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    for file, names in plan.filename_to_tensors.items():
        tensors = (whole for name in names for whole in _whole({name: params[name]}, dtype))  # one at a time
        content = {name: tensor.cpu() for name, tensor in tensors if is_writer}
        if is_writer:
            save_file(content, new / file, metadata={"format": "pt"})
            os.chmod(new / file, 0o644)  # safetensors makes files that only their owner can read
    if is_writer:
        if plan.is_sharded:
            index = json.dumps({"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}, indent=2)
            (new / "model.safetensors.index.json").write_text(index + "\n")
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()  # on return, the folder is there for every rank
