"""The records that travel through a step, and packing. Imports neither torch nor vllm.

Problem -> Sample (rollout.py) -> Pack (here) -> MicroBatch (batch.py). Does not own: reading rows and their order
(support/inputs/), tokens of messages (support/inputs/tokenizer.py), grading (envs.py), generation (rollout.py).
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapreplace
from operator import attrgetter
from typing import Any

import numpy as np


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
class Sample:
    """One sampled conversation: exactly the ids that the engine saw and produced, never decoded and encoded again.

    prompt: the problem's number in the step; groups are made from it, never from text. index: the sample's in its
    group. mask: False at output ids that were not sampled (observations) or are not trained on. versions: for each
    output id, the training step that left the weights it was drawn from (an observation: of its reply). Graders set
    reward, rewards (its parts), outcome, extracted (the reply's answer). expected: the row's answer. unshaped_reward:
    after scaling, before shaping; advantage: of all its tokens, or of each turn (advantages.py). turn_rewards,
    turn_tokens: reward and number of trained ids of each turn. messages: for a reward model, else none. holder: the
    only rank that has the tokens; other ranks have the numbers. None: all have them. engine: which one drew the sample.
    forks: further sequences of an agent's rollout, where it branched or changed what it had said; they count in
    num_trained_tokens, weight_version, newest_version. is_led: by an agent, which got num_calls replies. crashed: the
    agent failed, and the policy may be the reason: outcome `error`, but trained, with reward 0. message: why.

    Example (one turn): prompt 0, index 3, prompt_ids [5, 7, 2], output_ids [9, 3], sampler_logps [-0.1, -0.7],
    mask [True, True], finish_reason "stop", versions [12, 13], reward 1.0, outcome "ok".
    """

    prompt: int
    index: int
    row_id: int
    prompt_ids: list[int]
    output_ids: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    sampler_logps: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))
    mask: np.ndarray = field(default_factory=partial(np.zeros, 0, bool))
    finish_reason: str = ""
    versions: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    reward: float = float("nan")
    outcome: str = "ungraded"
    unshaped_reward: float = float("nan")
    advantage: float | list[float] = float("nan")
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    expected: str = ""
    env_name: str = ""
    num_env_tokens: int = 0
    num_turns: int = 1
    turn_rewards: list[float] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    dataset: str = ""
    messages: list[dict] = field(default_factory=list)
    holder: int | None = None
    engine: int = 0
    num_output_tokens: int = 0
    num_trained_tokens: int = 0
    weight_version: int = -1  # of the first token: the oldest
    newest_version: int = -1
    forks: list["Sample"] = field(default_factory=list)
    is_led: bool = False
    crashed: bool = False
    message: str = ""
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.count_tokens()

    def count_tokens(self) -> None:
        """Sets the numbers of tokens, on a rank that has the tokens."""
        if len(self.output_ids):
            self.num_output_tokens, self.num_trained_tokens = len(self.output_ids), int(self.mask.sum())
            self.weight_version, self.newest_version = int(self.versions[0]), int(self.versions.max())
            self.num_trained_tokens += sum(fork.num_trained_tokens for fork in self.forks)
            self.weight_version = min([self.weight_version, *(fork.weight_version for fork in self.forks)])
            self.newest_version = max([self.newest_version, *(fork.newest_version for fork in self.forks)])

    def _append(self, ids: np.ndarray, logps: np.ndarray, versions: np.ndarray, is_trained: bool) -> None:
        self.output_ids = np.concatenate([self.output_ids, ids])
        self.sampler_logps = np.concatenate([self.sampler_logps, logps])
        self.versions = np.concatenate([self.versions, versions])
        self.mask = np.concatenate([self.mask, np.full(len(ids), is_trained)])
        self.count_tokens()

    def add_reply(self, completion: Any, is_trained: bool) -> None:
        """Appends an engine.Completion."""
        self._append(completion.ids, completion.logps, completion.versions, is_trained)

    def add_context(self, ids: Sequence[int]) -> None:
        """Appends ids that were not sampled: log-probability 0, the version of the reply before."""
        zeros, versions = np.zeros(len(ids), np.float32), np.repeat(self.versions[-1:], len(ids))
        self._append(np.asarray(ids, np.int32), zeros, versions, False)
        self.num_env_tokens += len(ids)

    @property
    def token_ids(self) -> list[int]:
        """All ids so far: the prompt of the next reply."""
        return [*self.prompt_ids, *self.output_ids.tolist()]

    @property
    def is_graded(self) -> bool:
        """False where the grader failed: the reward says nothing about the sample, so nothing is learnt from it."""
        return self.outcome != "error" or self.crashed

    @property
    def num_gen_tokens(self) -> int:
        """Ids that the policy sampled."""
        return self.num_output_tokens - self.num_env_tokens + sum(fork.num_gen_tokens for fork in self.forks)

    @property
    def rows(self) -> list["Sample"]:
        """The sequences that are trained, each with the sample's reward and advantage."""
        for fork in self.forks:
            fork.prompt, fork.reward, fork.advantage = self.prompt, self.reward, self.advantage
        return [self, *self.forks] if self.num_trained_tokens else []

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.num_output_tokens  # without forks


def sample_seed(*key: int) -> int:
    """A 48-bit seed from e.g. (run seed, step, prompt, sample): resuming a run does not change its samples."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "little")


def groups_of(samples: Sequence[Sample], key: Callable[[Sample], Any] = attrgetter("prompt")) -> list[list[Sample]]:
    """Samples by their prompt, or by `key`, in the order in which prompts first appear."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return list(groups.values())


@dataclass(slots=True)
class Pack:
    """Sequences as segments back to back, without padding. A shared prompt appears once.

    A segment is a whole sequence, a shared prompt, or the response to one; prefix_S is the segment that a response
    continues, else -1. Inputs are ids[:-1] of each sequence, targets ids[1:]. T counts input tokens, R the sampled
    targets: prompt and observation targets never reach the head. pos_R: the row in T that predicts the target; the last
    row of a shared prompt predicts several. adv_R: of the token's sample, or turn; reward_R: of its sample; seq_R: the
    number of its sequence within the pack. version_R: `Sample.versions`.
    Example: the Sample above alone: token_T [5, 7, 2, 9], position_T [0, 1, 2, 3], cu_seqlens [0, 4], prefix_S [-1],
    pos_R [2, 3], target_R [9, 3], sampler_logp_R [-0.1, -0.7], seq_R [0, 0]. With a second one of the same prompt and
    output_ids [8, 6]: token_T [5, 7, 2, 9, 8], position_T [0, 1, 2, 3, 3], cu_seqlens [0, 3, 4, 5],
    prefix_S [-1, 0, 0], pos_R [2, 3, 2, 4], target_R [9, 3, 8, 6], seq_R [0, 0, 1, 1].
    """

    token_T: np.ndarray  # int64, as every array without a type here
    position_T: np.ndarray
    cu_seqlens: np.ndarray  # int32, [S + 1]: bounds of the segments
    prefix_S: np.ndarray
    pos_R: np.ndarray
    target_R: np.ndarray
    sampler_logp_R: np.ndarray  # float32, as adv_R and reward_R
    version_R: np.ndarray
    adv_R: np.ndarray
    seq_R: np.ndarray
    reward_R: np.ndarray


def num_input_tokens(samples: Sequence[Sample]) -> int:
    """Input tokens of samples that share a prompt in a pack: the prompt once, each response without its last token."""
    return len(samples[0].prompt_ids) + sum(sample.num_output_tokens - 1 for sample in samples)


def assign_to_ranks(
    samples: Sequence[Sample], world_size: int, max_tokens: int, share_prefix: bool
) -> list[list[list[Sample]]]:
    """The parts of groups that each rank trains on. The samples of a part share their prompt in a pack of <=
    `max_tokens` input tokens; without `share_prefix` each sample is a part. Rows of agents may differ in their prompts.

    Few large parts save tokens, many small ones balance the ranks. The split whose busiest rank has fewest tokens wins.
    """
    groups = groups_of(samples, lambda s: (s.prompt, *s.prompt_ids) if s.is_led else s.prompt)
    part_counts = (1, 2, 4, 8) if share_prefix and len(groups) < len(samples) else ()  # else no samples share a prompt
    splits = [[part for group in groups for part in _split(group, count, max_tokens)] for count in part_counts]
    splits.append([[sample] for sample in samples])
    shares_of_splits = [balance(split, world_size) for split in splits]
    return min(shares_of_splits, key=lambda shares: max(sum(map(num_input_tokens, share)) for share in shares))


def _split(group: list[Sample], num_parts: int, max_tokens: int) -> list[list[Sample]]:
    """The group in about `num_parts` equal parts of <= `max_tokens` input tokens."""
    lengths = [sample.num_output_tokens - 1 for sample in group]
    room = min(max_tokens - len(group[0].prompt_ids), max(-(-sum(lengths) // num_parts), *lengths))
    return [[group[i] for i in members] for members in first_fit(lengths, room)]


def balance(parts: Sequence[list[Sample]], world_size: int) -> list[list[list[Sample]]]:
    """The parts of each rank: longest first to the least loaded rank, ties to the lowest."""
    shares: list[list[list[Sample]]] = [[] for _ in range(world_size)]
    heap = [(0, 0, rank) for rank in range(world_size)]  # (tokens, parts, rank)
    for part in sorted(parts, key=num_input_tokens, reverse=True):
        load, num_parts, rank = heap[0]
        heapreplace(heap, (load + num_input_tokens(part), num_parts + 1, rank))
        shares[rank].append(part)
    return shares


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the items in each pack of <= `max_tokens`: first-fit decreasing."""
    packs: list[list[int]] = [[] for _ in lengths]
    room = np.full(len(lengths), max_tokens)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[i] <= max_tokens, f"sample of {lengths[i]} tokens, packs of {max_tokens}"
        number = (room >= lengths[i]).argmax()
        packs[number].append(i)
        room[number] -= lengths[i]
    return [pack for pack in packs if pack]


def num_packs(parts: Sequence[list[Sample]], max_tokens: int) -> int:
    """How many packs `pack_samples` makes of the parts, from their lengths only."""
    return len(first_fit([num_input_tokens(part) for part in parts], max_tokens))


def pack_samples(parts: Sequence[list[Sample]], max_tokens: int) -> list[Pack]:
    """Packs of <= `max_tokens` input tokens, which no sample exceeds; the samples of a part share their prompt."""
    packs = first_fit([num_input_tokens(part) for part in parts], max_tokens)
    return [_pack([parts[i] for i in members]) for members in packs]


def _pack(parts: list[list[Sample]]) -> Pack:
    heads = []  # (input ids, part): a whole sequence or a shared prompt
    tails = []  # (number of the head, input ids, sample): a response to a shared prompt
    for part in parts:
        rest = part[0].output_ids[:-1] if len(part) == 1 else ()
        heads.append((np.concatenate([part[0].prompt_ids, rest]).astype(np.int64), part))
    heads.sort(key=lambda head: -len(head[0]))
    for number, (_, part) in enumerate(heads):
        tails += [(number, sample.output_ids[:-1].astype(np.int64), sample) for sample in part if len(part) > 1]
    # Equal shapes are neighbours, which CPU attention computes in one call. A response of one id has no input.
    tails = sorted((t for t in tails if len(t[1])), key=lambda t: (-len(t[2].prompt_ids), -len(t[1])))
    ids_S = [ids for ids, _ in heads] + [ids for _, ids, _ in tails]
    first_S = [0] * len(heads) + [len(sample.prompt_ids) for *_, sample in tails]
    starts = np.cumsum([0, *map(len, ids_S)])
    response_starts = {id(sample): start for start, (*_, sample) in zip(starts[len(heads) :], tails, strict=False)}
    rows: dict[str, list[np.ndarray]] = defaultdict(list)
    for start, (_, part) in zip(starts, heads, strict=False):
        prompt_end = start + len(part[0].prompt_ids)
        for sample in part:
            assert sample.prompt_ids == part[0].prompt_ids, f"group {sample.prompt}: prompts differ"
            assert len(sample.output_ids) == sample.num_output_tokens, f"tokens of group {sample.prompt} are not here"
            sampled = np.flatnonzero(sample.mask)
            response_start = response_starts.get(id(sample), prompt_end)
            # The row of the previous id predicts an id; the prompt's last row predicts the first id of a response.
            rows["pos_R"].append(np.where(sampled > 0, response_start + sampled, prompt_end) - 1)
            rows["target_R"].append(sample.output_ids[sampled].astype(np.int64))
            rows["sampler_logp_R"].append(sample.sampler_logps[sampled].astype(np.float32))
            rows["version_R"].append(sample.versions[sampled].astype(np.int64))
            num_tokens = sample.turn_tokens if isinstance(sample.advantage, list) else len(sampled)
            rows["adv_R"].append(np.repeat(np.float32(sample.advantage), num_tokens))
            rows["seq_R"].append(np.full(len(sampled), len(rows["seq_R"])))
            rows["reward_R"].append(np.full(len(sampled), sample.reward, np.float32))
    return Pack(
        token_T=np.concatenate(ids_S),
        position_T=np.concatenate([first + np.arange(len(ids)) for first, ids in zip(first_S, ids_S, strict=True)]),
        cu_seqlens=np.int32(starts),
        prefix_S=np.array([-1] * len(heads) + [number for number, *_ in tails]),
        **{name: np.concatenate(arrays) for name, arrays in rows.items()},
    )


def empty_pack() -> Pack:
    """One token, no response token: a rank with fewer packs runs it, so that every rank joins every collective."""
    zero, floats = np.zeros(1, np.int64), np.zeros(0, np.float32)
    return Pack(zero, zero, np.int32([0, 1]), zero - 1, zero[:0], zero[:0], floats, zero[:0], floats, zero[:0], floats)
