"""Counts the bytes of tensors that are alive in the phases of a step on this rank: meta tensors stand for a GPU's."""

import math
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import sampled
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import grpo
import state
from attention import PackLayout
from base.hf.folder import from_hf
from base.hf.layers import DELTA_CHUNK
from base.hf.model_config import ModelConfig
from base.hf.weights import full_tensors
from base.plan import memory_plan
from base.plan.memory_plan import CONTEXT, Plan
from config import (
    Config,
    DataConfig,
    DatasetConfig,
    DTensorConfig,
    GenerationConfig,
    LoRAConfig,
    LossConfig,
    OptimizerConfig,
    OptimizerKwargs,
    PolicyConfig,
    SequencePackingConfig,
)
from head import HeadOptions, LossOptions, LossPath, response_logps
from kernels import row_kernels
from kernels.backend import KernelBackend
from lora import add_adapters
from model import RECOMPUTED, Block, Decoder, body_of, rope_cos_sin, shard
from optim import build_optimizer
from pack import MicroBatch, Minibatch, pack_samples, rows_of, to_device
from records import Grade


class LiveBytes(TorchDispatchMode):
    """`largest`: of all bytes of storages that operations made and that were alive at once; `largest_one`: of one.
    With device="meta", meta tensors are those of a GPU, and only they count."""

    def __init__(self, device=None):
        super().__init__()
        self.device = device
        self.storages = {}
        self.largest = self.largest_one = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes again as what it does to the parts
        if function.is_view:  # two in five of all operations
            return function(*args, **kwargs or {})
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        result = self.call(function, args, kwargs or {})
        # AsyncCollectiveTensor says that it has a storage of its own.
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and not isinstance(x, AsyncCollectiveTensor)]
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in made if self.counts(x)}
        for key in storages.keys() - given:
            self.storages[key] = StorageWeakRef(storages[key])
            self.largest_one = max(self.largest_one, storages[key].nbytes())
        if storages.keys() - given:
            self.largest = max(self.largest, self.now())
        return result

    def counts(self, x) -> bool:
        return self.device in (None, x.device.type)

    def call(self, function, args, kwargs):
        """What goes from a GPU that is not there to host memory has no numbers."""
        name, first = function.overloadpacket.__name__, args[0] if args else None
        on_gpu = self.device == "meta" and isinstance(first, Tensor) and first.device.type == "meta"
        if name == "copy_" and self.device == "meta" and not on_gpu and args[1].device.type == "meta":
            return first
        if name == "_to_copy" and on_gpu and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return torch.empty(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        if name == "_wrap_tensor_autograd" and on_gpu:
            return first.detach()  # as with numbers; for meta tensors it is another one
        return function(*args, **kwargs)

    def now(self) -> int:
        """Read anew: FSDP frees storages without freeing their tensors."""
        every = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self.storages.items()}
        alive = {key: storage.nbytes() for key, storage in every.items() if storage is not None}
        self.storages = {key: self.storages[key] for key in alive}
        return sum(alive.values())


SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
NUM_TOKENS = 256


def model_config(family="qwen3", tied=False, **sizes) -> ModelConfig:
    hf = {"model_type": family, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    if family == "qwen3_moe":
        hf |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    return from_hf(hf | SIZES | {"vocab_size": 4096, "num_hidden_layers": 2, "head_dim": 32} | sizes)


def run_config(precision="bfloat16", recompute=True, lora=False, **policy) -> Config:
    """Of packs of NUM_TOKENS, without a reference, and without prompts, which would share their keys."""
    dtensor = DTensorConfig(activation_checkpointing=recompute, lora_cfg=LoRAConfig(enabled=lora))
    keys = {"sequence_packing": SequencePackingConfig(train_mb_tokens=NUM_TOKENS), "dtensor_cfg": dtensor}
    keys |= {"max_total_sequence_length": 64, "generation": GenerationConfig(max_new_tokens=64)}
    policy = PolicyConfig(precision=precision, **keys | policy)
    data = DataConfig(train=(DatasetConfig(data_path="x"),), validation=(DatasetConfig(data_path="x"),))
    return Config(policy=policy, loss_fn=LossConfig(reference_policy_kl_penalty=0.0), data=data)


def make_micro(vocab: int, num_tokens: int, device: str) -> tuple[MicroBatch, Minibatch]:
    """(a pack of num_tokens in four sequences, all of them response tokens, and its minibatch)."""
    length = num_tokens // 4
    ids = np.random.default_rng(0).integers(0, vocab, (4, length + 1), np.int32)
    samples = []
    for i, row in enumerate(ids):
        samples.append(sampled(i, 0, [row[0]], row[1:], logp=-8, grade=Grade(1.0), advantage=0.5 - i))
    (pack,) = pack_samples([[row] for row in rows_of(samples)], num_tokens)
    micro = to_device(pack, torch.device(device))
    counts = {"num_tokens": num_tokens, "num_trained_samples": 4, "num_positive_tokens": 1}
    return micro, Minibatch([micro], num_tokens, **counts, version=0)


def count_step(model_config: ModelConfig, cfg: Config, mesh, keeps_gathered: bool, padded=False) -> dict[str, int]:
    """Bytes of this rank on the GPU: weights, moments and gradients, and the most at once while a step scores, trains
    three packs and sends the weights: the second keeps what the last one frees. It is the second step, which finds the
    moments."""
    policy, device = cfg.policy, "meta"
    micro, minibatch = make_micro(model_config.vocab_size, policy.sequence_packing.train_mb_tokens, device)
    recompute = policy.dtensor_cfg.activation_checkpointing
    with torch.device("meta"):
        model = Decoder(model_config, recompute=recompute, keeps_gathered=keeps_gathered)
        for router in model.model.routers:
            router.requires_grad_(False)
        if policy.dtensor_cfg.lora_cfg.enabled:
            add_adapters(model, policy.dtensor_cfg.lora_cfg, getattr(torch, policy.precision))
    offloads = policy.dtensor_cfg.cpu_offload
    shard(model, mesh, precision=policy.precision, cpu_offload=offloads)
    model.to_empty(device="cpu" if offloads else device)
    model.model.init_buffers(device)
    for param in model.parameters():
        param.detach().to_local().normal_(0, 0.02)
    head_options = HeadOptions(backend=KernelBackend("triton"), loss=LossOptions(path=LossPath("one pass")))
    model.defers_sync |= policy.dtensor_cfg.defer_fsdp_grad_sync
    optimizer = build_optimizer(model, policy.optimizer, offloads=policy.offload_optimizer_for_logprob)

    def size(tensors):
        return sum(x.to_local().nbytes for x in tensors if x.to_local().device.type == device)

    weights, counts = size(model.parameters()), {}
    with LiveBytes(device) as live:

        def count(phase):
            counts[phase], live.largest = weights + live.largest, 0

        for num_packs in (1, 3):  # of the first step, which makes the moments, a pack is enough
            live.largest = 0
            with torch.no_grad(), model.gathered_once():
                for _ in range(2):
                    response_logps(model, micro.model_inputs, micro.target_R, head_options)
            count("score")
            minibatch.micros = [replace(micro) for _ in range(num_packs)]
            grpo.compute_gradients(model, head_options, minibatch, cfg)
            gradients = size(param.grad for param in model.parameters() if param.requires_grad)
            optimizer.step()
            count("train")
            optimizer.zero_grad(set_to_none=True)
            live.largest = 0
            as_vllm_takes(full_tensors(model, getattr(torch, policy.precision)), model_config, padded)
            count("sync")
    moments = size(x for state in optimizer.state.values() for x in state.values() if x.dim())
    return counts | {"weights": weights, "moments": moments, "gradients": gradients}


PARTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def as_vllm_takes(weights, model: ModelConfig, padded: bool) -> None:
    """By its layerwise reload (vllm/model_executor/model_loader/reload): tensors wait until their layer has all of
    them; then it is filled, and copied to where it was. All experts of a block are one layer. What is padded never has
    all, and waits for the end."""
    num_parts = {"qkv": 3, "gate_up": 2}
    if model.num_experts:
        num_parts["experts"] = len(model.family.experts.matrices) * model.num_experts
    waiting = defaultdict(list)
    for name, tensor in weights:
        *_, part, kind = name.split(".")
        layer = "experts" if ".experts." in name else PARTS.get(part, part)
        waiting[layer, kind].append(tensor)
        is_whole = len(waiting[layer, kind]) == num_parts.get(layer, 1)
        if is_whole and not (padded and part in ("embed_tokens", "lm_head")):
            torch.cat([x.flatten() for x in waiting.pop((layer, kind))])
        del tensor
    for tensors in waiting.values():
        torch.cat([x.flatten() for x in tensors])


class DeltaRule(torch.autograd.Function):
    """Allocates what fla's kernels do (fla-core 0.6.0, ops/gated_delta_rule/chunk.py and what that calls)."""

    @staticmethod
    def forward(ctx, query, key, value, g, beta, state):
        b, num_tokens, heads, key_dim = query.shape
        of_row = {"device": query.device, "dtype": torch.float32}
        norms = [torch.empty(b, num_tokens, heads, **of_row) for _ in range(3)]  # and g, summed
        query, key = query.clone(), key.clone()  # of unit length
        solved = torch.empty(b, num_tokens, heads, DELTA_CHUNK, dtype=key.dtype, device=key.device)
        inner = [key.clone(), value.clone(), value.clone()]
        chunks = math.ceil(num_tokens / DELTA_CHUNK)
        inner.append(torch.empty(chunks, heads, key_dim, value.shape[-1], dtype=key.dtype, device=key.device))
        num_sequences = 1 if state is None else len(state)
        end = torch.empty(num_sequences, heads, key_dim, value.shape[-1], **of_row)
        ctx.save_for_backward(query, key, value, g, beta, state, solved, *norms)
        return value.clone(), end

    @staticmethod
    def backward(ctx, grad, grad_end):
        query, key, value, g, beta, state, *_ = ctx.saved_tensors
        chunks = math.ceil(query.shape[1] / DELTA_CHUNK)
        shape = chunks, query.shape[2], query.shape[3], value.shape[3]
        inner = [key.clone(), value.clone(), value.clone(), value.clone()]  # w, u, the new values, their gradient
        # The states of all chunks, and their gradient.
        inner += [torch.empty(shape, dtype=key.dtype, device=key.device) for _ in range(2)]
        grads = [query.clone(), key.clone(), key.clone(), value.clone()]
        inner += [key.clone(), value.clone()]
        grad_state = None if state is None else state.clone()
        return query.clone(), key.clone(), grads[-1], g.clone(), beta.clone(), grad_state


def patch_delta_rule(patch: pytest.MonkeyPatch, has_fla: bool = True) -> None:
    """Layers with state compute as on a GPU, with or without fla's kernels, which do nothing."""

    def on_gpu(function, x):
        if has_fla and function.__name__ == "torch_chunk_gated_delta_rule":
            return delta_rule
        return function

    def delta_rule(query, key, value, *, g, beta, initial_state=None, **_):
        return DeltaRule.apply(query, key, value, g, beta, initial_state)

    patch.setattr(state, "takes_bounds", lambda _: has_fla)
    patch.setattr(state, "_of_device", on_gpu)
    patch.setattr(memory_plan, "HAS_FLA", has_fla)


@contextmanager
def meta_gpu():
    """Meta tensors are a GPU's: FSDP puts what it gathers there, and CUDA's branches compute there. Kernels do nothing,
    and collectives neither."""
    fsdp = torch.distributed.fsdp._fully_shard
    meta, from_local = torch.device("meta"), DTensor.from_local
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp._fully_shard, "_get_device_from_mesh", lambda mesh: meta)
        for module in (fsdp._fsdp_collectives, fsdp._fsdp_param_group, fsdp._fsdp_state):
            patch.setattr(module, "_get_device_handle", lambda kind: torch.cpu)
        patch.setattr(fsdp._fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None)
        for collective in (fsdp._fsdp_collectives.DefaultAllGather, fsdp._fsdp_collectives.DefaultReduceScatter):
            patch.setattr(collective, "__call__", lambda *_, **__: None)
        moved = staticmethod(lambda local, *args: from_local(local.to(meta), *args))  # as a mesh of GPUs does
        patch.setattr(DTensor, "from_local", moved)
        patch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_, **__: None)
        patch.setattr(attention, "uses_flash_attention", lambda *_: True)
        patch_delta_rule(patch)
        for name in ("row_stats_kernel", "dlogits_kernel"):
            patch.setattr(row_kernels, name, defaultdict(lambda: lambda *_, **__: None))
        yield


def count_kept(
    model_config: ModelConfig, *, dtype=torch.bfloat16, prefix=0, responses=(64,), wrap=None, recompute=False
) -> float:
    """Bytes that a block keeps for its backward, for each token of a pack. wrap: of its halves, such as torch.compile.
    prefix: length of a prompt that the responses share."""
    device = "meta"
    with torch.device(device):
        block = Block(model_config).to(dtype)
    block.recomputed = RECOMPUTED if recompute else None
    if wrap:
        block.halves = tuple(map(wrap, block.halves))
    cu_seqlens = np.cumsum([0, *filter(None, [prefix]), *responses])
    prefix_S = np.array([-1] + [0] * len(responses)) if prefix else None
    num_tokens = int(cu_seqlens[-1])
    layout = PackLayout.of(cu_seqlens, prefix_S, num_tokens, torch.device(device))
    cos_sin = rope_cos_sin(model_config, torch.arange(num_tokens, device=device))
    hidden_TD = torch.randn(num_tokens, model_config.hidden_size, device=device, requires_grad=True)
    shared = [*block.parameters(), *cos_sin, layout.cu_queries, layout.cu_keys, *(layout.key_rows or ())]
    not_counted = {x.untyped_storage()._cdata for x in shared}
    kept = {}

    def pack(x):
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = block(hidden_TD, *cos_sin, layout)
    assert out.shape == hidden_TD.shape
    return sum(size for key, size in kept.items() if key not in not_counted) / num_tokens


def count_kept_by_transformers(model_config: ModelConfig, num_tokens=2048, block_number=-1) -> float:
    """Bytes that a block of transformers keeps for its backward, for each token of a pack, in bfloat16."""
    with torch.device("meta"):
        body = body_of(model_config, recompute=False)
    of_routers = {param for router in body.routers for param in router.parameters()}
    for param in body.parameters():
        if param in of_routers:
            param.requires_grad_(False)
        else:
            param.data = param.data.bfloat16()
    not_counted = {x.untyped_storage()._cdata for x in (*body.parameters(), *body.buffers())}
    kept = {}

    def pack(x):
        kept[x.untyped_storage()._cdata] = x
        return x

    block = body.layers[block_number]
    forward = block.forward

    def counted(*args, **kwargs):
        not_counted.update(x.untyped_storage()._cdata for x in kwargs.get("position_embeddings") or ())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return forward(*args, **kwargs)

    block.forward = counted
    layout = PackLayout.of(np.array([0, num_tokens]), None, num_tokens, torch.device("meta"))
    token_T = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
    body(token_T, torch.zeros_like(token_T), layout)
    return sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in not_counted) / num_tokens


CASES = {  # name -> (family and whether tied, keys of run_config)
    "qwen3": (("qwen3", False), {}),
    "qwen3 tied": (("qwen3", True), {}),
    "llama, all kept": (("llama", False), {"recompute": False}),
    "qwen3, one block of two": (("qwen3", False), {"recompute": 1}),
    "qwen3, inputs on the host": (("qwen3", False), {"recompute": "offload"}),
    "experts, inputs on the host": (("qwen3_moe", False), {"recompute": "offload"}),
    "lora, inputs on the host": (("llama", True), {"recompute": "offload", "lora": True}),
    "qwen2 float32": (("qwen2", True), {"precision": "float32"}),
    "lora": (("qwen3", False), {"lora": True}),
    "lora float32 tied, all kept": (("llama", True), {"lora": True, "recompute": False, "precision": "float32"}),
    "bfloat16 moments": (
        ("qwen3", True),
        {"optimizer": OptimizerConfig(kwargs=OptimizerKwargs(state_dtype="bfloat16"))},
    ),
    "mistral": (("mistral", False), {"recompute": False}),
    "gemma 3": (("gemma3_text", True), {"recompute": 1}),
    "experts": (("qwen3_moe", False), {"recompute": False}),
    "experts, a block again": (("qwen3_moe", False), {}),
    "muon": (("qwen2", False), {"optimizer": OptimizerConfig(name="torch.optim.Muon")}),
}


def differences(name: str, mesh, vocab=4096, gpu_bytes=None, **offload) -> dict[str, tuple[float, int]]:
    """(planned, counted) of what the plan has wrong by more than 2%, in a case of CASES with these keys of PolicyConfig
    or DTensorConfig. With gpu_bytes, on a GPU of so many."""
    model, keys = CASES[name]
    model, cfg = model_config(*model), run_config(**keys, compile=False)
    replicas = mesh.size(0) if mesh.ndim > 1 else 1
    own = {key: offload.pop(key) for key in ("cpu_offload", "defer_fsdp_grad_sync") if key in offload}
    dtensor = replace(cfg.policy.dtensor_cfg, dp_replicate_size=replicas, **own)
    cfg = replace(cfg, policy=replace(cfg.policy, dtensor_cfg=dtensor, **offload))
    found = planned_and_counted(Plan(cfg, model, vocab, mesh.size(), gpu_bytes), mesh)
    return {item: sizes for item, sizes in found.items() if abs(sizes[0] - sizes[1]) > 0.02 * sizes[1]}


def planned_and_counted(plan: Plan, mesh) -> dict[str, tuple[float, int]]:
    """Weights, moments, gradients, and each phase of a step -> bytes."""
    states = plan.states(gradients=True)
    planned = {item: states.get(item, 0) for item in plan.shards}
    planned |= {phase: plan.size(phase) - CONTEXT for phase in ("train", "score", "sync")}
    planned["sync"] -= plan.woken
    with meta_gpu():
        counted = count_step(plan.model, plan.cfg, mesh, plan.keeps_gathered, padded=plan.vocab % 64 > 0)
    return {item: (planned[item], size) for item, size in counted.items()}
