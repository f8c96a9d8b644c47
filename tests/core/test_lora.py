"""LoRA against autograd in float64 through base + scale * B A, against the base, and against what the sync sends."""

import math

import pytest
import torch
from hf_folders import FAMILIES, LENGTHS, make_hf_folder, make_pack, response_rows
from torch.func import functional_call

import lora as lora_module
from base.hf.adapters import init_adapters
from base.hf.folder import from_hf
from base.hf.weights import full_shapes, full_tensors, merged_weight
from config import LoRAConfig
from head import HeadOptions, response_logps
from lora import LoRALinear, MergedLinear, add_adapters
from model import Decoder, load_policy
from reference import Reference

LORA = LoRAConfig(enabled=True, dim=4, alpha=12.0)
SCALE = 3.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> (folder, transformers' model)."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("qwen2", "qwen3", "llama_bias")}
    return {name: (path, make_hf_folder(path, **FAMILIES[name])) for name, path in paths.items()}


def load(folder, one_rank, precision="float32", cfg=LORA, *, moved=True, **options):
    """The model with adapters; moved: as training would leave them, with B no longer 0."""
    options |= {"precision": precision, "lora": cfg, "seed": 3}
    model = load_policy(folder, device="cpu", mesh=one_rank[2], **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if moved and name.endswith("lora_B"):
                param.to_local().normal_(0, 0.05, generator=generator)
    return model


def backward(model, pack=None):
    """Gradients of what is trained, whole, of the sum of the log-probabilities of LENGTHS."""
    pack = pack or make_pack(LENGTHS, vocab=200)
    pos_R, target_R = response_rows(LENGTHS, pack[0])
    logp_R, _ = response_logps(model, (*pack, pos_R), target_R, HeadOptions(vocab=200))
    logp_R.sum().backward()
    return {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.slow("qwen3|False")
@pytest.mark.parametrize("recompute", [False, "offload"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama_bias"])
def test_gradients_are_those_of_the_merged_formula_in_float64(family, recompute, folders, one_rank):
    folder, hf_model = folders[family]
    model = load(folder, one_rank, recompute=recompute)
    found = backward(model)
    assert len(found) == 2 * 7 * 2 and all(
        param.grad is None for param in model.parameters() if not param.requires_grad
    )
    exact = {name: param.full_tensor().detach().double() for name, param in model.named_parameters()}
    leaves = {name: exact[name].requires_grad_() for name in found}
    weights = {name: param.detach().double() for name, param in hf_model.named_parameters()}
    for name in leaves:
        layer, _, factor = name.rpartition(".")
        if factor == "lora_A":
            weights[f"{layer}.weight"] = exact[f"{layer}.weight"] + SCALE * leaves[f"{layer}.lora_B"] @ leaves[name]
    token_T, *_ = make_pack(LENGTHS, vocab=200)
    total = 0.0
    for ids in token_T.split(LENGTHS):
        logits_TV = functional_call(hf_model.double(), weights, (ids[None],)).logits[0, :-1, :200]
        total += logits_TV.log_softmax(-1).gather(1, ids[1:, None]).sum()
    total.backward()
    hf_model.float()
    errors = {name: (found[name] - leaf.grad).norm() / leaf.grad.norm() for name, leaf in leaves.items()}
    assert max(errors.values()) <= 1e-5, errors


def test_the_rounding_has_no_gradient_of_its_own():
    """In bfloat16, where it swallows most of a small change: the gradient is that of a sum that is not rounded."""
    generator = torch.Generator().manual_seed(0)
    x_TI, weight_OI, a_LI, b_OL, grad_TO = (
        (torch.randn(shape, generator=generator) * size).bfloat16()
        for shape, size in (((50, 32), 1), ((48, 32), 0.1), ((4, 32), 0.1), ((48, 4), 2e-4), ((50, 48), 1))
    )
    leaves = [x.clone().requires_grad_() for x in (x_TI, a_LI, b_OL)]
    y_TO = MergedLinear.apply(leaves[0], weight_OI, None, *leaves[1:], SCALE)
    y_TO.backward(grad_TO)
    exact = [x.double().requires_grad_() for x in (x_TI, a_LI, b_OL)]
    sum_OI = weight_OI.double() + SCALE * exact[2] @ exact[1]
    rounded_OI = sum_OI.float().bfloat16()
    assert (rounded_OI == weight_OI).double().mean() > 0.6 and not torch.equal(rounded_OI, weight_OI)
    assert torch.equal(y_TO, x_TI @ rounded_OI.T)
    (exact[0] @ (sum_OI + (rounded_OI.double() - sum_OI).detach()).T).backward(grad_TO.double())
    for leaf, other in zip(leaves, exact, strict=True):
        assert (leaf.grad - other.grad).norm() <= 5e-3 * other.grad.norm()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_new_adapters_leave_every_logit_as_it_is(precision, folders, one_rank):
    folder, pack = folders["llama_bias"][0], make_pack(LENGTHS, vocab=200)
    base = load_policy(folder, device="cpu", mesh=one_rank[2], precision=precision)
    model = load(folder, one_rank, precision, moved=False)
    with torch.no_grad():
        assert torch.equal(model(*pack), base(*pack))
    assert {param.dtype for param in model.parameters() if not param.requires_grad} == {getattr(torch, precision)}
    assert {param.dtype for param in model.parameters() if param.requires_grad} == {torch.float32}
    base_tensors, tensors = (dict(full_tensors(m, torch.bfloat16)) for m in (base, model))
    assert list(tensors) == list(base_tensors)
    assert all(torch.equal(tensor, base_tensors[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_sync_sends_what_the_forward_multiplies_by(precision, dtype, folders, one_rank, monkeypatch):
    model, used = load(folders["qwen3"][0], one_rank, precision), []
    monkeypatch.setattr(lora_module, "merged_weight", lambda *args: used.append(merged_weight(*args)) or used[-1])
    with torch.no_grad():
        model(*make_pack([20]))
    layers = [name for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    in_order = sorted(layers, key=lambda name: "o_proj" in name or "mlp" in name)  # k, v, q come as they are called
    assert len(used) == len(in_order) == 14 and {weight.dtype for weight in used} == {getattr(torch, precision)}
    sent = dict(full_tensors(model, dtype))
    assert [(name, tuple(tensor.shape)) for name, tensor in sent.items()] == full_shapes(model)
    assert not [name for name in sent if "lora" in name] and {tensor.dtype for tensor in sent.values()} == {dtype}
    base = dict(full_tensors(load_policy(folders["qwen3"][0], device="cpu", mesh=one_rank[2]), dtype))
    assert all(not torch.equal(sent[f"{name}.weight"], base[f"{name}.weight"]) for name in layers)
    for weight in used:
        assert any(torch.equal(sent[f"{name}.weight"], weight.to(dtype)) for name in layers)


@pytest.mark.slow("bfloat16")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_move_the_adapters_alone(precision, folders, one_rank):
    model = load(folders["qwen2"][0], one_rank, precision, moved=False)
    before = {name: param.full_tensor().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(5):
        gradients = backward(model)
        assert {grad.dtype for grad in gradients.values()} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    moved = {n for n, param in model.named_parameters() if not torch.equal(param.full_tensor(), before[n])}
    assert moved == set(gradients)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    assert len(optimizer.state) == len(moved) and {value.dtype for value in state} == {torch.float32}


def test_the_reference_is_the_base_without_a_copy_of_it(folders, one_rank):
    folder, pack = folders["qwen3"][0], make_pack(LENGTHS, vocab=200)
    model = load(folder, one_rank, "bfloat16", moved=False)
    reference = Reference(model, torch.bfloat16)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.to_local().add_(0.05)
        moved_TV = model(*pack)
        with reference.in_place_of(model):
            base_TV = load_policy(folder, device="cpu", mesh=one_rank[2], precision="bfloat16")(*pack)
            assert torch.equal(model(*pack), base_TV)
        assert torch.equal(model(*pack), moved_TV) and not torch.equal(moved_TV, base_TV)
    size = sum(rows.nbytes for rows in reference.shards.values())
    assert size == 2 * sum(param.numel() for param in model.parameters() if param.requires_grad)


@pytest.mark.parametrize("init", ["xavier", "uniform"])
def test_how_adapters_start(init):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = from_hf({"model_type": "qwen2", "hidden_act": "silu", "vocab_size": 9, "rms_norm_eps": 1e-6} | shape)
    drawn = []
    for seed in (1, 1, 2):
        model = Decoder(config)
        add_adapters(model, LoRAConfig(enabled=True, dim=16, lora_A_init=init), torch.bfloat16)
        init_adapters(model, init, seed)
        drawn.append({name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)})
    for name, layer in drawn[0].items():
        a_LI, inputs = layer.lora_A.detach(), layer.in_features
        assert torch.equal(a_LI, drawn[1][name].lora_A) and not torch.equal(a_LI, drawn[2][name].lora_A)
        assert layer.lora_B.shape == (layer.out_features, 16) and layer.lora_B.abs().max() == 0 and layer.scale == 2
        std = math.sqrt(2 / (inputs + 16)) if init == "xavier" else 1 / math.sqrt(3 * inputs)
        assert a_LI.std() == pytest.approx(std, rel=0.06) and a_LI.mean().abs() < std / 10
        assert init == "xavier" or std < a_LI.abs().max() <= 1 / math.sqrt(inputs)
    first, second = (drawn[0][f"model.layers.{i}.mlp.up_proj"].lora_A for i in range(2))
    assert not torch.equal(first, second)
