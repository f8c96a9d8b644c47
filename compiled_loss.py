"""The loss and its derivatives as kernels that a compiler writes from loss.py: a few in place of some 200 operations.

A loss that does not compile runs as it is, and the start says why. A run on a CPU does without this file.
"""

from functools import partial

import torch
from torch import Tensor
from torch._inductor import metrics as inductor_metrics

from config import LossConfig
from head import MAX_DEVIATION, PolicyLoss, ProbePack, derivatives, deviation_of, probe_packs
from loss import Metrics


def compiled_loss(
    objective: PolicyLoss, cfg: LossConfig, device: torch.device, has_old: bool, has_ref: bool
) -> tuple[PolicyLoss, str]:
    """(loss, a line for the log). The loss is the objective with kernels that torch.compile makes of it and of its
    derivatives, once for packs of any length. It is the objective itself where that does not compile, or where the
    compiled derivatives of a probe on this device differ from its own; the line then says why.

    The counts that a call gives must be tensors: a number would be a constant of the kernels."""
    compiled = torch.compile(objective, fullgraph=True, dynamic=True)
    num_before = inductor_metrics.generated_kernel_count
    pack = _on(next(probe_packs(cfg, has_old, has_ref)), device)
    expected = derivatives(partial(objective, **pack.arguments), pack.stats_2R, with_metrics=False)
    for with_metrics in (False, True):  # two graphs
        try:
            found = derivatives(partial(compiled, **pack.arguments), pack.stats_2R, with_metrics=with_metrics)
        except Exception as error:  # of the compiler, of whatever kind: the line above has called the loss itself
            reason = str(error).strip().splitlines() or [""]
            return objective, f"eager, as it does not compile: {type(error).__name__}: {reason[0]}"
        deviation = float(deviation_of(found.slopes_2R, expected.slopes_2R))
        if not deviation <= MAX_DEVIATION:
            return objective, f"eager, as its compiled derivatives differ by {deviation:.1g} of their size"

    def call(logp_R: Tensor, **arguments) -> tuple[Tensor, Metrics]:
        # The kernels for any length exclude lengths 0 and 1, which an empty pack has.
        chosen = compiled if len(logp_R) > 1 else objective
        return chosen(logp_R, **arguments)

    return call, f"compiled into {inductor_metrics.generated_kernel_count - num_before} kernels"


def _on(pack: ProbePack, device: torch.device) -> ProbePack:
    """The pack as a run has it on the device: float32, and counts that are tensors."""
    arguments = dict(pack.arguments)
    for name, value in pack.arguments.items():
        if torch.is_tensor(value) and value.is_floating_point() and name != "share_R":
            value = value.float()
        if isinstance(value, int | float):
            value = torch.tensor(value)
        if torch.is_tensor(value):
            arguments[name] = value.to(device)
    return ProbePack(pack.stats_2R.float().to(device), arguments)
