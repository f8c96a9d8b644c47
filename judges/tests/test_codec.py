"""Values that cross between judge and candidate: built-in types as they are, nothing else."""

import collections
import datetime
import decimal
import enum
import fractions
import json
import math

import pytest

from judges.codec import decode, encode

VALUES = (None, True, 0, -1, 2**53, -(10**5000), 1.5, -0.0, math.inf, 2j, "é\ud800", "", b"\0\xff", [1, [2]], (1, (2,)))
VALUES += ({1, 2}, frozenset([1]), {"a": (1,), (1, 2): {}}, {"list": [1]}, {"int": "0x1"}, [], (), {}, set())


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_cross_with_their_type(value):
    found = decode(json.loads(json.dumps(encode(value))))
    assert found == value and (type(value) is int or repr(found) == repr(value)) and type(found) is type(value)
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


POINT = collections.namedtuple("POINT", "x")


def test_standard_types_cross_with_their_type():
    zone = datetime.timezone(datetime.timedelta(hours=1))
    values = (
        decimal.Decimal("0.10"),
        fractions.Fraction(1, 3),
        datetime.date(2020, 2, 29),
        datetime.datetime(2020, 1, 1, 12, 0, 0, 7, tzinfo=zone),
        datetime.time(1, 2),
        datetime.timedelta(1, 2, 3),
        collections.Counter("aab"),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, (2,)]),
        bytearray(b"ab"),
        range(2, 9, 3),
        {1: [2]}.keys(),
        {1: (2,)}.items(),
    )
    for value in values:
        found = decode(json.loads(json.dumps(encode(value))))
        assert type(found) is type(value) and found == value
    for value in ({1: 2, 3: 2}.values(), (2 for _ in "ab"), map(int, "22")):
        assert list(decode(json.loads(json.dumps(encode(value))))) == [2, 2]


class MyInt(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


class MyDict(dict):
    pass


class MyList(list):
    pass


COLOR = enum.IntEnum("COLOR", "RED")


@pytest.mark.parametrize("value", [MyInt(3), MyDict(), MyList(), COLOR.RED, object(), print, iter([]), int, POINT(1)])
@pytest.mark.parametrize("place", [lambda v: v, lambda v: [v], lambda v: (1, (v,)), lambda v: {"a": v}])
def test_what_is_no_builtin_value_does_not_cross(value, place):
    with pytest.raises(TypeError, match=f"a value of type {type(value).__name__}"):
        encode(place(value))


@pytest.mark.parametrize(
    "data",
    [
        *({}, {"int": "0x1", "tuple": []}, {"int": 1}, {"int": "x"}, {"object": []}, {"set": [[1]]}, {"tuple": 1}),
        *({"Decimal": "x"}, {"Fraction": [1, 0]}, {"date": [1]}, {"namedtuple": ["A", ["x"], [1]]}),
        *({"dict": [1]}, {"dict": [[[], 1]]}, {"complex": [1]}, {"bytes": "0"}, {"bytes": None}, {"complex": ["x", 1]}),
    ],
)
def test_what_nobody_encodes_is_refused(data):
    with pytest.raises((TypeError, ValueError, ArithmeticError)):
        decode([data])
