"""The policy: one decoder for Qwen2 / Qwen2.5, Qwen3 (dense) and Llama 3.x over packed tokens, or for any other family
transformers' blocks in its place (`blocks`).

Owns the architecture (`Decoder`), its FSDP2 wrapping (`shard`) and loading (`load_policy`). Parameters have exactly the
names of Hugging Face checkpoints.

In examples/naive.py this is `def decode(w: Weights, config: dict, token_GT: Tensor) -> Tensor:`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from attention import GatherRows, PackLayout, packed_attention
from base.hf.folder import read_model_config
from base.hf.model_config import ModelConfig, NativeConfig
from base.hf.weights import load_weights
from config import LoRAConfig, Recompute, num_recomputed

# Calls a function of which autograd keeps the arguments alone: the backward pass computes it again.
RECOMPUTED = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
Result = TypeVar("Result")  # of a function of the final hidden states and the output layer's weight


def rope_cos_sin(config: NativeConfig, position_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles (RoFormer, arXiv 2104.09864, eq. 15), each [T, 1, H/2], in float32.

    Llama 3.1 divides by `factor` the frequencies with less than `low_freq_factor` turns in the original context, keeps
    those with more than `high_freq_factor`, and interpolates between.
    """
    even_H = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_T.device)
    freq_H = 1.0 / config.rope_theta ** (even_H / config.head_dim)
    rope = config.rope_scaling
    if rope is not None:
        turns_H = rope.original_max_position_embeddings / (2 * math.pi / freq_H)
        keep_H = (turns_H - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep_H = keep_H.clamp(0, 1)
        freq_H = (1 - keep_H) * freq_H / rope.factor + keep_H * freq_H  # transformers' order, to the bit
    angle_T1H = position_T.float()[:, None, None] * freq_H
    return angle_T1H.cos(), angle_T1H.sin()


def apply_rope(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotates the pairs (h, h + H/2): the order of HF checkpoints. Rounded to the dtype of x once."""
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat((first * cos_T1H - second * sin_T1H, second * cos_T1H + first * sin_T1H), dim=-1).to(x_TNH.dtype)


class RMSNorm(nn.Module):
    """Computes in float32 or the wider type of x; rounds once, to the dtype of the weight and of the next matmul."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (self.weight * F.rms_norm(wide, x.shape[-1:], eps=self.eps)).to(self.weight.dtype)


class Attention(nn.Module):
    def __init__(self, config: NativeConfig):
        super().__init__()
        self.head_dim = config.head_dim
        D, H = config.hidden_size, config.head_dim
        N, K = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(D, N * H, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, K * H, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, K * H, bias=config.qkv_bias)
        self.o_proj = nn.Linear(N * H, D, bias=config.o_bias)
        self.q_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else None

    def project(self, hidden_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query_TNH, key_TKH, value_TKH: what `packed_attention` reads."""
        query_TNH = self.q_proj(hidden_TD).unflatten(-1, (-1, self.head_dim))
        key_TKH = self.k_proj(hidden_TD).unflatten(-1, (-1, self.head_dim))
        value_TKH = self.v_proj(hidden_TD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            query_TNH = self.q_norm(query_TNH)
            key_TKH = self.k_norm(key_TKH)
        return apply_rope(query_TNH, cos_T1H, sin_T1H), apply_rope(key_TKH, cos_T1H, sin_T1H), value_TKH


class MLP(nn.Module):
    def __init__(self, config: NativeConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_TD)) * self.up_proj(hidden_TD))


class Block(nn.Module):
    """One pre-norm layer. recomputed: `RECOMPUTED` or like it, for a block whose backward computes it again; None for
    one that keeps its activations.

    halves: `before_attention` and `after_attention`, plain or compiled. All blocks share them, and so their graphs. The
    attention is not compiled: it branches on the layout, so each pack would need its own graph.
    """

    def __init__(self, config: NativeConfig, recomputed: Callable | None = None):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recomputed = recomputed
        self.halves = (before_attention, after_attention)

    def forward(self, *inputs) -> Tensor:
        # Inside the module that FSDP wraps: a wrapper module would change the parameters' names.
        if self.recomputed and torch.is_grad_enabled():
            return self.recomputed(self._forward, *inputs)
        return self._forward(*inputs)

    def _forward(self, hidden_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, layout: PackLayout) -> Tensor:
        before, after = self.halves
        if len(hidden_TD) == 1:  # as an empty pack has; the graph for any length excludes it
            before, after = before_attention, after_attention
        query_TNH, key_TKH, value_TKH = before(self, hidden_TD, cos_T1H, sin_T1H)
        return after(self, hidden_TD, packed_attention(query_TNH, key_TKH, value_TKH, layout))


def before_attention(
    block: Block, hidden_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """query_TNH, key_TKH, value_TKH."""
    return block.self_attn.project(block.input_layernorm(hidden_TD), cos_T1H, sin_T1H)


def after_attention(block: Block, hidden_TD: Tensor, attended_TD: Tensor) -> Tensor:
    """The block's output."""
    hidden_TD = hidden_TD + block.self_attn.o_proj(attended_TD)
    return hidden_TD + block.mlp(block.post_attention_layernorm(hidden_TD))


class Head(nn.Linear):
    """An output layer that is not tied to the embedding. It calls the function that needs its weight, because FSDP2
    gathers the weight only during this forward."""

    def forward(self, hidden_RD: Tensor, compute: Callable[[Tensor, Tensor], Result]) -> Result:
        return compute(hidden_RD, self.weight)


class Body(nn.Module):
    """Embedding, blocks and final norm. The first num_recomputed blocks are computed again in the backward pass."""

    def __init__(self, config: NativeConfig, num_recomputed: int = 0, recomputed: Callable | None = None):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        for number in range(config.num_hidden_layers):
            self.layers.append(Block(config, recomputed if number < num_recomputed else None))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.routers = []

    def forward(self, token_T: Tensor, position_T: Tensor, layout: PackLayout) -> Tensor:
        """The final hidden states, hidden_TD."""
        hidden_TD = self.embed_tokens(token_T)
        # The residual stream: rounding it to 16 bits after each block would cause half of bfloat16's error.
        hidden_TD = hidden_TD.to(torch.promote_types(hidden_TD.dtype, torch.float32))
        cos_T1H, sin_T1H = rope_cos_sin(self.config, position_T)
        for block in self.layers:
            hidden_TD = block(hidden_TD, cos_T1H, sin_T1H, layout)
        return self.norm(hidden_TD)

    def init_buffers(self, device: torch.device | str) -> None:
        """There are none."""


def body_of(config: ModelConfig, *, recompute: Recompute) -> nn.Module:
    """`Body` for its own families, transformers' blocks for all others."""
    num_blocks = num_recomputed(recompute, config.num_hidden_layers)
    recomputed = RECOMPUTED
    if recompute == "offload":
        from base.system.host_inputs import HostInputs  # for the runs that need it

        recomputed = HostInputs().recomputed
    if isinstance(config, NativeConfig):
        return Body(config, num_blocks, recomputed)
    from blocks import TransformersBody  # its seconds of imports are for the runs that need it

    return TransformersBody(config, num_blocks, recomputed)


class Decoder(nn.Module):
    """The causal language model: a body, and an output layer unless it is tied to the embedding. Its parameters have
    the names of the HF checkpoint.

    The options are constants of a run. recompute: all blocks or the first N; "offload": all, whose inputs wait in host
    memory. defers_sync, deterministic: see `backward`. keeps_gathered: weights that FSDP has gathered for a forward
    stay until its backward, and from one micro-batch to the next.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: Recompute = False,
        defers_sync: bool = False,
        keeps_gathered: bool = False,
        deterministic: bool = False,
    ):
        super().__init__()
        self.config = config
        self.defers_sync = defers_sync
        self.keeps_gathered = keeps_gathered
        self.is_gathered_once = False
        self.deterministic = deterministic
        self.model = body_of(config, recompute=recompute)
        self.lm_head = None if config.tie_word_embeddings else Head(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        token_T: Tensor,
        position_T: Tensor,
        layout: PackLayout,
        pos_R: Tensor | None = None,
        compute: Callable[[Tensor, Tensor], Result] | None = None,
    ) -> Result:
        """What `compute` makes of hidden_RD, the final hidden states at the positions pos_R of the pack (None: at
        all), and weight_VD, the output layer's weight: head.py has such functions. Without one, logits over the whole
        vocabulary in compute precision, for tests and tools. The tensors are int64 on the model's device, T >= 1. R = 0
        is allowed: every gradient is then zero."""
        compute = compute or self._logits
        hidden_TD = self.model(token_T, position_T, layout)
        if pos_R is not None:
            hidden_TD = GatherRows.apply(hidden_TD, pos_R)
        if self.lm_head is None:  # tied: the embedding's weight, which FSDP2 keeps gathered during this whole forward
            return compute(hidden_TD, self.model.embed_tokens.weight)
        return self.lm_head(hidden_TD, compute)

    def _logits(self, hidden_RD: Tensor, weight_VD: Tensor) -> Tensor:
        logits_RV = F.linear(hidden_RD, weight_VD)
        if self.config.softcap is not None:
            logits_RV = self.config.softcap * torch.tanh(logits_RV / self.config.softcap)
        return logits_RV

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds to the gradient, after `shard`. FSDP sums it over a replica's ranks at each micro-batch (defers_sync: at
        the last), over replicas at the last. deterministic: attention sums in order."""
        syncs = is_last or not self.defers_sync
        self.set_requires_gradient_sync(syncs)
        self.set_reshard_after_backward(is_last or not self.keeps_gathered)
        self.set_requires_all_reduce(is_last)
        torch.set_deterministic_debug_mode("error" if self.deterministic else "default")
        loss.backward()
        torch.set_deterministic_debug_mode("default")

    @contextmanager
    def gathered_once(self) -> Iterator[None]:
        """Within, the forwards have no gradients, and the weights stay as they are: if keeps_gathered, all forwards
        share what the first one gathers. It is freed at the end."""
        self.is_gathered_once = self.keeps_gathered
        try:
            yield
        finally:
            self.is_gathered_once = False
            for unit in self.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()

    def compile_blocks(self) -> None:
        """Compiles the halves of the blocks, each at its first call with gradients and at its first call without."""
        halves = [torch.compile(half, dynamic=True, fullgraph=True) for half in (before_attention, after_attention)]
        for block in self.model.layers:
            block.halves = halves


def shard(model: Decoder, mesh: DeviceMesh, *, precision: str, cpu_offload: bool = False) -> None:
    """Applies FSDP2 over a `base.system.ranks.fsdp_mesh`, in place. Its units, and how long each is gathered:

        a block, the embedding        while it computes, forward and backward
        the head                      from its forward to its backward
        the root: final norm, and     from the start of the forward to the end of the backward
            an embedding that is tied
        a router                      as a block; it is in float32: a rounded logit can choose another expert

    With keeps_gathered all but routers stay until the backward. Forwards without gradients free at their end what would
    stay, except in `gathered_once`.

    `precision` "float32" | "bfloat16" is the dtype of the matmuls and the gathered copies. Activations between blocks
    stay in float32. The sharded parameters, which the optimizer sees, keep their dtype. Gradients are summed over ranks
    in float32, not averaged: the loss divides by one count of tokens over all ranks. With `cpu_offload` parameters and
    gradients are in host memory. A model of one shard sums gradients over micro-batches before FSDP copies them.
    """
    assert not (cpu_offload and model.keeps_gathered), "what is gathered from host memory does not stay"
    if mesh.size(-1) == 1 and not cpu_offload:
        model.defers_sync = True
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")} if cpu_offload else {}
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    ends = [] if model.lm_head is None else [model.model.embed_tokens, model.lm_head]

    def free_without_backward(unit: FSDPModule, *_) -> None:
        """Without a backward the gathered weights would hold memory, and be stale after a load."""
        if not torch.is_grad_enabled() and not model.is_gathered_once:
            unit.reshard()

    for router in model.model.routers:
        fully_shard(router, mesh=mesh, **offload)
    units = [*model.model.layers, *ends, model]
    for module in units:
        stays = model.keeps_gathered or module in (model.lm_head, model)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not stays, **offload)
        if stays:
            module.register_forward_hook(free_without_backward)
    if mesh.size() > 1:  # one rank would divide all gradients by 1
        for module in (*model.model.routers, *units):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    if ends:
        model.model.embed_tokens.set_unshard_in_backward(False)  # its gradient needs only the tokens


def load_policy(
    folder: str | Path,
    *,
    device: torch.device | str,
    mesh: DeviceMesh | None = None,
    precision: str = "float32",
    cpu_offload: bool = False,
    decoder: type[Decoder] = Decoder,
    model_config: ModelConfig | None = None,
    lora: LoRAConfig | None = None,
    frozen: bool = False,
    freeze_moe_router: bool = True,
    seed: int = 0,
    **options,
) -> Decoder:
    """The model of an HF folder with float32 parameters, sharded over `mesh`; without one, whole on `device`. With
    `lora`, they are frozen and in `precision`, and new adapters, random by `seed`, do not change its outputs. `frozen`:
    a model that only scores, in `precision`. `options` are the keyword arguments of `Decoder`.

    A rank allocates and reads only its own shards. Raises ConfigError if the folder is unreadable, the model is
    not supported, or the weights do not match config.json.
    """
    with torch.device("meta"):
        model = decoder(model_config or read_model_config(Path(folder)), **options)
        if frozen:
            from lora import freeze

            freeze(model, getattr(torch, precision))
        if lora and lora.enabled:
            from lora import add_adapters

            add_adapters(model, lora, getattr(torch, precision))
        if freeze_moe_router:
            for router in model.model.routers:
                router.requires_grad_(False)
    if mesh is None:
        assert precision == "float32" and not cpu_offload, f"{precision=}, {cpu_offload=}: these need a mesh"
    else:
        shard(model, mesh, precision=precision, cpu_offload=cpu_offload)
    model.to_empty(device="cpu" if cpu_offload else device)
    model.model.init_buffers(device)
    load_weights(model, folder)
    if lora and lora.enabled:
        from base.hf.adapters import init_adapters

        init_adapters(model, lora.lora_A_init, seed)
    return model
