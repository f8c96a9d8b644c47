"""Layers with state, where a pack, a precision or another program could go wrong. tests/core/test_blocks.py has all
families against transformers; test_families.py each of their parameters in vLLM."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import hf_config, make_family
from test_blocks import CPU, draw, packed, segments

import state
from attention import PackLayout
from base.hf.families import FAMILIES
from base.hf.folder import from_hf, read_model_config
from base.hf.layers import VECTORS
from base.hf.weights import full_tensors
from base.inputs.run_inputs import read_policy_config
from config import AsyncGRPOConfig, Config, ConfigError, GRPOConfig, OptimizerConfig
from model import load_policy
from optim import build_optimizer

WITH_STATE = [name for name, row in FAMILIES.items() if row.state]
WITH_RECURRENCE = [name for name in WITH_STATE if not name.startswith("lfm2")]
LENGTHS, PREFIXES = (11, 2, 7, 1, 90, 5), (-1, -1, 0, 0, 1, -1)
LAYOUT = PackLayout.of(np.cumsum([0, *LENGTHS]), np.array(PREFIXES), sum(LENGTHS), CPU)


def chains():
    """The rows of each segment's prefix and its own, how many are its prefix's."""
    for segment, prefix in enumerate(PREFIXES):
        before = LAYOUT.rows(prefix) if prefix >= 0 else np.arange(0)
        yield np.concatenate([before, LAYOUT.rows(segment)]), len(before)


def by_chains(compute, inputs):
    """A pack's outputs, where compute(inputs of a whole sequence) gives those of its rows."""
    out = None
    for rows, num_before in chains():
        given = {name: x[0, rows] for name, x in inputs.items()}
        result = compute(**given)
        if out is None:
            out = result.new_empty(sum(LENGTHS), *result.shape[1:])
        out = out.index_put((torch.from_numpy(rows[num_before:]),), result[num_before:])
    return out[None]


def inputs_of(shapes, seed=0):
    """Random, [1, T, ...], with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(1, sum(LENGTHS), *shape, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def assert_equal_with_gradients(found, expected, inputs, bound):
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    leaves = list(inputs.values())
    gradients = [torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True) for x in (found, expected)]
    for name, gradient, exact in zip(inputs, *gradients, strict=True):
        assert exact[0, :13].abs().max() > 0, name  # prompts, through the state too
        assert (gradient - exact).abs().max() <= bound * exact.abs().max(), name


def mamba(hidden, dt, B, C, *, A, D, dt_bias):
    """Mamba 2 as it is defined, a row at a time: [T, N, H], [T, N], [T, G, S] twice."""
    heads = hidden.shape[1]
    memory = hidden.new_zeros(heads, hidden.shape[2], B.shape[2])
    outputs = []
    for x, step, b, c in zip(hidden, F.softplus(dt + dt_bias), B, C, strict=True):
        b, c = (part.repeat_interleave(heads // len(part), 0) for part in (b, c))
        memory = memory * (step * A).exp()[:, None, None] + torch.einsum("n,nh,ns->nhs", step, x, b)
        outputs.append(torch.einsum("nhs,ns->nh", memory, c) + D[:, None] * x)
    return torch.stack(outputs)


def delta_rule(query, key, value, g, beta):
    """The gated delta rule as it is defined, a row at a time: [T, N, H] three times, [T, N] twice."""
    memory = key.new_zeros(key.shape[1], key.shape[2], value.shape[2])
    outputs = []
    for q, k, v, decay, rate in zip(query, key, value, g.exp(), beta, strict=True):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        memory = memory * decay[:, None, None]
        correction = rate[:, None] * (v - torch.einsum("nkv,nk->nv", memory, k))
        memory = memory + torch.einsum("nk,nv->nkv", k, correction)
        outputs.append(torch.einsum("nkv,nk->nv", memory, q) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)


def test_mamba_is_its_recurrence():
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    inputs = inputs_of({"hidden": (4, 5), "dt": (4,), "B": (2, 3), "C": (2, 3)})
    weights = {"A": -torch.rand(4) - 0.02, "D": torch.randn(4), "dt_bias": torch.randn(4) - 2}
    found = state.scan(mamba2_chunk_scan, **inputs, **weights, chunk_size=8, layout=LAYOUT)
    assert_equal_with_gradients(found, by_chains(partial(mamba, **weights), inputs), inputs, 1e-5)


@pytest.mark.parametrize("has_kernel", [False, True])
def test_the_delta_rule_is_its_recurrence(has_kernel, monkeypatch):
    """By transformers' function, and as fla's kernel is called, by one that takes sequences back to back."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    calls = []

    def kernel(query, key, value, *, g, beta, initial_state, cu_seqlens, **options):
        assert len(query) == 1 and cu_seqlens.dtype == torch.int32 and options["output_final_state"]
        calls.append((cu_seqlens.tolist(), None if initial_state is None else len(initial_state)))
        parts = []
        for number, rows in enumerate(map(slice, cu_seqlens[:-1], cu_seqlens[1:])):
            start = None if initial_state is None else initial_state[number : number + 1]
            given = {"g": g[:, rows], "beta": beta[:, rows], "initial_state": start, **options}
            parts.append(torch_chunk_gated_delta_rule(query[:, rows], key[:, rows], value[:, rows], **given))
        outputs, ends = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(ends)

    if has_kernel:
        monkeypatch.setattr(state, "takes_bounds", lambda device_type: True)
    state.Launches.of.cache_clear()
    raw = inputs_of({"query": (2, 4), "key": (2, 4), "value": (2, 6), "g": (2,), "beta": (2,)})
    inputs = raw | {"g": -F.softplus(raw["g"] - 3), "beta": raw["beta"].sigmoid()}
    function = kernel if has_kernel else torch_chunk_gated_delta_rule
    found, _ = state.delta_rule(function, **inputs, layout=LAYOUT)
    state.Launches.of.cache_clear()
    assert_equal_with_gradients(found, by_chains(delta_rule, inputs), raw, 1e-4)
    if has_kernel:  # segments without a prefix, then the others
        assert calls == [([0, 11, 13, 18], None), ([0, 7, 8, 98], 3)]


def test_a_convolution_starts_with_the_last_rows_of_the_prefix():
    from transformers.models.nemotron_h.modeling_nemotron_h import causal_conv1d_fn

    inputs = inputs_of({"x": (6,)})
    weight_CW, bias_C = torch.randn(6, 4), torch.randn(6)

    def convolve(x):
        rows = F.pad(x, (0, 0, 3, 0)).unfold(0, 4, 1)  # [T, C, W]
        return F.silu((rows * weight_CW).sum(-1) + bias_C)

    x_1CT = inputs["x"].transpose(1, 2)
    found_1CT = state.convolve(causal_conv1d_fn, x_1CT, weight_CW, bias_C, "silu", seq_idx=LAYOUT)
    assert_equal_with_gradients(found_1CT.transpose(1, 2), by_chains(convolve, inputs), inputs, 1e-5)


def long_memory(family, folder, **fields):
    """A model whose states hardly forget, so that one that leaks shows."""
    hf_model = make_family(family, **fields)
    with torch.no_grad():
        for name, param in hf_model.named_parameters():
            if name.endswith("A_log"):
                param.fill_(-5)
            if name.endswith("in_proj_ba.weight"):  # the rates of forgetting
                param.mul_(0.1)
    hf_model.save_pretrained(folder)
    return load_policy(folder, device="cpu", freeze_moe_router=False)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "nemotron_h" else pytest.mark.long) for name in WITH_STATE]
)
@torch.no_grad()
def test_a_state_reaches_its_responses_and_nothing_else(family, tmp_path):
    model = long_memory(family, tmp_path)
    tokens_S, prefix_S = segments()
    lengths = [len(tokens) for tokens in tokens_S]
    before = model(*packed(tokens_S, prefix_S)).split(lengths)
    for changed, reached in ((0, {0, 1, 2, 3}), (4, {4}), (8, {8})):
        others = list(tokens_S)
        others[changed] = others[changed].clone()
        others[changed][-1] += 1
        after = model(*packed(others, prefix_S)).split(lengths)
        change_S = [(old - new).abs().max().item() for old, new in zip(before, after, strict=True)]
        assert {segment for segment, change in enumerate(change_S) if change > 1e-3} == reached
        assert {segment for segment, change in enumerate(change_S) if change > 2e-5} == reached


@torch.no_grad()
def test_small_steps_of_nemotron_are_not_raised(tmp_path):
    """transformers raises them to time_step_min=0.001, vLLM and the authors' code do not."""
    hf_model = make_family("nemotron_h")
    for name, param in hf_model.named_parameters():
        if name.endswith("dt_bias"):
            param.fill_(-9)
    hf_model.save_pretrained(tmp_path)
    tokens = draw(40, 0)
    logits = load_policy(tmp_path, device="cpu")(*packed([tokens], np.array([-1])))
    assert (logits - hf_model(tokens[None], use_cache=False).logits[0]).abs().max() <= 1e-5
    for module in hf_model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.001, float("inf"))
    assert (logits - hf_model(tokens[None], use_cache=False).logits[0]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "qwen3_next" else pytest.mark.long) for name in WITH_RECURRENCE]
)
def test_in_bfloat16_the_forward_has_the_numbers_that_are_sent(family, tmp_path, one_rank):
    """Vectors of a recurrence, too, are rounded once, and then equal in sampler and trainer; the optimizer has them in
    float32. The norm of its outputs computes in float32 and rounds once."""
    make_family(family).save_pretrained(tmp_path)
    model = load_policy(tmp_path, device="cpu", mesh=one_rank[2], precision="bfloat16")
    masters = {name: param for name, param in model.named_parameters() if name.endswith(VECTORS)}
    assert masters and {param.dtype for param in masters.values()} == {torch.float32}
    seen = {}
    norms = []

    def keep(name, module, _):
        seen.update({f"{name}.{vector}": param.clone() for vector, param in module.named_parameters(recurse=False)})

    def keep_norm(module, inputs, output):
        norms.append((inputs[0].dtype, output.dtype))

    for name, module in model.named_modules():
        if module in model.model.mixers:
            module.register_forward_pre_hook(partial(keep, name))
            if hasattr(module, "norm") and hasattr(module.norm, "weight"):
                module.norm.register_forward_hook(keep_norm)
    model(*packed(*segments()))
    sent = dict(full_tensors(model, torch.bfloat16))
    assert seen.keys() == masters.keys()
    assert all(torch.equal(tensor, sent[name]) for name, tensor in seen.items())
    assert set(norms) <= {(torch.float32, torch.bfloat16)} and (norms or family == "falcon_h1")


def test_muon_trains_the_matrices_of_a_mixer(tmp_path):
    """Neither its convolution nor experts, which have three dims."""
    make_family("nemotron_h").save_pretrained(tmp_path)
    model = load_policy(tmp_path, device="cpu", model_config=read_model_config(tmp_path))
    names = {param: name for name, param in model.named_parameters()}
    adamw, muon = (
        {names[param].removeprefix("model.layers.") for param in group["params"]}
        for group in build_optimizer(model, OptimizerConfig(name="torch.optim.Muon")).param_groups
    )
    assert {"0.mixer.in_proj.weight", "0.mixer.out_proj.weight", "1.mixer.q_proj.weight"} <= muon
    vectors = {f"0.mixer.{name}" for name in (*VECTORS, "conv1d.weight", "conv1d.bias", "norm.weight")}
    assert vectors | {"4.mixer.experts.up_proj", "4.mixer.experts.down_proj"} <= adamw


def test_a_run_that_keeps_states_of_older_weights_is_refused(tmp_path):
    """Of keys and values it may keep those."""
    rebuilds = AsyncGRPOConfig(enabled=True, in_flight_weight_updates=True)
    keeps = replace(rebuilds, recompute_kv_cache_after_weight_updates=False)
    for family, is_refused in (("lfm2", True), ("qwen3_5", True), ("gemma3_text", False)):
        folder = tmp_path / family
        hf_config(family).save_pretrained(folder)
        read_policy_config(Config(grpo=GRPOConfig(async_grpo=rebuilds)), folder)
        with pytest.raises(ConfigError, match="state of a") if is_refused else nullcontext():
            read_policy_config(Config(grpo=GRPOConfig(async_grpo=keeps)), folder)


def test_attention_is_in_some_layers_only():
    """Worked out by hand: of four layers one has attention, of 10 * 11 / 2 pairs; three have a state."""
    fields = {"num_hidden_layers": 4, "layer_types": None}
    model = from_hf(hf_config("qwen3_5_text").to_dict() | fields)
    assert [parts[0] for parts in model.layers] == ["state", "state", "state", "attention"]
    assert model.attention_flops(10) == 55 * model.flops_per_pair
    # A convolution of 4 rows over 2 * 2 * 32 + 4 * 32 channels; three products with four states of 32 x 32.
    assert model.state_flops == 3 * (2 * 4 * 256 + 6 * 4 * 32 * 32)


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M*-E"},
            ["state", "attention", "mlp", "experts"],
        ),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba"]}, ["state", "attention", "state"]),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [0, 2]}, ["attention", "state", "attention"]),
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}, ["state", "attention", "state"]),
    ],
)
def test_which_layers_have_a_state(family, fields, expected):
    """In the words of transformers 4, or where config.json leaves it to the family."""
    fields = hf_config(family).to_dict() | fields
    if family == "nemotron_h":
        fields |= {"num_hidden_layers": 4}
    fields.pop("time_step_limit", None)
    assert [parts[0] for parts in from_hf(fields).layers] == expected
