"""Builds what a run holds from its config: the sharded policy, its loss path, the engine and the sampler over it.

Nothing here computes a loss, an advantage or a pack.
"""

import os
import shutil

import torch

import config
from batch import needs_old_logps
from check.preflight import RunInputs
from engine import Engine
from hf.weights import full_shapes, load_adapter
from kernels import KernelBackend, LossPath, SamplingFilter, choose_backend
from loss import policy_loss
from loss_path import choose_loss_path
from model import Decoder, load_policy, uses_flash_attention
from rollout import Sampler
from run import checkpoint
from run.generators import Generators
from run.reward_model import RewardModel
from run.rollouts import NoEngine
from system.progress import Progress
from system.ranks import Ranks, fsdp_mesh, seed_everything


def loss_path_of(cfg: config.Config, backend: KernelBackend, device: torch.device) -> LossPath:
    """How the loss of this run is trained."""
    return choose_loss_path(
        policy_loss,
        cfg.loss_fn,
        has_old=needs_old_logps(cfg),
        has_ref=cfg.loss_fn.reference_policy_kl_penalty > 0,
        filtered=sampling_filter_of(cfg.policy.generation) is not None,
        backend=backend,
        device=device,
    )


def sampling_filter_of(cfg: config.GenerationConfig) -> SamplingFilter | None:
    """None where top_p and top_k keep all tokens."""
    return SamplingFilter(cfg.top_p, cfg.top_k) if cfg.top_p < 1 or cfg.top_k else None


def reference_dtype(cfg: config.Config) -> torch.dtype:
    """The precision of the forward, but float32 for a reference that is an average of policies."""
    return torch.float32 if cfg.grpo.ref_policy_update_alpha < 1 else getattr(torch, cfg.policy.precision)


def compiles(option: bool | None, device_type: str) -> bool:
    """What policy.compile means on "cuda" or "cpu". ConfigError where that cannot be."""
    compiled = device_type == "cuda" if option is None else option
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton looks for one
    problem = None
    if device_type != "cuda":
        problem = "on CPU PyTorch's compiler is off, for vLLM's sampler too; leave this null"
    elif torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        problem = "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE has turned PyTorch's compiler off; unset both"
    elif not any(map(shutil.which, compilers)):
        problem = f"Triton needs a C compiler, there is no {' or '.join(compilers)}; install gcc, or name yours in CC"
    if compiled and problem:
        raise config.ConfigError(f"policy.compile: {problem}, or set policy.compile=false")
    return compiled


def build(
    cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device
) -> tuple[Decoder, Engine | Generators, Sampler | Generators]:
    """The sharded policy with float32 master weights, the engine, which has no weights yet and sleeps, and the sampler
    over it; in a split job the generators are both, and a replay has none. A collective of all ranks that train."""
    policy = cfg.policy
    try:
        backend = choose_backend(policy.kernel_backend, device.type, policy.logprob_chunk_size)
    except ValueError as error:
        raise config.ConfigError(f"policy.kernel_backend: {error}") from error
    compiled = compiles(policy.compile, device.type)
    seed_everything(cfg.grpo.seed)
    mesh = fsdp_mesh(device.type, policy.dtensor_cfg.dp_replicate_size)
    with Progress("start, 1 of 3: weights of the policy"):
        model = load_policy(
            inputs.model_folder,
            device=device,
            mesh=mesh,
            precision=policy.precision,
            cpu_offload=policy.dtensor_cfg.cpu_offload,
            model_config=inputs.model_config,
            lora=policy.dtensor_cfg.lora_cfg,
            seed=cfg.grpo.seed,
            temperature=policy.generation.temperature,
            sampling_filter=sampling_filter_of(policy.generation),
            vocab_limit=inputs.tokenizer.vocab_size,
            recompute=policy.dtensor_cfg.activation_checkpointing,
            backend=backend,
            loss_path=loss_path_of(cfg, backend, device),
        )
    if compiled:
        model.compile_blocks()
    size = sum(param.numel() for param in model.parameters())
    num_trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    trained = f", {num_trained / 1e6:,.2f} M of them trained" if num_trained < size else ""
    shards = " x ".join(map(str, mesh.shape))
    flash = uses_flash_attention(device.type, getattr(torch, policy.precision))
    ranks.print_rank0(
        f"policy: {size / 1e6:,.1f} M parameters{trained}, {policy.precision}, FSDP2 over {shards} ranks; "
        f"{backend.describe(model.config.vocab_size)}; {model.loss_path.describe()}; "
        f"attention: {'varlen_attn' if flash else 'SDPA by runs of equal length'}; "
        f"{'compiled' if compiled else 'eager'} blocks; packs of {policy.pack_tokens(device.type):,} tokens; "
        f"{'no engine' if cfg.grpo.replay_rollouts else 'starting the engine'}"
    )
    if cfg.grpo.replay_rollouts:
        return model, NoEngine(), NoEngine()
    if ranks.bridge:
        generators = Generators(ranks.bridge, full_shapes(model), inputs.tokenizer, cfg)
        return model, generators, generators
    sampler = build_sampler(cfg, inputs, ranks, device)
    sampler.engine.sleep()
    return model, sampler.engine, sampler


def build_sampler(cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device) -> Sampler:
    """The sampler and in it the engine, awake and without weights. A collective of the ranks that generate: they share
    the reward model, too."""
    score = None
    if inputs.reward_model:
        score = RewardModel(*inputs.reward_model, cfg, device, fsdp_mesh(device.type)).score
    with Progress("start, 2 of 3: vLLM engine"):
        engine = Engine(inputs.model_folder, inputs.model_config, inputs.tokenizer, cfg)
    ranks.print_rank0(
        f"engine: {ranks.dp_size} x vLLM over {ranks.tp_size} ranks each, vocabulary {engine.vocab_size:,}"
    )
    max_turns, max_errors = cfg.grpo.max_rollout_turns, cfg.env.max_error_fraction
    return Sampler(engine, inputs.tokenizer, inputs.environments, ranks, max_turns, max_errors, score)


def read_adapter(cfg: config.Config, inputs: RunInputs, model: Decoder, ranks: Ranks) -> str | None:
    """With LoRA, the fingerprint of its base; a new run's adapters get the weights that the config names for them."""
    lora = cfg.policy.dtensor_cfg.lora_cfg
    if not lora.enabled:
        return None
    base_sha256 = checkpoint.weights_sha256(inputs.model_folder, ranks)
    if lora.adapter_path and not cfg.checkpointing.resume_from:
        load_adapter(model, lora.adapter_path, base_sha256)
    return base_sha256
