"""The messages and the tools of a row, as chat templates take them.

Tables change their form: parquet gives each object the keys of all objects in its column, with null where it has none;
what fits no column is the text of its JSON. So keys that are null go, but for the content of a message that only calls
tools, and a text is read where the form asks for an object or a list. What such a text says stays whole.
"""

import json

from base.system.files import Json
from config import DataError, shortened


def read_messages(given: Json) -> list[dict]:
    """The messages of a text, a list of messages, or the JSON text of a list; a text in parts becomes one text."""
    if isinstance(given, str):
        messages = _listed_messages(given)
        if messages is None:
            return [{"role": "user", "content": given}]
    else:
        messages = given
    chat = [_read_message(message) for message in messages]
    if not chat or not all(map(_has_texts, chat)):
        raise DataError("expected a text or a non-empty list of messages {role, content} with text in both")
    return chat


def _listed_messages(text: str) -> list[dict] | None:
    """The messages that a text lists in JSON, which begins with [{; None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for message in found:
        if not isinstance(message, dict) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
            return None
    return found


def _has_texts(message: dict) -> bool:
    is_call = message["content"] is None and "tool_calls" in message
    return isinstance(message["role"], str) and (is_call or isinstance(message["content"], str))


def _read_message(message: dict) -> dict:
    read = {}
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            read[key] = "".join(part["text"] for part in value)
        elif key == "tool_calls":
            calls = _read_json(_without_nulls(value) or [], list, key)
            if calls:  # templates ask whether there is the key
                read[key] = [_read_call(_read_json(call, dict, "a call of tool_calls")) for call in calls]
        elif key == "content" or value is not None:
            read[key] = value
    read.setdefault("content", None)  # the keys keep their order: the fingerprint of a dataset is of it
    return read


def _read_call(call: dict) -> dict:
    """With arguments that are an object; the name and the arguments may stand in `function`, or beside it."""
    if "function" in call:
        return call | {"function": _read_call(_read_json(call["function"], dict, "function"))}
    return call | {"arguments": _read_json(call.get("arguments") or {}, dict, "arguments")}


def read_tools(given: Json) -> list[dict] | None:
    """The tools of a list, or of its JSON text; None for none."""
    tools = _read_json(_without_nulls(given) or [], list, "tools")
    return [_read_tool(_read_json(tool, dict, "a tool")) for tool in tools] or None


def _read_tool(tool: dict) -> dict:
    """The description may stand in `function`, or be the tool."""
    if "function" in tool:
        return tool | {"function": _read_tool(_read_json(tool["function"], dict, "function"))}
    if "parameters" in tool:
        return tool | {"parameters": _read_schema(_read_json(tool["parameters"], dict, "parameters"))}
    return tool


def _read_schema(schema: Json) -> Json:
    """A JSON schema in which an object may be a text, as may each of its properties."""
    if not isinstance(schema, dict) or "properties" not in schema:
        return schema
    properties = {}
    for name, part in _read_json(schema["properties"], dict, "properties").items():
        if isinstance(part, str):
            part = _read_json(part, dict, f"properties: {name}")
        properties[name] = _read_schema(part)
    return schema | {"properties": properties}


def _read_json(value: Json, kind: type, name: str) -> Json:
    """A value of this kind, or the one that a text says in JSON. DataError for any other."""
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            pass
    if not isinstance(read, kind):
        word = "an object" if kind is dict else "a list"
        raise DataError(f"{name}: expected {word}, or its JSON text, got {shortened(value)}")
    return read


def _without_nulls(value: Json) -> Json:
    """Without the keys that are null, at any depth; what a list holds stays."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value
