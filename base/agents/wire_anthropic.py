"""The wire of Anthropic's messages: blocks become the messages of chat completions, and a reply becomes blocks."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Annotated

from pydantic import AfterValidator, Field

from base.agents.wire_chat import (
    Answer,
    Body,
    Conversations,
    Count,
    Delta,
    Refused,
    Reply,
    Request,
    StopStrings,
    Wire,
    expecting,
    read_arguments,
    read_body,
)

RENAMED = {"stop": "stop_sequences"}  # what this wire calls chat's keys
KINDS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}  # of errors, by HTTP's status
CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
ENDS = {"length": "max_tokens", "stop": "end_turn"}
MESSAGE_FORM = "expected {role, content} with a text or blocks of type text, tool_use, tool_result or thinking"
UNREAD = ""  # the key of arguments that are no JSON object, as input must be one
TOO_LONG = "prompt is too long: "  # by these words its clients recognize a full context


def _read_message(message: dict) -> list[dict]:
    """A message as chat completions have it; results of tools are messages of their own there."""
    with expecting(MESSAGE_FORM):
        return [*_as_messages(message)]


def _as_messages(message: dict) -> Iterator[dict]:
    role = message["role"]
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        yield _read_reply(blocks)
        return
    texts = []
    for block in blocks:
        if block["type"] == "tool_result":
            if texts:
                yield {"role": role, "content": texts}
            texts = []
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content")}
        else:
            texts.append(block)
    if texts or not blocks:
        yield {"role": role, "content": texts}


def _read_reply(blocks: list[dict]) -> dict:
    reply = {"role": "assistant"}
    parts = []
    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            given = block["input"]
            arguments = given[UNREAD] if _is_unread(given) else given
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] != "redacted_thinking":
            parts.append(block)
    reply["content"] = parts
    if calls:
        reply["tool_calls"] = calls
    return reply


class MessagesBody(Body):
    messages: Annotated[list[Annotated[dict, AfterValidator(_read_message)]], Field(min_length=1)]
    system: str | list[dict] | None = None
    tools: list[dict] | None = None
    tool_choice: dict | None = None
    max_tokens: Count = None
    stop_sequences: StopStrings | None = None


class Messages(Wire):
    """A request over this wire."""

    body: MessagesBody

    def __init__(self, body: bytes, _: Conversations):
        self.body = read_body(MessagesBody, body, renamed={})
        self.sent = ""
        self.num_blocks = 0  # that the stream has begun
        self.other_tools = []
        messages = [*chain.from_iterable(self.body.messages)]
        if self.body.system:
            messages.insert(0, {"role": "system", "content": self.body.system})
        chat = self.body.shared() | {
            "messages": messages,
            "tools": self._tools(),
            "tool_choice": self._tool_choice(),
            "max_tokens": self.body.max_tokens,
            "stop": self.body.stop_sequences,
            "continue_final_message": messages[-1]["role"] == "assistant",
        }
        self.request = read_body(Request, chat, RENAMED)

    def _tools(self) -> list[dict] | None:
        """The tools that the client itself describes, as chat completions have them. No other is ever called."""
        if self.body.tools is None:
            return None
        functions = []
        for tool in self.body.tools:
            if "input_schema" not in tool:
                self.other_tools.append(tool)
                continue
            function = {"name": tool.get("name")}
            if tool.get("description") is not None:
                function["description"] = tool["description"]
            function["parameters"] = tool["input_schema"]
            functions.append({"type": "function", "function": function})
        return functions

    def _tool_choice(self) -> str | None:
        if self.body.tool_choice is None:
            return None
        kind = self.body.tool_choice.get("type")
        if not isinstance(kind, str) or kind not in CHOICES:
            raise Refused(f"tool_choice: {kind!r:.80} is none of {', '.join(CHOICES)}")
        return CHOICES[kind]

    @staticmethod
    def failure(refused: Refused) -> dict:
        kind = "api_error"
        if refused.status < 500:
            kind = KINDS.get(refused.status, "invalid_request_error")
        message = str(refused)
        if refused.code == "context_length_exceeded":
            message = TOO_LONG + message
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    def reply(self, answer: Answer) -> dict:
        [reply] = answer.replies
        body = _begun(answer)
        body["content"] = _blocks(reply)
        body["usage"]["output_tokens"] = answer.num_new_tokens
        return body | _end(reply)

    def stream_delta(self, delta: Delta) -> str:
        """More of the text with which the reply begins."""
        events = []
        if self.num_blocks == 0:
            events.append(_event("message_start", message=_begun(delta)))
            events.append(self._begin_block({"type": "text", "text": ""}))
        self.sent += delta.text
        events.append(_event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text}))
        return "".join(events)

    def stream_end(self, answer: Answer) -> str:
        [reply] = answer.replies
        events = []
        if self.num_blocks == 0:
            events.append(_event("message_start", message=_begun(answer)))
        for index, block in enumerate(_blocks(reply)):
            if index == self.num_blocks:
                events.append(self._begin_block(_emptied(block)))
            for delta in self._deltas(block):
                events.append(_event("content_block_delta", index=index, delta=delta))
            events.append(_event("content_block_stop", index=index))
        usage = {"output_tokens": answer.num_new_tokens}
        events.append(_event("message_delta", delta=_end(reply), usage=usage))
        events.append(_event("message_stop"))
        return "".join(events)

    def stream_failure(self, refused: Refused) -> str:
        return f"event: error\ndata: {json.dumps(self.failure(refused))}\n\n"

    def _begin_block(self, block: dict) -> str:
        index = self.num_blocks
        self.num_blocks += 1
        return _event("content_block_start", index=index, content_block=block)

    def _deltas(self, block: dict) -> Iterator[dict]:
        """What of a block has not been told."""
        if block["type"] == "tool_use":
            yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        elif block["type"] == "thinking":
            yield {"type": "thinking_delta", "thinking": block["thinking"]}
            yield {"type": "signature_delta", "signature": block["signature"]}
        else:
            rest = block["text"][len(self.sent) :]
            if rest:
                yield {"type": "text_delta", "text": rest}


def _event(kind: str, **content: int | dict) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"


def _begun(answer: Answer | Delta) -> dict:
    """The message without what is known at its end."""
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": 0}
    usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {
        "id": f"msg_{answer.seed:012x}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _end(reply: Reply) -> dict:
    reason = ENDS[reply.finish_reason]
    if reply.tool_calls and reason == "end_turn":
        reason = "tool_use"
    elif reply.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_string}


def _blocks(reply: Reply) -> list[dict]:
    """What a reply consists of. A reply of nothing is an empty text."""
    blocks = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": f"{reply.seed:012x}"})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content or ""})
    for call in reply.calls:
        function = call["function"]
        given = _input_of(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _input_of(arguments: str) -> dict:
    given = read_arguments(arguments)
    if isinstance(given, dict) and not _is_unread(given):
        with suppress(ValueError):  # JSON has no NaN
            json.dumps(given, allow_nan=False)
            return given
    return {UNREAD: arguments}


def _is_unread(given: dict) -> bool:
    """Whether it stands for arguments that are no object."""
    return given.keys() == {UNREAD} and isinstance(given[UNREAD], str)


def _emptied(block: dict) -> dict:
    """As it begins in a stream."""
    if block["type"] == "tool_use":
        return block | {"input": {}}
    if block["type"] == "thinking":
        return block | {"thinking": "", "signature": ""}
    return block | {"text": ""}
