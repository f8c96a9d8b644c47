"""The optimizer: its parameter groups, its learning rate at each step, the norm of its gradient, and the weight of the
entropy bonus.

A new optimizer is a branch of `build_optimizer` and a name in config.OptimizerConfig: checkpoints save whatever tensors
its `state` holds.

In examples/naive.py this is `optimizer = torch.optim.AdamW(w.values(), weight_decay=0.01)`.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import config
from base.system.optimizer import Optimizer
from head import HeadOptions
from metrics import Numbers


def build_optimizer(model: nn.Module, cfg: config.OptimizerConfig, *, offloads: bool = False) -> Optimizer:
    """The optimizer of the (sharded) model's float32 parameters, without state until its first step.

    torch.optim.Muon is Muon for the matrices of the decoder blocks, AdamW for embedding, head, norms, biases, and
    experts that are stacked in one tensor. Muon replaces a matrix's momentum by the nearest matrix with orthonormal
    rows or columns (Jordan et al., 2024, kellerjordan.github.io/posts/muon). Its update is scaled to the root mean
    square of AdamW's (Moonlight, arXiv:2502.16982, 2.2), so learning rate and weight decay of AdamW are the right size
    for it.
    """
    kwargs = asdict(cfg.kwargs)
    first_moment_dtype = getattr(torch, kwargs.pop("state_dtype"))
    adamw = partial(torch.optim.AdamW, **kwargs, fused=True)
    if cfg.name == "torch.optim.AdamW":
        parts = [(adamw, list(model.parameters()))]
    elif cfg.name == "torch.optim.Muon":
        # DTensor multiplies the shards in bfloat16: another number of ranks changes the update by up to 2%.
        muon = partial(
            torch.optim.Muon,
            lr=cfg.kwargs.lr if cfg.muon_lr is None else cfg.muon_lr,
            weight_decay=cfg.kwargs.weight_decay,
            momentum=cfg.muon_momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        block_matrices = []
        others = []
        for name, param in model.named_parameters():
            is_block_matrix = ".layers." in name and param.ndim == 2
            if is_block_matrix:
                block_matrices.append(param)
            else:
                others.append(param)
        parts = [(adamw, others), (muon, block_matrices)]
    else:
        raise AssertionError(f"policy.optimizer.name={cfg.name}: build_optimizer has no branch for it")
    optimizer = Optimizer(parts, offloads=offloads, first_moment_dtype=first_moment_dtype)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the schedule multiplies it, and each group has its own
    return optimizer


def set_learning_rate(optimizer: Optimizer, cfg: config.SchedulerConfig, step: int, num_steps: int) -> None:
    """Sets the rates of step `step` (from 1). They depend on the step alone, so there is nothing to resume."""
    factor = learning_rate_factor(cfg, step, num_steps)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def learning_rate_factor(cfg: config.SchedulerConfig, step: int, num_steps: int) -> float:
    """Linear warm-up from warmup_start_factor over warmup_steps, then constant, or a linear or cosine decay.

    The decay reaches min_factor one step after the last, as in transformers: a rollout trained at rate 0 would be
    wasted. All optimizer steps of a rollout have one rate, as in NeMo RL.

    Example: warmup_steps 2, start 0.5, linear to 0 in 5 steps: 0.5, 0.75, 1, 2/3, 1/3.
    """
    if step <= cfg.warmup_steps:
        return cfg.warmup_start_factor + (1 - cfg.warmup_start_factor) * (step - 1) / cfg.warmup_steps
    if cfg.name == "constant":
        return 1.0
    progress = (step - 1 - cfg.warmup_steps) / (num_steps - cfg.warmup_steps)
    if cfg.name == "linear":
        decay = 1 - progress
    else:
        assert cfg.name == "cosine", cfg.name
        decay = (1 + math.cos(math.pi * progress)) / 2
    return cfg.min_factor + (1 - cfg.min_factor) * decay


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scales the sharded gradient down to `max_norm` if it is longer. Returns the norm before that. A collective."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if norm.device_mesh.ndim > 1:
        # Each replica has its own sum: a different last bit, or a NaN, would make them diverge. All take the mean.
        total = norm.full_tensor()
        dist.all_reduce(total, group=norm.device_mesh.get_group(0))
        norm = DTensor.from_local(total / norm.device_mesh.size(0), norm.device_mesh)  # by default the same everywhere
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm.full_tensor().item()


@dataclass(slots=True)
class EntropyBonus:
    """The weight of the entropy bonus where loss_fn.entropy_target moves it, a state of the run.

    It starts at entropy_coef. After an optimizer step whose tokens have a mean entropy of at most the target it rises
    by entropy_coef_delta, to at most entropy_coef_max; else it falls, to 0 at least. A step has the bonus only if the
    entropy of the step before was at most the target (Skywork-OR1, He et al. 2025, 4.2; TRL's use_adaptive_entropy).
    From 0 it rises again (huggingface/trl#6140).
    """

    coef: float | None = None  # None: before the first optimizer step
    is_on: bool = False  # in the next optimizer step

    def applied_to(self, options: HeadOptions, cfg: config.LossConfig, device: torch.device) -> HeadOptions:
        """The options of the next optimizer step, whose loss has the bonus. The weight is a tensor: a number would be a
        constant of compiled kernels."""
        if cfg.entropy_target is None:
            return options
        coef = self.coef if self.is_on else 0.0
        coef = torch.full((), coef, device=device)
        loss = replace(options.loss, call=partial(options.loss.call, entropy_coef=coef))
        return replace(options, loss=loss)

    @property
    def metrics(self) -> Numbers:
        """Of a run that moves the weight."""
        if self.coef is None:
            return {}
        return {"entropy_coef": self.coef}

    def follow(self, numbers: Numbers, cfg: config.LossConfig) -> None:
        """Moves after an optimizer step with these reduced metrics; the entropy is NaN if it had no token."""
        if cfg.entropy_target is None:
            self.coef = None  # the run may have moved it before it was resumed
            return
        if math.isnan(numbers["entropy"]):
            return
        if self.coef is None:
            self.coef = cfg.entropy_coef
        self.is_on = numbers["entropy"] <= cfg.entropy_target
        if self.is_on:
            self.coef = min(self.coef + cfg.entropy_coef_delta, cfg.entropy_coef_max)
        else:
            self.coef = max(self.coef - cfg.entropy_coef_delta, 0.0)
