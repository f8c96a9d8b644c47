"""What the house calls of a sampler. A protocol is for readers and type checkers: no run loads this file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from records import Completion, SamplingOptions, Weights


class Engine(Protocol):
    """What the house calls of a sampler: engine.py's vLLM, the tests' stand-in, or another that you write. run/build.py
    builds it. All ranks of an engine make the same calls, and get the same answers.

    unclaimed: the completions that have ended and are not taken yet, by request id. weight_version: the training step
    that left its weights; -1 before the first sync, and while it sleeps without them. stop_token_ids: that end a
    reply. max_total_tokens: of a prompt and its reply. seconds_asleep: in all; a deadline that runs meanwhile does not
    count them. drains: whether requests end before new weights arrive. runner: what the log calls it.
    """

    unclaimed: dict[str, Completion]
    weight_version: int
    vocab_size: int
    stop_token_ids: Sequence[int]
    max_total_tokens: int
    dtype: torch.dtype
    seconds_asleep: float
    drains: bool
    runner: str
    should_stop: Callable[[], bool]

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], options: SamplingOptions, *, may_stop: bool = True
    ) -> list[Completion]:
        """A completion of each prompt, before all that is running. In float32 on a CPU it depends on (weights, prompt,
        seed, options) only. With `may_stop`, raises Interrupted when should_stop says so."""

    def start(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], options: SamplingOptions, priority: int = 0
    ) -> list[str]:
        """Queues a request for each prompt, and returns their ids. The lowest priority number comes first."""

    def advance(self, requests: Mapping[str, object], *, may_stop: bool = True) -> None:
        """`step`, on the way to the end of `requests` (id -> name for errors). Every STEPS_BETWEEN_STOPS calls it may
        stop as `generate` does; it then aborts all requests before it raises. StopRun if nothing is left to decode and
        a request has neither ended nor been taken."""

    def step(self) -> None:
        """Decodes a token of each running request. The completions of those that end are in `unclaimed`."""

    def ids_so_far(self) -> dict[str, list[int]]:
        """What each unfinished request has sampled."""

    def preempt(self) -> None:
        """Sends running requests back to the queue: what starts next with a lower priority number does not wait."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends these requests, or all that are unfinished, without a completion."""

    def sync(self, weights: Weights, version: int) -> int:
        """Takes the weights, in place; what starts from now on is drawn from them. Returns the bytes received."""

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Frees GPU memory for the trainer. The weights are dropped, or with keep_weights move to host memory."""

    def wake(self, part: str) -> None:
        """Takes memory back for `part`: "weights"; then, after a sync if they were dropped, "kv_cache"."""
