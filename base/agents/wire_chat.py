"""The wire of OpenAI's chat completions, and what it shares with the others: the request that the calls see, replies,
refusals. No wire knows tokens, HTTP or the engine.
"""

import hashlib
import json
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from config import shortened

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # kind -> its key
MESSAGE_FORM = "expected {role, content} with a text or parts of text, and tool_calls of {function: {name, arguments}}"
CALL_ID_LETTERS = string.ascii_letters + string.digits
MAX_DEPTH = 100  # of arguments; templates, digests and JSON's writers follow them with a call for each bracket
TOOL_FORM = "expected {type: function, function: {name, description, parameters}}"
Count = Annotated[int, Field(ge=1)] | None
NumReplies = Annotated[int, Field(ge=1, le=1024)] | None  # each takes a seed and a request of the engine at once
# vLLM is told of none: between two steps, a reply's end is compared with each.
StopStrings = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=16)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)] | None


class Refused(Exception):
    """A request that is not served: the sentence, HTTP's status and OpenAI's code."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status = status
        self.code = code
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}


# ------------------------------------------------------------------------------------------------------------ requests


def read_message(message: dict) -> dict:
    """A message as chat templates take it: content a text, or null where the message only calls tools; arguments an
    object. What clients add (audio, null) goes. Raises ValueError, and what else a message of another form may raise.
    """
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"role {role!r:.80}: served are {', '.join(ROLES)}")
    given = message.get("content")
    content, thoughts = _read_content(given or "")
    read = {"role": ROLES[role], "content": content}
    if thoughts:
        read["reasoning_content"] = thoughts
    calls = [_read_call(call) for call in message.get("tool_calls") or ()]
    if calls:
        read["tool_calls"] = calls
        if not content and not isinstance(given, str):
            read["content"] = None
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key):
            read[key] = message[key]
    return read


def _read_content(content: str | list[dict]) -> tuple[str, str]:
    """(text, thoughts) of a message's content, or of its parts."""
    if isinstance(content, str):
        return content, ""
    texts = []
    thoughts = []
    for part in content:
        kind = part["type"]
        if kind == "thinking":
            thoughts.append(part["thinking"])
        elif kind in TEXT_PARTS:
            texts.append(part[TEXT_PARTS[kind]])
        else:
            raise ValueError(f"a part of type {kind!r:.80}: the policy reads only text")
    return "".join(texts), "".join(thoughts)


def _read_call(call: dict) -> dict:
    name = call["function"]["name"]
    if not isinstance(name, str):
        raise TypeError(f"the name of a function is {shortened(name)}")
    arguments = call["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is None:
        return read
    return {"id": call["id"]} | read


def read_arguments(text: str) -> Any:
    """What the JSON says. Where it is none, says what no tokenizer can encode, or has too many brackets in brackets for
    those who read it again, the template gets the text as it is."""
    try:
        arguments = json.loads(text)
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    if _is_deeper(arguments, MAX_DEPTH):
        return text
    return arguments


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether it has more than `depth` objects and lists in one another."""
    level = [value]
    for _ in range(depth):
        level = [entry for part in level for entry in _entries(part)]
    return any(isinstance(part, dict | list) for part in level)


def _entries(value: Any) -> list:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list):
        return value
    return []


@contextmanager
def expecting(form: str) -> Iterator[None]:
    """In this block a part of a request is read. ValueError, as pydantic's validators raise it, for another form."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{form} ({type(error).__name__}: {error!s:.200})") from error


def _read_messages(messages: list[dict]) -> list[dict]:
    with expecting(MESSAGE_FORM):
        return [read_message(message) for message in messages]


def _check_tool(tool: dict) -> dict:
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        has_text = isinstance(function.get("description"), str | None)
        if has_text and isinstance(function.get("parameters"), dict | None):
            return tool
    raise ValueError(f"{TOOL_FORM}: {shortened(tool)}")


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _as_limit(count: Any) -> Any:
    return None if count == -1 else count  # how vLLM's clients write "no limit"


class Body(BaseModel):
    """The body of a request: what is served of it, here over every wire. The rest is in model_extra. train: of this
    program; false keeps the call out of all rows."""

    model_config = ConfigDict(strict=True, extra="allow")
    stream: bool | None = None
    chat_template_kwargs: dict | None = None
    train: bool | None = None

    def shared(self) -> dict:
        """What every wire has."""
        return self.model_dump(include={*Body.model_fields})


class Request(Body):
    """Of chat completions, and what the calls see of a request over any wire."""

    messages: Annotated[list[dict], Field(min_length=1), AfterValidator(_read_messages)]
    tools: list[Annotated[dict, AfterValidator(_check_tool)]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict | None = None
    n: NumReplies = None
    max_tokens: Annotated[Count, BeforeValidator(_as_limit)] = None
    max_completion_tokens: Annotated[Count, BeforeValidator(_as_limit)] = None
    stop: Annotated[StopStrings, BeforeValidator(_as_list)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    stream_options: dict | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs = None
    response_format: dict | None = None
    modalities: list[Literal["text"]] | None = None
    functions: None = None
    continue_final_message: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _ends_with_what_goes_on(self) -> Self:
        last = self.messages[-1]
        if self.continue_final_message and (last["role"] != "assistant" or "tool_calls" in last):
            raise ValueError("a reply can only go on with an assistant's text at the end of the messages")
        return self

    @property
    def callable_tools(self) -> list[dict] | None:
        """The tools that a reply may call."""
        return self.tools if self.tool_choice != "none" else None

    @property
    def opening(self) -> str:
        """The text at the end of the prompt with which the reply goes on."""
        return self.messages[-1]["content"] if self.continue_final_message else ""


class Sampling(BaseModel):
    """How a client wants its replies drawn. In a run the config decides that, but not where a model is only served."""

    model_config = ConfigDict(strict=True)
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None

    @classmethod
    def asked_by(cls, request: Request) -> dict[str, float]:
        """What is asked of these, by name. Raises Refused."""
        sampling = read_body(cls, request.model_extra or {}, renamed={})
        asked = sampling.model_dump(exclude_none=True)
        if asked.get("top_k") == -1:  # how vLLM's clients write "no limit"
            asked["top_k"] = None
        return asked


def read_body(model: type[BaseModel], body: bytes | dict, renamed: dict[str, str]) -> BaseModel:
    """The body of a request. renamed: what this wire calls keys of the model. Raises Refused."""
    try:
        if isinstance(body, bytes):
            return model.model_validate_json(body)
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        [name, *rest] = first["loc"] or ["body"]
        place = ".".join(str(part) for part in (renamed.get(name, name), *rest))
        raise Refused(f"{place}: {first['msg']}") from error


def digest(value: Any) -> bytes:
    """Equal where the values are, however JSON writes them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def link_of(message: dict) -> bytes:
    """Of what must be equal for a message to be the same. Reasoning does not count: few clients send it back."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content = message["content"] or ""
    return digest([message["role"], content.strip(), calls, message.get("tool_call_id")])


# ------------------------------------------------------------------------------------------------------------- replies


class Token(NamedTuple):
    """A token, as logprobs tell it."""

    text: str
    logp: float

    @property
    def object(self) -> dict:
        return {"token": self.text, "logprob": self.logp, "bytes": list(self.text.encode())}


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled reply. seed: of its call. tool_calls: {name, arguments in JSON} of each. stop_string: of the request,
    at which the reply ended. ids: of its tokens. tokens, likeliest: where the request asks for logprobs, each token and
    the likeliest ones at its place."""

    seed: int
    reasoning: str | None
    content: str | None
    tool_calls: list[dict]
    finish_reason: str
    stop_string: str | None
    ids: list[int]
    tokens: list[Token]
    likeliest: list[list[Token]]

    @property
    def calls(self) -> list[dict]:
        """The tool calls with their ids."""
        return [
            {"type": "function", "id": _call_id(self.seed, number), "index": number, "function": call}
            for number, call in enumerate(self.tool_calls)
        ]

    @property
    def message(self) -> dict:
        """The assistant's message, as the client gets it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.calls
        return message

    @property
    def logprobs(self) -> list[dict]:
        """Of each token, as chat completions and responses have them."""
        entries = []
        for number, token in enumerate(self.tokens):
            likeliest = [other.object for other in self.likeliest[number]] if self.likeliest else []
            entries.append(token.object | {"top_logprobs": likeliest})
        return entries


def _call_id(seed: int, number: int) -> str:
    """Of a tool call: nine letters and digits, which is what Mistral's templates take."""
    value = int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")
    letters = []
    for _ in range(9):
        value, letter = divmod(value, len(CALL_ID_LETTERS))
        letters.append(CALL_ID_LETTERS[letter])
    return "".join(letters)


class Delta(NamedTuple):
    """More text of a reply that has not ended. seed: of the last call of the request. index: of the reply."""

    seed: int
    num_prompt_tokens: int
    index: int
    text: str


class Answer(NamedTuple):
    """The replies to a request, which have ended."""

    prompt_ids: list[int]
    replies: list[Reply]

    @property
    def seed(self) -> int:
        return self.replies[-1].seed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_new_tokens(self) -> int:
        return sum(len(reply.ids) for reply in self.replies)


News = Delta | Answer | Refused  # of a request
Conversations = dict[str, list[dict]]  # of a rollout: the messages up to a reply, by its id


class Wire(Protocol):
    """A request as one of the protocols has it. body: as it came; request: what the calls see of it. other_tools: that
    are never called. The methods write the answer: as one body, or as the events of a stream."""

    body: Body
    request: Request
    other_tools: list[dict]

    def __init__(self, body: bytes, conversations: Conversations): ...

    @property
    def not_enforced(self) -> dict:
        """What the client asks for by keys that may have no effect."""
        request = self.request
        typed = {"tool_choice": request.tool_choice, "response_format": request.response_format}
        return self.body.model_extra | typed | {"tools": self.other_tools or None}

    @staticmethod
    def failure(refused: Refused) -> dict:
        return refused.body

    def reply(self, answer: Answer) -> dict: ...

    def stream_delta(self, delta: Delta) -> str: ...

    def stream_end(self, answer: Answer) -> str: ...

    def stream_failure(self, refused: Refused) -> str: ...


class Chat(Wire):
    """A request over this wire."""

    def __init__(self, body: bytes, _: Conversations):
        self.body = self.request = read_body(Request, body, renamed={})
        self.other_tools = []
        self.sent: dict[int, str] = {}  # what a stream has told of each reply

    def reply(self, answer: Answer) -> dict:
        """The object `chat.completion`."""
        body = self._head("chat.completion", answer)
        body["choices"] = [self._choice(index, reply) for index, reply in enumerate(answer.replies)]
        body["usage"] = _usage(answer)
        return body

    def _head(self, kind: str, answer: Answer | Delta) -> dict:
        head = {"id": f"chatcmpl-{answer.seed:012x}", "object": kind, "created": int(time.time()), "model": "policy"}
        if self.request.return_token_ids and isinstance(answer, Answer):
            head["prompt_token_ids"] = answer.prompt_ids
        return head

    def _choice(self, index: int, reply: Reply) -> dict:
        end = reply.finish_reason
        if reply.tool_calls and end == "stop":
            end = "tool_calls"
        choice = {"index": index, "message": reply.message, "finish_reason": end, "logprobs": None}
        if self.request.logprobs:
            choice["logprobs"] = {"content": reply.logprobs, "refusal": None}
        if self.request.return_token_ids:
            choice["token_ids"] = reply.ids
        return choice

    def stream_delta(self, delta: Delta) -> str:
        message = {"content": delta.text}
        if delta.index not in self.sent:
            message["role"] = "assistant"
        self.sent[delta.index] = self.sent.get(delta.index, "") + delta.text
        choice = {"index": delta.index, "delta": message, "finish_reason": None, "logprobs": None}
        return _event(self._head("chat.completion.chunk", delta) | {"choices": [choice]})

    def stream_end(self, answer: Answer) -> str:
        """What has not been told yet, and the usage if the client wants it."""
        head = self._head("chat.completion.chunk", answer)
        choices = []
        for index, reply in enumerate(answer.replies):
            choice = self._choice(index, reply)
            message = choice.pop("message")
            if index in self.sent:
                del message["role"]
                message["content"] = message["content"][len(self.sent[index]) :]
            choices.append(choice | {"delta": message})
        events = [_event(head | {"choices": choices})]
        if self.request.stream_options and self.request.stream_options.get("include_usage"):
            events.append(_event(head | {"choices": [], "usage": _usage(answer)}))
        return "".join(events) + "data: [DONE]\n\n"

    def stream_failure(self, refused: Refused) -> str:
        return _event(refused.body) + "data: [DONE]\n\n"


def _usage(answer: Answer) -> dict:
    num_prompt = answer.num_prompt_tokens
    num_new = answer.num_new_tokens
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _event(chunk: dict) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
