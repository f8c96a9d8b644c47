"""A reward function with the signature of TRL's trainers: env_name: examples.three_tasks.rewards:digits_in_place."""

from collections.abc import Sequence


def digits_in_place(completions: Sequence[str], answer: Sequence[str], **columns) -> list[float]:
    """The share of the answer's digits that stand in the right place, so that half a solution has half the reward.

    Each field of the problems comes by its name, too; a problem with chat `messages` would have lists of messages here.
    """
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, text, gold)) / max(len(text), len(gold)) for text, gold in pairs]
