"""Environments: a conversation goes in; its reward, its outcome and, in tasks of many turns, an observation come out.

Owns the interface and the small environments. graders/environments.py has those that grade in processes of their own,
and makes the environment that a dataset's env_name names. Knows nothing of tokens: rollout.py turns replies into text,
and observations into tokens. Imports neither torch nor vllm.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from config import ConfigError
from system.imports import describe

OUTCOMES = ("ok", "wrong", "parse_fail", "timeout", "error")
MAX_REPLY_CHARS = 100_000  # `exact` reads the end of a longer reply
NUMBER = re.compile(r"[-+]?\$?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment sees of a conversation.

    messages: all so far, the policy's reply last; answer, fields: those of the problem; finish_reason: how the reply
    ended ("stop" | "length"); state: what the environment returned after the previous turn, {} at first; prompt_ids,
    completion_ids: the tokens before the reply, and those of the reply.
    """

    messages: list[dict]
    answer: str
    finish_reason: str
    state: dict = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()

    @property
    def whole_reply(self) -> str:
        """The reply, or "" if the length limit cut it off. Half a reply never scores: it may end in half a number."""
        return "" if self.finish_reason == "length" else self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment returns for a `Turn`.

    reward: a conversation gets the sum over its turns. outcome: one of OUTCOMES; a conversation gets that of its last
    turn. observation: messages to append when not `done`. state: for the next `Turn`, since an environment keeps no
    conversations. rewards: name -> reward, if `reward` has several parts. extracted: the answer in the reply, for
    majority votes: equal answers are equal texts; None if there is none.
    """

    reward: float
    outcome: str
    done: bool = True
    observation: tuple[dict, ...] = ()
    state: dict = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None


class Environment:
    """A base for environments; any class that has its three methods will do."""

    self_tests: Sequence[tuple[str, str, str]] = ()  # (reply, answer, expected outcome), tried before a run starts
    reward_names: Sequence[str] = ()  # names in StepResult.rewards; grpo.adv_estimator.name=gdpo needs two or more
    pool: Any = None  # a graders.pool.GraderPool, if it has worker processes

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        """A result for each turn, in order. An ungradable answer is an outcome; an exception ends the run."""
        raise NotImplementedError

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        """Raises ConfigError if an answer of the dataset cannot be graded: --check finds it, not step 900.

        answers: for each problem, where it is ("train.jsonl:7"), its answer and its fields.
        """

    def close(self) -> None:
        """Ends the processes that the environment started."""
        if self.pool:
            self.pool.close()


class Exact(Environment):
    """Reward 1 if the whole reply is the right number, else 0.

    In reply and answer, only the text after the last `####` counts (GSM8K's form), or all of it if there is none. It
    must be one plain number; `1,234` and `$5` are understood, and values are compared as decimals (5.0 == 5).
    """

    self_tests = (("#### 1,234", "1234", "ok"), ("1233", "1234", "wrong"), ("no", "1234", "parse_fail"))

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [self.grade(turn) for turn in turns]

    def grade(self, turn: Turn) -> StepResult:
        value = exact_number(turn.whole_reply)
        if value is None:
            return StepResult(0.0, "parse_fail")
        gold = exact_number(turn.answer)
        assert gold is not None, f"answer {turn.answer!r} is not a number: check_answers() runs before training"
        right = value == gold
        return StepResult(float(right), "ok" if right else "wrong", extracted=plain_number(value))

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, _ in answers:
            if exact_number(answer) is None:
                raise ConfigError(f"{where}: answer {answer!r:.80} is not one plain number: env_name 'exact' needs one")


def exact_number(text: str) -> Decimal | None:
    """The number that `text`, after its last `####`, consists of; None if it is anything else."""
    text = text[-MAX_REPLY_CHARS:].rsplit("####", 1)[-1].strip()
    return Decimal(text.replace(",", "").replace("$", "")) if NUMBER.fullmatch(text) else None


def plain_number(value: Decimal) -> str:
    """Equal numbers as equal texts: 5.0 and 5 as "5", -0 as "0"; exact for any number of digits."""
    text = f"{value.copy_abs():f}"  # abs() would round
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"-{text}" if value < 0 else text


class RewardModelEnv(Environment):
    """Accepts every reply with reward 0; afterwards rollout.py replaces the reward by the reward model's score."""

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [StepResult(0.0, "ok") for _ in turns]


class RewardFunction(Environment):
    """A function of a batch with the signature of TRL's trainers: `f(completions, **columns) -> list[float | None]`.

    It is called by keyword with those of these that it has parameters for: `completions`, `prompts`, `completion_ids`,
    `prompt_ids`, `answer`, and each field of the problems (None where a problem lacks it). As in TRL, a problem with
    chat `messages` has a list of messages as its prompt and [{role, content}] as its completion, any other has texts.
    A reward above 0 counts as "ok"; None, or what is no finite number, as "error" with reward 0. TRL's `trainer_state`
    and `log_*` do not exist here. An exception ends the run; its message names the function's file and line.
    """

    GIVEN = ("completions", "prompts", "completion_ids", "prompt_ids", "answer")

    def __init__(self, function: Callable[..., Sequence[float | None]], name: str):
        self.function, self.name = function, name
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:  # some that are not written in Python
            raise ConfigError(f"env_name '{name}' is no reward function: {error}") from error
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.accepted = {p.name for p in named}
        self.required_fields = [p.name for p in named if p.default is p.empty and p.name not in self.GIVEN]
        if not self.accepts_all and "completions" not in self.accepted:
            raise ConfigError(f"env_name '{name}': a reward function takes `completions` (TRL's signature)")

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        if not turns:
            return []
        names = sorted({name for turn in turns for name in turn.fields})
        columns: dict[str, list] = {"answer": [turn.answer for turn in turns]}
        columns |= {name: [turn.fields.get(name) for turn in turns] for name in names}
        columns["prompts"] = [self._text_or_chat(turn, turn.messages[:-1]) for turn in turns]
        columns["completions"] = [self._text_or_chat(turn, turn.messages[-1:]) for turn in turns]
        columns["prompt_ids"] = [list(turn.prompt_ids) for turn in turns]
        columns["completion_ids"] = [list(turn.completion_ids) for turn in turns]
        accepted = {name: values for name, values in columns.items() if self.accepts_all or name in self.accepted}
        try:
            rewards = list(self.function(**accepted))
        except (Exception, SystemExit) as error:  # it is the user's
            raise RuntimeError(f"{self.name} raised {describe(error)}") from error
        if len(rewards) != len(turns):
            raise ValueError(f"{self.name} gave {len(rewards)} rewards for {len(turns)} completions")
        return [self._result(reward) for reward in rewards]

    @staticmethod
    def _text_or_chat(turn: Turn, messages: list[dict]) -> str | list[dict]:
        is_chat = "messages" in turn.fields
        return messages if is_chat else "".join(message["content"] for message in messages)

    def _result(self, reward: float | None) -> StepResult:
        try:
            is_finite = reward is not None and math.isfinite(reward)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.name} gave {type(reward).__name__}, not a number or None ({error})") from error
        if not is_finite:
            return StepResult(0.0, "error")
        return StepResult(float(reward), "ok" if reward > 0 else "wrong")

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, _, fields in answers:
            missing = [name for name in self.required_fields if name not in fields]
            if missing:
                raise ConfigError(f"{where}: no field '{missing[0]}', which the reward function {self.name} asks for")
