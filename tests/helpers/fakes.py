"""The engine without a model, and a tokenizer, for tests of what stands around them."""

import heapq
import time
from typing import NamedTuple

import numpy as np
import torch

SECONDS = 20  # after which nothing that was waited for will come


class Started(NamedTuple):
    ids: list[int]
    seed: int
    options: object
    priority: int


def one_letter(seed, options):
    """ "7", and "5" to odd seeds of sampled requests."""
    return np.int32([ord("5" if options.temperature and seed % 2 else "7")]), np.zeros(1, np.float32)


class FakeEngine:
    """Decodes `slots` requests at once, the lowest priority first. A call of `advance` goes on to the next end; with
    `lasts` by a tick: lasts(prompt) says whether its reply goes on, or None.

    reply(seed, options): ids and log-probabilities, and as may be finish reason and versions; else those of its ticks.
    started, batches, calls: what it was asked for, how many requests were decoded at once, and what the loop had it do.
    """

    weight_version, max_total_tokens, dtype = 3, 512, torch.float32

    def __init__(self, reply=one_letter, ticks=lambda seed: 1, slots=10**6, lasts=None):
        self.reply, self.ticks_of, self.slots, self.lasts = reply, ticks, slots, lasts
        self.queue, self.running, self.unclaimed, self.ended = [], {}, {}, {}
        self.started, self.batches, self.calls = [], [], []
        self.ticks, self.end = 0, time.monotonic() + SECONDS

    @property
    def is_idle(self):
        return not self.running and not self.queue

    def start(self, prompts, seeds, options, priority=0):
        begin = len(self.started)
        self.started += (Started(ids, seed, options, priority) for ids, seed in zip(prompts, seeds, strict=True))
        numbers = range(begin, len(self.started))
        for number in numbers:
            heapq.heappush(self.queue, (priority, number))
        return [*map(str, numbers)]

    def advance(self, requests):
        from records import Completion, make_tokens

        while self.queue and len(self.running) < self.slots:
            _, number = heapq.heappop(self.queue)
            self.running[str(number)] = [self.ticks_of(self.started[number].seed), []]
        self.batches.append(len(self.running))
        ticks = 1
        if self.lasts:
            assert time.monotonic() < self.end, f"nothing else began: {self.started}"
            time.sleep(0.001)
        else:
            ticks = min((left for left, _ in self.running.values()), default=0)
        self.ticks += ticks
        for name, request in [*self.running.items()]:
            request[0] -= ticks
            request[1] += [self.weight_version] * ticks
            prompt, seed, options, _ = self.started[int(name)]
            lasts = self.lasts(prompt) if self.lasts else None
            if request[0] > 0 if lasts is None else lasts:
                continue
            del self.running[name]
            ids, logps, *others = self.reply(seed, options)
            reason, versions = others or ("stop", np.resize(request[1], len(ids)))
            self.unclaimed[name] = Completion(make_tokens(ids, logp=logps, version=versions, mask=True), reason)
            self.ended[name] = self.ticks

    def preempt(self):
        pass

    def abort(self):
        self.calls.append("abort")
        self.queue.clear()
        self.running.clear()

    def sleep(self, *, keep_weights=False):
        self.calls.append("sleep, weights kept" if keep_weights else "sleep")

    def wake(self, part):
        self.calls.append(f"wake {part}")

    def sync(self, weights, version):
        """weights: those of the last sync."""
        self.calls.append(f"sync {version}")
        self.weights = {name: tensor.clone() for name, tensor in weights}
        return sum(tensor.nbytes for tensor in self.weights.values())


class FakeTokenizer:
    def decode(self, ids):
        return "".join(map(chr, ids))
