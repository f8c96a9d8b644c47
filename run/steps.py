"""The work around the steps of a run: counters, due validation and checkpoints, stopping, logging.

The algorithm is `train` in grpo.py. Nothing here computes a loss, an advantage or a pack.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from base.hf.weights import save_hf
from base.inputs.run_inputs import RunInputs
from base.system.disk import describe_os_error
from base.system.exchange import move_to_log
from base.system.exits import Interrupted, Saved, StopRun
from base.system.progress import Progress
from base.system.ranks import any_rank
from config import Config
from gap import check_canary
from metrics import Numbers
from model import Decoder
from pack import Minibatch
from records import Sample
from rollout import StepSamples
from run.job import Run
from run.speed import performance_metrics


def remaining_steps(run: Run) -> Iterator[int]:
    """Numbers of the steps that are left, from 1. `end_step` counts and logs a step that is over."""
    while not run.is_finished:
        step = run.state.step + 1
        run.watchdog.step = step
        run.timer.start_step()
        yield step


def end_step(run: Run, samples: StepSamples, minibatches: list[Minibatch], metrics: Numbers) -> None:
    """Counts the step and logs it. Raises Interrupted on all ranks when a signal asks any of them to stop."""
    state = run.state
    async_grpo = run.cfg.grpo.async_grpo
    state.step += 1
    if async_grpo.enabled:
        from ahead import age_metrics

        metrics |= age_metrics(samples.trained, state.step, run.sampler.groups_under_way())
    if run.cfg.env.agents:
        from base.agents.metrics import agent_metrics

        metrics |= agent_metrics(samples.generated)
    state.cursor = run.inputs.train.record(samples.cursor, metrics, samples.generated)
    state.total_valid_tokens += metrics["global_valid_toks"]
    run.metrics = metrics

    seconds = run.timer.take()
    if async_grpo.enabled:  # NeMo RL's names
        seconds["exposed_generation"] = seconds["generation"]
        seconds["weight_sync"] = seconds["prepare_for_generation"]
    working_seconds = dict(seconds)
    if run.ranks.bridge and async_grpo.max_age:
        working_seconds["generation"] = seconds["total_step_time"]  # generators work while the trainers do
    run.saver.poll()  # before the step is logged: a kill loses at most save_period logged steps
    performance = performance_metrics(metrics, working_seconds, minibatches, run.model.config, run.cfg.policy)
    if run.memory:
        performance |= run.memory.metrics(run.timer.peaks)
    move_to_log(samples.trained[: run.cfg.logger.num_samples_to_log], run.ranks.bridge)
    if run.log:
        run.log.step(state.step, metrics, seconds, performance)
        run.log.samples(state.step, "train", samples.trained, run.inputs.tokenizer)

    run.told_to_stop = any_rank(run.signals.pending())
    if run.told_to_stop and not run.is_finished:
        raise Interrupted


def dump_if_due(run: Run, trained: Sequence[Sample], adv_B: Sequence[float], step: int) -> None:
    """Writes the samples to the disk before the step trains, in step 1 and then in one step of every dump_rollouts."""
    period = run.cfg.logger.dump_rollouts
    if period and (step - 1) % period == 0:
        from run import dump  # a run without dumps imports nothing of them

        with run.timer("dump_rollouts"):
            dump.write(run, trained, adv_B, step)


def check_engine(run: Run, step: int) -> Numbers:
    """Every canary_period steps, checks that the engine samples from the weights that it was sent; returns the gap."""
    grpo = run.cfg.grpo
    if grpo.canary_period == 0 or step % grpo.canary_period:
        return {}
    with run.timer("canary"):
        when = f"after step {step}"
        gap = check_canary(run.model, run.head_options, run.engine, grpo.logp_gap_limit, run.device, when)
    return {"canary_logp_gap": gap}


def validation_is_due(run: Run) -> bool:
    """Whether the validation sets are to be scored now, after the newest step or before the first."""
    grpo = run.cfg.grpo
    step = run.state.step
    if step == 0:
        return grpo.val_at_start
    if run.told_to_stop:
        return False  # there is no time
    if run.is_finished and grpo.val_at_end:
        return True
    return grpo.val_period > 0 and step % grpo.val_period == 0


def save_if_due(run: Run) -> None:
    """Saves every save_period steps, and after the last one."""
    with run.timer("checkpointing"):
        if run.state.step % run.cfg.checkpointing.save_period == 0 or run.is_finished:
            _save(run)


def _save(run: Run) -> None:
    """Saves a checkpoint of the step that has ended, if the config asks for checkpoints; never after a bad step."""
    state = run.state
    saver = run.saver
    if not saver.cfg.enabled or state.num_bad_steps or state.step == saver.saved:
        return
    reference = run.reference.shards if run.reference else {}
    saver.save(state.step, run.model, run.optimizer, _counters(run), reference, run.metrics)


def _counters(run: Run) -> dict:
    """The state of the run, as a checkpoint keeps it."""
    run.state.selections = run.inputs.train.saved_selections()
    return asdict(run.state)


def save_early(run: Run) -> Exception:
    """Saves a run told to stop, after its last whole step. Returns the exception to raise: Saved, or else StopRun."""
    run.saver.finish()
    _save(run)
    run.saver.finish()
    after = f"stopped on request, after step {run.state.step}"
    if run.saver.saved == run.state.step:
        return Saved(f"{after}; continue with checkpointing.resume_from={run.folder}")
    if not run.cfg.checkpointing.enabled:
        reason = "checkpointing.enabled=false"
    elif run.state.num_bad_steps:
        reason = "it was a bad step"
    else:
        reason = "see above"
    return StopRun(f"{after}, which is not saved ({reason})")


def stop_early(run: Run, stop: StopRun) -> StopRun:
    """Saves and exports a run that a check has stopped between two steps; returns the exception to raise. Amid a step
    the weights may be half an update further, and are given up."""
    state = run.state
    saver = run.saver
    is_amid_update = "policy_training" in run.timer.seconds
    if state.step == 0 or is_amid_update:
        return stop
    if stop.cursor:
        state.cursor = stop.cursor
    try:
        saver.finish()
        if saver.saved == state.step:
            saver.update(_counters(run))
        _save(run)
        saver.finish()
    except (StopRun, OSError) as error:
        run.ranks.print_rank0(f"WARNING: {error}")
    disk_problem = _export(run)
    what_is_kept = "saved" if saver.saved == state.step else "not saved"
    if disk_problem:
        what_is_kept += f", not exported ({disk_problem})"
    elif run.cfg.checkpointing.save_hf_at_end:
        what_is_kept += ", exported"
    return StopRun(f"{stop}. Step {state.step}: {what_is_kept}; continue with checkpointing.resume_from={run.folder}")


def finish(run: Run) -> str:
    """Writes the Hugging Face folder and the closing table; returns why the run ended. StopRun if the disk refused."""
    disk_problem = _export(run)
    reason = f"trained to step {run.state.step}"
    if disk_problem:
        raise StopRun(
            f"{reason}, not exported ({disk_problem}): make room and set checkpointing.resume_from={run.folder}"
        )
    return reason


def _export(run: Run) -> str | None:
    """Exports if the config asks for it, and closes the log; returns what the disk refused."""
    run.watchdog.enter("export")
    disk_problem = None
    if run.cfg.checkpointing.save_hf_at_end:
        try:
            with Progress("export"):
                export(run.cfg, run.model, run.folder, run.inputs, run.state.base_sha256)
        except OSError as error:
            disk_problem = describe_os_error(error)
    if run.log:
        run.log.close(run.state)
    return disk_problem


def export(cfg: Config, model: Decoder, folder: Path, inputs: RunInputs, base_sha256: str | None) -> None:
    """Writes the policy as `hf_model`, and with LoRA `hf_adapter`, into the folder. A collective; OSError on all."""
    dtype = getattr(torch, cfg.policy.precision)
    tokenizer_folder = inputs.tokenizer.file.parent
    save_hf(model, folder / "hf_model", tokenizer_folder, dtype=dtype, base_folder=inputs.model_folder)
    if base_sha256:
        from base.hf.adapters import adapter_config, save_adapter  # a run without LoRA does without

        save_adapter(model, folder / "hf_adapter", adapter_config(cfg.policy, model.config))
