"""What a model folder holds: config.json, and the weights in safetensors files. No torch."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from base.hf.config_forms import check_forms
from base.hf.family import NATIVE
from base.hf.model_config import ModelConfig, NativeConfig
from base.system.files import read_json
from config import ConfigError, DataError, HFConfigOverrides

FLOATS = ("F64", "F32", "F16", "BF16")  # in safetensors


def from_hf(hf: dict, source: str = "config.json", *, force_hf: bool = False) -> ModelConfig:
    """Reads the dict of a config.json written by transformers 4 or 5; `source` names the file in messages. force_hf:
    transformers' blocks for every family. ConfigError names a field that is missing, has the wrong type, or asks for
    what nobody computes here."""
    check_forms(hf, source)
    if hf.get("model_type") in NATIVE and not force_hf:
        return NativeConfig.read(hf, source)
    from base.hf.blocks_config import BlocksConfig  # a native model does without all other families

    return BlocksConfig.read(hf, source)


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files of this folder that the index names. They may be missing."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return [single]
    file_of_tensor = read_json(index)["weight_map"]
    names = {Path(name).name for name in file_of_tensor.values()}
    return [folder / name for name in sorted(names)]


def has_experts_together(folder: Path) -> bool:
    """Whether the folder's files have the experts of a layer in two tensors, under the names of transformers' model.
    transformers writes such a folder if asked not to write each expert by itself."""
    for path in weight_files(folder):
        with open_weights(path) as file:
            if any(name.endswith(".experts.gate_up_proj") for name in file.keys()):
                return True
    return False


def missing_weights(folder: Path) -> list[str]:
    """The names of the files with weights that are not there."""
    return [file.name for file in weight_files(folder) if not file.exists()]


def check_weights(
    folder: Path, expected: Iterable[tuple[str, Sequence[int]]], model: ModelConfig | None = None
) -> None:
    """ConfigError unless the folder's files are whole and hold the `expected` tensors, (name in the text model, shape),
    as floats, and no others. Rotary frequencies, a head of the embedding's shape and what `model` does not use, which
    some folders have, are ignored, as vLLM does; its vision part is not looked at. Reads headers only.
    """
    stored: dict[str, tuple[Path, list[int] | str]] = {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            for name in file.keys():
                header = file.get_slice(name)
                stored[name] = path, header.get_shape()
                if header.get_dtype() not in FLOATS:
                    stored[name] = path, header.get_dtype()
    shapes = dict(expected)
    for name, shape in shapes.items():
        if model is not None:
            name = model.stored_name(name)
        path, in_file = stored.pop(name, (folder, "missing"))
        if in_file != list(shape):
            raise ConfigError(f"{path}: {name} is {in_file}, but config.json says {list(shape)}")
    head = model.stored_name("lm_head.weight") if model else "lm_head.weight"
    for name, (path, in_file) in stored.items():
        is_head = name == head and in_file == list(shapes["model.embed_tokens.weight"])
        is_ignored = is_head or name.endswith("rotary_emb.inv_freq")
        if model is not None and (model.is_unused(name) or model.is_kept(name)):
            is_ignored = True
        if not is_ignored:
            raise ConfigError(f"{path}: {name} is not in the model that config.json describes")


def open_weights(path: Path, framework: str = "numpy") -> safe_open:
    """An open safetensors file. ConfigError if its header is malformed or does not give the size of the file."""
    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        fix = "fetch it again (other formats are not read: they can run code)"
        raise ConfigError(f"{path}: not a readable safetensors file ({error!s:.200}); {fix}") from error


def resolve_folder(name: str, key: str, weights: bool = True) -> Path:
    """The local folder that the value of config key `key` names: a Hugging Face folder, or a hub name `org/model`. What
    the hub has is fetched, of a model also the `weights`."""
    folder = Path(name)
    is_model = key.endswith("model_name")
    may_be_on_hub = name.count("/") == 1 and not name.startswith((".", "/"))
    if may_be_on_hub and not os.path.exists(folder):
        problem = f"{key}: '{name}' is not a local folder"
        instead = "without network, download it elsewhere and give the folder's path"
        patterns = ["*.json", "*.jinja"]
        if is_model and weights:
            patterns.append("*.safetensors")
        from base.system.hub import download

        folder = download(name, patterns, problem, instead)
    if not os.path.isdir(folder):
        fix = "give a Hugging Face folder or a hub name org/model"
        raise DataError(f"{key}: no folder '{name}' (tried {os.path.abspath(name)}): {fix}")
    config = folder / "config.json"
    is_adapter = (folder / "adapter_config.json").is_file() and not config.exists()
    if is_adapter:
        raise DataError(f"{key}: '{name}' is an adapter: merge it into its base (PEFT: merge_and_unload)")
    if is_model and not config.is_file():
        raise DataError(f"{key}: {config}: cannot be read (no such file): give a folder that has one")
    return folder


def read_model_config(
    folder: Path, overrides: HFConfigOverrides | None = None, *, force_hf: bool = False
) -> ModelConfig:
    """The folder's config.json, with `overrides`. ConfigError if the model is not supported. force_hf: as `from_hf`."""
    hf = read_json(folder / "config.json")
    if overrides and overrides.max_position_embeddings:
        text = hf.get("text_config")
        fields = text if isinstance(text, dict) else hf
        fields["max_position_embeddings"] = overrides.max_position_embeddings
    return from_hf(hf, str(folder / "config.json"), force_hf=force_hf)
