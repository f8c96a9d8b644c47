"""The records that travel through a step: Problem -> Completion -> Sample with its Grade; and `Engine`, what the house
calls of a sampler. Imports neither torch nor vllm.

Does not own: reading rows and their order (base/inputs/), tokens of messages (base/hf/tokenizer.py), grading
(envs.py), generation (rollout.py), packs (pack.py).
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from config import GenerationConfig

if TYPE_CHECKING:
    import torch

STEPS_BETWEEN_STOPS = 16  # decode steps between two checks for a stop; with tensor parallelism each is a collective
T = TypeVar("T")
Weights = Iterable[tuple[str, "torch.Tensor"]]  # HF name, whole tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a dataset, ready to be sampled.

    row_id: its index in its source (in a jsonl file: its line, from 0), so that logs can point at it. fields: all
    fields of the row as read. loss_multiplier 0: sampled and scored, but not trained on. dataset: the dataset's name.
    tools: the tool descriptions that the chat template shows the policy.

    Example: row_id 6, messages [{"role": "user", "content": "37+48="}], answer "85", env_name "exact",
    prompt_ids [256, 51, 55, 43, 52, 56, 61], fields {"input": "37+48=", "answer": "85"}, dataset "train".
    """

    row_id: int
    messages: list[dict]
    answer: str
    env_name: str
    prompt_ids: list[int]
    fields: dict = field(default_factory=dict)
    loss_multiplier: float = 1.0
    dataset: str = ""
    tools: list[dict] | None = None


@dataclass(slots=True)
class Grade:
    """What the environment says of a sample, over all of its turns.

    outcome: of envs.OUTCOMES; `ungraded`; or `crashed`, where an agent failed after the policy had replied. As the
    policy may be the reason, such a sample is trained, with reward 0. rewards: the parts of the reward, by name.
    extracted: the reply's answer. turn_rewards: the reward of each turn. unshaped_reward: after scaling, before
    shaping. message: why an agent failed.

    Example: reward 0.6, outcome "wrong", rewards {"answer": 0.5, "format": 0.1}, extracted "84", turn_rewards [0.6].
    """

    reward: float = float("nan")
    outcome: str = "ungraded"
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    turn_rewards: list[float] = field(default_factory=list)
    unshaped_reward: float = float("nan")
    message: str = ""

    @property
    def is_valid(self) -> bool:
        """False where the grader failed: the reward says nothing about the sample, so nothing is learnt from it."""
        return self.outcome != "error"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to sample. temperature 0 is greedy. Tokens are drawn from the top_k likeliest (None or 0: all), and of these
    from the likeliest that hold top_p of the probability."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    stop_strings: tuple[str, ...] = ()  # besides the config's
    stop_token_ids: tuple[int, ...] = ()  # besides the end tokens
    top_logprobs: int = 0  # of how many tokens, at each position, the completion has the log-probability

    @classmethod
    def of(cls, cfg: GenerationConfig) -> "SamplingOptions":
        """The options of training."""
        return cls(cfg.temperature, cfg.max_new_tokens, cfg.top_p, cfg.top_k)


# What a token of a reply has. This is its only declaration: the engine fills the columns, and conversations, agents'
# rows, packs, the moves between ranks and the dumps take all that are here. To add one, name it here and fill it in
# `engine.completion_of`; a pack then has it as `tokens_R[name]`.
#
#   logp      the sampler's log-probability, in nats, after temperature and filter; 0 where the id was not sampled
#   version   the training step that left the weights which drew it; of an observation: that of the reply before
#   mask      whether it may be trained: it was sampled, and its problem trains
# Aligned, so that torch takes a column as it is.
TOKEN = np.dtype([("id", np.int32), ("logp", np.float32), ("version", np.int32), ("mask", np.bool_)], align=True)


def make_tokens(ids: Sequence[int], **columns: object) -> np.ndarray:
    """[len(ids)] of TOKEN. columns: arrays or single values, by name; a column that is left out is 0.

    Example: make_tokens([9, 3], logp=[-0.1, -0.7], version=[12, 13], mask=True).
    """
    tokens = np.zeros(len(ids), TOKEN)
    tokens["id"] = ids
    for name, values in columns.items():
        tokens[name] = values
    return tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled reply: its tokens (end token included; mask True), and why it ended, "stop" (an end token or stop
    string) or "length". likeliest: of each position the likeliest ids, as many as were asked for, with their
    log-probabilities. experts_TLA: of all ids of prompt and reply but the last, or of fewer, the A experts that the id
    was sent to in each of the L layers with experts, uint8 or uint16; None without policy.router_replay.

    Example: make_tokens([9, 3], logp=[-0.1, -0.7], version=[12, 13], mask=True), finish_reason "stop".
    """

    tokens: np.ndarray
    finish_reason: str
    likeliest: Sequence[dict[int, float]] = ()
    experts_TLA: np.ndarray | None = None

    @property
    def ids(self) -> list[int]:
        return self.tokens["id"].tolist()


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
    dtype: "torch.dtype"
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


@dataclass(slots=True)
class TokenSequence:
    """A prompt and all that followed it: exactly the ids that the engine saw and produced, never decoded and encoded
    again. It is what a pack holds.

    tokens: behind the prompt, [num_output_tokens] of TOKEN: replies, and observations (mask False, log-probability 0).
    turns: for each reply the number of its turn in the sample; turn_tokens: its number of trained ids. calls: what an
    agent asked for each reply, as JSON, on the holder alone (base/agents/calls.py). experts_TLA: as in `Completion`, of
    the first num_routed_tokens ids. An id keeps the experts of the call that drew it, whatever a later call says.

    holder: the only rank that has tokens and experts, until base/system/exchange.py moves them; None: all have them.
    All ranks have the numbers of tokens and the versions, which `count_tokens` sets. place: in a split job, the number
    of the sequence among all that the generators have held.

    Example (one turn): prompt_ids [5, 7, 2], tokens make_tokens([9, 3], logp=[-0.1, -0.7], version=[12, 13],
    mask=True), turns [0], turn_tokens [2].
    """

    prompt_ids: list[int]
    tokens: np.ndarray = field(default_factory=partial(np.zeros, 0, TOKEN))
    turns: list[int] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)
    experts_TLA: np.ndarray | None = None
    holder: int | None = None
    place: int = -1
    num_env_tokens: int = 0
    num_output_tokens: int = 0
    num_mask_tokens: int = 0
    num_routed_tokens: int = 0
    oldest_version: int = -1
    newest_version: int = -1

    def __post_init__(self) -> None:
        self.count_tokens()

    def count_tokens(self) -> None:
        """Sets the numbers of tokens, on a rank that has the tokens. On the others they stay as the holder counted."""
        if len(self.tokens) == 0:
            return
        self.num_output_tokens = len(self.tokens)
        self.num_mask_tokens = int(self.tokens["mask"].sum())
        self.oldest_version = int(self.tokens["version"][0])
        self.newest_version = int(self.tokens["version"].max())

    def add_reply(self, completion: Completion, turn: int, is_trained: bool) -> None:
        """Appends the tokens of a reply, which is this turn of the sample."""
        tokens = completion.tokens.copy()
        tokens["mask"] = is_trained
        self.tokens = np.concatenate([self.tokens, tokens])
        self.turns.append(turn)
        self.turn_tokens.append(int(tokens["mask"].sum()))
        if completion.experts_TLA is not None:
            self._add_experts(completion.experts_TLA)
        self.count_tokens()

    def _add_experts(self, experts_TLA: np.ndarray) -> None:
        """Appends the experts of the ids that have none yet. experts_TLA: of all ids so far but the last, or of fewer,
        as NeMo RL has seen vLLM return."""
        assert len(experts_TLA) < len(self.prompt_ids) + len(self.tokens), (len(experts_TLA), len(self.tokens))
        if self.experts_TLA is not None:
            new_TLA = experts_TLA[self.num_routed_tokens :]
            experts_TLA = np.concatenate([self.experts_TLA, new_TLA])
        self.experts_TLA = experts_TLA
        self.num_routed_tokens = len(experts_TLA)

    def add_context(self, ids: Sequence[int]) -> None:
        """Appends ids that were not sampled, with the version of the reply before."""
        if len(ids) == 0:
            return
        self.tokens = np.concatenate([self.tokens, make_tokens(ids, version=self.tokens["version"][-1])])
        self.num_env_tokens += len(ids)
        self.count_tokens()

    @property
    def output_ids(self) -> list[int]:
        return self.tokens["id"].tolist()

    @property
    def token_ids(self) -> list[int]:
        """All ids so far: the prompt of the next reply."""
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.num_output_tokens

    @property
    def num_gen_tokens(self) -> int:
        """Ids that the policy sampled."""
        return self.num_output_tokens - self.num_env_tokens


@dataclass(slots=True)
class Sample:
    """One sampled conversation, and its grade.

    prompt: the problem's number in the step; groups are made from it, never from text. index: the sample's in its
    group. sequences: its tokens. The first is the conversation; an agent that branched, or changed what it had said,
    has further ones. expected: the row's answer. num_turns: replies; 1 for an agent, whose replies are num_calls.
    by_agent: whether an agent asked for them. messages: the conversation, kept after grading for a reward model alone.
    engine: which one drew the sample. is_filtered: it is not trained on, whatever its mask says; if it was graded, its
    reward stays in the baseline of its group. advantage: of all its tokens, or of each turn (advantages.py). number: in
    its minibatch.

    Example: prompt 0, index 3, one sequence, finish_reason "stop", grade of reward 1.0 and outcome "ok".
    """

    prompt: int
    index: int
    row_id: int
    sequences: list[TokenSequence]
    grade: Grade = field(default_factory=Grade)
    finish_reason: str = ""
    expected: str = ""
    env_name: str = ""
    dataset: str = ""
    num_turns: int = 1
    by_agent: bool = False
    num_calls: int = 0
    messages: list[dict] = field(default_factory=list)
    engine: int = 0
    is_filtered: bool = False
    advantage: float | list[float] = float("nan")
    number: int = -1

    @property
    def sequence(self) -> TokenSequence:
        """The conversation; of an agent's sample, its longest sequence."""
        return self.sequences[0]

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that the loss trains: those of the masks, or none."""
        if self.is_filtered:
            return 0
        return sum(sequence.num_mask_tokens for sequence in self.sequences)

    @property
    def num_gen_tokens(self) -> int:
        """Ids that the policy sampled."""
        return sum(sequence.num_gen_tokens for sequence in self.sequences)

    @property
    def num_env_tokens(self) -> int:
        """Ids of observations."""
        return sum(sequence.num_env_tokens for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """All ids, with prompts."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def oldest_version(self) -> int:
        return min(sequence.oldest_version for sequence in self.sequences)

    @property
    def newest_version(self) -> int:
        return max(sequence.newest_version for sequence in self.sequences)


def sample_seed(*key: int) -> int:
    """A 48-bit seed from e.g. (run seed, step, prompt, sample): resuming a run does not change its samples."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "little")


def groups_of(samples: Sequence[T], key: Callable[[T], Hashable] = attrgetter("prompt")) -> list[list[T]]:
    """Samples by their prompt, or anything by `key`, in the order in which keys first appear."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for sample in samples:
        groups[key(sample)].append(sample)
    return list(groups.values())
