"""GRPO post-training: the entry and the loop.

    torchrun --nproc_per_node=8 grpo.py configs/math_1b.yaml [key.sub=value ...]     train
    python grpo.py --check configs/math_1b.yaml [key.sub=value ...]                  find every config and data error
    python grpo.py --help                                                            every key, meaning and default

Each rank is one process that holds its FSDP shards of the policy and a whole vLLM engine (or a part of one, with tensor
parallelism); on a GPU they take turns with its memory. `train` below is the algorithm, top to bottom. This file has no
maths (loss.py), no tokens (data.py), no engine calls beyond generate, sleep, wake and sync (rollout.py).
"""

import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import config
import data
from graders.pool import GraderPool
from run import config_check, config_file
from run.preflight import Inputs, check, num_steps_of, read_inputs
from run.resume import checkpoint_folder, resolve
from system.exits import die_with_parent

USAGE = "usage: [torchrun --nproc_per_node=N] grpo.py [--check] CONFIG.yaml [key.sub=value ...] | --help"


def parse(argv: Sequence[str]) -> config.Config:
    """The validated config of a command line."""
    words = [word for word in argv if word != "--check"]
    if not words or words[0].startswith("-"):
        raise config.ConfigError(USAGE)
    cfg = config_file.load(words[0], words[1:])
    config_check.validate(cfg, int(os.environ.get("WORLD_SIZE", "1")))
    return resolve(cfg)


if __name__ == "__main__" and (len(sys.argv) == 1 or {"--check", "--help", "-h"} & set(sys.argv)):
    # Before torch and vllm are imported: mistakes are answered in a second.
    if {"--help", "-h"} & set(sys.argv):
        print(USAGE, config_file.help_text(), sep="\n\n")
        sys.exit(0)
    try:
        print(check(parse(sys.argv[1:])))
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)

if "RANK" in os.environ:
    die_with_parent()
if os.environ.get("RANK", "0") == "0" and __name__ == "__main__":
    print("loading torch and vllm", flush=True)
gc.disable()  # what is imported stays: looking for garbage in it takes a third of the start

import torch
import torch.distributed as dist

from advantages import advantage_metrics, advantages
from freshness import check_canary, check_versions
from loss import derived_metrics
from model import Decoder, full_tensors, load_policy, save_hf, uses_flash_attention
from reward_model import RewardModel
from rollout import Engine, rollout_over_ranks
from run import checkpoint
from run.folder import open_run_folder, write_provenance
from run.log import RunLog, Timers
from sampling import collect, data_is_used_up
from system.exits import Interrupted, Saved, Signals, StopRun, describe_failure, exit_process, write_exit_file
from system.ranks import Ranks, any_rank, broadcast_from_rank0, seed_everything, start_process_group
from system.watchdog import Watchdog
from update import (
    Reference,
    kernel_backend,
    loss_path,
    make_micro_batches,
    needs_reference,
    score,
    set_learning_rate,
    train_step,
)
from validation import validate

gc.enable()
gc.freeze()


def train(cfg: config.Config, inputs: Inputs, ranks: Ranks, device: torch.device, dog: Watchdog) -> str:
    """The run: returns the reason it ended. Raises StopRun when one of its checks fails, Saved when told to stop."""
    grpo, saving, timer = cfg.grpo, cfg.checkpointing, Timers(dog.enter)
    num_rows, num_steps = inputs.train.num_rows, num_steps_of(cfg, inputs.train.num_rows)
    signals = Signals(saving.must_save_by_seconds)
    model, optimizer, engine = build(cfg, inputs, ranks, device)
    GraderPool.stop, engine.stop = signals.pending, partial(ranks.any_rank_of_engine, signals.pending)
    reference = Reference(model) if needs_reference(cfg) else None
    run_folder, frozen = dog.run_folder, reference.shards if reference else {}
    checkpoints = checkpoint_folder(saving, run_folder)
    state = restore(cfg, inputs, model, optimizer, frozen, ranks, checkpoints)
    log = open_log(cfg, run_folder, ranks, state["step"], num_steps)
    sync_weights(model, engine, state["step"])
    check_canary(cfg, model, engine, device, "after the first sync")
    start, step, train = time.perf_counter(), state["step"], {}
    with checkpoint.Saver(checkpoints, saving, ranks, saved=step if saving.resume_from else None) as saver:
        try:
            if grpo.val_at_start and step == 0:
                dog.enter("validation")
                state["first_validation"] = validate(cfg, inputs, engine, ranks, log, step)
            # Dynamic sampling draws more than a step has, so data may be used up before the last step.
            while step < num_steps and not data_is_used_up(grpo, num_rows, state["consumed_samples"]):
                step, step_start = step + 1, time.perf_counter()
                dog.step = step
                with timer("generation"):
                    samples, cursor, found = collect_samples(cfg, inputs, engine, ranks, state["cursor"], step)
                    engine.sleep()
                check_versions(samples, step - 1)
                train = found | learn(cfg, inputs, model, optimizer, reference, samples, ranks, device, state, timer)
                with timer("prepare_for_generation"):
                    sync_weights(model, engine, step)
                if grpo.canary_period and step % grpo.canary_period == 0:
                    with timer("canary"):
                        train["canary_logp_gap"] = check_canary(cfg, model, engine, device, f"after step {step}")
                count_step(state, step, cursor, num_rows, train)
                saver.poll()  # before the step counts as done: a kill costs at most save_period of those
                if log:
                    seconds = timer.take() | {"total_step_time": time.perf_counter() - step_start}
                    log.step(step, train, seconds, ranks.world_size)
                    log.samples(step, "train", samples, inputs.tokenizer)
                is_last = step == num_steps or data_is_used_up(grpo, num_rows, state["consumed_samples"])
                if (stop := any_rank(signals.pending())) and not is_last:
                    raise Interrupted
                due = grpo.val_period and step % grpo.val_period == 0
                if (due or (is_last and grpo.val_at_end)) and not stop:  # who is told to stop has no time for it
                    dog.enter("validation")
                    state["last_validation"] = validate(cfg, inputs, engine, ranks, log, step)
                with timer("checkpointing"):
                    if step % saving.save_period == 0 or is_last:
                        save(saver, model, optimizer, state, frozen, train)
        except Interrupted:  # between steps, or amid a step's samples, which are given up, or amid a validation
            raise save_early(saver, model, optimizer, state, frozen, train, run_folder) from None
    dog.enter("export")
    if saving.save_hf_at_end:
        save_hf(model, run_folder / "hf_model", inputs.model_folder, dtype=getattr(torch, cfg.policy.precision))
    if log:
        log.close(state, time.perf_counter() - start, checkpoints, saving)
    return f"trained to step {state['step']}"


def learn(
    cfg: config.Config,
    inputs: Inputs,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None,
    samples: list[data.Sample],
    ranks: Ranks,
    device: torch.device,
    state: dict,
    timer: Timers,
) -> dict[str, float]:
    """Samples of a step -> trained weights: advantages, packs, log-probabilities, optimizer steps; their metrics."""
    step, vocab_size = state["step"] + 1, inputs.tokenizer.vocab_size
    with timer("advantage_calculation"):
        adv_B, spread = step_advantages(samples, cfg)
    with timer("data_processing"):
        micro_batches = make_micro_batches(samples, adv_B, cfg, ranks, device)
    with timer("policy_and_reference_logprobs"):
        batches, masked = score(model, reference, micro_batches, cfg, vocab_size)
    with timer("policy_training"):
        set_learning_rate(optimizer, cfg, step, num_steps_of(cfg, inputs.train.num_rows))
        update = train_step(model, optimizer, batches, cfg, vocab_size, step, state["num_bad_steps"])
        if reference:
            reference.follow(model, cfg.grpo, step)
    return derived_metrics(masked | update) | spread


def count_step(state: dict, step: int, cursor: dict, num_rows: int, update: dict[str, float]) -> None:
    """The run's counters after a step: NeMo RL's GRPOSaveState, whose consumed_samples are prompts."""
    state |= {"step": step, "num_bad_steps": update["num_bad_steps"], "cursor": cursor}
    state["consumed_samples"] = cursor["position"]
    state["current_epoch"] = state["consumed_samples"] // num_rows
    state["total_valid_tokens"] += update["global_valid_toks"]


def save(saver: checkpoint.Saver, model, optimizer, state: dict, frozen: dict, train: dict[str, float]) -> None:
    """A checkpoint of the step that has ended, where the config has them; never after a step that went wrong."""
    if saver.cfg.enabled and state["num_bad_steps"] == 0 and state["step"] != saver.saved:
        saver.save(state["step"], model, optimizer, state, frozen, checkpoint.metric(saver.cfg, state, train))


def save_early(
    saver: checkpoint.Saver, model, optimizer, state: dict, frozen: dict, train: dict[str, float], run_folder: Path
) -> Exception:
    """What a signal ends the run with, after the last step that was whole: Saved only if it is."""
    saver.finish()
    save(saver, model, optimizer, state, frozen, train)
    saver.finish()
    after = f"told to stop, after step {state['step']}"
    if saver.saved == state["step"]:
        return Saved(f"{after}; continue with checkpointing.resume_from={run_folder}")
    bad = "it went wrong" if state["num_bad_steps"] else "see above"
    why = bad if saver.cfg.enabled else "checkpointing.enabled=false"
    return StopRun(f"{after}, which is not saved ({why})")


def step_advantages(samples: list[data.Sample], cfg: config.Config) -> tuple[list[float], dict[str, float]]:
    """(adv_B, their metrics); a function of all samples of the step, so equal on all ranks."""
    reward_B = torch.tensor([s.reward for s in samples])
    group_B = torch.tensor([s.prompt for s in samples])
    num_tokens_B = torch.tensor([int(s.mask.sum()) for s in samples])
    rewards = {name: torch.tensor([s.rewards[name] for s in samples]) for name in samples[0].rewards}
    adv_B = advantages(reward_B, group_B, num_tokens_B, cfg.grpo, cfg.loss_fn, rewards)
    return adv_B.tolist(), advantage_metrics(reward_B, group_B, adv_B, cfg.grpo)


def build(
    cfg: config.Config, inputs: Inputs, ranks: Ranks, device: torch.device
) -> tuple[Decoder, torch.optim.AdamW, Engine]:
    """The sharded policy with float32 master weights, its optimizer, and the engine, which has no weights yet."""
    backend = kernel_backend(cfg, device)
    seed_everything(cfg.grpo.seed)
    mesh = dist.init_device_mesh(device.type, (ranks.world_size,))
    model = load_policy(
        inputs.model_folder,
        device=device,
        mesh=mesh,
        precision=cfg.policy.precision,
        activation_checkpointing=cfg.policy.dtensor_cfg.activation_checkpointing,
    )
    size, dtype = sum(param.numel() for param in model.parameters()), getattr(torch, cfg.policy.precision)
    attention = "varlen_attn" if uses_flash_attention(device.type, dtype) else "SDPA by runs of equal length"
    ranks.print_rank0(
        f"policy: {size / 1e6:,.1f} M parameters, {cfg.policy.precision}, FSDP2 over {ranks.world_size} ranks; "
        f"{backend.describe(inputs.tokenizer.vocab_size)}; {loss_path(cfg, device).describe()}; attention: {attention}; "
        "starting the engine"
    )
    if inputs.reward_model:
        pack_tokens = cfg.policy.sequence_packing.train_mb_tokens
        reward_model = RewardModel(
            *inputs.reward_model, cfg.env.reward_model, device=device, mesh=mesh, pack_tokens=pack_tokens
        )
        inputs.environments["reward_model"].score = reward_model.score
    optimizer = torch.optim.AdamW(model.parameters(), **asdict(cfg.policy.optimizer.kwargs), fused=True)
    generation = cfg.policy.generation
    engine = Engine(
        str(inputs.model_folder),
        inputs.tokenizer,
        generation,
        dtype=generation.vllm_cfg.precision or cfg.policy.precision,
        tied_head=model.config.tie_word_embeddings,
        max_total_tokens=cfg.policy.max_total_sequence_length,
        seed=cfg.grpo.seed,
    )
    ranks.print_rank0(
        f"engine: {ranks.dp_size} x vLLM over {ranks.tp_size} ranks each, vocabulary {engine.vocab_size:,}"
    )
    engine.sleep()
    return model, optimizer, engine


def restore(
    cfg: config.Config,
    inputs: Inputs,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    reference: dict[str, torch.Tensor],
    ranks: Ranks,
    checkpoints: Path,
) -> dict:
    """The run's counters: of a new run, or of the checkpoint it resumes, whose weights and moments are loaded too.

    Sampling seeds are f(seed, step, prompt, sample) and the data order is f(seed, epoch), so there is no other state.
    """
    if cfg.checkpointing.resume_from is None:
        if any(checkpoints.glob("step_*")):
            raise config.ConfigError(f"{checkpoints} holds checkpoints of another run: choose another checkpoint_dir")
        names = ("step", "num_bad_steps", "consumed_samples", "current_epoch", "total_valid_tokens")
        return dict.fromkeys(names, 0) | {
            "first_validation": {},
            "last_validation": {},
            "cursor": inputs.train.start(),
            "fingerprints": inputs.train.fingerprints,
        }
    mode = cfg.checkpointing.resume
    state = checkpoint.load(checkpoints, model, optimizer, ranks, extra=reference, mode=mode)
    if cfg.checkpointing.allow_changes and state["fingerprints"] != inputs.train.fingerprints:
        ranks.print_rank0(
            "WARNING: other data than before (checkpointing.allow_changes=true): they are read from their start"
        )
        state |= {"cursor": inputs.train.start(), "fingerprints": inputs.train.fingerprints, "consumed_samples": 0}
    inputs.train.check_same(state["fingerprints"], cfg.checkpointing.resume_from)
    return state


def sync_weights(model: Decoder, engine: Engine, version: int) -> None:
    """Trainer -> sampler. The KV cache gets its memory back after the weights, which need it while they stream."""
    engine.wake("weights")
    engine.sync(full_tensors(model, engine.dtype), version)
    engine.wake("kv_cache")


def collect_samples(
    cfg: config.Config, inputs: Inputs, engine: Engine, ranks: Ranks, cursor: dict, step: int
) -> tuple[list[data.Sample], dict, dict[str, float]]:
    """The step's samples, the cursor behind the prompts drawn for them, and their metrics; all of it on every rank."""
    generate = partial(
        rollout_over_ranks,
        engine,
        inputs.tokenizer,
        inputs.environments,
        ranks=ranks,
        num_samples=cfg.grpo.num_generations_per_prompt,
        temperature=cfg.policy.generation.temperature,
        max_new_tokens=cfg.policy.generation.max_new_tokens,
        max_turns=cfg.grpo.max_rollout_turns,
        max_error_fraction=cfg.env.max_error_fraction,
        seed_key=(cfg.grpo.seed, step),
    )
    return collect(cfg, inputs.train, cursor, generate)


def open_log(cfg: config.Config, run_folder: Path, ranks: Ranks, step: int, num_steps: int) -> RunLog | None:
    """Rank 0's log, with the resolved config beside it; None on the others."""
    if ranks.rank != 0:
        return None
    if cfg.checkpointing.resume_from is None:
        (run_folder / "config.yaml").write_text(config_file.to_yaml(cfg))
    what = {"tensorboard": cfg.logger.tensorboard_enabled, "max_samples": cfg.logger.num_samples_to_log}
    return RunLog(run_folder, first_step=step + 1, num_steps=num_steps, **what)


def main() -> int:
    """One rank from start to exit code."""
    run_folder, dog = None, None
    try:
        cfg = parse(sys.argv[1:])
        inputs = read_inputs(cfg)
        ranks, device = start_process_group(cfg.policy.generation.vllm_cfg.tensor_parallel_size)
        cfg = broadcast_from_rank0(cfg)  # resume=auto: another rank may have found another run
        run_folder = open_run_folder(cfg.logger.log_dir, cfg.checkpointing.resume_from, ranks)
        if ranks.rank == 0:
            write_provenance(run_folder, ranks.world_size)
        dog = Watchdog(ranks, run_folder, **asdict(cfg.watchdog))
        code, reason = 0, train(cfg, inputs, ranks, device, dog)
        for environment in inputs.environments.values():
            environment.close()
    except BaseException as error:
        code, reason = describe_failure(error)
    if dog:
        dog.stop()
    if write_exit_file(code, reason, run_folder):
        print(reason, file=sys.stderr if code else sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    exit_process(main())
