"""Rows of NeMo Gym (github.com/NVIDIA-NeMo/Gym) as chats: a `processor` for their files. README.md shows how.

A row has the call of a Responses API under `responses_create_params`. Its answer is at the top level or in the
metadata.
"""

import json

OUTPUT_KEYS = ("output", "expected_answer", "ground_truth", "answer")  # that the program finds at the top level
ANSWER_KEYS = (*OUTPUT_KEYS, "label")
METADATA = ("verifier_metadata", "metadata", "extra_env_info", "reward_model")
TOOL_KEYS = ("name", "description", "parameters")  # in the order of chat templates; `strict` is for the API alone


def to_chat(row: dict) -> dict:
    """The row with `messages`, `tools` and `answer`, as docs/tasks.md wants them; its other fields stay as they are."""
    call = row["responses_create_params"]
    chat = row | {"messages": messages_of(call), "tools": tools_of(call) or row.get("tools")}
    if all(row.get(key) is None for key in OUTPUT_KEYS):
        answer = find_answer(row)
        if answer is not None:
            chat["answer"] = answer
    return chat


def find_answer(row: dict) -> object:
    """The first answer in the row, its metadata or those of the call; None if there is none."""
    places = [row]
    places += [row.get(name) for name in METADATA]
    places.append(row["responses_create_params"].get("metadata"))
    for place in places:
        if not isinstance(place, dict):
            continue
        for key in ANSWER_KEYS:
            if place.get(key) is not None:
                return place[key]
    return None


def tools_of(call: dict) -> list[dict]:
    """The functions of the call as chat templates take them: nested."""
    tools = []
    for tool in call.get("tools") or ():
        if "function" in tool:
            tools.append(tool)
        elif "name" in tool:
            function = {key: tool[key] for key in TOOL_KEYS if key in tool}
            tools.append({"type": "function", "function": function})
        else:
            raise ValueError(f"only a function can be a tool in a chat template, not {tool!r:.80}")
    return tools


def messages_of(call: dict) -> list[dict]:
    """The call's input as chat messages, joined as by NeMo Gym's responses_converter.py (07d6b0d): reasoning, texts and
    calls up to the next item of another role become one assistant message, with `reasoning_content` and `tool_calls`;
    the output of a call becomes a tool message, a developer the system."""
    messages: list[dict] = []
    if call.get("instructions"):
        messages.append({"role": "system", "content": call["instructions"]})
    items = call["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and item.get("role") == "developer":
            messages.append(item | {"role": "system"})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(dict(item))
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            add_item(messages[-1], kind, item)
        else:
            raise ValueError(f"responses_create_params.input: a chat cannot hold {kind}: remove it, or the row")
    return messages


def add_item(message: dict, kind: str, item: dict) -> None:
    """Adds a text, a reasoning or a call of the assistant to its message."""
    key = "content"
    text = text_of(item.get("content"))
    calls = item.get("tool_calls")
    if kind == "reasoning":
        key = "reasoning_content"
        text = text_of(item.get("summary")) or text
    if kind == "function_call":
        calls = [tool_call(item)]
    if text:
        message[key] = message.get(key, "") + text
    if calls:
        message["tool_calls"] = [*message.get("tool_calls", ()), *calls]


def text_of(content: str | list[dict] | None) -> str:
    """A text in parts becomes one text."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def tool_call(item: dict) -> dict:
    """A call as chat templates take it: the arguments are an object, not text."""
    arguments = item.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"type": "function", "id": item.get("call_id"), "function": {"name": item["name"], "arguments": arguments}}
