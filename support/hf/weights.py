"""Weights in and out of Hugging Face folders, whole or sharded, under the names that the folders use."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from config import ConfigError, PolicyConfig
from support.hf.lora_layers import adapted_layers
from support.inputs.model_config import ModelConfig, check_weights, open_weights, weight_files
from support.system.disk import replace_folder, write_whole
from support.system.ranks import local_rows, on_rank0

MAX_FILE_BYTES = 5 * 10**9
ADAPTER = (".lora_A", ".lora_B")  # suffixes of the names of LoRA's parameters
# The files of an HF folder that `save_hf` copies from its source.
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
    if the folder holds other tensors, or a number that is not finite. LoRA's parameters stay as they are."""
    params = {name: param for name, param in sharded_parameters(model).items() if not name.endswith(ADAPTER)}
    check_weights(Path(folder), ((name, param.shape) for name, param in params.items()))
    for path in weight_files(Path(folder)):
        with open_weights(path, "pt") as file:
            for name in filter(params.__contains__, file.keys()):
                rows = local_shard(params[name])
                rows.copy_(file.get_slice(name)[local_rows(params[name])])
                if not rows.isfinite().all():
                    raise ConfigError(f"{path}: {name} holds NaN or infinity; fetch it again")


def local_shard(tensor: Tensor) -> Tensor:
    """The rows that this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def init_adapters(model: nn.Module, init: str, seed: int) -> None:
    """Sets LoRA's parameters, the same on any number of ranks: A by `init`, B to 0, so the model equals its base."""
    generator = torch.Generator().manual_seed(seed)
    fill = nn.init.xavier_normal_ if init == "xavier" else partial(nn.init.kaiming_uniform_, a=5**0.5)
    for name, param in sharded_parameters(model).items():
        if name.endswith(ADAPTER):
            whole = torch.zeros(param.shape)
            if name.endswith(ADAPTER[0]):
                fill(whole, generator=generator)
            local_shard(param).copy_(whole[local_rows(param)])


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor in `dtype`), parameter by parameter; a tied head is not repeated. One all-gather brings
    the parameters of a block, one those before the blocks and one those after. So each item may be a collective: all
    ranks of a sharded model must walk the whole iterator. LoRA's parameters are merged into their weight."""
    params = sharded_parameters(model)
    for _, names in groupby(params, lambda name: name.partition(".layers.")[2].partition(".")[0]):
        yield from merged_tensors(model, {name: params[name] for name in names}, dtype)


def full_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each item of `full_tensors`; no collective."""
    params = sharded_parameters(model).items()
    return [(name, tuple(param.shape)) for name, param in params if not name.endswith(ADAPTER)]


def merged_tensors(model: nn.Module, params: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """As `full_tensors`, of these parameters only. If LoRA's are among them, so are the weights that they change."""
    layers = [name.removesuffix(ADAPTER[0]) for name in params if name.endswith(ADAPTER[0])]
    if not layers:
        yield from _whole(params, dtype)
        return
    # Gather in the forward's dtype, as FSDP does, not in the engine's: then the merged weights are bitwise equal.
    tensors = dict(_whole(params, params[f"{layers[0]}.weight"].dtype))
    for layer in layers:
        a_LI, b_OL = (tensors.pop(layer + end) for end in ADAPTER)
        weight_OI = tensors[f"{layer}.weight"]
        tensors[f"{layer}.weight"] = merged_weight(weight_OI, a_LI, b_OL, model.get_submodule(layer).scale)
    yield from ((name, tensor.to(dtype)) for name, tensor in tensors.items())


def merged_weight(weight_OI: Tensor, a_LI: Tensor, b_OL: Tensor, scale: float) -> Tensor:
    """weight + scale * b @ a, summed in float32 and rounded once, to the type of the weight. It computes on aligned
    copies: the memory layout can decide the last bit, and the sync's layout is not the forward's."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    a_LI, b_OL = (x.to(wide, copy=True) for x in (a_LI, b_OL))
    return weight_OI.to(wide, copy=True).addmm_(b_OL, a_LI, alpha=scale).to(weight_OI.dtype)


def _whole(params: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor), by one all-gather if sharded. FSDP's `unshard` gathers in the policy's precision, not the
    engine's, and `reshard` frees tensors that vLLM may still hold: the embedding, until the sync ends."""
    first = next(iter(params.values()))
    if not isinstance(first, DTensor):
        yield from ((name, param.detach().to(dtype)) for name, param in params.items())
        return
    num_ranks = first.device_mesh.size(-1)  # of one replica: each has all weights
    # Every rank sends as many rows as the rank that has the most; the last ranks pad with zeros.
    sizes = [-(-len(param) // num_ranks) * param.shape[1:].numel() for param in params.values()]
    sent = torch.zeros(sum(sizes), dtype=dtype, device=first.device)  # cast first: bfloat16 halves the traffic
    for part, param in zip(sent.split(sizes), params.values(), strict=True):
        rows = local_shard(param.detach()).flatten()
        part[: len(rows)] = rows
    gathered = DTensor.from_local(sent, first.device_mesh, first.placements).full_tensor()
    parts = gathered.view(num_ranks, -1).split(sizes, dim=1)
    for (name, param), part in zip(params.items(), parts, strict=True):
        yield name, part.flatten()[: param.numel()].view(param.shape)


def save_hf(model: nn.Module, folder: str | Path, source_folder: str | Path, *, dtype: torch.dtype) -> None:
    """Writes an HF folder that transformers, vLLM and `load_policy` can load; a collective of all ranks.

    Weights in `dtype`: give what the policy computes in, so that the folder scores as the run did. config.json is the
    model's own with that dtype, the tokenizer's files are those of `source_folder`. Rank 0 writes, and holds no more
    than the tensors of one file (MAX_FILE_BYTES). `<folder>.tmp` is renamed at the end, so `folder` is always whole; a
    folder that exists is replaced with everything in it. Raises OSError, on all ranks, where the disk refuses it.
    """
    source = Path(source_folder)
    hf = model.config.hf | {"dtype": str(dtype).removeprefix("torch.")}
    hf.pop("torch_dtype", None)  # what transformers 4 called it
    params = sharded_parameters(model)
    weights = {name: param for name, param in params.items() if not name.endswith(ADAPTER)}
    plan = split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda param: param.numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )

    def write_side_files() -> None:
        for path in chain(*map(source.glob, SIDE_FILES)):
            shutil.copyfile(path, new / path.name)
        write_whole(new / "config.json", json.dumps(hf, indent=2) + "\n")

    with _new_folder(Path(folder)) as (new, is_writer):
        on_rank0(write_side_files)
        for file, names in plan.filename_to_tensors.items():
            variants = ([name.replace(".weight", end) for end in (".weight", *ADAPTER)] for name in names)
            layers = ({name: params[name] for name in variant if name in params} for variant in variants)
            tensors = (whole for layer in layers for whole in merged_tensors(model, layer, dtype))  # one at a time
            content = {name: tensor.cpu() for name, tensor in tensors if is_writer}
            on_rank0(partial(_save, content, new / file, {"format": "pt"}))
        if plan.is_sharded:
            index = json.dumps({"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}, indent=2)
            on_rank0(partial(write_whole, new / "model.safetensors.index.json", index + "\n"))


def save_adapter(model: nn.Module, folder: str | Path, config: dict) -> None:
    """Writes a PEFT folder, as `save_hf`: `config`, by `adapter_config`, and in float32 lora_A [r, in] and lora_B
    [out, r] of each adapted matrix W, in whose place W + lora_alpha / r * B A computes (Hu et al. 2021)."""
    lora = ((name, param) for name, param in sharded_parameters(model).items() if name.endswith(ADAPTER))
    params = {f"base_model.model.{name}.weight": param for name, param in lora}  # PEFT's names
    content = {name: tensor.cpu() for name, tensor in _whole(params, torch.float32)}
    with _new_folder(Path(folder)) as (new, _):
        on_rank0(partial(write_whole, new / "adapter_config.json", json.dumps(config, indent=2) + "\n"))
        on_rank0(partial(_save, content, new / "adapter_model.safetensors", {"format": "pt"}))


def adapter_config(policy: PolicyConfig, model: ModelConfig) -> dict:
    """The content of adapter_config.json for what the config trains. Unless all layers are adapted, target_modules has
    full names: a last name may select other layers as well."""
    cfg, base = policy.dtensor_cfg.lora_cfg, policy.model_name
    layers = adapted_layers(model, cfg)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base,
        "r": cfg.dim,
        "lora_alpha": int(cfg.alpha) if cfg.alpha.is_integer() else cfg.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers} if cfg.match_all_linear else layers),
        "bias": "none",
        "inference_mode": True,
    }


def _save(content: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(content, file, metadata)
        os.chmod(file, 0o644)  # safetensors makes files that only their owner can read
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"{file}: {error}") from error


@contextmanager
def _new_folder(folder: Path) -> Iterator[tuple[Path, bool]]:
    """(folder to write to, whether this rank writes); renamed to `folder` at the end. All ranks return together."""
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    new = folder.with_name(f"{folder.name}.tmp")
    on_rank0(partial(shutil.rmtree, new, ignore_errors=True))  # of a run that was killed
    on_rank0(partial(new.mkdir, parents=True))
    try:
        yield new, is_writer
        on_rank0(partial(replace_folder, new, folder))
    finally:
        if is_writer:
            shutil.rmtree(new, ignore_errors=True)
