"""A split job (policy.generation.colocated.enabled=false): what the trainers ask for, and what a generator does.

`Generators` stands in the loop where an engine and a sampler stand in a job that is not split, so the loop is the same.
A generator takes requests between two decode steps, and goes on with what is under way until there is another one.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from config import Config
from data import Sample
from engine import Completion, Engine, SamplingOptions, Weights, reply_key
from hf.tokenizer import Tokenizer
from rollout import Prompts, Sampler, sample_seed
from system.bridge import Bridge, Shapes
from system.exchange import move_tokens
from system.exits import Interrupted, Saved, StopRun
from system.ranks import Ranks, any_rank, gather
from system.watchdog import Watchdog


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
        self.drains = cfg.grpo.async_grpo.max_age > 0 and not cfg.grpo.async_grpo.in_flight_weight_updates
        self.ahead: deque = deque()  # as Sampler's, but None for conversations, which the generators have
        self.known: dict[int, Completion] = {}  # as Engine's, until the next `start`
        self.groups: dict[int, bool] = {}  # `groups_under_way` at the newest sync
        self.idle: dict[str, float] = defaultdict(float)  # cause -> seconds; a generator's are those up to that sync

    def _tell(self, *request: Any) -> None:
        self.bridge.announce()
        self.bridge.broadcast(request, root=0)

    def _ask(self, *request: Any, weights: Iterable[Tensor] = ()) -> Any:
        self._tell(*request)
        self.bridge.send_weights(weights)
        answer = self.bridge.broadcast(None, root=self.bridge.num_trainers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = 0
    ) -> None:
        """As Sampler.start; the generators go on with it while the trainers train."""
        self._tell("start", self.known, prompts, num_samples, options, seed_key, step)
        self.known = {}

    def finish(self, started: None, options: SamplingOptions, seed_key: tuple) -> list[Sample]:
        """As Sampler.finish, of what was started first."""
        begin = time.perf_counter()
        samples = self._ask("generation", options, seed_key)
        self.idle["buffer_starvation"] += time.perf_counter() - begin
        return samples

    def sample(self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple) -> list[Sample]:
        """As Sampler.sample."""
        begin = time.perf_counter()
        samples = self._ask("validation", prompts, num_samples, options, seed_key)
        self.idle["validation"] += time.perf_counter() - begin
        return samples

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], options: SamplingOptions, *, may_stop: bool = True
    ) -> list[Completion]:
        """As Engine.generate, by every engine: its completions, then the next one's."""
        return self._ask("canary", prompts, seeds, options, may_stop)

    def sync(self, weights: Weights, version: int) -> int:
        """As Engine.sync. On return all generators have the weights."""
        if self.drains:
            self._ask("drain")
        sent = (tensor for _, tensor in weights)
        num_bytes, self.groups, idle = self._ask("weight_sync", version, self.shapes, weights=sent)
        self.idle |= idle
        return num_bytes

    def replies(self, options: SamplingOptions, seed: int) -> dict[str, Tensor]:
        """`finished_replies` of all engines, on the first trainer; on the others none."""
        replies = self._ask("replies", options, seed)
        return replies if dist.get_rank() == 0 else {}

    def take_idle(self) -> dict[str, float]:
        """Seconds since the last call, by NeMo RL's names: in which the trainers waited (buffer_starvation, validation)
        and in which an engine, on average, had nothing to do (buffer_full_backoff) or took weights (refit_bubble)."""
        seconds, self.idle = self.idle, defaultdict(float)
        return {f"idle/{cause}": value for cause, value in seconds.items()}

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Nothing: an engine has the memory of its GPU for itself."""

    def wake(self, part: str) -> None:
        """Nothing, likewise."""

    def __enter__(self) -> "Generators":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, StopRun | Saved):  # what all trainers raise together
            self._tell("end")


def serve(engine: Engine, sampler: Sampler, ranks: Ranks, device: torch.device, watchdog: Watchdog) -> None:
    """A generator's part in a run: answers until the trainers ask no more. What stops the work that was asked for is
    the answer to it, so that trainers end a run in one way wherever it stops."""
    bridge = ranks.bridge
    idle: dict[str, float] = defaultdict(float)  # seconds since the last sync, by cause
    while (request := _next_request(engine, ranks, watchdog, idle))[0] != "end":
        task, *arguments = request
        watchdog.enter(task)
        if task == "start":
            known, *arguments = arguments
            engine.known |= known
            sampler.ahead.append((sampler.start(*arguments), {}))
            continue
        answer: Any
        begin = time.perf_counter()
        try:
            if task == "weight_sync":
                version, shapes = arguments
                watchdog.step = version + 1  # the step that will be sampled with it
                num_bytes = engine.sync(bridge.receive_weights(shapes, engine.dtype, device), version)
                idle["refit_bubble"] += time.perf_counter() - begin
                answer = num_bytes, groups_under_way(sampler), _mean_over_ranks(idle)
                idle.clear()
            else:
                answer = _answer(task, arguments, sampler, idle)
        except (Interrupted, StopRun) as error:
            answer = error
        bridge.broadcast(answer, root=bridge.num_trainers)


def _next_request(engine: Engine, ranks: Ranks, watchdog: Watchdog, idle: dict[str, float]) -> tuple:
    """Of the trainers. Until it is there, the engine goes on with what is under way."""
    request = ranks.bridge.announce(async_op=True)
    watchdog.enter("waiting for the trainers", waits=True)
    while not engine.is_idle and not ranks.any_rank_of_engine(request.is_completed()):
        engine.step()
    begin = time.perf_counter()
    request.wait()
    idle["buffer_full_backoff"] += time.perf_counter() - begin
    return ranks.bridge.broadcast(None, root=0)


def _answer(task: str, arguments: list, sampler: Sampler, idle: dict[str, float]) -> Any:
    """What a generator does for a request that moves no weights. A collective of all generators."""
    engine, ranks = sampler.engine, sampler.ranks
    if task in ("generation", "validation") and any_rank(engine.should_stop()):  # of which no trainer has heard
        raise Interrupted
    if task == "generation":
        samples = sampler.finish(sampler.ahead[0][0], *arguments)
        sampler.ahead.popleft()
        return with_tokens(samples)
    if task == "validation":
        return with_tokens(sampler.sample(*arguments))
    if task == "canary":
        *inputs, may_stop = arguments
        replies = gather(engine.generate(*inputs, may_stop=may_stop))
        return [reply for of_engine in replies[:: ranks.tp_size] for reply in of_engine]
    if task == "replies":
        return {
            name: reply for of_rank in gather(finished_replies(sampler, *arguments)) for name, reply in of_rank.items()
        }
    assert task == "drain", task
    while not (engine.is_idle or engine.should_stop()):  # told to stop, it takes the weights amid responses
        engine.step()
    begin = time.perf_counter()
    any_rank(False)  # trainers send weights when all are here
    idle["refit_bubble"] += time.perf_counter() - begin
    return None


def _mean_over_ranks(seconds: dict[str, float]) -> dict[str, float]:
    of_ranks = gather(dict(seconds))
    return {cause: sum(each.get(cause, 0.0) for each in of_ranks) / len(of_ranks) for cause in seconds}


def with_tokens(samples: list[Sample]) -> list[Sample]:
    """All tokens on the first generator, which sends all trainers all samples. A collective of all generators."""
    move_tokens([samples])
    for sample in samples:
        sample.holder = None
    return samples


def groups_under_way(sampler: Sampler) -> dict[int, bool]:
    """Groups of later steps by number, and whether all their replies are there. A collective of all that generate."""
    under_way = [each for conversations, _ in sampler.ahead for each in conversations]
    missing = [bool(each.request_id) and each.request_id not in sampler.engine.finished for each in under_way]
    dist.all_reduce(num_missing := torch.tensor(missing, dtype=torch.int32))
    is_whole = dict.fromkeys((each.sample.prompt for each in under_way), True)
    for each, num in zip(under_way, num_missing.tolist(), strict=True):
        is_whole[each.sample.prompt] &= not num
    return is_whole


def finished_replies(sampler: Sampler, options: SamplingOptions, seed: int) -> dict[str, Tensor]:
    """What this engine has finished for later steps: key.finish_reason -> [3, tokens] ids, logps, versions. options,
    seed: of the run."""
    replies = {}
    for conversations, _ in sampler.ahead:
        for each in conversations if sampler.ranks.leads_engine else ():
            reply = sampler.engine.finished.get(each.request_id)
            if reply and each.sample.num_turns == 0:
                reply_seed = sample_seed(seed, each.sample.prompt, each.sample.index)  # as sample_step's
                key = reply_key(reply_seed, each.sample.prompt_ids, options)
                columns = np.stack([reply.ids, reply.logps, reply.versions]).astype(np.float64)
                replies[f"{key}.{reply.finish_reason}"] = torch.from_numpy(columns)
    return replies
