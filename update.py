"""Samples of a rollout -> optimizer steps: micro-batches, old and reference log-probabilities, gradients, AdamW's step.

Owns what happens between the advantages and the next weight sync. A rollout of P * G samples is cut into optimizer
batches of `train_global_batch_size`, gone through `ppo_epochs` times; each batch into packs, the same number on every
rank. Denominators are those of the whole optimizer batch. The formulas are loss.py's and advantages.py's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

import config
import data
from advantages import kl_in_reward_advantages
from kernels import KernelBackend, LossPath, choose_backend, linear_logp, linear_loss
from kernels.linear_loss import DEVIATION, one_pass_problem
from loss import Metrics, policy_loss, seq_logp_error_mask
from model import Decoder, sharded_parameters
from run.loss_path import choose_loss_path
from run.metrics import accumulate, reduce_over_ranks
from system.exits import StopRun
from system.ranks import Ranks


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A `data.Pack` on the device, with what the trainer finds out about it. mask_R: rows that are trained on.
    num_grad_rows: only the first so many rows can have a gradient; the others are there for the metrics."""

    pack: data.Pack
    token_T: Tensor
    position_T: Tensor
    pos_R: Tensor
    target_R: Tensor
    sampler_logp_R: Tensor
    adv_R: Tensor
    seq_R: Tensor
    reward_R: Tensor
    mask_R: Tensor
    num_grad_rows: int
    old_logp_R: Tensor | None = None
    ref_logp_R: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimizer step: this rank's micro-batches, and counts over all ranks."""

    micros: list[MicroBatch]
    num_tokens: int
    num_seqs: int
    num_positive_tokens: int


class Reference:
    """The policy the KL is measured to: a copy of this rank's shards in host memory, frozen but for `update`.

    It has no module of its own: `in_place_of` lends the policy's to it for a forward, so it takes no device memory
    while it is not used, and it is computed by the same code.
    """

    def __init__(self, model: Decoder):
        self.shards = {name: shard.cpu().clone() for name, shard in _shards(model).items()}

    @contextmanager
    def in_place_of(self, model: Decoder) -> Iterator[None]:
        """Within, `model` computes with the reference's weights."""
        policy = {name: shard.clone() for name, shard in _shards(model).items()}
        _copy(self.shards, _shards(model))
        try:
            yield
        finally:
            _copy(policy, _shards(model))

    @torch.no_grad()
    def update(self, model: Decoder, alpha: float) -> None:
        """reference <- alpha * policy + (1 - alpha) * reference (TRL's ref_model_mixup_alpha; 1 copies)."""
        for name, shard in _shards(model).items():
            self.shards[name].lerp_(shard.cpu(), alpha)

    def follow(self, model: Decoder, cfg: config.GRPOConfig, step: int) -> None:
        """`update` where the config has it after this step."""
        if cfg.ref_policy_update_period and step % cfg.ref_policy_update_period == 0:
            self.update(model, cfg.ref_policy_update_alpha)


def _shards(model: Decoder) -> dict[str, Tensor]:
    return {name: param.to_local().detach() for name, param in sharded_parameters(model).items()}


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


def needs_reference(cfg: config.Config) -> bool:
    return cfg.loss_fn.reference_policy_kl_penalty > 0


def needs_old_logps(cfg: config.Config) -> bool:
    """Whether the policy at the start of the step is scored in a forward of its own.

    Not when a single optimizer step follows each rollout: the training forward itself is then that policy, old is its
    log-probability, detached, and the ratio is 1 exactly. More steps move away from it; the mask of sequences whose
    log-probabilities disagree, and a KL in the reward, must be known before the first one.
    """
    per_rollout = cfg.grpo.num_prompts_per_step * cfg.grpo.num_generations_per_prompt
    several = cfg.policy.ppo_epochs > 1 or (cfg.policy.train_global_batch_size or per_rollout) < per_rollout
    return several or cfg.grpo.seq_logprob_error_threshold is not None or cfg.loss_fn.use_kl_in_reward


def make_micro_batches(
    samples: Sequence[data.Sample], adv_B: Sequence[float], cfg: config.Config, ranks: Ranks, device: torch.device
) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each optimizer step. Every rank works out the packs of all of them, so that all
    make the same number of collectives; a rank with fewer runs empty ones."""
    size = cfg.policy.train_global_batch_size or len(samples)
    trained = [bool(s.mask.any()) for s in samples]  # a sample filtered out takes no part in any forward
    max_tokens = cfg.policy.sequence_packing.train_mb_tokens
    steps = []
    for first in range(0, len(samples), size):
        part = [i for i in range(first, min(first + size, len(samples))) if trained[i]]
        packs = []
        for share in data.assign_to_ranks([samples[i].num_tokens for i in part], ranks.world_size):
            members = [part[k] for k in share]
            packs.append(data.pack_samples([samples[i] for i in members], [adv_B[i] for i in members], max_tokens))
        most = max(1, *map(len, packs))  # also where everything is filtered out: a step has at least one micro-batch
        mine = packs[ranks.rank] + [data.empty_pack()] * (most - len(packs[ranks.rank]))
        steps.append([to_device(pack, device) for pack in mine])
    return steps


def to_device(pack: data.Pack, device: torch.device) -> MicroBatch:
    names = ("token_T", "position_T", "pos_R", "target_R", "sampler_logp_R", "adv_R", "seq_R", "reward_R")
    tensors = {name: torch.from_numpy(getattr(pack, name)).to(device, non_blocking=True) for name in names}
    mask_R = torch.ones_like(tensors["adv_R"], dtype=torch.bool)
    return MicroBatch(pack, **tensors, mask_R=mask_R, num_grad_rows=len(pack.pos_R))


def forward(model: Decoder, micro: MicroBatch, cfg: config.Config, vocab_size: int, head: Callable | None = None):
    """(logp_R, entropy_R) under the model's weights, at the sampling temperature; or what another `head` returns."""
    backend = kernel_backend(cfg, micro.token_T.device)
    return model(
        micro.token_T,
        micro.position_T,
        micro.pack.cu_seqlens,
        micro.pos_R,
        micro.target_R,
        temperature=cfg.policy.generation.temperature,
        vocab_size=vocab_size,
        head=head or partial(linear_logp, return_entropy=True, backend=backend),
    )


def kernel_backend(cfg: config.Config, device: torch.device) -> KernelBackend:
    """Which code computes the output layer. ConfigError where the machine does not have what the config asks for."""
    try:
        return choose_backend(cfg.policy.kernel_backend, device.type, cfg.policy.logprob_chunk_size)
    except ValueError as error:
        raise config.ConfigError(f"policy.kernel_backend: {error}") from error


def loss_path(cfg: config.Config, device: torch.device) -> LossPath:
    """How the loss of this run is trained."""
    has_ref = needs_reference(cfg)
    return _loss_path(cfg.loss_fn, needs_old_logps(cfg), has_ref, kernel_backend(cfg, device), device)


@cache
def _loss_path(loss_fn, has_old, has_ref, backend, device):
    options = {"has_old": has_old, "has_ref": has_ref, "backend": backend, "device": device}
    return choose_loss_path(policy_loss, loss_fn, **options, max_log_ratio=config.MAX_LOG_RATIO)


@torch.no_grad()
def score(
    model: Decoder, reference: Reference | None, steps: list[list[MicroBatch]], cfg: config.Config, vocab_size: int
) -> tuple[list[Batch], dict[str, float]]:
    """Fills in old and reference log-probabilities where they matter, masks sequences whose sampler and trainer
    disagree, finishes advantages with a KL in the reward, and counts what is left. A collective of all ranks.

    Returns the batches and the metrics of the mask.
    """
    if needs_old_logps(cfg):
        steps = [[replace(m, old_logp_R=forward(model, m, cfg, vocab_size)[0]) for m in step] for step in steps]
    if reference is not None:
        with reference.in_place_of(model):
            steps = [[replace(m, ref_logp_R=forward(model, m, cfg, vocab_size)[0]) for m in step] for step in steps]
    total: dict = {}
    if cfg.grpo.seq_logprob_error_threshold is not None:
        steps = [[_mask_by_logp_error(micro, cfg, total) for micro in step] for step in steps]
    if cfg.loss_fn.use_kl_in_reward:
        steps = _kl_in_reward(steps, cfg)
    steps = [[_gradient_rows_first(micro, cfg) for micro in step] for step in steps]
    counts = torch.tensor([_counts(step) for step in steps], dtype=torch.int64)
    dist.all_reduce(counts)
    batches = [Batch(step, *count) for step, count in zip(steps, counts.tolist(), strict=True)]
    return batches, reduce_over_ranks(total) if total else {}


def _mask_by_logp_error(micro: MicroBatch, cfg: config.Config, total: dict) -> MicroBatch:
    mask_R, metrics = seq_logp_error_mask(
        micro.mask_R,
        old_logp_R=micro.old_logp_R,
        sampler_logp_R=micro.sampler_logp_R,
        seq_R=micro.seq_R,
        threshold=cfg.grpo.seq_logprob_error_threshold,
        correct_R=micro.reward_R == 1,
    )
    accumulate(total, metrics)
    return replace(micro, mask_R=mask_R)


def _kl_in_reward(steps: list[list[MicroBatch]], cfg: config.Config) -> list[list[MicroBatch]]:
    micros = [micro for step in steps for micro in step]

    def together(name: str) -> Tensor:
        return torch.cat([getattr(micro, name) for micro in micros])

    def sum_over_ranks(x: Tensor) -> Tensor:
        x = x.cpu()
        dist.all_reduce(x)
        return x.to(micros[0].adv_R.device)

    adv = kl_in_reward_advantages(
        together("adv_R"),
        old_logp_T=together("old_logp_R"),
        ref_logp_T=together("ref_logp_R"),
        mask_T=together("mask_R"),
        grpo=cfg.grpo,
        loss_fn=cfg.loss_fn,
        sum_over_ranks=sum_over_ranks,
    )
    parts = iter(adv.split([len(micro.adv_R) for micro in micros]))
    return [[replace(micro, adv_R=next(parts)) for micro in step] for step in steps]


def _gradient_rows_first(micro: MicroBatch, cfg: config.Config) -> MicroBatch:
    """Two thirds of the output layer's work are for gradients, and a token of advantage 0 has none, unless a KL or an
    entropy bonus moves it all the same."""
    path = loss_path(cfg, micro.adv_R.device)
    moved_R = path.may_have_gradient(micro.adv_R, micro.reward_R > 0) & micro.mask_R
    order_R = moved_R.logical_not().argsort(stable=True)
    rows = {f.name: getattr(micro, f.name) for f in fields(micro) if f.name.endswith("_R")}
    rows = {name: x_R[order_R] for name, x_R in rows.items() if x_R is not None}
    return replace(micro, **rows, num_grad_rows=int(moved_R.sum()))


def _counts(micros: list[MicroBatch]) -> tuple[int, int, int]:
    """Trained tokens, sequences that have any, trained tokens of sequences with a positive reward: those for which the
    sampler's log-probability is a number (`policy_loss` drops the others)."""
    trained = [(m, m.mask_R & m.sampler_logp_R.isfinite()) for m in micros]
    tokens = sum(int(trained_R.sum()) for _, trained_R in trained)
    seqs = sum(len(m.seq_R[trained_R].unique()) for m, trained_R in trained)
    return tokens, seqs, sum(int((trained_R & (m.reward_R > 0)).sum()) for m, trained_R in trained)


def train_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    cfg: config.Config,
    vocab_size: int,
    step: int,
    num_bad_steps: int,
) -> dict[str, float]:
    """`ppo_epochs` passes over the batches, an optimizer step for each. Returns the loss metrics of all of them, equal
    on all ranks: means over all their tokens, and for what is no mean (loss, counts) the mean over optimizer steps."""
    total, count = {}, 0
    for batch in batches * cfg.policy.ppo_epochs:
        update = compute_gradients(model, batch, cfg, vocab_size, total)
        patient = num_bad_steps < cfg.grpo.logp_gap_patience
        skip = check_logp_gap(update, cfg.grpo.logp_gap_limit, step, patient)
        norm, num_bad_steps = apply_gradients(model, optimizer, cfg, update["loss"], num_bad_steps, step, skip)
        count += 1
    if count > 1:
        update = reduce_over_ranks(total, divide_sums_by=count)
    update |= {
        "grad_norm": norm,  # of the last optimizer step, as NeMo RL
        "lr": optimizer.param_groups[0]["lr"],
        "num_bad_steps": num_bad_steps,
        "num_optimizer_steps": count,
        "global_valid_toks": sum(batch.num_tokens for batch in batches),
        "global_valid_seqs": sum(batch.num_seqs for batch in batches),
    }
    return update


def compute_gradients(
    model: Decoder, batch: Batch, cfg: config.Config, vocab_size: int, total: dict | None = None
) -> dict[str, float]:
    """Forward and backward over a batch's micro-batches; gradients add up over them and (in FSDP) over ranks.

    Returns the batch's loss metrics, equal on all ranks; adds them unreduced to `total`.
    """
    own: dict = {}
    for micro in batch.micros:
        loss, metrics = _loss(model, micro, batch, cfg, vocab_size)
        loss.backward()
        accumulate(own, metrics)
    update = reduce_over_ranks(own)
    del own[DEVIATION]
    problem = one_pass_problem(update.pop(DEVIATION))
    if problem:
        raise StopRun(problem)
    if total is not None:
        accumulate(total, own)
    return update


def _loss(
    model: Decoder, micro: MicroBatch, batch: Batch, cfg: config.Config, vocab_size: int
) -> tuple[Tensor, Metrics]:
    """The pack's part of the loss, differentiable, and its metrics."""
    pack_loss = partial(
        policy_loss,
        old_logp_T=micro.old_logp_R,
        sampler_logp_T=micro.sampler_logp_R,
        adv_T=micro.adv_R,
        mask_T=micro.mask_R,
        seq_T=micro.seq_R,
        num_valid_tokens=batch.num_tokens,
        num_valid_seqs=batch.num_seqs,
        cfg=cfg.loss_fn,
        ref_logp_T=micro.ref_logp_R,
        positive_T=micro.reward_R > 0,
        num_positive_tokens=batch.num_positive_tokens,
    )
    path = loss_path(cfg, micro.adv_R.device)
    head = partial(linear_loss, num_grad_rows=micro.num_grad_rows, pack_loss=pack_loss, path=path)
    return forward(model, micro, cfg, vocab_size, head)


def apply_gradients(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    cfg: config.Config,
    loss: float,
    num_bad_steps: int,
    step: int,
    skip: bool = False,
) -> tuple[float, int]:
    """Clips the gradient and steps, unless loss or gradient is not finite: then the weights stay as they are, and more
    than max_bad_steps bad steps in a row end the run. Both numbers are equal on all ranks, so all take one branch.

    skip: a bad step for another reason. Returns the gradient's norm before clipping and the bad steps in a row.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.policy.max_grad_norm).full_tensor().item()
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite and not skip:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # at once: gradients must not take memory during the rollout (RL#1147)
    num_bad_steps = 0 if finite and not skip else num_bad_steps + 1
    if not finite and num_bad_steps > cfg.grpo.max_bad_steps:
        raise StopRun(
            f"step {step}: loss {loss}, gradient norm {norm} are not finite: {num_bad_steps} bad steps in a row "
            f"(grpo.max_bad_steps={cfg.grpo.max_bad_steps}); the weights are those before the first of them"
        )
    return norm, num_bad_steps


def check_logp_gap(update: dict[str, float], limit: float | None, step: int, patient: bool = False) -> bool:
    """Sampler and trainer score the same tokens with the same weights: a gap means they are not the same.

    Returns whether it is over the limit, or some of the sampler's are not finite: the step must not be applied. Raises
    StopRun then, unless `patient`: the next sync may mend it.
    """
    gap, unknown = update["logp_gap_mean"], update["num_nonfinite_sampler_logp"]
    over = limit is not None and bool(not gap <= limit or unknown)
    if over and not patient:
        raise StopRun(
            f"step {step}: sampler and trainer disagree by {gap:.4f} nats per token on average (max "
            f"{update['logp_gap_max']:.4f}; {unknown:.0f} of the sampler's not finite; grpo.logp_gap_limit={limit}). "
            "Likely causes: the engine holds old weights (sync skipped or partial), a stale prefix cache, another "
            "temperature or vocabulary on one side, or a wrong attention kernel. The step was not applied."
        )
    return over


def set_learning_rate(optimizer: torch.optim.Optimizer, cfg: config.Config, step: int, num_steps: int) -> None:
    """The rate of a step (from 1); a function of the step alone, so there is nothing to resume."""
    for group in optimizer.param_groups:
        group["lr"] = cfg.policy.optimizer.kwargs.lr * learning_rate_factor(cfg.policy.scheduler, step, num_steps)


def learning_rate_factor(cfg: config.SchedulerConfig, step: int, num_steps: int) -> float:
    """Linear warm-up from warmup_start_factor over warmup_steps, then constant, or a linear or cosine way down that
    reaches min_factor at the last step. One rate for all optimizer steps of a rollout, as in NeMo RL.

    Example: warmup_steps 2, start 0.5, linear to 0 in 6 steps: 0.5, 0.75, 1, 2/3, 1/3, 0.
    """
    if step <= cfg.warmup_steps:
        return cfg.warmup_start_factor + (1 - cfg.warmup_start_factor) * (step - 1) / cfg.warmup_steps
    if cfg.name == "constant":
        return 1.0
    done = (step - 1 - cfg.warmup_steps) / max(1, num_steps - 1 - cfg.warmup_steps)
    left = 1 - done if cfg.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return cfg.min_factor + (1 - cfg.min_factor) * left
