"""The policy that the KL is measured from: the policy as it was, or another model. A run without a KL does without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from base.hf.weights import sharded_parameters
from config import GRPOConfig
from head import HeadOptions, response_logps
from model import Decoder
from pack import MicroBatch


class Reference:
    """A copy of this rank's trained shards in host memory, pinned for a GPU. With LoRA, policy and reference share the
    frozen shards.

    A copy has no module of its own. `in_place_of` puts its weights into the policy's module for a forward, so it takes
    no device memory between forwards, and the same code computes both. `dtype` may be the forward's, which rounds
    weights anyway; an average (`follow` with alpha < 1) needs float32.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype = torch.float32):
        self.shards: dict[str, Tensor] = {}
        for name, shard in _shards(model).items():
            self.shards[name] = torch.empty(shard.shape, dtype=dtype, pin_memory=shard.is_cuda).copy_(shard)

    @contextmanager
    def in_place_of(self, model: Decoder) -> Iterator[Decoder]:
        """The module that computes with the reference's weights: within, `model` does."""
        policy = {name: shard.clone() for name, shard in _shards(model).items()}
        _copy(self.shards, _shards(model))
        try:
            yield model
        finally:
            _copy(policy, _shards(model))

    def score(self, micros: Sequence[MicroBatch], model: Decoder, options: HeadOptions, top_k: int | None) -> None:
        """Gives the micro-batches the reference's log-probabilities: of the targets, and of its top_k likeliest ids."""
        with self.in_place_of(model) as scorer, scorer.gathered_once():
            for micro in micros:
                # top_p and top_k keep other tokens of the reference than of the policy.
                inputs = micro.inputs_of_reference
                found = response_logps(scorer, inputs, micro.target_R, options.unfiltered, top_k)
                if top_k is None:
                    micro.ref_logp_R, _ = found
                else:
                    micro.ref_logp_R, _, micro.ref_logp_RJ, micro.ref_ids_RJ = found

    @torch.no_grad()
    def follow(self, model: Decoder, cfg: GRPOConfig, step: int) -> None:
        """Every ref_policy_update_period steps, reference <- alpha * policy + (1 - alpha) * reference (TRL's
        ref_model_mixup_alpha; 1 copies)."""
        if cfg.ref_policy_update_period is None or step % cfg.ref_policy_update_period:
            return
        alpha = cfg.ref_policy_update_alpha
        for name, shard in _shards(model).items():
            self.shards[name].copy_(self.shards[name].to(shard.dtype).lerp_(shard.cpu(), alpha))


class Teacher(Reference):
    """Another model in place of the copy, in host memory except while it scores. It has no shards to save."""

    def __init__(self, teacher: Decoder):
        self.shards = {}
        self.teacher = teacher

    @contextmanager
    def in_place_of(self, model: Decoder) -> Iterator[Decoder]:
        device = next(model.parameters()).device
        if device.type == "cpu":  # with cpu_offload FSDP moves a part at a time
            yield self.teacher
            return
        try:
            yield self.teacher.to(device)
        finally:
            self.teacher.to("cpu")


def _shards(model: Decoder) -> dict[str, Tensor]:
    params = sharded_parameters(model).items()
    return {name: param.to_local().detach() for name, param in params if param.requires_grad}


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # with cpu_offload a forward may still be reading the target
    for name, tensor in target.items():
        tensor.copy_(source[name], non_blocking=True)  # from pinned memory; another dtype is converted on the GPU
