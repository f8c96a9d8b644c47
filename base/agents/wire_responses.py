"""The wire of OpenAI's responses: items become the messages of chat completions, and a reply becomes items.

The items of one reply, in their order (reasoning, message, function calls), are one message again when a client sends
them back. With `previous_response_id` the messages before are this rollout's own.
"""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Literal

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
    TopLogprobs,
    Wire,
    expecting,
    read_body,
)

LOGPROBS = "message.output_text.logprobs"  # of `include`
ITEM_FORM = "expected {role, content}, {type: function_call, call_id, name, arguments} or {type: function_call_output}"
RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens"}  # what this wire calls chat's keys
TOOL_KEYS = ("name", "description", "parameters", "strict")


def _read_items(given: str | list[dict]) -> list[dict]:
    """Items as messages of chat completions."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict] = []
    for number, item in enumerate(given):
        with expecting(f"{number}: {ITEM_FORM}"):
            _read_item(item, messages)
    return messages


def _read_item(item: dict, messages: list[dict]) -> None:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        reply = _reply_without(messages)
        reply.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        reply = _reply_without(messages, "reasoning_content", "content", "tool_calls")
        reply["reasoning_content"] = "".join(part["text"] for part in parts)
    elif kind == "message" and item["role"] == "assistant":
        _reply_without(messages, "content", "tool_calls")["content"] = item["content"]
    elif kind == "message":
        messages.append({"role": item["role"], "content": item["content"]})
    else:
        raise ValueError(f"an item of type {kind!r:.80} is not served")


def _reply_without(messages: list[dict], *keys: str) -> dict:
    """The assistant's message at the end if it has none of the keys, else a new one."""
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].keys() & set(keys):
        return messages[-1]
    messages.append({"role": "assistant"})
    return messages[-1]


class ResponsesBody(Body):
    input: Annotated[str | list[dict], Field(min_length=1), AfterValidator(_read_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict | None = None
    max_output_tokens: Count = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None


class Responses(Wire):
    """A request over this wire."""

    body: ResponsesBody

    def __init__(self, body: bytes, conversations: Conversations):
        self.body = read_body(ResponsesBody, body, renamed={})
        self.conversations = conversations
        self.number = 0  # of the stream's next event
        self.sent = ""
        self.num_items = 0  # that the stream has begun
        messages = [*self._messages_before(), *self.body.input]
        if self.body.instructions:
            messages.insert(0, {"role": "system", "content": self.body.instructions})
        self.other_tools = []
        chat = self.body.shared() | {
            "messages": messages,
            "tools": self._tools(),
            "tool_choice": self.body.tool_choice,
            "max_completion_tokens": self.body.max_output_tokens,
            "logprobs": LOGPROBS in (self.body.include or ()),
            "top_logprobs": self.body.top_logprobs,
        }
        self.request = read_body(Request, chat, RENAMED)

    def _messages_before(self) -> list[dict]:
        previous = self.body.previous_response_id
        if previous is None:
            return []
        if previous not in self.conversations:
            problem = f"previous_response_id: {previous!r:.80} is no response of this rollout"
            raise Refused(problem, 400, "previous_response_not_found")
        return self.conversations[previous]

    def _tools(self) -> list[dict] | None:
        """The functions, as chat completions have them. No other tool is ever called."""
        if self.body.tools is None:
            return None
        functions = []
        for tool in self.body.tools:
            if tool.get("type", "function") == "function":
                function = {key: tool[key] for key in TOOL_KEYS if tool.get(key) is not None}
                functions.append({"type": "function", "function": function})
            else:
                self.other_tools.append(tool)
        return functions

    def reply(self, answer: Answer) -> dict:
        [reply] = answer.replies
        return self._ended(answer, _items(reply, self.request))

    def _ended(self, answer: Answer, items: list[dict]) -> dict:
        """The whole response, which a later request can name."""
        [reply] = answer.replies
        before = self.request.messages[1:] if self.body.instructions else self.request.messages
        self.conversations[_id_of(answer)] = [*before, reply.message]
        body = self._response(answer, "completed", items)
        if reply.finish_reason == "length":
            body["status"] = "incomplete"
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        num_prompt = answer.num_prompt_tokens
        num_new = answer.num_new_tokens
        body["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_new,
        }
        return body

    def _response(self, answer: Answer | Delta, status: str, items: list[dict]) -> dict:
        return {
            "id": _id_of(answer),
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "model": "policy",
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": self.body.previous_response_id,
            "tool_choice": self.body.tool_choice or "auto",
            "tools": self.body.tools or [],
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }

    def stream_delta(self, delta: Delta) -> str:
        """More of the message with which the reply begins."""
        events = []
        if self.number == 0:
            events += self._begin(delta)
            item = _message(delta.seed, "", [])
            events += self._begin_item(0, item)
        self.sent += delta.text
        place = {"item_id": f"msg_{delta.seed:012x}", "output_index": 0, "content_index": 0}
        events.append(self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[]))
        return "".join(events)

    def stream_end(self, answer: Answer) -> str:
        [reply] = answer.replies
        items = _items(reply, self.request)
        events = []
        if self.number == 0:
            events += self._begin(answer)
        for index, item in enumerate(items):
            if index == self.num_items:
                events += self._begin_item(index, item)
            events += self._item(index, item)
        body = self._ended(answer, items)
        events.append(self._event(f"response.{body['status']}", response=body))
        return "".join(events)

    def stream_failure(self, refused: Refused) -> str:
        error = refused.body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=None)

    def _event(self, kind: str, **content: str | int | dict | list | None) -> str:
        event = {"type": kind, "sequence_number": self.number, **content}
        self.number += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _begin(self, answer: Answer | Delta) -> list[str]:
        response = self._response(answer, "in_progress", [])
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def _begin_item(self, index: int, item: dict) -> Iterator[str]:
        """Of an item, before it has content."""
        self.num_items += 1
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        opened = {**item, **empty, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=opened)
        for part in item.get("content", ()):
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            yield self._event("response.content_part.added", **place, part={**part, "text": ""})

    def _item(self, index: int, item: dict) -> Iterator[str]:
        """The rest of an item that has begun."""
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        for part in item.get("content", ()):
            place["content_index"] = 0
            kind = f"response.{part['type']}"
            rest = part["text"][len(self.sent) :]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            if rest:
                yield self._event(f"{kind}.delta", **place, delta=rest, **logprobs)
            yield self._event(f"{kind}.done", **place, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)


def _id_of(answer: Answer | Delta) -> str:
    return f"resp_{answer.seed:012x}"


def _message(seed: int, text: str, logprobs: list[dict]) -> dict:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "message", "id": f"msg_{seed:012x}", "role": "assistant", "status": "completed", "content": [part]}


def _items(reply: Reply, request: Request) -> list[dict]:
    """What a reply consists of. A reply of nothing is an empty message."""
    items = []
    if reply.reasoning:
        thoughts = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.seed:012x}", "summary": [], "content": thoughts})
    if reply.content or not reply.tool_calls:
        logprobs = reply.logprobs if request.logprobs else []
        items.append(_message(reply.seed, reply.content or "", logprobs))
    for number, call in enumerate(reply.calls):
        item = {"type": "function_call", "id": f"fc_{reply.seed:012x}_{number}", "status": "completed"}
        items.append(item | {"call_id": call["id"], **call["function"]})
    return items
