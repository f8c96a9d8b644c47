"""A reward function with the signature of TRL's trainers: env_name: examples.three_tasks.rewards:digits_in_place."""

from collections.abc import Sequence


def digits_in_place(completions: Sequence[str], answer: Sequence[str], **columns) -> list[float]:
    """The share of the answer's digits that stand where they should: a part of the way is worth a part.

    Every other column of the rows comes by its name too; rows of chat `messages` would have lists of messages here.
    """
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, text, gold)) / max(len(text), len(gold)) for text, gold in pairs]
