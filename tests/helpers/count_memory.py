"""Counts the bytes of tensors that are alive: of the phases of a step on this rank, on CPU."""

from types import SimpleNamespace

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo
from config import (
    Config,
    DTensorConfig,
    GenerationConfig,
    LoRAConfig,
    LossConfig,
    OptimizerConfig,
    OptimizerKwargs,
    PolicyConfig,
    SequencePackingConfig,
)
from hf.model_config import ModelConfig
from kernels import KernelBackend, LossPath
from lora import add_adapters
from model import Block, Decoder, PackLayout, rope_cos_sin, shard
from optim import build_optimizer
from run.memory_plan import Plan


class LiveBytes(TorchDispatchMode):
    """`largest`: of all bytes of storages that operations made and that were alive at once; `largest_one`: of one."""

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.largest = self.largest_one = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes again as what it does to the parts
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        result = function(*args, **kwargs or {})
        self.storages = {key: ref for key, ref in self.storages.items() if not ref.expired()}
        for storage in (x.untyped_storage() for x in tree_leaves(result) if torch.is_tensor(x)):
            if storage._cdata not in given:
                self.storages[storage._cdata] = StorageWeakRef(storage)
                self.largest_one = max(self.largest_one, storage.nbytes())
        self.largest = max(self.largest, self.now())
        return result

    def now(self) -> int:
        """Read anew: FSDP frees storages without freeing their tensors."""
        alive = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.storages.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
NUM_TOKENS = 256


def model_config(family="qwen3", tied=False, **sizes) -> ModelConfig:
    hf = {"model_type": family, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    return ModelConfig.from_hf(hf | SIZES | {"vocab_size": 4096, "num_hidden_layers": 3, "head_dim": 32} | sizes)


def run_config(precision="bfloat16", recompute=True, lora=False, **policy) -> Config:
    """Of packs of NUM_TOKENS, without a reference, and without prompts, which would share their keys."""
    dtensor = DTensorConfig(activation_checkpointing=recompute, lora_cfg=LoRAConfig(enabled=lora))
    keys = {"sequence_packing": SequencePackingConfig(train_mb_tokens=NUM_TOKENS), "dtensor_cfg": dtensor}
    keys |= {"max_total_sequence_length": 64, "generation": GenerationConfig(max_new_tokens=64)}
    policy = PolicyConfig(precision=precision, **keys | policy)
    return Config(policy=policy, loss_fn=LossConfig(reference_policy_kl_penalty=0.0))


def make_micro(vocab: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """(a pack of NUM_TOKENS, all of them response tokens, and its minibatch)."""
    token_T, target_T = torch.randint(0, vocab, (2, NUM_TOKENS))
    position_T = torch.arange(NUM_TOKENS) % 64
    cu_seqlens = np.arange(0, NUM_TOKENS + 1, 64)
    x_T = torch.randn(NUM_TOKENS)
    micro = SimpleNamespace(
        model_inputs=(token_T, position_T, cu_seqlens, torch.arange(NUM_TOKENS), target_T, None),
        old_logp_R=None,
        ref_logp_R=None,
        sampler_logp_R=torch.full((NUM_TOKENS,), -8.0),
        adv_R=x_T,
        reward_R=x_T,
        mask_R=torch.ones(NUM_TOKENS, dtype=torch.bool),
        seq_R=torch.arange(NUM_TOKENS) // 64,
        num_grad_rows=NUM_TOKENS,
    )
    return micro, SimpleNamespace(num_tokens=NUM_TOKENS, num_seqs=4, num_positive_tokens=1)


def count_step(model_config: ModelConfig, cfg: Config, mesh) -> dict[str, int]:
    """Bytes on this rank: of weights, moments and gradients, and the most at once while a step scores and trains two
    packs. It is the second step, which finds the moments."""
    policy = cfg.policy
    micro, minibatch = make_micro(model_config.vocab_size)
    with LiveBytes() as live:
        with torch.device("meta"):
            model = Decoder(model_config)
            if policy.dtensor_cfg.lora_cfg.enabled:
                add_adapters(model, policy.dtensor_cfg.lora_cfg, getattr(torch, policy.precision))
        shard(model, mesh, precision=policy.precision)
        for block in model.model["layers"]:
            block.recompute = policy.dtensor_cfg.activation_checkpointing
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.detach().to_local().normal_(0, 0.02)
        model.backend, model.loss_path = KernelBackend("torch"), LossPath("one pass")
        optimizer = build_optimizer(model, policy.optimizer)
        for _ in range(2):
            live.largest = 0
            with torch.no_grad():
                model(*micro.model_inputs)
            counts, live.largest = {"score": live.largest}, 0
            for _ in range(2):
                loss, _ = grpo.compute_loss(model, micro, minibatch, cfg)
                loss.backward()
                del loss
            trained = [param for param in model.parameters() if param.requires_grad]
            counts["gradients"] = sum(param.grad.to_local().nbytes for param in trained)
            optimizer.step()
            counts["train"] = live.largest
            optimizer.zero_grad(set_to_none=True)
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    counts["moments"] = sum(x.to_local().nbytes for x in moments)
    counts["weights"] = sum(param.to_local().nbytes for param in model.parameters())
    return counts


def adapted(model_config: ModelConfig, lora: LoRAConfig, dtype: torch.dtype) -> Block:
    """A block with adapters in the type that FSDP gathers them in."""
    model = Decoder(model_config)
    add_adapters(model, lora, dtype)
    return model.model["layers"][0].to(dtype)


def count_kept(
    model_config: ModelConfig,
    device: str,
    *,
    dtype=torch.bfloat16,
    prefix=0,
    responses=(64,),
    wrap=None,
    recompute=False,
    lora=None,
):
    """Bytes that a block keeps for its backward, for each token of a pack. wrap: of its halves, such as torch.compile.
    prefix: length of a prompt that the responses share."""
    with torch.device(device):
        block = Block(model_config).to(dtype)
    if lora and lora.enabled:
        block = adapted(model_config, lora, dtype)
    block.recompute = recompute
    if wrap:
        block.halves = tuple(map(wrap, Block.halves))
    cu_seqlens = np.cumsum([0, *filter(None, [prefix]), *responses])
    prefix_S = np.array([-1] + [0] * len(responses)) if prefix else None
    num_tokens = int(cu_seqlens[-1])
    layout = PackLayout.of(cu_seqlens, prefix_S, num_tokens, torch.device(device))
    cos_sin = rope_cos_sin(model_config, torch.arange(num_tokens, device=device))
    hidden_TD = torch.randn(num_tokens, model_config.hidden_size, device=device, requires_grad=True)
    shared = [*block.parameters(), *cos_sin, layout.cu_queries, layout.cu_keys]
    shared += [layout.key_rows] if prefix else []
    not_counted = {x.untyped_storage()._cdata for x in shared}
    kept = {}

    def pack(x):
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = block(hidden_TD, *cos_sin, layout)
    assert out.shape == hidden_TD.shape
    return sum(size for key, size in kept.items() if key not in not_counted) / num_tokens


CASES = {  # name -> (family and whether tied, keys of run_config)
    "qwen3": (("qwen3", False), {}),
    "qwen3 tied": (("qwen3", True), {}),
    "llama, all kept": (("llama", False), {"recompute": False}),
    "qwen2 float32": (("qwen2", True), {"precision": "float32"}),
    "lora": (("qwen3", False), {"lora": True}),
    "lora float32 tied, all kept": (("llama", True), {"lora": True, "recompute": False, "precision": "float32"}),
    "bfloat16 moments": (
        ("qwen3", True),
        {"optimizer": OptimizerConfig(kwargs=OptimizerKwargs(state_dtype="bfloat16"))},
    ),
    "muon": (("qwen2", False), {"optimizer": OptimizerConfig(name="torch.optim.Muon")}),
}


def differences(name: str, mesh) -> dict[str, tuple[float, int]]:
    """(planned, counted) of what the plan has wrong by more than 2%, in a case of CASES."""
    model, keys = CASES[name]
    model, cfg = model_config(*model), run_config(**keys)
    plan = Plan(cfg, model, model.vocab_size, mesh.size(), device="cpu")
    planned = plan.shards | {phase: plan.size(phase) for phase in ("train", "score")}
    counted = count_step(model, cfg, mesh)
    return {name: (planned[name], size) for name, size in counted.items() if abs(planned[name] / size - 1) > 0.02}
