"""Prompts -> graded samples: conversations of one or more turns over the ranks, and the samples of a step.

Owns conversations, their seeds, dynamic sampling (DAPO, Yu et al. 2025, 3.2) and sampling ahead of the step
(grpo.async_grpo). Every rank sees all samples of a step, so all ranks make the same decisions.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

import envs
from advantages import filter_overlong, rewards_differ, shape_rewards
from config import Config
from engine import STEPS_BETWEEN_STOPS, Completion, Engine, SamplingOptions, check_versions
from records import Grade, Problem, Sample, groups_of, sample_seed
from support.graders.failures import Failures, reason_of
from support.graders.grading import Grading
from support.inputs.mixing import Cursor, Mixture
from support.inputs.tokenizer import Tokenizer
from support.system.exchange import held_here, share_samples
from support.system.exits import Interrupted, StopRun
from support.system.ranks import Ranks, any_rank, gather

Prompts = Sequence[tuple[int, Problem]]  # prompt number, problem
OPENED = re.compile(r"<(?!assistant\b)[\w:-]+>\s*\Z")  # an open tag that ends a prompt (<think>), not <assistant>
Draw = tuple[Problem, int, int]  # a sample to be drawn: problem, prompt number, sample number


class Conversation:
    """A sample in progress. Its ids are sampled replies (mask True unless the problem is not trained on) and
    observations from the environment (mask False, log-probability 0)."""

    def __init__(self, problem: Problem, prompt: int, index: int, options: SamplingOptions, seed_key: tuple, step: int):
        self.problem = problem
        self.options = options
        self.seed_key = seed_key
        self.step = step  # the step that trains the sample; 0: validation
        self.request_id = ""  # of the reply in progress or the agent's rollout; "" on other engines
        self.reply_ids: list[int] = []  # of the last turn
        self.state: dict = {}  # the environment's, after the last turn
        self.done = False
        self.sample = Sample(
            prompt=prompt,
            index=index,
            row_id=problem.row_id,
            expected=problem.answer,
            prompt_ids=problem.prompt_ids,
            grade=Grade(reward=0.0),
            env_name=problem.env_name,
            num_turns=0,
            dataset=problem.dataset,
            messages=list(problem.messages),
        )

    def __str__(self) -> str:
        """For error messages about a lost request."""
        sample = self.sample
        return f"group {sample.prompt} (row {sample.row_id} of {sample.dataset}), sample {sample.index}"

    def add_reply(self, completion: Completion, tokenizer: Tokenizer, special_tokens: bool = False) -> envs.Turn:
        """Appends the reply; returns the environment's view of the conversation."""
        problem, sample = self.problem, self.sample
        ids_before = sample.token_ids
        self.reply_ids = completion.ids.tolist()
        sample.add_reply(completion, problem.loss_multiplier != 0)
        sample.turn_tokens.append(sample.num_trained_tokens - sum(sample.turn_tokens))
        sample.finish_reason = completion.finish_reason
        sample.messages.append({"role": "assistant", "content": tokenizer.decode(completion.ids)})
        tag = OPENED.search(tokenizer.decode(ids_before[-32:]))
        raw_reply = tokenizer.decode(self.reply_ids, special=True) if special_tokens else ""
        tokens = {"prompt_ids": ids_before, "completion_ids": self.reply_ids, "opened": tag[0] if tag else ""}
        tokens |= {"weight_version": int(completion.versions[-1]), "raw_reply": raw_reply}
        return envs.Turn(sample.messages, problem.answer, sample.finish_reason, self.state, problem.fields, **tokens)

    def add_result(self, result: envs.StepResult, tokenizer: Tokenizer, max_total_tokens: int, max_turns: int) -> None:
        """Ends the conversation, or appends the observation if a reply has room after it."""
        sample = self.sample
        sample.num_turns += 1
        grade = sample.grade
        grade.reward += result.reward
        grade.turn_rewards.append(result.reward)
        for name, reward in result.rewards.items():
            grade.rewards[name] = grade.rewards.get(name, 0) + reward
        grade.outcome = result.outcome
        grade.extracted = result.extracted
        self.state = result.state
        self.done = True
        if result.done or sample.finish_reason == "length":  # the environment does not answer half a reply
            return
        if sample.num_turns == max_turns:
            sample.finish_reason = "max_turns"
            return
        observation = list(result.observation)
        ids = tokenizer.observation_ids(sample.messages[:-1], self.reply_ids, observation, self.problem.tools)
        if sample.num_tokens + len(ids) >= max_total_tokens:
            sample.finish_reason = "length"
            return
        self.done = False
        sample.add_context(ids)
        sample.messages += observation


@dataclass(frozen=True, slots=True)
class Sampler(AbstractContextManager):
    """Draws and grades conversations. As a context manager it closes the environments if the run ended without error.

    max_turns: most replies in a conversation. max_error_fraction, max_crashed_fraction: the shares of a call's samples
    that may end in these outcomes. score_conversations: RewardModel.score, where an environment asks for it. in_flight:
    batches of later steps, oldest first: (conversations, data cursor after them). endpoint: for agents; led_by_agent:
    the conversations that they lead, by request id. Over a run only in_flight, led_by_agent, failures and grading's
    work change.
    """

    engine: Engine
    tokenizer: Tokenizer
    environments: dict[str, envs.Environment]
    ranks: Ranks
    max_turns: int = 1
    max_error_fraction: float = 1.0
    max_crashed_fraction: float = 1.0
    score_conversations: Callable[[Sequence[list[dict]]], list[float | None]] | None = None
    in_flight: deque[tuple[list[Conversation], Cursor]] = field(default_factory=deque)
    grading: Grading = field(init=False)
    failures: Failures = field(init=False)
    endpoint: Any = None
    led_by_agent: dict[str, Conversation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "failures", Failures(self.max_error_fraction, self.max_crashed_fraction))
        object.__setattr__(self, "grading", Grading(self.environments))

    def __exit__(self, kind, error, trace) -> None:
        if error is None:  # else a grader may still be working, and this process ends anyway
            for environment in self.environments.values():
                environment.close()
            if self.endpoint:
                self.endpoint.shut_down()

    def sample(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = 0
    ) -> list[Sample]:
        """`num_samples` graded samples of each prompt, ordered by (prompt number, sample number). step: the step that
        trains them; 0: validation."""
        return self.finish(self.start(prompts, num_samples, options, seed_key, step))

    def start(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = 0
    ) -> list[Conversation]:
        """Deals the conversations to the engines; this rank's engine starts its share. All ranks pass the same prompts.
        The ranks of an engine take turns as holders of the samples that it draws."""
        conversations = []
        shares = deal(prompts, num_samples, self.ranks.dp_size, options.max_new_tokens, self.grading.whole_groups)
        for dp_rank, share in enumerate(shares):
            dealt = [Conversation(problem, *place, options, seed_key, step) for problem, *place in share]
            for i, each in enumerate(dealt):
                each.sample.engine = dp_rank
                each.sample.holder = dp_rank * self.ranks.tp_size + i % self.ranks.tp_size
                each.sample.is_led = each.problem.env_name in self.grading.leading
            if dp_rank == self.ranks.dp_rank:
                for each in dealt:
                    if each.sample.is_led:
                        self._open_rollout(each)
                if asked := [each for each in dealt if not each.sample.is_led]:
                    self._ask(asked)
            conversations += dealt
        return conversations

    def _open_rollout(self, each: Conversation) -> None:
        """Opens the endpoint for a rollout; the agent starts when `_converse` asks for results."""
        problem, key = each.problem, (*each.seed_key, each.sample.prompt, each.sample.index)
        max_calls = self.environments[problem.env_name].cfg.max_calls
        each.request_id, url = self.endpoint.open(key, each.options, each.step or -1, max_calls)  # -1: validation first
        self.led_by_agent[each.request_id] = each
        given = {"base_url": url, "seed": sample_seed(*key), "is_validation": each.step == 0, "tools": problem.tools}
        turn = envs.Turn(problem.messages, problem.answer, "stop", given, problem.fields)
        if self.ranks.leads_engine:
            self.grading.begin(problem.env_name, {each.request_id: turn})

    def _ask(self, live: list[Conversation]) -> None:
        """The engine starts the next reply of each conversation; all have the same options."""
        # Turn 0 is left out: the seeds that single-turn samples always had.
        numbers = [(s.prompt, s.index, s.num_turns)[: 3 if s.num_turns else 2] for s in (each.sample for each in live)]
        seeds = [sample_seed(*each.seed_key, *key) for each, key in zip(live, numbers, strict=True)]
        priority = max(each.step or -each.sample.num_turns for each in live)  # lowest first; validation 0, -1, ...
        request_ids = self.engine.start([each.sample.token_ids for each in live], seeds, live[0].options, priority)
        for each, request_id in zip(live, request_ids, strict=True):
            each.request_id = request_id

    def finish(self, conversations: list[Conversation]) -> list[Sample]:
        """The graded samples of all ranks, on every rank; only a sample's holder has its tokens. Raises StopRun where
        too many of them failed. An Interrupted or StopRun on one rank is raised on all ranks, after each has finished
        its share."""
        stop = None
        self.grading.raised.clear()
        try:
            self._converse([each for each in conversations if each.request_id])
        except (Interrupted, StopRun) as error:
            stop = error
            self.engine.abort()
        if self.in_flight and self.ranks.dp_size > 1:
            self._decode_while_others_finish()
        if any_rank(stop is not None):
            raise next(each for each in gather(stop) if each)
        for each in conversations:
            if not isinstance(self.environments[each.problem.env_name], envs.RewardModelEnv):
                each.sample.messages = []  # only the reward model reads them
        samples = sorted((each.sample for each in conversations), key=lambda s: (s.prompt, s.index))
        self._score_by_model(samples)
        part_names = {name for each in self.environments.values() for name in getattr(each, "reward_names", ())}
        share_samples(samples, sorted(part_names))
        failed = [sample for sample in samples if sample.grade.message]
        if failed:
            said = f"{len(failed)} agent rollouts failed; the first: {reason_of(failed[0])}"
            self.ranks.print_rank0(f"WARNING: {said}")
        is_training = any(conversation.step > 0 for conversation in conversations)
        self.failures.check(samples, self.grading.raised, is_training)
        return samples

    def _decode_while_others_finish(self) -> None:
        """Decodes for later steps until every engine has finished this step and so joined the all_reduce. It is only
        polled: a rank waits in the next collective, where the watchdog sees it."""
        others = dist.all_reduce(torch.zeros(1), async_op=True)
        while (self.engine.versions_by_request or self.led_by_agent) and self.ranks.any_rank_of_engine(
            not others.is_completed()
        ):
            for _ in range(STEPS_BETWEEN_STOPS):
                self.engine.step()

    def _converse(self, conversations: list[Conversation]) -> None:
        """Runs this engine's conversations, whose first replies have started, to their end. Only the samples of
        `whole_groups` wait for each other.

        A turn is a reply of at most max_new_tokens and, while the environment is not done, its observation: the tokens
        that the chat template adds after the reply. finish_reason: "stop" (the environment was done), "length" (a reply
        was cut, or the next one has no room), "max_turns" (the environment was not done)."""
        led = self.led_by_agent
        asked = {o.request_id: o for o in conversations if not o.done and o.request_id not in led}  # being drawn
        for name in self.grading.leading:
            self.environments[name].pool.stand_still(self.engine.seconds_asleep)
        waiting: dict[str, Conversation] = {}  # whose replies are being graded
        turns: dict[str, envs.Turn] = {}  # replies that have ended, to be graded
        ended = [request_id for request_id in asked if request_id in self.engine.unclaimed]
        while asked or waiting or any(each.request_id in led for each in conversations):
            ready: dict[str, list[dict[str, envs.Turn]]] = defaultdict(list)  # environment -> its turns
            for each in map(asked.pop, ended):
                name = each.problem.env_name
                reply = self.engine.unclaimed.pop(each.request_id)
                special = name in self.grading.special_tokens
                turns[each.request_id] = each.add_reply(reply, self.tokenizer, special)
                peers = [each]
                if name in self.grading.whole_groups:
                    peers = [o for o in conversations if o.sample.prompt == each.sample.prompt and not o.done]
                if all(peer.request_id in turns for peer in peers):
                    ready[name].append({peer.request_id: turns.pop(peer.request_id) for peer in peers})
                    waiting |= {peer.request_id: peer for peer in peers}
            # One rank of an engine grades for all of them: a grader with a deadline may differ between ranks.
            grade = partial(self.grading.grade, ready, block=not asked and not led and self.engine.is_idle)
            results = self.ranks.broadcast_from_tp_leader(grade) if waiting or led else {}
            graded = [waiting.pop(request_id, None) or led[request_id] for request_id in results]
            for each, result in zip(graded, results.values(), strict=True):
                if led.pop(each.request_id, None):  # maybe of a later step
                    is_trained = each.problem.loss_multiplier != 0
                    result = self.endpoint.finish(each.request_id, each.sample, result, is_trained)
                each.add_result(result, self.tokenizer, self.engine.max_total_tokens, self.max_turns)
            if live := [each for each in graded if not each.done]:
                self._ask(live)
                asked |= {each.request_id: each for each in live}
            ended = self.engine.advance(asked) if asked or led or (waiting and not self.engine.is_idle) else []

    def groups_under_way(self) -> dict[int, bool]:
        """Group of a later step -> whether all its replies have ended. A collective of all ranks that generate."""
        under_way = [each for conversations, _ in self.in_flight for each in conversations]
        ended = self.engine.unclaimed
        missing = [bool(each.request_id) and not each.done and each.request_id not in ended for each in under_way]
        dist.all_reduce(num_missing := torch.tensor(missing, dtype=torch.int32))
        is_whole = dict.fromkeys((each.sample.prompt for each in under_way), True)
        for each, num in zip(under_way, num_missing.tolist(), strict=True):
            is_whole[each.sample.prompt] &= not num
        return is_whole

    def _score_by_model(self, samples: Sequence[Sample]) -> None:
        """Scores this rank's samples with the reward model. A collective; the engine sleeps meanwhile."""
        samples = [sample for sample in held_here(samples) if sample.messages]
        if self.score_conversations is None or not any_rank(len(samples) > 0):
            return
        self.engine.sleep(keep_weights=True)
        scores = self.score_conversations([sample.messages for sample in samples])
        for sample, score in zip(samples, scores, strict=True):
            grade = sample.grade
            grade.reward, grade.outcome = (0.0, "error") if score is None else (score, "ok")
            grade.turn_rewards = [grade.reward]  # `RewardModelEnv` ends a conversation at its first reply
        self.engine.wake("weights")
        self.engine.wake("kv_cache")


def deal(prompts: Prompts, num_samples: int, num_engines: int, max_new_tokens: int, whole=()) -> list[list[Draw]]:
    """The samples that each engine draws, the same on all ranks. whole: env_names whose groups must be on one engine.

    All engines wait for the busiest. Reply lengths are unknown, but similar within a problem: in a simulation
    (docs/LOG.md; lognormal, 60% between problems, 50% within), the busiest of 8 engines has 34% more tokens than the
    mean with 8 whole groups of 16 each, and 8% more with groups spread over all engines. Longest prompts first, which
    also evens out prefills, but first those that must be whole.
    """
    shares: list[list[Draw]] = [[] for _ in range(num_engines)]
    for prompt, problem in sorted(prompts, key=lambda p: (p[1].env_name not in whole, -len(p[1].prompt_ids))):
        num_parts = min(num_samples, num_engines)
        # Each further engine computes the prompt again, at most at a new token's price. That may cost a quarter of a
        # group's work, if replies have a quarter of max_new_tokens. Beyond, only idle engines help.
        if problem.env_name in whole:
            num_parts = 1
        elif (num_parts - 1) * len(problem.prompt_ids) > num_samples * max_new_tokens / 16:
            num_parts = max(1, min(num_parts, num_engines // len(prompts)))
        for part in range(num_parts):
            min(shares, key=len).extend((problem, prompt, index) for index in range(part, num_samples, num_parts))
    return shares


# ----------------------------------------------------------------------------------------------- the samples of a step


@dataclass(frozen=True, slots=True)
class StepSamples:
    """trained: the samples of at most num_prompts_per_step prompts, numbered from 0. generated: these and the discarded
    samples. cursor: the data cursor after the drawn prompts. metrics: of the sampling."""

    trained: list[Sample]
    generated: list[Sample]
    cursor: Cursor
    metrics: dict[str, float]


def sample_step(
    sampler: Sampler, cfg: Config, mixture: Mixture, cursor: Cursor, step: int, num_steps: int
) -> StepSamples:
    """The samples to train on, with shaped rewards and after the overlong filter; equal on all ranks.

    With use_dynamic_sampling, batches of num_prompts_per_step * batch_multiplier prompts are drawn until enough groups
    have unequal unshaped rewards; groups beyond what the step needs are discarded. Prompt numbers continue from batch
    to batch, so that no two samples of a step share a seed. If no sample of the step can be trained, say because all
    were cut, others are drawn.

    Raises StopRun if dynamic_sampling_max_gen_batches batches are too few; dynamic_sampling_when_exhausted=train trains
    the groups that there are instead. Raises StopRun if a token was drawn from older weights than the config allows.
    """
    grpo = cfg.grpo
    options = SamplingOptions.of(cfg.policy.generation)
    generated: list[Sample] = []
    trained: list[Sample] = []
    groups: list[list[Sample]] = []
    num_batches = num_skipped = num_filtered = 0
    while not any(sample.num_loss_tokens for sample in trained):
        if num_batches == grpo.dynamic_sampling_max_gen_batches:
            stop = StopRun(_nothing_to_train(trained, generated, len(groups), num_batches, cfg))
            stop.cursor = cursor
            raise stop
        if grpo.async_grpo.max_age:
            batch, cursor = sample_ahead(sampler, cfg, mixture, cursor, step, num_steps)
        else:
            problems, cursor = mixture.draw(cursor, grpo.prompts_per_batch)
            prompts = list(enumerate(problems, start=num_batches * grpo.prompts_per_batch))
            batch = sampler.sample(prompts, grpo.num_generations_per_prompt, options, (grpo.seed, step), step)
        shape_rewards(batch, grpo, options.max_new_tokens)
        drops_equal, by_turn = grpo.use_dynamic_sampling, grpo.turn_level_advantages
        groups += [group for group in groups_of(batch) if not drops_equal or is_mixed(group, by_turn)]
        generated += batch
        num_batches += 1
        is_last = num_batches == grpo.dynamic_sampling_max_gen_batches
        if len(groups) >= grpo.num_prompts_per_step or (is_last and grpo.dynamic_sampling_when_exhausted == "train"):
            num_skipped += len(trained)
            kept, groups = groups[: grpo.num_prompts_per_step], groups[grpo.num_prompts_per_step :]
            trained = [renumbered(sample, number) for number, group in enumerate(kept) for sample in group]
            num_filtered = filter_overlong(trained) if grpo.overlong_filtering else 0
            for sample in trained:
                if not sample.grade.is_valid:
                    sample.is_filtered = True

    check_versions(trained, step - 1, grpo.async_grpo.max_age)
    metrics: dict[str, float] = {"num_overlong_filtered": num_filtered, "num_skipped_samples": num_skipped}
    if grpo.use_dynamic_sampling:
        metrics["dynamic_sampling_num_gen_batches"] = num_batches
        metrics["dynamic_sampling_num_discarded_valid_samples"] = sum(map(len, groups))
        metrics["dynamic_sampling_num_missing_groups"] = grpo.num_prompts_per_step - len(kept)
    return StepSamples(trained, generated, cursor, metrics)


def sample_ahead(
    sampler: Sampler, cfg: Config, mixture: Mixture, cursor: Cursor, step: int, num_steps: int
) -> tuple[list[Sample], Cursor]:
    """Starts the batches of the next max_age steps, then returns this step's batch and the cursor after it.

    A batch gets its step when it starts, however long it then takes: so long responses are trained as often as they
    are sampled, and none is too old. A step waits for its own batch only; later batches stay in the engine.
    """
    grpo, options = cfg.grpo, SamplingOptions.of(cfg.policy.generation)
    in_flight, newest_records = sampler.in_flight, {"records": cursor["records"]}  # metrics for a custom_dataloader
    while len(in_flight) <= min(grpo.async_grpo.max_age, num_steps - step):
        before = (in_flight[-1][1] if in_flight else cursor) | newest_records
        problems, after = mixture.draw(before, grpo.prompts_per_batch)
        # A prompt's number is its place in the data, because dynamic sampling may still move it to another step.
        prompts = list(enumerate(problems, start=before["position"]))
        due = step + len(in_flight)
        begun = sampler.start(prompts, grpo.num_generations_per_prompt, options, (grpo.seed,), due)
        in_flight.append((begun, after))
    conversations, after = in_flight.popleft()
    return sampler.finish(conversations), after | newest_records


def renumbered(sample: Sample, prompt: int) -> Sample:
    """A copy of the sample and of its forks with another prompt number."""
    forks = [replace(fork, prompt=prompt) for fork in sample.forks]
    return replace(sample, prompt=prompt, forks=forks)


def is_mixed(group: Sequence[Sample], by_turn: bool = False) -> bool:
    """Whether rewards before shaping differ: lengths alone must not keep an all-wrong group (NVIDIA-NeMo/RL#2478).
    by_turn: within a turn."""
    grades = [sample.grade for sample in group if sample.grade.is_valid]
    rewards = [grade.turn_rewards if by_turn else [grade.unshaped_reward] for grade in grades]
    return any(rewards_differ(r for r in column if r is not None) for column in zip_longest(*rewards))


def _nothing_to_train(
    trained: Sequence[Sample], generated: Sequence[Sample], num_kept: int, num_batches: int, cfg: Config
) -> str:
    grpo, groups = cfg.grpo, groups_of(generated)
    if trained:
        why = f"no sample of {num_batches} batches can be trained on: in the last one "
        if not grpo.overlong_filtering:
            reasons = [f"; {reason_of(sample)}" for sample in trained if sample.grade.message]
            return f"{why}all rows have loss_multiplier=0, or were not graded{''.join(reasons[:1])}"
        return (
            f"{why}{sum(sample.finish_reason == 'length' for sample in trained)} of {len(trained)} ran into "
            f"policy.generation.max_new_tokens={cfg.policy.generation.max_new_tokens} with grpo.overlong_filtering"
            "=true, and the others have loss_multiplier=0, or were not graded. Allow longer responses, or set "
            "overlong_filtering=false"
        )
    solved = sum(all(sample.grade.outcome == "ok" for sample in group) for group in groups)
    failed = sum(all(sample.grade.outcome != "ok" for sample in group) for group in groups)
    return (
        f"dynamic sampling: {num_batches} batches ({len(groups)} prompts) gave {num_kept} groups of unequal rewards; a "
        f"step needs grpo.num_prompts_per_step={grpo.num_prompts_per_step}. In {solved} groups every answer was "
        f"right, in {failed} none was. Raise grpo.dynamic_sampling_max_gen_batches, grpo.batch_multiplier or "
        "grpo.num_generations_per_prompt, train on problems that this model solves now and then, or set "
        "grpo.dynamic_sampling_when_exhausted=train"
    )
