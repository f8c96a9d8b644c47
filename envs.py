"""Environments: a conversation goes in, reward, outcome and (for multi-turn tasks) the next observation come out.

Owns: the interface, the task `exact`, and finding an environment by its name: a built-in one, or a user's class or
reward function by dotted path. Knows nothing of tokens: rollout.py turns replies into text and observations into
tokens. Imports neither torch nor vllm, so that graders can run in plain processes.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from config import ConfigError

OUTCOMES = ("ok", "wrong", "parse_fail", "timeout", "error")


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment sees: the messages so far (the policy's reply last), the row's answer, how the reply ended
    ("stop" | "length"), the state it returned after the turn before ({} at first), the row's fields by name."""

    messages: list[dict]
    answer: str
    finish_reason: str
    state: dict = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What it answers. `outcome` is one of OUTCOMES; `observation` are messages to append when not `done`.

    A conversation's reward is the sum of its turns', its outcome the last one's. state: for the next turn's `Turn`, and
    nothing else: an environment keeps no conversations. rewards: name -> reward, where `reward` is made of several.
    extracted: the answer found in the reply, in a form in which equal answers are equal texts, for majority votes; None
    where there is none.
    """

    reward: float
    outcome: str
    done: bool = True
    observation: tuple[dict, ...] = ()
    state: dict = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None


class Environment:
    """History and state in, reward and new state out, for a batch of conversations at once.

    A base for what has nothing to check or to close; any class with these three methods is an environment.
    """

    canaries: Sequence[tuple[str, str, str]] = ()  # (reply, answer, outcome) it must give before a run may start

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        """A result per turn, in order. Errors of one answer are outcomes; what is raised ends the run."""
        raise NotImplementedError

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        """ConfigError when an answer of the dataset cannot be graded: found at --check, not at step 900.

        `answers`: (where, as in "train.jsonl:7"; answer; the row's fields) of each row.
        """

    def close(self) -> None:
        """Ends processes it started."""


NUMBER = re.compile(r"[-+]?\$?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
MAX_REPLY_CHARS = 100_000


class Exact(Environment):
    """Reward 1 when the reply *is* the right number, else 0.

    The answer is the text after the last `####` (GSM8K's form), or the whole text where there is none, and must be one
    plain number; `1,234` and `$5` are understood, values compare as decimals (5.0 == 5). A reply cut off by the length
    limit never scores: its number may be half a number.
    """

    canaries = (("#### 1,234", "1234", "ok"), ("1233", "1234", "wrong"), ("no", "1234", "parse_fail"))

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [self.grade(turn) for turn in turns]

    def grade(self, turn: Turn) -> StepResult:
        value = None if turn.finish_reason == "length" else exact_number(turn.messages[-1]["content"])
        if value is None:
            return StepResult(0.0, "parse_fail")
        gold = exact_number(turn.answer)
        assert gold is not None, f"answer {turn.answer!r} is not a number: check_answers() runs before training"
        right = value == gold
        return StepResult(float(right), "ok" if right else "wrong", extracted=plain_number(value))

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, _ in answers:
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


class RewardModelEnv(Environment):
    """Of `reward_model`: every reply is fine, and worth nothing until the model has scored it (reward_model.py).

    score: conversations -> a score of each, or None where it has none; set when the model is loaded.
    """

    score: Callable[[Sequence[list[dict]]], list[float | None]]

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [StepResult(0.0, "ok") for _ in turns]


class RewardFunction(Environment):
    """A plain function of a batch as TRL's trainers take: `f(completions, **columns) -> list[float | None]`.

    Called by keyword: `completions`, `prompts`, `answer`, and every field of the rows (None where one has none); it
    gets those it has parameters for. As in TRL, a row of chat `messages` has a list of messages for its prompt and
    [{role, content}] for its completion; any other row has texts. More than 0 counts as "ok"; None or what is no finite
    number, as "error" with reward 0. What it raises ends the run.
    """

    def __init__(self, function: Callable[..., Sequence[float | None]], name: str):
        self.function, self.name = function, name
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.accepted = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in named}
        given = {"completions", "prompts", "answer"}
        self.required = [p.name for p in named if p.default is p.empty and p.name not in given]
        if self.accepted is not None and "completions" not in self.accepted:
            raise ConfigError(f"env_name '{name}': a reward function takes `completions` (TRL's signature)")

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        if not turns:
            return []
        names = sorted({name for turn in turns for name in turn.fields})
        columns: dict[str, list] = {name: [turn.fields.get(name) for turn in turns] for name in names}
        columns = {"answer": [turn.answer for turn in turns]} | columns
        columns["prompts"] = [self._text_or_chat(turn, turn.messages[:-1]) for turn in turns]
        columns["completions"] = [self._text_or_chat(turn, turn.messages[-1:]) for turn in turns]
        if self.accepted is not None:
            columns = {name: values for name, values in columns.items() if name in self.accepted}
        rewards = list(self.function(**columns))
        if len(rewards) != len(turns):
            raise ValueError(f"{self.name} gave {len(rewards)} rewards for {len(turns)} completions")
        return [self._verdict(reward) for reward in rewards]

    @staticmethod
    def _text_or_chat(turn: Turn, messages: list[dict]) -> str | list[dict]:
        is_chat = "messages" in turn.fields
        return messages if is_chat else "".join(message["content"] for message in messages)

    @staticmethod
    def _verdict(reward: float | None) -> StepResult:
        if reward is None or not math.isfinite(reward):
            return StepResult(0.0, "error")
        return StepResult(float(reward), "ok" if reward > 0 else "wrong")

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, _, fields in answers:
            missing = [name for name in self.required if name not in fields]
            if missing:
                raise ConfigError(f"{where}: no field '{missing[0]}', which the reward function {self.name} asks for")
