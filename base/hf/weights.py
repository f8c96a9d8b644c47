"""Weights in and out of Hugging Face folders, whole or sharded, under the names that the folders use."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from base.hf.folder import check_weights, has_experts_together, open_weights, weight_files
from base.hf.model_config import EMBEDDING, ModelConfig
from base.system.disk import replace_folder, write_whole
from base.system.ranks import local_rows, on_rank0
from config import ConfigError
from records import Engine

MAX_FILE_BYTES = 5 * 10**9
LORA_A = ".lora_A"  # suffixes of the names of LoRA's parameters
LORA_B = ".lora_B"
ADAPTER = (LORA_A, LORA_B)
# The files of an HF folder that `save_hf` copies from its source.
SIDE_FILES = ("generation_config.json", "*token*", "vocab.json", "merges.txt", "chat_template.*")
PROCESSORS = ("*processor_config.json",)  # of images, in a folder with a vision part


def sharded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter; if sharded the masters, even after a forward that no backward has followed. Buffers that a
    checkpoint has, such as a router's correction, are among them, whole on each rank."""
    params: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                params[f"{prefix}.{name}"] = buffer
    return dict(model.named_parameters()) | params


def checkpoint_views(
    model: nn.Module, name: str, tensor: Tensor, first_expert: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """(name, view) of what the engine gets of this parameter, or of the rows that a rank has of it: itself, or the
    matrices of its experts, from `first_expert` on. `ModelConfig.stored_name` has the name in a checkpoint."""
    experts = model.config.family.experts
    block = f"model.layers.{_block_number(name)}"
    part = name.removeprefix(f"{block}.")
    if experts is None or part == name:
        yield name, tensor
    elif part in experts.computed_pair and experts.together is None:
        for number, matrix in enumerate(tensor, first_expert):
            *firsts, down = experts.names(number)
            if part.endswith("down_proj"):
                yield f"{block}.{down}", matrix
            else:
                for name, matrix_FD in zip(firsts, matrix.chunk(len(firsts)), strict=True):
                    yield f"{block}.{name}", matrix_FD
    else:
        stored = {names.computed: names.stored for names in experts.renamed}
        yield f"{block}.{stored.get(part, part)}", tensor


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fills the parameters, whole or sharded, from the folder's safetensors, cast to the parameters' dtype. ConfigError
    if the folder holds other tensors, a number that is not finite, or a head that config.json calls tied and that
    differs from the embedding: transformers and vLLM would not tie it. LoRA's parameters stay as they are."""
    params = _base_parameters(model)
    shapes = full_shapes(model)
    if model.config.num_experts and has_experts_together(Path(folder)):
        shapes = [(name, param.shape) for name, param in params.items()]
    check_weights(Path(folder), shapes, model.config)
    targets: dict[str, tuple[Tensor, slice]] = {}  # name in the folder -> where it goes, the rows that go there
    for name, param in params.items():
        rows = local_rows(param)
        targets[name] = local_shard(param), rows
        for part_name, view in checkpoint_views(model, name, local_shard(param), rows.start):
            is_whole = part_name != name and view.dim() < param.dim()  # an expert is on one rank
            targets[part_name] = view, slice(None) if is_whole else rows
    targets = {model.config.stored_name(name): target for name, target in targets.items()}
    head = model.config.stored_name("lm_head.weight")
    path_of_head = None
    for path in weight_files(Path(folder)):
        with open_weights(path, "pt") as file:
            for name in file.keys():
                if name == head:
                    path_of_head = path
                if name not in targets:  # a tied head, rotary frequencies, another rank's experts
                    continue
                target, rows = targets[name]
                target.copy_(file.get_slice(name)[rows])
                if not target.isfinite().all():
                    raise ConfigError(f"{path}: {name} holds NaN or infinity; fetch it again")
    if path_of_head is not None and head not in targets:
        target, rows = targets[model.config.stored_name(EMBEDDING)]
        with open_weights(path_of_head, "pt") as file:
            is_tied = torch.equal(file.get_slice(head)[rows].to(target), target)
        if not is_tied:
            fix = "set tie_word_embeddings in config.json to false"
            raise ConfigError(f"{path_of_head}: {head} is not the embedding, as config.json says: {fix}")


def _base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """`sharded_parameters` without LoRA's."""
    params = sharded_parameters(model)
    return {name: param for name, param in params.items() if not name.endswith(ADAPTER)}


def local_shard(tensor: Tensor) -> Tensor:
    """The rows that this rank holds of a tensor that may be sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, whole tensor in `dtype`), parameter by parameter; a tied head is not repeated. Buffers
    keep their type. One all-gather brings
    the parameters of a block, one those before the blocks and one those after. So each item may be a collective: all
    ranks of a sharded model must walk the whole iterator. LoRA's parameters are merged into their weight."""
    params = sharded_parameters(model)
    for _, names in groupby(params, _block_number):
        block = {name: params[name] for name in names}
        for name, tensor in merged_tensors(model, block, dtype):
            yield from checkpoint_views(model, name, tensor)


def sync_weights(model: nn.Module, engine: Engine, version: int) -> int:
    """Trainer -> sampler; a collective of all ranks. Returns the bytes sent to this engine. The KV cache gets its
    memory back last, because streaming the weights needs it (vllm-project/vllm#15254)."""
    engine.wake("weights")
    num_bytes = engine.sync(full_tensors(model, engine.dtype), version)
    engine.wake("kv_cache")
    return num_bytes


def _block_number(name: str) -> str:
    """The number in `model.layers.7.mlp.up_proj.weight`; "" for a parameter outside the blocks."""
    _, _, in_layers = name.partition(".layers.")
    return in_layers.split(".")[0]


def full_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each item of `full_tensors`; no collective."""
    shapes = []
    for name, param in _base_parameters(model).items():
        whole = torch.empty(param.shape, device="meta")
        shapes += [(part_name, tuple(view.shape)) for part_name, view in checkpoint_views(model, name, whole)]
    return shapes


def merged_tensors(model: nn.Module, params: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """As `full_tensors`, of these parameters only. If LoRA's are among them, so are the weights that they change."""
    layers = [name.removesuffix(LORA_A) for name in params if name.endswith(LORA_A)]
    if not layers:
        yield from whole_tensors(params, dtype)
        return
    # Gather in the forward's dtype, as FSDP does, not in the engine's: then the merged weights are bitwise equal.
    forward_dtype = params[f"{layers[0]}.weight"].dtype
    tensors = dict(whole_tensors(params, forward_dtype))
    for layer in layers:
        a_LI = tensors.pop(layer + LORA_A)
        b_OL = tensors.pop(layer + LORA_B)
        weight_OI = tensors[f"{layer}.weight"]
        scale = model.get_submodule(layer).scale
        tensors[f"{layer}.weight"] = merged_weight(weight_OI, a_LI, b_OL, scale)
    for name, tensor in tensors.items():
        yield name, tensor.to(dtype)


def merged_weight(weight_OI: Tensor, a_LI: Tensor, b_OL: Tensor, scale: float) -> Tensor:
    """weight + scale * b @ a, summed in float32 and rounded once, to the type of the weight. It computes on aligned
    copies: the memory layout can decide the last bit, and the sync's layout is not the forward's."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    a_LI = a_LI.to(wide, copy=True)
    b_OL = b_OL.to(wide, copy=True)
    sum_OI = weight_OI.to(wide, copy=True)
    sum_OI.addmm_(b_OL, a_LI, alpha=scale)
    return sum_OI.to(weight_OI.dtype)


def whole_tensors(params: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor), by one all-gather if sharded. FSDP's `unshard` gathers in the policy's precision, not the
    engine's, and `reshard` frees tensors that vLLM may still hold: the embedding, until the sync ends."""
    sharded = {name: param for name, param in params.items() if isinstance(param, DTensor)}
    for name, param in params.items():
        if isinstance(param, nn.Parameter) and name not in sharded:
            yield name, param.detach().to(dtype)
        elif name not in sharded:
            yield name, param
    if not sharded:
        return
    params = sharded
    first = next(iter(params.values()))
    num_ranks = first.device_mesh.size(-1)  # of one replica: each has all weights
    sizes = []
    for param in params.values():
        # Every rank sends as many rows as the rank that has the most; the last ranks pad with zeros.
        most_rows = math.ceil(len(param) / num_ranks)
        sizes.append(most_rows * param.shape[1:].numel())
    sent = torch.zeros(sum(sizes), dtype=dtype, device=first.device)  # cast first: bfloat16 halves the traffic
    for part, param in zip(sent.split(sizes), params.values(), strict=True):
        rows = local_shard(param.detach()).flatten()
        part[: len(rows)] = rows
    gathered = DTensor.from_local(sent, first.device_mesh, first.placements).full_tensor()
    parts = gathered.view(num_ranks, -1).split(sizes, dim=1)
    for (name, param), part in zip(params.items(), parts, strict=True):
        whole = part.flatten()[: param.numel()]
        yield name, whole.view(param.shape)


def save_hf(
    model: nn.Module,
    folder: str | Path,
    tokenizer_folder: str | Path,
    *,
    dtype: torch.dtype,
    base_folder: str | Path | None = None,
) -> None:
    """Writes an HF folder that transformers, vLLM and `load_policy` can load; a collective of all ranks.

    Weights in `dtype`: give what the policy computes in, so that the folder scores as the run did. config.json is the
    model's own with that dtype, the tokenizer's files are those of `tokenizer_folder`. A vision part comes with all its
    files from `base_folder`, as it is there. Rank 0 writes, and holds no more than the tensors of one file
    (MAX_FILE_BYTES, or a file of base_folder). `<folder>.tmp` is renamed at the end, so `folder` is always whole; a
    folder that exists is replaced with everything in it. Raises OSError, on all ranks, where the disk refuses it.
    """
    config = model.config
    name_of_file = "model" if config.whole is None else "model-text"
    plan = split_state_dict_into_shards_factory(
        _base_parameters(model),
        get_storage_size=lambda param: param.numel() * dtype.itemsize,
        filename_pattern=name_of_file + "{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    params = sharded_parameters(model)
    with new_folder(Path(folder)) as (new, is_writer):
        on_rank0(partial(_write_side_files, new, config.config_json, Path(tokenizer_folder), dtype))
        file_of_tensor = {}
        if config.whole is not None:
            file_of_tensor = on_rank0(partial(_copy_vision_part, new, Path(base_folder), config))
        for file, names in plan.filename_to_tensors.items():
            content = {}
            for name in names:  # one at a time
                layer = {name: params[name]}
                for suffix in ADAPTER:
                    factor = name.removesuffix(".weight") + suffix
                    if factor in params:
                        layer[factor] = params[factor]
                for whole_name, tensor in merged_tensors(model, layer, dtype):
                    for text_name, view in checkpoint_views(model, whole_name, tensor):
                        stored_name = config.stored_name(text_name)
                        file_of_tensor[stored_name] = file
                        if is_writer:
                            content[stored_name] = view.cpu().clone()  # safetensors refuses what shares memory
            on_rank0(partial(save_tensors, content, new / file, {"format": "pt"}))
        if plan.is_sharded or config.whole is not None:
            index = {"metadata": plan.metadata, "weight_map": file_of_tensor}
            text = json.dumps(index, indent=2) + "\n"
            on_rank0(partial(write_whole, new / "model.safetensors.index.json", text))


def _copy_vision_part(new: Path, base: Path, model: ModelConfig) -> dict[str, str]:
    """The tensors of the vision part, a file of the base at a time, and its processors. Returns name -> file."""
    _copy_files(base, PROCESSORS, new)
    file_of_tensor: dict[str, str] = {}
    for path in weight_files(base):
        with open_weights(path, "pt") as file:
            content = {name: file.get_tensor(name) for name in file.keys() if model.is_kept(name)}
        if content:
            name = f"vision-{path.name}"
            save_tensors(content, new / name, {"format": "pt"})
            file_of_tensor |= dict.fromkeys(content, name)
    return file_of_tensor


def _copy_files(source: Path, patterns: tuple[str, ...], target: Path) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)


def _write_side_files(new: Path, hf: dict, source: Path, dtype: torch.dtype) -> None:
    """config.json, and the files of the tokenizer."""
    _copy_files(source, SIDE_FILES, new)
    hf = hf | {"dtype": str(dtype).removeprefix("torch.")}
    hf.pop("torch_dtype", None)  # what transformers 4 called it
    write_whole(new / "config.json", json.dumps(hf, indent=2) + "\n")


def save_tensors(content: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(content, file, metadata)
        os.chmod(file, 0o644)  # safetensors makes files that only their owner can read
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"{file}: {error}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[tuple[Path, bool]]:
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
