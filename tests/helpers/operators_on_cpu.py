"""What vLLM 0.32 does not compute on a CPU, in torch, for tests: the gated delta net in float32, and experts without a
gate. Its file of Qwen3.5 also imports torchvision, for images, which the CPU lock has not."""

import contextlib
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor


def install():
    """Before the engine starts."""
    if find_spec("torchvision") is None:
        stand_in_for_torchvision()
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    delta_net.__annotations__["layer_name"] = LayerNameType  # vLLM registers an operator by its types
    gdn_attention.cpu_gdn_attention_core = delta_net

    check_config = FusedMoEConfig.__post_init__

    def without_last_check(config):
        with contextlib.suppress(NotImplementedError):
            check_config(config)

    FusedMoEConfig.__post_init__ = without_last_check
    pack, compute = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def pack_if_gated(self, layer):
        self.is_gated = layer.w13_weight.shape[1] == 2 * layer.w2_weight.shape[2]
        if self.is_gated:
            pack(self, layer)

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs):
        if self.is_gated:
            compute(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs)
        else:
            output.copy_(experts(hidden_states, w1, w2, topk_weights, topk_ids))

    CPUUnquantizedExperts._supports_no_act_and_mul = staticmethod(lambda: True)
    CPUUnquantizedExperts._supports_activation = staticmethod(lambda activation: True)
    CPUUnquantizedExperts.process_weights_after_loading = pack_if_gated
    CPUUnquantizedExperts.apply = apply


def stand_in_for_torchvision():
    """Of which a text model uses nothing."""
    from vllm.model_executor.models import registry

    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        sys.modules[f"torchvision{name}"] = MagicMock()
    registry._run_in_subprocess = lambda function: function()  # else another process looks at the model's class


def experts(hidden_TD: Tensor, up_EFD: Tensor, down_EDF: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
    """With the activation of Nemotron H, relu squared."""
    out_TD = torch.zeros_like(hidden_TD)
    for row, (weight_A, expert_A) in enumerate(zip(weight_TA, expert_TA.tolist(), strict=True)):
        for weight, expert in zip(weight_A, expert_A, strict=True):
            inner = F.relu(up_EFD[expert] @ hidden_TD[row]).square()
            out_TD[row] += weight * (down_EDF[expert] @ inner)
    return out_TD


def delta_net(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name) -> None:
    """A sequence at a time, from and to the states of vLLM's cache, in the dtype of the weights."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    if context.attn_metadata is None:  # the run that measures memory
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    meta = context.attn_metadata[layer.prefix]
    conv_states = layer.kv_cache[0].transpose(1, 2)  # [slot, channel, W - 1]
    states = layer.kv_cache[1]  # [slot, N, value, key]
    bounds = meta.non_spec_query_start_loc.tolist()
    has_state = [True] * meta.num_decodes
    if meta.num_prefills:
        has_state += meta.has_initial_state[meta.num_decodes :].tolist()
    slots = meta.non_spec_state_indices_tensor.tolist()
    for start, end, slot, goes_on in zip(bounds, bounds[1:], slots, has_state, strict=False):
        if not goes_on:
            conv_states[slot].zero_()
            states[slot].zero_()
        rows = slice(start, end)
        x_CT = torch.cat([conv_states[slot], mixed_qkv[rows].T], 1)
        conv_states[slot].copy_(x_CT[:, -conv_states.shape[2] :])
        weight = layer.conv1d.weight.view(len(x_CT), 1, -1)
        convolved = F.silu(F.conv1d(x_CT[None], weight, layer.conv1d.bias, groups=len(x_CT)))[0]
        query, key, value = (part[0] for part in layer.rearrange_mixed_qkv(convolved.T))
        repeats = value.shape[1] // key.shape[1]
        decay = (-layer.A_log.float().exp() * F.softplus(a[rows].float() + layer.dt_bias)).exp()
        state = states[slot].transpose(1, 2).float()  # [N, key, value]
        for number, row in enumerate(range(start, end)):
            k = unit(key[number]).repeat_interleave(repeats, 0)
            q = unit(query[number]).repeat_interleave(repeats, 0) * k.shape[-1] ** -0.5
            state = state * decay[number][:, None, None]
            old = torch.einsum("nkv,nk->nv", state, k)
            new = (value[number] - old) * b[row].sigmoid()[:, None]
            state = state + torch.einsum("nk,nv->nkv", k, new)
            core_attn_out[row] = torch.einsum("nkv,nk->nv", state, q)
        states[slot].copy_(state.transpose(1, 2))


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
