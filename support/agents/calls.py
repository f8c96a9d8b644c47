"""What an agent asks: requests as clients send them, the tree of a rollout's calls, and the rows that are trained.

A sampled id is never encoded again. The prompt of a call that goes on from one of our replies is that reply's ids and
what the chat template writes after them. Knows no HTTP and no engine.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from config import shortened
from data import Sample, sample_seed
from support.inputs.tokenizer import Tokenizer

CHARS_PER_TOKEN = 64  # no text has more of them
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Count = Annotated[int, Field(ge=1)] | None
Text = Annotated[str, Field(min_length=1)]


class Refused(Exception):
    """A request that is not served: the sentence, HTTP's status and OpenAI's code."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.code = status, code
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def read_message(message: dict) -> dict:
    """A message as chat templates take it: content a text, arguments an object. What clients add (audio, null) goes.
    Raises ValueError, and what else a message of another form may raise."""
    parts = message.get("content") or ""
    for part in parts if isinstance(parts, list) else ():
        if part["type"] not in ("text", "refusal"):
            raise ValueError(f"a part of type {part['type']!r:.80}: the policy reads only text")
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


def _tool(tool: dict) -> dict:
    match tool:
        case {"function": {"name": str(), **rest}} if isinstance(rest.get("description"), str | None):
            if isinstance(rest.get("parameters"), dict | None):
                return tool
    raise ValueError(f"expected {{type: function, function: {{name, description, parameters}}}}: {shortened(tool)}")


class Request(BaseModel):
    """The body of a request to chat/completions: what is served of it. The rest is in model_extra. train: of this
    program; false keeps the call out of all rows."""

    model_config = ConfigDict(strict=True, extra="allow")
    messages: Annotated[list[dict], Field(min_length=1), AfterValidator(_messages)]
    tools: list[Annotated[dict, AfterValidator(_tool)]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict | None = None
    n: Count = None
    max_tokens: Count = None
    max_completion_tokens: Count = None
    stop: Annotated[list[Text], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] | None = None
    stream: bool | None = None
    stream_options: dict | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    functions: None = None
    return_token_ids: bool | None = None
    train: bool | None = None


def digest(value: Any) -> bytes:
    """Equal where the values are, however JSON writes them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def link_of(message: dict) -> bytes:
    """Of what must be equal for a message to be the same. Reasoning does not count: few clients send it back."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return digest([message["role"], message["content"].strip(), calls, message.get("tool_call_id")])


@dataclass(slots=True, eq=False)
class Call:
    """A prompt and, once it has ended, the engine's Completion. parent: the call whose reply the prompt goes on from.
    ask: number of the request. links: digests of its tools and messages. seed: of what was asked and how often, never
    of when. reply_links: of the forms in which an agent may send the reply back."""

    parent: "Call | None"
    ask: int
    request: Request
    links: list[bytes]
    prompt_ids: list[int]
    seed: int
    completion: Any = None
    reply_links: set[bytes] = field(default_factory=set)

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.completion.ids.tolist()]

    def add_reply(self, message: dict, cut_at: str) -> None:
        """The reply can be gone on from: by the message as the client got it, or with the stop string put back."""
        for ending in {"", cut_at} if self.request.train is not False else ():
            self.reply_links.add(link_of(read_message(message | {"content": (message["content"] or "") + ending})))


@dataclass(slots=True)
class Rollout:
    """What an agent has asked: a tree of calls. seed_key: as of a sample's seed. max_tokens: of a row. options,
    priority: as Engine.start takes them."""

    seed_key: tuple[int, ...]
    max_tokens: int
    max_calls: int
    options: Any = None
    priority: int = -1
    was_refused_for_room: bool = False
    calls: list[Call] = field(default_factory=list)  # under way, and ended

    def ask(self, number: int, request: Request, num_bytes: int, tokenizer: Tokenizer) -> list[Call]:
        """The n calls of a request of this size. What is known of its messages stays as it was sampled; the template
        writes the rest. Raises Refused, and DataError where the template refuses the messages."""
        num_calls = request.n or 1
        if len(self.calls) + num_calls > self.max_calls:
            raise Refused(f"this agent has used up max_calls={self.max_calls}", 429, "rate_limit_exceeded")
        if num_bytes > 65536 + CHARS_PER_TOKEN * self.max_tokens:  # to encode 16 MiB would take 16 s
            raise self._no_room(f"{num_bytes:,} bytes")
        messages, tools, limit = request.messages, request.tools, self.max_tokens
        links = [digest(tools or None), *map(link_of, messages)]
        known = [
            c for c in self.calls if c.links == links[: (n := len(c.links))] and c.reply_links & {*links[n : n + 1]}
        ]
        parent = max(known, key=lambda call: (len(call.links), -call.seed), default=None)
        if parent:
            # What the template makes of the replies before is cut off; it may refuse to write their calls.
            plain = {len(call.links) - 1: {"role": "assistant", "content": ""} for call in known}
            size, reply_ids = len(parent.links), parent.completion.ids
            before = [plain.get(i, message) for i, message in enumerate(messages[: size - 1])]
            added = tokenizer.observation_ids(before, reply_ids, messages[size:], tools, max_tokens=limit)
            prompt_ids = parent.ids + added
        else:
            prompt_ids = tokenizer.render(messages, tools, escape=True, max_tokens=limit)
        if len(prompt_ids) >= limit:
            raise self._no_room(f"{len(prompt_ids):,} tokens")
        used = {call.seed for call in self.calls if call.prompt_ids == prompt_ids}
        seeds = [sample_seed(*self.seed_key, *prompt_ids, time) for time in range(len(used) + num_calls)]
        free = [seed for seed in seeds if seed not in used][:num_calls]
        asked = [Call(parent, number, request, links, prompt_ids, seed) for seed in free]
        self.calls += asked
        return asked

    def _no_room(self, after: str) -> Refused:
        self.was_refused_for_room = True
        limit = f"policy.max_total_sequence_length={self.max_tokens}"
        return Refused(f"{limit} leaves no room for a reply after {after}", 400, "context_length_exceeded")

    def forget(self, number: int) -> None:
        """The client never had the replies to this request: if it asks again, it gets the same ones."""
        self.calls = [call for call in self.calls if call.ask != number]

    def rows(self) -> list[list[Call]]:
        """Each reply in one row: the first call that goes on from another lengthens its row, any other starts one. The
        row with most sampled ids comes first. Prompts and seeds give the order, never the time of a call."""
        ended = [call for call in self.calls if call.completion is not None and call.request.train is not False]
        rows: dict[Call | None, list[Call]] = {}
        for call in sorted(ended, key=lambda call: (len(call.prompt_ids), call.seed)):
            rows[call] = [*rows.pop(call.parent, []), call]
        return sorted(rows.values(), key=lambda row: -sum(len(call.completion.ids) for call in row))


def fill(sample: Sample, row: Sequence[Call], is_trained: bool) -> None:
    """Gives the sample the tokens of a row: its replies, and what was between them."""
    sample.prompt_ids = row[0].prompt_ids
    for call in row:
        assert call.prompt_ids[: sample.num_tokens] == sample.token_ids, "it goes on from the ids before"
        sample.add_context(call.prompt_ids[sample.num_tokens :])
        sample.add_reply(call.completion, is_trained)
