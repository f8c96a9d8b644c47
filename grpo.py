"""GRPO post-training: the entry, and the loop on one page.

    .venv/bin/torchrun --nproc_per_node=8 grpo.py configs/math_1b.yaml [key.sub=value ...]    train
    .venv/bin/python grpo.py --check configs/math_1b.yaml [key.sub=value ...]          find all mistakes
    .venv/bin/python grpo.py --help                                                    every key, its meaning, default

Each rank is one process. It holds FSDP shards of the policy and a vLLM engine, or with tensor parallelism a part of
one. Policy and engine take turns in the GPU's memory. In a split job the last ranks only generate, and all other ranks
only train. `train` below is the algorithm, top to bottom.

Tensor names end in their logical dims; each file names any others that it uses: P prompts of a step (all ranks), G
samples per prompt, B = P * G samples, T packed tokens, R response tokens of a pack, S segments of a pack, D hidden, V
vocabulary, N heads, K key/value heads, H head dim, C a chunk of R.
"""

import gc
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from base.system.disk import keep_console
from base.system.exits import die_with_parent

USAGE = (
    "usage: [torchrun --nproc_per_node=N] grpo.py [--check [--gpu=h100] [--all] [--explain]] [--gpu_memory=GiB] "
    "CONFIG.yaml [key.sub=value ...] | --help"
)

if __name__ == "__main__":
    keep_console()
    if len(sys.argv) == 1 or {"--check", "--help", "-h"} & set(sys.argv):  # before torch and vllm are imported
        from base.check import preflight

        sys.exit(preflight.answer(sys.argv[1:], USAGE))

if "RANK" in os.environ and __name__ == "__main__":
    die_with_parent()
    if os.environ["RANK"] == "0":
        print("loading torch and the engine", flush=True)
gc.disable()  # imports free nothing, and collecting during them takes a third of the start

import torch
from torch import Tensor

from advantages import step_advantages
from base.hf.weights import sync_weights
from base.system.exits import Interrupted, StopRun, exit_process
from base.system.optimizer import Optimizer
from config import Config
from gap import StepGap, check_canary, check_versions, gap_of_pack, judge_step, mask_disagreements
from head import HeadOptions, linear_loss, response_logps
from loss import Metrics
from metrics import Numbers, reduce_over_ranks, sample_metrics, total_of, training_metrics
from model import Decoder
from optim import EntropyBonus, clip_grad_norm, set_learning_rate
from pack import MicroBatch, Minibatch, finish_minibatches, make_minibatches
from rollout import sample_step
from run import steps
from run.job import Job, Run, generate, run_rank, set_up
from run.validation import validate

if TYPE_CHECKING:
    from reference import Reference

gc.enable()
gc.freeze()


def train(run: Run) -> None:
    """GRPO (Shao et al. 2024), step by step. Every rank runs this code; samples, advantages and metrics cover all
    ranks. Raises StopRun when a check of the run fails, Interrupted when a signal asks the run to stop."""
    cfg, state, timer = run.cfg, run.state, run.timer
    model, optimizer = run.model, run.optimizer
    for step in steps.remaining_steps(run):
        with timer("generation"):
            samples = sample_step(run.sampler, cfg, run.inputs.train, state.cursor, step, run.num_steps)
            check_versions(samples.trained, step - 1, cfg.grpo)
            run.engine.sleep()

        with timer("advantage_calculation"):
            adv_B, advantage_metrics = step_advantages(samples.trained, cfg.grpo, cfg.loss_fn)
        steps.dump_if_due(run, samples.trained, adv_B, step)

        with timer("data_processing"):
            minibatches = make_minibatches(samples.trained, adv_B, cfg, run.ranks, run.device)

        with timer("policy_and_reference_logprobs"):
            gap, mask_metrics = compute_logprobs(model, run.head_options, run.reference, minibatches, cfg, step)

        with timer("policy_training"):
            set_learning_rate(optimizer, cfg.policy.scheduler, step, run.num_steps)
            update_metrics, state.num_bad_steps = update(
                model, run.head_options, optimizer, minibatches, gap, state.num_bad_steps, state.bonus, cfg, step
            )
            if run.reference:
                run.reference.follow(model, cfg.grpo, step)

        with timer("prepare_for_generation"):
            num_sync_bytes = sync_weights(model, run.engine, step)

        metrics = steps.check_engine(run, step)
        metrics["weight_sync_bytes"] = num_sync_bytes
        metrics |= sample_metrics(samples.generated, samples.trained)
        metrics |= samples.metrics
        metrics |= advantage_metrics
        metrics |= mask_metrics
        metrics |= update_metrics
        steps.end_step(run, samples, minibatches, metrics)
        if steps.validation_is_due(run):
            validate(run)
        steps.save_if_due(run)


@torch.no_grad()
def compute_logprobs(
    model: Decoder,
    head_options: HeadOptions,
    reference: "Reference | None",
    minibatches: list[Minibatch],
    cfg: Config,
    step: int,
) -> tuple[StepGap, Numbers]:
    """Finishes the minibatches with the log-probabilities that the run needs: of the policy at the start of the step,
    and of the reference policy. Returns the gap between sampler and trainer, as far as it is known, and the metrics of
    `mask_disagreements`."""
    micros = [micro for minibatch in minibatches for micro in minibatch.micros]
    if cfg.needs_old_logps:
        with model.gathered_once():
            for micro in micros:
                micro.old_logp_R, _ = response_logps(model, micro.model_inputs, micro.target_R, head_options)
    if reference:
        reference.score(micros, model, head_options, cfg.loss_fn.topk_logits_k)
    newest_version = step - 1
    gap = StepGap.before_training(micros, newest_version, cfg)
    metrics: Numbers = {}
    if cfg.grpo.seq_logprob_error_threshold is not None:
        metrics = mask_disagreements(micros, cfg.grpo.seq_logprob_error_threshold)
    finish_minibatches(minibatches, head_options.loss.path, newest_version)
    return gap, metrics


def update(
    model: Decoder,
    head_options: HeadOptions,
    optimizer: Optimizer,
    minibatches: list[Minibatch],
    gap: StepGap,
    num_bad_steps: int,
    bonus: EntropyBonus,
    cfg: Config,
    step: int,
) -> tuple[Numbers, int]:
    """The optimizer part of a step: one optimizer step per minibatch and epoch. Returns its metrics, equal on all
    ranks, and the number of bad optimizer steps in a row, which was `num_bad_steps` before. `bonus` follows the entropy
    after each optimizer step. A collective. Raises StopRun as `judge_step` does."""
    sums_of_steps = []
    for minibatch in minibatches * cfg.policy.ppo_epochs:
        with_bonus = bonus.applied_to(head_options, cfg.loss_fn, minibatch.micros[0].adv_R.device)
        sums = compute_gradients(model, with_bonus, minibatch, cfg)
        numbers = reduce_over_ranks(sums)
        grad_norm = clip_grad_norm(model, cfg.policy.max_grad_norm)
        is_sound, num_bad_steps = judge_step(numbers, gap, grad_norm, num_bad_steps, cfg.grpo, step)
        bonus.follow(numbers, cfg.loss_fn)
        if is_sound:
            optimizer.step()
        # Now, so that gradients take no memory during the rollout (NVIDIA-NeMo/RL#1147).
        optimizer.zero_grad(set_to_none=True)
        sums_of_steps.append(sums)
    metrics = training_metrics(sums_of_steps, minibatches)
    metrics |= gap.of_all  # in place of the mean over optimizer steps
    metrics |= bonus.metrics
    metrics["grad_norm"] = grad_norm  # of the last optimizer step, as the learning rate and num_bad_steps
    metrics["lr"] = optimizer.param_groups[0]["lr"]
    metrics["num_bad_steps"] = num_bad_steps
    return metrics, num_bad_steps


def compute_gradients(model: Decoder, head_options: HeadOptions, minibatch: Minibatch, cfg: Config) -> Metrics:
    """Adds the gradient of the minibatch's loss to the parameters. Returns the sums of the metrics over this
    rank's micro-batches."""
    parts = []
    for micro in minibatch.micros:
        loss, metrics = compute_loss(model, head_options, micro, minibatch, cfg)
        model.backward(loss, is_last=micro is minibatch.micros[-1])
        parts.append(metrics)
    if model.config.num_experts:
        parts.append(model.model.expert_metrics())
    return total_of(parts)


def compute_loss(
    model: Decoder, head_options: HeadOptions, micro: MicroBatch, minibatch: Minibatch, cfg: Config
) -> tuple[Tensor, Metrics]:
    """The micro-batch's part of the minibatch's loss, differentiable, and its metrics."""

    def count(number: float) -> Tensor:
        """A number would be a constant of the compiled loss."""
        return torch.full((), number, device=micro.adv_R.device)

    loss_of = partial(  # loss.policy_loss; the output layer adds logp_R and entropy_R
        head_options.loss.call,
        old_logp_R=micro.old_logp_R,
        sampler_logp_R=micro.sampler_logp_R,
        adv_R=micro.adv_R,
        mask_R=micro.mask_R,
        seq_R=micro.seq_R,
        share_R=micro.share_R,
        ref_logp_R=micro.ref_logp_R,
        ref_logp_RJ=micro.ref_logp_RJ,
        positive_R=micro.reward_R > 0,
        num_valid_tokens=count(minibatch.num_tokens),
        num_valid_seqs=count(minibatch.num_trained_samples),
        num_positive_tokens=count(minibatch.num_positive_tokens),
        cfg=cfg.loss_fn,
    )

    # Called in the model's forward, where the output layer's weight is whole. head.py says why the loss is in it.
    loss_of_hidden = partial(
        linear_loss,
        target_R=micro.target_R,
        loss_of=loss_of,
        options=head_options,
        num_grad_rows=micro.num_grad_rows,
        needs_unfiltered=micro.ref_logp_R is not None,
        ids_RJ=micro.ref_ids_RJ,
    )
    loss, metrics, logp_R = model(*micro.model_inputs, loss_of_hidden)
    metrics |= gap_of_pack(micro, logp_R, minibatch.version, cfg.grpo)
    return loss, metrics


def train_or_generate(job: Job) -> str:
    """A trainer syncs, trains and exports; a generator of a split job serves the trainers. Returns why the run
    ended."""
    if job.ranks.generates:
        return generate(job)
    run = set_up(job)
    with run.sampler:
        sync_weights(run.model, run.engine, run.state.step)
        limit = run.cfg.grpo.logp_gap_limit
        check_canary(run.model, run.head_options, run.engine, limit, run.device, "after the first sync")
        with run.saver:
            try:
                if steps.validation_is_due(run):
                    validate(run)
                train(run)
            except Interrupted:  # by a signal; a step with incomplete samples is dropped
                raise steps.save_early(run) from None
            except StopRun as stop:
                raise steps.stop_early(run, stop) from None
        return steps.finish(run)


def main() -> int:
    """One rank from start to exit code."""
    return run_rank(USAGE, sys.argv[1:], train_or_generate)


if __name__ == "__main__":
    exit_process(main())
