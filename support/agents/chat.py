"""Requests and replies as OpenAI's chat completions have them. Knows no tokens, no HTTP and no engine."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from config import shortened

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # kind -> its key
MESSAGE_FORM = "expected {role, content} with a text or parts of text, and tool_calls of {function: {name, arguments}}"
TOOL_FORM = "expected {type: function, function: {name, description, parameters}}"
Count = Annotated[int, Field(ge=1)] | None
Text = Annotated[str, Field(min_length=1)]


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
    """A message as chat templates take it: content a text, arguments an object. What clients add (audio, null) goes.
    Raises ValueError, and what else a message of another form may raise."""
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"role {role!r:.80}: served are {', '.join(ROLES)}")
    content, thoughts = _read_content(message.get("content") or "")
    read = {"role": ROLES[role], "content": content}
    if thoughts:
        read["reasoning_content"] = thoughts
    calls = [_read_call(call) for call in message.get("tool_calls") or ()]
    if calls:
        read["tool_calls"] = calls
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
        arguments = _read_arguments(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_arguments(text: str) -> Any:
    """What the JSON says. Where it is none, or says what no tokenizer can encode, the template gets the text as it is.
    Raises RecursionError."""
    try:
        arguments = json.loads(text)
        json.dumps(arguments, ensure_ascii=False).encode()
    except ValueError:
        return text
    return arguments


def _read_messages(messages: list[dict]) -> list[dict]:
    try:
        return [read_message(message) for message in messages]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MESSAGE_FORM} ({type(error).__name__}: {error!s:.200})") from error


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


class Request(BaseModel):
    """The body of a request: what is served of it. The rest is in model_extra. train: of this program; false keeps the
    call out of all rows."""

    model_config = ConfigDict(strict=True, extra="allow")
    messages: Annotated[list[dict], Field(min_length=1), AfterValidator(_read_messages)]
    tools: list[Annotated[dict, AfterValidator(_check_tool)]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict | None = None
    n: Count = None
    max_tokens: Annotated[Count, BeforeValidator(_as_limit)] = None
    max_completion_tokens: Annotated[Count, BeforeValidator(_as_limit)] = None
    stop: Annotated[list[Text], BeforeValidator(_as_list)] | None = None
    stream: bool | None = None
    stream_options: dict | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict | None = None
    modalities: list[Literal["text"]] | None = None
    functions: None = None
    return_token_ids: bool | None = None
    train: bool | None = None

    @property
    def callable_tools(self) -> list[dict] | None:
        """The tools that a reply may call."""
        return self.tools if self.tool_choice != "none" else None


def digest(value: Any) -> bytes:
    """Equal where the values are, however JSON writes them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def link_of(message: dict) -> bytes:
    """Of what must be equal for a message to be the same. Reasoning does not count: few clients send it back."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return digest([message["role"], message["content"].strip(), calls, message.get("tool_call_id")])


# ------------------------------------------------------------------------------------------------------------- replies


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled reply. seed: of its call. tool_calls: {name, arguments in JSON} of each. ids, logps: of its tokens.
    texts: of each token, if the request asks for logprobs."""

    seed: int
    reasoning: str | None
    content: str | None
    tool_calls: list[dict]
    finish_reason: str
    ids: list[int]
    logps: list[float]
    texts: list[str]

    @property
    def message(self) -> dict:
        """The assistant's message, as the client gets it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": f"call_{self.seed:012x}_{number}", "index": number, "function": call}
                for number, call in enumerate(self.tool_calls)
            ]
        return message


def completion_object(request: Request, prompt_ids: list[int], replies: Sequence[Reply]) -> dict:
    """The object `chat.completion` that answers a request."""
    num_new = sum(len(reply.ids) for reply in replies)
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": num_new, "total_tokens": len(prompt_ids) + num_new}
    body = {"id": f"chatcmpl-{replies[-1].seed:012x}", "object": "chat.completion", "created": int(time.time())}
    if request.return_token_ids:
        body["prompt_token_ids"] = prompt_ids
    body["model"] = "policy"
    body["choices"] = [_choice(request, index, reply) for index, reply in enumerate(replies)]
    body["usage"] = usage
    return body


def _choice(request: Request, index: int, reply: Reply) -> dict:
    end = reply.finish_reason
    if reply.tool_calls and end == "stop":
        end = "tool_calls"
    choice = {"index": index, "message": reply.message, "finish_reason": end, "logprobs": None}
    if request.logprobs:
        tokens = []
        for text, logp in zip(reply.texts, reply.logps, strict=True):
            token = {"token": text, "logprob": logp, "bytes": list(text.encode())}
            likeliest = [token] if request.top_logprobs else []  # the engine keeps no other
            tokens.append(token | {"top_logprobs": likeliest})
        choice["logprobs"] = {"content": tokens, "refusal": None}
    if request.return_token_ids:
        choice["token_ids"] = reply.ids
    return choice


def stream_of(request: Request, answer: dict | Refused) -> str:
    """The events of a stream: the whole reply in one, and the usage if the client wants it."""
    if isinstance(answer, Refused):
        return _events([answer.body])
    head = {name: value for name, value in answer.items() if name != "usage"}
    head["object"] = "chat.completion.chunk"
    choices = []
    for choice in answer["choices"]:
        chunk = dict(choice)
        chunk["delta"] = chunk.pop("message")
        choices.append(chunk)
    chunks = [head | {"choices": choices}]
    if request.stream_options and request.stream_options.get("include_usage"):
        chunks.append(head | {"choices": [], "usage": answer["usage"]})
    return _events(chunks)


def _events(chunks: Sequence[dict]) -> str:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join(lines) + "data: [DONE]\n\n"
