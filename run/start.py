"""Starts a run: builds the policy, the engine and the sampler from the config, and restores a checkpoint."""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.attention import activate_flash_attention_impl

from ahead import AheadSampler
from attention import uses_flash_attention
from base.check import preflight
from base.check.preflight import data_lines, memory_plan, notes
from base.check.rules import must_save_by_seconds
from base.hf.model_config import ModelConfig, NativeConfig
from base.hf.weights import full_shapes
from base.inputs import reader
from base.inputs.resume import checkpoint_folder
from base.inputs.run_inputs import RunInputs, num_steps_of, read_inputs
from base.plan.memory_plan import OWN_CONTEXT, Plan
from base.system.exits import NO_PEERS, Signals, describe_failure, report_exit
from base.system.optimizer import Optimizer
from base.system.progress import Progress
from base.system.ranks import Ranks, expand_segments, fsdp_mesh, gather, on_rank0, seed_everything, start_process_group
from base.system.watchdog import Watchdog
from config import Config, ConfigError, GenerationConfig
from engine import VLLMEngine, reply_parsers
from gap import needs_old_logps
from head import HeadOptions, LossOptions, LossPath, choose_loss_path, compiled_loss
from kernels.backend import choose_backend
from kernels.filter import SamplingFilter
from loss import policy_loss
from model import Decoder, Reference, load_policy
from optim import build_optimizer
from records import Engine
from rollout import Sampler
from run import checkpoint
from run.folder import open_run_folder
from run.log import RunLog, Timers
from run.memory import Memory
from run.reward_model import RewardModel
from run.split import bridge
from run.split.generators import Generators, serve

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py
CPU_EXPERTS_MULTIPLE = 32  # CPUUnquantizedExperts.output_alignment of vllm/.../fused_moe/experts/cpu_moe.py


@dataclass(slots=True)
class RunState:
    """The run's counters, which checkpoints keep. There is no other state: sampling seeds are f(seed, step, prompt,
    sample), and the data order is f(seed, epoch)."""

    cursor: dict
    fingerprints: dict[str, str]
    step: int = 0
    num_bad_steps: int = 0
    total_valid_tokens: float = 0
    first_validation: dict[str, float] = field(default_factory=dict)
    last_validation: dict[str, float] = field(default_factory=dict)
    base_sha256: str | None = None  # of the weights that LoRA has frozen
    selections: dict[str, str] = field(default_factory=dict)  # of Mixture.saved_selections, when a checkpoint was saved


@dataclass
class Job:
    """What grpo.py and eval.py know before they build a model. watchdog: of a run that trains."""

    cfg: Config
    inputs: RunInputs
    ranks: Ranks
    device: torch.device
    folder: Path
    memory: Memory
    watchdog: Watchdog | None


@dataclass
class Run(Job):
    """Everything that lives from the first step to the last."""

    model: Decoder
    head_options: HeadOptions
    optimizer: Optimizer
    engine: Engine
    sampler: Sampler | Generators
    reference: Reference | None
    state: RunState
    saver: checkpoint.Saver
    signals: Signals
    timer: Timers
    num_steps: int
    log: RunLog | None = None  # rank 0's
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest step
    told_to_stop: bool = False  # by a signal to any rank, as of the end of the newest step

    @property
    def is_finished(self) -> bool:
        """After the last step, or when max_num_epochs leaves too few prompts for another: dynamic sampling may have
        drawn more than one batch a step. A step may draw into the next epoch: stopping it would waste its groups."""
        if self.state.step >= self.num_steps:
            return True
        num_drawn = self.state.cursor["position"]
        num_after_next_batch = num_drawn + self.cfg.grpo.prompts_per_batch
        return num_after_next_batch > self.cfg.grpo.max_num_epochs * self.inputs.train.num_problems


def run_rank(usage: str, words: Sequence[str], work: Callable[[Job], str], *, to_train: bool = True) -> int:
    """One rank from start to exit code. work: returns why the run ended. Without to_train there is no watchdog."""
    folder = watchdog = memory = None
    peers = NO_PEERS
    try:
        gpu_bytes, words = preflight.gpu_memory(words)
        cfg = preflight.parse_command_line(words, usage)
        generation = cfg.policy.generation
        split = None
        if generation.num_generators:
            split = partial(bridge.split, num_generators=generation.num_generators)
        ranks, device = start_process_group(generation.vllm_cfg.tensor_parallel_size, split)
        peers = ranks.peers
        cfg = on_rank0(lambda: cfg, ranks.job)  # resume=auto: another rank may have found another run
        inputs = read_inputs(cfg, to_train=to_train, on_rank0=partial(on_rank0, group=ranks.job))
        plan = plan_memory(cfg, inputs, ranks, gpu_bytes, to_train)
        if device.type == "cuda":
            plan = with_pack_tokens(plan, ranks)
            cfg = plan.cfg
        folder = open_run_folder(cfg, ranks, to_train=to_train)
        watchdog = Watchdog(ranks, folder, cfg.watchdog) if to_train else None
        memory = Memory(plan, ranks)
        code = 0
        reason = work(Job(cfg, inputs, ranks, device, folder, memory, watchdog))
    except BaseException as error:
        if memory:
            error = memory.explained(error, watchdog.phase if watchdog else "evaluation")
        code, reason = describe_failure(error, folder, peers)
    if watchdog:
        watchdog.stop()
    report_exit(code, reason, folder, peers)
    return code


def plan_memory(cfg: Config, inputs: RunInputs, ranks: Ranks, gpu_bytes: float | None, trains=True) -> Plan:
    """How much memory the run needs on each GPU, which has gpu_bytes; None: what torch says. A collective."""
    others = 0  # bytes that other processes hold
    if gpu_bytes is None and torch.cuda.is_available():
        free_bytes, gpu_bytes = torch.cuda.mem_get_info()
        held = gpu_bytes - free_bytes - OWN_CONTEXT
        # The smallest GPU, and what others hold at most: all ranks have one plan.
        gpu_bytes = min(gather(gpu_bytes, ranks.job))
        others = max(0, *gather(held, ranks.job))
    plan = memory_plan(cfg, inputs, ranks.job_size, gpu_bytes)
    return replace(plan, trains=trains, others=others)


def with_pack_tokens(plan: Plan, ranks: Ranks) -> Plan:
    """With a number for train_mb_tokens where that is null: of the run which is resumed, else the plan's choice. So the
    run's config has it. A collective."""
    if not plan.chooses_packs:
        return plan
    run = plan.cfg.checkpointing.resume_from
    tokens = None
    if run is not None:
        before = on_rank0(lambda: reader.load(Path(run) / "config.yaml"), ranks.job)
        tokens = before.policy.sequence_packing.train_mb_tokens
    return plan.with_packs(tokens or plan.tokens)


def set_up(job: Job) -> Run:
    """A run that is ready for its first step, or for the step after its checkpoint. A collective of all trainers."""
    cfg = job.cfg
    inputs = job.inputs
    ranks = job.ranks
    device = job.device
    memory = job.memory
    signals = Signals(must_save_by_seconds(cfg.checkpointing))
    head_options = build_head(cfg, inputs, device)
    model, sampler = build(cfg, inputs, ranks, device, signals.pending, keeps_gathered=memory.plan.keeps_gathered)
    ranks.print_rank0(head_options.describe(model.config.vocab_size))
    expand_segments()  # vLLM has made its memory pools, and sleeps
    weights = memory.plan.states().get("weights", 0)
    memory.engine_bytes = torch.cuda.memory_allocated() - weights
    memory.engine_reserved = torch.cuda.memory_reserved() - weights
    base_sha256 = hash_of_base(cfg, inputs, ranks)
    if ranks.bridge:
        for environment in inputs.environments.values():  # the generators grade
            environment.close()
    run = Run(
        **vars(job),
        model=model,
        head_options=head_options,
        optimizer=build_optimizer(model, cfg.policy.optimizer, offloads=cfg.policy.offload_optimizer_for_logprob),
        engine=sampler.engine,
        sampler=sampler,
        reference=build_reference(cfg, inputs, model, device),
        state=RunState(inputs.train.start(), inputs.train.fingerprints, base_sha256=base_sha256),
        saver=checkpoint.Saver(checkpoint_folder(cfg.checkpointing, job.folder), cfg.checkpointing, ranks),
        signals=signals,
        timer=Timers(job.watchdog.enter),
        num_steps=num_steps_of(cfg, inputs.train.num_problems),
    )
    with Progress("start, 3 of 3: checkpoint"):
        restore(run)
    if not run.is_finished:  # else there is no next prompt
        ranks.print_rank0("\n".join(data_lines(cfg, inputs, run.state.cursor)))
    for note in notes(cfg, inputs.model_config, run.num_steps):
        ranks.print_rank0(f"NOTE: {note}")
    if ranks.rank == 0:
        num_sets = max(1, len(inputs.validation))
        num_print_of_set = math.ceil(cfg.logger.num_val_samples_to_print / num_sets)
        logger = replace(cfg.logger, num_val_samples_to_print=num_print_of_set)
        run.log = RunLog(run.folder, logger, first_step=run.state.step + 1, num_steps=run.num_steps)
    return run


def generate(job: Job) -> str:
    """Runs a generator of a split job to its end; returns why it ended."""
    signals = Signals(must_save_by_seconds(job.cfg.checkpointing))
    sampler = build_sampler(job.cfg, job.inputs, job.ranks, job.device, signals.pending)
    with sampler:
        serve(sampler, job.device, job.watchdog)
    return "the trainers need no more samples"


def restore(run: Run) -> None:
    """Loads the checkpoint that the config resumes: weights, the optimizer's state, the reference and the counters."""
    cfg = run.cfg.checkpointing
    train = run.inputs.train
    checkpoints = run.saver.folder
    if cfg.resume_from is None:
        if any(checkpoints.glob("step_*")):
            raise ConfigError(f"{checkpoints} holds checkpoints of another run: choose another checkpoint_dir")
        return
    reference_shards = run.reference.shards if run.reference else {}
    base_sha256 = run.state.base_sha256
    counters = checkpoint.load(checkpoints, cfg, run.model, run.optimizer, run.ranks, reference_shards, base_sha256)
    state = RunState(**counters)
    run.state = state
    run.saver.saved = state.step
    if cfg.allow_changes and state.fingerprints != train.fingerprints:
        run.ranks.print_rank0(
            "WARNING: the data have changed (checkpointing.allow_changes=true): reading starts at their first row"
        )
        state.cursor = train.start()
        state.fingerprints = train.fingerprints
        state.selections = {}
    train.restore_selections(state.selections)
    train.check_same(state.fingerprints, cfg.resume_from)
    run.ranks.print_rank0(f"resumed from {checkpoints / f'step_{state.step:06d}'}")


# --------------------------------------------------------------------- the policy, the engine and the sampler of a run


def loss_path_of(cfg: Config) -> LossPath:
    """How this run computes the gradient of its loss."""
    return choose_loss_path(
        policy_loss,
        cfg.loss_fn,
        has_old=needs_old_logps(cfg),
        has_ref=cfg.loss_fn.reference_policy_kl_penalty > 0,
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
        has_ref = cfg.loss_fn.reference_policy_kl_penalty > 0
        call, kernels = compiled_loss(policy_loss, cfg.loss_fn, device, needs_old_logps(cfg), has_ref)
        loss = replace(loss, call=call, kernels=kernels)
    return HeadOptions(
        temperature=policy.generation.temperature,
        vocab=inputs.tokenizer.vocab_size,
        sampling_filter=sampling_filter_of(policy.generation),
        backend=choose_backend(policy.kernel_backend, device.type, policy.logprob_chunk_size, pack_rows),
        softcap=inputs.model_config.softcap,
        loss=loss,
    )


def sampling_filter_of(cfg: GenerationConfig) -> SamplingFilter | None:
    """None where top_p and top_k keep all tokens."""
    return SamplingFilter(cfg.top_p, cfg.top_k) if cfg.top_p < 1 or cfg.top_k else None


def reference_dtype(cfg: Config) -> torch.dtype:
    """The precision of the forward, but float32 for a reference that is an average of policies."""
    return torch.float32 if cfg.grpo.ref_policy_update_alpha < 1 else getattr(torch, cfg.policy.precision)


def build_reference(cfg: Config, inputs: RunInputs, model: Decoder, device: torch.device) -> Reference | None:
    """What the KL is to, if there is one: the policy as it is now, or a teacher. A collective."""
    if cfg.loss_fn.reference_policy_kl_penalty == 0:
        return None
    policy = cfg.policy
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
    return Reference(model, teacher=teacher)


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
) -> tuple[Decoder, Sampler | Generators]:
    """The policy, and the sampler with its engine, which has no weights yet and sleeps. In a split job `Generators` is
    sampler and engine. stop: as in `build_sampler`. A collective of all ranks that train."""
    model = build_policy(cfg, inputs, ranks, device, keeps_gathered)
    if ranks.bridge:
        return model, Generators(ranks.bridge, full_shapes(model), inputs.tokenizer, cfg)
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
    reward_model = RewardModel(*inputs.reward_model, cfg, device) if inputs.reward_model else None
    with Progress("start, 2 of 3: vLLM engine"):
        engine = VLLMEngine(inputs.model_folder, inputs.model_config, inputs.tokenizer, cfg, should_stop)
    engines = f"{ranks.dp_size} x vLLM over {ranks.tp_size} ranks each"
    ranks.print_rank0(f"engine: {engines}, {engine.runner}, vocabulary {engine.vocab_size:,}")
    endpoint = None
    if cfg.env.agents:
        from base.agents.endpoint import Endpoint  # a run without agents imports nothing of them
        from base.agents.parser import ReplyParser

        server = cfg.policy.generation.vllm_cfg.http_server_serving_chat_kwargs
        parse = ReplyParser(reply_parsers(), inputs.tokenizer, server)
        agents = [inputs.environments[agent.name] for agent in cfg.env.agents if agent.name in inputs.environments]
        endpoint = Endpoint(engine, inputs.tokenizer, ranks, parse, agents)
    limits = cfg.grpo.max_rollout_turns, cfg.env.max_error_fraction, cfg.env.max_crashed_fraction
    may_start_early = cfg.grpo.async_grpo.enabled or ranks.generates
    kind = AheadSampler if may_start_early else Sampler
    return kind(engine, inputs.tokenizer, inputs.environments, ranks, *limits, reward_model, endpoint, stop=stop)


def check_cpu_sizes(model: ModelConfig, device_type: str) -> None:
    """ConfigError for heads or experts of a size that vLLM does not compute on "cpu". It pads experts' inner size."""
    if device_type != "cpu":
        return
    problem = None
    if model.head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        problem = f"head_dim={model.head_dim}: on a CPU vLLM computes heads of {sizes} dims"
    elif model.num_experts and model.hidden_size % CPU_EXPERTS_MULTIPLE:
        sizes = f"multiples of {CPU_EXPERTS_MULTIPLE}"
        problem = f"hidden_size={model.hidden_size}: on a CPU vLLM computes experts of {sizes}"
    if problem:
        raise ConfigError(f"policy.model_name: {problem}: use another model, or a GPU")


def hash_of_base(cfg: Config, inputs: RunInputs, ranks: Ranks) -> str | None:
    """With LoRA, the fingerprint of the base weights."""
    return checkpoint.weights_sha256(inputs.model_folder, ranks) if cfg.policy.dtensor_cfg.lora_cfg.enabled else None
