"""Routing replay: the trainer's routers send a token to the experts that the sampler sent it to.

Sampler and trainer round differently. In a mixture of experts this moves a token to another expert now and then, whose
output is an entirely different one: these are the tokens with the largest gap. Rollout Routing Replay (R3, arXiv
2510.11370) takes the choice from the sampler. Weights, and gradients of hidden states and routers, still come from the
trainer's own logits. `records.Completion.experts_TLA` is the engine's choice, `PackLayout.experts_TLA` that of a pack.

A token of which the sampler has told no experts goes where the trainer chooses, and is counted.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from base.system.ranks import on_device
from loss import Metrics


class RouterReplay:
    """Takes the place of the forwards of these routers, in the order of their layers. experts_TLA: of the pack that is
    computed. chooses: the routers choose in any case."""

    def __init__(self, routers: Sequence[nn.Module], num_experts: int, chooses: bool):
        self.experts_TLA: Tensor | None = None
        self.num_experts = num_experts
        self.chooses = chooses
        self.counts = torch.zeros(3, dtype=torch.int64)  # of choices: that differ, that are compared, all
        self.counted: set[int] = set()  # layers, in this forward: one that is recomputed in the backward counts once
        for number, router in enumerate(routers):
            router.forward = partial(self.forward, number, router.forward)

    def begin(self, experts_TLA: np.ndarray | None, device: torch.device) -> None:
        """The next forward, and its backward, are of a pack with these experts; None: the routers choose, and nothing
        is counted."""
        self.experts_TLA = None if experts_TLA is None else on_device(experts_TLA, device)
        self.counted = set()

    def forward(self, number: int, route: Callable, *args, **kwargs) -> tuple[Tensor, ...]:
        """`route` is the router's own forward."""
        if self.experts_TLA is None:
            return route(*args, **kwargs)
        with Choice(self.experts_TLA[:, number].long(), self.num_experts, self.chooses) as choice:
            out = route(*args, **kwargs)
        assert choice.counts is not None, "a router that does not choose by topk"
        if torch.is_grad_enabled() and number not in self.counted:
            self.counted.add(number)
            self.counts = self.counts.to(choice.counts.device) + choice.counts
        return out

    def metrics(self) -> Metrics:
        """Since the last call, over tokens and layers: how often sampler and trainer choose different experts, and how
        often the trainer had to choose."""
        num_flips, num_compared, num_all = self.counts
        self.counts = torch.zeros_like(self.counts)
        return {
            "router_flip_fraction": (num_flips, num_compared),
            "router_fallback_fraction": (num_all - num_compared, num_all),
        }


class Choice(TorchFunctionMode):
    """Within: a topk of [T, E] scores, by which each of transformers' routers chooses, returns `given_TA` and their
    scores. Where both have the same experts, in the order of the trainer's choice: the same bits as without replay."""

    def __init__(self, given_TA: Tensor, num_experts: int, chooses: bool):
        super().__init__()
        self.given_TA = given_TA
        self.num_experts = num_experts
        self.chooses = chooses
        self.counts: Tensor | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        scores_TE = args[0]
        own_TA = result.indices
        if scores_TE.shape[1:] != (self.num_experts,) or own_TA.shape != self.given_TA.shape:
            return result  # a choice of groups of experts, which is not the router's own
        is_known_T = self.given_TA[:, 0] >= 0
        is_other_T = (own_TA.sort(dim=1).values != self.given_TA.sort(dim=1).values).any(dim=1)
        is_flip_T = is_known_T & is_other_T
        self.counts = torch.stack([is_flip_T.sum(), is_known_T.sum(), torch.ones_like(is_known_T).sum()])
        if self.chooses:
            return result
        chosen_TA = torch.where(is_flip_T[:, None], self.given_TA, own_TA)
        return scores_TE.gather(1, chosen_TA), chosen_TA
