"""A split job (policy.generation.colocated.enabled=false): what the trainers ask for, and what a generator does.

`Generators` stands in the loop where an engine and a sampler stand in a job that is not split, so the loop is the same.
Each request of the trainers gets one answer; in between, generators wait.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from config import Config
from data import Sample
from engine import Completion, Engine, SamplingOptions, Weights
from hf.tokenizer import Tokenizer
from rollout import Prompts, Sampler
from system.bridge import Bridge, Shapes
from system.exits import Interrupted, Saved, StopRun
from system.ranks import Ranks, any_rank, gather
from system.watchdog import WAITING, Watchdog


class Generators:
    """The generators, seen by the trainers. Every method is a collective of all trainers, and raises what the work
    raised there: Interrupted, StopRun. As a context manager it lets them end, unless this rank alone may have failed.
    """

    def __init__(self, bridge: Bridge, shapes: Shapes, tokenizer: Tokenizer, cfg: Config):
        self.bridge = bridge
        self.shapes = shapes  # of the weights that a sync sends
        self.dtype = getattr(torch, cfg.policy.generation.vllm_cfg.precision or cfg.policy.precision)
        self.vocab_size = tokenizer.vocab_size
        self.max_total_tokens = cfg.policy.max_total_sequence_length
        self.ahead: deque = deque()  # as Sampler's: a step's batch is begun and finished in it

    def _ask(self, *request: Any, weights: Iterable[Tensor] = ()) -> Any:
        self.bridge.broadcast(request, root=0)
        self.bridge.send_weights(weights)
        answer = self.bridge.broadcast(None, root=self.bridge.num_trainers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = 0
    ) -> tuple[Prompts, int]:
        """As Sampler.start, but no reply begins before `finish`."""
        return prompts, num_samples

    def finish(self, started: tuple[Prompts, int], options: SamplingOptions, seed_key: tuple) -> list[Sample]:
        """As Sampler.finish."""
        return self._ask("generation", *started, options, seed_key)

    def sample(self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple) -> list[Sample]:
        """As Sampler.sample."""
        return self.finish((prompts, num_samples), options, seed_key)

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], options: SamplingOptions, *, may_stop: bool = True
    ) -> list[Completion]:
        """As Engine.generate, by every engine: its completions, then the next one's."""
        return self._ask("canary", prompts, seeds, options, may_stop)

    def sync(self, weights: Weights, version: int) -> int:
        """As Engine.sync. On return all generators have the weights."""
        return self._ask("weight_sync", version, self.shapes, weights=(tensor for _, tensor in weights))

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Nothing: an engine has the memory of its GPU for itself."""

    def wake(self, part: str) -> None:
        """Nothing, likewise."""

    def __enter__(self) -> "Generators":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, StopRun | Saved):  # what all trainers raise together
            self.bridge.broadcast(("end",), root=0)


def serve(engine: Engine, sampler: Sampler, ranks: Ranks, device: torch.device, watchdog: Watchdog) -> None:
    """A generator's part in a run: answers until the trainers ask no more. What stops the work that was asked for is
    the answer to it, so that trainers end a run in one way wherever it stops."""
    bridge = ranks.bridge
    answer: Any
    while True:
        watchdog.enter(WAITING)
        task, *arguments = bridge.broadcast(None, root=0)
        watchdog.enter(task)
        try:
            if task == "weight_sync":
                version, shapes = arguments
                watchdog.step = version + 1  # the step that will be sampled with it
                answer = engine.sync(bridge.receive_weights(shapes, engine.dtype, device), version)
            elif task == "generation":
                if any_rank(engine.should_stop()):  # a signal of which the trainers have not heard
                    raise Interrupted
                answer = sampler.sample(*arguments)
            elif task == "canary":
                *inputs, may_stop = arguments
                replies = gather(engine.generate(*inputs, may_stop=may_stop))
                answer = [reply for of_engine in replies[:: ranks.tp_size] for reply in of_engine]
            else:
                assert task == "end", task
                return
        except (Interrupted, StopRun) as error:
            answer = error
        bridge.broadcast(answer, root=bridge.num_trainers)
