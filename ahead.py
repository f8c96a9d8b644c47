"""Batches before their step (grpo.async_grpo): drawn while the policy trains on earlier ones.

When a batch starts, it gets a step, and keeps it however long its replies take: short replies never overtake a long
one, so long replies are trained as often as they are sampled. That step trains it, or an earlier one that draws again
for dynamic sampling; a later one never, so no reply is older than max_age steps. A step waits for its own batch only;
later batches stay in the engine, which goes on with them after each weight sync. docs/async.md says when it pays, and
what is exact.

In examples/naive.py this is `attempts = [attempt(row, SAMPLES, generator) for row in draw.sample(rows, PROMPTS)]`,
in the step that trains them.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from base.inputs.mixing import Cursor, Mixture
from config import Config
from metrics import Numbers
from records import STEPS_BETWEEN_STOPS, Sample, SamplingOptions
from rollout import Conversation, Prompts, Sampler, State

Started = TypeVar("Started")  # what `start` returns


class Batch(NamedTuple, Generic[Started]):
    """A batch that has started, and the data cursor after its prompts."""

    started: Started
    cursor_after: Cursor


InFlight = deque[Batch[Started]]  # oldest first


class Starts(Protocol[Started]):
    """A sampler whose two halves can be called one after the other: Sampler, run.split.generators.Generators."""

    def start(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int
    ) -> Started: ...

    def finish(self, started: Started) -> list[Sample]: ...


def draw_ahead(
    sampler: Starts[Started],
    in_flight: InFlight,
    cfg: Config,
    mixture: Mixture,
    cursor: Cursor,
    step: int,
    num_steps: int,
) -> tuple[list[Sample], Cursor]:
    """Starts the batches of this step and of the next max_age, as far as they have not started; then returns the
    oldest batch and the data cursor after it: that of this step, or of a later one if dynamic sampling asks again.
    """
    grpo, options = cfg.grpo, SamplingOptions.of(cfg.policy.generation)
    # A custom_dataloader reads the run's metrics in the cursor; those in the cursor of a batch are as old as the batch.
    newest_records = {"records": cursor["records"]}
    num_wanted = 1 + min(grpo.async_grpo.max_age, num_steps - step)
    while len(in_flight) < num_wanted:
        newest_cursor = in_flight[-1].cursor_after if in_flight else cursor
        before = newest_cursor | newest_records
        problems, after = mixture.draw(before, grpo.prompts_per_batch)
        # A prompt's number, and so its seeds, is its place in the data: dynamic sampling may move it to another step.
        prompts = list(enumerate(problems, start=before["position"]))
        # If a step draws again, two batches get the same step. The first of them is then trained before it.
        step_of_batch = step + len(in_flight)
        started = sampler.start(prompts, grpo.num_generations_per_prompt, options, (grpo.seed,), step_of_batch)
        in_flight.append(Batch(started, after))
    batch = in_flight.popleft()
    samples = sampler.finish(batch.started)
    cursor_after = batch.cursor_after | newest_records
    return samples, cursor_after


class AheadSampler(Sampler):
    """A sampler that draws batches before their step."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.in_flight: InFlight[list[Conversation]] = deque()

    def draw_batch(
        self, cfg: Config, mixture: Mixture, cursor: Cursor, step: int, num_steps: int, number: int
    ) -> tuple[list[Sample], Cursor]:
        if cfg.grpo.async_grpo.max_age == 0:
            return super().draw_batch(cfg, mixture, cursor, step, num_steps, number)
        return draw_ahead(self, self.in_flight, cfg, mixture, cursor, step, num_steps)

    def _wait_for_others(self) -> None:
        """Decodes for later steps while other engines finish this one. The all_reduce completes once every engine has
        joined it. It is polled, never waited for: a rank with nothing to decode returns and waits in the next
        collective, where the watchdog sees it."""
        if not self.in_flight or self.ranks.dp_size == 1:
            return
        others = dist.all_reduce(torch.zeros(1), async_op=True)
        while not self.engine.is_idle or self.led:
            others_work = self.ranks.any_rank_of_engine(not others.is_completed())
            if not others_work:
                return
            for _ in range(STEPS_BETWEEN_STOPS):
                self.step()

    def groups_under_way(self) -> dict[int, bool]:
        """Group of a later step -> whether all its first replies have ended (of a led conversation: its rollout).
        Further turns start at their step. A collective of all ranks that generate."""
        under_way = [conversation for conversations, _ in self.in_flight for conversation in conversations]
        missing = torch.tensor([self._is_missing(conversation) for conversation in under_way], dtype=torch.int32)
        dist.all_reduce(missing)
        is_whole = {conversation.sample.prompt: True for conversation in under_way}
        for conversation, num_missing in zip(under_way, missing.tolist(), strict=True):
            if num_missing:
                is_whole[conversation.sample.prompt] = False
        return is_whole

    def _is_missing(self, conversation: Conversation) -> bool:
        """Whether this rank still waits for its first reply, or for the environment that leads it."""
        if not conversation.request_id or conversation.state is State.DONE:
            return False
        return conversation.request_id not in self.engine.unclaimed


def age_metrics(trained: Sequence[Sample], step: int, is_whole: dict[int, bool]) -> Numbers:
    """The age of a sample, in steps, is that of its oldest token. Also how many groups of later steps have all their
    first replies (NeMo RL's buffer), and how many do not. is_whole: of `groups_under_way`."""
    ages = [step - 1 - sample.oldest_version for sample in trained]
    num_whole = sum(is_whole.values())
    return {
        "avg_trajectory_age": sum(ages) / len(ages),
        "max_trajectory_age": max(ages),
        "buffer_size": num_whole,
        "carried_groups": len(is_whole) - num_whole,
    }
