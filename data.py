"""The records that travel through a step, and packing: `Problem`, `Sample` (what the engine produced), `Pack` (what the
trainer eats).

Does not own: tokens of messages (chat.py), reading rows (sources.py, rows.py), their order (mixing.py), grading
(envs.py), generation (rollout.py). Imports neither torch nor vllm, so that `grpo.py --check` answers in under two
seconds.

Dims: `P` prompts of a step, `B` samples, `T` packed tokens, `R` response rows (rows of T whose next token was sampled),
`S` sequences of a pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# ---------------------------------------------------------------------------------------------------- model folder


# ------------------------------------------------------------------------------------------ rows, samples and packs


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `row_id` is its index in its source (of a jsonl file: its line, from 0), so that logs can point at
    it; fields: all fields of the row as read; loss_multiplier 0: sampled and scored, but not trained on; dataset: the
    name of its set; tools: what its template shows the policy."""

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
    """One sampled conversation: exactly the ids the engine saw and produced; never decoded and encoded again.

    Example (single turn): prompt_ids [5, 7, 2], output_ids [9, 3], sampler_logps [-.1, -.7], mask [True, True].
    `mask` is False on output ids that were not sampled (an environment's observation). `prompt` is the index of the
    prompt in the step: groups are built from it, never from text. reward, rewards (of each kind, where there are
    several), outcome and extracted (the answer found in the reply) are filled in by the grader; unshaped_reward (after
    scaling, before shaping) by shaping.py. Overlong filtering clears `mask`, so lengths come from output_ids. messages:
    the conversation as text, where another model is to score it; else none.
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


@dataclass(frozen=True, slots=True)
class Pack:
    """Whole sequences back to back, without padding. Input ids are ids[:-1] of each sequence, targets ids[1:].

    token_T, position_T int64 · cu_seqlens int32 [S+1] · pos_R int64: rows of T whose target was sampled · target_R
    int64 · sampler_logp_R float32 · adv_R, reward_R float32 of the row's sample · seq_R int64: number of the row's
    sequence within the pack.
    Every response row is trained on; rows that are not (prompt, observation) never reach the head.
    """

    token_T: np.ndarray
    position_T: np.ndarray
    cu_seqlens: np.ndarray
    pos_R: np.ndarray
    target_R: np.ndarray
    sampler_logp_R: np.ndarray
    adv_R: np.ndarray
    seq_R: np.ndarray
    reward_R: np.ndarray


def assign_to_ranks(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Indices of the samples each rank trains on: longest first to the least loaded rank, ties to the lowest rank."""
    load, assigned = [0] * world_size, [[] for _ in range(world_size)]
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
    used: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[i] <= max_tokens, f"sample of {lengths[i]} tokens, packs of {max_tokens}"
        b = next((b for b, tokens in enumerate(used) if tokens + lengths[i] <= max_tokens), len(packs))
        if b == len(packs):
            packs, used = [*packs, []], [*used, 0]
        packs[b].append(i)
        used[b] += lengths[i]
    return packs


def pack_samples(samples: Sequence[Sample], adv_B: Sequence[float], max_tokens: int) -> list[Pack]:
    """Packs of <= `max_tokens` input tokens; config_check forbids longer samples."""
    packs = first_fit([sample.num_tokens - 1 for sample in samples], max_tokens)
    return [_pack([samples[i] for i in members], [adv_B[i] for i in members]) for members in packs]


def _pack(samples: list[Sample], adv_S: list[float]) -> Pack:
    tokens, positions, rows, targets, logps, advs, seqs, rewards, cu = [], [], [], [], [], [], [], [], [0]
    for s, (sample, adv) in enumerate(zip(samples, adv_S, strict=True)):
        ids = np.concatenate([np.asarray(sample.prompt_ids, np.int64), sample.output_ids.astype(np.int64)])
        sampled = np.flatnonzero(sample.mask)
        row = len(sample.prompt_ids) + sampled - 1  # the row that predicts the sampled id
        rows.append(cu[-1] + row)
        targets.append(ids[row + 1])
        logps.append(sample.sampler_logps[sampled])
        advs.append(np.full(len(row), adv))
        seqs.append(np.full(len(row), s))
        rewards.append(np.full(len(row), sample.reward))
        tokens.append(ids[:-1])
        positions.append(np.arange(len(ids) - 1))
        cu.append(cu[-1] + len(ids) - 1)
    return Pack(
        token_T=np.concatenate(tokens),
        position_T=np.concatenate(positions),
        cu_seqlens=np.asarray(cu, np.int32),
        pos_R=np.concatenate(rows),
        target_R=np.concatenate(targets),
        sampler_logp_R=np.concatenate(logps).astype(np.float32),
        adv_R=np.concatenate(advs).astype(np.float32),
        seq_R=np.concatenate(seqs),
        reward_R=np.concatenate(rewards).astype(np.float32),
    )


def empty_pack() -> Pack:
    """One token, no response row: what a rank with fewer packs runs so that every rank joins every collective."""
    zero, none, none_f = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    return Pack(zero, zero, np.asarray([0, 1], np.int32), none, none, none_f, none_f, none, none_f)


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by their prompt, in the order in which prompts first appear."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return list(groups.values())
