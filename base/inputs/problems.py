"""A raw row -> a problem with prompt ids, an answer and an environment.

A row has text under a key, or chat `messages` (a closing assistant message is the answer). A `processor` makes one of
these of any other form: examples/nemo_gym/rows.py.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from base.hf.tokenizer import ControlTokenInText, Tokenizer
from base.inputs.chats import read_messages
from base.inputs.sources import Source, with_preset
from base.system.files import Json, read_text
from base.system.users_code import describe
from config import ENVIRONMENTS, DataError, DatasetConfig, shortened
from records import Problem

INPUT_KEYS = ("input", "problem", "question", "prompt")
OUTPUT_KEYS = ("output", "expected_answer", "ground_truth", "answer")
GSM8K_MARK = "\n#### "  # the answer follows the last one


class ProblemMaker:
    """Row number -> Problem, or why the row is left out. DataError names file and line of a malformed row."""

    def __init__(self, cfg: DatasetConfig, tokenizer: Tokenizer, limit: int, tasks: Mapping[str, str], source: Source):
        self.explicit_env = cfg.env_name  # also scores rows whose task_name is no environment
        self.cfg = with_preset(cfg)
        self.tokenizer = tokenizer
        self.limit = limit
        self.source = source
        self.system: str | None = None
        if self.cfg.system_prompt_file:
            self.system = read_text(self.cfg.system_prompt_file)
        self.prompt: tuple[str, str] | None = None
        if self.cfg.prompt_file:
            self.prompt = split_prompt(self.cfg.prompt_file)
        self.processor: Callable[[Json], dict | None] | None = None
        if self.cfg.processor:
            from base.system.imports import import_attribute

            self.processor = import_attribute(self.cfg.processor, "processor")
        # task_name of a row -> environment. A row may not name arbitrary code: only the config does.
        # The name of a data set, or of its file, decides nothing.
        self.env_names = {self.cfg.env_name: self.cfg.env_name} | {name: name for name in ENVIRONMENTS} | dict(tasks)
        self.env_names[None] = self.cfg.env_name

    def __call__(self, number: int) -> Problem | str:
        where = self.source.where(number)
        row = self.source.read(number)
        try:
            return self._problem(number, row)
        except ControlTokenInText as error:
            return str(error)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:  # a processor is a program, and a row may hold anything
            raise DataError(f"{where}: {describe(error)} (the forms of a row: docs/tasks.md)") from error

    def _problem(self, number: int, raw: Json) -> Problem | str:
        if self.processor is not None:
            raw = self.processor(raw)
        if raw is None:
            return "by processor"
        if not isinstance(raw, dict):
            raise DataError(f"expected an object, got {type(raw).__name__}")
        messages, value, tools = read_row(raw, self.cfg)
        env_name = self._env_name(raw.get("task_name"))
        if env_name in ("exact", "math", "math_multi_reward"):
            answer = self._compared_answer(raw, value)
        else:
            answer = _as_text(value)
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

    def _env_name(self, task: Json) -> str:
        env_name = self.env_names.get(task, self.explicit_env)
        if env_name is None:
            fix = f"use {', '.join(ENVIRONMENTS)}, or set data.task_to_env or env_name of this data set"
            raise DataError(f"task_name {task!r:.80} is not an environment: {fix}")
        return env_name

    def _compared_answer(self, raw: dict, value: Json) -> str:
        """The answer of an environment that compares it with the reply."""
        if value is None:
            raise no_key(raw, "output_key", (self.cfg.output_key,) if self.cfg.output_key else OUTPUT_KEYS)
        answer = _as_text(value)
        if isinstance(value, list | dict | bool):
            raise DataError(f"the answer {shortened(value)} is neither text nor number: no reply can equal it")
        _, mark, final = answer.rpartition(GSM8K_MARK)
        if mark and final.strip():
            return final.strip()
        return answer

    def _with_prompts(self, messages: list[dict]) -> list[dict]:
        """Puts the prompt file around the last user message, and the system prompt first if the row has none."""
        if self.prompt is not None:
            users = [message for message in messages if message["role"] == "user"]
            if not users:
                raise DataError(f"no user message to put prompt_file={self.cfg.prompt_file} around")
            last = users[-1]
            before, after = self.prompt
            last["content"] = before + last["content"] + after
        if self.system and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages


def _as_text(value: Json) -> str | None:
    if isinstance(value, str | None):
        return value
    return json.dumps(value, allow_nan=False)


def read_row(raw: dict, cfg: DatasetConfig) -> tuple[list[dict], Json, list[dict] | None]:
    """(messages, answer as read or None, tools or None) of a row. DataError for a row in none of the forms."""
    input_keys = (cfg.input_key,) if cfg.input_key else ("messages", *INPUT_KEYS)
    output_keys = (cfg.output_key,) if cfg.output_key else OUTPUT_KEYS
    given = _first(raw, input_keys)
    if given is None:
        raise no_key(raw, "input_key", input_keys)
    messages = read_messages(given)
    answer = _first(raw, output_keys)
    has_reply = messages[-1]["role"] == "assistant"
    if cfg.output_key and not has_reply and not _under(raw, cfg.output_key):
        raise no_key(raw, "output_key", output_keys)
    if has_reply:
        if answer is not None or messages[-1].get("tool_calls"):
            raise DataError(
                "the assistant's last message counts as the answer: remove it, or its tool_calls and the answer field"
            )
        answer = messages.pop()["content"]
    if not messages:
        raise DataError("no message before the assistant's")
    tools = raw.get("tools")
    if tools:
        from base.inputs.tool_calls import read_tools  # rows without tools do without

        tools = read_tools(tools)
    return messages, answer, tools or None


def no_key(raw: dict, setting: str, names: Sequence[str]) -> DataError:
    """The error for a row that has none of the keys `names`."""
    problem = f"there is no {names[0]!r}" if len(names) == 1 else f"there is none of {', '.join(names)}"
    has = f"{', '.join(map(str, raw)):.200}"
    return DataError(f"{problem} in the row, which has {has}: set {setting} of this data set")


def split_prompt(name: str) -> tuple[str, str]:
    """The text of prompt file `name` before and after its {}. As in NeMo RL, {{ and }} stand for braces."""
    parts = re.split(r"(\{\{|\}\}|\{\})", read_text(name))
    if parts.count("{}") != 1:
        raise DataError(f"{name}: needs exactly one {{}} where the input goes ({{{{}}}} is not counted)")
    braces = {"{{": "{", "}}": "}"}
    texts = [braces.get(part, part) for part in parts]
    place = texts.index("{}")
    return "".join(texts[:place]), "".join(texts[place + 1 :])


def _first(raw: dict, keys: Sequence[str]) -> Json:
    """The value of the first key that has one, else None."""
    for key in keys:
        for value in _under(raw, key):
            if value is not None:
                return value
    return None


def _under(raw: Json, key: str) -> list[Json]:
    """The value of raw["a.b"], else of raw["a"]["b"], which may be null; [] where there is none."""
    if not isinstance(raw, dict):
        return []
    if key in raw:
        return [raw[key]]
    first, dot, rest = key.partition(".")
    if not dot:
        return []
    return _under(raw.get(first), rest)
