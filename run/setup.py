"""Builds a run from its config, and sees to what surrounds the steps: counters, saving, stopping, logging.

The algorithm is `train` in grpo.py. Nothing here computes a loss, an advantage or a pack.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import config
from batch import Minibatch, needs_old_logps
from engine import Engine, check_canary
from graders.pool import GraderPool
from hf.model_config import hf_config
from hf.weights import save_hf
from kernels import KernelBackend, LossPath, choose_backend
from loss import policy_loss
from model import Decoder, Reference, load_policy, uses_flash_attention
from optim import build_optimizer
from rollout import Sampler, StepSamples
from run import checkpoint
from run.config_check import must_save_by_seconds
from run.log import RunLog, Timers
from run.loss_path import choose_loss_path
from run.metrics import performance_metrics
from run.preflight import RunInputs, num_steps_of, warmup_problem
from run.resume import checkpoint_folder
from run.reward_model import RewardModel
from system.exits import Interrupted, Saved, Signals, StopRun
from system.ranks import Ranks, any_rank, seed_everything
from system.watchdog import Watchdog


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


@dataclass(slots=True)
class Run:
    """Everything that lives from the first step to the last."""

    cfg: config.Config
    inputs: RunInputs
    ranks: Ranks
    device: torch.device
    folder: Path
    model: Decoder
    optimizer: torch.optim.Optimizer
    engine: Engine
    sampler: Sampler
    reference: Reference | None
    state: RunState
    saver: checkpoint.Saver
    signals: Signals
    watchdog: Watchdog
    timer: Timers
    num_steps: int
    log: RunLog | None = None  # rank 0's
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest step
    told_to_stop: bool = False  # by a signal to any rank, as of the end of the newest step

    @property
    def is_finished(self) -> bool:
        """After the last step, or when max_num_epochs passes leave too few prompts for another: dynamic sampling draws
        more than a step has. A step that draws again may go on into the next pass; cutting it short would waste the
        groups it has."""
        grpo, num_drawn = self.cfg.grpo, self.state.cursor["position"]
        used_up = num_drawn + grpo.prompts_per_batch > grpo.max_num_epochs * self.inputs.train.num_problems
        return self.state.step >= self.num_steps or used_up


def set_up(
    cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device, folder: Path, watchdog: Watchdog
) -> Run:
    """A run that is ready for its first step, or for the one after its checkpoint. A collective of all ranks."""
    signals = Signals(must_save_by_seconds(cfg.checkpointing))
    model, engine, sampler = build(cfg, inputs, ranks, device)
    GraderPool.stop = signals.pending
    engine.should_stop = lambda: ranks.any_rank_of_engine(signals.pending())
    run = Run(
        cfg=cfg,
        inputs=inputs,
        ranks=ranks,
        device=device,
        folder=folder,
        model=model,
        optimizer=build_optimizer(model, cfg.policy.optimizer),
        engine=engine,
        sampler=sampler,
        reference=Reference(model, reference_dtype(cfg)) if cfg.loss_fn.reference_policy_kl_penalty > 0 else None,
        state=RunState(inputs.train.start(), inputs.train.fingerprints),
        saver=checkpoint.Saver(checkpoint_folder(cfg.checkpointing, folder), cfg.checkpointing, ranks),
        signals=signals,
        watchdog=watchdog,
        timer=Timers(watchdog.enter),
        num_steps=num_steps_of(cfg, inputs.train.num_problems),
    )
    restore(run)
    if problem := warmup_problem(cfg, run.num_steps):
        ranks.print_rank0(f"WARNING: {problem}")
    if ranks.rank == 0:
        run.log = RunLog(folder, cfg.logger, first_step=run.state.step + 1, num_steps=run.num_steps)
    return run


def loss_path_of(cfg: config.Config, backend: KernelBackend, device: torch.device) -> LossPath:
    """How the loss of this run is trained."""
    return choose_loss_path(
        policy_loss,
        cfg.loss_fn,
        has_old=needs_old_logps(cfg),
        has_ref=cfg.loss_fn.reference_policy_kl_penalty > 0,
        backend=backend,
        device=device,
    )


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


def build(cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device) -> tuple[Decoder, Engine, Sampler]:
    """The sharded policy with float32 master weights, the engine, which has no weights yet and sleeps, and the sampler
    over it. A collective of all ranks."""
    policy = cfg.policy
    try:
        backend = choose_backend(policy.kernel_backend, device.type, policy.logprob_chunk_size)
    except ValueError as error:
        raise config.ConfigError(f"policy.kernel_backend: {error}") from error
    compiled = compiles(policy.compile, device.type)
    seed_everything(cfg.grpo.seed)
    mesh = dist.init_device_mesh(device.type, (ranks.world_size,))
    recompute = policy.dtensor_cfg.activation_checkpointing
    model = load_policy(
        inputs.model_folder,
        device=device,
        mesh=mesh,
        precision=policy.precision,
        activation_checkpointing=recompute,
        overrides=policy.hf_config_overrides,
    )
    if compiled:
        model.compile_blocks()
    model.temperature = policy.generation.temperature
    model.vocab_limit = inputs.tokenizer.vocab_size
    model.backend = backend
    model.loss_path = loss_path_of(cfg, backend, device)
    size = sum(param.numel() for param in model.parameters())
    flash = uses_flash_attention(device.type, getattr(torch, policy.precision))
    ranks.print_rank0(
        f"policy: {size / 1e6:,.1f} M parameters, {policy.precision}, FSDP2 over {ranks.world_size} ranks; "
        f"{backend.describe(model.config.vocab_size)}; {model.loss_path.describe()}; "
        f"attention: {'varlen_attn' if flash else 'SDPA by runs of equal length'}; "
        f"{'compiled' if compiled else 'eager'} blocks; packs of {policy.pack_tokens(device.type):,} tokens; "
        "starting the engine"
    )
    reward_model = RewardModel(*inputs.reward_model, cfg, device, mesh) if inputs.reward_model else None
    engine = Engine(inputs.model_folder, inputs.tokenizer, cfg)
    ranks.print_rank0(
        f"engine: {ranks.dp_size} x vLLM over {ranks.tp_size} ranks each, vocabulary {engine.vocab_size:,}"
    )
    engine.sleep()
    score = reward_model.score if reward_model else None
    max_turns, max_errors = cfg.grpo.max_rollout_turns, cfg.env.max_error_fraction
    sampler = Sampler(engine, inputs.tokenizer, inputs.environments, ranks, max_turns, max_errors, score)
    return model, engine, sampler


def restore(run: Run) -> None:
    """Loads the checkpoint that the config resumes: weights, the optimizer's state, the reference and the counters."""
    cfg, train = run.cfg.checkpointing, run.inputs.train
    checkpoints = run.saver.folder
    if cfg.resume_from is None:
        if any(checkpoints.glob("step_*")):
            raise config.ConfigError(f"{checkpoints} holds checkpoints of another run: choose another checkpoint_dir")
        return
    shards = run.reference.shards if run.reference else {}
    counters = checkpoint.load(checkpoints, run.model, run.optimizer, run.ranks, shards, mode=cfg.resume)
    run.state = state = RunState(**counters)
    run.saver.saved = state.step
    if cfg.allow_changes and state.fingerprints != train.fingerprints:
        allowed = "(checkpointing.allow_changes=true): they are read from their start"
        run.ranks.print_rank0(f"WARNING: other data than before {allowed}")
        state.cursor = train.start()
        state.fingerprints = train.fingerprints
    train.check_same(state.fingerprints, cfg.resume_from)
    run.ranks.print_rank0(f"resumed from {checkpoints / f'step_{state.step:06d}'}")


# --------------------------------------------------------------------------------------------------- around the steps


def steps(run: Run) -> Iterator[int]:
    """Numbers of the steps that are left, from 1. A step that is over is counted and logged by `end_step`."""
    while not run.is_finished:
        step = run.state.step + 1
        run.watchdog.step = step
        run.timer.start_step()
        yield step


def end_step(run: Run, samples: StepSamples, minibatches: list[Minibatch], metrics: dict[str, float]) -> None:
    """Counts the step and logs it. Raises Interrupted on all ranks when a signal asks any of them to stop."""
    state = run.state
    state.step += 1
    state.cursor = run.inputs.train.record(samples.cursor, metrics)
    state.num_bad_steps = int(metrics["num_bad_steps"])
    state.total_valid_tokens += metrics["global_valid_toks"]
    run.metrics = metrics
    run.saver.poll()  # before the step is logged: a kill costs at most save_period steps of those in the log
    seconds = run.timer.take()
    performance = performance_metrics(metrics, seconds, minibatches, run.model.config, run.cfg.policy)
    if run.log:
        run.log.step(state.step, metrics, seconds, performance)
        run.log.samples(state.step, "train", samples.trained, run.inputs.tokenizer)
    run.told_to_stop = any_rank(run.signals.pending())
    if run.told_to_stop and not run.is_finished:
        raise Interrupted


def check_engine(run: Run, step: int) -> dict[str, float]:
    """Every canary_period steps: whether the engine samples from the weights it was sent. Returns the metric of it."""
    grpo = run.cfg.grpo
    if grpo.canary_period == 0 or step % grpo.canary_period:
        return {}
    with run.timer("canary"):
        gap = check_canary(run.model, run.engine, grpo.logp_gap_limit, run.device, f"after step {step}")
    return {"canary_logp_gap": gap}


def validation_is_due(run: Run) -> bool:
    grpo, step = run.cfg.grpo, run.state.step
    if step == 0 or run.told_to_stop:  # who is told to stop has no time for it
        return step == 0 and grpo.val_at_start
    return (grpo.val_period > 0 and step % grpo.val_period == 0) or (run.is_finished and grpo.val_at_end)


def save_if_due(run: Run) -> None:
    with run.timer("checkpointing"):
        if run.state.step % run.cfg.checkpointing.save_period == 0 or run.is_finished:
            _save(run)


def _save(run: Run) -> None:
    """A checkpoint of the step that has ended, where the config has them; never after a step that went wrong."""
    state, saver = run.state, run.saver
    if saver.cfg.enabled and state.num_bad_steps == 0 and state.step != saver.saved:
        reference = run.reference.shards if run.reference else {}
        metric = checkpoint.metric(saver.cfg, asdict(state), run.metrics)
        saver.save(state.step, run.model, run.optimizer, asdict(state), reference, metric)


def save_early(run: Run) -> Exception:
    """What a signal ends the run with, after the last step that was whole: Saved only if it is."""
    run.saver.finish()
    _save(run)
    run.saver.finish()
    after = f"told to stop, after step {run.state.step}"
    if run.saver.saved == run.state.step:
        return Saved(f"{after}; continue with checkpointing.resume_from={run.folder}")
    reason = "checkpointing.enabled=false"
    if run.cfg.checkpointing.enabled:
        reason = "it went wrong" if run.state.num_bad_steps else "see above"
    return StopRun(f"{after}, which is not saved ({reason})")


def finish(run: Run) -> str:
    """Writes the Hugging Face folder and the closing table; returns the reason the run ended."""
    cfg = run.cfg
    run.watchdog.enter("export")
    if cfg.checkpointing.save_hf_at_end:
        dtype = getattr(torch, cfg.policy.precision)
        hf = hf_config(run.inputs.model_folder, cfg.policy.hf_config_overrides)
        save_hf(run.model, run.folder / "hf_model", run.inputs.tokenizer.file.parent, dtype=dtype, hf=hf)
    if run.log:
        run.log.close(run.state, run.saver.folder, cfg.checkpointing)
    for environment in run.inputs.environments.values():
        environment.close()
    return f"trained to step {run.state.step}"
