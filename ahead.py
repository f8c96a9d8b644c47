"""Batches before their step (grpo.async_grpo): drawn while the policy trains on earlier ones.

When a batch starts, it gets a step, and keeps it however long its replies take: short replies never overtake a long
one, so long replies are trained as often as they are sampled. That step trains it, or an earlier one that draws again
for dynamic sampling; a later one never, so no reply is older than max_age steps. A step waits for its own batch only;
later batches stay in the engine, which goes on with them after each weight sync. docs/async.md says when it pays, and
what is exact.

In examples/naive.py this is `attempts = [attempt(row, SAMPLES, generator) for row in draw.sample(rows, PROMPTS)]`,
in the step that trains them.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from base.inputs.mixing import Cursor, Mixture
from config import Config
from metrics import Numbers
from records import STEPS_BETWEEN_STOPS, Sample, SamplingOptions
from rollout import Conversation, Sampler, State

if TYPE_CHECKING:
    from run.split.generators import Generators


class Ahead:
    """batches: that have started, the oldest first: what the sampler's `start` returned, and the data cursor after the
    batch."""

    def __init__(self):
        self.batches: deque[tuple[list[Conversation] | None, Cursor]] = deque()

    def draw(
        self, sampler: "Sampler | Generators", cfg: Config, mixture: Mixture, cursor: Cursor, step: int, num_steps: int
    ) -> tuple[list[Sample], Cursor]:
        """Starts the batches of this step and of the next max_age, as far as they have not started; then returns the
        oldest batch and the data cursor after it: that of this step, or of a later one if dynamic sampling asks again.
        """
        grpo, options = cfg.grpo, SamplingOptions.of(cfg.policy.generation)
        # A custom_dataloader reads the run's metrics in the cursor; those in a batch's cursor are as old as the batch.
        newest_records = {"records": cursor["records"]}
        newest_cursor = cursor
        if self.batches:
            _, newest_cursor = self.batches[-1]
        num_wanted = 1 + min(grpo.async_grpo.max_age, num_steps - step)
        while len(self.batches) < num_wanted:
            before = newest_cursor | newest_records
            problems, newest_cursor = mixture.draw(before, grpo.prompts_per_batch)
            # A prompt's number, and so its seeds, is its place in the data: dynamic sampling may move it to another
            # step.
            prompts = list(enumerate(problems, start=before["position"]))
            # If a step draws again, two batches get the same step. The first of them is then trained before it.
            step_of_batch = step + len(self.batches)
            started = sampler.start(prompts, grpo.num_generations_per_prompt, options, (grpo.seed,), step_of_batch)
            self.batches.append((started, newest_cursor))
        started, cursor_after = self.batches.popleft()
        samples = sampler.finish(started)
        return samples, cursor_after | newest_records

    def decode_until_others_end(self, sampler: Sampler) -> None:
        """Decodes for later steps while other engines finish this one. The all_reduce completes once every engine has
        joined it. It is polled, never waited for: a rank with nothing to decode returns and waits in the next
        collective, where the watchdog sees it."""
        if not self.batches or sampler.ranks.dp_size == 1:
            return
        others = dist.all_reduce(torch.zeros(1), async_op=True)
        while sampler.has_work:
            others_work = sampler.ranks.any_rank_of_engine(not others.is_completed())
            if not others_work:
                return
            for _ in range(STEPS_BETWEEN_STOPS):
                sampler.step()

    def groups_under_way(self, sampler: Sampler) -> dict[int, bool]:
        """Group of a later step -> whether all its first replies have ended (of an agent's conversation: its rollout).
        Further turns start at their step. A collective of all ranks that generate."""
        under_way = [conversation for conversations, _ in self.batches for conversation in conversations]
        missing = torch.tensor([_is_missing(conversation, sampler) for conversation in under_way], dtype=torch.int32)
        dist.all_reduce(missing)
        num_missing = Counter()
        for conversation, is_missing in zip(under_way, missing.tolist(), strict=True):
            num_missing[conversation.sample.prompt] += is_missing
        return {prompt: number == 0 for prompt, number in num_missing.items()}


def _is_missing(conversation: Conversation, sampler: Sampler) -> bool:
    """Whether this rank still waits for its first reply, or its agent."""
    if conversation.state in (State.ELSEWHERE, State.DONE):
        return False
    return conversation.request_id not in sampler.engine.unclaimed


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
