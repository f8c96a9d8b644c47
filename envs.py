"""Environments: take a conversation; return its reward, its outcome and, in multi-turn tasks, an observation.

Owns the interface and the small environments. base/graders/environments.py makes the environment of a data set's
env_name, base/graders/judged.py has those that ask the judges, reward_function.py there has TRL's reward functions.
Knows nothing of tokens: rollout.py turns replies into text, and observations into tokens. Imports no torch, no vllm.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from config import ConfigError

if TYPE_CHECKING:
    from judges.pool import GraderPool

Answers = Iterable[tuple[str, str, dict]]  # of rows: where each is, its answer, its fields
OUTCOMES = ("ok", "wrong", "parse_fail", "timeout", "error")
MAX_REPLY_CHARS = 100_000  # `exact` reads the end of a longer reply
NUMBER = re.compile(r"[-+]?\$?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment sees of a conversation.

    messages: all so far, the policy's reply last; answer, fields: from the problem; finish_reason: how the reply ended
    ("stop" | "length"); state: what the environment returned after the previous turn, {} at first; prompt_ids,
    completion_ids: the tokens before and in the reply; weight_version: training steps before the reply's last token;
    opened: the tag that the prompt leaves open for the reply, such as `<think>`; raw_reply: the reply with its special
    tokens, if the environment asks for it.
    """

    messages: list[dict]
    answer: str
    finish_reason: str
    state: dict = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    weight_version: int = 0
    opened: str = ""
    raw_reply: str = ""

    @property
    def whole_reply(self) -> str:
        """The reply, or "" if the length limit cut it off. Half a reply never scores: it may end in half a number."""
        if self.finish_reason == "length":
            return ""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment returns for a `Turn`.

    reward: a conversation gets the sum over its turns. outcome: one of OUTCOMES; a conversation gets the outcome of its
    last turn. observation: messages to append when not `done`. state: for the next `Turn`, since an environment keeps
    no conversations. rewards: name -> reward, if `reward` has several parts; a name that reward_names lacks is dropped.
    extracted: the answer in the reply, for majority votes: equal answers are equal texts; None if there is no answer.
    """

    reward: float
    outcome: str
    done: bool = True
    observation: tuple[dict, ...] = ()
    state: dict = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None


class Environment:
    """A base for environments; any class with step, check_answers and close will do.

    Its own thread calls `step`, one call at a time, with all waiting turns, while other replies are drawn. Which turns
    share a call is chance: a result must depend on its turn (its group, with whole_groups) only. One with worker
    processes derives from base.graders.pool.PoolEnvironment: each turn goes to a worker.
    """

    self_tests: Sequence[tuple] = ()  # (reply, answer, expected outcome[, fields]), tried before a run starts
    reward_names: Sequence[str] = ()  # names in StepResult.rewards; grpo.adv_estimator.name=gdpo needs two or more
    whole_groups: bool = False  # for rewards that compare the samples of a prompt: a call of step() has all of them
    special_tokens: bool = False  # whether turns have raw_reply
    main_thread: bool = False  # step() is called between two decode steps, which wait: for code that needs signals
    pool: "GraderPool | None" = None  # if it has worker processes

    def start_workers(self) -> None:
        """Starts the processes that grade, before the engine is there. Raises ConfigError if it cannot."""

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        """A result for each turn, in order. Outcome `error`: not gradable, so it is not trained, nor compared with.
        After an exception each turn (its group, with whole_groups) gets its own call; one that raises is an `error`."""
        raise NotImplementedError

    def check_answers(self, answers: Answers) -> None:
        """Raises ConfigError if an answer of the dataset cannot be graded: --check finds it, not step 900.

        Example of an answer: ("train.jsonl:7", "91", {"problem": "72+19=", "answer": "91"}).
        """

    def close(self) -> None:
        """Ends its processes."""
        if self.pool is not None:
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
        extracted = plain_number(value)
        if value == gold:
            return StepResult(1.0, "ok", extracted=extracted)
        return StepResult(0.0, "wrong", extracted=extracted)

    def check_answers(self, answers: Answers) -> None:
        for where, answer, _ in answers:
            if exact_number(answer) is None:
                raise ConfigError(f"{where}: answer {answer!r:.80} is not one plain number: env_name 'exact' needs one")


def exact_number(text: str) -> Decimal | None:
    """The number after the last `####` of `text`; None if anything else is there."""
    text = text[-MAX_REPLY_CHARS:].rsplit("####", 1)[-1].strip()
    if not NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace("$", ""))


def plain_number(value: Decimal) -> str:
    """Equal numbers give equal texts: 5.0 and 5 give "5", -0 gives "0"; exact for any number of digits."""
    text = f"{value.copy_abs():f}"  # abs() would round
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    if value < 0:
        text = f"-{text}"
    return text


class RewardModelEnv(Environment):
    """Accepts every reply with reward 0; afterwards rollout.py replaces the reward by the reward model's score."""

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [StepResult(0.0, "ok") for _ in turns]
