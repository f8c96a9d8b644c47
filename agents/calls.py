"""What an agent asks: requests as clients send them, the tree of a rollout's calls, and the rows that are trained.

A sampled id is never encoded again. The prompt of a call that goes on from one of our replies is that reply's ids and
what the chat template writes after them. Knows no HTTP and no engine.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from config import shortened
from data import Sample, sample_seed
from hf.tokenizer import Tokenizer

CHARS_PER_TOKEN = 64  # no text has more of them
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refused(Exception):
    """A request that is not served: the sentence, HTTP's status and OpenAI's code."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.code = status, code


def read_message(message: dict) -> dict:
    """A message as chat templates take it: content a text, arguments an object. What clients add (audio, null) goes.
    Raises ValueError, and what else a message of another form may raise."""
    parts = message.get("content") or ""
    for part in parts if isinstance(parts, list) else ():
        if part["type"] not in ("text", "refusal"):
            raise ValueError(f"a part of type {part['type']!r:.80}: the policy reads text alone")
    text = parts if isinstance(parts, str) else "".join(part[part["type"]] for part in parts)
    read = {"role": ROLES[message["role"]], "content": text}
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"] + "", call["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:  # the client's own: the template writes the text as it is
            pass
        function = {"name": name, "arguments": arguments}
        read.setdefault("tool_calls", []).append({"id": call.get("id"), "type": "function", "function": function})
    return read | {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}


def _messages(messages: list[dict]) -> list[dict]:
    try:
        return [read_message(message) for message in messages]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        form = "expected {role, content} with a text or parts of text, and tool_calls of {function: {name, arguments}}"
        raise ValueError(f"{form} ({type(error).__name__}: {error!s:.200})") from error


def _tools(tools: list[dict]) -> list[dict]:
    for tool in tools:
        match tool.get("function"):
            case {"name": str(), **rest} if isinstance(rest.get("parameters"), dict | None):
                if isinstance(rest.get("description"), str | None):
                    continue
        raise ValueError(f"expected {{type: function, function: {{name, description, parameters}}}}: {shortened(tool)}")
    return tools


class Request(BaseModel):
    """The body of a request to chat/completions: what is served of it. The rest is in model_extra. train: of this
    program; false keeps the call out of all rows."""

    model_config = ConfigDict(strict=True, extra="allow")
    messages: Annotated[list[dict], Field(min_length=1), AfterValidator(_messages)]
    tools: Annotated[list[dict], AfterValidator(_tools)] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    stream_options: dict | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    functions: None = None
    return_token_ids: bool | None = None
    train: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def link_of(message: dict) -> list:
    """What must be equal for a message to be the same: texts and values, not how JSON writes them. Reasoning does not
    count, since few clients send it back."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"].strip(), calls, message.get("tool_call_id")]


def next_hash(before: bytes, link: Any) -> bytes:
    """Of all that came before, and the link."""
    return hashlib.sha256(before + json.dumps(link, sort_keys=True).encode()).digest()


@dataclass(slots=True, eq=False)
class Call:
    """A prompt and, once it has ended, the engine's Completion. parent: the call whose reply the prompt goes on from.
    digest: of all its messages. seed: of what was asked and how often, never of when."""

    parent: "Call | None"
    request: Request
    digest: bytes
    prompt_ids: list[int]
    seed: int
    completion: Any = None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.completion.ids.tolist()]


@dataclass(slots=True)
class Rollout:
    """What an agent has asked: a tree of calls. seed_key: as of a sample's seed. max_tokens: of a row."""

    seed_key: tuple[int, ...]
    max_tokens: int
    max_calls: int
    was_refused_for_room: bool = False
    calls: list[Call] = field(default_factory=list)  # under way, and ended
    by_hash: dict[bytes, Call] = field(default_factory=dict)  # of all messages up to a reply -> the reply

    def ask(self, request: Request, num_bytes: int, tokenizer: Tokenizer) -> list[Call]:
        """The n calls of a request of this size. What is known of its messages stays as it was sampled; the template
        writes the rest. Raises Refused, and DataError where the template refuses the messages."""
        number = request.n or 1
        if len(self.calls) + number > self.max_calls:
            raise Refused(f"max_calls={self.max_calls} of this agent are used up", 429, "rate_limit_exceeded")
        if num_bytes > 65536 + CHARS_PER_TOKEN * self.max_tokens:  # to encode 16 MiB would take 16 s
            raise self._no_room(f"{num_bytes:,} bytes")
        links = [request.tools or None, *map(link_of, request.messages)]
        hashes = list(accumulate(links, next_hash, initial=b""))[1:]  # of the tools, then up to each message
        known = [length for length, each in enumerate(hashes) if each in self.by_hash]
        parent = self.by_hash[hashes[known[-1]]] if known else None
        if parent:
            # What the template makes of the replies before is cut off; it may refuse to write their calls.
            plain = {length - 1: {"role": "assistant", "content": ""} for length in known}
            before = [plain.get(i, message) for i, message in enumerate(request.messages[: known[-1] - 1])]
            new, reply_ids = request.messages[known[-1] :], parent.completion.ids
            added = tokenizer.observation_ids(before, reply_ids, new, request.tools, max_tokens=self.max_tokens)
            prompt_ids = parent.ids + added
        else:
            prompt_ids = tokenizer.render(request.messages, request.tools, escape=True, max_tokens=self.max_tokens)
        if len(prompt_ids) >= self.max_tokens:
            raise self._no_room(f"{len(prompt_ids):,} tokens")
        used = {call.seed for call in self.calls if call.prompt_ids == prompt_ids}
        seeds = (sample_seed(*self.seed_key, *prompt_ids, time) for time in range(len(used) + number))
        asked = [Call(parent, request, hashes[-1], prompt_ids, seed) for seed in seeds if seed not in used][:number]
        self.calls += asked
        return asked

    def _no_room(self, after: str) -> Refused:
        self.was_refused_for_room = True
        limit = f"policy.max_total_sequence_length={self.max_tokens}"
        return Refused(f"{limit} leaves no room for a reply after {after}", 400, "context_length_exceeded")

    def add_reply(self, call: Call, message: dict, cut_at: str) -> None:
        """The reply can be gone on from: by the message as the client got it, or with the stop string put back."""
        for ending in {"", cut_at} if call.request.train is not False else ():
            reply = read_message(message | {"content": (message["content"] or "") + ending})
            digest = next_hash(call.digest, link_of(reply))
            self.by_hash[digest] = min(call, self.by_hash.get(digest, call), key=lambda each: each.seed)

    def forget(self, calls: Sequence[Call]) -> None:
        """The client never had the replies: if it asks again, it gets the same ones."""
        self.calls = [call for call in self.calls if call not in calls]
        self.by_hash = {digest: call for digest, call in self.by_hash.items() if call not in calls}

    def rows(self) -> list[list[Call]]:
        """Each reply in one row: the first call that goes on from another lengthens its row, any other starts one. The
        row with most sampled ids comes first. Prompts and seeds give the order, never the time of a call."""
        ended = [call for call in self.calls if call.completion is not None and call.request.train is not False]
        rows: dict[Call | None, list[Call]] = {}
        for call in sorted(ended, key=lambda call: (len(call.prompt_ids), call.seed)):
            rows[call] = [*rows.pop(call.parent, []), call]
        return sorted(rows.values(), key=lambda row: -sum(len(call.completion.ids) for call in row))


def fill(sample: Sample, row: Sequence[Call], is_trained: bool) -> None:
    """Gives the sample the tokens of a row: replies (mask True if the problem is trained on) and what was between them
    (mask False, log-probability 0, the version of the reply before)."""
    pieces: list[tuple] = []
    for before, call in zip([None, *row], row, strict=False):
        if before:
            assert call.prompt_ids[: len(before.ids)] == before.ids, "a prompt that goes on from a reply has its ids"
            context = call.prompt_ids[len(before.ids) :]
            pieces.append((context, [0.0] * len(context), [before.completion.versions[-1]] * len(context), False))
            sample.num_env_tokens += len(context)
        pieces.append((call.completion.ids, call.completion.logps, call.completion.versions, is_trained))
    ids, logps, versions, _ = zip(*pieces, strict=True)
    sample.prompt_ids = row[0].prompt_ids
    sample.output_ids = np.concatenate(ids).astype(np.int32)
    sample.sampler_logps = np.concatenate(logps).astype(np.float32)
    sample.versions = np.concatenate(versions).astype(np.int32)
    sample.mask = np.concatenate([np.full(len(part), is_sampled) for part, *_, is_sampled in pieces])
    sample.count_tokens()
