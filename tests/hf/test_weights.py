"""Weights of a folder: exported, they are what transformers loads; those that do not match are refused by name."""

import json

import pytest
import torch
from hf_folders import FAMILIES, LENGTHS, hf_from_pretrained, make_hf_folder, make_pack
from safetensors.torch import load_file, save_file

from base.hf import weights
from base.hf.folder import check_weights, read_model_config
from base.hf.weights import full_tensors, save_hf
from config import ConfigError
from model import load_policy


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {family: (root / family, make_hf_folder(root / family, **FAMILIES[family])) for family in FAMILIES}


@pytest.mark.slow("^(?!60000-qwen3)")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
@pytest.mark.parametrize("max_file_bytes", [5 * 10**9, 60_000])
@torch.no_grad()
def test_export_reloads_to_identical_logits(folders, family, max_file_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", max_file_bytes)
    source, hf_model = folders[family]
    (source / "tokenizer.json").write_text("{}")
    model, export, pack = load_policy(source, device="cpu"), tmp_path / "export", make_pack(LENGTHS)
    (tmp_path / "export.tmp").mkdir()  # what a killed run left
    for _ in range(2):  # the second replaces the first
        model.model.norm.weight += 0.1
        save_hf(model, export, source, dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]
    assert json.loads((export / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (export / "tokenizer.json").exists() and (export / "generation_config.json").exists()
    weight_files = list(export.glob("*.safetensors"))
    assert all(path.stat().st_size <= max_file_bytes + 10_000 for path in weight_files)
    assert (len(weight_files) > 4) == (max_file_bytes == 60_000) == (export / "model.safetensors.index.json").exists()

    expected_TV = model(*pack)
    assert torch.equal(load_policy(export, device="cpu")(*pack), expected_TV)
    reloaded = hf_from_pretrained(export, torch.float32)
    assert not any(torch.equal(reloaded.model.norm.weight, p) for p in [hf_model.model.norm.weight])
    for name, tensor in full_tensors(model, torch.float32):
        assert torch.equal(reloaded.state_dict()[name], tensor), name
    hf_TV = torch.cat([reloaded(token[None]).logits[0] for token in pack[0].split(LENGTHS)])
    assert (hf_TV - expected_TV).abs().max() <= 1e-4


def test_export_has_the_dtype_asked_for(folders, tmp_path):
    source = tmp_path / "source"
    hf_model = make_hf_folder(source, **FAMILIES["llama3"]).to(torch.bfloat16)
    hf_model.save_pretrained(source)
    hf = json.loads((source / "config.json").read_text())
    hf["torch_dtype"] = hf.pop("dtype")  # as transformers 4 wrote it
    (source / "config.json").write_text(json.dumps(hf))
    model = load_policy(source, device="cpu")
    assert all(param.dtype == torch.float32 for param in model.parameters())
    for dtype in (torch.bfloat16, torch.float32):
        save_hf(model, tmp_path / "export", source, dtype=dtype)
        stored, original = load_file(tmp_path / "export" / "model.safetensors"), hf_model.state_dict()
        assert all(torch.equal(stored[name], original[name].to(dtype)) for name in original)
        assert {tensor.dtype for tensor in stored.values()} == {dtype}
        written = json.loads((tmp_path / "export" / "config.json").read_text())
        assert written["dtype"] == str(dtype).removeprefix("torch.") and "torch_dtype" not in written


def edited_copy(source, folder, edit):
    """A copy of an HF folder after edit(tensors)."""
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_must_match_the_config(folders, tmp_path):
    source = folders["qwen3"][0]
    norm = "model.layers.1.self_attn.k_norm.weight"
    lacks = edited_copy(source, tmp_path / "lacks", lambda tensors: tensors.pop(norm))
    with pytest.raises(ConfigError, match=rf"lacks: {norm} is missing, but config.json says \[20\]"):
        load_policy(lacks, device="cpu")
    more = edited_copy(source, tmp_path / "more", lambda tensors: tensors.update({"extra.bias": torch.zeros(1)}))
    with pytest.raises(ConfigError, match=r"model.safetensors: extra.bias is not in the model"):
        load_policy(more, device="cpu")
    shape = edited_copy(source, tmp_path / "shape", lambda tensors: tensors.update({norm: torch.zeros(21)}))
    with pytest.raises(ConfigError, match=rf"model.safetensors: {norm} is \[21\], but config.json says \[20\]"):
        load_policy(shape, device="cpu")
    untied = edited_copy(source, tmp_path / "untied", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lm_head.weight is missing"):
        load_policy(untied, device="cpu")


def test_stored_copies_beside_the_weights_are_ignored(folders, tmp_path):
    embedding = load_file(folders["qwen2"][0] / "model.safetensors")["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    copy = edited_copy(folders["qwen2"][0], tmp_path / "copy", lambda tensors: tensors.update(extra))
    pack = make_pack(LENGTHS)
    expected_TV = load_policy(folders["qwen2"][0], device="cpu")(*pack)
    assert torch.equal(load_policy(copy, device="cpu")(*pack), expected_TV)


def test_r8_a_head_beside_a_tied_one_is_the_embedding(folders, tmp_path):
    """transformers#45136: what merged adapters leave would be dropped in silence."""
    source = folders["qwen2"][0]
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    last = embedding.clone()
    last[-1, -1] += 0.5
    for number, (name, head, said) in enumerate(
        (
            ("lm_head.weight", embedding * 2, "is not the embedding"),
            ("lm_head.weight", last, "is not the embedding"),
            ("lm_head.weight", embedding * torch.nan, "is not the embedding"),
            ("lm_head.weight", embedding[:9].clone(), "is not in the model"),
            ("lm_head.weight", torch.cat([embedding, embedding[:9]]), "is not in the model"),
            ("lm_head.weight", embedding.T.contiguous(), "is not in the model"),
            ("model.lm_head.weight", embedding * 2, "is not in the model"),
        )
    ):
        folder = edited_copy(source, tmp_path / str(number), lambda tensors, more={name: head}: tensors.update(more))
        with pytest.raises(ConfigError, match=f"{name} {said}"):
            load_policy(folder, device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_by_config_json_are_those_of_transformers(folders, family):
    folder, hf_model = folders[family]
    theirs = {name: tuple(tensor.shape) for name, tensor in hf_model.state_dict().items()}
    if hf_model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert dict(read_model_config(folder).tensor_shapes()) == theirs
    check_weights(folder, theirs.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_with_its_tensor_and_file(folders, tmp_path, value):
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors):
        tensors[name][3, 5] = value

    folder = edited_copy(folders["qwen3"][0], tmp_path / "model", spoil)
    with pytest.raises(ConfigError, match=rf"/model/model.safetensors: {name} holds NaN or infinity"):
        load_policy(folder, device="cpu")
