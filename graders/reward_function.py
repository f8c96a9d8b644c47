"""A user's reward function with the signature of TRL's trainers, as an environment. No torch.

It follows `GRPOTrainer._calculate_rewards` in huggingface/trl at f2cd577 (1.10.0.dev0).
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from config import ConfigError
from envs import Environment, StepResult, Turn
from system.imports import describe

ABSENT = {
    "log_extra": "samples.jsonl has what was sampled",
    "log_metric": "an environment's StepResult.rewards are logged, each by its name",
    "environments": "write an environment of several turns (envs.py)",
}


class TrainerState(SimpleNamespace):
    """The part of transformers' TrainerState that exists here: global_step, the number of training steps done. A step
    is a rollout with all its optimizer steps; TRL counts those one by one."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name} does not exist here, only trainer_state.global_step")


class RewardFunction(Environment):
    """A function of a batch with the signature of TRL's trainers: `f(completions, **columns) -> list[float | None]`,
    or a coroutine function.

    It is called by keyword with the columns that it has parameters for: `completions`, `prompts`, `completion_ids`,
    `prompt_ids`, `answer`, `trainer_state`, and each field of the problems (None where a problem lacks it). As in TRL,
    a problem with chat `messages`, or with a chat as its `prompt`, has a list of messages as its prompt and
    [{role, content}] as its completion; any other problem has texts. A reward above 0 counts as "ok"; None, or a number
    that is not finite, as "error" with reward 0. A function that needs anything else that TRL passes is refused. An
    exception ends the run; its message names file and line.
    """

    GIVEN = ("completions", "prompts", "completion_ids", "prompt_ids", "answer", "trainer_state")

    def __init__(self, function: Callable[..., Sequence[float | None]], name: str):
        self.function, self.name = function, name
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.accepted = {p.name for p in named}
        self.required_fields = [p.name for p in named if p.default is p.empty and p.name not in self.GIVEN]
        if not self.accepts_all and "completions" not in self.accepted:
            raise ConfigError(f"env_name '{name}': a reward function takes `completions` (TRL's signature)")
        for field in self.required_fields:
            if field in ABSENT:
                problem = f"the reward function asks for `{field}`, which TRL passes and which does not exist here"
                raise ConfigError(f"env_name '{name}': {problem}: {ABSENT[field]}")

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        if not turns:
            return []
        columns: dict[str, Any] = {"answer": [turn.answer for turn in turns]}
        for name in sorted({name for turn in turns for name in turn.fields}):
            columns[name] = [turn.fields.get(name) for turn in turns]
        columns["prompts"] = [self._text_or_chat(turn, turn.messages[:-1]) for turn in turns]
        columns["completions"] = [self._text_or_chat(turn, turn.messages[-1:]) for turn in turns]
        columns["prompt_ids"] = [list(turn.prompt_ids) for turn in turns]
        columns["completion_ids"] = [list(turn.completion_ids) for turn in turns]
        columns["trainer_state"] = TrainerState(global_step=turns[0].weight_version)
        accepted = {name: values for name, values in columns.items() if self.accepts_all or name in self.accepted}
        try:
            rewards = self.function(**accepted)
            rewards = list(asyncio.run(rewards) if inspect.iscoroutine(rewards) else rewards)
            results = [self._result(reward) for reward in rewards]
        except (Exception, SystemExit) as error:  # it is the user's
            raise RuntimeError(f"{self.name} raised {describe(error)}") from error
        if len(rewards) != len(turns):
            raise ValueError(f"{self.name} gave {len(rewards)} rewards for {len(turns)} completions")
        return results

    @staticmethod
    def _text_or_chat(turn: Turn, messages: list[dict]) -> str | list[dict]:
        is_chat = "messages" in turn.fields or isinstance(turn.fields.get("prompt"), list)
        return messages if is_chat else "".join(message["content"] for message in messages)

    @staticmethod
    def _result(reward: float | None) -> StepResult:
        if reward is None or not math.isfinite(reward):
            return StepResult(0.0, "error")
        return StepResult(float(reward), "ok" if reward > 0 else "wrong")

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, _, fields in answers:
            missing = [name for name in self.required_fields if name not in fields]
            if missing:
                raise ConfigError(f"{where}: no field '{missing[0]}', which the reward function {self.name} asks for")
