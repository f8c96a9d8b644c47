"""The messages of a row, as chat templates take them: without keys that are null (tool_calls.py says why), but for the
content of a message that only calls tools."""

import json
import re

from base.system.files import Json
from config import DataError


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
    """The messages that a text lists in JSON; None for any other text."""
    if not re.match(r"\s*\[\s*\{", text):
        return None
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
            from base.inputs.tool_calls import read_calls

            calls = read_calls(value)
            if calls:  # templates ask whether there is the key
                read[key] = calls
        elif key == "content" or value is not None:
            read[key] = value
    read.setdefault("content", None)  # the keys keep their order: the fingerprint of a dataset is of it
    return read
