"""Values that cross between the judge and the candidate (sandbox.py): as JSON, of exactly built-in types.

`encode` and `decode` are the two directions. `Proxy` is the candidate's function as the judge calls it. Imported by the
throw-away processes too: standard library only, few imports.
"""

import builtins
import collections
import json
import os
from typing import Any

MAX_ANSWER_BYTES = 4 << 20  # of one value, or of a program's output
PLAIN = (type(None), bool, float, str)
DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)  # they cross as plain dicts
GROUPS = {"tuple": tuple, "set": set, "frozenset": frozenset}
TEXTS = {  # kind -> (value -> text, text -> value)
    "int": (hex, lambda text: int(text, 16)),
    "bytes": (bytes.hex, bytes.fromhex),
    "complex": (repr, complex),
}
NEED_ARGUMENTS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup)
END_LOOPS = (StopIteration, StopAsyncIteration)  # raised in a test, they would end a loop instead of failing the test
RAISABLE = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in NEED_ARGUMENTS + END_LOOPS
}


def encode(value: Any) -> Any:
    """A value as JSON: itself, or {type: content}. TypeError unless all of it is of exactly built-in types: a subclass
    may define its own ==."""
    kind = type(value)
    if kind in PLAIN or (kind is int and abs(value) < 2**53):
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind in DICTS:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in GROUPS.values():
        return {kind.__name__: [encode(item) for item in value]}
    if kind in (int, bytes, complex):
        to_text, _ = TEXTS[kind.__name__]
        return {kind.__name__: to_text(value)}
    raise TypeError(f"a value of type {kind.__name__}")


def decode(value: Any) -> Any:
    """The value that `encode` was given. ValueError or TypeError for JSON that has no such value."""
    if type(value) is list:
        return [decode(item) for item in value]
    if type(value) is not dict:
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind in GROUPS:
        return GROUPS[kind](decode(item) for item in content)
    if kind in TEXTS:
        _, from_text = TEXTS[kind]
        return from_text(content)
    raise ValueError(f"a value of kind {kind!r}")


class Lost(BaseException):
    """The candidate cannot answer any more. Tests that catch every Exception do not catch this."""


class Proxy:
    """Stands for the candidate's function in the judge: a call goes to the candidate's process, a value comes back.

    An exception there is raised here as the nearest built-in one, without text. `calls` counts. `lost`: an answer was
    no value; then no test passes, whatever it catches. `unsendable`: an argument cannot cross.
    """

    def __init__(self, requests: int, responses: int):
        self.requests, self.responses = os.fdopen(requests, "w"), os.fdopen(responses, "rb")
        self.calls = 0
        self.lost = False
        self.unsendable = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            request = json.dumps([encode(list(args)), encode(kwargs)])
        except TypeError as error:
            self.unsendable = True
            raise Lost from error
        self.calls += 1
        try:
            print(request, file=self.requests, flush=True)
            kind, content = json.loads(self.responses.readline(MAX_ANSWER_BYTES))
            value = decode(content)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
            kind, value = "bad", None
        if kind == "raised" and type(value) is list:
            raise next((RAISABLE[name] for name in value if type(name) is str and name in RAISABLE), Exception)
        if kind != "value":
            self.lost = True
            raise Lost
        return value
