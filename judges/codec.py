"""Values that cross between the judge and the candidate (sandbox.py): as JSON, of exactly built-in types.

`encode` and `decode` are the two directions. `Proxy` is the candidate's function as the judge calls it; `respond`
answers it there. Imported by the throw-away processes too: standard library only, few imports.
"""

import builtins
import io
import json
import math
import os
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

T = TypeVar("T")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
TOLERANCE = 1e-6  # of decimal numbers, as most judges have it
MAX_ANSWER_BYTES = 4 << 20  # of one value, or of a program's output
MAX_PRINTED_BYTES = 1 << 18  # of what a call prints
KINDS: dict[type, tuple[Callable, Callable]] = {  # type -> (value -> one that crosses, that -> value)
    int: (hex, lambda text: int(text, 16)),
    complex: (repr, complex),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    deque: (list, deque),
    dict: (lambda value: [*map(list, value.items())], dict),
    OrderedDict: (dict, OrderedDict),
    defaultdict: (dict, partial(defaultdict, None)),
    Counter: (dict, Counter),
    type({}.keys()): (list, lambda keys: dict.fromkeys(keys).keys()),
    type({}.values()): (list, lambda values: dict(enumerate(values)).values()),
    type({}.items()): (dict, dict.items),
}
KINDS |= dict.fromkeys((type(_ for _ in ()), map, filter, zip), (list, iter))  # run to their ends
# Classes whose objects cross as their __reduce_ex__(4) says.
MODULES = {"Decimal": "decimal", "Fraction": "fractions", "range": "builtins", "slice": "builtins"}
MODULES |= dict.fromkeys(("date", "datetime", "time", "timedelta", "timezone"), "datetime")
DECODERS = {kind.__name__: from_plain for kind, (_, from_plain) in KINDS.items()}
UNFIT = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup)  # these need arguments
UNFIT += (StopIteration, StopAsyncIteration)  # raised in a test, they would end a loop instead of failing the test


class Left(SystemExit):
    """The candidate has raised SystemExit in a call. It is no success where a test passes it, or its code, on."""

    code = "the candidate"


RAISABLE = {"SystemExit": Left} | {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in UNFIT
}


def encode(value: object) -> Json:
    """A value as JSON: itself, or {type: content}. TypeError unless all of it is of exactly the types above: a subclass
    may define its own ==."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 2**53):
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind in KINDS:
        to_plain, _ = KINDS[kind]
        return {kind.__name__: encode(to_plain(value))}
    if MODULES.get(kind.__name__) == kind.__module__:
        return {kind.__name__: encode(value.__reduce_ex__(4)[1])}
    raise TypeError(f"a value of type {kind.__name__}")


def decode(value: Json) -> object:
    """The value that `encode` was given. ValueError or TypeError for JSON that has no such value."""
    if type(value) is list:
        return [decode(item) for item in value]
    if type(value) is not dict:
        return value
    ((kind, content),) = value.items()
    if kind in DECODERS:
        return DECODERS[kind](decode(content))
    if kind in MODULES:
        return getattr(__import__(MODULES[kind]), kind)(*decode(content))
    raise ValueError(f"a value of kind {kind!r}")


def same(value: object, expected: Json) -> bool:
    """Whether a value that has crossed is the expected one, which is JSON: it has no keys but texts, and no tuples."""
    if type(expected) is dict and isinstance(value, dict) and len(value) == len(expected):
        texts = {key if type(key) is str else json.dumps(key): item for key, item in value.items()}
        return all(key in texts and same(texts[key], item) for key, item in expected.items())
    if type(expected) is list and type(value) in (list, tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if type(expected) is float and type(value) in (float, int):
        return near(value, expected)
    return value == expected and (type(value) is type(expected) or {type(value), type(expected)} == {float, int})


def near(value: float, expected: float) -> bool:
    """Whether a number is within TOLERANCE of the expected one, relative or absolute; NaN is NaN."""
    if math.isnan(expected):
        return math.isnan(value)
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


class Printed(io.TextIOWrapper):
    """Standard output of the candidate: the first MAX_PRINTED_BYTES until they are taken."""

    class Bytes(io.BytesIO):
        def write(self, data: bytes) -> int:
            super().write(data[: max(0, MAX_PRINTED_BYTES - self.tell())])
            return len(data)

    def __init__(self):
        super().__init__(self.Bytes(), "utf-8", errors="backslashreplace", newline="\n", write_through=True)

    def take(self) -> str:
        data = self.buffer.getvalue()
        self.buffer.seek(0)
        self.buffer.truncate()
        return data.decode("utf-8", "replace")


def respond(function: Callable, arguments: list, printed: Printed) -> list:
    """What the candidate's function gives for encoded arguments: [kind, content, the arguments if they have changed,
    what the call has printed]. kind: "value"; "coroutine", whose value is the content; "raised"; or "bad"."""
    args, kwargs = decode(arguments)
    kind = "value"
    printed.take()  # of the time before
    try:
        value = function(*args, **kwargs)
        if type(value) is types.CoroutineType:
            import asyncio

            kind = "coroutine"
            value = asyncio.run(value)
    except (Exception, SystemExit) as error:  # the test may expect it
        return ["raised", [kind.__name__ for kind in type(error).__mro__], None, printed.take()]
    try:
        content = encode(value)
        changed = encode([args, kwargs])
    except Exception:  # an iterator runs code of the candidate
        return ["bad", None, None, ""]
    if changed == arguments:
        changed = None
    return [kind, content, changed, printed.take()]


class Lost(BaseException):
    """The candidate cannot answer any more. Tests that catch every Exception do not catch this."""


class Proxy:
    """Stands for the candidate's function in the judge: a call goes to the candidate's process, a value comes back.

    An exception there is raised here as the nearest built-in one, without text; what the call prints is printed here.
    `calls` counts. `lost`: an answer was no value; then no test passes, whatever it catches. `unsendable`: an argument
    cannot cross.
    """

    def __init__(self, requests: int, responses: int):
        self.requests = os.fdopen(requests, "w")
        self.responses = os.fdopen(responses, "rb")
        self.calls = 0
        self.lost = False
        self.unsendable = False

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            request = json.dumps(encode([[*args], kwargs]))
        except (TypeError, ValueError, RecursionError) as error:
            self.unsendable = True
            raise Lost from error
        self.calls += 1
        try:
            print(request, file=self.requests, flush=True)
            kind, content, changed, printed = json.loads(self.responses.readline(MAX_ANSWER_BYTES))
            value = decode(content)
            if changed is not None:
                new_args, new_kwargs = decode(changed)
                put_back(args, new_args)
                put_back(kwargs, new_kwargs)
            if printed:
                print(printed, end="")  # where the test may wait for it
        except Exception:  # the candidate may have sent anything, or ended
            kind = "bad"
            value = None
        if kind == "raised" and type(value) is list:
            raise next((RAISABLE[name] for name in value if type(name) is str and name in RAISABLE), Exception)
        if kind not in ("value", "coroutine"):
            self.lost = True
            raise Lost
        return returns(value) if kind == "coroutine" else value


async def returns(value: T) -> T:
    """A coroutine, for a test that awaits what the candidate's coroutine function gives."""
    return value


def put_back(old: Sequence | dict, new: Sequence | dict) -> None:
    """Makes arguments of the test what the candidate has made of its copies."""
    for key, value in old.items() if isinstance(old, dict) else enumerate(old):
        if isinstance(value, tuple):
            put_back(value, new[key])
        elif isinstance(value, list | bytearray):
            value[:] = new[key]
        elif isinstance(value, dict | set | deque):
            value.clear()
            add = value.extend if isinstance(value, deque) else value.update
            add(new[key])
