"""Environments: a conversation goes in, reward, outcome and (for multi-turn tasks) the next observation come out.

Owns: the interface and the task `exact`. Knows nothing of tokens: rollout.py turns replies into text and observations
into tokens. Imports neither torch nor vllm, so that graders can run in plain processes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Protocol

from config import ConfigError

OUTCOMES = ("ok", "wrong", "parse_fail", "timeout", "error")


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment sees: the messages so far (the policy's reply last), the row's answer, how the reply ended
    ("stop" | "length"), and the state it returned after the turn before ({} at first)."""

    messages: list[dict]
    answer: str
    finish_reason: str
    state: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What it answers. `outcome` is one of OUTCOMES; `observation` are messages to append when not `done`.

    rewards: name -> reward, where `reward` is made of several. extracted: the answer found in the reply, in a form in
    which equal answers are equal texts, for majority votes; None where there is none.
    """

    reward: float
    outcome: str
    done: bool = True
    observation: tuple[dict, ...] = ()
    state: dict = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None


class Environment(Protocol):
    """History and state in, reward and new state out, for a batch of conversations at once."""

    def step(self, turns: Sequence[Turn]) -> list[Verdict]: ...

    def check_answers(self, answers: Iterable[tuple[str, str]]) -> None: ...


NUMBER = re.compile(r"[-+]?\$?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
MAX_REPLY_CHARS = 100_000


class Exact:
    """Reward 1 when the reply *is* the right number, else 0.

    The answer is the text after the last `####` (GSM8K's form), or the whole text where there is none, and must be one
    plain number; `1,234` and `$5` are understood, values compare as decimals (5.0 == 5). A reply cut off by the length
    limit never scores: its number may be half a number.
    """

    def step(self, turns: Sequence[Turn]) -> list[Verdict]:
        return [self.grade(turn) for turn in turns]

    def grade(self, turn: Turn) -> Verdict:
        value = None if turn.finish_reason == "length" else exact_number(turn.messages[-1]["content"])
        if value is None:
            return Verdict(0.0, "parse_fail")
        gold = exact_number(turn.answer)
        assert gold is not None, f"answer {turn.answer!r} is not a number: check_answers() runs before training"
        right = value == gold
        return Verdict(float(right), "ok" if right else "wrong", extracted=plain_number(value))

    def check_answers(self, answers: Iterable[tuple[str, str]]) -> None:
        """ConfigError when an answer of the dataset cannot be graded: found at --check, not at step 900.

        `answers`: (where, as in "train.jsonl:7"; answer) of each row.
        """
        for where, answer in answers:
            if exact_number(answer) is None:
                raise ConfigError(f"{where}: answer {answer!r} is not one plain number, which env_name 'exact' needs")


def exact_number(text: str) -> Decimal | None:
    """The one number that `text` (after its last `####`) consists of, else None."""
    text = text[-MAX_REPLY_CHARS:].rsplit("####", 1)[-1].strip()
    return Decimal(text.replace(",", "").replace("$", "")) if NUMBER.fullmatch(text) else None


def plain_number(value: Decimal) -> str:
    """Equal numbers as equal texts: 5.0 and 5 as "5", -0 as "0"; exact for any number of digits."""
    text = f"{value.copy_abs():f}"  # abs() would round
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"-{text}" if value < 0 else text


def make_environment(name: str) -> Environment:
    """`env_name` of a dataset -> environment. To add one, add it here."""
    known = {"exact": Exact}
    if name not in known:
        raise ConfigError(f"env_name '{name}' is unknown; known: {', '.join(known)}")
    return known[name]()
