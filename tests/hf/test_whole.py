"""Folders with a vision part: their text model is read, and what is exported is the whole model again."""

import json

import pytest
import torch
from families import make_family
from hf_folders import make_pack
from safetensors.torch import load_file, save_file

from base.check.summary import notes
from base.hf import weights
from base.hf.adapters import adapter_config, save_adapter
from base.hf.families import WHOLE
from base.hf.folder import from_hf, read_model_config
from base.hf.lora_layers import adapted_layers
from base.hf.weights import save_hf, sharded_parameters
from config import Config, ConfigError, DTensorConfig, HFConfigOverrides, LoRAConfig, PolicyConfig
from model import load_policy

PIXELS = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
PATCHES = torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([[[x, y] for y in range(4) for x in range(4)]])
OF_IMAGE = torch.tensor([[0, 1, 1, 1, 1, 0, 0]])
QWEN3_5 = {"pixel_values": PATCHES, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": OF_IMAGE}
IMAGES = {
    "gemma3": {"pixel_values": PIXELS, "token_type_ids": OF_IMAGE},
    "gemma4": {"pixel_values": PATCHES[None, :, :48].sigmoid(), "image_position_ids": PLACES},
    "mistral3": {"pixel_values": PIXELS, "image_sizes": torch.tensor([[28, 28]])},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
}
KEPT = {"gemma3": 34, "gemma4": 16, "mistral3": 15, "qwen3_5": 21, "qwen3_5_moe": 21}


def raw(folder):
    """Name -> (dtype, shape, bytes) of each tensor of a folder."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.exists():
        file_of = json.loads(index.read_text())["weight_map"]
        files = sorted({folder / name for name in file_of.values()})
    tensors = {}
    for file in files:
        tensors |= load_file(file)
    if index.exists():
        assert tensors.keys() == file_of.keys()
    return {name: (x.dtype, x.shape, x.view(torch.uint8).flatten().tolist()) for name, x in tensors.items()}


@pytest.fixture(params=WHOLE)
def base(request, tmp_path):
    """(kind, folder). The tensors of the vision part are in 16 bits, and a NaN among them is nobody's business."""
    kind = request.param
    folder = tmp_path / "base"
    make_family(kind).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = [name for name in tensors if name.startswith(WHOLE[kind].kept)]
    assert len(kept) == KEPT[kind]
    for name in kept:
        tensors[name] = tensors[name].bfloat16()
    tensors[f"{WHOLE[kind].kept[0]}unused"] = torch.tensor([torch.nan, 1.0])
    if kind == "gemma4":  # published folders have keys that nothing reads
        tensors["model.language_model.layers.3.self_attn.k_proj.weight"] = torch.ones(2, 3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}\n')
    (folder / "processor_config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    return kind, folder


def whole_model(folder):
    from transformers import AutoModelForImageTextToText

    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.endswith("unused") for name in info["unexpected_keys"])
    return model.eval()


@torch.no_grad()
def answer(model, kind):
    """Logits after an image."""
    ids = torch.tensor([[5, 292, 292, 292, 292, 6, 7]])
    return model(input_ids=ids, use_cache=False, **IMAGES[kind]).logits


def test_the_export_is_the_folder_but_for_the_text(base, tmp_path, monkeypatch):
    """In one file of the text, and in several."""
    kind, folder = base
    model = load_policy(folder, device="cpu")
    before = raw(folder)
    save_hf(model, tmp_path / "untrained", folder, dtype=torch.float32, base_folder=folder)
    assert raw(tmp_path / "untrained") == before
    source, exported = whole_model(folder), whole_model(tmp_path / "untrained")
    assert type(exported) is type(source) and torch.equal(answer(exported, kind), answer(source, kind))

    with torch.no_grad():
        for param in sharded_parameters(model).values():
            param.add_(0.1)
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 50_000)
    save_hf(model, tmp_path / "trained", folder, dtype=torch.float32, base_folder=folder)
    after = raw(tmp_path / "trained")
    assert after.keys() == before.keys() and len(list((tmp_path / "trained").glob("model-text-*"))) > 2
    text = {model.config.stored_name(name) for name, _ in model.config.tensor_shapes()}
    assert {name for name in before if before[name] != after[name]} == text
    assert not torch.equal(answer(whole_model(tmp_path / "trained"), kind), answer(source, kind))
    pack = make_pack((9,), vocab=250)
    own = model(*pack)
    theirs = whole_model(tmp_path / "trained")(input_ids=pack[0][None], use_cache=False).logits[0]
    assert (own - theirs).abs().max() <= 1e-5 * own.abs().max()
    for name in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        assert (tmp_path / "trained" / name).read_bytes() == (folder / name).read_bytes()
    config, source_config = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "trained", folder))
    assert config == source_config | {"dtype": "float32"}
    again = load_policy(tmp_path / "trained", device="cpu")
    assert torch.equal(again(*pack), own)


def test_what_is_said_and_an_override(base):
    kind, folder = base
    model = read_model_config(folder, HFConfigOverrides(max_position_embeddings=64))
    assert sum(f"only the text model of this {kind} is trained" in note for note in notes(Config(), model, 1000)) == 1
    assert model.max_position_embeddings == model.config_json["text_config"]["max_position_embeddings"] == 64
    assert "max_position_embeddings" not in model.config_json


def test_a_text_config_that_says_only_what_differs_from_the_defaults():
    """That of Gemma 3 4B has neither vocabulary nor heads."""
    fields = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    fields |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = from_hf({"model_type": "gemma3", "text_config": fields, "vision_config": {}})
    from transformers import AutoConfig

    expected = AutoConfig.for_model("gemma3", text_config=fields).text_config
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(expected, name), name
    assert config.windows[:7] == [1024] * 5 + [None, 1024]


def test_a_head_that_is_called_tied_and_is_not(base):
    """transformers and vLLM would not tie it, whatever config.json says: Ministral 3 as transformers saves it again."""
    kind, folder = base
    head, embedding = WHOLE[kind].head + "weight", WHOLE[kind].body + "embed_tokens.weight"
    tensors = load_file(folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    save_file(tensors | {head: tensors[embedding].clone()}, folder / "model.safetensors", {"format": "pt"})
    assert load_policy(folder, device="cpu").lm_head is None
    save_file(tensors | {head: tensors[embedding] + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"{head} is not the embedding, .*: set tie_word_embeddings"):
        load_policy(folder, device="cpu")


def test_peft_finds_the_layers_of_the_text_and_no_others(base, tmp_path):
    """The vision part of Gemma 3 has layers of the same names."""
    from peft import PeftModel

    _, folder = base
    lora = LoRAConfig(enabled=True, dim=4)
    model = load_policy(folder, device="cpu", lora=lora)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("lora_B"):
                param.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    policy = PolicyConfig(model_name=str(folder), dtensor_cfg=DTensorConfig(lora_cfg=lora))
    save_adapter(model, tmp_path / "adapter", adapter_config(policy, model.config))
    adapted = PeftModel.from_pretrained(whole_model(folder), tmp_path / "adapter")
    with_adapters = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
    layers = adapted_layers(model.config, lora)
    assert with_adapters == {f"base_model.model.{model.config.module_name(x)}.lora_A.default.weight" for x in layers}
    pack = make_pack((9,), vocab=250)
    theirs = adapted(input_ids=pack[0][None], use_cache=False).logits[0]
    own = model(*pack)
    assert (own - theirs).abs().max() <= 1e-5 * own.abs().max()
