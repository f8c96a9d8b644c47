"""Builds a run from its config, and sees to what surrounds the steps: counters, saving, stopping, logging.

The algorithm is `train` in grpo.py. Nothing here computes a loss, an advantage or a pack.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import config
from batch import needs_old_logps
from engine import Engine, check_canary
from graders.pool import GraderPool
from hf.weights import save_hf
from kernels import KernelBackend, LossPath, choose_backend
from loss import policy_loss
from model import Decoder, Reference, load_policy, uses_flash_attention
from optim import build_optimizer
from rollout import Sampler, StepSamples, data_is_used_up
from run import checkpoint, config_file
from run.log import RunLog, Timers
from run.loss_path import choose_loss_path
from run.preflight import RunInputs, num_steps_of
from run.resume import checkpoint_folder
from run.reward_model import RewardModel
from system.exits import Interrupted, Saved, Signals, StopRun
from system.ranks import Ranks, any_rank, seed_everything
from system.watchdog import Watchdog


@dataclass(slots=True)
class RunState:
    """The run's counters, which checkpoints keep (NeMo RL's GRPOSaveState; its consumed_samples are prompts).

    Sampling seeds are f(seed, step, prompt, sample) and the data order is f(seed, epoch), so there is no other state.
    """

    cursor: dict
    fingerprints: dict[str, str]
    step: int = 0
    num_bad_steps: int = 0
    consumed_samples: int = 0
    current_epoch: int = 0
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
    log: RunLog | None
    signals: Signals
    watchdog: Watchdog
    timer: Timers
    num_steps: int
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest step
    told_to_stop: bool = False  # by a signal to any rank, as of the end of the newest step

    @property
    def is_finished(self) -> bool:
        """Dynamic sampling draws more than a step has, so data may be used up before the last step."""
        used_up = data_is_used_up(self.cfg.grpo, self.inputs.train.num_problems, self.state.consumed_samples)
        return self.state.step >= self.num_steps or used_up


def set_up(
    cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device, folder: Path, watchdog: Watchdog
) -> Run:
    """A run that is ready for its first step, or for the one after its checkpoint. A collective of all ranks."""
    signals = Signals(cfg.checkpointing.must_save_by_seconds)
    model, optimizer, reference, engine, sampler = build(cfg, inputs, ranks, device)
    GraderPool.stop = signals.pending
    engine.should_stop = lambda: ranks.any_rank_of_engine(signals.pending)
    checkpoints = checkpoint_folder(cfg.checkpointing, folder)
    state = restore(cfg, inputs, model, optimizer, reference, ranks, checkpoints)
    num_steps = num_steps_of(cfg, inputs.train.num_problems)
    saved = state.step if cfg.checkpointing.resume_from else None
    return Run(
        cfg=cfg,
        inputs=inputs,
        ranks=ranks,
        device=device,
        folder=folder,
        model=model,
        optimizer=optimizer,
        engine=engine,
        sampler=sampler,
        reference=reference,
        state=state,
        saver=checkpoint.Saver(checkpoints, cfg.checkpointing, ranks, saved=saved),
        log=open_log(cfg, folder, ranks, state.step, num_steps),
        signals=signals,
        watchdog=watchdog,
        timer=Timers(watchdog.enter),
        num_steps=num_steps,
    )


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


def build(
    cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device
) -> tuple[Decoder, torch.optim.Optimizer, Reference | None, Engine, Sampler]:
    """The sharded policy with float32 master weights, its optimizer, the reference policy where the loss has a KL, the
    engine, which has no weights yet and sleeps, and the sampler over it."""
    policy = cfg.policy
    try:
        backend = choose_backend(policy.kernel_backend, device.type, policy.logprob_chunk_size)
    except ValueError as error:
        raise config.ConfigError(f"policy.kernel_backend: {error}") from error
    seed_everything(cfg.grpo.seed)
    mesh = dist.init_device_mesh(device.type, (ranks.world_size,))
    model = load_policy(
        inputs.model_folder,
        device=device,
        mesh=mesh,
        precision=policy.precision,
        activation_checkpointing=policy.dtensor_cfg.activation_checkpointing,
    )
    model.temperature = policy.generation.temperature
    model.vocab_limit = inputs.tokenizer.vocab_size
    model.backend = backend
    model.loss_path = loss_path_of(cfg, backend, device)
    size = sum(param.numel() for param in model.parameters())
    flash = uses_flash_attention(device.type, getattr(torch, policy.precision))
    ranks.print_rank0(
        f"policy: {size / 1e6:,.1f} M parameters, {policy.precision}, FSDP2 over {ranks.world_size} ranks; "
        f"{backend.describe(inputs.tokenizer.vocab_size)}; {model.loss_path.describe()}; "
        f"attention: {'varlen_attn' if flash else 'SDPA by runs of equal length'}; starting the engine"
    )
    reward_model = None
    if inputs.reward_model:
        pack_tokens = policy.sequence_packing.train_mb_tokens
        reward_model = RewardModel(
            *inputs.reward_model, cfg.env.reward_model, device=device, mesh=mesh, pack_tokens=pack_tokens
        )
    optimizer = build_optimizer(model, policy.optimizer)
    reference = Reference(model) if cfg.loss_fn.reference_policy_kl_penalty > 0 else None
    engine = Engine(
        str(inputs.model_folder),
        inputs.tokenizer,
        policy.generation,
        dtype=policy.generation.vllm_cfg.precision or policy.precision,
        tied_head=model.config.tie_word_embeddings,
        max_total_tokens=policy.max_total_sequence_length,
        seed=cfg.grpo.seed,
    )
    ranks.print_rank0(
        f"engine: {ranks.dp_size} x vLLM over {ranks.tp_size} ranks each, vocabulary {engine.vocab_size:,}"
    )
    engine.sleep()
    sampler = Sampler(
        engine,
        inputs.tokenizer,
        inputs.environments,
        ranks,
        max_turns=cfg.grpo.max_rollout_turns,
        max_error_fraction=cfg.env.max_error_fraction,
        score_conversations=reward_model.score if reward_model else None,
    )
    return model, optimizer, reference, engine, sampler


def restore(
    cfg: config.Config,
    inputs: RunInputs,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None,
    ranks: Ranks,
    checkpoints: Path,
) -> RunState:
    """The counters of a new run, or of the checkpoint it resumes, whose weights and moments are loaded too."""
    ckpt_cfg, train = cfg.checkpointing, inputs.train
    if ckpt_cfg.resume_from is None:
        if any(checkpoints.glob("step_*")):
            raise config.ConfigError(f"{checkpoints} holds checkpoints of another run: choose another checkpoint_dir")
        return RunState(train.start(), train.fingerprints)
    shards = reference.shards if reference else {}
    state = RunState(**checkpoint.load(checkpoints, model, optimizer, ranks, reference=shards, mode=ckpt_cfg.resume))
    if ckpt_cfg.allow_changes and state.fingerprints != train.fingerprints:
        ranks.print_rank0(
            "WARNING: other data than before (checkpointing.allow_changes=true): they are read from their start"
        )
        state.cursor = train.start()
        state.fingerprints = train.fingerprints
        state.consumed_samples = 0
    train.check_same(state.fingerprints, ckpt_cfg.resume_from)
    ranks.print_rank0(f"resumed from {checkpoints / f'step_{state.step:06d}'}")
    return state


def open_log(cfg: config.Config, folder: Path, ranks: Ranks, step: int, num_steps: int) -> RunLog | None:
    """Rank 0's log, with the resolved config beside it; None on the others."""
    if ranks.rank != 0:
        return None
    if cfg.checkpointing.resume_from is None:
        (folder / "config.yaml").write_text(config_file.to_yaml(cfg))
    return RunLog(
        folder,
        tensorboard=cfg.logger.tensorboard_enabled,
        first_step=step + 1,
        num_steps=num_steps,
        max_samples=cfg.logger.num_samples_to_log,
    )


# --------------------------------------------------------------------------------------------------- around the steps


def steps(run: Run) -> Iterator[int]:
    """Numbers of the steps that are left, from 1. A step that is over is counted and logged by `end_step`."""
    while not run.is_finished:
        step = run.state.step + 1
        run.watchdog.step = step
        run.timer.start_step()
        yield step


def end_step(run: Run, samples: StepSamples, metrics: dict[str, float]) -> None:
    """Counts the step and logs it. Raises Interrupted on all ranks when a signal asks any of them to stop."""
    state = run.state
    state.step += 1
    state.cursor = run.inputs.train.record(samples.cursor, metrics)
    state.consumed_samples = samples.cursor["position"]
    state.current_epoch = state.consumed_samples // run.inputs.train.num_problems
    state.num_bad_steps = int(metrics["num_bad_steps"])
    state.total_valid_tokens += metrics["global_valid_toks"]
    run.metrics = metrics
    run.saver.poll()  # before the step is logged: a kill costs at most save_period steps of those in the log
    if run.log:
        run.log.step(state.step, metrics, run.timer.take(), run.ranks.world_size)
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
        save_hf(run.model, run.folder / "hf_model", run.inputs.model_folder, dtype=dtype)
    if run.log:
        run.log.close(run.state, run.saver.folder, cfg.checkpointing)
    for environment in run.inputs.environments.values():
        environment.close()
    return f"trained to step {run.state.step}"
