"""A raw row -> a problem with prompt ids, an answer and an environment.

A row has text under a key, chat `messages` (a closing assistant message is the answer), or a rollout of NeMo Gym
(`responses_create_params`). To support a new form, add it to `read_row`, or have a `processor` convert it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from config import ENVIRONMENTS, DataError, DatasetConfig, shortened
from data import Problem
from support.inputs.files import parse_json, read_text
from support.inputs.sources import Source, with_preset
from support.inputs.tokenizer import ControlTokenInText, Tokenizer
from support.system.imports import describe, import_attribute

INPUT_KEYS = ("input", "problem", "question", "prompt")
OUTPUT_KEYS = ("output", "expected_answer", "ground_truth", "answer")
GYM_PLACES = ("", "verifier_metadata.", "metadata.", "extra_env_info.", "reward_model.")
GYM_PLACES += ("responses_create_params.metadata.",)
TOOL_KEYS = ("name", "description", "parameters")  # in the order of chat templates; `strict` is for the API alone
GSM8K_MARK = "\n#### "  # the answer follows the last one


class ProblemMaker:
    """Row number -> Problem, or why the row is left out. DataError names file and line of a malformed row."""

    def __init__(self, cfg: DatasetConfig, tokenizer: Tokenizer, limit: int, tasks: Mapping[str, str], source: Source):
        self.explicit_env = cfg.env_name  # also scores rows whose task_name is no environment
        self.cfg = cfg = with_preset(cfg)
        self.tokenizer = tokenizer
        self.limit = limit
        self.source = source
        self.system = read_text(cfg.system_prompt_file) if cfg.system_prompt_file else None
        self.prompt = split_prompt(cfg.prompt_file) if cfg.prompt_file else None
        self.processor = import_attribute(cfg.processor, "processor") if cfg.processor else None
        # task_name of a row -> environment. A row may not name arbitrary code: only the config does.
        self.env_names = {name: name for name in ENVIRONMENTS} | dict(tasks)
        self.env_names |= dict.fromkeys((None, cfg.set_name, cfg.env_name), cfg.env_name)

    def __call__(self, number: int) -> Problem | str:
        where, row = self.source.where(number), self.source.read(number)
        try:
            return self._problem(number, row)
        except ControlTokenInText as error:
            return str(error)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:  # a processor is a program, and a row may hold anything
            raise DataError(f"{where}: {describe(error)} (the forms of a row: docs/tasks.md)") from error

    def _problem(self, number: int, raw: Any) -> Problem | str:
        raw = self.processor(raw) if self.processor else raw
        if raw is None:
            return "by processor"
        if not isinstance(raw, dict):
            raise DataError(f"expected an object, got {type(raw).__name__}")
        messages, value, tools = read_row(raw, self.cfg)
        answer = value if isinstance(value, str | None) else json.dumps(value, allow_nan=False)
        task = raw.get("task_name")
        env_name = self.env_names.get(task, self.explicit_env)
        if env_name is None:
            fix = f"use {', '.join(ENVIRONMENTS)}, or set data.task_to_env or env_name of this data set"
            raise DataError(f"task_name {task!r:.80} is not an environment: {fix}")
        is_compared = env_name in ("exact", "math", "math_multi_reward")
        if is_compared and answer is None:
            raise no_key(raw, "output_key", (self.cfg.output_key,) if self.cfg.output_key else OUTPUT_KEYS)
        if is_compared and isinstance(value, list | dict | bool):
            raise DataError(f"the answer {shortened(value)} is neither text nor number: no reply can equal it")
        if is_compared and GSM8K_MARK in answer:
            answer = answer.rpartition(GSM8K_MARK)[2].strip() or answer
        messages = self._with_prompts(messages)
        ids = self.tokenizer.render(messages, tools, max_tokens=self.limit)
        if not ids:
            raise DataError("the prompt is empty")
        multiplier = raw.get("loss_multiplier", 1)
        if multiplier not in (0, 1):
            raise DataError(f"loss_multiplier={multiplier!r:.80}: expected 1 (trained on) or 0 (only scored)")
        if len(ids) > self.limit:  # they may be only the first ones
            return f"over {self.limit} tokens"
        return Problem(number, messages, answer or "", env_name, ids, raw, float(multiplier), self.cfg.set_name, tools)

    def _with_prompts(self, messages: list[dict]) -> list[dict]:
        """Puts the prompt file around the last user message, and the system prompt first if the row has none."""
        if self.prompt:
            users = [message for message in messages if message["role"] == "user"]
            if not users:
                raise DataError(f"no user message to put prompt_file={self.cfg.prompt_file} around")
            users[-1]["content"] = users[-1]["content"].join(self.prompt)  # what the file has before and after it
        if self.system and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages


def read_row(raw: dict, cfg: DatasetConfig) -> tuple[list[dict], Any, list[dict] | None]:
    """(messages, answer as read or None, tools or None) of a row. DataError for a row in none of the forms."""
    params, tools = raw.get("responses_create_params"), raw.get("tools")
    output_keys = OUTPUT_KEYS
    if params is not None:
        messages, gym_tools = _gym_prompt(params)
        tools = gym_tools or tools
        output_keys = [place + name for place in GYM_PLACES for name in (*OUTPUT_KEYS, "label")]
    else:
        input_keys = (cfg.input_key,) if cfg.input_key else INPUT_KEYS
        messages = _first(raw, (*input_keys, "messages") if cfg.input_key else ("messages", *input_keys))
        if messages is None:
            raise no_key(raw, "input_key", ("messages", *input_keys))
    messages = _chat(messages)
    answer = _first(raw, (cfg.output_key,) if cfg.output_key else output_keys)
    if messages[-1]["role"] == "assistant":
        if answer is not None or messages[-1].get("tool_calls"):
            raise DataError(
                "the assistant's last message counts as the answer: remove it, or its tool_calls and the answer field"
            )
        answer = messages.pop()["content"]
    if not messages:
        raise DataError("no message before the assistant's")
    return messages, answer, tools or None


def no_key(raw: dict, setting: str, names: Sequence[str]) -> DataError:
    """The error for a row that has none of the keys `names`."""
    has = f"{', '.join(map(str, raw)):.200}"
    return DataError(f"none of the keys {', '.join(names)}; the row has {has}: set {setting} of this data set")


def split_prompt(name: str) -> tuple[str, str]:
    """The text of prompt file `name` before and after its {}. As in NeMo RL, {{ and }} stand for braces."""
    parts = [{"{{": "{", "}}": "}"}.get(part, part) for part in re.split(r"(\{\{|\}\}|\{\})", read_text(name))]
    if parts.count("{}") != 1:
        raise DataError(f"{name}: needs exactly one {{}} where the input goes ({{{{}}}} is not counted)")
    place = parts.index("{}")
    return "".join(parts[:place]), "".join(parts[place + 1 :])


def _first(raw: dict, keys: Sequence[str]) -> Any:
    """The value of the first key that has one, else None."""
    return next((value for key in keys if (value := _under(raw, key)) is not None), None)


def _under(raw: Any, key: str) -> Any:
    """raw["a.b"], else raw["a"]["b"]; None where there is nothing."""
    if not isinstance(raw, dict):
        return None
    first, dot, rest = key.partition(".")
    return _under(raw.get(first), rest) if dot and key not in raw else raw.get(key)


def _chat(messages: Any) -> list[dict]:
    """The chat messages of a text or a list of messages; a text in parts becomes one text."""
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    chat = [message | {"content": _joined(message)} for message in chat]
    if not chat or not all(isinstance(message[key], str) for message in chat for key in ("role", "content")):
        raise DataError("expected a text or a non-empty list of messages {role, content} with text in both")
    return chat


def _joined(message: dict, key: str = "content") -> Any:
    """The text of a message. A text in parts becomes one text; where a message only calls tools, it is empty."""
    content = message.get(key)
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return "" if content is None and message.get("tool_calls") else content


def _gym_prompt(params: dict) -> tuple[list, list[dict]]:
    """(messages, tools) of a Responses API call as chat templates take them; a tool is nested."""
    items = params["input"]
    messages = [{"role": "user", "content": items}] if isinstance(items, str) else _gym_messages(items)
    if params.get("instructions"):
        messages = [{"role": "system", "content": params["instructions"]}, *messages]
    tools = []
    for tool in params.get("tools") or ():
        if not tool.keys() & {"function", "name"}:
            raise DataError(f"only a function can be a tool in a chat template, not {tool!r:.80}")
        function = {key: tool[key] for key in TOOL_KEYS if key in tool}
        tools.append(tool if "function" in tool else {"type": "function", "function": function})
    return messages, tools


def _gym_messages(items: list[dict]) -> list[dict]:
    """Items of a Responses API input -> chat messages, as NeMo Gym's responses_converter.py (07d6b0d) joins them:
    reasoning, texts and calls up to the next item of another role become one assistant message, with
    `reasoning_content` and `tool_calls`; the output of a call becomes a tool message, a developer the system."""
    messages: list[dict] = []
    for item in items:
        role, kind = item.get("role"), item.get("type") or "message"
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            continue
        if kind == "message" and role != "assistant":
            messages.append(item | {"role": "system" if role == "developer" else role})
            continue
        if kind not in ("message", "reasoning", "function_call"):
            raise DataError(f"responses_create_params.input: a chat cannot hold {kind}: remove it, or the row")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        message, key, text = messages[-1], "content", _joined(item)
        if kind == "reasoning":
            key, text = "reasoning_content", _joined(item, "summary") or text
        if text:
            message[key] = message.get(key, "") + text
        if calls := [_tool_call(item)] if kind == "function_call" else item.get("tool_calls"):
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
    return messages


def _tool_call(item: dict) -> dict:
    """A function_call as transformers' templates take it: the arguments are an object, not text."""
    arguments = item.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = parse_json(arguments.encode("utf-8", "surrogatepass"), "responses_create_params.input: arguments")
    return {"type": "function", "id": item.get("call_id"), "function": {"name": item["name"], "arguments": arguments}}
