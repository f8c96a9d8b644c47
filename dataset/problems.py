"""A raw row -> a problem with prompt ids, an answer and an environment.

Understands text under a key, chat `messages` (a closing assistant message is the answer), and rollouts of NeMo Gym
(`responses_create_params`). A new form is added to `read_row`, or a user's `processor` turns it into one of these.
"""

import json
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import jinja2

from config import DataError, DatasetConfig
from data import Problem
from dataset.sources import Source, with_preset
from hf.files import parse_json, read_text
from hf.tokenizer import ControlTokenInText, Tokenizer
from system.imports import call, import_attribute

INPUT_KEYS = ("input", "problem", "question", "prompt")
OUTPUT_KEYS = ("output", "expected_answer", "ground_truth", "answer")
GYM_PLACES = ("", "verifier_metadata.", "metadata.", "extra_env_info.", "reward_model.")
GYM_PLACES += ("responses_create_params.metadata.",)
TOOL_KEYS = ("name", "description", "parameters")  # in the order of chat templates; `strict` is for the API alone
GSM8K_MARK = "\n#### "  # the answer follows the last one
ENVIRONMENTS = ("exact", "math", "code", "reward_model", "math_multi_reward")


class ProblemMaker:
    """Row number -> Problem, or None if a filter leaves the row out. Raises DataError with file and line for a
    malformed row, and ControlTokenInText for text that holds a control token. A prompt of more than `limit` tokens may
    have only its first ids."""

    def __init__(self, cfg: DatasetConfig, tokenizer: Tokenizer, limit: int, tasks: Mapping[str, str], source: Source):
        self.explicit_env = cfg.env_name  # also scores rows whose task_name is no environment
        self.cfg = cfg = with_preset(cfg)
        self.tokenizer = tokenizer
        self.limit = limit
        self.source = source
        self.system = self._read_prompt(cfg.system_prompt_file) if cfg.system_prompt_file else None
        self.prompt = split_prompt(cfg.prompt_file, self._read_prompt(cfg.prompt_file)) if cfg.prompt_file else None
        self.processor = import_attribute(cfg.processor, "processor") if cfg.processor else None
        # task_name of a row -> environment. A row may not name code of its choice: only the config does.
        self.env_names = {name: name for name in ENVIRONMENTS} | dict(tasks)
        self.env_names |= dict.fromkeys((None, cfg.set_name, cfg.env_name), cfg.env_name)

    def _read_prompt(self, name: str) -> str:
        text = read_text(name)
        for token in self.tokenizer.control_tokens(text):
            raise DataError(f"{name}: holds the control token {token!r}: the chat template writes those; take it out")
        return text

    def __call__(self, number: int) -> Problem | None:
        where, raw = self.source.where(number), self._row(number)
        if raw is None:
            return None
        messages, answer, tools = read_row(raw, where, self.cfg)
        task = raw.get("task_name")
        env_name = self.env_names.get(task, self.explicit_env) if isinstance(task, str | None) else None
        if env_name is None:
            known = ", ".join(ENVIRONMENTS)
            fix = "data.task_to_env, or env_name of the dataset"
            raise DataError(f"{where}: task_name {task!r:.80} is no environment; known: {known} ({fix})")
        if env_name in ("exact", "math", "math_multi_reward"):
            if answer is None:
                key = f"key '{self.cfg.output_key}'" if self.cfg.output_key else f"key of {', '.join(OUTPUT_KEYS)}"
                raise DataError(f"{where}: no {key}; {_keys_of(raw, 'output_key', OUTPUT_KEYS)}")
            if GSM8K_MARK in answer:
                answer = answer.rpartition(GSM8K_MARK)[2].strip() or answer
        messages = self._with_prompts(messages, where)
        try:
            ids = self.tokenizer.render(messages, tools, max_tokens=self.limit)
        except ControlTokenInText:
            raise
        except Exception as error:  # a template is a program; TypeError also: half a surrogate pair is not text
            cause = str(error) if isinstance(error, jinja2.TemplateError | DataError) else repr(error)
            raise DataError(f"{where}: the chat template refuses these messages ({cause:.300})") from error
        if not ids:
            raise DataError(f"{where}: the prompt is empty")
        multiplier = raw.get("loss_multiplier", 1)
        if not isinstance(multiplier, Real) or multiplier not in (0, 1):
            expected = "1 (trained on) or 0 (sampled and scored only)"
            raise DataError(f"{where}: loss_multiplier={multiplier!r:.80}: {expected}")
        return Problem(number, messages, answer or "", env_name, ids, raw, float(multiplier), self.cfg.set_name, tools)

    def _row(self, number: int) -> dict | None:
        """The row after the processor; None if the processor or min_reward leaves it out."""
        where, row = self.source.where(number), self.source.read(number)
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
        if self.processor:
            name = f"{where}: processor {self.cfg.processor}"
            row = call(name, self.processor, row)
            if not isinstance(row, dict | None):
                raise DataError(f"{name} gave {type(row).__name__}, not a row or None")
        if row is None or self.cfg.min_reward is None:
            return row
        reward = row.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or reward != reward:  # NaN is no number
            raise DataError(f"{where}: no number under 'reward', which min_reward={self.cfg.min_reward:g} asks for")
        return None if reward < self.cfg.min_reward else row

    def _with_prompts(self, messages: list[dict], where: str) -> list[dict]:
        """Puts the prompt file around the last user message, and the system prompt first if the row has none."""
        if self.prompt:
            users = [message for message in messages if message["role"] == "user"]
            if not users:
                raise DataError(f"{where}: no user message, which prompt_file={self.cfg.prompt_file} goes around")
            users[-1]["content"] = users[-1]["content"].join(self.prompt)  # what the file has before and after it
        if self.system and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages


def read_row(raw: dict, where: str, cfg: DatasetConfig) -> tuple[list[dict], str | None, list[dict] | None]:
    """(messages, answer or None, tools or None) of a row. Raises DataError, beginning with `where`, for a row in none
    of the forms."""
    params, tools = raw.get("responses_create_params"), raw.get("tools")
    output_keys = OUTPUT_KEYS
    if params is not None:
        messages, gym_tools = _gym_prompt(params, where)
        tools = gym_tools or tools
        output_keys = [place + name for place in GYM_PLACES for name in (*OUTPUT_KEYS, "label")]
    elif raw.get("messages") is not None:
        messages = raw["messages"]
    else:
        input_keys = (cfg.input_key,) if cfg.input_key else INPUT_KEYS
        problem = _first(raw, input_keys)
        if not isinstance(problem, (str, list)):
            names, keys = "' or '".join(input_keys), _keys_of(raw, "input_key", INPUT_KEYS)
            raise DataError(f"{where}: neither 'messages' nor text under '{names}'; {keys}")
        messages = [{"role": "user", "content": problem}] if isinstance(problem, str) else problem
    messages = _chat(messages, where)
    answer = _first(raw, (cfg.output_key,) if cfg.output_key else output_keys)
    if messages[-1].get("tool_calls"):
        raise DataError(f"{where}: the last message calls a tool: add the output of the call, or leave out the call")
    if messages[-1]["role"] == "assistant":
        if answer is not None:
            raise DataError(f"{where}: the last message is the assistant's, and there is an answer too: leave out one")
        answer = messages.pop()["content"]
    if not messages:
        raise DataError(f"{where}: no message before the assistant's")
    if not isinstance(answer, str | None):
        answer = to_json(answer, f"{where}: the answer", allow_nan=False)
    return messages, answer, _tools(tools, where)


def _keys_of(raw: dict, key: str, usual: Sequence[str]) -> str:
    """For an error message: the keys of a row, and the setting that names the key to read."""
    likely = next((name for name in usual if isinstance(raw.get(name), str)), "KEY")
    return f"keys: {', '.join(map(str, raw)):.200} (set {key} of this data set, such as data.train.{key}={likely})"


def to_json(value: Any, name: str, *, allow_nan: bool = True) -> str:
    """The value as JSON. Raises DataError, beginning with `name`, for a value that JSON lacks: rows of parquet files
    and of users' functions hold anything."""
    try:
        return json.dumps(value, allow_nan=allow_nan)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{name} is neither text nor JSON ({error})") from error


def split_prompt(name: str, text: str) -> tuple[str, str]:
    """The text of prompt file `name` before and after its {}. As in NeMo RL, {{ and }} stand for braces."""
    parts = [{"{{": "{", "}}": "}"}.get(part, part) for part in re.split(r"(\{\{|\}\}|\{\})", text)]
    count = parts.count("{}")
    if count != 1:
        raise DataError(f"{name}: needs exactly one {{}} where the input goes, has {count} ({{{{}}}} is not counted)")
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


def _chat(messages: Any, where: str) -> list[dict]:
    """The chat messages; a text in parts becomes one text."""
    problem = f"{where}: 'messages' must be a non-empty list of {{role, content}} with text in both"
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise DataError(problem)
    chat = []
    for message in messages:
        content = _joined(message.get("content"))
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise DataError(problem)
        chat.append(message | {"content": content})
    return chat


def _joined(content: Any) -> Any:
    """The text of a content in parts of text; any other content as it is."""
    parts = content if isinstance(content, list) else [None]
    is_text = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
    return "".join(part["text"] for part in parts) if is_text else content


def _gym_prompt(params: Any, where: str) -> tuple[list, list[dict]]:
    """(messages, tools) of a Responses API call as chat templates take them; a tool is nested."""
    items = params.get("input") if isinstance(params, dict) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise DataError(f"{where}: no text and no messages under responses_create_params.input")
    messages = _gym_messages(items, f"{where}: responses_create_params.input")
    if params.get("instructions"):
        messages = [{"role": "system", "content": params["instructions"]}, *messages]
    tools = []
    for tool in _tools(params.get("tools"), where) or ():
        if not tool.keys() & {"function", "name"}:
            raise DataError(f"{where}: a tool that is no function has no form in a chat template: {tool!r:.80}")
        function = {key: tool[key] for key in TOOL_KEYS if key in tool}
        tools.append(tool if "function" in tool else {"type": "function", "function": function})
    return messages, tools


def _gym_messages(items: list, where: str) -> list[dict]:
    """Items of a Responses API input -> chat messages, as NeMo Gym's responses_converter.py (07d6b0d) joins them:
    reasoning, texts and calls up to the next item of another role become one assistant message, with
    `reasoning_content` and `tool_calls`; the output of a call becomes a tool message, a developer the system."""
    messages: list[dict] = []
    for number, item in enumerate(items):
        place = f"{where}[{number}]"
        role, kind = (item.get("role"), item.get("type") or "message") if isinstance(item, dict) else (None, None)
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            continue
        if kind == "message" and role != "assistant":
            messages.append(item | {"role": "system" if role == "developer" else role})
            continue
        if kind not in ("message", "reasoning", "function_call"):
            raise DataError(f"{place}: {kind or item!r:.80} has no form in a chat: take it out, or the row")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        key, content = "content", item.get("content")
        if kind == "reasoning":
            key, content = "reasoning_content", item.get("summary") or content
        text = _joined(content or "")
        if not isinstance(text, str):
            raise DataError(f"{place}: expected text, or parts with text")
        message = messages[-1]
        if text:
            message[key] = message.get(key, "") + text
        if calls := [_tool_call(item, place)] if kind == "function_call" else item.get("tool_calls"):
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
    return messages


def _tool_call(item: dict, place: str) -> dict:
    """A function_call as transformers' templates take it: the arguments are an object, not text."""
    arguments = item.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = parse_json(arguments.encode("utf-8", "surrogatepass"), f"{place}: arguments", unique_keys=True)
    if not isinstance(arguments, dict) or not isinstance(item.get("name"), str):
        raise DataError(f"{place}: a function_call needs a name, and arguments that are a JSON object")
    return {"type": "function", "id": item.get("call_id"), "function": {"name": item["name"], "arguments": arguments}}


def _tools(tools: Any, where: str) -> list[dict] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: 'tools' must be a list of objects, not {tools!r:.80}")
    return tools or None
