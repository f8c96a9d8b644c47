"""A raw row -> a problem with prompt ids, an answer and an environment.

Understands text under a key, chat `messages` (a closing assistant message is the answer), and rollouts of NeMo Gym
(`responses_create_params`). A new form of rows is added to `read_row`; or outside, by a `processor` that turns it into
one of these. sources.py reads rows, scan.py says which of them are usable.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from config import DataError, DatasetConfig
from data import Problem
from dataset.sources import Source
from hf.files import read_text
from hf.tokenizer import ControlTokenInText, Tokenizer
from system.imports import import_attribute

INPUT_KEYS = ("input", "problem", "question", "prompt")
OUTPUT_KEYS = ("output", "expected_answer", "ground_truth", "answer")
GYM_PLACES = ("", "verifier_metadata.", "metadata.", "extra_env_info.", "reward_model.")
GYM_PLACES += ("responses_create_params.metadata.",)
GSM8K_ANSWER = re.compile(r".*\n#### ([^\n]+)\s*", re.DOTALL)
ENVIRONMENTS = ("exact", "math", "code", "reward_model")


@dataclass(slots=True)
class ProblemMaker:
    """Number of a row -> Problem, or None where a filter leaves the row out: a function of the row and of `cfg`.

    Raises DataError with file and line for a malformed row; ControlTokenInText for text that holds a control token.
    """

    cfg: DatasetConfig
    tokenizer: Tokenizer
    tasks: Mapping[str, str]
    source: Source
    system: str | None = field(init=False)
    prompt: tuple[str, str] | None = field(init=False)
    processor: Callable[[dict], dict | None] | None = field(init=False)

    def __post_init__(self):
        cfg = self.cfg
        self.system = self._read_prompt_file(cfg.system_prompt_file) if cfg.system_prompt_file else None
        self.prompt = (
            split_prompt(cfg.prompt_file, self._read_prompt_file(cfg.prompt_file)) if cfg.prompt_file else None
        )
        self.processor = import_attribute(cfg.processor, "processor") if cfg.processor else None

    def _read_prompt_file(self, name: str) -> str:
        text = read_text(name)
        for token in self.tokenizer.control_tokens(text):
            raise DataError(f"{name}: holds the control token {token!r}: the chat template writes those; take it out")
        return text

    def __call__(self, number: int) -> Problem | None:
        where, raw = self.source.where(number), self.source[number]
        if self.processor:
            raw = self._processed(raw, where)
        if raw is None or (self.cfg.min_reward is not None and self._reward(raw, where) < self.cfg.min_reward):
            return None
        messages, answer, tools = read_row(raw, where, self.cfg.input_key, self.cfg.output_key)
        env_name = self._env_name(raw, where)
        if env_name in ("exact", "math"):
            if answer is None:
                key = f"key '{self.cfg.output_key}'" if self.cfg.output_key else f"key of {', '.join(OUTPUT_KEYS)}"
                raise DataError(f"{where}: no {key}; keys: {_keys(raw)} (see output_key)")
            answer = GSM8K_ANSWER.sub(r"\1", answer)
        messages = self._with_prompts(messages, where)
        try:
            ids = self.tokenizer.render(messages, tools)
        except ControlTokenInText:
            raise
        except Exception as error:  # a template is a program; TypeError also: half a surrogate pair is not text
            cause = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise DataError(f"{where}: the chat template refuses these messages ({cause})") from error
        if not ids:
            raise DataError(f"{where}: the prompt is empty")
        multiplier = raw.get("loss_multiplier", 1)
        if multiplier not in (0, 1):
            raise DataError(f"{where}: loss_multiplier={multiplier!r}: 1 (trained on) or 0 (sampled and scored only)")
        return Problem(number, messages, answer or "", env_name, ids, raw, float(multiplier), self.cfg.set_name, tools)

    def again(self, number: int) -> Problem:
        """The problem of a row that was usable before."""
        problem = self(number)
        if problem is None:
            raise DataError(f"{self.source.where(number)}: processor left out a row that it gave before")
        return problem

    def _processed(self, raw: dict, where: str) -> dict | None:
        try:
            row = self.processor(raw)
        except Exception as error:  # it is the user's
            raise DataError(f"{where}: processor {self.cfg.processor} raised {error!r}") from error
        if row is not None and not isinstance(row, dict):
            raise DataError(f"{where}: processor {self.cfg.processor} gave {type(row).__name__}, not a row or None")
        return row

    def _reward(self, raw: dict, where: str) -> float:
        reward = raw.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise DataError(f"{where}: no number under 'reward', which min_reward={self.cfg.min_reward:g} asks for")
        return reward

    def _env_name(self, raw: dict, where: str) -> str:
        """The environment of its `task_name`, else the dataset's."""
        task = raw.get("task_name")
        if task is None or task in (self.cfg.set_name, self.cfg.env_name):
            return self.cfg.env_name
        name = self.tasks.get(task) if isinstance(task, str) else None
        if name is None and task in ENVIRONMENTS:  # a row may not name code of its choice: only the config does
            name = task
        if name is None:
            raise DataError(
                f"{where}: task_name {task!r} is no environment; known: {', '.join(ENVIRONMENTS)}; name its "
                "environment, also a module:Class, in data.task_to_env"
            )
        return name

    def _with_prompts(self, messages: list[dict], where: str) -> list[dict]:
        """The prompt file around the last user message; the system prompt in front, where the row has none."""
        if self.prompt:
            last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
            if last is None:
                raise DataError(f"{where}: no user message, which prompt_file={self.cfg.prompt_file} goes around")
            before, after = self.prompt
            text = f"{before}{messages[last]['content']}{after}"
            messages = [*messages[:last], messages[last] | {"content": text}, *messages[last + 1 :]]
        has_system = any(message["role"] == "system" for message in messages)
        return messages if has_system or not self.system else [{"role": "system", "content": self.system}, *messages]


def read_row(
    raw: dict, where: str, input_key: str | None, output_key: str | None
) -> tuple[list[dict], str | None, list[dict] | None]:
    """(messages, answer or None, tools or None) of a row. The keys: where to look for problem and answer; None: under
    INPUT_KEYS and OUTPUT_KEYS. DataError, which begins with `where`, for a row in none of the forms."""
    params, tools = raw.get("responses_create_params"), raw.get("tools")
    output_keys = OUTPUT_KEYS
    if params is not None:
        problem = _gym_messages(params, where)
        tools = _gym_tools(params) or tools
        output_keys = [place + name for place in GYM_PLACES for name in (*OUTPUT_KEYS, "label")]
    elif raw.get("messages") is not None:
        problem = raw["messages"]
    else:
        input_keys = (input_key,) if input_key else INPUT_KEYS
        problem = _first(raw, input_keys)
        if not isinstance(problem, (str, list)):
            names = "' or '".join(input_keys)
            raise DataError(f"{where}: neither 'messages' nor text under '{names}'; keys: {_keys(raw)} (see input_key)")
    messages = [{"role": "user", "content": problem}] if isinstance(problem, str) else _chat(problem, where)
    answer = _first(raw, (output_key,) if output_key else output_keys)
    if messages[-1]["role"] == "assistant":
        if answer is not None:
            raise DataError(
                f"{where}: the last message is the assistant's, and there is an answer too; the policy is asked to "
                "write that message: leave out one"
            )
        messages, answer = messages[:-1], messages[-1]["content"]
    if not messages:
        raise DataError(f"{where}: no message before the assistant's")
    return messages, answer if isinstance(answer, (str, type(None))) else json.dumps(answer), tools or None


def split_prompt(name: str, text: str) -> tuple[str, str]:
    """The text of prompt file `name` before and after its {}. As in NeMo RL, {{ and }} stand for braces."""
    braces = {"{{": "{", "}}": "}"}
    parts = re.split(r"(\{\{|\}\}|\{\})", text)
    count = parts.count("{}")
    if count != 1:
        raise DataError(f"{name}: needs exactly one {{}} where the input goes, has {count} ({{{{}}}} is not counted)")
    place = parts.index("{}")
    return tuple("".join(braces.get(part, part) for part in half) for half in (parts[:place], parts[place + 1 :]))


def _keys(raw: dict) -> str:
    """The keys of a row, for messages."""
    return ", ".join(map(str, raw))


def _first(raw: dict, keys: Sequence[str]) -> Any:
    """What is under the first of the keys that has anything, else None."""
    return next((value for key in keys if (value := _under(raw, key)) is not None), None)


def _under(raw: Any, key: str) -> Any:
    """raw["a.b"], else raw["a"]["b"]; None where there is nothing."""
    if not isinstance(raw, dict) or key in raw:
        return raw.get(key) if isinstance(raw, dict) else None
    first, dot, rest = key.partition(".")
    return _under(raw.get(first), rest) if dot else None


def _chat(messages: Any, where: str) -> list[dict]:
    """Chat messages as they are, except that a text in parts becomes one text."""
    problem = f"{where}: 'messages' must be a non-empty list of {{role, content}} with text in both"
    if not isinstance(messages, list) or not messages:
        raise DataError(problem)
    chat = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if content is None and isinstance(message, dict) and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise DataError(problem)
        chat.append(message if content is message.get("content") else message | {"content": content})
    return chat


def _gym_messages(params: Any, where: str) -> list:
    """Messages from the parameters of a Responses API call; a developer's message becomes a system message."""
    problem = params.get("input") if isinstance(params, dict) else None
    if not isinstance(problem, (str, list)):
        raise DataError(f"{where}: no text and no messages under responses_create_params.input")
    if isinstance(problem, str):
        problem = [{"role": "user", "content": problem}]
    if params.get("instructions"):
        problem = [{"role": "system", "content": params["instructions"]}, *problem]
    roles = (message.get("role") if isinstance(message, dict) else None for message in problem)
    return [m | {"role": "system"} if r == "developer" else m for m, r in zip(problem, roles, strict=True)]


def _gym_tools(params: dict) -> list[dict]:
    """Tools as chat templates take them: those of the Responses API are not nested."""
    return [
        tool if "function" in tool else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in params.get("tools") or []
    ]
