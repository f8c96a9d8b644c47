"""Prompts -> graded samples: conversations of one or more turns over the ranks, and the samples of a step.

Owns per-sample seeds, turning prompts into graded `Sample`s, dynamic sampling (DAPO, Yu et al. 2025, 3.2) and the
reward model's part in it. Every rank sees all samples of a step, so all ranks decide alike.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import envs
from advantages import filter_overlong, shape_rewards
from config import Config, GRPOConfig
from data import Problem, Sample, groups_of
from dataset.mixing import Cursor, Mixture
from engine import STEPS_BETWEEN_STOPS, Completion, Engine, SamplingOptions
from hf.tokenizer import Tokenizer
from system.exchange import share_numbers
from system.exits import Interrupted, StopRun
from system.ranks import Ranks, any_rank, gather

Prompts = Sequence[tuple[int, Problem]]  # index in the step, problem
Draw = tuple[int, Problem, int]  # a sample to be drawn: index in the step, problem, sample number


class Conversation:
    """A sample in the making. Its ids are replies that were sampled (mask True, unless the problem is not trained on)
    and observations of the environment (mask False, log-probability 0)."""

    def __init__(self, problem: Problem, prompt: int, index: int, step: int):
        self.problem = problem
        self.step = step  # that trains it, or 0
        self.request_id = ""  # of the reply that is under way in this rank's engine, if it draws it
        self.reply_ids: list[int] = []  # of the last turn
        self.state: dict = {}  # what the environment returned after it
        self.done = False
        self.sample = Sample(
            prompt=prompt,
            index=index,
            row_id=problem.row_id,
            prompt_ids=problem.prompt_ids,
            output_ids=np.zeros(0, np.int32),
            sampler_logps=np.zeros(0, np.float32),
            mask=np.zeros(0, bool),
            finish_reason="",
            versions=np.zeros(0, np.int32),
            reward=0.0,
            env_name=problem.env_name,
            num_turns=0,
            dataset=problem.dataset,
            messages=list(problem.messages),
        )

    @property
    def name(self) -> str:
        """Where a line says what is waited for."""
        sample = self.sample
        return f"group {sample.prompt} (row {sample.row_id} of {sample.dataset}), sample {sample.index}"

    @property
    def token_ids(self) -> list[int]:
        """What the engine goes on from: exactly the ids so far."""
        return [*self.sample.prompt_ids, *self.sample.output_ids.tolist()]

    def _append(self, ids: np.ndarray, logps: np.ndarray, versions: np.ndarray, is_trained: bool) -> None:
        sample = self.sample
        sample.output_ids = np.concatenate([sample.output_ids, ids])
        sample.sampler_logps = np.concatenate([sample.sampler_logps, logps])
        sample.versions = np.concatenate([sample.versions, versions])
        sample.mask = np.concatenate([sample.mask, np.full(len(ids), is_trained)])
        sample.count_tokens()

    def add_reply(self, completion: Completion, tokenizer: Tokenizer) -> envs.Turn:
        """Appends the reply; returns what the environment sees of the conversation."""
        problem, sample = self.problem, self.sample
        ids_before = self.token_ids
        self.reply_ids = completion.ids.tolist()
        self._append(completion.ids, completion.logps, completion.versions, problem.loss_multiplier != 0)
        sample.finish_reason = completion.finish_reason
        sample.messages.append({"role": "assistant", "content": tokenizer.decode(completion.ids)})
        known = (sample.messages, problem.answer, sample.finish_reason, self.state, problem.fields)
        return envs.Turn(*known, ids_before, self.reply_ids, int(completion.versions[-1]))

    def add_result(self, result: envs.StepResult, tokenizer: Tokenizer, max_total_tokens: int, is_last: bool) -> None:
        """Ends the conversation, or appends the observation if a reply has room behind it. A reward that is not finite
        counts as outcome `error` with reward 0."""
        assert result.outcome in envs.OUTCOMES, result
        sample = self.sample
        if not np.isfinite([result.reward, *result.rewards.values()]).all():
            result = replace(result, reward=0.0, rewards=dict.fromkeys(result.rewards, 0.0), outcome="error", done=True)
        sample.num_turns += 1
        sample.reward += result.reward
        for name, reward in result.rewards.items():
            sample.rewards[name] = sample.rewards.get(name, 0) + reward
        sample.outcome = result.outcome
        sample.extracted = result.extracted
        self.state = result.state
        self.done = True
        if result.done or sample.finish_reason == "length":  # half a reply is no turn to answer to
            return
        if is_last:
            sample.finish_reason = "max_turns"
            return
        observation = list(result.observation)
        ids = tokenizer.observation_ids(sample.messages[:-1], self.reply_ids, observation, self.problem.tools)
        if sample.num_tokens + len(ids) >= max_total_tokens:
            sample.finish_reason = "length"
            return
        self.done = False
        versions = np.full(len(ids), sample.versions[-1])
        self._append(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), versions, False)
        sample.num_env_tokens += len(ids)
        sample.messages += observation


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws and grades conversations; what it holds stays the same over a run, but for `ahead`: the conversations that
    are under way between two steps, in the order in which they are due, and the cursor behind each batch of them.

    max_turns: replies of the policy in a conversation. max_error_fraction: this share of the samples of a call may end
    in outcome `error`. score_conversations: RewardModel.score, where an environment asks for it.
    """

    engine: Engine
    tokenizer: Tokenizer
    environments: dict[str, envs.Environment]
    ranks: Ranks
    max_turns: int = 1
    max_error_fraction: float = 1.0
    score_conversations: Callable[[Sequence[list[dict]]], list[float | None]] | None = None
    ahead: deque[tuple[list[Conversation], Cursor]] = field(default_factory=deque)

    def sample(self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple) -> list[Sample]:
        """`num_samples` graded samples of each (index in the step, problem), ordered by (index, sample number)."""
        return self.finish(self.start(prompts, num_samples, options, seed_key), options, seed_key)

    def start(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = 0
    ) -> list[Conversation]:
        """Conversations, for `finish`, of which this engine begins its share; all ranks name the same prompts. step:
        that trains them, or 0. The ranks of an engine take turns as holders of what it draws."""
        conversations = []
        for dp_rank, share in enumerate(deal(prompts, num_samples, self.ranks.dp_size, options.max_new_tokens)):
            drawn = [Conversation(problem, prompt, index, step) for prompt, problem, index in share]
            for i, each in enumerate(drawn):
                each.sample.holder = dp_rank * self.ranks.tp_size + i % self.ranks.tp_size
            if drawn and dp_rank == self.ranks.dp_rank:
                self._ask(drawn, options, seed_key)
            conversations += drawn
        return conversations

    def _ask(self, live: list[Conversation], options: SamplingOptions, seed_key: tuple, turn: int = 0) -> None:
        """Has the engine begin the next reply of each."""
        # Turn 0 is left out of the seed, so that samples of one turn do not depend on max_turns.
        turn_key = (turn,) if turn else ()
        seeds = [sample_seed(*seed_key, each.sample.prompt, each.sample.index, *turn_key) for each in live]
        priority = max(each.step for each in live)
        request_ids = self.engine.start([each.token_ids for each in live], seeds, options, priority)
        for each, request_id in zip(live, request_ids, strict=True):
            each.request_id = request_id

    def finish(self, conversations: list[Conversation], options: SamplingOptions, seed_key: tuple) -> list[Sample]:
        """The graded samples of all ranks, on every rank; tokens on their holder only. StopRun when more than
        `max_error_fraction` of them could not be graded: their rewards would be noise. What stops one rank meanwhile
        (Interrupted, or StopRun of its engine) is raised on all: the others finish their share first."""
        stop = None
        try:
            self._converse([each for each in conversations if each.request_id], options, seed_key)
        except (Interrupted, StopRun) as error:
            stop = error
        if len(self.ahead) > 1 and self.ranks.dp_size > 1:
            self._go_on()
        if any_rank(stop is not None):
            raise next(each for each in gather(stop) if each)
        for each in conversations:
            if not isinstance(self.environments[each.problem.env_name], envs.RewardModelEnv):
                each.sample.messages = []  # only the reward model reads them
        samples = sorted((each.sample for each in conversations), key=lambda s: (s.prompt, s.index))
        self._score_by_model([sample for sample in samples if sample.holder == self.ranks.rank])
        part_names = {name for each in self.environments.values() for name in getattr(each, "reward_names", ())}
        share_numbers(samples, sorted(part_names))
        failed = Counter(sample.env_name for sample in samples if sample.outcome == "error")
        if failed.total() > self.max_error_fraction * len(samples):
            raise StopRun(
                f"{failed.total()} of {len(samples)} answers could not be graded ({dict(failed)}), more than "
                f"env.max_error_fraction={self.max_error_fraction:g}: see the environment's own messages above"
            )
        return samples

    def _go_on(self) -> None:
        """Until every engine has what it waits for, this one goes on with what is due later. The collective that tells
        so is left behind without a wait: the next one waits, where the watchdog sees that this rank is not stuck."""
        others = dist.all_reduce(torch.zeros(1), async_op=True)
        while self.engine.spans and self.ranks.any_rank_of_engine(not others.is_completed()):
            for _ in range(STEPS_BETWEEN_STOPS):
                self.engine.step()

    def _converse(self, conversations: list[Conversation], options: SamplingOptions, seed_key: tuple) -> None:
        """To the end of conversations of this rank's engine, whose first replies are under way.

        A turn is a reply of at most max_new_tokens and, while the environment is not done, its observation: the tokens
        that the chat template adds, appended to those that were sampled. finish_reason: "stop" (the environment was
        done), "length" (a reply was cut, or the next one has no room), "max_turns" (it would have gone on).
        """
        for turn in range(self.max_turns):
            live = [conversation for conversation in conversations if not conversation.done]
            if not live:
                break
            if turn:
                self._ask(live, options, seed_key, turn=turn)
            completions = self.engine.wait([each.request_id for each in live], [each.name for each in live])
            turns = [each.add_reply(reply, self.tokenizer) for each, reply in zip(live, completions, strict=True)]
            # Where an engine has several ranks, one of them grades: graders that work against time differ.
            results = self.ranks.broadcast_from_tp_leader(partial(self._grade, live, turns))
            if results is None:
                raise Interrupted
            for each, result in zip(live, results, strict=True):
                each.add_result(result, self.tokenizer, self.engine.max_total_tokens, turn == self.max_turns - 1)

    def _grade(self, live: list[Conversation], turns: list[envs.Turn]) -> list[envs.StepResult] | None:
        """The result of each turn, by one call per environment. None when told to stop meanwhile."""
        results: dict[int, envs.StepResult] = {}
        for name, environment in self.environments.items():
            members = [i for i, each in enumerate(live) if each.problem.env_name == name]
            try:
                graded = environment.step([turns[i] for i in members]) if members else []
            except Interrupted:
                return None
            results |= zip(members, graded, strict=True)
        return [results[i] for i in range(len(turns))]

    def _score_by_model(self, samples: Sequence[Sample]) -> None:
        """Gives this rank's samples the reward model's scores, a collective; the engine makes room for it."""
        samples = [sample for sample in samples if sample.messages]
        if self.score_conversations is None or not any_rank(len(samples) > 0):
            return
        self.engine.sleep(keep_weights=True)
        scores = self.score_conversations([sample.messages for sample in samples])
        for sample, score in zip(samples, scores, strict=True):
            sample.reward, sample.outcome = (0.0, "error") if score is None else (score, "ok")
        self.engine.wake("weights")
        self.engine.wake("kv_cache")


def deal(prompts: Prompts, num_samples: int, num_engines: int, max_new_tokens: int) -> list[list[Draw]]:
    """The samples that each engine draws; all ranks deal alike.

    All wait for the engine with the most work. Nothing tells how long a reply will be, but a problem's are alike: where
    lengths vary by 60% between problems and by 50% within, the busiest of 8 engines has 34% more tokens than the mean
    with 8 whole groups of 16 each, and 8% with groups spread over all. Longest prompts first: so prefills are even too.
    """
    shares: list[list[Draw]] = [[] for _ in range(num_engines)]
    for prompt, problem in sorted(prompts, key=lambda prompt: -len(prompt[1].prompt_ids)):
        num_parts = min(num_samples, num_engines)
        # Each further engine computes the prompt again, at up to the price of as many new tokens. Replies have perhaps
        # a quarter of max_new_tokens: so this limit is a quarter of a group's work. Beyond it only idle engines help.
        if (num_parts - 1) * len(problem.prompt_ids) > num_samples * max_new_tokens / 16:
            num_parts = max(1, min(num_parts, num_engines // len(prompts)))
        for part in range(num_parts):
            min(shares, key=len).extend((prompt, problem, index) for index in range(part, num_samples, num_parts))
    return shares


def sample_seed(*key: int) -> int:
    """A 48-bit seed from e.g. (run seed, step, prompt, sample): a resumed run samples what an unbroken one would."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "little")


# ----------------------------------------------------------------------------------------------- the samples of a step


@dataclass(frozen=True, slots=True)
class StepSamples:
    """trained: the samples of num_prompts_per_step prompts, numbered from 0. generated: those and all that dynamic
    sampling discarded. cursor: stands behind the prompts drawn. metrics: of the drawing."""

    trained: list[Sample]
    generated: list[Sample]
    cursor: Cursor
    metrics: dict[str, float]


def sample_step(
    sampler: Sampler, cfg: Config, mixture: Mixture, cursor: Cursor, step: int, num_steps: int
) -> StepSamples:
    """The samples to train on, rewards shaped, masks of filtered ones cleared; equal on all ranks.

    With async_grpo the prompts of the next max_age steps are under way too, while the engine has room. Which step a
    batch is for is settled when it begins, never by how long it takes: so long responses are trained as often as they
    are sampled, and none is too old. The step waits for its own batch only; all others outlast it in the engine.

    With use_dynamic_sampling, batches of num_prompts_per_step * batch_multiplier prompts are drawn until enough groups
    have unequal unshaped rewards; groups beyond what the step needs are discarded. NeMo RL filters single samples by
    the leave-one-out deviation, which drops the lone right answer of a group and keeps its peers; we keep or drop whole
    groups. Prompts are numbered through the batches, so that no two samples of a step share a seed.

    Raises StopRun when dynamic_sampling_max_gen_batches batches are too few, and when no sample is left to train on.
    """
    grpo = cfg.grpo
    sampling = cfg.policy.generation
    options = SamplingOptions(sampling.temperature, sampling.max_new_tokens, sampling.top_p, sampling.top_k)
    ahead, max_age = sampler.ahead, grpo.async_grpo.max_age
    seed_key = (grpo.seed,) if max_age else (grpo.seed, step)
    generated: list[Sample] = []
    groups: list[list[Sample]] = []
    num_batches = 0
    records = {"records": cursor["records"]}  # the newest, also for a batch that is drawn amid the step
    while len(groups) < grpo.num_prompts_per_step:
        if num_batches == grpo.dynamic_sampling_max_gen_batches:
            raise StopRun(_too_few_groups(generated, len(groups), num_batches, grpo))
        while not ahead or len(ahead) <= min(max_age, num_steps - step):
            before = (ahead[-1][1] if ahead else cursor) | records
            problems, behind = mixture.draw(before, grpo.prompts_per_batch)
            # Ahead, a prompt's number is its place in the data: dynamic sampling may still change the step it is for.
            first = before["position"] if max_age else num_batches * grpo.prompts_per_batch
            prompts = list(enumerate(problems, start=first))
            due = step + len(ahead)
            ahead.append((sampler.start(prompts, grpo.num_generations_per_prompt, options, seed_key, due), behind))
        conversations, cursor = ahead[0]
        batch = sampler.finish(conversations, options, seed_key)
        ahead.popleft()  # not before: where a signal ends the wait, what is finished is saved
        shape_rewards(batch, grpo, options.max_new_tokens)
        groups += [group for group in groups_of(batch) if not grpo.use_dynamic_sampling or is_mixed(group)]
        generated += batch
        num_batches += 1

    kept = groups[: grpo.num_prompts_per_step]
    trained = [replace(sample, prompt=number) for number, group in enumerate(kept) for sample in group]
    num_filtered = filter_overlong(trained) if grpo.overlong_filtering else 0
    if num_filtered == len(trained):
        raise StopRun(
            f"all {num_filtered} samples of a step ran into policy.generation.max_new_tokens={options.max_new_tokens}, "
            "and grpo.overlong_filtering=true leaves none to train on: allow longer responses, or set it to false"
        )
    if not any(sample.num_trained_tokens for sample in trained):
        raise StopRun("no sample of a step is trained on: all its rows have loss_multiplier=0")
    metrics: dict[str, float] = {"num_overlong_filtered": num_filtered}
    if grpo.use_dynamic_sampling:
        metrics["dynamic_sampling_num_gen_batches"] = num_batches
        metrics["dynamic_sampling_num_discarded_valid_samples"] = sum(map(len, groups)) - len(trained)
    return StepSamples(trained, generated, cursor, metrics)


def is_mixed(group: Sequence[Sample]) -> bool:
    """Unequal rewards before shaping: lengths alone keep no group that is all wrong (NVIDIA-NeMo/RL#2478)."""
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
