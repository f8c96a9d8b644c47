"""Samples and advantages -> the minibatches of a rollout, as packs on this rank's device.

A rollout of B = P * G samples is cut into minibatches of `train_global_batch_size`, one for each optimizer step (by
default the whole rollout is one). A minibatch is cut into packs, the same number on every rank, because a pack's
forward runs FSDP's collectives. The loss divides by counts over a whole minibatch: all ranks, all packs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention import PackLayout
from config import Config
from data import Pack, Sample, assign_to_ranks, empty_pack, num_input_tokens, num_packs, pack_samples
from kernels import LossPath
from loss import Metrics, seq_logp_error_mask
from support.system.exchange import move_tokens
from support.system.ranks import Ranks, on_device


@dataclass(slots=True)
class MicroBatch(Pack):
    """A `data.Pack` with device tensors in place of arrays, and what the trainer adds about its R response tokens.
    cu_seqlens and prefix_S stay on the host; `layout` has what the model needs of them, for all its forwards.
    mask_R: tokens that are trained on. num_grad_rows: only the first num_grad_rows rows can have a gradient; the rest
    serve the metrics. old_logp_R, ref_logp_R: under the policy at the start of the step and under the reference policy;
    None where the run does not need them.
    """

    layout: PackLayout
    mask_R: Tensor
    num_grad_rows: int
    old_logp_R: Tensor | None = None
    ref_logp_R: Tensor | None = None

    @property
    def model_inputs(self) -> tuple:
        """The arguments of `model.Decoder.forward`."""
        return self.token_T, self.position_T, self.layout, self.pos_R, self.target_R


@dataclass(slots=True)
class Minibatch:
    """What one optimizer step sees: this rank's micro-batches, and counts over all ranks (0 until they are known).

    num_input_tokens: tokens that the model computes. num_tokens: trained tokens. num_seqs: sequences with a trained
    token. num_positive_tokens: trained tokens with a reward > 0. version: of the newest weights.
    """

    micros: list[MicroBatch]
    num_input_tokens: int
    num_tokens: int = 0
    num_seqs: int = 0
    num_positive_tokens: int = 0
    version: int = -1


def make_minibatches(
    samples: Sequence[Sample], adv_B: Sequence[float | list[float]], cfg: Config, ranks: Ranks, device: torch.device
) -> list[Minibatch]:
    """This rank's minibatches of a rollout. A collective, which moves their tokens to this rank."""
    size = cfg.policy.train_global_batch_size or len(samples)
    max_tokens, share_prefix = cfg.policy.pack_tokens(device.type), cfg.policy.sequence_packing.share_prefix
    for sample, adv in zip(samples, adv_B, strict=True):
        sample.advantage = adv
    minibatch_shares = []  # minibatch -> rank -> its parts of groups
    for first in range(0, len(samples), size):
        # Filtered samples take part in no forward.
        members = [row for sample in samples[first : first + size] for row in sample.rows]
        minibatch_shares.append(assign_to_ranks(members, ranks.world_size, max_tokens, share_prefix))
    of_ranks = zip(*minibatch_shares, strict=True)
    move_tokens([[row for parts in shares for part in parts for row in part] for shares in of_ranks])
    minibatches = []
    for shares in minibatch_shares:
        packs = pack_samples(shares[ranks.rank], max_tokens)
        most_packs = max(1, *(num_packs(share, max_tokens) for share in shares))  # 1 even without samples
        packs += [empty_pack()] * (most_packs - len(packs))
        num_computed = sum(num_input_tokens(part) for share in shares for part in share)
        minibatches.append(Minibatch([to_device(pack, device) for pack in packs], num_computed))
    return minibatches


def to_device(pack: Pack, device: torch.device) -> MicroBatch:
    on_host = {"cu_seqlens": pack.cu_seqlens, "prefix_S": pack.prefix_S}
    layout = PackLayout.of(*on_host.values(), len(pack.token_T), device)
    tensors = {f.name: on_device(getattr(pack, f.name), device) for f in fields(pack) if f.name not in on_host}
    mask_R = torch.ones_like(tensors["adv_R"], dtype=torch.bool)
    return MicroBatch(**tensors, **on_host, layout=layout, mask_R=mask_R, num_grad_rows=len(mask_R))


def needs_old_logps(cfg: Config) -> bool:
    """Whether log-probabilities at the start of the step need a forward of their own.

    A single optimizer step per rollout needs none: its training forward runs that same policy, so the ratio is exactly
    1. With more steps the policy moves, but old_logprobs=sampler compares with the sampler.
    """
    per_rollout = cfg.grpo.num_prompts_per_step * cfg.grpo.num_generations_per_prompt
    policy_moves = cfg.policy.ppo_epochs > 1 or (cfg.policy.train_global_batch_size or per_rollout) < per_rollout
    is_async = cfg.grpo.async_grpo.max_age > 0  # old tokens: the gap is measured before the step
    ratio_needs_them = cfg.loss_fn.old_logprobs == "trainer" and (policy_moves or is_async)
    return ratio_needs_them or cfg.grpo.seq_logprob_error_threshold is not None


@torch.no_grad()
def finish_minibatches(minibatches: list[Minibatch], cfg: Config, path: LossPath, version: int) -> list[Metrics]:
    """Completes the minibatches in place, after the log-probabilities: masks sequences on which sampler and trainer
    disagree, and counts trained tokens over all ranks. A collective. version: of the newest weights. Returns the
    metrics of the mask, for each micro-batch."""
    micros = [micro for minibatch in minibatches for micro in minibatch.micros]
    metrics: list[Metrics] = []
    for micro in micros if cfg.grpo.seq_logprob_error_threshold is not None else ():
        micro.mask_R, mask_metrics = seq_logp_error_mask(
            micro.mask_R,
            old_logp_R=micro.old_logp_R,
            sampler_logp_R=micro.sampler_logp_R,
            seq_R=micro.seq_R,
            threshold=cfg.grpo.seq_logprob_error_threshold,
            correct_R=micro.reward_R == 1,  # after scaling and shaping
        )
        metrics.append(mask_metrics)
    counts = torch.tensor([_put_gradient_rows_first(minibatch.micros, path) for minibatch in minibatches])
    dist.all_reduce(counts)
    for minibatch, numbers in zip(minibatches, counts.tolist(), strict=True):
        minibatch.num_tokens, minibatch.num_seqs, minibatch.num_positive_tokens = numbers
        minibatch.version = version
    return metrics


def _put_gradient_rows_first(micros: list[MicroBatch], path: LossPath) -> list[int]:
    """Two thirds of the output layer's work is gradients, so rows with a gradient go first. At advantage 0 there is one
    only from a KL, an entropy bonus or an NLL: `path` says so, from probes of the loss.

    Returns this rank's num_tokens, num_seqs, num_positive_tokens. A token whose sampler log-probability is not finite
    does not count: `policy_loss` drops it. The host waits for the device once."""
    names = ("adv_R", "reward_R", "seq_R", "sampler_logp_R", "mask_R")
    on_host = torch.stack([torch.cat([getattr(micro, name) for micro in micros]).double() for name in names]).cpu()
    counts = np.zeros(3, np.int64)
    for micro, rows in zip(micros, on_host.split([len(micro.mask_R) for micro in micros], dim=1), strict=True):
        adv_R, reward_R, seq_R, sampler_logp_R, mask_R = rows
        has_grad_R = mask_R.bool() & ((adv_R != 0) | path.zero_adv_has_grad)
        order_R = on_device(has_grad_R.logical_not().argsort(stable=True).numpy(), micro.mask_R.device)
        for name in (field.name for field in fields(micro) if field.name.endswith("_R")):
            if (x_R := getattr(micro, name)) is not None:
                setattr(micro, name, x_R[order_R])
        micro.num_grad_rows = int(has_grad_R.sum())
        trained_R = mask_R.bool() & sampler_logp_R.isfinite()
        counts += [int(trained_R.sum()), len(seq_R[trained_R].unique()), int((trained_R & (reward_R > 0)).sum())]
    return counts.tolist()
