"""Prompts -> graded samples: conversations of one or more turns over the ranks, and the samples of a step.

Owns per-sample seeds, turning prompts into graded `Sample`s, dynamic sampling (DAPO, Yu et al. 2025, 3.2) and the
reward model's part in it. Every rank sees all samples of a step, so all ranks decide alike.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist

import envs
from advantages import filter_overlong, shape_rewards
from config import Config, GRPOConfig
from data import Problem, Sample
from dataset.mixing import Cursor, Mixture
from engine import Completion, Engine, SamplingOptions
from hf.tokenizer import Tokenizer
from system.exits import Interrupted, StopRun
from system.ranks import Ranks

ScoreConversations = Callable[[Sequence[list[dict]]], list[float | None]]  # a reward model's, a collective


@dataclass(slots=True)
class Conversation:
    """One sample in the making. Each list has an item per part: a reply that was sampled (mask True), or an observation
    of the environment (mask False, log-probability 0)."""

    prompt: int
    problem: Problem
    index: int
    messages: list[dict]
    ids: list[np.ndarray] = field(default_factory=list)
    logps: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    results: list[envs.StepResult] = field(default_factory=list)
    finish_reason: str = ""  # of the last reply; of the whole conversation as soon as `done`
    done: bool = False

    @property
    def token_ids(self) -> list[int]:
        """What the engine goes on from: exactly the ids so far."""
        return [*self.problem.prompt_ids, *(int(i) for ids in self.ids for i in ids)]

    def add_reply(self, completion: Completion, tokenizer: Tokenizer) -> None:
        self.ids.append(completion.ids)
        self.logps.append(completion.logps)
        self.mask.append(np.ones(len(completion.ids), bool))
        self.finish_reason = completion.finish_reason
        self.messages.append({"role": "assistant", "content": tokenizer.decode(completion.ids)})

    def turn(self) -> envs.Turn:
        """What the environment sees after a reply."""
        state = self.results[-1].state if self.results else {}
        return envs.Turn(
            self.messages,
            self.problem.answer,
            self.finish_reason,
            state,
            self.problem.fields,
            prompt_ids=[*self.problem.prompt_ids, *(int(i) for ids in self.ids[:-1] for i in ids)],
            completion_ids=self.ids[-1].tolist(),
        )

    def add_result(self, result: envs.StepResult, tokenizer: Tokenizer, max_total_tokens: int, is_last: bool) -> None:
        """Ends the conversation, or appends the observation if a reply has room behind it. A reward that is not finite
        counts as outcome `error` with reward 0."""
        assert result.outcome in envs.OUTCOMES, result
        if not np.isfinite([result.reward, *result.rewards.values()]).all():
            no_rewards = dict.fromkeys(result.rewards, 0.0)
            result = replace(result, reward=0.0, rewards=no_rewards, outcome="error", done=True)
        self.results.append(result)
        self.done = result.done or self.finish_reason == "length"  # half a reply is no turn to answer to
        if self.done:
            return
        if is_last:
            self.done = True
            self.finish_reason = "max_turns"
            return
        before, observation = self.messages[:-1], list(result.observation)
        ids = tokenizer.observation_ids(before, self.ids[-1].tolist(), observation, self.problem.tools)
        if len(self.token_ids) + len(ids) >= max_total_tokens:
            self.done = True
            self.finish_reason = "length"
            return
        self.ids.append(np.asarray(ids, np.int32))
        self.logps.append(np.zeros(len(ids), np.float32))
        self.mask.append(np.zeros(len(ids), bool))
        self.messages += observation

    def sample(self, weight_version: int) -> Sample:
        mask = np.concatenate(self.mask)
        rewards: Counter = Counter()
        for result in self.results:
            for name, reward in result.rewards.items():
                rewards[name] += reward
        return Sample(
            prompt=self.prompt,
            index=self.index,
            row_id=self.problem.row_id,
            prompt_ids=self.problem.prompt_ids,
            output_ids=np.concatenate(self.ids),
            sampler_logps=np.concatenate(self.logps),
            mask=mask if self.problem.loss_multiplier else np.zeros_like(mask),
            finish_reason=self.finish_reason,
            weight_version=weight_version,
            reward=sum(result.reward for result in self.results),
            rewards=dict(rewards),
            outcome=self.results[-1].outcome,
            extracted=self.results[-1].extracted,
            env_name=self.problem.env_name,
            dataset=self.problem.dataset,
            num_turns=len(self.results),
            num_env_tokens=int((~mask).sum()),
            messages=self.messages if self.problem.env_name == "reward_model" else [],
        )


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws and grades conversations; what it holds stays the same over a run.

    max_turns: replies of the policy in a conversation. max_error_fraction: of the samples of a call, those that may end
    in outcome `error`. score_conversations: the reward model's, where an environment asks for one.
    """

    engine: Engine
    tokenizer: Tokenizer
    environments: dict[str, envs.Environment]
    ranks: Ranks
    max_turns: int = 1
    max_error_fraction: float = 1.0
    score_conversations: ScoreConversations | None = None

    def sample(
        self,
        prompts: Sequence[tuple[int, Problem]],
        num_samples: int,
        options: SamplingOptions,
        seed_key: tuple[int, ...],
    ) -> list[Sample]:
        """`num_samples` graded samples of each (index in the step, problem), ordered by (index, sample number).

        All ranks name the same prompts: each engine takes its share, and every rank gets all samples. StopRun when more
        than `max_error_fraction` of them could not be graded: their rewards would be noise. Interrupted, on all ranks,
        when any of them was told to stop meanwhile: the others finish their share first.
        """
        try:
            share = self._converse(prompts[self.ranks.dp_rank :: self.ranks.dp_size], num_samples, options, seed_key)
        except Interrupted:
            share = None
        samples = _gather(share, self.ranks)
        self._score_by_model([sample for sample in samples if sample.env_name == "reward_model"])
        failed = Counter(sample.env_name for sample in samples if sample.outcome == "error")
        if failed.total() > self.max_error_fraction * len(samples):
            raise StopRun(
                f"{failed.total()} of {len(samples)} answers could not be graded ({dict(failed)}), more than "
                f"env.max_error_fraction={self.max_error_fraction:g}: see the environment's own messages above"
            )
        return samples

    def _converse(
        self, prompts: Sequence[tuple[int, Problem]], num_samples: int, options: SamplingOptions, seed_key: tuple
    ) -> list[Sample]:
        """The samples of this rank's engine.

        A turn is a reply of at most max_new_tokens and, while the environment is not done, its observation: the tokens
        that the chat template adds, appended to those that were sampled. finish_reason: "stop" (the environment was
        done), "length" (a reply was cut, or the next one has no room), "max_turns" (it would have gone on).
        """
        conversations = [
            Conversation(prompt, problem, index, list(problem.messages))
            for prompt, problem in prompts
            for index in range(num_samples)
        ]
        for turn in range(self.max_turns):
            live = [conversation for conversation in conversations if not conversation.done]
            if not live:
                break
            # Turn 0 is left out of the seed, so that samples of one turn do not depend on max_turns.
            turn_key = (turn,) if turn else ()
            seeds = [sample_seed(*seed_key, each.prompt, each.index, *turn_key) for each in live]
            completions = self.engine.generate([each.token_ids for each in live], seeds, options)
            for conversation, completion in zip(live, completions, strict=True):
                conversation.add_reply(completion, self.tokenizer)
            # Where an engine has several ranks, one of them grades: graders that work against time differ.
            results = self.ranks.broadcast_from_tp_leader(lambda live=live: grade(live, self.environments))
            if results is None:
                raise Interrupted
            for conversation, result in zip(live, results, strict=True):
                is_last = turn == self.max_turns - 1
                conversation.add_result(result, self.tokenizer, self.engine.max_total_tokens, is_last)
        return [conversation.sample(self.engine.weight_version) for conversation in conversations]

    def _score_by_model(self, samples: Sequence[Sample]) -> None:
        """Gives samples the reward model's scores, a collective of all ranks; the engine makes room for it."""
        if not samples:
            return
        self.engine.sleep()
        scores = self.score_conversations([sample.messages for sample in samples])
        for sample, score in zip(samples, scores, strict=True):
            sample.reward, sample.outcome = (0.0, "error") if score is None else (score, "ok")
        self.engine.wake("weights")
        self.engine.wake("kv_cache")


def sample_seed(*key: int) -> int:
    """A 48-bit seed from e.g. (run seed, step, prompt, sample): a resumed run samples what an unbroken one would."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


def grade(
    conversations: Sequence[Conversation], environments: dict[str, envs.Environment]
) -> list[envs.StepResult] | None:
    """A result for the last reply of each, by one call per environment. None when told to stop meanwhile."""
    results: dict[int, envs.StepResult] = {}
    for name, environment in environments.items():
        members = [i for i, each in enumerate(conversations) if each.problem.env_name == name]
        try:
            graded = environment.step([conversations[i].turn() for i in members]) if members else []
        except Interrupted:
            return None
        results |= zip(members, graded, strict=True)
    return [results[i] for i in range(len(conversations))]


def _gather(samples: list[Sample] | None, ranks: Ranks) -> list[Sample]:
    """All ranks' samples on every rank, ordered by (prompt, index). Interrupted where one has None."""
    parts: list = [None] * ranks.world_size
    dist.all_gather_object(parts, samples if ranks.leads_engine or samples is None else [])
    if any(part is None for part in parts):
        raise Interrupted
    return sorted((s for part in parts for s in part), key=lambda s: (s.prompt, s.index))


# ----------------------------------------------------------------------------------------------- the samples of a step


@dataclass(frozen=True, slots=True)
class StepSamples:
    """trained: the samples of num_prompts_per_step prompts, numbered from 0. generated: those and all that dynamic
    sampling discarded. cursor: stands behind the prompts drawn. metrics: of the drawing."""

    trained: list[Sample]
    generated: list[Sample]
    cursor: Cursor
    metrics: dict[str, float]


def sample_step(sampler: Sampler, cfg: Config, mixture: Mixture, cursor: Cursor, step: int) -> StepSamples:
    """The samples to train on, rewards shaped, masks of filtered ones cleared; equal on all ranks.

    With use_dynamic_sampling, batches of num_prompts_per_step * batch_multiplier prompts are drawn until enough groups
    have unequal unshaped rewards; groups beyond what the step needs are discarded. NeMo RL filters samples one by one,
    by the leave-one-out deviation: the one right answer of a group has deviation 0, because its peers are all wrong, so
    it is dropped while they stay. We keep or drop whole groups. Prompts are numbered through the batches of a step, so
    that no two samples share a seed, which is made of (step, prompt, sample).

    Raises StopRun when dynamic_sampling_max_gen_batches batches are too few, and when no sample is left to train on.
    """
    grpo = cfg.grpo
    options = SamplingOptions(cfg.policy.generation.temperature, cfg.policy.generation.max_new_tokens)
    generated: list[Sample] = []
    groups: list[list[Sample]] = []
    num_drawn = 0
    num_batches = 0
    while len(groups) < grpo.num_prompts_per_step:
        if num_batches == grpo.dynamic_sampling_max_gen_batches:
            raise StopRun(_too_few_groups(generated, len(groups), num_batches, grpo))
        problems, cursor = mixture.draw(cursor, grpo.prompts_per_batch)
        prompts = list(enumerate(problems, start=num_drawn))
        batch = sampler.sample(prompts, grpo.num_generations_per_prompt, options, (grpo.seed, step))
        shape_rewards(batch, grpo, options.max_new_tokens)
        batch_groups = groups_of(batch)
        assert len(batch_groups) == len(problems), (len(batch_groups), len(problems))
        groups += [group for group in batch_groups if not grpo.use_dynamic_sampling or is_mixed(group)]
        generated += batch
        num_drawn += len(problems)
        num_batches += 1

    kept = groups[: grpo.num_prompts_per_step]
    trained = [replace(sample, prompt=number) for number, group in enumerate(kept) for sample in group]
    num_filtered = filter_overlong(trained) if grpo.overlong_filtering else 0
    if num_filtered == len(trained):
        raise StopRun(
            f"all {num_filtered} samples of a step ran into policy.generation.max_new_tokens={options.max_new_tokens}, "
            "and grpo.overlong_filtering=true leaves none to train on: allow longer responses, or set it to false"
        )
    if not any(sample.mask.any() for sample in trained):
        raise StopRun("no sample of a step is trained on: all its rows have loss_multiplier=0")
    metrics: dict[str, float] = {"num_overlong_filtered": num_filtered}
    if grpo.use_dynamic_sampling:
        metrics["dynamic_sampling_num_gen_batches"] = num_batches
        metrics["dynamic_sampling_num_discarded_valid_samples"] = sum(map(len, groups)) - len(trained)
    return StepSamples(trained, generated, cursor, metrics)


def data_is_used_up(grpo: GRPOConfig, num_problems: int, position: int) -> bool:
    """Whether max_num_epochs passes leave too few prompts for another step. A step that draws again may still go on
    into the next pass: its prompts are few, and cutting it short would waste the groups it has."""
    return position + grpo.prompts_per_batch > grpo.max_num_epochs * num_problems


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by their prompt, in the order in which prompts first appear."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return list(groups.values())


def is_mixed(group: Sequence[Sample]) -> bool:
    """Unequal rewards before shaping: lengths alone are no reason to keep a group that is all wrong
    (NVIDIA-NeMo/RL#2478)."""
    return len({sample.unshaped_reward for sample in group}) > 1


def _too_few_groups(generated: Sequence[Sample], num_kept: int, num_batches: int, grpo: GRPOConfig) -> str:
    groups = groups_of(generated)
    solved = sum(all(sample.outcome == "ok" for sample in group) for group in groups)
    failed = sum(all(sample.outcome != "ok" for sample in group) for group in groups)
    return (
        f"dynamic sampling: {num_batches} batches, {len(groups)} prompts of {grpo.num_generations_per_prompt} samples, "
        f"gave {num_kept} groups of unequal rewards; a step needs {grpo.num_prompts_per_step}. {solved} groups were "
        f"all right, {failed} had no right answer. Raise grpo.dynamic_sampling_max_gen_batches="
        f"{grpo.dynamic_sampling_max_gen_batches}, grpo.batch_multiplier={grpo.batch_multiplier:g} or "
        "grpo.num_generations_per_prompt, lower grpo.num_prompts_per_step, or train on problems that this model solves "
        "now and then"
    )
