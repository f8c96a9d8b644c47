"""Prompts -> graded samples: conversations of one or more turns over the ranks, and the samples of a step.

Owns conversations, their seeds and dynamic sampling (DAPO, Yu et al. 2025, 3.2). Every rank sees all samples of a step
(their tokens stay with one rank), so all ranks make the same decisions. ahead.py draws batches before their step.

In examples/naive.py this is `def attempt(row: dict, num_samples: int, generator: Generator | None)`, one turn.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import envs
from advantages import filter_overlong, is_mixed, shape_rewards
from base.graders.failures import Failures, reason_of
from base.graders.grading import Grading, Turns
from base.hf.tokenizer import Tokenizer
from base.inputs.mixing import Cursor, Mixture
from base.system.exchange import share_samples
from base.system.exits import Interrupted, StopRun
from base.system.ranks import Ranks, any_rank, gather
from config import Config
from records import Completion, Engine, Grade, Problem, Sample, SamplingOptions, TokenSequence, groups_of, sample_seed

if TYPE_CHECKING:
    from ahead import Ahead
    from base.agents.endpoint import Endpoint
    from run.reward_model import RewardModel
    from run.split.generators import Generators

Prompts = Sequence[tuple[int, Problem]]  # the number of each prompt, and its problem
VALIDATION = 0  # in place of the number of the step that trains a sample
OPEN_TAG = re.compile(r"<(?!assistant\b)[\w:-]+>\s*\Z")  # <think>; but <assistant> is a role
OPEN_TAG_TOKENS = 32  # of the end of a prompt, in which the tag is looked for


class State(Enum):
    """Where a conversation stands, as its engine's ranks see it. It begins ELSEWHERE, and those of this engine are
    READY or WITH_AGENT at once. A conversation that is READY passes through the next three states, and is then READY
    again or DONE."""

    ELSEWHERE = "another engine draws it"
    READY = "its next reply can be asked for"
    DRAWING = "the engine draws a reply"
    DRAWN = "its reply waits for the replies of its group"
    GRADING = "the environment grades its reply"
    WITH_AGENT = "an agent asks for its replies, and grades it"
    DONE = "it is graded"


class Conversation:
    """A sample in progress. Its ids are sampled replies (mask True unless the problem is not trained on) and
    observations from the environment (mask False, log-probability 0). step: the last step that may train it, or
    VALIDATION."""

    def __init__(self, problem: Problem, prompt: int, index: int, options: SamplingOptions, seed_key: tuple, step: int):
        self.problem = problem
        self.options = options
        self.key = (*seed_key, prompt, index)  # of its seeds
        self.step = step
        self.state = State.ELSEWHERE
        self.request_id = ""  # of the reply in progress, or the agent's rollout
        self.reply_ids: list[int] = []  # of the last turn
        self.turn: envs.Turn | None = None  # what the environment is to grade
        self.env_state: dict = {}  # the environment's, after the last turn
        self.sample = Sample(
            prompt=prompt,
            index=index,
            row_id=problem.row_id,
            expected=problem.answer,
            sequences=[TokenSequence(problem.prompt_ids)],
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

    @property
    def is_trained(self) -> bool:
        return self.problem.loss_multiplier != 0

    def add_reply(self, completion: Completion, tokenizer: Tokenizer, special_tokens: bool = False) -> envs.Turn:
        """Appends the reply; returns the environment's view of the conversation."""
        problem, sample = self.problem, self.sample
        ids_before = sample.sequence.token_ids
        self.reply_ids = completion.ids
        sample.sequence.add_reply(completion, sample.num_turns, self.is_trained)
        sample.finish_reason = completion.finish_reason
        sample.messages.append({"role": "assistant", "content": tokenizer.decode(completion.ids)})
        open_tag = OPEN_TAG.search(tokenizer.decode(ids_before[-OPEN_TAG_TOKENS:]))
        return envs.Turn(
            messages=sample.messages,
            answer=problem.answer,
            finish_reason=sample.finish_reason,
            state=self.env_state,
            fields=problem.fields,
            prompt_ids=ids_before,
            completion_ids=self.reply_ids,
            weight_version=int(completion.tokens["version"][-1]),
            opened=open_tag[0] if open_tag else "",
            raw_reply=tokenizer.decode(self.reply_ids, special=True) if special_tokens else "",
        )

    def add_result(self, result: envs.StepResult, tokenizer: Tokenizer, max_total_tokens: int, max_turns: int) -> None:
        """Ends the conversation, or appends the observation if a reply has room after it."""
        sample, grade = self.sample, self.sample.grade
        sample.num_turns += 1
        grade.reward += result.reward
        if not sample.by_agent:  # an agent's turns have their rewards
            grade.turn_rewards.append(result.reward)
        for name, reward in result.rewards.items():
            grade.rewards[name] = grade.rewards.get(name, 0) + reward
        grade.outcome = result.outcome
        grade.extracted = result.extracted
        self.env_state = result.state
        self.state = State.DONE  # unless there is another turn
        if result.done or sample.finish_reason == "length":  # the environment does not answer half a reply
            return
        if sample.num_turns == max_turns:
            sample.finish_reason = "max_turns"
            return
        from base.hf.turns import observation_ids  # a run of one turn does without

        observation = list(result.observation)
        ids = observation_ids(tokenizer, sample.messages[:-1], self.reply_ids, observation, self.problem.tools)
        if sample.sequence.num_tokens + len(ids) >= max_total_tokens:
            sample.finish_reason = "length"
            return
        sample.sequence.add_context(ids)
        sample.messages += observation
        self.state = State.READY


def seed_of(conversation: Conversation) -> int:
    """The seed of the next reply. The number of the turn is part of it from the second turn on."""
    sample = conversation.sample
    if sample.num_turns == 0:
        return sample_seed(*conversation.key)
    return sample_seed(*conversation.key, sample.num_turns)


def in_state(conversations: Sequence[Conversation], state: State) -> list[Conversation]:
    return [conversation for conversation in conversations if conversation.state is state]


class Sampler(AbstractContextManager):
    """Draws and grades conversations. As a context manager it closes the environments if the run ended without error.

    max_turns: most replies in a conversation. max_error_fraction, max_crashed_fraction: the shares of a call's samples
    that may end in these outcomes. reward_model: where an environment asks for it. endpoint: for agents. ahead: of a
    run that starts batches before their step. stop: whether to give up waiting for grades. rollouts: the conversations
    that are with agents, by request id, also those of later steps.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        environments: dict[str, envs.Environment],
        ranks: Ranks,
        max_turns: int = 1,
        max_error_fraction: float = 1.0,
        max_crashed_fraction: float = 1.0,
        reward_model: "RewardModel | None" = None,
        endpoint: "Endpoint | None" = None,
        ahead: "Ahead | None" = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.environments = environments
        self.ranks = ranks
        self.max_turns = max_turns
        self.reward_model = reward_model
        self.endpoint = endpoint
        self.ahead = ahead
        self.grading = Grading(environments, stop)
        self.failures = Failures(max_error_fraction, max_crashed_fraction, ranks.print_rank0)
        self.rollouts: dict[str, Conversation] = {}

    def __exit__(self, kind, error, trace) -> None:
        if error is None:  # else a grader may still be working, and this process ends anyway
            for environment in self.environments.values():
                environment.close()
            if self.endpoint:
                self.endpoint.shut_down()

    def sample(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = VALIDATION
    ) -> list[Sample]:
        """`num_samples` graded samples of each prompt, ordered by (prompt number, sample number). step: the last one
        that may train them, or VALIDATION."""
        conversations = self.start(prompts, num_samples, options, seed_key, step)
        return self.finish(conversations)

    def start(
        self, prompts: Prompts, num_samples: int, options: SamplingOptions, seed_key: tuple, step: int = VALIDATION
    ) -> list[Conversation]:
        """Deals the conversations to the engines; this rank's engine starts its share. All ranks pass the same prompts.
        The ranks of an engine take turns as holders of the samples that it draws. A validation preempts all running
        requests."""
        if step == VALIDATION:
            self.engine.preempt()
        conversations = []
        started_here = []
        shares = deal(prompts, num_samples, self.ranks.dp_size, options.max_new_tokens, self.grading.whole_groups)
        for dp_rank, share in enumerate(shares):
            for number, (problem, prompt, index) in enumerate(share):
                conversation = Conversation(problem, prompt, index, options, seed_key, step)
                sample = conversation.sample
                sample.engine = dp_rank
                sample.sequence.holder = dp_rank * self.ranks.tp_size + number % self.ranks.tp_size
                sample.by_agent = sample.env_name in self.grading.agents
                conversations.append(conversation)
                if dp_rank == self.ranks.dp_rank:
                    started_here.append(conversation)
        for conversation in started_here:
            if conversation.sample.by_agent:
                self._open_rollout(conversation)
            else:
                conversation.state = State.READY
        self._ask_ready(started_here)
        return conversations

    def _open_rollout(self, conversation: Conversation) -> None:
        """Opens the endpoint for a rollout, and starts the agent."""
        problem = conversation.problem
        max_calls = self.environments[problem.env_name].cfg.max_calls
        conversation.request_id, url = self.endpoint.open(
            conversation.key, conversation.options, conversation.step, max_calls
        )
        conversation.state = State.WITH_AGENT
        self.rollouts[conversation.request_id] = conversation
        given = {
            "base_url": url,
            "seed": sample_seed(*conversation.key),
            "is_validation": conversation.step == VALIDATION,
            "tools": problem.tools,
        }
        if self.ranks.is_tp_leader:
            self.grading.begin_rollout(conversation.request_id, problem, given)

    def _ask_ready(self, conversations: list[Conversation]) -> None:
        """The engine starts the next reply of each conversation that is READY. All have the same options and step."""
        ready = in_state(conversations, State.READY)
        if not ready:
            return
        prompts = [conversation.sample.sequence.token_ids for conversation in ready]
        seeds = [seed_of(conversation) for conversation in ready]
        priority = ready[0].step  # the oldest step first, a validation before all of them
        request_ids = self.engine.start(prompts, seeds, ready[0].options, priority)
        for conversation, request_id in zip(ready, request_ids, strict=True):
            conversation.request_id = request_id
            conversation.state = State.DRAWING

    def finish(self, conversations: list[Conversation]) -> list[Sample]:
        """The graded samples of all ranks, on every rank; only a sample's holder has its tokens. Raises StopRun where
        too many of them failed. An Interrupted or StopRun on one rank is raised on all ranks, after each has finished
        its share."""
        self._collect(conversations)
        samples = self._share(conversations)
        is_training = any(conversation.step != VALIDATION for conversation in conversations)
        self.failures.check(samples, self.grading.raised, is_training)
        return samples

    def _collect(self, conversations: list[Conversation]) -> None:
        """Runs this engine's conversations to their end, and waits for the other engines."""
        stop = None
        self.grading.raised.clear()
        try:
            started_here = [c for c in conversations if c.state is not State.ELSEWHERE]
            self._converse(started_here)
        except (Interrupted, StopRun) as error:
            stop = error
            self.engine.abort()
        if self.ahead:
            self.ahead.decode_until_others_end(self)
        if any_rank(stop is not None):
            raise next(error for error in gather(stop) if error)

    def _share(self, conversations: list[Conversation]) -> list[Sample]:
        """The samples of all ranks in their order, with the reward model's scores."""
        for conversation in conversations:
            if not isinstance(self.environments[conversation.problem.env_name], envs.RewardModelEnv):
                conversation.sample.messages = []  # from here on only the reward model reads them
        samples = [conversation.sample for conversation in conversations]
        samples.sort(key=lambda sample: (sample.prompt, sample.index))
        if self.reward_model:
            self.reward_model.grade(samples, self.engine)
        part_names = set()
        for environment in self.environments.values():
            part_names.update(getattr(environment, "reward_names", ()))
        share_samples(samples, sorted(part_names))
        return samples

    def _converse(self, conversations: list[Conversation]) -> None:
        """Runs this engine's conversations, whose first replies have started, to their end. Only the samples of
        `whole_groups` wait for each other.

        A turn is a reply of at most max_new_tokens and, while the environment is not done, its observation: the tokens
        that the chat template adds after the reply. finish_reason: "stop" (the environment was done), "length" (a reply
        was cut, or the next one has no room), "max_turns" (the environment was not done)."""
        for name in self.grading.agents:  # agents' deadlines leave out the time that the engine slept
            self.environments[name].pool.stand_still(self.engine.seconds_asleep)
        parts = self._graded_together(conversations)
        while any(conversation.state is not State.DONE for conversation in conversations):
            self._take_replies(conversations)
            turns = self._take_turns(parts)
            self._collect_results(conversations, turns)
            self._ask_ready(conversations)
            self._decode(conversations)

    def _graded_together(self, conversations: list[Conversation]) -> list[list[Conversation]]:
        """The conversations in parts that their environment grades in one call: each conversation alone, or all of a
        prompt if the environment asks for whole groups."""

        def part_of(conversation: Conversation) -> tuple[int, int]:
            sample = conversation.sample
            is_alone = sample.env_name not in self.grading.whole_groups
            return sample.prompt, sample.index if is_alone else 0

        return groups_of(conversations, part_of)

    def _take_replies(self, conversations: list[Conversation]) -> None:
        """Takes the replies that have ended."""
        for conversation in in_state(conversations, State.DRAWING):
            if conversation.request_id in self.engine.unclaimed:
                reply = self.engine.unclaimed.pop(conversation.request_id)
                special_tokens = conversation.problem.env_name in self.grading.special_tokens
                conversation.turn = conversation.add_reply(reply, self.tokenizer, special_tokens)
                conversation.state = State.DRAWN

    def _take_turns(self, parts: list[list[Conversation]]) -> dict[str, list[Turns]]:
        """What can be graded now, whose grading begins: environment -> its turns, in parts."""
        ready: dict[str, list[Turns]] = defaultdict(list)
        for part in parts:
            env_name = part[0].problem.env_name
            unfinished = [conversation for conversation in part if conversation.state is not State.DONE]
            if unfinished and all(conversation.state is State.DRAWN for conversation in unfinished):
                ready[env_name].append({conversation.request_id: conversation.turn for conversation in unfinished})
                for conversation in unfinished:
                    conversation.state = State.GRADING
        return ready

    def _collect_results(self, conversations: list[Conversation], turns: dict[str, list[Turns]]) -> None:
        """Has these turns graded, and takes the results that are there; waits for one if there is nothing else to do.
        One rank of an engine grades for all of them, because a deadline might give two ranks two verdicts."""
        grading = in_state(conversations, State.GRADING)
        awaited = {conversation.request_id: conversation for conversation in grading}
        awaited |= self.rollouts  # of later steps too: their results arrive now
        if not awaited:
            return
        # Wait only if there is nothing to decode, no reply that has ended and is not taken yet (its state is DRAWING),
        # and no agent that may ask for one.
        is_drawing = len(in_state(conversations, State.DRAWING)) > 0
        must_wait = self.engine.is_idle and not is_drawing and not self.rollouts
        results = self.ranks.broadcast_from_tp_leader(partial(self.grading.grade, turns, block=must_wait))
        for request_id, result in results.items():
            conversation = awaited[request_id]
            if conversation.state is State.WITH_AGENT:
                del self.rollouts[request_id]
                result = self.endpoint.finish(request_id, conversation.sample, result, conversation.is_trained)
            conversation.add_result(result, self.tokenizer, self.engine.max_total_tokens, self.max_turns)

    def _decode(self, conversations: list[Conversation]) -> None:
        """Draws a token of each running request, if there are any. Where this step only waits for grades, the requests
        of later steps go on."""
        drawing = {conversation.request_id: conversation for conversation in in_state(conversations, State.DRAWING)}
        waits_for_grades = len(in_state(conversations, State.GRADING)) > 0 and not self.engine.is_idle
        if drawing or self.rollouts or waits_for_grades:
            self._answer_calls()
            self.engine.advance(drawing)

    @property
    def has_work(self) -> bool:
        """Whether there is a token to decode, or an agent that may ask for one."""
        return not self.engine.is_idle or bool(self.rollouts)

    def step(self) -> None:
        """Decodes a token of each running request."""
        self._answer_calls()
        self.engine.step()

    def groups_under_way(self) -> dict[int, bool]:
        """As `Ahead.groups_under_way`."""
        return self.ahead.groups_under_way(self)

    def _answer_calls(self) -> None:
        """Agents get the replies that have ended, and what they ask for starts."""
        if self.endpoint:
            self.endpoint.before_step()


def deal(
    prompts: Prompts, num_samples: int, num_engines: int, max_new_tokens: int, whole: Collection[str] = ()
) -> list[list[tuple[Problem, int, int]]]:
    """The samples that each engine draws, the same on all ranks: (problem, prompt number, sample number). whole:
    env_names whose groups must be on one engine.

    All engines wait for the busiest. Reply lengths are unknown, but similar within a problem: in a simulation
    (docs/LOG.md; lognormal lengths), the busiest of 8 engines has 34% more tokens than the mean with 8 whole groups of
    16 each, and 8% more with groups spread over all engines. The order: groups that must be whole, then the longest
    prompts, which also evens out prefills.
    """

    def place_in_order(numbered: tuple[int, Problem]) -> tuple[bool, int]:
        _, problem = numbered
        return problem.env_name not in whole, -len(problem.prompt_ids)

    shares: list[list[tuple[Problem, int, int]]] = [[] for _ in range(num_engines)]
    for prompt, problem in sorted(prompts, key=place_in_order):
        num_parts = 1
        if problem.env_name not in whole:
            num_parts = _num_parts(problem, num_samples, num_engines, max_new_tokens, len(prompts))
        for part in range(num_parts):
            least_busy = min(shares, key=len)
            least_busy.extend((problem, prompt, index) for index in range(part, num_samples, num_parts))
    return shares


def _num_parts(problem: Problem, num_samples: int, num_engines: int, max_new_tokens: int, num_prompts: int) -> int:
    """Over how many engines a group is spread: over all, unless that computes a long prompt too often."""
    most = min(num_samples, num_engines)
    # Each further engine computes the prompt again. A prompt's token costs at most as much as a new one.
    extra_tokens = (most - 1) * len(problem.prompt_ids)
    expected_tokens = num_samples * max_new_tokens / 4  # replies of a quarter of max_new_tokens
    if extra_tokens <= expected_tokens / 4:
        return most
    num_engines_per_prompt = num_engines // num_prompts  # with fewer, some engines would be idle
    return max(1, min(most, num_engines_per_prompt))


# ----------------------------------------------------------------------------------------------- the samples of a step


@dataclass(frozen=True, slots=True)
class StepSamples:
    """trained: copies of the samples of at most num_prompts_per_step prompts, numbered from 0. generated: all drawn
    samples, with the numbers that they were drawn by. cursor: the data cursor after the drawn prompts.
    metrics: of the sampling."""

    trained: list[Sample]
    generated: list[Sample]
    cursor: Cursor
    metrics: dict[str, float]


def sample_step(
    sampler: "Sampler | Generators", cfg: Config, mixture: Mixture, cursor: Cursor, step: int, num_steps: int
) -> StepSamples:
    """The samples to train on, with shaped rewards and after the overlong filter; equal on all ranks.

    With use_dynamic_sampling, batches of num_prompts_per_step * batch_multiplier prompts are drawn until enough groups
    have unequal unshaped rewards. Groups beyond what the step needs wait, in case that the chosen ones cannot be
    trained, and are discarded at the end. If no sample of the step can be trained, say because all were cut, others are
    drawn. Here every rank has the numbers of all samples, but ids and texts only of its own: what reads those belongs
    before `share_samples`.

    Raises StopRun if dynamic_sampling_max_gen_batches batches are too few; dynamic_sampling_when_exhausted=train trains
    the groups that there are instead.
    """
    grpo = cfg.grpo
    draw = StepDraw(sampler, cfg, mixture, cursor, step, num_steps)
    draw.choose()
    num_skipped = 0
    while not any(sample.num_trained_tokens for sample in draw.chosen):
        num_skipped += len(draw.chosen)
        draw.choose()
    metrics: dict[str, float] = {"num_overlong_filtered": draw.num_overlong, "num_skipped_samples": num_skipped}
    if grpo.use_dynamic_sampling:
        metrics["dynamic_sampling_num_gen_batches"] = draw.num_batches
        metrics["dynamic_sampling_num_discarded_valid_samples"] = sum(map(len, draw.waiting))
        metrics["dynamic_sampling_num_missing_groups"] = grpo.num_prompts_per_step - len(groups_of(draw.chosen))
    return StepSamples(draw.chosen, draw.generated, draw.cursor, metrics)


@dataclass(slots=True)
class StepDraw:
    """The samples of a step while it draws them. generated: all. waiting: groups that the step can still choose.
    chosen: copies of the samples chosen last, of which num_overlong are filtered. cursor: after all drawn prompts."""

    sampler: "Sampler | Generators"
    cfg: Config
    mixture: Mixture
    cursor: Cursor
    step: int
    num_steps: int
    num_batches: int = 0
    generated: list[Sample] = field(default_factory=list)
    waiting: list[list[Sample]] = field(default_factory=list)
    chosen: list[Sample] = field(default_factory=list)
    num_overlong: int = 0

    def choose(self) -> None:
        """Chooses the groups that have waited longest. Raises StopRun if there are too few."""
        grpo = self.cfg.grpo
        self.fill_waiting()
        has_enough = len(self.waiting) >= grpo.num_prompts_per_step
        takes_fewer = grpo.dynamic_sampling_when_exhausted == "train" and len(self.waiting) > 0
        if not has_enough and not takes_fewer:
            raise StopRun(self.why_too_few(), self.cursor)
        groups = self.waiting[: grpo.num_prompts_per_step]
        self.waiting = self.waiting[grpo.num_prompts_per_step :]
        self.chosen = []
        for number, group in enumerate(groups):
            self.chosen += [replace(sample, prompt=number) for sample in group]
        if grpo.overlong_filtering:
            self.num_overlong = filter_overlong(self.chosen)
        for sample in self.chosen:
            if not sample.grade.is_valid:
                sample.is_filtered = True

    def fill_waiting(self) -> None:
        """Draws batches until enough groups wait, or the step may draw no more."""
        grpo = self.cfg.grpo
        while len(self.waiting) < grpo.num_prompts_per_step:
            if self.num_batches == grpo.dynamic_sampling_max_gen_batches:
                return
            batch = self.draw_batch()
            self.num_batches += 1
            self.generated += batch
            shape_rewards(batch, grpo, self.cfg.policy.generation.max_new_tokens)
            for group in groups_of(batch):
                if not grpo.use_dynamic_sampling or is_mixed(group, grpo.turn_level_advantages):
                    self.waiting.append(group)

    def draw_batch(self) -> list[Sample]:
        """The samples of the next batch of prompts."""
        grpo = self.cfg.grpo
        if grpo.async_grpo.max_age > 0:
            batch, self.cursor = self.sampler.ahead.draw(
                self.sampler, self.cfg, self.mixture, self.cursor, self.step, self.num_steps
            )
            return batch
        problems, self.cursor = self.mixture.draw(self.cursor, grpo.prompts_per_batch)
        first = self.num_batches * grpo.prompts_per_batch  # no two samples of a step share a seed
        prompts = list(enumerate(problems, start=first))
        options = SamplingOptions.of(self.cfg.policy.generation)
        seed_key = (grpo.seed, self.step)
        return self.sampler.sample(prompts, grpo.num_generations_per_prompt, options, seed_key, self.step)

    def why_too_few(self) -> str:
        """Why the batches of the step were too few, and what to do."""
        grpo = self.cfg.grpo
        has_chosen_before = len(self.chosen) > 0  # and none of them can be trained: sample_step asks again
        if has_chosen_before:
            return self._why_untrained()
        groups = groups_of(self.generated)
        num_solved = num_failed = 0
        for group in groups:
            are_right = [sample.grade.outcome == "ok" for sample in group]
            if all(are_right):
                num_solved += 1
            elif not any(are_right):
                num_failed += 1
        remedies = ["train on problems that this model solves now and then"]
        if grpo.dynamic_sampling_when_exhausted != "train":
            remedies.append("set grpo.dynamic_sampling_when_exhausted=train")
        return (
            f"dynamic sampling: {self.num_batches} batches ({len(groups)} prompts) gave {len(self.waiting)} groups of "
            f"unequal rewards; a step needs grpo.num_prompts_per_step={grpo.num_prompts_per_step}. In {num_solved} "
            f"groups every answer was right, in {num_failed} none was. Raise grpo.dynamic_sampling_max_gen_batches, "
            f"grpo.batch_multiplier or grpo.num_generations_per_prompt, or {', or '.join(remedies)}"
        )

    def _why_untrained(self) -> str:
        """Why the samples chosen last cannot be trained."""
        cfg = self.cfg
        said = f"no sample of {self.num_batches} batches can be trained on: of those chosen last,"
        if cfg.grpo.overlong_filtering:
            return (
                f"{said} {self.num_overlong} of {len(self.chosen)} ran into "
                f"policy.generation.max_new_tokens={cfg.policy.generation.max_new_tokens} with "
                "grpo.overlong_filtering=true, and the others have loss_multiplier=0, or were not graded. Allow longer "
                "responses, or set overlong_filtering=false"
            )
        reasons = [f"; {reason_of(sample)}" for sample in self.chosen if sample.grade.message]
        return f"{said} all rows have loss_multiplier=0, or were not graded{''.join(reasons[:1])}"
