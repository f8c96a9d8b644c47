"""A user's reward function with the signature of TRL's trainers, as an environment. No torch.

It follows `GRPOTrainer._calculate_rewards` in huggingface/trl at f2cd577 (1.10.0.dev0).
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from config import ConfigError
from envs import Answers, Environment, StepResult, Turn


class RewardFunction(Environment):
    """A function of a batch with the signature of TRL's trainers: `f(completions, **columns) -> list[float | None]`,
    or a coroutine function.

    It is called by keyword with the columns that it has parameters for: `completions`, `prompts`, `completion_ids`,
    `prompt_ids`, `answer`, `trainer_state`, and each field of the problems (None where a problem lacks it). As in TRL,
    a problem with chat `messages`, or with a chat as its `prompt`, has a list of messages as its prompt and
    [{role, content}] as its completion; any other problem has texts. A completion begins with the tag that the prompt
    left open (`<think>`), and has special tokens if the function's attribute `special_tokens` is true. A call has all
    samples of each of its prompts, prompt by prompt. trainer_state has only global_step, the number of training steps
    done: a step is a rollout with all its optimizer steps, which TRL counts one by one. A reward above 0 counts as
    "ok"; None, or a number that is not finite, as "error" with reward 0. A function with a required parameter that is
    neither in this list nor a field of every problem is refused. An exception names file and line.
    """

    whole_groups = True  # a function of TRL's may compare the samples of a prompt
    GIVEN = ("completions", "prompts", "completion_ids", "prompt_ids", "answer", "trainer_state")

    def __init__(self, function: Callable[..., Sequence[float | None]], name: str):
        self.function = function
        self.name = name
        self.special_tokens = getattr(function, "special_tokens", False)
        self.main_thread = getattr(function, "main_thread", False)
        parameters = inspect.signature(function).parameters.values()
        self.accepts_all = False
        self.accepted: set[str] = set()
        self.required_fields: list[str] = []
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self.accepts_all = True
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                continue
            self.accepted.add(parameter.name)
            if parameter.default is parameter.empty and parameter.name not in self.GIVEN:
                self.required_fields.append(parameter.name)
        if not self.accepts_all and "completions" not in self.accepted:
            raise ConfigError(f"env_name '{name}': a reward function must take `completions` (TRL's signature)")

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        if not turns:
            return []
        arguments = self._columns(turns)
        arguments["trainer_state"] = SimpleNamespace(global_step=turns[0].weight_version)
        if not self.accepts_all:
            arguments = {name: value for name, value in arguments.items() if name in self.accepted}
        try:
            rewards = self.function(**arguments)
            if inspect.iscoroutine(rewards):
                rewards = asyncio.run(rewards)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            form = "lists of messages here, because the rows have `messages`"
            if isinstance(arguments["completions"][0], str):
                form = "texts here, because the rows have no `messages`"
            error.add_note(f"(completions are {form})")
            raise
        results = [self._result(reward) for reward in rewards]
        if len(results) != len(turns):
            raise ValueError(f"{self.name} returned {len(results)} rewards for {len(turns)} completions")
        return results

    def _columns(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Name -> the values of all turns."""
        columns: dict[str, Any] = {"answer": [turn.answer for turn in turns]}
        for name in sorted({name for turn in turns for name in turn.fields}):
            columns[name] = [turn.fields.get(name) for turn in turns]
        columns["prompts"] = [self._text_or_chat(turn, turn.messages[:-1]) for turn in turns]
        columns["completions"] = [self._text_or_chat(turn, [self._completion(turn)]) for turn in turns]
        columns["prompt_ids"] = [list(turn.prompt_ids) for turn in turns]
        columns["completion_ids"] = [list(turn.completion_ids) for turn in turns]
        return columns

    def _completion(self, turn: Turn) -> dict:
        message = turn.messages[-1]
        reply = message["content"]
        if self.special_tokens:
            reply = turn.raw_reply
        return message | {"content": turn.opened + reply}

    @staticmethod
    def _text_or_chat(turn: Turn, messages: list[dict]) -> str | list[dict]:
        is_chat = "messages" in turn.fields or isinstance(turn.fields.get("prompt"), list)
        if is_chat:
            return messages
        return "".join(message["content"] for message in messages)

    @staticmethod
    def _result(reward: float | None) -> StepResult:
        if reward is None or not math.isfinite(reward):
            return StepResult(0.0, "error")
        return StepResult(float(reward), "ok" if reward > 0 else "wrong")

    def check_answers(self, answers: Answers) -> None:
        for where, _, fields in answers:
            for name in self.required_fields:
                if name not in fields:
                    raise ConfigError(f"{where}: no field '{name}', which the reward function {self.name} asks for")
