"""GRPO post-training: the entry and the loop.

    torchrun --nproc_per_node=8 grpo.py configs/math_1b.yaml [key.sub=value ...]     train
    python grpo.py --check configs/math_1b.yaml [key.sub=value ...]                  find every config and data error
    python grpo.py --help                                                            every key, meaning and default

Each rank is one process that holds its FSDP shards of the policy and a whole vLLM engine (or a part of one, with tensor
parallelism); on a GPU they take turns with its memory. `train` below is the algorithm, top to bottom. This file has no
maths (loss.py), no tokens (data.py), no engine calls beyond generate, sleep, wake and sync (rollout.py).
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import config
import data
from inputs import Inputs, check, num_steps_of, read_inputs

USAGE = "usage: [torchrun --nproc_per_node=N] grpo.py [--check] CONFIG.yaml [key.sub=value ...] | --help"


def parse(argv: Sequence[str]) -> config.Config:
    """The validated config of a command line."""
    words = [word for word in argv if word != "--check"]
    if not words or words[0].startswith("-"):
        raise config.ConfigError(USAGE)
    cfg = config.load(words[0], words[1:])
    config.validate(cfg, int(os.environ.get("WORLD_SIZE", "1")))
    return cfg


if __name__ == "__main__" and (len(sys.argv) == 1 or {"--check", "--help", "-h"} & set(sys.argv)):
    # Before torch and vllm are imported: mistakes are answered in a second.
    if {"--help", "-h"} & set(sys.argv):
        print(USAGE, config.help_text(), sep="\n\n")
        sys.exit(0)
    try:
        print(check(parse(sys.argv[1:])))
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)

if os.environ.get("RANK", "0") == "0" and __name__ == "__main__":
    print("loading torch and vllm", flush=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import checkpoint  # noqa: E402
import runtime  # noqa: E402
from loss import group_advantages, policy_loss  # noqa: E402
from metrics import RunLog, accumulate, reduce_over_ranks, sample_metrics  # noqa: E402
from model import Decoder, full_tensors, load_policy, save_hf  # noqa: E402
from rollout import Engine, gather_samples, rollout  # noqa: E402
from validation import validate  # noqa: E402


def train(cfg: config.Config, inputs: Inputs, ranks: runtime.Ranks, device: torch.device, run_folder: Path) -> str:
    """The run: returns the reason it ended. Raises StopRun when one of its checks fails, Saved when told to stop."""
    grpo, saving, signals, timer = cfg.grpo, cfg.checkpointing, runtime.Signals(), runtime.Timers()
    num_steps = num_steps_of(cfg, len(inputs.train.rows))
    checkpoints = Path(saving.checkpoint_dir or run_folder / "checkpoints")
    model, optimizer, engine = build(cfg, inputs, ranks, device)
    state = restore(cfg, inputs, model, optimizer, ranks, checkpoints)
    log = open_log(cfg, run_folder, ranks, state["step"], num_steps)
    sync_weights(model, engine, state["step"])
    if grpo.val_at_start and state["step"] == 0:
        state["first_validation"] = validate(cfg, inputs, engine, ranks, log, step=0)

    start = time.perf_counter()
    for step in range(state["step"] + 1, num_steps + 1):
        step_start = time.perf_counter()
        with timer("generation"):
            samples = collect_samples(cfg, inputs, engine, ranks, state["consumed_samples"], step)
            engine.sleep()
        with timer("data_processing"):
            adv_B = group_advantages(
                torch.tensor([s.reward for s in samples]),
                torch.tensor([s.prompt for s in samples]),
                leave_one_out=grpo.use_leave_one_out_baseline,
                normalize=grpo.normalize_rewards,
            ).tolist()
            packs = packs_of_rank(samples, adv_B, cfg, ranks)
        with timer("policy_training"):
            set_learning_rate(optimizer, cfg, step)
            update = compute_gradients(model, packs, samples, cfg, inputs.tokenizer.vocab_size, device)
            check_logp_gap(update, grpo.logp_gap_limit, step)
            update |= apply_gradients(model, optimizer, cfg, update["loss"], state["num_bad_steps"], step)
        with timer("prepare_for_generation"):
            sync_weights(model, engine, step)

        state |= {"step": step, "num_bad_steps": update["num_bad_steps"]}
        state["consumed_samples"] += grpo.num_prompts_per_step
        state["current_epoch"] = state["consumed_samples"] // len(inputs.train.rows)
        state["total_valid_tokens"] += update["global_valid_toks"]
        if log:
            advantages = {"advantages/mean": fmean(adv_B), "advantages/max": max(adv_B), "advantages/min": min(adv_B)}
            seconds = timer.take() | {"total_step_time": time.perf_counter() - step_start}
            log.step(step, sample_metrics(samples) | update | advantages, seconds, ranks.world_size)
            log.samples(step, "train", samples, inputs.tokenizer)
        is_last, stop = step == num_steps, signals.requested()
        if (grpo.val_period and step % grpo.val_period == 0) or (is_last and grpo.val_at_end):
            state["last_validation"] = validate(cfg, inputs, engine, ranks, log, step)
        due = step % saving.save_period == 0 or is_last or stop
        if saving.enabled and due and state["num_bad_steps"] == 0:  # never after a step that went wrong
            checkpoint.save(checkpoints, step, model, optimizer, state, ranks, keep_latest=saving.keep_latest)
        if stop and not is_last:
            raise runtime.Saved(f"signal after step {step}; continue with checkpointing.resume_from={run_folder}")

    if saving.save_hf_at_end:
        save_hf(model, run_folder / "hf_model", inputs.model_folder, dtype=getattr(torch, cfg.policy.precision))
    if log:
        log.close(state, time.perf_counter() - start, checkpoints, saving)
    return f"trained to step {num_steps}"


def build(
    cfg: config.Config, inputs: Inputs, ranks: runtime.Ranks, device: torch.device
) -> tuple[Decoder, torch.optim.AdamW, Engine]:
    """The sharded policy with float32 master weights, its optimizer, and the engine, which has no weights yet."""
    runtime.seed_everything(cfg.grpo.seed)
    mesh = dist.init_device_mesh(device.type, (ranks.world_size,))
    model = load_policy(
        inputs.model_folder,
        device=device,
        mesh=mesh,
        precision=cfg.policy.precision,
        activation_checkpointing=cfg.policy.dtensor_cfg.activation_checkpointing,
    )
    size = sum(param.numel() for param in model.parameters())
    ranks.say(
        f"policy: {size / 1e6:,.1f} M parameters, {cfg.policy.precision}, FSDP2 over {ranks.world_size} ranks; head: "
        "torch, chunked; starting the engine"
    )
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
    ranks.say(f"engine: {ranks.dp_size} x vLLM over {ranks.tp_size} ranks each, vocabulary {engine.vocab_size:,}")
    engine.sleep()
    return model, optimizer, engine


def restore(
    cfg: config.Config,
    inputs: Inputs,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    ranks: runtime.Ranks,
    checkpoints: Path,
) -> dict:
    """The run's counters: of a new run, or of the checkpoint it resumes, whose weights and moments are loaded too.

    Sampling seeds are f(seed, step, prompt, sample) and the data order is f(seed, epoch), so there is no other state.
    """
    if cfg.checkpointing.resume_from is None:
        names = ("step", "num_bad_steps", "consumed_samples", "current_epoch", "total_valid_tokens")
        return dict.fromkeys(names, 0) | {
            "first_validation": {},
            "last_validation": {},
            "fingerprint": inputs.train.fingerprint,
        }
    state = checkpoint.load(checkpoints, model, optimizer, ranks)
    if state["fingerprint"] != inputs.train.fingerprint:
        raise config.ConfigError(
            f"{inputs.train.path} is not the data that {cfg.checkpointing.resume_from} was trained on: its position in "
            "it would mean other prompts; give the same file, or start a new run from the exported model"
        )
    return state


def sync_weights(model: Decoder, engine: Engine, version: int) -> None:
    """Trainer -> sampler. The KV cache gets its memory back after the weights, which need it while they stream."""
    engine.wake("weights")
    engine.sync(full_tensors(model, engine.dtype), version)
    engine.wake("kv_cache")


def collect_samples(
    cfg: config.Config, inputs: Inputs, engine: Engine, ranks: runtime.Ranks, position: int, step: int
) -> list[data.Sample]:
    """The step's samples, all of them on every rank; each engine generated and graded those of its share of prompts."""
    num_prompts, rows, generation = cfg.grpo.num_prompts_per_step, inputs.train.rows, cfg.policy.generation
    picked = data.rows_at(len(rows), position, num_prompts, seed=cfg.grpo.seed, shuffle=cfg.data.shuffle)
    mine = [(p, rows[picked[p]]) for p in range(ranks.dp_rank, num_prompts, ranks.dp_size)]
    samples = rollout(
        engine,
        inputs.tokenizer,
        inputs.environments,
        mine,
        num_samples=cfg.grpo.num_generations_per_prompt,
        temperature=generation.temperature,
        max_new_tokens=generation.max_new_tokens,
        seed_key=(cfg.grpo.seed, step),
    )
    return gather_samples(samples, ranks)


def packs_of_rank(
    samples: list[data.Sample], adv_B: list[float], cfg: config.Config, ranks: runtime.Ranks
) -> list[data.Pack]:
    """This rank's packs. Every rank works out all of them, so that all make the same number of collectives."""
    max_tokens = cfg.policy.sequence_packing.train_mb_tokens
    shares = data.assign_to_ranks([s.num_tokens for s in samples], ranks.world_size)
    packs = [data.pack_samples([samples[i] for i in share], [adv_B[i] for i in share], max_tokens) for share in shares]
    most = max(map(len, packs))
    return packs[ranks.rank] + [data.empty_pack()] * (most - len(packs[ranks.rank]))


def set_learning_rate(optimizer: torch.optim.Optimizer, cfg: config.Config, step: int) -> None:
    """Linear warm-up from warmup_start_factor, then constant; a function of the step alone, so nothing to resume."""
    schedule = cfg.policy.scheduler
    share = min(1.0, (step - 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    factor = schedule.warmup_start_factor + (1 - schedule.warmup_start_factor) * share
    for group in optimizer.param_groups:
        group["lr"] = cfg.policy.optimizer.kwargs.lr * factor


def compute_gradients(
    model: Decoder,
    packs: list[data.Pack],
    samples: list[data.Sample],
    cfg: config.Config,
    vocab_size: int,
    device: torch.device,
) -> dict[str, float]:
    """Forward and backward over this rank's packs; gradients add up over packs and (in FSDP) over ranks.

    One optimizer step follows each rollout, so the policy at the start of the step is the current one: its logp is
    `logp_R.detach()`, the ratio is 1, and comparing it with the sampler's costs no extra forward. Denominators are
    those of the whole step. Returns the step's loss metrics, equal on all ranks.
    """
    counts = [int(s.mask.sum()) for s in samples]
    num_tokens, num_seqs = sum(counts), sum(count > 0 for count in counts)
    total: dict = {}

    def on_device(x):
        return torch.from_numpy(x).to(device, non_blocking=True)

    for pack in packs:
        adv_R = on_device(pack.adv_R)
        logp_R, entropy_R = model(
            on_device(pack.token_T),
            on_device(pack.position_T),
            pack.cu_seqlens,
            on_device(pack.row_R),
            on_device(pack.target_R),
            temperature=cfg.policy.generation.temperature,
            vocab_size=vocab_size,
        )
        loss, metrics = policy_loss(
            logp_R,
            old_logp_T=logp_R.detach(),
            sampler_logp_T=on_device(pack.sampler_logp_R),
            adv_T=adv_R,
            mask_T=torch.ones_like(adv_R),
            seq_T=on_device(pack.seq_R),
            num_valid_tokens=num_tokens,
            num_valid_seqs=num_seqs,
            cfg=cfg.loss_fn,
            entropy_T=entropy_R.detach(),
        )
        loss.backward()
        accumulate(total, metrics)
    return reduce_over_ranks(total) | {"global_valid_toks": num_tokens, "global_valid_seqs": num_seqs}


def apply_gradients(
    model: Decoder, optimizer: torch.optim.Optimizer, cfg: config.Config, loss: float, num_bad_steps: int, step: int
) -> dict[str, float]:
    """Clips the gradient and steps, unless loss or gradient is not finite: then the weights stay as they are, and more
    than max_bad_steps such steps in a row end the run. Both numbers are equal on all ranks, so all take one branch."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.policy.max_grad_norm).full_tensor().item()
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # at once: gradients must not take memory during the rollout (RL#1147)
    num_bad_steps = 0 if finite else num_bad_steps + 1
    if num_bad_steps > cfg.grpo.max_bad_steps:
        raise runtime.StopRun(
            f"step {step}: loss {loss}, gradient norm {norm}: {num_bad_steps} steps in a row are not finite "
            f"(grpo.max_bad_steps={cfg.grpo.max_bad_steps}); the weights are those before the first of them"
        )
    return {"grad_norm": norm, "lr": optimizer.param_groups[0]["lr"], "num_bad_steps": num_bad_steps}


def check_logp_gap(update: dict[str, float], limit: float | None, step: int) -> None:
    """Sampler and trainer score the same tokens with the same weights: a gap means they are not the same.

    Raises StopRun, before the step is applied. A sampler that reports no finite number at all fails too.
    """
    gap, unknown = update["logp_gap_mean"], update["num_nonfinite_sampler_logp"]
    if limit is not None and (not gap <= limit or unknown):
        raise runtime.StopRun(
            f"step {step}: sampler and trainer disagree by {gap:.4f} nats per token on average (max "
            f"{update['logp_gap_max']:.4f}; {unknown:.0f} of the sampler's not finite; grpo.logp_gap_limit={limit}). "
            "Likely causes: the engine holds old weights (sync skipped or partial), a stale prefix cache, another "
            "temperature or vocabulary on one side, or a wrong attention kernel. The step was not applied."
        )


def open_log(cfg: config.Config, run_folder: Path, ranks: runtime.Ranks, step: int, num_steps: int) -> RunLog | None:
    """Rank 0's log, with the resolved config beside it; None on the others."""
    if ranks.rank != 0:
        return None
    (run_folder / "config.yaml").write_text(config.to_yaml(cfg))
    return RunLog(
        run_folder,
        tensorboard=cfg.logger.tensorboard_enabled,
        first_step=step + 1,
        num_steps=num_steps,
        max_samples=cfg.logger.num_samples_to_log,
    )


def main() -> int:
    """One rank from start to exit code."""
    run_folder = None
    try:
        cfg = parse(sys.argv[1:])
        inputs = read_inputs(cfg)
        ranks, device = runtime.start(cfg.policy.generation.vllm_cfg.tensor_parallel_size)
        run_folder = runtime.open_run_folder(cfg.logger.log_dir, cfg.checkpointing.resume_from, ranks)
        code, reason = 0, train(cfg, inputs, ranks, device, run_folder)
    except BaseException as error:
        code, reason = runtime.describe_failure(error)
    runtime.finish(code, reason, run_folder)
    if os.environ.get("RANK", "0") == "0":
        print(reason, file=sys.stderr if code else sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
