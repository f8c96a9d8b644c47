"""transformers' blocks in the body of model.Decoder, against transformers' own forward of each sequence alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import hf_config, make_family
from ranks import ranks
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from attention import PackLayout
from base.hf.families import FAMILIES, WHOLE
from base.hf.family import NATIVE
from base.hf.folder import check_weights, from_hf, has_experts_together, read_model_config
from base.hf.layers import VECTORS, DeltaNet
from base.hf.lora_layers import adapted_layers, factor_shapes
from base.hf.weights import checkpoint_views, full_tensors, save_hf
from base.system.ranks import start_process_group
from config import ConfigError, LoRAConfig
from head import HeadOptions, response_logps
from model import Decoder, load_policy
from router_replay import RouterReplay

CPU = torch.device("cpu")
# Windows and a tied head; norms after the layers; scaled logits; experts.
ALWAYS = ("gemma3_text", "olmo2", "granite", "qwen3_moe")
ON_TWO_RANKS = ("gemma3_text", "qwen3_moe")  # four processor seconds each: both import transformers
TABLE = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in FAMILIES]


def draw(num_tokens, seed):
    return torch.randint(3, 290, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def segments():
    """(tokens, prefix) of a prompt with three replies, one of a token, a sequence alone, another prompt, shorter than a
    convolution, with one reply, and more; the last is longer than a chunk of a delta net."""
    lengths = (11, 7, 13, 1, 9, 2, 12, 1, 70)
    prefixes = (-1, 0, 0, 0, -1, -1, 5, -1, -1)
    return [draw(length, seed) for seed, length in enumerate(lengths)], np.array(prefixes)


def packed(tokens_S, prefix_S):
    """Arguments of a decoder's forward."""
    positions = []
    for tokens, prefix in zip(tokens_S, prefix_S, strict=True):
        start = len(tokens_S[prefix]) if prefix >= 0 else 0
        positions.append(torch.arange(len(tokens)) + start)
    bounds = np.cumsum([0, *map(len, tokens_S)])
    return torch.cat(tokens_S), torch.cat(positions), PackLayout.of(bounds, prefix_S, int(bounds[-1]), CPU)


def drawn_experts(model, num_tokens, seed=0):
    """[T, L, A] of any experts, int16, each once for a token."""
    routers = model.model.routers
    scores = torch.rand((num_tokens, len(routers), routers[0].num_experts if hasattr(routers[0], "num_experts") else 8))
    scores.uniform_(generator=torch.Generator().manual_seed(seed))
    return scores.argsort(dim=2)[:, :, : model.config.experts_per_token].short()


def with_experts(inputs, experts_TLA):
    *others, layout = inputs
    return *others, replace(layout, experts_TLA=experts_TLA.numpy())


def weighted_sums(logits_S, expected_S, bound):
    """Of both the sum with the same random weights, to be differentiated. The logits of each segment are near, and are
    the last of the expected ones."""
    total = expected_total = 0
    for segment, (logits, expected) in enumerate(zip(logits_S, expected_S, strict=True)):
        expected = expected[-len(logits) :]
        assert expected.std() > 0.1  # logits that would hide an error are none
        assert (logits - expected).abs().max() <= bound, segment
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(segment))
        total = total + (logits * weight).sum()
        expected_total = expected_total + (expected * weight).sum()
    return total, expected_total


def gradients(model):
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def folder_of(hf_model, folder, **fields):
    hf_model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("family", [*TABLE, *WHOLE])
def test_packs_shared_prompts_and_gradients_equal_transformers(family, tmp_path):
    hf_model = make_family(family)
    # Whatever config.json says of the dtype, the master weights are float32.
    config = read_model_config(folder_of(hf_model, tmp_path, dtype="bfloat16"), force_hf=True)
    model = load_policy(tmp_path, device="cpu", model_config=config, freeze_moe_router=False)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    state = hf_model.state_dict()
    is_read = {name: param.equal(state[config.module_name(name)]) for name, param in model.named_parameters()}
    assert all(is_read.values()), is_read
    tokens_S, prefix_S = segments()
    bound = 1e-4 if isinstance(config.family.state, DeltaNet) else 1e-5  # unit keys amplify rounding
    logits_S = model(*packed(tokens_S, prefix_S)).split([len(tokens) for tokens in tokens_S])
    expected_S = []
    for tokens, prefix in zip(tokens_S, prefix_S, strict=True):
        whole = torch.cat([tokens_S[prefix], tokens]) if prefix >= 0 else tokens
        expected_S.append(hf_model(whole[None], use_cache=False).logits[0])
    total, expected_total = weighted_sums(logits_S, expected_S, bound)
    total.backward()
    expected_total.backward()
    expected_gradients = gradients(hf_model)
    found = {config.module_name(name): gradient for name, gradient in gradients(model).items()}
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        error = (gradient - expected_gradients[name]).abs().max() / expected_gradients[name].abs().max()
        assert error <= 1e-4, name


@pytest.mark.parametrize("family", TABLE)
def test_no_sequence_sees_another(family):
    model = Decoder(from_hf(hf_config(family).to_dict(), force_hf=True))
    model.model.init_buffers(CPU)
    tokens_S, prefix_S = segments()
    lengths = [len(tokens) for tokens in tokens_S]
    with torch.no_grad():
        before = model(*packed(tokens_S, prefix_S)).split(lengths)
        tokens_S[4] = tokens_S[4].clone()
        tokens_S[4][0] += 1
        after = model(*packed(tokens_S, prefix_S)).split(lengths)
    pairs = zip(before, after, strict=True)
    moved = [segment for segment, (old, new) in enumerate(pairs) if (old - new).abs().max() > 1e-5]  # not by rounding
    assert moved == [4]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shapes_of_weights_are_those_of_transformers(family):
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = hf_config(family)
    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.empty(tensor.shape) for name, tensor in hf_model.state_dict().items()}
    expected = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(hf_model, tensors).items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    fields = config.to_diff_dict() | {"architectures": [type(hf_model).__name__]}
    model = from_hf(fields, force_hf=True)
    assert {model.stored_name(name): shape for name, shape in model.tensor_shapes()} == expected


WITH_WINDOWS = [name for name, row in FAMILIES.items() if row.windows]


@pytest.mark.parametrize("layer_types", ["as in tests/helpers", None])
@pytest.mark.parametrize("family", WITH_WINDOWS)
def test_windows_are_those_that_transformers_asks_for(family, layer_types, monkeypatch):
    """Without layer_types, over seven layers, transformers has a rule for each family."""
    seen = []

    def attend(query_TNH, *_, window, **__):
        seen.append(window)
        return query_TNH.flatten(1)

    monkeypatch.setattr("blocks.packed_attention", attend)
    fields = {"sliding_window": 6, "use_sliding_window": True}
    if layer_types is None:
        fields |= {"layer_types": None, "no_rope_layers": 7 * [0], "num_hidden_layers": 7}
    config = hf_config(family, **fields)
    given = config.to_dict() | fields
    model = Decoder(from_hf(config.to_dict(), force_hf=True))
    model.model.init_buffers(CPU)
    with torch.no_grad():
        model(*packed([draw(9, 0)], np.array([-1])))
    assert seen == from_hf(given, force_hf=True).windows and 6 in seen


# ------------------------------------------------------------------------------------------- beside the native decoder


def logps_and_gradients(folder, config, mesh, precision, *, tells_experts=False, **options):
    options |= {"mesh": mesh, "precision": precision, "freeze_moe_router": False}
    model = load_policy(folder, device="cpu", model_config=config, **options)
    tokens_S, prefix_S = segments()
    inputs = packed(tokens_S, prefix_S)
    if tells_experts and config.num_experts:
        model.model.replay = RouterReplay(model.model.routers, config.num_experts, chooses=False)
        inputs = with_experts(inputs, drawn_experts(model, len(inputs[0])))
    pos_R = torch.arange(11, len(inputs[0]) - 1)
    logp_R, entropy_R = response_logps(model, (*inputs, pos_R), inputs[0][pos_R + 1], HeadOptions(0.8))
    (logp_R.sum() + 0.1 * entropy_R.sum()).backward()
    return logp_R, entropy_R, whole_gradients(model)


def whole_gradients(model):
    """Of a sharded model."""
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", NATIVE)
def test_forced_blocks_are_the_native_decoder(family, precision, tmp_path, one_rank):
    """To the bit: in bfloat16, too, since rounding is at the same places."""
    make_family(family).save_pretrained(tmp_path)
    native = logps_and_gradients(tmp_path, read_model_config(tmp_path), one_rank[2], precision)
    forced = logps_and_gradients(tmp_path, read_model_config(tmp_path, force_hf=True), one_rank[2], precision)
    assert torch.equal(native[0], forced[0]) and torch.equal(native[1], forced[1])
    assert native[2].keys() == forced[2].keys()
    assert [name for name, gradient in forced[2].items() if not torch.equal(gradient, native[2][name])] == []


def few_in_one(gradients):
    """Flat; the vectors of all recurrences, of four numbers each, are one."""
    flat = {name: gradient.flatten() for name, gradient in gradients.items()}
    few = [name for name in flat if name.endswith(VECTORS)]
    if few:
        flat["vectors"] = torch.cat([flat.pop(name) for name in few])
    return flat


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TABLE)
def test_recompute_changes_nothing_and_bfloat16_is_near(family, precision, tmp_path, one_rank):
    """Of mixtures bfloat16 is told the experts that float32 has: rounding would send some tokens to others."""
    make_family(family).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, force_hf=True)
    case = (tmp_path, config, one_rank[2])
    recompute = {"float32": "offload", "bfloat16": True}[precision]
    kept = logps_and_gradients(*case, precision)
    again = logps_and_gradients(*case, precision, recompute=recompute)
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(gradient, again[2][name]) for name, gradient in kept[2].items())
    exact = logps_and_gradients(*case, "float32", tells_experts=True)
    near = logps_and_gradients(*case, precision, tells_experts=True)
    assert (near[0] - exact[0]).abs().mean() <= 0.05
    exact_gradients = few_in_one(exact[2])
    for name, gradient in few_in_one(near[2]).items():
        assert torch.cosine_similarity(gradient, exact_gradients[name], 0) >= 0.98, name


@pytest.mark.parametrize("family", TABLE)
def test_transformers_loads_the_export(family, tmp_path):
    from transformers import AutoModelForCausalLM

    make_family(family).save_pretrained(tmp_path / "base")
    config = read_model_config(tmp_path / "base", force_hf=True)
    model = load_policy(tmp_path / "base", device="cpu", model_config=config)
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
    save_hf(model, tmp_path / "export", tmp_path / "base", dtype=torch.float32)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    loaded.eval().generation_config.eos_token_id = None
    tokens = loaded.generate(draw(9, 0)[None], do_sample=False, max_new_tokens=31)[0]
    expected = loaded(tokens[None], use_cache=False).logits[0]
    logits = model(*packed([tokens], np.array([-1])))
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()
    greedy = logits.argmax(-1)
    assert len(tokens) == 40 and torch.equal(greedy[8:-1], tokens[9:])


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name in ON_TWO_RANKS else pytest.mark.long) for name in FAMILIES],
)
def test_two_ranks_are_one(family, tmp_path):
    make_family(family).save_pretrained(tmp_path)
    compare_two_ranks_with_one(tmp_path)


@ranks(2)
def compare_two_ranks_with_one(folder):
    """A pack for each rank; the sums over ranks against one process that has both."""
    place, _ = start_process_group(tp_size=1)
    config = read_model_config(folder, force_hf=True)
    packs = []
    for lengths, seed in (((5, 9, 11), 0), ((17, 3, 30), 10)):
        tokens_S = [draw(length, seed + number) for number, length in enumerate(lengths)]
        packs.append(packed(tokens_S, np.array([-1, 0, 0])))
    plain = load_policy(folder, device="cpu", model_config=config, freeze_moe_router=False)
    expected = [plain(*pack) for pack in packs]
    for logits in expected:
        logits.square().sum().backward()
    for recompute in (False, True):
        mesh = init_device_mesh("cpu", (2,))
        options = {"mesh": mesh, "recompute": recompute, "freeze_moe_router": False}
        model = load_policy(folder, device="cpu", model_config=config, **options)
        logits = model(*packs[place.rank])
        assert torch.equal(logits, expected[place.rank])
        model.backward(logits.square().sum(), is_last=True)
        found = whole_gradients(model)
        for name, param in plain.named_parameters():
            assert torch.equal(found[name], param.grad), name


@pytest.mark.parametrize("family", TABLE)
def test_lora_adapts_all_linear_layers(family, tmp_path, one_rank):
    """New adapters change nothing; every factor then gets a gradient, and nothing else does."""
    make_family(family).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, force_hf=True)
    mesh = one_rank[2]
    base = load_policy(tmp_path, device="cpu", model_config=config, mesh=mesh, precision="bfloat16")
    lora = LoRAConfig(enabled=True, dim=4)
    model = load_policy(tmp_path, device="cpu", model_config=config, mesh=mesh, precision="bfloat16", lora=lora)
    tokens_S, prefix_S = segments()
    logits = model(*packed(tokens_S, prefix_S))
    assert torch.equal(logits, base(*packed(tokens_S, prefix_S)))
    model.backward(logits.float().square().sum(), is_last=True)
    trained = {name for name, param in model.named_parameters() if param.grad is not None}
    assert trained == set(factor_shapes(config, lora))
    linear = {name for name, module in model.model.layers.named_modules() if isinstance(module, torch.nn.Linear)}
    layers = {f"model.layers.{name}" for name in linear if not name.endswith("shared_expert_gate")}
    assert layers == set(adapted_layers(config, lora))


# ------------------------------------------------------------------------------------------------------------- experts


MIXTURES = [name for name, row in FAMILIES.items() if row.experts]
TOGETHER = [name for name in MIXTURES if FAMILIES[name].stored_body == "model."]  # else all names change
FORMS = ("each", "together")  # how a folder has the experts of a layer
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("family", MIXTURES)
def test_views_of_experts_are_what_transformers_writes(family):
    from transformers.core_model_loading import revert_weight_conversion

    hf_model = make_family(family)
    model = Decoder(from_hf(hf_model.config.to_dict()))
    expected = revert_weight_conversion(hf_model, dict(hf_model.state_dict()))
    found = {}
    for name, tensor in hf_model.state_dict().items():
        name = name.replace("model.embeddings.", "model.embed_tokens.")
        views = checkpoint_views(model, name, tensor)
        found |= {model.config.stored_name(part): view for part, view in views}
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("family", TOGETHER)
def test_a_folder_may_have_the_experts_of_a_layer_together(family, tmp_path):
    """As transformers writes them if asked not to convert."""
    hf_model = make_family(family)
    hf_model.save_pretrained(tmp_path / "each")
    hf_model.save_pretrained(tmp_path / "together", save_original_format=False)
    assert not has_experts_together(tmp_path / "each") and has_experts_together(tmp_path / "together")
    config = read_model_config(tmp_path / "together")
    check_weights(tmp_path / "together", config.tensor_shapes(as_computed=True))
    one, other = (dict(full_tensors(load_policy(tmp_path / form, device="cpu"), torch.float32)) for form in FORMS)
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    weights = load_file(tmp_path / "together" / "model.safetensors")
    (name, *_) = (name for name in weights if name.endswith("experts.gate_up_proj"))
    save_file(weights | {name: weights[name].transpose(1, 2).contiguous()}, tmp_path / "together" / "model.safetensors")
    with pytest.raises(ConfigError, match=name):
        load_policy(tmp_path / "together", device="cpu")


def test_layers_that_guess_further_tokens_are_left_out(tmp_path):
    """GLM-4.5's folders have one, and transformers and vLLM leave it out, too."""
    name = "model.layers.3.mlp.gate.weight"
    make_family("glm4_moe").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {name: torch.ones(8, 64)}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=f"{name} is not in the model"):
        load_policy(tmp_path, device="cpu")
    path.write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    found = dict(full_tensors(load_policy(tmp_path, device="cpu"), torch.float32))
    assert found.keys() == weights.keys()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_experts_on_more_ranks(num_ranks, form, tmp_path):
    """Of three, a rank holds none of them. In float32 the correction bias, a buffer, arrives too."""
    hf_model = make_family("glm4_moe", n_routed_experts=2, num_experts_per_tok=1)
    hf_model.save_pretrained(tmp_path / "each")
    hf_model.save_pretrained(tmp_path / "together", save_original_format=False)
    ranks(num_ranks)(load_and_export)(tmp_path, form)


def load_and_export(folder, form):
    place, _ = start_process_group(tp_size=1)
    stored = load_file(folder / "each" / "model.safetensors")
    model = load_policy(folder / form, device="cpu", mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    num_experts = len(dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"].to_local())
    assert num_experts == [1, 1, 0][place.rank]
    found = dict(full_tensors(model, torch.float32))
    assert found.keys() == stored.keys() and BIAS in found
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())
    bias = dict(full_tensors(model, torch.bfloat16))[BIAS]
    assert torch.equal(bias, stored[BIAS])
    save_hf(model, folder / "export", folder / form, dtype=torch.float32)
    exported = load_file(folder / "export" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in exported.items())


def test_routers_are_frozen_and_in_float32(tmp_path, one_rank):
    make_family("qwen3_moe").save_pretrained(tmp_path)
    model = load_policy(tmp_path, device="cpu", mesh=one_rank[2], precision="bfloat16")
    seen = []
    for router in model.model.routers:
        router.register_forward_hook(lambda router, inputs, out: seen.append((router.weight.dtype, out[0].dtype)))
    logits = model(*packed([draw(20, 0)], np.array([-1])))
    assert logits.dtype == torch.bfloat16 and seen == 2 * [(torch.float32, torch.float32)]
    model.backward(logits.float().square().sum(), is_last=True)
    without = {name for name, param in model.named_parameters() if param.grad is None}
    assert without == {"model.layers.1.mlp.gate.weight", "model.layers.2.mlp.gate.weight"}


def test_metrics_of_experts(tmp_path):
    """Three of four tokens to expert 5, the others spread evenly."""
    model = Decoder(from_hf(hf_config("mixtral").to_dict()))
    for router in model.model.routers:
        expert_TA = torch.tensor([[5, 0], [5, 1], [5, 2], [3, 4]])
        for hook in router._forward_hooks.values():
            hook(router, (), (torch.zeros(4, 8), torch.zeros(4, 2), expert_TA))
    metrics = model.model.expert_metrics()
    share, num_layers = metrics["busiest_expert_share"]
    unused, _ = metrics["unused_expert_fraction"]
    assert (share / num_layers, unused / num_layers) == (3 / 8, 2 / 8)
    assert model.model.expert_metrics() == {}


def test_r10_metrics_of_experts_are_of_the_tokens_of_all_ranks(monkeypatch):
    """Each of two ranks leaves two of four experts alone, the others'. vLLM#22167."""
    model = Decoder(from_hf(hf_config("mixtral").to_dict()))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda count_LE: count_LE.add_(torch.tensor([0, 0, 2, 6, 0, 0, 0, 0])))
    for router in model.model.routers:
        expert_TA = torch.tensor([[0, 0], [0, 1], [0, 0], [0, 1]])
        for hook in router._forward_hooks.values():
            hook(router, (), (torch.zeros(4, 8), torch.zeros(4, 2), expert_TA))
    metrics = model.model.expert_metrics()
    share, num_layers = metrics["busiest_expert_share"]
    unused, _ = metrics["unused_expert_fraction"]
    assert (share / num_layers, unused / num_layers) == (6 / 16, 4 / 8)
