"""Values that cross between the judge and the candidate (sandbox.py): as JSON, of exactly built-in types.

`encode` and `decode` are the two directions. `Proxy` is the candidate's function as the judge calls it; `Calls` answers
it there. Imported by the throw-away processes too: standard library only, few imports.
"""

import builtins
import io
import json
import math
import operator
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import CoroutineType
from typing import Any

MAX_ANSWER_BYTES = 4 << 20  # of one value, or of a program's output
MAX_PRINTED_BYTES = 256 << 10  # of what one call prints: what comes after that is lost
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
# Classes whose objects cross as their __reduce_ex__(4) says.
MODULES = {"Decimal": "decimal", "Fraction": "fractions", "range": "builtins", "slice": "builtins"}
MODULES |= dict.fromkeys(("date", "datetime", "time", "timedelta", "timezone"), "datetime")
DECODERS = {kind.__name__: from_plain for kind, (_, from_plain) in KINDS.items()}
# Those that a class need not define: Python has another way, or raises a TypeError that it expects itself.
OPERATORS = {"__bool__": bool, "__len__": len, "__iter__": iter, "__contains__": operator.contains}
FORWARDED = (*OPERATORS, "__getitem__", "__setitem__", "__delitem__", "__call__", "__enter__", "__exit__")
FORWARDED += ("__setattr__", "__str__", "__repr__")
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


def encode(value: Any, keep: Callable[[Any], Any] | None = None) -> Any:
    """A value as JSON: itself, or {type: content}. TypeError unless all of it is of exactly the types above (a subclass
    may define its own ==), a named tuple, or what `keep` has a JSON for."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 2**53):
        return value
    if kind is list:
        return [encode(item, keep) for item in value]
    if kind in KINDS:
        to_plain, _ = KINDS[kind]
        return {kind.__name__: encode(to_plain(value), keep)}
    if MODULES.get(kind.__name__) == kind.__module__:
        return {kind.__name__: encode(value.__reduce_ex__(4)[1])}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return {"namedtuple": [kind.__name__, encode(kind._fields), encode([*value])]}
    if kind is Object:
        return {"object": value._stand_in_number}
    if keep is not None:
        return keep(value)
    raise TypeError(f"a value of type {kind.__name__}")


def decode(value: Any, stand_in: Callable[[str, Any], Any] | None = None) -> Any:
    """The value that `encode` was given; `stand_in` is called with what `keep` gave. ValueError or TypeError for JSON
    that has no such value."""
    if type(value) is list:
        return [decode(item, stand_in) for item in value]
    if type(value) is not dict:
        return value
    ((kind, content),) = value.items()
    if kind in DECODERS:
        return DECODERS[kind](decode(content, stand_in))
    if kind in MODULES:
        return getattr(__import__(MODULES[kind]), kind)(*decode(content))
    if kind == "namedtuple":
        name, fields, items = decode(content)  # without stand_in: a field that is called could approve of everything
        return namedtuple(name, fields)(*items)
    if stand_in is not None:
        return stand_in(kind, content)
    raise ValueError(f"a value of kind {kind!r}")


def same(value: Any, expected: Any, is_strict: bool, tolerance: float) -> bool:
    """Whether a value that has crossed is the expected one, which is JSON: it has no keys but texts, and no tuples."""
    if type(expected) is dict and isinstance(value, dict) and len(value) == len(expected):
        texts = {key if type(key) is str else json.dumps(key): item for key, item in value.items()}
        return all(key in texts and same(texts[key], item, is_strict, tolerance) for key, item in expected.items())
    if isinstance(value, tuple) and not is_strict:
        value = [*value]
    kinds = {type(value), type(expected)}
    if kinds == {list}:
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(same(*pair, is_strict, tolerance) for pair in pairs)
    if type(expected) is float and kinds <= ({float} if is_strict else {float, int}):
        return near(value, expected, tolerance)
    return value == expected and (len(kinds) == 1 or (kinds == {float, int} and not is_strict))


def near(value: float, expected: float, tolerance: float) -> bool:
    """Whether a number is within the tolerance of the expected one, relative or absolute; NaN is NaN."""
    if math.isnan(expected):
        return math.isnan(value)
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)


class Calls:
    """The candidate's end: `kept` is what the judge may call, by number. The first is the candidate's function or class
    `name`."""

    def __init__(self, entry: Any, name: str):
        self.kept = [entry, partial(getattr, entry)]
        self.numbers: dict[int, int] = {}  # id() of what is kept -> its number
        self.is_class = name[0].isupper()

    def answer(self, number: int, arguments: list) -> list:
        """What a call gives: ["value", it, the arguments if they have changed], or another kind of answer."""
        args, kwargs = decode(arguments, lambda _, number: self.kept[number].args[0])
        try:
            value = self.kept[number](*args, **kwargs)
        except (Exception, SystemExit) as error:  # the test may expect it
            return ["raised", [kind.__name__ for kind in type(error).__mro__], None]
        try:
            changed = encode([args, kwargs], self.keep)
            return ["value", encode(value, self.keep), None if changed == arguments else changed]
        except (TypeError, ValueError, RecursionError):
            return ["bad", None, None]

    def keep(self, value: Any) -> dict:
        """An iterator is kept as what gives its next item in a list, a coroutine as what awaits it, an object as what
        gives its attributes."""
        if hasattr(type(value), "__next__"):
            kind, call = "iterator", lambda: list(islice(value, 1))
        elif type(value) is CoroutineType:
            kind, call = "coroutine", lambda: __import__("asyncio").run(value)  # 60 ms, which few need
        elif self.is_class and type(value).__module__ == "candidate":
            kind, call = "object", partial(attribute, value)
        elif callable(value) and not isinstance(value, type):
            kind, call = "function", value
        else:
            raise TypeError(f"a value of type {type(value).__name__}")
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(call)
        return {kind: number}


def attribute(value: Any, name: str) -> Any:
    return partial(OPERATORS[name], value) if name in OPERATORS else getattr(value, name)


class Printed(io.BytesIO):
    """What the code prints during a call, in place of its stdout."""

    def write(self, data: Any) -> int:
        super().write(data[: max(0, MAX_PRINTED_BYTES - self.tell())])
        return len(data)

    def fileno(self) -> int:
        return 1


class Lost(BaseException):
    """The candidate cannot answer any more. Tests that catch every Exception do not catch this."""


class Proxy:
    """Stands for the candidate's function in the judge: a call goes to the candidate's process, a value comes back.

    An exception there is raised here as the nearest built-in one, without text. `calls` counts. `lost`: an answer was
    no value; then no test passes, whatever it catches. `unsendable`: an argument cannot cross. Of a function that is
    named like a class (Stack, not stack), objects come back too: those of others could approve of everything.
    """

    def __init__(self, requests: int, responses: int, name: str):
        self.requests, self.responses = os.fdopen(requests, "w"), os.fdopen(responses, "rb")
        self.calls = 0
        self.lost = False
        self.unsendable = False
        self.has_kept = False
        self.objects: dict[int, Object] = {}  # by number: one that comes back is itself
        self.is_class = name[0].isupper()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ask(0, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.ask(1, (name,), {})

    def ask(self, number: int, args: tuple, kwargs: dict) -> Any:
        """Calls what the candidate keeps under this number (see Calls)."""
        try:
            request = json.dumps([number, encode([[*args], kwargs])])
        except (TypeError, ValueError, RecursionError) as error:
            self.lost |= self.has_kept  # what cannot cross is then what the candidate returned, perhaps
            self.unsendable |= not self.has_kept
            raise Lost from error
        self.calls += 1
        try:
            print(request, file=self.requests, flush=True)
            kind, content, changed, printed = json.loads(self.responses.readline(MAX_ANSWER_BYTES))
            if printed:
                sys.stdout.write(printed)  # the test may have put another there
            value = decode(content, self.stand_in)
            if changed is not None:
                new_args, new_kwargs = decode(changed, self.stand_in)
                put_back(args, new_args)
                put_back(kwargs, new_kwargs)
        except Exception:  # the candidate may have sent anything, or ended
            kind, value = "bad", None
        if kind == "raised" and type(value) is list:
            raise next((RAISABLE[name] for name in value if type(name) is str and name in RAISABLE), Exception)
        if kind != "value":
            self.lost = True
            raise Lost
        return value

    def stand_in(self, kind: str, number: int) -> Any:
        """What the test gets for what the candidate keeps."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.ask(number, args, kwargs)

        async def wait() -> Any:
            return call()

        self.has_kept = True
        if kind == "coroutine":
            return wait()
        if kind == "iterator":
            return (item for batch in iter(call, []) for item in batch)
        if kind == "object" and self.is_class:
            return self.objects.setdefault(number, Object(call, number))
        if kind == "function":
            return call
        raise ValueError(f"a kept {kind}")


class Object:
    """Stands for an object of the candidate's: its attributes and methods are the candidate's, == is not."""

    def __init__(self, call: Callable[[str], Any], number: int):
        self.__dict__.update(_stand_in_call=call, _stand_in_number=number)

    def __getattr__(self, name: str) -> Any:
        return self._stand_in_call(name)


for name in FORWARDED:
    setattr(Object, name, lambda self, *args, name=name: self._stand_in_call(name)(*args))


def put_back(old: Any, new: Any) -> None:
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
