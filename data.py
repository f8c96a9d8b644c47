"""The records that travel through a step, and packing. Imports neither torch nor vllm.

Problem -> Sample (rollout.py) -> Pack (here) -> MicroBatch (batch.py). Does not own: reading rows and their order
(dataset/), tokens of messages (hf/tokenizer.py), grading (envs.py), generation (rollout.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a dataset, ready to be sampled.

    row_id: its index in its source (in a jsonl file: its line, from 0), so that logs can point at it. fields: all
    fields of the row as read. loss_multiplier 0: sampled and scored, but not trained on. dataset: the name of its set.
    tools: what its chat template shows the policy.

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

    prompt: the index of the problem in the step; groups are made from it, never from text. index: the sample's number
    in its group. mask: False at output ids that were not sampled (an observation) or are not trained on; so lengths
    come from output_ids. reward, rewards (the parts of it), outcome, extracted (the answer in the reply): the grader's;
    unshaped_reward: after scaling, before shaping (advantages.py). messages: for a reward model to score, else none.

    Example (one turn): prompt 0, index 3, prompt_ids [5, 7, 2], output_ids [9, 3], sampler_logps [-0.1, -0.7],
    mask [True, True], finish_reason "stop", weight_version 12, reward 1.0, outcome "ok".
    """

    prompt: int
    index: int
    row_id: int
    prompt_ids: list[int]
    output_ids: np.ndarray
    sampler_logps: np.ndarray
    mask: np.ndarray
    finish_reason: str
    weight_version: int
    reward: float = float("nan")
    outcome: str = "ungraded"
    unshaped_reward: float = float("nan")
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    env_name: str = ""
    num_env_tokens: int = 0
    num_turns: int = 1
    dataset: str = ""
    messages: list[dict] = field(default_factory=list)

    @property
    def num_gen_tokens(self) -> int:
        """Ids that the policy sampled."""
        return len(self.output_ids) - self.num_env_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by their prompt, in the order in which prompts first appear."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return list(groups.values())


@dataclass(slots=True)
class Pack:
    """Whole sequences back to back, without padding. Inputs are ids[:-1] of each sequence, targets ids[1:].

    T counts input tokens, R those of them whose target was sampled (`pos_R`): the others (prompt, observation) never
    reach the head. adv_R, reward_R: of the token's sample; seq_R: number of its sequence within the pack.
    Example: the Sample above alone: token_T [5, 7, 2, 9], position_T [0, 1, 2, 3], cu_seqlens [0, 4], pos_R [2, 3],
    target_R [9, 3], sampler_logp_R [-0.1, -0.7], seq_R [0, 0].
    """

    token_T: np.ndarray  # int64, as position_T, pos_R, target_R, seq_R
    position_T: np.ndarray
    cu_seqlens: np.ndarray  # int32, [S + 1]
    pos_R: np.ndarray
    target_R: np.ndarray
    sampler_logp_R: np.ndarray  # float32, as adv_R and reward_R
    adv_R: np.ndarray
    seq_R: np.ndarray
    reward_R: np.ndarray


def assign_to_ranks(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Indices of the samples that each rank trains on: longest first to the least loaded rank, ties to the lowest."""
    load = [0] * world_size
    assigned: list[list[int]] = [[] for _ in range(world_size)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world_size), key=lambda r: (load[r], len(assigned[r]), r))
        load[rank] += lengths[i]
        assigned[rank].append(i)
    return assigned


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each pack: first-fit decreasing into packs of <= `max_tokens`.

    Longest first also puts sequences of equal length side by side, which the CPU attention takes as one call.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[i] <= max_tokens, f"sample of {lengths[i]} tokens, packs of {max_tokens}"
        number = next((number for number, tokens in enumerate(room) if lengths[i] <= tokens), len(packs))
        if number == len(packs):
            packs.append([])
            room.append(max_tokens)
        packs[number].append(i)
        room[number] -= lengths[i]
    return packs


def pack_samples(samples: Sequence[Sample], adv_B: Sequence[float], max_tokens: int) -> list[Pack]:
    """Packs of <= `max_tokens` input tokens; config_check forbids longer samples."""
    packs = first_fit([sample.num_tokens - 1 for sample in samples], max_tokens)
    return [_pack([samples[i] for i in members], [adv_B[i] for i in members]) for members in packs]


def _pack(samples: list[Sample], adv_S: list[float]) -> Pack:
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    ends = [0]
    for number, (sample, adv) in enumerate(zip(samples, adv_S, strict=True)):
        ids = np.concatenate([np.asarray(sample.prompt_ids, np.int64), sample.output_ids.astype(np.int64)])
        sampled = np.flatnonzero(sample.mask)
        position_R = len(sample.prompt_ids) + sampled - 1  # the position that predicts the sampled id
        parts["token_T"].append(ids[:-1])
        parts["position_T"].append(np.arange(len(ids) - 1))
        parts["pos_R"].append(ends[-1] + position_R)
        parts["target_R"].append(ids[position_R + 1])
        parts["sampler_logp_R"].append(sample.sampler_logps[sampled].astype(np.float32))
        parts["adv_R"].append(np.full(len(sampled), adv, np.float32))
        parts["seq_R"].append(np.full(len(sampled), number))
        parts["reward_R"].append(np.full(len(sampled), sample.reward, np.float32))
        ends.append(ends[-1] + len(ids) - 1)
    return Pack(**{name: np.concatenate(arrays) for name, arrays in parts.items()}, cu_seqlens=np.int32(ends))


def empty_pack() -> Pack:
    """One token, no response token: what a rank with fewer packs runs so that every rank joins every collective."""
    zero, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    floats = np.zeros(0, np.float32)
    return Pack(zero, zero, np.int32([0, 1]), none, none, floats, floats, none, floats)
