"""The samples of a step: draws prompts, has them sampled and graded, shapes rewards, and picks what is trained on.

Owns dynamic sampling (DAPO, Yu et al. 2025, 3.2): prompts are drawn until enough groups have unequal rewards; the
others would give no gradient. Every rank sees all samples, so all decide alike. Knows no engine: that is `generate`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from advantages import filter_overlong, shape_rewards
from config import Config, GRPOConfig
from data import Problem, Sample
from dataset.mixing import Cursor, Mixture
from run.metrics import sample_metrics
from system.exits import StopRun

Generate = Callable[[list[tuple[int, Problem]]], list[Sample]]  # (index in the step, row) -> graded samples, in order


def collect(
    cfg: Config, mixture: Mixture, cursor: Cursor, generate: Generate
) -> tuple[list[Sample], Cursor, dict[str, float]]:
    """(samples to train on, the cursor behind the prompts drawn, metrics): equal on all ranks.

    Samples are of num_prompts_per_step prompts, numbered from 0; rewards are shaped, masks of filtered ones cleared.

    With use_dynamic_sampling, batches of num_prompts_per_step * batch_multiplier prompts are drawn until enough groups
    have unequal unshaped rewards. A group stays or goes as a whole: under the leave-one-out baseline NeMo RL loses the
    one right answer of a group, whose peers are all wrong and so without deviation, and keeps its peers. Groups kept
    wait for the next batch; those beyond what the step needs are discarded and counted. Prompts are numbered through
    the batches of a step, so that a seed made of (step, prompt, sample) is nobody else's. Raises StopRun when
    dynamic_sampling_max_gen_batches batches are too few, and when filtering leaves no sample at all.
    """
    grpo = cfg.grpo
    generated: list[Sample] = []
    groups: list[list[Sample]] = []
    drawn = num_batches = 0
    while len(groups) < grpo.num_prompts_per_step:
        if num_batches == grpo.dynamic_sampling_max_gen_batches:
            raise StopRun(_too_few(generated, len(groups), num_batches, grpo))
        count = grpo.prompts_per_batch
        rows, cursor = mixture.draw(cursor, count)
        batch = generate([(drawn + i, row) for i, row in enumerate(rows)])
        shape_rewards(batch, grpo, cfg.policy.generation.max_new_tokens)
        fresh = groups_of(batch)
        assert len(fresh) == count and {len(g) for g in fresh} == {grpo.num_generations_per_prompt}, len(batch)
        groups += [group for group in fresh if not grpo.use_dynamic_sampling or is_mixed(group)]
        generated += batch
        drawn, num_batches = drawn + count, num_batches + 1

    kept = groups[: grpo.num_prompts_per_step]
    samples = [replace(sample, prompt=number) for number, group in enumerate(kept) for sample in group]
    num_filtered = filter_overlong(samples) if grpo.overlong_filtering else 0
    if num_filtered == len(samples):
        raise StopRun(
            f"all {num_filtered} samples of a step ran into policy.generation.max_new_tokens="
            f"{cfg.policy.generation.max_new_tokens}, and grpo.overlong_filtering=true leaves none to train on: allow "
            "longer responses, or set it to false"
        )
    metrics = sample_metrics(generated, samples) | {"num_overlong_filtered": num_filtered}
    if grpo.use_dynamic_sampling:
        surplus = sum(map(len, groups)) - len(samples)
        metrics["dynamic_sampling_num_gen_batches"] = num_batches
        metrics["dynamic_sampling_num_discarded_valid_samples"] = surplus
    if not any(sample.mask.any() for sample in samples):
        raise StopRun("no sample of a step is trained on: all its rows have loss_multiplier=0")
    return samples, mixture.record(cursor, metrics), metrics


def data_is_used_up(grpo: GRPOConfig, num_rows: int, position: int) -> bool:
    """Whether max_num_epochs passes leave too few prompts for another step. A step that draws again may still go on
    into the next pass: its prompts are few, and cutting it short would waste the groups it has."""
    return position + grpo.prompts_per_batch > grpo.max_num_epochs * num_rows


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by their prompt, in the order in which prompts first appear."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return list(groups.values())


def is_mixed(group: Sequence[Sample]) -> bool:
    """Unequal rewards before shaping: lengths alone are no reason to keep a group that is all wrong (RL#2478)."""
    return len({sample.unshaped_reward for sample in group}) > 1


def _too_few(generated: Sequence[Sample], num_kept: int, num_batches: int, grpo: GRPOConfig) -> str:
    groups = groups_of(generated)
    solved = sum(all(s.outcome == "ok" for s in group) for group in groups)
    failed = sum(all(s.outcome != "ok" for s in group) for group in groups)
    return (
        f"dynamic sampling: {num_batches} batches, {len(groups)} prompts of {grpo.num_generations_per_prompt} samples, "
        f"gave {num_kept} groups of unequal rewards; a step needs {grpo.num_prompts_per_step}. {solved} groups were "
        f"all right, {failed} had no right answer. Raise grpo.dynamic_sampling_max_gen_batches="
        f"{grpo.dynamic_sampling_max_gen_batches}, grpo.batch_multiplier={grpo.batch_multiplier:g} or "
        "grpo.num_generations_per_prompt, lower grpo.num_prompts_per_step, or train on problems that this model solves "
        "now and then"
    )
