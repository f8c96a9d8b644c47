"""Sets a run up, and sees to what surrounds its steps: counters, saving, stopping, logging.

The algorithm is `train` in grpo.py. Nothing here computes a loss, an advantage or a pack.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import config
from batch import Minibatch
from check.preflight import RunInputs, data_lines, lora_note, memory_plan, num_steps_of, warmup_problem
from check.resume import checkpoint_folder, replayed_run, replayed_step
from check.rules import must_save_by_seconds
from data import Sample
from engine import Engine, check_canary
from graders.pool import GraderPool
from hf.adapter import adapter_config
from hf.weights import save_adapter, save_hf
from model import Decoder, Reference
from optim import build_optimizer
from rollout import Sampler, StepSamples
from run import checkpoint, rollouts
from run.build import build, build_sampler, read_adapter, reference_dtype
from run.generators import Generators, groups_under_way, serve
from run.log import RunLog, Timers
from run.memory import Memory
from run.speed import performance_metrics
from system.exits import Interrupted, Saved, Signals, StopRun
from system.optimizer import Optimizer
from system.progress import Progress
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
    base_sha256: str | None = None  # of the weights that LoRA has frozen


@dataclass(slots=True)
class Run:
    """Everything that lives from the first step to the last."""

    cfg: config.Config
    inputs: RunInputs
    ranks: Ranks
    device: torch.device
    folder: Path
    model: Decoder
    optimizer: Optimizer
    engine: Engine | Generators
    sampler: Sampler | Generators
    reference: Reference | None
    state: RunState
    saver: checkpoint.Saver
    signals: Signals
    watchdog: Watchdog
    timer: Timers
    num_steps: int
    memory: Memory | None = None
    log: RunLog | None = None  # rank 0's
    replay: StepSamples | None = None  # what grpo.replay_rollouts trains again
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


def plan_memory(
    cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device, gpu_bytes: float | None, trains=True
) -> Memory:
    """Prints how much memory the run needs on each GPU. ConfigError if that is more than the GPU has, or gpu_bytes."""
    if gpu_bytes is None and device.type == "cuda":
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    return Memory(replace(memory_plan(cfg, inputs, ranks.job_size, gpu_bytes), trains=trains), ranks)


def set_up(
    cfg: config.Config,
    inputs: RunInputs,
    ranks: Ranks,
    device: torch.device,
    folder: Path,
    watchdog: Watchdog,
    memory: Memory,
) -> Run:
    """A run that is ready for its first step, or for the one after its checkpoint. A collective of all its trainers."""
    signals = Signals(must_save_by_seconds(cfg.checkpointing))
    model, engine, sampler = build(cfg, inputs, ranks, device)
    memory.engine_bytes = torch.cuda.memory_allocated() - memory.plan.states().get("weights", 0)
    base_sha256 = read_adapter(cfg, inputs, model, ranks)
    if ranks.bridge:
        close_environments(inputs)  # they grade where samples are made
    else:
        _stop_at(signals, engine, ranks)
    run = Run(
        cfg=cfg,
        inputs=inputs,
        ranks=ranks,
        device=device,
        folder=folder,
        model=model,
        optimizer=build_optimizer(model, cfg.policy.optimizer, offloads=cfg.policy.offload_optimizer_for_logprob),
        engine=engine,
        sampler=sampler,
        reference=Reference(model, reference_dtype(cfg)) if cfg.loss_fn.reference_policy_kl_penalty > 0 else None,
        state=RunState(inputs.train.start(), inputs.train.fingerprints, base_sha256=base_sha256),
        saver=checkpoint.Saver(checkpoint_folder(cfg.checkpointing, folder), cfg.checkpointing, ranks),
        signals=signals,
        watchdog=watchdog,
        timer=Timers(watchdog.enter),
        num_steps=num_steps_of(cfg, inputs.train.num_problems),
        memory=memory,
    )
    with Progress("start, 3 of 3: checkpoint"):
        restore(run)
    if not (run.replay or run.is_finished):  # else there is no next prompt
        ranks.print_rank0("\n".join(data_lines(cfg, inputs, run.state.cursor)))
    if problem := warmup_problem(cfg, run.num_steps):
        ranks.print_rank0(f"WARNING: {problem}")
    if note := lora_note(cfg):
        ranks.print_rank0(f"LoRA: {note}")
    if ranks.rank == 0:
        first_step = run.state.step + 1
        last_step = first_step if run.replay else run.num_steps
        run.log = RunLog(folder, cfg.logger, first_step=first_step, num_steps=last_step)
    return run


def generate(cfg: config.Config, inputs: RunInputs, ranks: Ranks, device: torch.device, watchdog: Watchdog) -> str:
    """All that a generator of a split job does, to the end of the run; returns why it ended."""
    signals = Signals(must_save_by_seconds(cfg.checkpointing))
    seed_everything(cfg.grpo.seed)
    sampler = build_sampler(cfg, inputs, ranks, device)
    _stop_at(signals, sampler.engine, ranks)
    serve(sampler.engine, sampler, ranks, device, watchdog)
    close_environments(inputs)
    return "the trainers asked for no more"


def generators_of(run: Run) -> AbstractContextManager:
    """At whose end a split job's generators end; in another job nothing."""
    return run.engine if isinstance(run.engine, Generators) else nullcontext()


def _stop_at(signals: Signals, engine: Engine, ranks: Ranks) -> None:
    """A signal stops generation and grading."""
    GraderPool.stop = signals.pending
    engine.should_stop = lambda: ranks.any_rank_of_engine(signals.pending())


def restore(run: Run) -> None:
    """Loads the checkpoint that the config resumes: weights, the optimizer's state, the reference and the counters."""
    cfg, train = run.cfg.checkpointing, run.inputs.train
    checkpoints = run.saver.folder
    if run.cfg.grpo.replay_rollouts:
        return _begin_replay(run)
    if cfg.resume_from is None:
        if any(checkpoints.glob("step_*")):
            raise config.ConfigError(f"{checkpoints} holds checkpoints of another run: choose another checkpoint_dir")
        return
    counters = _load(run, checkpoints, cfg.resume)
    run.state = state = RunState(**counters)
    run.saver.saved = state.step
    if cfg.allow_changes and state.fingerprints != train.fingerprints:
        allowed = "(checkpointing.allow_changes=true): they are read from their start"
        run.ranks.print_rank0(f"WARNING: other data than before {allowed}")
        state.cursor = train.start()
        state.fingerprints = train.fingerprints
    train.check_same(state.fingerprints, cfg.resume_from)
    run.ranks.print_rank0(f"resumed from {checkpoints / f'step_{state.step:06d}'}")


def _begin_replay(run: Run) -> None:
    """Reads the rollouts of grpo.replay_rollouts, and the checkpoint of the step before theirs."""
    cfg, ranks = run.cfg, run.ranks
    step, num_ranks = replayed_step(cfg)
    run.replay = rollouts.load(Path(cfg.grpo.replay_rollouts), ranks)
    if num_ranks != ranks.world_size:
        other = f"on {ranks.world_size} ranks instead of {num_ranks}, whose packs and sums are others"
        ranks.print_rank0(f"WARNING: the replay is {other}: its numbers differ by rounding")
    if step > 1:
        counters = _load(run, checkpoint_folder(cfg.checkpointing, replayed_run(cfg)), "must", step - 1)
        run.state = RunState(**counters | {"first_validation": {}, "last_validation": {}})  # which are that run's


def _load(run: Run, folder: Path, mode: str | None, step: int = 0) -> dict:
    shards, base = run.reference.shards if run.reference else {}, run.state.base_sha256
    return checkpoint.load(folder, run.model, run.optimizer, run.ranks, shards, mode=mode, base=base, step=step)


# --------------------------------------------------------------------------------------------------- around the steps


def steps(run: Run) -> Iterator[int]:
    """Numbers of the steps that are left, from 1. A step that is over is counted and logged by `end_step`."""
    while run.replay or not run.is_finished:
        step = run.state.step + 1
        run.watchdog.step = step
        run.timer.start_step()
        yield step
        if run.replay:  # without validation and checkpoints, which the config has lost
            return


def dump_if_due(run: Run, samples: StepSamples, step: int) -> None:
    """Before the step trains: its samples to the disk, in every dump_rollouts-th step from the first one on."""
    period = run.cfg.logger.dump_rollouts
    if period and (step - 1) % period == 0:
        with run.timer("dump_rollouts"):
            rollouts.dump(run.folder / "rollouts", samples, step, run.model, run.cfg, run.inputs.tokenizer, run.ranks)


def end_step(run: Run, samples: StepSamples, minibatches: list[Minibatch], metrics: dict[str, float]) -> None:
    """Counts the step and logs it. Raises Interrupted on all ranks when a signal asks any of them to stop."""
    state = run.state
    state.step += 1
    if run.cfg.grpo.async_grpo.enabled:
        metrics |= age_metrics(run.sampler, samples.trained, state.step)
    state.cursor = run.inputs.train.record(samples.cursor, metrics)
    state.num_bad_steps = int(metrics["num_bad_steps"])
    state.total_valid_tokens += metrics["global_valid_toks"]
    run.metrics = metrics
    run.saver.poll()  # before the step is logged: a kill costs at most save_period steps of those in the log
    seconds = run.timer.take()
    if run.cfg.grpo.async_grpo.enabled:
        seconds |= {"exposed_generation": seconds["generation"], "weight_sync": seconds["prepare_for_generation"]}
    is_split, working = isinstance(run.sampler, Generators), seconds
    if is_split and run.cfg.grpo.async_grpo.max_age:  # generators work all the time, whatever the trainers wait for
        working = seconds | {"generation": seconds["total_step_time"]}
    performance = performance_metrics(metrics, working, minibatches, run.model.config, run.cfg.policy)
    performance |= run.sampler.take_idle() if is_split else {}
    if run.memory:
        performance |= run.memory.metrics(run.timer.peaks)
    if run.log:
        run.log.step(state.step, metrics, seconds, performance)
        run.log.samples(state.step, "train", samples.trained, run.inputs.tokenizer)
    run.told_to_stop = any_rank(run.signals.pending())
    if run.told_to_stop and not run.is_finished:
        raise Interrupted


def age_metrics(sampler: Sampler | Generators, trained: Sequence[Sample], step: int) -> dict[str, float]:
    """With async_grpo: ages in steps, by first tokens; of the groups under way, how many have all their replies (NeMo
    RL's buffer) and how many have not. A collective."""
    ages = [step - 1 - sample.weight_version for sample in trained]
    is_whole = sampler.groups if isinstance(sampler, Generators) else groups_under_way(sampler)
    size = sum(is_whole.values())
    numbers = {"avg_trajectory_age": float(np.mean(ages)), "max_trajectory_age": max(ages), "buffer_size": size}
    return numbers | {"carried_groups": len(is_whole) - size}


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
        saver.save(state.step, run.model, run.optimizer, asdict(state), reference, run.metrics)


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
        with Progress("export"):
            save_hf(run.model, run.folder / "hf_model", run.inputs.tokenizer.file.parent, dtype=dtype)
        if run.state.base_sha256:
            adapter = adapter_config(cfg.policy, run.model.config)
            save_adapter(run.model, run.folder / "hf_adapter", adapter, run.state.base_sha256)
    if run.replay:
        text = rollouts.compare(replayed_run(cfg), run.state.step, run.metrics)
        run.ranks.print_rank0(f"\n{text}")
    if run.log:
        run.log.close(run.state)
    if not run.ranks.bridge:
        close_environments(run.inputs)
    return f"{'replayed' if run.replay else 'trained to'} step {run.state.step}"


def close_environments(inputs: RunInputs) -> None:
    for environment in inputs.environments.values():
        environment.close()
