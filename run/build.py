"""Builds the parts of a run from its config: head and loss, policy, reference, engine and sampler."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import activate_flash_attention_impl

from attention import uses_flash_attention
from base.hf.model_config import ModelConfig, NativeConfig
from base.hf.weights import full_shapes
from base.inputs.run_inputs import RunInputs
from base.system.progress import Progress
from base.system.ranks import Ranks, fsdp_mesh, seed_everything
from config import Config, ConfigError, GenerationConfig
from engine import VLLMEngine, reply_parsers
from head import HeadOptions, LossOptions, LossPath, choose_loss_path
from kernels.backend import choose_backend
from loss import policy_loss
from model import Decoder, load_policy
from records import Engine
from rollout import Sampler
from run import checkpoint

if TYPE_CHECKING:
    from base.agents.endpoint import Endpoint
    from kernels.filter import SamplingFilter
    from reference import Reference
    from run.served_teacher import ServedTeacher
    from run.split.generators import Generators

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py
CPU_LATENT_SIZE = 576  # vllm/v1/attention/backends/mla/cpu_mla.py
CPU_EXPERTS_MULTIPLE = 32  # CPUUnquantizedExperts.output_alignment of vllm/.../fused_moe/experts/cpu_moe.py


def loss_path_of(cfg: Config) -> LossPath:
    """How this run computes the gradient of its loss."""
    return choose_loss_path(
        policy_loss,
        cfg.loss_fn,
        has_old=cfg.needs_old_logps,
        has_ref=cfg.has_reference,
        filtered=sampling_filter_of(cfg.policy.generation) is not None,
        allow_pack_dependence=cfg.grpo.allow_pack_dependence,
    )


def build_head(cfg: Config, inputs: RunInputs, device: torch.device) -> HeadOptions:
    """What the run computes from the logits, and how."""
    policy = cfg.policy
    if policy.kernel_backend == "triton" and device.type != "cuda":
        raise ConfigError("policy.kernel_backend=triton needs CUDA: set it to auto or torch")
    pack_rows = policy.pack_tokens(device.type)
    loss = LossOptions(path=loss_path_of(cfg))
    if compiles(policy.compile, device.type):
        from compiled_loss import compiled_loss  # importing the compiler takes seconds

        call, kernels = compiled_loss(policy_loss, cfg.loss_fn, device, cfg.needs_old_logps, cfg.has_reference)
        loss = replace(loss, call=call, kernels=kernels)
    return HeadOptions(
        temperature=policy.generation.temperature,
        vocab=inputs.tokenizer.vocab_size,
        sampling_filter=sampling_filter_of(policy.generation),
        backend=choose_backend(policy.kernel_backend, device.type, policy.logprob_chunk_size, pack_rows),
        softcap=inputs.model_config.softcap,
        loss=loss,
    )


def sampling_filter_of(cfg: GenerationConfig) -> "SamplingFilter | None":
    """None where top_p and top_k keep all tokens."""
    if cfg.top_p == 1 and not cfg.top_k:
        return None
    from kernels.filter import SamplingFilter  # a run that samples from all tokens does without

    return SamplingFilter(cfg.top_p, cfg.top_k)


def reference_dtype(cfg: Config) -> torch.dtype:
    """The precision of the forward, but float32 for a reference that is an average of policies."""
    return torch.float32 if cfg.grpo.ref_policy_update_alpha < 1 else getattr(torch, cfg.policy.precision)


def build_reference(
    cfg: Config, inputs: RunInputs, model: Decoder, device: torch.device
) -> "Reference | ServedTeacher | None":
    """What the KL is to, if there is one: the policy as it is now, or a teacher. A collective."""
    if not cfg.has_reference:
        return None
    policy = cfg.policy
    if inputs.teacher_server:
        from run.served_teacher import ServedTeacher  # a run without one does not import it

        return ServedTeacher(inputs.teacher_server)
    from reference import Reference, Teacher

    if inputs.reference_model is None:
        return Reference(model, reference_dtype(cfg))
    folder, model_config = inputs.reference_model
    offloads = policy.dtensor_cfg.cpu_offload
    teacher = load_policy(
        folder,
        device=device if offloads else "cpu",  # where its buffers lie
        mesh=fsdp_mesh(device.type, policy.dtensor_cfg.dp_replicate_size),
        precision=policy.precision,
        cpu_offload=offloads,
        model_config=model_config,
        frozen=True,
    )
    return Teacher(teacher)


def compiles(option: bool | None, device_type: str) -> bool:
    """What policy.compile means on "cuda" or "cpu": null compiles on CUDA. ConfigError if nothing can compile."""
    is_cuda = device_type == "cuda"
    is_wanted = is_cuda if option is None else option
    if not is_wanted:
        return False
    is_off = torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    candidates = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    has_compiler = any(shutil.which(name) for name in candidates)
    if not is_cuda or is_off or not has_compiler:
        raise ConfigError(
            "policy.compile needs a GPU, a C compiler (gcc, clang, or the one named in CC), and no "
            "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE; or set policy.compile=false"
        )
    return True


def build(
    cfg: Config,
    inputs: RunInputs,
    ranks: Ranks,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    *,
    keeps_gathered: bool = False,
) -> "tuple[Decoder, Sampler | Generators]":
    """The policy, and the sampler with its engine, which has no weights yet and sleeps. In a split job these are
    `Generators`. stop: as in `build_sampler`. A collective of all ranks that train."""
    model = build_policy(cfg, inputs, ranks, device, keeps_gathered)
    if ranks.bridge:
        from run.split.generators import GeneratingEngines, Generators

        return model, Generators(ranks, GeneratingEngines(ranks.bridge, full_shapes(model), inputs.tokenizer, cfg))
    sampler = build_sampler(cfg, inputs, ranks, device, stop)
    sampler.engine.sleep()
    return model, sampler


def build_policy(
    cfg: Config, inputs: RunInputs, ranks: Ranks, device: torch.device, keeps_gathered: bool = False
) -> Decoder:
    """The sharded policy with float32 master weights. keeps_gathered: of the memory plan. A collective of all ranks
    that train."""
    policy = cfg.policy
    if policy.deterministic_attention:  # before the first matmul: Decoder.backward has torch refuse it otherwise
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False
    is_native = isinstance(inputs.model_config, NativeConfig)
    compiled = is_native and compiles(policy.compile, device.type)
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
            freeze_moe_router=policy.freeze_moe_router,
            seed=cfg.grpo.seed,
            recompute=policy.dtensor_cfg.activation_checkpointing,
            defers_sync=policy.dtensor_cfg.defer_fsdp_grad_sync,
            keeps_gathered=keeps_gathered,
            deterministic=policy.deterministic_attention,
        )
    if compiled:
        model.compile_blocks()
    if policy.router_replay.enabled:
        from router_replay import RouterReplay  # a run without it does not import it

        chooses = policy.router_replay.measure_only
        model.model.replay = RouterReplay(model.model.routers, inputs.model_config.num_experts, chooses)
    size = sum(param.numel() for param in model.parameters())
    num_trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    trained = f", {num_trained / 1e6:,.2f} M of them trained" if num_trained < size else ""
    if inputs.model_config.num_experts and policy.dtensor_cfg.lora_cfg.enabled:
        trained += " (no experts or routers)"
    shards = " x ".join(map(str, mesh.shape))
    kept = ", weights stay gathered" if keeps_gathered else ""
    attention = choose_attention(device, getattr(torch, policy.precision))
    kind = "compiled" if compiled else "eager"
    if not is_native:
        kind = "transformers'"
    ranks.print_rank0(
        f"policy: {size / 1e6:,.1f} M parameters{trained}, {policy.precision}, FSDP2 over {shards} ranks"
        f"{kept}; "
        f"attention: {attention}; "
        f"{kind} blocks; packs of {policy.pack_tokens(device.type):,} tokens"
    )
    return model


def choose_attention(device: torch.device, dtype: torch.dtype) -> str:
    """What computes attention. varlen_attn is FlashAttention 2; on Hopper this makes it 3, if its package is there."""
    if not uses_flash_attention(device.type, dtype):
        return "SDPA, one call for each group of equal lengths"
    if find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability(device) != (9, 0):
        return "varlen_attn"
    activate_flash_attention_impl("FA3")
    return "varlen_attn, FlashAttention 3"


def build_sampler(
    cfg: Config, inputs: RunInputs, ranks: Ranks, device: torch.device, stop: Callable[[], bool]
) -> Sampler:
    """The sampler with its engine, awake and without weights. stop: whether to give up generation and grading, as this
    rank sees it. A collective of the ranks that generate."""

    def should_stop() -> bool:
        return ranks.any_rank_of_engine(stop())

    check_cpu_sizes(inputs.model_config, device.type)
    if device.type == "cpu":
        check_cpu_operators(inputs.model_config, cfg)
    reward_model = None
    if inputs.reward_model:
        from run.reward_model import RewardModel

        reward_model = RewardModel(*inputs.reward_model, cfg, device)
    with Progress("start, 2 of 3: vLLM engine"):
        engine = VLLMEngine(inputs.model_folder, inputs.model_config, inputs.tokenizer, cfg, should_stop)
    engines = f"{ranks.dp_size} x vLLM over {ranks.tp_size} ranks each"
    ranks.print_rank0(f"engine: {engines}, {engine.runner}, vocabulary {engine.vocab_size:,}")
    endpoint = None
    if cfg.env.agents:
        agents = [inputs.environments[agent.name] for agent in cfg.env.agents if agent.name in inputs.environments]
        endpoint = build_endpoint(cfg, inputs, ranks, engine, agents=agents)
    limits = cfg.grpo.max_rollout_turns, cfg.env.max_error_fraction, cfg.env.max_crashed_fraction
    ahead = None
    if cfg.grpo.async_grpo.enabled or ranks.generates:
        from ahead import Ahead

        ahead = Ahead()
    return Sampler(engine, inputs.tokenizer, inputs.environments, ranks, *limits, reward_model, endpoint, ahead, stop)


def build_endpoint(cfg: Config, inputs: RunInputs, ranks: Ranks, engine: Engine, **options) -> "Endpoint":
    """options: of Endpoint."""
    from base.agents.endpoint import Endpoint  # a run without agents imports nothing of them
    from base.agents.parser import ReplyParser

    server = cfg.policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    parse = ReplyParser(reply_parsers(), inputs.tokenizer, server)
    return Endpoint(engine, inputs.tokenizer, ranks, parse, **options)


def check_cpu_sizes(model: ModelConfig, device_type: str) -> None:
    """ConfigError for heads or experts of a size that vLLM does not compute on "cpu". It pads experts' inner size."""
    if device_type != "cpu":
        return
    problem = None
    name, computed = "head_dim", CPU_HEAD_SIZES
    size = next((layer.head_dim for layer in model.of_layers if layer.head_dim not in computed), model.head_dim)
    if model.family.qkv == "latent":
        _, size = model.cached_dims
        name, computed = "kv_lora_rank + qk_rope_head_dim", (CPU_LATENT_SIZE,)
    if size not in computed:
        problem = f"{name}={size}: on a CPU vLLM computes heads of {', '.join(map(str, computed))} dims"
    elif model.num_experts and model.hidden_size % CPU_EXPERTS_MULTIPLE:
        sizes = f"multiples of {CPU_EXPERTS_MULTIPLE}"
        problem = f"hidden_size={model.hidden_size}: on a CPU vLLM computes experts of {sizes}"
    if problem:
        raise ConfigError(f"policy.model_name: {problem}: use another model, or a GPU")


def check_cpu_operators(model: ModelConfig, cfg: Config) -> None:
    """ConfigError for what vLLM does not compute on a CPU."""
    problem = None
    has_delta_nets = model.family.state is not None and model.family.state.module == "linear_attn"
    if has_delta_nets and cfg.policy.engine_precision == "float32":
        problem = "on a CPU vLLM computes gated delta nets in bfloat16 alone"
    elif model.num_experts and model.family.experts.gate is None:
        problem = "on a CPU vLLM computes no experts without a gate"
    elif model.hf["model_type"].startswith("qwen3_5") and find_spec("torchvision") is None:
        problem = "vLLM's Qwen3.5 needs torchvision, of which PyTorch's own index has a build for CPUs"
    if problem:
        raise ConfigError(f"policy.model_name: model_type={model.hf['model_type']!r}: {problem}: use a GPU")


def hash_of_base(cfg: Config, inputs: RunInputs, ranks: Ranks) -> str | None:
    """With LoRA, the fingerprint of the base weights."""
    return checkpoint.weights_sha256(inputs.model_folder, ranks) if cfg.policy.dtensor_cfg.lora_cfg.enabled else None
