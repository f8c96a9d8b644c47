"""`grpo.train`, the loop of the program itself, on samples that a test gives it, in a `Run` without files and engine.

Real: everything that trains, the counters, the weight sync's order, what is logged and when it is saved. Left out: what
samples, what grades, what writes.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from fakes import FakeEngine
from tiny import VOCAB_SIZE

import grpo
from base.system.ranks import Ranks
from config import Config
from head import HeadOptions, LossOptions
from model import Decoder
from records import Sample
from reference import Reference
from rollout import StepSamples
from run.build import loss_path_of, sampling_filter_of
from run.job import Run, RunState
from run.log import Timers

CPU = torch.device("cpu")


class KeepsGradients:
    """An optimizer that moves nothing: `gradients` are those of its last step, name -> whole tensor."""

    def __init__(self, model: Decoder):
        self.model = model
        self.param_groups = [{"lr": 1.0, "initial_lr": 1.0}]
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        params = ((name, param) for name, param in self.model.named_parameters() if param.requires_grad)
        self.gradients = {name: param.grad.full_tensor().clone() for name, param in params}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)


def head_of(cfg: Config, vocab: int | None = VOCAB_SIZE) -> HeadOptions:
    """As `build.build_head`, for the tiny folder's tokenizer; None: all rows of the weight are ids."""
    generation = cfg.policy.generation
    return HeadOptions(
        generation.temperature, vocab, sampling_filter_of(generation), loss=LossOptions(path=loss_path_of(cfg))
    )


def make_run(
    policy: Decoder,
    cfg: Config,
    ranks: Ranks,
    *,
    vocab: int | None = VOCAB_SIZE,
    optimizer=None,
    reference: Reference | None = None,
    saver=None,
    num_steps: int = 1,
    **counters,
) -> Run:
    """A run of `num_steps` steps; counters: of its RunState. It draws its data from a set without an end."""
    optimizer = optimizer or KeepsGradients(policy)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return Run(
        cfg=cfg,
        inputs=SimpleNamespace(
            train=SimpleNamespace(num_problems=10**9, record=lambda cursor, *_: cursor), validation={}
        ),
        ranks=ranks,
        device=CPU,
        folder=Path(),
        model=policy,
        head_options=head_of(cfg, vocab),
        optimizer=optimizer,
        engine=FakeEngine(),
        sampler=None,
        reference=reference,
        state=RunState(cursor={"position": 0}, fingerprints={}, **counters),
        saver=saver or SimpleNamespace(cfg=SimpleNamespace(enabled=False), saved=None, poll=lambda: None),
        log=None,
        signals=SimpleNamespace(pending=lambda: False),
        memory=SimpleNamespace(metrics=lambda peaks: {}),
        watchdog=SimpleNamespace(step=0, enter=lambda phase: None),
        timer=Timers(lambda phase: None),
        num_steps=num_steps,
    )


def train(run: Run, samples: Sequence[Sample], adv_B: Sequence[float] | None) -> None:
    """The steps that the run has left, each on these samples; adv_B None: with the advantages of their rewards."""
    step_samples = StepSamples(list(samples), list(samples), {"position": len(samples)}, {})
    with mock.patch.object(grpo, "sample_step", lambda *_: step_samples):
        if adv_B is None:
            grpo.train(run)
        else:
            with mock.patch.object(grpo, "step_advantages", lambda *_: (list(adv_B), {})):
                grpo.train(run)


def train_once(
    policy: Decoder, samples: Sequence[Sample], adv_B: Sequence[float] | None, cfg: Config, ranks: Ranks, **options
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """One step of a run; options: of `make_run`. Returns its metrics, and the gradients its last optimizer step was
    given: none if it was not applied, or if the options name another optimizer."""
    run = make_run(policy, cfg, ranks, **options)
    run.num_steps = run.state.step + 1
    train(run, samples, adv_B)
    assert all(param.grad is None for param in policy.parameters())
    return run.metrics, getattr(run.optimizer, "gradients", {})


def weights(policy: Decoder) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters."""
    return {name: param.full_tensor().detach().clone() for name, param in policy.named_parameters()}
