"""The tools of a row, and the calls of its messages, as chat templates take them.

Tables change their form: parquet gives each object the keys of all objects in its column, with null where it has none;
what fits no column is the text of its JSON. So keys that are null go, and a text is read where the form asks for an
object or a list. What such a text says stays whole.
"""

import json

from base.system.files import Json
from config import DataError, shortened


def read_calls(given: Json) -> list[dict]:
    """The calls of a message."""
    calls = _read_json(_without_nulls(given) or [], list, "tool_calls")
    return [_read_call(_read_json(call, dict, "a call of tool_calls")) for call in calls]


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
