"""transformers' own decoder blocks over packed tokens: the body of `model.Decoder` for all families but three.

The only file that imports transformers; the native families and `--check` do without. What changes in transformers'
code, and nothing else does:

    attention    `attention.packed_attention`, with the scale of the layer and the window that its mask asks for
    state        the convolution and the recurrence of `state`
    precision    as in `model.Block`: the residual stream in float32, each norm in float32 and rounded once, matmuls in
                 the dtype of their weights
    recompute    each layer's forward, inside of the module that FSDP wraps

docs/families.md tells what was tried, and how a family is added.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from attention import PackLayout, packed_attention
from base.hf.model_config import ModelConfig
from loss import Metrics
from state import over_packs

if TYPE_CHECKING:
    from router_replay import RouterReplay

PACKED = "packed"  # our attention's name in transformers
ALL_KEYS = (None,)  # as `window_of_mask` says it
NO_PADDING = None
MASK_OF_TYPES = {"full_attention": ALL_KEYS, "linear_attention": NO_PADDING, "conv": NO_PADDING}  # in models with state


def window_of_mask(*, local_size: int | None = None, use_vmap: bool = False, **_) -> tuple[int | None]:
    """In place of a mask: the window of the layers that transformers asks it for, in keys; None is all."""
    assert not use_vmap, "a mask other than causal, or causal with a window"
    return (local_size,)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: tuple[int | None],
    *,
    layout: PackLayout,
    scaling: float | None = None,
    **_,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [1, N, T, H], [1, K, T, H] twice -> [1, T, N * H]."""
    # Rows one after another: a view keeps the whole output of a fused layer; with other strides the result is copied.
    value_TKH = value[0].transpose(0, 1).contiguous()
    query_TNH = query[0].transpose(0, 1).to(value_TKH.dtype).contiguous()  # the rotation has made both float32
    key_TKH = key[0].transpose(0, 1).to(value_TKH.dtype).contiguous()
    (window,) = mask
    attended_TD = packed_attention(query_TNH, key_TKH, value_TKH, layout, scale=scaling, window=window)
    return attended_TD[None], None


AttentionInterface.register(PACKED, attend)
AttentionMaskInterface.register(PACKED, window_of_mask)


class TransformersBody(nn.Module):
    """Embedding, layers and final norm of a transformers model, under its names. num_recomputed, recomputed: as
    `model.Body`.

    The model itself is no submodule: only its parts are, as parameters of `model.Decoder` have the names of the
    checkpoint. Its `forward` is called past `__call__`, which vLLM replaces in some classes, for the whole process.
    """

    def __init__(self, config: ModelConfig, num_recomputed: int = 0, recomputed: Callable | None = None):
        super().__init__()
        fields = dict(config.hf)
        fields.pop("time_step_limit", None)  # from 0 to infinity; transformers 5 writes that as it does not read it
        hf_config = AutoConfig.for_model(**fields)
        # Not the dtype of config.json: the parameters are the master weights.
        causal = AutoModelForCausalLM.from_config(hf_config, attn_implementation=PACKED, dtype=torch.float32)
        if config.num_experts:
            causal.set_experts_implementation("grouped_mm")
        base = causal.base_model.eval()  # no dropout
        self.parts_of = [base]  # in a list, as nn.Module would make it a submodule
        self.num_experts = config.num_experts
        self.counts: dict[int, Tensor] = {}  # layer -> tokens of each expert
        embedding = base.get_input_embeddings()
        for name, part in base.named_children():
            self.add_module("embed_tokens" if part is embedding else name, part)
            if isinstance(part, nn.Linear):  # Gemma 4's, of embeddings
                part.register_forward_pre_hook(_round_input, with_kwargs=True)
        embedding.register_forward_hook(_widen)
        final_norm = self.get_submodule(config.family.final_norm)
        for module in self.modules():
            if _is_norm(module):
                scale = logit_scale(hf_config) if module is final_norm else 1.0
                module.register_forward_pre_hook(_widen_input)
                module.register_forward_hook(partial(_round_output, scale=scale))
            if isinstance(module, nn.LayerNorm):
                module.forward = partial(_layer_norm, module)
        self.routers = []
        self.replay: RouterReplay | None = None
        self.mixers = []
        for number, layer in enumerate(self.layers):
            if config.has_experts(number):
                router_name = config.family.experts.router.computed.removesuffix(".weight")
                router = layer.get_submodule(router_name)
                router.register_forward_pre_hook(_widen_input)
                router.register_forward_hook(partial(self._count, number))
                self.routers.append(router)
            if "state" in config.layers[number]:
                mixer = layer.get_submodule(config.family.state.module)
                mixer.forward = over_packs(mixer)
                self.mixers.append(mixer)
            for part in layer.children():
                if not _is_norm(part) and _has_weights(part):
                    part.register_forward_pre_hook(_round_input, with_kwargs=True)
            if number < num_recomputed:
                layer.forward = partial(_forward, layer.forward, recomputed)

    def forward(self, token_T: Tensor, position_T: Tensor, layout: PackLayout) -> Tensor:
        """hidden_TD, whose product with the output layer's weight is the logits."""
        (base,) = self.parts_of
        if self.replay:
            self.replay.begin(layout.experts_TLA, token_T.device)
        mask: Tensor | dict
        if self.mixers:
            mask = MASK_OF_TYPES  # transformers would look for padding in a tensor, and wait for the device
        else:
            # Without a mask of padding transformers looks for sequences in the positions, and waits for the device.
            mask = torch.ones_like(token_T, dtype=torch.bool)[None]
        out = type(base).forward(
            base,
            input_ids=token_T[None],
            attention_mask=mask,
            position_ids=position_T[None],
            layout=layout,
            seq_idx=layout,  # LFM2's layers hand on nothing else
            use_cache=False,
        )
        return out.last_hidden_state[0]

    def _count(self, layer: int, router: nn.Module, args: tuple, out: tuple) -> None:
        """Counts the tokens of each expert. No scatter: on CUDA its sums have no order."""
        if not torch.is_grad_enabled():
            return
        (expert_TA,) = (part for part in out if not part.is_floating_point())  # the A experts that a token is sent to
        number_E = torch.arange(self.num_experts, device=expert_TA.device)
        count_E = (expert_TA.flatten()[:, None] == number_E).sum(0)
        self.counts[layer] = self.counts.get(layer, 0) + count_E

    def expert_metrics(self) -> Metrics:
        """How evenly the routers used their experts since the last call, as means over layers: the busiest expert's
        share of what was sent to experts (1 / E if even), and the share of experts that got no token. Of all ranks, as
        each sends tokens to all experts: a collective where there are experts."""
        metrics: Metrics = {}
        if self.counts:
            count_LE = torch.stack(list(self.counts.values()))
            if dist.is_initialized():
                dist.all_reduce(count_LE)
            share_LE = count_LE / count_LE.sum(1, keepdim=True)
            num_layers = torch.tensor(len(count_LE))
            metrics["busiest_expert_share"] = share_LE.max(1).values.sum(), num_layers
            metrics["unused_expert_fraction"] = (count_LE == 0).float().mean(1).sum(), num_layers
        self.counts = {}
        if self.replay:
            metrics |= self.replay.metrics()
        return metrics

    def init_buffers(self, device: torch.device | str) -> None:
        """Computes the buffers that are in no checkpoint, such as rotary frequencies, after `to_empty`. On the device
        that computes, wherever the parameters are."""
        (base,) = self.parts_of
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
            if module._non_persistent_buffers_set:
                of_mixer = module in self.mixers
                # Falcon H1 computes the buffers of its mixers as the model's own. Of a mixer it would draw parameters.
                base._init_weights(base if of_mixer else module)


def logit_scale(hf_config: PreTrainedConfig) -> float:
    """What transformers multiplies the logits by, in Cohere and Falcon H1, or divides them by, in Granite."""
    factor = getattr(hf_config, "logit_scale", 1.0) * getattr(hf_config, "lm_head_multiplier", 1.0)
    return factor / getattr(hf_config, "logits_scaling", 1.0)


def _forward(forward: Callable, recomputed: Callable, *args, **kwargs):
    """What forward computes from the arguments, with gradients through `recomputed`."""
    if torch.is_grad_enabled():
        return recomputed(forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and hasattr(module, "weight")


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _widen(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    return _widened(out)


def _widen_input(module: nn.Module, args: tuple) -> tuple:
    """And not the gate of a norm that has one."""
    return (_widened(args[0]), *args[1:])


def _round_output(module: nn.Module, args: tuple, out: Tensor, *, scale: float) -> Tensor:
    if scale != 1.0:
        out = out * scale
    if out.requires_grad:
        # The rotation returns a transposed one, of which the weight's gradient would be summed in another order.
        out.register_hook(Tensor.contiguous)
    return out.to(module.weight.dtype)


def _layer_norm(module: nn.LayerNorm, wide: Tensor) -> Tensor:
    """torch takes one dtype for input, weight and bias."""
    bias = module.bias.to(wide.dtype) if module.bias is not None else None
    return F.layer_norm(wide, module.normalized_shape, module.weight.to(wide.dtype), bias, module.eps)


def _round_input(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """For layers whose norm comes after: attention and MLP get the residual stream."""
    dtype = min((param.dtype for param in module.parameters()), key=lambda dtype: dtype.itemsize)  # not a router's
    if args:
        return (args[0].to(dtype), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].to(dtype)}
