"""The samples that a report shows: which are kept, their tokens with numbers, an agent's messages as a tree. No torch.

A sample is what samples.jsonl has of it (run/log.py), and in a dumped step also what the dump has
(run/dump.py). Whatever is not as they write it is left out: a folder may be damaged, and texts may be hostile.
"""

import json
import math
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from base.system.files import open_file, read_records
from config import ConfigError

T = TypeVar("T")
# What the page knows of the tokens of a reply: "lengths", by which it cuts the text, and some of COLUMNS.
Tokens = dict[str, np.ndarray]
MIN_FIRST = 8  # samples of a step and kind that are kept before others, so that groups stand whole
DUMPED = "train, dumped"  # kind of a sample that has the numbers of a dump
FORK = "train, dumped, fork"  # of a further sequence of an agent's rollout that was not logged
COLUMNS = ("sampler", "advantage", "gap", "entropy")  # sampler: its log-probability; gap: the trainer's minus that
FIELDS = """step kind env_name outcome finish_reason row_id index prompt reply expected reward unshaped_reward
advantage num_gen_tokens weight_version message""".split()


def read_lines(file: Path, notes: list[str], step: int | None = None) -> Iterator[dict]:
    """The records that a run wrote. `step` is the step of records that have none. What cannot be read is noted."""
    bad_lines: list[int] = []
    try:
        for _, record in read_records(file, bad_lines):
            if step is not None:
                record.setdefault("step", step)
            if "step" in record:
                yield record
    except ConfigError as error:
        notes.append(str(error))
    if bad_lines:
        places = ", ".join(map(str, evenly(bad_lines, 5)))
        notes.append(f"{file.name}: {len(bad_lines)} lines are not records, and left out: {places}")


def evenly(items: Sequence[T], limit: int) -> Sequence[T]:
    if len(items) <= limit:
        return items
    places = np.linspace(0, len(items) - 1, limit).astype(int)
    return [items[place] for place in places]


def for_json(value: Any) -> Any:
    """Floats with five digits. NaN and infinities, which the JSON of the page must not have, become words."""
    if isinstance(value, list):
        return [for_json(entry) for entry in value]
    if isinstance(value, dict):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    if isinstance(value, float):
        return json.dumps(value)
    return value


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**53


def number_or_0(value: Any) -> float:
    if is_number(value):
        return value
    return 0


# ------------------------------------------------------------------------------------------------------ which are kept


def read_samples(
    lines: Callable[[list[str]], Iterator[dict]], notes: list[str], limit: int, leave_out: Container[int] = ()
) -> tuple[list[dict], str]:
    """(samples to show, how many of all they are). Where not all have room: of each step and kind `most_telling`, of
    steps evenly spaced. lines: gives the records, and notes what cannot be read; it is called twice, to keep few texts
    in memory. leave_out: numbers of records, from 0."""
    total = 0
    groups: dict[tuple[int, str], None] = {}  # (step, kind), in the file's order
    for record in lines(notes):
        total += 1
        groups[record["step"], str(record.get("kind"))] = None
    have_room = total <= limit
    chosen = list(groups)
    if not have_room:
        chosen = evenly(chosen, max(1, limit // (MIN_FIRST + 3)))
    num_first = limit // max(1, len(chosen)) - 3
    kept: dict[tuple[int, str], list[dict]] = {group: [] for group in chosen}
    for line, record in enumerate(lines([])):
        group = record["step"], str(record.get("kind"))
        if group not in kept or line in leave_out:
            continue
        kept[group].append(as_sample(record) | {"line": line})
        if not have_room:
            kept[group] = most_telling(kept[group], num_first)
    samples = list(chain.from_iterable(kept.values()))[:limit]
    return samples, f"{len(samples):,} of {total:,} samples"


def most_telling(samples: list[dict], num_first: int) -> list[dict]:
    """The first samples, the last one, and the first of those with the lowest and the highest reward; each once, in
    order."""
    rewards = [number_or_0(sample["reward"]) for sample in samples]
    places = {*range(min(num_first, len(samples))), len(samples) - 1}
    places |= {rewards.index(min(rewards)), rewards.index(max(rewards))}
    return [samples[place] for place in sorted(places)]


def as_sample(record: dict) -> dict:
    """What the page shows of a line of samples.jsonl."""
    sample = {name: for_json(record.get(name)) for name in FIELDS}
    sample["rewards"] = parts_text(record.get("rewards"))
    sample["tree"] = tree_of(record.get("rows"))
    sample["tokens"] = {}
    tokens = tokens_of(record)
    if tokens and "".join(record["tokens"]) == record.get("reply"):
        sample["tokens"] = tokens
    return sample


def parts_text(rewards: Any) -> str:
    """The parts of a sample's reward by name: "answer 0.5, format 0.1"."""
    if not isinstance(rewards, dict):
        return ""
    return ", ".join(f"{name} {for_json(value)}" for name, value in rewards.items())


# ------------------------------------------------------------------------------------------------- tokens and numbers


def tokens_of(record: dict) -> Tokens:
    """The tokens of a reply, with the sampler's log-probabilities, and with advantages where each turn has its own."""
    texts = record.get("tokens")
    logps = record.get("sampler_logps")
    if not are_all(texts, str):
        return {}
    tokens = {"lengths": np.array([utf16_length(text) for text in texts], np.int32)}
    if not are_all(logps, (int, float, type(None))) or len(logps) != len(texts):
        return tokens
    tokens["sampler"] = np.array(logps, np.float32)  # None becomes NaN
    advantage = record.get("advantage")
    turn_tokens = record.get("turn_tokens")
    if are_all(advantage, (int, float, type(None))) and are_all(turn_tokens, int):
        tokens |= advantage_columns(advantage, turn_tokens, ~np.isnan(tokens["sampler"]))
    return tokens


def advantage_columns(advantage: list[float], turn_tokens: list[int], is_trained_T: np.ndarray) -> Tokens:
    """The advantage of each token: the trained ones belong to the turns in their order. Empty if the counts differ."""
    if len(advantage) != len(turn_tokens) or min(turn_tokens, default=0) < 0:
        return {}
    if sum(turn_tokens) != is_trained_T.sum():
        return {}
    advantage_T = np.full(len(is_trained_T), math.nan, np.float32)
    advantage_T[is_trained_T] = np.repeat(np.array(advantage, np.float32), turn_tokens)
    return {"advantage": advantage_T}


def are_all(values: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(values, list) and all(isinstance(value, kinds) for value in values)


def utf16_length(text: str) -> int:
    """As JavaScript counts."""
    if text.isascii():
        return len(text)
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


# -------------------------------------------------------------------------------------------------- an agent's messages


def tree_of(rows: Any) -> list[dict]:
    """The messages of a rollout, each once: parent (the place of the message before it; -1: none), role, text. Two
    sequences that begin alike part where they differ. A reply of the policy also has the numbers of its call; its text
    is what was sampled. In the order of the calls, so a history tells only of replies that are there."""
    nodes: list[dict] = []
    places: dict[tuple, int] = {}  # (parent, role, what it says) -> place; of equal replies the first

    def add(parent: int, message: dict) -> int:
        said = message_text(message)
        text = said
        if message.get("reasoning_content"):
            text = f"{message['reasoning_content']}\n\n{said}"
        role = str(message.get("role"))
        place = len(nodes)
        nodes.append({"parent": parent, "role": role, "text": text, "tokens": {}})
        places.setdefault((parent, role, said.strip()), place)
        return place

    def find_or_add(parent: int, message: dict) -> int:
        role = str(message.get("role"))
        said = message_text(message).strip()
        place = places.get((parent, role, said))
        if place is None:
            return add(parent, message)
        return place

    sequences = [entries_of(row, dict) for row in entries_of(rows, list)]
    sequences = [calls for calls in sequences if calls]
    for calls in sorted(sequences, key=lambda calls: number_or_0(calls[0].get("number"))):
        parent = -1
        for call in calls:
            for message in entries_of(call.get("messages"), dict):
                parent = find_or_add(parent, message)
            if isinstance(call.get("reply"), dict):
                parent = add(parent, call["reply"])
                add_call(nodes[parent], call)
    return nodes


def add_call(node: dict, call: dict) -> None:
    ids = call.get("ids")
    shown = ("number", "is_trained", "reward", "advantage")
    numbers = {name: for_json(call.get(name)) for name in shown}
    numbers["num_tokens"] = len(ids) if isinstance(ids, list) else 0
    node["call"] = numbers
    tokens = tokens_of(call)
    if tokens:
        node["tokens"] = tokens
        node["text"] = "".join(call["tokens"])


def entries_of(value: Any, kind: type) -> list:
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, kind)]


def message_text(message: dict) -> str:
    """What a message says, with the tools that it calls. A content of parts has one line for each."""
    content = message.get("content") or ""
    lines = [str(content)]
    if isinstance(content, list):
        lines = [str(part.get("text") or part) for part in entries_of(content, dict)]
    for call in entries_of(message.get("tool_calls"), dict):
        lines.append(f"-> {json.dumps(call.get('function'), ensure_ascii=False)}")
    return "\n".join(line for line in lines if line)


# --------------------------------------------------------------------------------------------------------------- dumps


def read_dump(folder: Path, logged: list[dict], notes: list[str], limit: int) -> list[dict]:
    """Gives the samples of `logged` the numbers that a dumped step has of their tokens. Returns other samples of the
    step, with such numbers."""
    columns_of_line: dict[int, Tokens] = {}
    try:
        step = int(folder.name.removeprefix("step_"))
        for file in sorted(folder.glob("rank_*.safetensors")):
            with open_file(file):  # no pipe, which would never end
                arrays = load_file(file)
            columns_of_line |= columns_of(arrays)
    except (ConfigError, SafetensorError, OSError, KeyError, ValueError) as error:
        notes.append(f"{folder}: cannot be read ({error!r:.200})")
        return []
    lines = partial(dump_lines, folder / "samples.jsonl", step)
    waiting: dict[tuple[str, str], dict] = {}
    for sample in logged:
        if sample["step"] == step and sample["kind"] == "train":
            waiting.setdefault(key_of(sample), sample)
    merged = set()
    sample = None  # whose sequences are read: forks come behind the first one
    for line, record in enumerate(lines([])):
        if not record.get("is_fork"):
            sample = waiting.pop(key_of(record), None)
        if sample is not None:
            merged.add(line)
            merge(sample, record, columns_of_line.get(line, {}))
    others, _ = read_samples(lines, notes, limit, leave_out=merged)
    for sample in others:
        add_columns(sample["tokens"], columns_of_line.get(sample["line"], {}))
        sample["line"] = f"{sample['line']} of the dump"
    return others


def key_of(record: dict) -> tuple[str, str]:
    """Of a sample in its step."""
    return str(record.get("row_id")), str(record.get("index"))


def dump_lines(file: Path, step: int, notes: list[str]) -> Iterator[dict]:
    """The sequences of a dump, with the fields that samples.jsonl has. There, `prompt` is a number."""
    for record in read_lines(file, notes, step):
        texts = record.get("tokens")
        if not are_all(texts, str):
            texts = []
        record["kind"] = FORK if record.get("is_fork") else DUMPED
        record["prompt"] = record.get("prompt_text")
        record["reply"] = "".join(texts)
        record["num_gen_tokens"] = len(texts) - number_or_0(record.get("num_env_tokens"))
        yield record


def columns_of(arrays: dict[str, np.ndarray]) -> dict[int, Tokens]:
    """Line of samples.jsonl -> numbers of its tokens, from the file of a rank. NaN: not trained."""
    columns_T = {
        "sampler": np.where(arrays["mask_T"], arrays["logp_T"], math.nan),
        "gap": arrays["trainer_logp_T"] - arrays["logp_T"],
        "entropy": arrays["entropy_T"],
    }
    ends = np.cumsum(arrays["num_tokens_S"])
    if len(ends) and ends[-1] != len(arrays["mask_T"]):
        raise ValueError(f"{len(arrays['mask_T'])} tokens in place of {ends[-1]}")
    columns_of_line = {}
    start = 0
    for line, end in zip(arrays["sample_S"].tolist(), ends, strict=True):
        columns_of_line[line] = {name: column_T[start:end] for name, column_T in columns_T.items()}
        start = end
    return columns_of_line


def merge(sample: dict, record: dict, columns: Tokens) -> None:
    """Gives a logged sample the numbers of its sequence in a dump, or the calls of the sequence theirs."""
    sample["kind"] = DUMPED
    if not columns:
        return
    if sample["tree"] and are_all(record.get("turns"), int) and are_all(record.get("turn_tokens"), int):
        merge_calls(sample["tree"], record["turns"], record["turn_tokens"], columns)
        return
    if not sample["tokens"] and record["reply"] == sample["reply"]:
        sample["tokens"] = tokens_of(record)  # a logged sample behind the first ones of its step
    add_columns(sample["tokens"], columns)


def merge_calls(tree: list[dict], turns: list[int], turn_tokens: list[int], columns: Tokens) -> None:
    """Gives the calls of an agent the numbers of their tokens. turns: number of the call; turn_tokens: its trained
    tokens."""
    node_of_call = {node["call"]["number"]: node for node in tree if "call" in node}
    is_trained_T = ~np.isnan(columns["sampler"])
    start = 0
    for number, num_tokens in zip(turns, turn_tokens, strict=False):
        end = start + num_tokens
        if number in node_of_call:
            of_call = {name: column_T[is_trained_T][start:end] for name, column_T in columns.items()}
            add_columns(node_of_call[number]["tokens"], of_call)
        start = end


def add_columns(tokens: Tokens, columns: Tokens) -> None:
    """Adds the numbers of a dump, if they are of as many tokens."""
    for name, column_T in columns.items():
        if len(column_T) == len(tokens.get("lengths", ())):
            tokens[name] = column_T
