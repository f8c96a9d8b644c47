"""model.py against transformers, against itself one sequence at a time, and through its files and shards."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import model as model_module
from config import ConfigError
from examples.arithmetic.make_starter import init_weights
from hf.weights import full_tensors, load_weights, save_hf
from model import Decoder, ModelConfig, load_policy
from system.exits import exit_process

SIZES = dict(
    hidden_size=72,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=211,
    max_position_embeddings=128,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
FAMILIES = {
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6}),
    "qwen3": dict(model_type="qwen3", head_dim=20, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 5e5}),
    "qwen3_tied_bias": dict(model_type="qwen3", head_dim=20, tie_word_embeddings=True, attention_bias=True),
    "llama3": dict(model_type="llama", rope_parameters={"rope_theta": 1e4, **LLAMA3}),
    "llama_bias": dict(model_type="llama", attention_bias=True),
}
LENGTHS = [5, 9, 9, 9, 1, 1, 40, 3]


def hf_from_pretrained(folder, dtype):
    from transformers import AutoModelForCausalLM  # not at the top: spawned ranks do without its seconds

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def make_hf_folder(folder, **fields):
    """A transformers model in which no norm or bias is at its initial value, and its saved folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**SIZES, **fields})
    torch.manual_seed(0)
    hf_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in hf_model.named_parameters():
            if name.endswith("norm.weight"):
                param.uniform_(0.5, 1.5)
            else:
                param.normal_(0, 0.2)
    hf_model.save_pretrained(folder)
    return hf_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {family: (root / family, make_hf_folder(root / family, **FAMILIES[family])) for family in FAMILIES}


def make_pack(lengths, vocab=211, seed=0):
    generator = torch.Generator().manual_seed(seed)
    token_T = torch.randint(vocab, (sum(lengths),), generator=generator)
    position_T = torch.cat([torch.arange(length) for length in lengths])
    return token_T, position_T, np.cumsum([0, *lengths], dtype=np.int32)


def response_rows(lengths, token_T):
    """Every row but each sequence's last, and the token after it."""
    last = set((np.cumsum(lengths) - 1).tolist())
    pos_R = torch.tensor([row for row in range(len(token_T)) if row not in last])
    return pos_R, token_T[pos_R + 1]


def grads(model):
    out = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    return out


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(folders, family):
    folder, hf_model = folders[family]
    model = load_policy(folder, device="cpu")
    assert set(model.state_dict()) == {name for name, _ in hf_model.named_parameters()}
    token_T, position_T, cu_seqlens = make_pack([97])
    position_T = 2 * position_T  # with gaps: attention sees differences of positions only
    attend_T = torch.ones_like(token_T)  # else transformers takes a gap for the start of a new sequence
    expected_TV = hf_model(token_T[None], attend_T[None], position_ids=position_T[None]).logits[0]
    assert expected_TV.std() > 0.5  # logits that would hide an error are none
    gap = (model(token_T, position_T, cu_seqlens) - expected_TV).abs().max().item()
    print(f"{family}: max |delta logit| {gap:.1e} at std {expected_TV.std():.2f}")
    assert gap <= 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_packed_equals_one_by_one(folders, family):
    model = load_policy(folders[family][0], device="cpu")
    token_T, position_T, cu_seqlens = make_pack(LENGTHS)
    packed_TV = model(token_T, position_T, cu_seqlens)
    weight_TV = torch.randn(packed_TV.shape, generator=torch.Generator().manual_seed(1))
    (packed_TV * weight_TV).sum().backward()
    packed_grads = grads(model)
    for start, end in pairwise(cu_seqlens):
        rows = slice(start, end)
        single_TV = model(token_T[rows], position_T[rows], np.array([0, end - start]))
        assert (single_TV - packed_TV[rows]).abs().max() <= 1e-5
        (single_TV * weight_TV[rows]).sum().backward()
    for name, grad in grads(model).items():
        assert (grad - packed_grads[name]).norm() <= 1e-5 * grad.norm(), name


def test_logp_and_entropy_are_those_of_the_logits(folders):
    model = load_policy(folders["qwen2"][0], device="cpu")
    token_T, position_T, cu_seqlens = make_pack(LENGTHS, vocab=200)
    pos_R, target_R = response_rows(LENGTHS, token_T)
    logp_R, entropy_R = model(token_T, position_T, cu_seqlens, pos_R, target_R, temperature=0.7, vocab_size=200)
    logits_TV = model(token_T, position_T, torch.from_numpy(cu_seqlens)).detach().double()
    for i, (row, target) in enumerate(zip(pos_R.tolist(), target_R.tolist(), strict=True)):
        scaled = [value / 0.7 for value in logits_TV[row, :200].tolist()]
        largest = max(scaled)
        log_sum = largest + math.log(sum(math.exp(value - largest) for value in scaled))
        assert abs(logp_R[i].item() - (scaled[target] - log_sum)) <= 2e-5
        entropy = -sum(math.exp(value - log_sum) * (value - log_sum) for value in scaled)
        assert abs(entropy_R[i].item() - entropy) <= 2e-5


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # tied, untied
def test_no_response_rows_gives_zero_gradients_everywhere(folders, family):
    model = load_policy(folders[family][0], device="cpu")
    none = torch.zeros(0, dtype=torch.int64)
    logp_R, entropy_R = model(*make_pack([1]), none, none, vocab_size=200)
    assert logp_R.shape == entropy_R.shape == (0,)
    logp_R.sum().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


@pytest.mark.parametrize("cu_seqlens", [[0, 4], [0, 3, 3, 6], [1, 6]])
def test_cu_seqlens_must_cover_the_pack(folders, cu_seqlens):
    token_T, position_T, _ = make_pack([6])
    with pytest.raises(AssertionError):
        load_policy(folders["qwen2"][0], device="cpu")(token_T, position_T, np.array(cu_seqlens))


def test_init_weights_depend_on_the_seed_alone():
    def fresh(seed):
        with torch.device("meta"):
            model = Decoder(ModelConfig.from_hf({**QWEN2, "attention_bias": True}))
        init_weights(model.to_empty(device="cpu"), seed)
        return model.state_dict()

    first = fresh(1)
    torch.manual_seed(7)
    again, other = fresh(1), fresh(2)
    embedding = first["model.embed_tokens.weight"]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(embedding, other["model.embed_tokens.weight"])
    assert abs(embedding.std().item() - 0.02) < 5e-4
    assert (first["model.norm.weight"] == 1).all() and not first["model.layers.0.self_attn.q_proj.bias"].any()


# --- files ---


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
@pytest.mark.parametrize("max_file_bytes", [5 * 10**9, 60_000])
@torch.no_grad()
def test_export_reloads_to_identical_logits(folders, family, max_file_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "MAX_FILE_BYTES", max_file_bytes)
    source, hf_model = folders[family]
    (source / "tokenizer.json").write_text("{}")
    model, export, pack = load_policy(source, device="cpu"), tmp_path / "export", make_pack(LENGTHS)
    (tmp_path / "export.tmp").mkdir()  # what a killed run left
    for _ in range(2):  # the second replaces the first
        model.model["norm"].weight += 0.1
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
    with pytest.raises(ConfigError, match=rf"lacks: weights .* config.json; missing: {norm}"):
        load_policy(lacks, device="cpu")
    more = edited_copy(source, tmp_path / "more", lambda tensors: tensors.update({"extra.bias": torch.zeros(1)}))
    with pytest.raises(ConfigError, match=r"unexpected: extra.bias \(model.safetensors\)"):
        load_policy(more, device="cpu")
    shape = edited_copy(source, tmp_path / "shape", lambda tensors: tensors.update({norm: torch.zeros(21)}))
    with pytest.raises(ConfigError, match=rf"model.safetensors: {norm}: shape \[21\], but \[20\] by config.json"):
        load_policy(shape, device="cpu")
    untied = edited_copy(source, tmp_path / "untied", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"missing: lm_head.weight"):
        load_policy(untied, device="cpu")


def test_stored_copies_beside_the_weights_are_ignored(folders, tmp_path):
    extra = {"lm_head.weight": torch.ones(211, 72), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    copy = edited_copy(folders["qwen2"][0], tmp_path / "copy", lambda tensors: tensors.update(extra))
    pack = make_pack(LENGTHS)
    expected_TV = load_policy(folders["qwen2"][0], device="cpu")(*pack)
    assert torch.equal(load_policy(copy, device="cpu")(*pack), expected_TV)


def test_unreadable_folders_raise_config_error(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing/config.json: not readable"):
        load_policy(tmp_path / "nothing", device="cpu")
    folder = edited_copy(folders["qwen2"][0], tmp_path / "folder", lambda tensors: None)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors: not a readable safetensors file"):
        load_policy(folder, device="cpu")
    weights.unlink()
    with pytest.raises(ConfigError, match=r"no model.safetensors nor model.safetensors.index.json"):
        load_policy(folder, device="cpu")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"gone.safetensors: not a readable safetensors file"):
        load_policy(folder, device="cpu")
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index.json: no 'weight_map'"):
        load_policy(folder, device="cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"folder/config.json: not readable"):
        load_policy(folder, device="cpu")


# --- config.json ---

QWEN2 = dict(model_type="qwen2", **SIZES, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e6)


UNSUPPORTED = [
    (dict(model_type="mistral"), "model_type='mistral' is not supported; supported: 'llama', 'qwen2', 'qwen3'"),
    (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported; supported: 'silu'"),
    (dict(use_sliding_window=True), "use_sliding_window=True is not supported; supported: absent, False"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types other than 'full_attention' are not"),
    (dict(mlp_bias=True), "mlp_bias=True is not supported; supported: absent, False"),
    (dict(quantization_config={"bits": 4}), "quantization_config={'bits': 4} is not supported; supported: absent"),
    (dict(attention_multiplier=0.5), "attention_multiplier=0.5 is not supported"),
    (dict(attention_dropout=0.1), "attention_dropout=0.1 is not supported"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
    (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5 is not supported"),
    (dict(rope_scaling={"rope_type": "yarn"}), "rope_type='yarn' is not supported; supported: 'default', 'llama3'"),
    (dict(rope_scaling={"type": "linear", "factor": 4.0}), "rope_type='linear' is not supported"),
    (dict(rope_parameters={"rope_type": "dynamic"}), "rope_type='dynamic' is not supported"),
    (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}), ": high_freq_factor, orig"),
    (dict(rms_norm_eps=None, hidden_size=None), ": hidden_size, rms_norm_eps missing"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED)
def test_unsupported_configs_name_the_field(change, message):
    ModelConfig.from_hf(QWEN2)
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf({**QWEN2, **change}, "folder/config.json")
    assert str(error.value).startswith("folder/config.json: ") and message in str(error.value)


def test_both_forms_of_config_json_mean_the_same():
    old = {**QWEN2, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = {**QWEN2, "model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    del new["rope_theta"]
    config = ModelConfig.from_hf(old)
    assert config == ModelConfig.from_hf(new)
    assert (config.rope_theta, config.rope_scaling.factor, config.head_dim) == (5e5, 8.0, 12)
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.tie_word_embeddings) == (False,) * 4
    assert ModelConfig.from_hf({**old, "head_dim": 20}).head_dim == 20
    assert ModelConfig.from_hf({**QWEN2, "rope_scaling": {"type": "default"}}) == ModelConfig.from_hf(QWEN2)


# --- shards ---


def join(rank, world_size, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
    return init_device_mesh("cpu", (world_size,))


def logp_loss(model, pack, pos_R, target_R, **kwargs):
    logp_R, _ = model(*pack, pos_R, target_R, **kwargs)
    return -logp_R.sum()


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_one_rank_equals_the_plain_model(folders, family, activation_checkpointing, one_rank, monkeypatch):
    folder, pack = folders[family][0], make_pack(LENGTHS, vocab=200)
    plain, rows = load_policy(folder, device="cpu"), response_rows(LENGTHS, pack[0])
    expected_TV = plain(*pack)
    logp_loss(plain, pack, *rows, vocab_size=200).backward()
    plain_grads = grads(plain)
    model = load_policy(folder, device="cpu", mesh=one_rank[2], activation_checkpointing=activation_checkpointing)
    assert [name for name, _ in model.named_parameters()] == list(plain_grads)
    with torch.no_grad():
        assert torch.equal(model(*pack), expected_TV)
    calls, attention = [], model_module.packed_attention
    monkeypatch.setattr(model_module, "packed_attention", lambda *args: calls.append(1) or attention(*args))
    logp_loss(model, pack, *rows, vocab_size=200).backward()
    assert len(calls) == SIZES["num_hidden_layers"] * (2 if activation_checkpointing else 1)
    for name, param in model.named_parameters():
        grad = param.grad.full_tensor()
        assert (grad - plain_grads[name]).norm() <= 1e-6 * grad.norm(), name


def test_bfloat16_compute_keeps_float32_masters(folders, one_rank):
    folder, hf_model = folders["llama3"]
    pack = make_pack([50])
    model = load_policy(folder, device="cpu", mesh=one_rank[2], precision="bfloat16")
    logits_TV = model(*pack)
    for name, tensor in full_tensors(model, torch.float32):  # not the bfloat16 copies the root has gathered
        assert torch.equal(tensor, hf_model.state_dict()[name]), name
    half = hf_from_pretrained(folder, torch.bfloat16)
    exact_TV, half_TV = (m(pack[0][None]).logits[0].float() for m in (hf_model, half))
    assert logits_TV.dtype == torch.bfloat16
    # as close to float32 as transformers is in the same precision
    assert (logits_TV.float() - exact_TV).norm() <= 1.2 * (half_TV - exact_TV).norm()
    logp_loss(model, pack, *response_rows([50], pack[0])).backward()
    assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(torch.float32, torch.float32)}


def two_ranks(rank, world_size, folder, work):
    """Runs in each process; its asserts fail the spawn."""
    torch.set_num_threads(1)
    mesh = join(rank, world_size, work / "store")
    plain, model = load_policy(folder, device="cpu"), load_policy(folder, device="cpu", mesh=mesh)
    rows = {name: len(param.to_local()) for name, param in model.named_parameters()}
    assert rows["model.embed_tokens.weight"] == [106, 105][rank]
    assert rows["model.layers.0.mlp.up_proj.weight"] == [1, 0][rank]
    pack, stored = make_pack([4 + rank, 7]), load_file(folder / "model.safetensors")

    # Each parameter's rows are where they belong, also right after a forward that left the root gathered.
    logits_TV = model(*pack)
    for name, tensor in full_tensors(model, torch.float32):
        assert torch.equal(tensor, stored.pop(name)), name
    assert not stored
    assert torch.equal(logits_TV, plain(*pack))

    # An optimizer's update and a load: no forward may see what the one before had gathered.
    held = list(model.parameters())
    with torch.no_grad():
        model(*pack)
        for param in (*held, *plain.parameters()):
            param.mul_(1.5)
        assert torch.equal(model(*pack), plain(*pack))
        load_weights(model, folder)
        assert all(param is sharded for param, sharded in zip(held, model.parameters(), strict=True))
        assert torch.equal(model(*pack), logits_TV)

        save_hf(model, work / "export", folder, dtype=torch.float32)
        export = load_policy(work / "export", device="cpu")
        assert torch.equal(export(*pack), logits_TV)

    # A rank without response rows takes part in the backward; gradients are sums over the ranks.
    pos_R, target_R = response_rows([4, 7], make_pack([4, 7])[0])
    used = slice(0) if rank == 1 else slice(None)
    logp_loss(model, make_pack([4, 7]), pos_R[used], target_R[used]).backward()
    plain = load_policy(folder, device="cpu")
    logp_loss(plain, make_pack([4, 7]), pos_R, target_R).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = param.grad.full_tensor()
        assert (grad - expected.grad).norm() <= 1e-5 * grad.norm(), name

    # bfloat16 gradients of two ranks are added in float32: the sums do not fit into bfloat16 again.
    model = load_policy(folder, device="cpu", mesh=mesh, precision="bfloat16")
    logp_loss(model, make_pack([4, 7], seed=rank), pos_R, target_R).backward()
    grad = model.lm_head.weight.grad.to_local()
    assert grad.dtype == torch.float32 and not torch.equal(grad, grad.bfloat16().float())
    exit_process(0)


def test_two_ranks_with_uneven_and_empty_shards(tmp_path):
    make_hf_folder(tmp_path / "tiny", **FAMILIES["qwen3"], intermediate_size=1)
    mp.spawn(two_ranks, args=(2, tmp_path / "tiny", tmp_path), nprocs=2)
