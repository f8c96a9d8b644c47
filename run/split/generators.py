"""A split job (policy.generation.colocated.enabled=false): what the trainers ask for, and what a generator does.

`Generators` and `GeneratingEngines` stand in the loop where a sampler and its engine stand in a job that is not split,
so the loop is the same.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ahead import Ahead
from base.hf.tokenizer import Tokenizer
from base.system.exchange import move_calls, send_tokens, without_tokens
from base.system.exits import Interrupted, Saved, StopRun
from base.system.ranks import Ranks, any_rank, gather
from base.system.watchdog import Watchdog
from config import Config
from records import Completion, Sample, SamplingOptions, Weights
from rollout import Prompts, Sampler
from run.split.bridge import Bridge, Shapes


class GeneratingEngines:
    """The generators' engines, as the trainers' one: `records.Engine`, as far as trainers call it. Every method is a
    collective of all trainers, and raises what the generators raised: Interrupted, StopRun."""

    def __init__(self, bridge: Bridge, shapes: Shapes, tokenizer: Tokenizer, cfg: Config):
        self.bridge = bridge
        self.shapes = shapes  # of the weights that a sync sends
        self.dtype = getattr(torch, cfg.policy.engine_precision)
        self.vocab_size = tokenizer.vocab_size
        self.max_total_tokens = cfg.policy.max_total_sequence_length
        self.groups: dict[int, bool] = {}  # under way at the newest sync

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], options: SamplingOptions, *, may_stop: bool = True
    ) -> list[Completion]:
        """As Engine.generate, by every engine: the completions of the first one, then of the next one."""
        return self.bridge.ask("canary", prompts, seeds, options, may_stop)

    def sync(self, weights: Weights, version: int) -> int:
        """As Engine.sync. On return all generators have the weights."""
        sent = (tensor for _, tensor in weights)
        num_bytes, self.groups = self.bridge.ask("weight_sync", version, self.shapes, weights=sent)
        return num_bytes

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Nothing: an engine has the memory of its GPU for itself."""

    def wake(self, part: str) -> None:
        """Nothing, likewise."""


class Generators(AbstractContextManager):
    """The generators, as the trainers' sampler. Every method is a collective, as of the engine. On exit they end,
    unless this rank alone may have failed."""

    def __init__(self, ranks: Ranks, engine: GeneratingEngines):
        self.ranks = ranks
        self.engine = engine
        self.ahead = Ahead()  # the generators have the conversations

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, StopRun | Saved):  # what all trainers raise together
            self.ranks.bridge.tell("end")

    def start(self, *conversations: Any) -> None:
        """As Sampler.start. The generators go on with the conversations while the trainers train."""
        self.ranks.bridge.tell("start", *conversations)

    def finish(self, started: None) -> list[Sample]:
        """As Sampler.finish, of the conversations that were started first."""
        return self.ranks.bridge.ask("finish")

    def sample(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = 0
    ) -> list[Sample]:
        """As Sampler.sample. The watchdog knows how long a rollout takes, and how long a validation."""
        task = "generation" if step else "validation"
        return self.ranks.bridge.ask(task, prompts, num_samples, options, seed_key, step)

    def groups_under_way(self) -> dict[int, bool]:
        """As Sampler.groups_under_way, at the newest sync."""
        return self.engine.groups


def serve(sampler: Sampler, device: torch.device, watchdog: Watchdog) -> None:
    """A generator's part in a run: answers requests until the trainers say "end". An error that stops the work is the
    answer, so the trainers end a run in one way wherever it stops."""
    bridge = sampler.ranks.bridge
    while True:
        task, *arguments = _next_request(sampler, watchdog)
        if task == "end":
            return
        watchdog.enter(task)
        if task == "tokens":
            (places,) = arguments
            send_tokens([[bridge.held[place] for place in of_rank] for of_rank in places], bridge.objects)
            continue
        if task == "start":
            conversations = sampler.start(*arguments)
            sampler.ahead.batches.append((conversations, {}))  # the trainers have the cursor
            continue
        try:
            answer = _answer(task, arguments, sampler, device, watchdog)
        except (Interrupted, StopRun) as error:
            answer = error
        bridge.broadcast(answer, root=bridge.num_trainers)


def _next_request(sampler: Sampler, watchdog: Watchdog) -> tuple:
    """The trainers' next request. Until it is there, the engine decodes what is under way, and looks between steps."""
    ranks = sampler.ranks
    request = ranks.bridge.announce(async_op=True)
    watchdog.enter("waiting for the trainers", waits=True)
    while sampler.has_work and not ranks.any_rank_of_engine(request.is_completed()):
        sampler.step()
    request.wait()
    return ranks.bridge.broadcast(None, root=0)


def _answer(task: str, arguments: list, sampler: Sampler, device: torch.device, watchdog: Watchdog) -> Any:
    """What a generator does for a request. A collective of all generators."""
    engine = sampler.engine
    ranks = sampler.ranks
    if task in ("generation", "validation", "finish"):
        if any_rank(engine.should_stop()):  # no trainer has heard of it
            raise Interrupted
        if task == "finish":
            conversations, _ = sampler.ahead.batches.popleft()
            samples = sampler.finish(conversations)
        else:
            samples = sampler.sample(*arguments)
        move_calls(samples)
        ranks.bridge.hold_tokens([sequence for sample in samples for sequence in sample.sequences])
        return [without_tokens(sample) for sample in samples]
    if task == "canary":
        *inputs, may_stop = arguments
        replies = gather(engine.generate(*inputs, may_stop=may_stop))
        return [reply for of_engine in replies[:: ranks.tp_size] for reply in of_engine]
    assert task == "weight_sync", task
    version, shapes = arguments
    ranks.bridge.drop_tokens()
    watchdog.step = version + 1  # the step that will be sampled with these weights
    while engine.drains and not (engine.is_idle or engine.should_stop()):
        sampler.step()  # responses end before the sync, unless a signal asks the run to stop
    num_bytes = engine.sync(ranks.bridge.receive_weights(shapes, engine.dtype, device), version)
    return num_bytes, sampler.groups_under_way()
