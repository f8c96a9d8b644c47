"""Raw rows -> problems with prompt ids, an answer and an environment; datasets of them, split, repeated, fingerprinted.

Understood: text under a key, chat `messages` (a closing assistant message is the answer), and rollouts of NeMo Gym
(`responses_create_params`). A dataset is streamed once, and every row checked; what stays of a row is its number: it is
made again, tokens and all, when its turn comes. Sources are sources.py's, the order of rows mixing.py's.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2
import numpy as np

from config import DataError, DatasetConfig
from data import Problem
from dataset.sources import Source, open_source, with_known_keys
from envs import import_attribute
from hf.files import read_text
from hf.tokenizer import Tokenizer

INPUT_KEYS = ("input", "problem", "question", "prompt")
OUTPUT_KEYS = ("output", "expected_answer", "ground_truth", "answer")
GYM_PLACES = ("", "verifier_metadata.", "metadata.", "extra_env_info.", "reward_model.")
GYM_PLACES += ("responses_create_params.metadata.",)
GSM8K_ANSWER = re.compile(r".*\n#### ([^\n]+)\s*", re.DOTALL)
ENVIRONMENTS = ("exact", "math", "code", "reward_model")
PORTION = 256  # rows whose fields are in memory at once, of each environment
Check = Callable[[str, list[tuple[str, str, dict]]], None]  # env_name, (where, answer, fields) of rows


@dataclass(frozen=True, slots=True)
class Dataset:
    """The usable rows of a source, their fingerprint (checked on resume), how many prompts were too long, and how many
    rows a filter left out. `path` names the source, `name` the dataset."""

    path: str
    rows: Sequence[Problem]
    num_too_long: int
    fingerprint: str
    name: str = ""
    num_left_out: int = 0


class Problems(Sequence):
    """Rows made when asked for: `kept` are their numbers in the source, each of them there `repeat` times over."""

    def __init__(self, source: Source, make: Callable[[int, dict], Problem | None], kept: array, repeat: int):
        self.source, self.make, self.kept, self.repeat = source, make, kept, repeat

    def __len__(self) -> int:
        return len(self.kept) * self.repeat

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number = self.kept[index % len(self.kept)]
        row = self.make(number, self.source[number])
        if row is None:
            raise DataError(f"{self.source.where(number)}: processor left out a row that it gave before")
        return row


def load_dataset(
    cfg: DatasetConfig, tokenizer: Tokenizer, max_prompt_tokens: int, tasks: Mapping[str, str], check: Check
) -> tuple[Dataset, Dataset | None]:
    """The dataset of a section, and the part of it that split_validation_size takes out, if it does.

    Prompts longer than `max_prompt_tokens` are left out and counted: a cut prompt would ask another question. `tasks`:
    data.task_to_env. `check` gets the answers of each environment, in portions. Raises DataError with file and line for
    anything malformed, for an `id` that two rows share, and when no row is left.
    """
    maker = ProblemMaker(with_known_keys(cfg), tokenizer, tasks)
    source = open_source(maker.cfg)
    maker.source = source
    kept, ids, digest, portions = array("Q"), Ids(), hashlib.sha256(), {}
    num_too_long = num_left_out = 0
    for number, raw in source.scan():
        row = maker(number, raw)
        if row is None:
            num_left_out += 1
            continue
        ids.add(number, row.fields)
        if len(row.prompt_ids) > max_prompt_tokens:
            num_too_long += 1
            continue
        kept.append(number)
        content = [number, row.messages, row.answer, row.env_name, row.loss_multiplier, row.tools]
        digest.update(json.dumps(content).encode())
        portion = portions.setdefault(row.env_name, [])
        portion.append((source.where(number), row.answer, row.fields))
        if len(portion) == PORTION:
            check(row.env_name, portion)
            portion.clear()
    for env_name, portion in portions.items():
        check(env_name, portion)
    ids.check(source)
    digest.update(str(cfg.repeat).encode())
    if not kept:
        long = f"all {num_too_long} prompts are longer than {max_prompt_tokens} tokens" if num_too_long else ""
        left = f"{num_left_out} were left out by min_reward or processor" if num_left_out else ""
        raise DataError(f"{source.name}: no usable row: {' and '.join(filter(None, (long, left))) or 'it is empty'}")
    whole = Dataset(source.name, kept, num_too_long, digest.hexdigest(), cfg.set_name, num_left_out)
    parts = split(whole, cfg) if cfg.split_validation_size else (whole, None)
    return tuple(part and replace(part, rows=Problems(source, maker, part.rows, cfg.repeat)) for part in parts)


def split(whole: Dataset, cfg: DatasetConfig) -> tuple[Dataset, Dataset]:
    """(the rest, split_validation_size of the rows): which, is a function of `seed` and their number; both in order."""
    size, num_rows = cfg.split_validation_size, len(whole.rows)
    count = int(size) if size >= 1 else max(1, round(size * num_rows))
    if count >= num_rows:
        raise DataError(f"{whole.path}: split_validation_size={size:g} leaves none of {num_rows} rows to train on")
    order = np.random.Generator(np.random.PCG64([cfg.seed, num_rows])).permutation(num_rows)
    numbers = np.array(whole.rows, np.uint64)
    parts = []
    for which, indices in (("rest", order[count:]), ("part", order[:count])):
        fingerprint = hashlib.sha256(f"{whole.fingerprint} {which} {count} {cfg.seed}".encode()).hexdigest()
        rows = array("Q", numbers[np.sort(indices)].tobytes())
        parts.append(replace(whole, rows=rows, fingerprint=fingerprint))
    return parts[0], replace(parts[1], num_too_long=0, num_left_out=0)


class Ids:
    """Finds rows that share an `id`, in 16 bytes each. Rollouts, of which one task has many, are not looked at."""

    def __init__(self):
        self.numbers, self.hashes = array("Q"), array("Q")

    def add(self, number: int, fields: Mapping[str, Any]) -> None:
        if fields.get("id") is not None and "responses_create_params" not in fields:
            text = json.dumps(fields["id"], sort_keys=True, default=str)
            self.numbers.append(number)
            self.hashes.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))

    def check(self, source: Source) -> None:
        """DataError for the first id that comes again."""
        values, starts = np.unique(np.array(self.hashes, np.uint64), return_index=True)
        if len(values) < len(self.hashes):
            again = min(set(range(len(self.hashes))) - set(starts.tolist()))
            first = self.hashes.index(self.hashes[again])
            raise DataError(
                f"{source.where(self.numbers[again])}: the `id` of {source.where(self.numbers[first])}; give each row "
                "its own, or none"
            )


@dataclass(slots=True)
class ProblemMaker:
    """Raw row -> Problem, or None where a filter leaves it out: a function of the row and of the section `cfg`."""

    cfg: DatasetConfig
    tokenizer: Tokenizer
    tasks: Mapping[str, str]
    source: Source = field(init=False)
    system: str | None = field(init=False)
    prompt: tuple[str, str] | None = field(init=False)
    processor: Callable[[dict], dict | None] | None = field(init=False)

    def __post_init__(self):
        cfg = self.cfg
        self.system = read_text(cfg.system_prompt_file) if cfg.system_prompt_file else None
        self.prompt = read_prompt(cfg.prompt_file) if cfg.prompt_file else None
        self.processor = import_attribute(cfg.processor, "processor") if cfg.processor else None

    def __call__(self, number: int, raw: dict) -> Problem | None:
        where = self.source.where(number)
        if self.processor:
            raw = self._processed(raw, where)
        if raw is None or (self.cfg.min_reward is not None and self._reward(raw, where) < self.cfg.min_reward):
            return None
        messages, answer, tools = self._read(raw, where)
        env_name = self._env_name(raw, where)
        if env_name in ("exact", "math"):
            if answer is None:
                tried = f"key '{self.cfg.output_key}'" if self.cfg.output_key else f"key of {', '.join(OUTPUT_KEYS)}"
                raise DataError(f"{where}: no {tried}; keys: {_keys(raw)} (see output_key)")
            answer = GSM8K_ANSWER.sub(r"\1", answer)
        messages = self._with_prompts(messages, where)
        try:
            ids = self.tokenizer.render(messages, tools)
        except Exception as error:  # a template is a program; TypeError also: half a surrogate pair is not text
            said = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise DataError(f"{where}: the chat template refuses these messages ({said})") from error
        if not ids:
            raise DataError(f"{where}: the prompt is empty")
        multiplier = raw.get("loss_multiplier", 1)
        if multiplier not in (0, 1):
            raise DataError(f"{where}: loss_multiplier={multiplier!r}: 1 (trained on) or 0 (sampled and scored only)")
        return Problem(number, messages, answer or "", env_name, ids, raw, float(multiplier), self.cfg.set_name, tools)

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

    def _read(self, raw: dict, where: str) -> tuple[list[dict], str | None, list[dict] | None]:
        """(messages, answer or None, tools or None) of a row in any of the forms."""
        params, tools, names = raw.get("responses_create_params"), raw.get("tools"), OUTPUT_KEYS
        if params is not None:
            problem, tools = _gym_problem(params, where), _gym_tools(params) or tools
            names = [place + name for place in GYM_PLACES for name in (*OUTPUT_KEYS, "label")]
        elif raw.get("messages") is not None:
            problem = raw["messages"]
        else:
            tried = (self.cfg.input_key,) if self.cfg.input_key else INPUT_KEYS
            problem = next((found for name in tried if (found := _under(raw, name)) is not None), None)
            if not isinstance(problem, (str, list)):
                asked = "' or '".join(tried)
                keys = f"keys: {_keys(raw)} (see input_key)"
                raise DataError(f"{where}: neither 'messages' nor text under '{asked}'; {keys}")
        messages = [{"role": "user", "content": problem}] if isinstance(problem, str) else _chat(problem, where)
        tried = (self.cfg.output_key,) if self.cfg.output_key else names
        answer = next((found for name in tried if (found := _under(raw, name)) is not None), None)
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

    def _with_prompts(self, messages: list[dict], where: str) -> list[dict]:
        """The prompt file around the last user message; the system prompt in front, where the row has none."""
        if self.prompt:
            last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
            if last is None:
                raise DataError(f"{where}: no user message, which prompt_file={self.cfg.prompt_file} goes around")
            before, after = self.prompt
            text = f"{before}{messages[last]['content']}{after}"
            messages = [*messages[:last], messages[last] | {"content": text}, *messages[last + 1 :]]
        own = any(message["role"] == "system" for message in messages)
        return messages if own or not self.system else [{"role": "system", "content": self.system}, *messages]


def read_prompt(name: str) -> tuple[str, str]:
    """The text before and after the {} of a prompt file, in which {{ and }} stand for braces, as in NeMo RL's."""
    braces = {"{{": "{", "}}": "}"}
    parts = re.split(r"(\{\{|\}\}|\{\})", read_text(name))
    count = parts.count("{}")
    if count != 1:
        raise DataError(f"{name}: needs exactly one {{}} where the input goes, has {count} ({{{{}}}} is not counted)")
    place = parts.index("{}")
    return tuple("".join(braces.get(part, part) for part in half) for half in (parts[:place], parts[place + 1 :]))


def _keys(raw: dict) -> str:
    return ", ".join(map(str, raw))


def _under(raw: Any, key: str) -> Any:
    """raw["a.b"], else raw["a"]["b"]; None where there is nothing."""
    if not isinstance(raw, dict) or key in raw:
        return raw.get(key) if isinstance(raw, dict) else None
    first, dot, rest = key.partition(".")
    return _under(raw.get(first), rest) if dot else None


def _chat(messages: Any, where: str) -> list[dict]:
    """Chat messages as they are, but for texts in parts, which become one text."""
    problem = f"{where}: 'messages' must be a non-empty list of {{role, content}} with text in both"
    if not isinstance(messages, list) or not messages:
        raise DataError(problem)
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if content is None and isinstance(message, dict) and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise DataError(problem)
        found.append(message if content is message.get("content") else message | {"content": content})
    return found


def _gym_problem(params: Any, where: str) -> str | list[dict]:
    """Text or chat messages of the parameters of a Responses API call; a developer's message is a system message."""
    problem = params.get("input") if isinstance(params, dict) else None
    if not isinstance(problem, (str, list)):
        raise DataError(f"{where}: no text and no messages under responses_create_params.input")
    if isinstance(problem, str):
        problem = [{"role": "user", "content": problem}]
    if params.get("instructions"):
        problem = [{"role": "system", "content": params["instructions"]}, *problem]
    roles: Iterable[Any] = (message.get("role") if isinstance(message, dict) else None for message in problem)
    return [m | {"role": "system"} if r == "developer" else m for m, r in zip(problem, roles, strict=True)]


def _gym_tools(params: dict) -> list[dict]:
    """Tools as chat templates take them: those of the Responses API are not nested."""
    return [
        tool if "function" in tool else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in params.get("tools") or []
    ]
