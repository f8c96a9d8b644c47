"""Hostile and odd code: replies, tests of a dataset, rows. The oracle of honest code is plain Python, run here."""

import itertools
import json
import math
import os
import random
import shutil
import time
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import pytest
from code_jobs import ISOLATIONS, job, make_pool, outcomes

from judges import code as code_judge
from judges import sandbox
from judges.code import read_tests
from judges.codec import Lost, Proxy, decode, encode
from judges.sandbox import Limits, run

LATER = [*ISOLATIONS[:1], *(pytest.param(name, marks=pytest.mark.long) for name in ISOLATIONS[1:])]
pytestmark = pytest.mark.skipif(not ISOLATIONS, reason="this machine has no seccomp")


@pytest.fixture(scope="module")
def pool():
    pool = make_pool()
    yield pool
    pool.close()


def row(test, name="f", prompt=None):
    return {"entry_point": name, "test": test} | ({"prompt": prompt} if prompt else {})


def calls(expected, *args):
    return {"entry_point": "f", "tests": [{"args": list(args), "expected": expected}]}


def prints(expected, given=""):
    return {"tests": [{"input": given, "output": expected}]}


# ------------------------------------------------------------------------------------------- what honest code may do

COUNT_UP = "def f(n):\n    i = 0\n    while i < n:\n        yield i\n        i += 1\n"
HONEST = {  # (test, the name that it calls) -> code that passes it in plain Python
    "generator": ("assert list(f(3)) == [0, 1, 2]", COUNT_UP),
    "generator in a loop": ("for a, b in zip(f(3), range(3)): assert a == b", COUNT_UP),
    "next": ("it = f(2)\nassert (next(it), next(it), next(it, None)) == (0, 1, None)", COUNT_UP),
    "empty generator": ("assert list(f(0)) == [] and next(f(0), 7) == 7", COUNT_UP),
    "map": ("assert sorted(f([2, 1])) == [2, 3]", "def f(x): return map(lambda i: i + 1, x)"),
    "range": ("assert f(3) == range(3) and list(f(3)) == [0, 1, 2] and f(3)[1] == 1", "def f(n): return range(n)"),
    "deque": (
        "assert f()[0] == 1 and list(f()) == [1, 2]",
        "from collections import deque\ndef f(): return deque([1, 2])",
    ),
    "Counter": ("assert f('aab').most_common(1) == [('a', 2)]", "from collections import Counter\nf = Counter\n"),
    "OrderedDict": (
        "assert list(f().items()) == [(2, 1), (1, 2)]\nf().move_to_end(2)",
        "from collections import OrderedDict\ndef f(): return OrderedDict([(2, 1), (1, 2)])",
    ),
    "defaultdict": (
        "assert f([1]) == {1: [1]}",
        "from collections import defaultdict\ndef f(x):\n    d = defaultdict(list)\n"
        "    for i in x: d[i].append(i)\n    return d",
    ),
    "keys": ("assert f({1: 2}) == {1} and list(f({1: 2})) == [1]", "def f(x): return x.keys()"),
    "values": ("assert list(f({1: [2]})) == [[2]]", "def f(x): return x.values()"),
    "items": ("assert sorted(f({1: 2})) == [(1, 2)]", "def f(x): return x.items()"),
    "Decimal": (
        "from decimal import Decimal as D\nassert f(D(1)) == D('1.1')",
        "from decimal import Decimal\ndef f(x): return x + Decimal('.1')",
    ),
    "Fraction": (
        "from fractions import Fraction\nassert f(1, 3) == Fraction(1, 3)",
        "from fractions import Fraction as f",
    ),
    "date": (
        "from datetime import date\nassert f(date(2020, 2, 29)) == date(2020, 3, 1)",
        "import datetime\ndef f(x): return x + datetime.timedelta(days=1)",
    ),
    "bytearray": ("assert f() == b'ab' and f().decode() == 'ab'", "def f(): return bytearray(b'ab')"),
    "sorts in place": ("x = [2, 1]\nf(x)\nassert x == [1, 2]", "def f(x): x.sort()"),
    "in place by name": ("x = [2, 1]\nf(x=x)\nassert x == [1, 2]", "def f(x): x.sort()"),
    "and returns": (
        "x = [3, 1, 3]\nk = f(x, 3)\nassert x[:k] == [1]",
        "def f(x, v):\n    x[:] = [i for i in x if i != v]\n    return len(x)",
    ),
    "matrix": (
        "m = [[1, 2], [3, 4]]\nassert f(m) is None\nassert m == [[1, 3], [2, 4]]",
        "def f(m): m[:] = map(list, zip(*m))",
    ),
    "row of a matrix": ("m = [[1, 2], [3, 4]]\nf(m)\nassert m == [[0, 2], [3, 4]]", "def f(m): m[0][0] = 0"),
    "dict in place": ("d = {}\nf(d)\nassert d == {'a': (1,)}", "def f(d): d['a'] = (1,)"),
    "set in place": ("s = {1}\nf(s)\nassert s == {2}", "def f(s):\n    s.add(2)\n    s.discard(1)"),
    "deque in place": (
        "from collections import deque\nq = deque([1])\nf(q)\nassert q == deque([0, 1])",
        "def f(q): q.appendleft(0)",
    ),
    "in a tuple": ("x = [1]\nf((x, 2))\nassert x == [1, 2]", "def f(t): t[0].append(t[1])"),
    "left alone": ("x = [2, 1]\nassert f(x) == [1, 2] and x == [2, 1]", "def f(x): return sorted(x)"),
    "check": ("assert check(1) == 1", "def check(x): return x", "check"),
    "threads": (
        "assert f(40) == [i * i for i in range(40)]",
        "from concurrent.futures import ThreadPoolExecutor\ndef f(n):\n    with ThreadPoolExecutor(32) as p:\n"
        "        return list(p.map(lambda i: i * i, range(n)))",
    ),
    "slice": ("assert f([1, 2], slice(1)) == [1]", "def f(x, s): return x[s]"),
    "fold of a time": (
        "assert f().fold == 1",
        "from datetime import datetime\ndef f(): return datetime(1, 1, 1, fold=1)",
    ),
}


@pytest.mark.parametrize("isolation", LATER)
def test_what_passes_in_plain_python_passes(pool, isolation):
    jobs = []
    for test, code, *name in HONEST.values():
        names = {}
        exec(code, names)
        exec(test, names)
        jobs.append(job(code, row(test, *name), isolation))
    found = outcomes(pool, jobs)
    assert {name: outcome for name, outcome in zip(HONEST, found, strict=True) if outcome != "ok"} == {}


GRADED = [  # (row, reply)
    (calls({"a": [0.3]}, [0.1, 0.2]), "def f(x): return {'a': [sum(x)]}"),
    (calls(float("nan"), 1), "def f(x): return float('nan')"),
    (calls({"a": 1}, "a"), "from collections import Counter\nf = Counter"),
    (prints("0.3"), "print(.1 + .2)"),
    (row("assert f(1) == 1", prompt="def f(x):\n    'One.'\n"), "    return 1"),
]


def test_right_answers_to_odd_rows_pass(pool):
    found = outcomes(pool, [job(reply, tests) for tests, reply in GRADED])
    assert [reply for (_, reply), outcome in zip(GRADED, found, strict=True) if outcome != "ok"] == []


VALUES = [  # (expected, value, whether it is right)
    (0.6, 0.1 + 0.2 + 0.3, True),
    (1 / 3, 0.333333, True),
    (0.6, 0.60001, False),
    (3e6, 3000001.0, True),
    (3e6, 3000004.0, False),
    (1e-20, 0.0, True),
    (0.0, math.sin(math.pi), True),
    (0.0, 1e-5, False),
    (math.nan, math.nan, True),
    (math.nan, 1.0, False),
    (1.0, math.nan, False),
    (math.inf, math.inf, True),
    (math.inf, -math.inf, False),
    (1e308, math.inf, False),
    (2**60, 2**60 + 1, False),
    (10**4000, 10**4000, True),
    (10**4000, 10**4000 + 1, False),
    (2**60, float(2**60 + 1), True),
    (10**15, float(10**15 + 1), False),
    (3.0, 3, True),
    (3, 3.0, True),
    (3, 3.0000001, False),
    (3.0, "3.0", False),
    (1, True, False),
    (1.0, True, False),
    ([0], range(1), False),
    ([0], {0}, False),
    ([1, [2]], (1, (2.0,)), True),
    ([1, [2]], (1, (2, 2)), False),
    ([1, [2]], (1, 2), False),
    ([1, [0.3]], [1, [0.1 + 0.2]], True),
    ({"a": 0.3}, {"a": 0.1 + 0.2}, True),
    ({"a": 1}, Counter("a"), True),
    ({"a": 1}, {"a": 1, "b": 2}, False),
    ({"1": 2}, {1: 2}, True),
    ({"1": {"true": 2, "null": 3, "0.5": 4}}, {1: {True: 2, None: 3, 0.5: 4}}, True),
    ({"1": 2}, {1: 3}, False),
    ({"1": 2}, {1: 2, "1": 2}, False),
    ({"1": 2, "2": 2}, {1: 2, "1": 2}, False),
    ({"1": 2}, {b"1": 2}, False),
    ({"(1,)": 2}, {(1,): 2}, False),
]


@pytest.mark.parametrize(("expected", "value", "is_right"), VALUES)
def test_an_expected_value_is_met_within_the_stated_tolerance(expected, value, is_right):
    """Gym#2956 (3, 4), LiveCodeBench."""
    names = {}
    test = read_tests("", calls(expected, 1))["test"]
    exec(test.replace(f"{sandbox.PACKAGE}.", "judges."), names)
    if is_right:
        names["check"](lambda _: value)
    else:
        with pytest.raises((AssertionError, TypeError)):
            names["check"](lambda _: value)


OUTPUTS = [  # (expected, output, whether it is right)
    ("0.3", "0.30000000000000004", True),
    ("0.3333333333", "0.333333", True),
    ("[0.3, 1]\tx=-0.6;", "[0.30000000000000004, 1]\tx=-0.6000000000000001;", True),
    ("1.50 2e5", "1.5 200000.0", True),
    ("3.0", "3", True),
    ("3", "3.0", True),
    ("-3 30 0", "-3.000 30.0 0.0", True),
    ("a\n", "a \t\r\n", True),
    ("a\n\nb", "a\n \nb\n\n", True),
    ("0.3.", "0.30000000000000004.", True),
    ("9" * 5000 + " 0.5", "9" * 5000 + " 0.50", True),
    ("9" * 5000 + " 0.5", "9" * 4999 + "8 0.50", False),
    ("0.3", "0.30001", False),
    ("0.3", "-0.3", False),
    ("3", "3.0000001", False),
    ("3", "30.0", False),
    ("3", "3e0", False),
    ("10000000000", "10000000001", False),
    ("10000000000", "10000000001.0", False),
    ("0101", "101", False),
    ("0101", "101.0", False),
    ("1.1.2", "1.10.2", False),
    ("v1.1", "v1.10", False),
    ("0.3 a", "0.30000000000000004 b", False),
    ("0.1 0.2", "0.1  0.2", False),
    ("0.1\n0.2", "0.1", False),
    ("1e400", "1e999", False),
    ("0.5", "nan", False),
    ("a", "a\x1c", False),
    ("a", "a\x85", False),
    ("a", "a\u2028", False),
]


@pytest.mark.parametrize(("expected", "output", "is_right"), OUTPUTS)
def test_an_output_is_met_within_the_stated_tolerance(expected, output, is_right):
    """Gym#2956 (1, 3, 4)."""
    assert code_judge.same_output(output, expected) is is_right


def test_long_outputs_are_compared_in_time():
    start = time.monotonic()
    for text in ("1" * 400_000 + "a", "1e" * 200_000, "1." * 200_000, "-1" * 200_000, ".1" * 200_000):
        assert not code_judge.same_output(text, text + "1")
    assert time.monotonic() - start < 5


# ------------------------------------------------------------------------------------------------- replies that cheat

SAYS = """
import os
def f(*args):
    for fd in range(64):
        try: os.write(fd, LINE + b'\\n')
        except OSError: pass
"""
SPLIT = row("assert f('a b') == ['a', 'b']")
STARTS = row("assert f(2).startswith('ab') and 3 in f(2) and len(f(2)) == 7 and abs(f(2) - 5) < 1")
APPROVES = "\n".join(
    f"    {name} = lambda *_: {value}"
    for name, value in {
        "__init__": "None",
        "startswith": "True",
        "__contains__": "True",
        "__eq__": "True",
        "__sub__": "0",
        "__abs__": "0",
        "__len__": "7",
        "__lt__": "True",
        "__hash__": "0",
        "__bool__": "True",
    }.items()
)
CHEATS = {
    "class that approves": (STARTS, f"class f:\n{APPROVES}"),
    "object that approves": (STARTS, f"class A:\n{APPROVES}\ndef f(x): return A()"),
    "iterator that approves": (STARTS, f"class A:\n{APPROVES}\n    __next__ = lambda self: 1\ndef f(x): return A()"),
    "function that approves": (STARTS, f"class A:\n{APPROVES}\n    __call__ = lambda self: 1\ndef f(x): return A()"),
    "forges an object": (STARTS, SAYS.replace("LINE", """b'["value", {"object": 0}, null]'""")),
    "forges an iterator": (SPLIT, SAYS.replace("LINE", """b'["value", {"iterator": 0}, null]'""")),
    "forges arguments": (SPLIT, SAYS.replace("LINE", """b'["value", 1, [[5], {"dict": []}]]'""")),
    "forges a kind": (SPLIT, SAYS.replace("LINE", """b'["value", {"Proxy": 1}, null]'""")),
    "list that approves": (SPLIT, f"class A(list):\n{APPROVES}\ndef f(x): return A()"),
    "named tuple that approves": (
        SPLIT,
        "import collections\nclass A(collections.namedtuple('A', 'x')):\n"
        "    __eq__ = lambda *_: True\ndef f(x): return A(1)",
    ),
    "generator without end": (SPLIT, "def f(x):\n    while True: yield x"),
    "huge range": (row("assert list(f(2)) == [1]"), "def f(x): return range(10**18)"),
    "ring": (SPLIT, "def f(x):\n    x = []\n    x.append(x)\n    return x"),
    "ends in the generator": (row("assert list(f(2)) == [1]"), "import os\ndef f(x):\n    yield 1\n    os._exit(0)"),
    "argument that cannot cross": (row("x = [1]\nf(x)\nassert x"), "def f(x): x.append(object())"),
    "what cannot come back": (row("assert f(f(2)) == 2"), "def f(x): return iter([x])"),
    "function that cannot come back": (row("assert f(f(2)) == 2"), "def f(x): return print"),
    "needs root's count": (
        row("assert f(2) == 0"),
        "import os\ndef f(x):\n    os.setresuid(65534, 0, 0)\n    return 0",
    ),
}


@pytest.mark.parametrize("isolation", LATER)
def test_no_cheat_scores(pool, isolation):
    found = outcomes(pool, [job(code, tests, isolation, 2.0) for tests, code in CHEATS.values()])
    scored = {name: o for name, o in zip(CHEATS, found, strict=True) if o not in ("wrong", "timeout")}
    assert scored == {}


# ------------------------------------------------------------------------------------------------ tests of a dataset

WRITES = "import os\nf(1)\nfor fd in range(1, 64):\n    try: os.write(fd, LINE)\n    except OSError: pass\nos._exit(0)"
FORGED = {
    "another outcome": """b'great\\n'""",
    "a list": """b'["great", ""]\\n'""",
    "a list of one": """b'["x"]\\n'""",
    "a number": "b'5\\n'",
    "upper case": "b'OK\\n'",
    "two": "b'ok ok\\n'",
    "nothing": "b'\\n'",
    "timeout": "b'timeout\\n'",
    "parse_fail": "b'parse_fail\\n'",
    "no text": "b'\\xff\\xfe\\n'",
    "no end of line": "b'ok'",
    "zeros": "bytes(999)",
    "deep": "b'[' * 50_000",
    "a megabyte": "b'o' * (1 << 16) + b'k\\n'",
    "reward": """b'{"reward": 1e9}\\n'""",
}
BREAKS = {
    "exits": "f(1)\nimport os\nos._exit(121)",
    "aborts": "f(1)\nimport os\nos.abort()",
    "crashes": "f(1)\nimport ctypes\nctypes.string_at(0)",
    "closes the connection": "f(1)\nimport os\nos.closerange(3, 64)\nf(1)\nos._exit(0)",
    "calls nothing": "assert True",
    "wants what is not there": "import numpy",
    "sends a function": "f(lambda: 1)",
    "sends a deep list": "x = []\nfor _ in range(5000): x = [x]\nf(x)",
    "closes all": "import os\nf(1)\nos.closerange(0, 64)",
}


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_forged_verdict_is_an_error(pool, every):
    tests = [WRITES.replace("LINE", line) for line in FORGED.values()] + list(BREAKS.values())
    names = [*FORGED, *BREAKS][::every]
    found = outcomes(pool, [job("def f(x): return x", row(test)) for test in tests[::every]])
    assert dict(zip(names, found, strict=True)) == dict.fromkeys(names, "error")


def test_verdicts_without_end_are_bounded(pool):
    flood = "import os, sys\nf(1)\nfd = sys._getframe(2).f_locals['result']\nwhile True: os.write(fd, LINE * 9999)"
    start = time.monotonic()
    tests = [flood.replace("LINE", line) for line in ("b'x'", "b'x\\n'", "b'\\xff'")]
    assert outcomes(pool, [job("def f(x): return x", row(test), seconds=2.0) for test in tests]) == ["error"] * 3
    assert time.monotonic() - start < 10


# ---------------------------------------------------------------------------------------------------------------- rows


def nested(levels, kind="[]"):
    return json.loads('{"a":' * levels + "1" + "}" * levels if kind == "{}" else "[" * levels + "]" * levels)


ROWS = [  # (row, what the refusal says; None if it is accepted)
    *(
        (row("f()", name), "entry_point")
        for name in ("class", "None", "a b", "", "1f", "f.g", "lambda", "x" * 9999 + "!")
    ),
    *((row("f()", name), "entry_point") for name in (None, 5, ["f"], {"f": 1})),
    *((row("f()", name), None) for name in ("match", "é", "_", "Stack")),
    *((calls(1, nested(300, kind)), None) for kind in ("[]", "{}")),
    ({"tests": "[" * 100_000}, "JSON"),
    (row("f()", prompt="x = 1\n" * 1000), None),
    (row("x = 1\n" * 400_000 + "f()"), None),
    (row("x = 1\n" * 2_000_000), "more than 8 MiB"),
    *((row(test), "not Python") for test in ("f(", "f()\0", "\ud800", 5, ["f()"], "(" * 9999, "-" * 60_000 + "1")),
    *((calls(value), "JSON") for value in (b"x", {1, 2}, object())),
    (row(b"f()"), "JSON"),
    *(({"tests": tests, "entry_point": "f"}, "`tests` is not a list") for tests in ([], [1], {}, [{"args": [1]}])),
    *(({"tests": [{"input": "1", "output": x}], "entry_point": "f"}, "`tests` is not a list") for x in (1, None)),
    ({"tests": [{"args": 1, "expected": 1}], "entry_point": "f"}, "`tests` is not a list"),
    ({"tests": [{"args": [1], "expected": 1}]}, "entry_point None"),
    ({}, "no tests, or two kinds of them: give `test`"),
    ({"test": "f()", "tests": [{}]}, "no tests, or two kinds of them"),
]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_rows_are_refused_in_bounded_time(number):
    fields, said = ROWS[number]
    start = time.monotonic()
    if said is None:
        read_tests("", fields)
    else:
        with pytest.raises(ValueError, match=said) as error:
            read_tests("", fields)
        assert len(str(error.value)) < 400
    assert time.monotonic() - start < 2


# ------------------------------------------------------------------------------------------------- threads and keepers

THREADS = """
import ctypes, mmap, threading, time
BOMB
print(n, flush=True)
"""
IN_PYTHON = """
threading.stack_size(32768)
n = 0
try:
    while n < 999: n += threading.Thread(target=time.sleep, args=(0.3,)).start() is None
except RuntimeError: pass
"""
# mov eax, 56 (clone); syscall; test rax, rax; jz child; ret; child: mov eax, 34 (pause); syscall; jmp child
BY_NUMBER = """
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b8380000000f054885c07402c390b8220000000f05ebf7"))
clone = ctypes.CFUNCTYPE(*[ctypes.c_long] * 6)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
stack = ctypes.create_string_buffer(65536)
n = sum(clone(0x50f00, ctypes.addressof(stack) + 60000 & ~15, 0, 0, 0) > 0 for _ in range(9999))
"""
BOMBS = {"threading": IN_PYTHON} | ({"clone": BY_NUMBER} if os.uname().machine == "x86_64" else {})


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_program_has_32_threads_beside_the_first(isolation, bomb):
    exited, output = run(THREADS.replace("BOMB", BOMBS[bomb]), "", Limits(10, 512, isolation))
    assert exited == sandbox.ENDED and (int(output) == 32 or (os.getuid() and int(output) < 32))


ADD = row("assert f(1, 2) == 3")
HONEST_JOBS = [
    ("def f(a, b): return a + b", ADD, "ok"),
    ("def f(a, b): return a * b", ADD, "wrong"),
    ("print(sum(map(int, input().split())))", prints("5", "2 3"), "ok"),
    ("print(6)", prints("5", "2 3"), "wrong"),
]
FORKS = """
import os
n = 0
while n < 9999:
    try: n += os.fork() >= 0
    except OSError: n += 1
"""
SPINS = IN_PYTHON.replace("time.sleep, args=(0.3,)", "sum, args=(iter(int, 1),)")
ALL_BOMBS = {**BOMBS, "fork": FORKS, "spin": SPINS}
PIDS = Path("/sys/fs/cgroup/pids")


def limited_pool(pids):
    """A pool in a cgroup with at most so many processes and threads; the cgroup."""
    group = PIDS / f"red_team_{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text(str(pids))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        return make_pool(), group
    finally:
        (PIDS / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.parametrize("isolation", LATER)
@pytest.mark.parametrize(
    ("bomb", "num_honest", "seconds"),
    [(list(BOMBS)[-1], 8, 0.5), *(pytest.param(bomb, 200, 4.0, marks=pytest.mark.long) for bomb in ALL_BOMBS)],
)
def test_a_bomb_changes_no_verdict_of_the_other_worker(isolation, bomb, num_honest, seconds):
    program = THREADS.replace("BOMB", ALL_BOMBS[bomb]) + "while True: pass\ndef f(a, b): return 0\n"
    honest = list(itertools.islice(itertools.cycle(HONEST_JOBS), num_honest))
    jobs = [job(reply, tests, isolation) for reply, tests, _ in honest]
    bombs = [job(program, tests, isolation, seconds) for tests in (ADD, prints("5"))]
    pool, group = limited_pool(400)
    try:
        found = outcomes(pool, [bombs[0], *jobs[: num_honest // 2], bombs[1], *jobs[num_honest // 2 :]])
    finally:
        pool.close()
        group.rmdir()
    assert found.pop(num_honest // 2 + 1) in ("wrong", "timeout") and found.pop(0) in ("wrong", "timeout")
    assert found == [outcome for *_, outcome in honest]


SPOILED = {  # what goes wrong in the keeper: a line of sandbox.py -> what stands in its place
    "fork": ("child = os.fork()", "raise BlockingIOError(11, 'no more processes')"),
    "pipe": ("status_out, status_in = os.pipe()", "raise OSError(24, 'no more files')"),
    "memory": (
        "signal.pthread_sigmask(signal.SIG_BLOCK",
        "raise MemoryError\n    signal.pthread_sigmask(signal.SIG_BLOCK",
    ),
    "import": ("import resource", "import resource, no_such_module"),
    "killed": ("child = os.fork()", "os.kill(os.getpid(), 9)"),
    "exit code 1": ("child = os.fork()", "os._exit(1)"),
    "exit code 0": ("child = os.fork()", "os._exit(0)"),
    "dies later": ("    os.kill(child, signal.SIGKILL)", "    raise MemoryError"),
}


@pytest.fixture
def spoil(monkeypatch, tmp_path):
    def spoil(line, other):
        text = Path(sandbox.__file__).read_text(encoding="utf-8")
        assert text.count(line) == 1, line
        shutil.copytree(Path(sandbox.__file__).parent, tmp_path / "judges")
        (tmp_path / "judges" / "sandbox.py").write_text(text.replace(line, other), encoding="utf-8")
        monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "judges" / "sandbox.py"))
        monkeypatch.setattr(code_judge, "RETRY_PAUSES", (0.01,))

    return spoil


SOME_SPOILED = list(SPOILED)[::2]
OTHER_SPOILED = list(SPOILED)[1::2]


@pytest.mark.parametrize(
    "name", [*SOME_SPOILED, *(pytest.param(name, marks=pytest.mark.long) for name in OTHER_SPOILED)]
)
def test_what_fails_in_a_keeper_is_no_verdict(spoil, name):
    spoil(*SPOILED[name])
    honest = [HONEST_JOBS[2]] if name == "dies later" else [HONEST_JOBS[0], HONEST_JOBS[2]]
    for reply, tests, _ in honest:
        with pytest.raises(sandbox.Unavailable):
            code_judge.grade(job(reply, tests))


def test_it_is_tried_again(spoil, tmp_path, monkeypatch):
    """The first five keepers find no process; the sixth and later ones do."""
    tries = str(tmp_path / "tries")
    Path(tries).touch()
    count = f"open({tries!r}, 'a').write('x')"
    line = "status_out, status_in = os.pipe()"
    refused = f"{count}\n            raise BlockingIOError(11, 'no more processes')"
    spoil(line, f"{line}\n        if os.path.getsize({tries!r}) < 5:\n            {refused}")
    monkeypatch.setattr(code_judge, "RETRY_PAUSES", (0.01,) * 6)
    reply, tests, _ = HONEST_JOBS[2]
    assert code_judge.grade(job(reply, tests, "none")) == "ok"
    assert Path(tries).read_text() == "xxxxx"


# ---------------------------------------------------------------------------------------------------------- generated


def some_value(rng, depth=0):
    atoms = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-9, 9),
        lambda: rng.randrange(2**70) - 2**69,
        lambda: rng.uniform(-1e9, 1e9),
        lambda: rng.choice([0.0, -0.0, float("inf")]),
        lambda: "é\ud800\0x"[: rng.randrange(5)],
        lambda: rng.randbytes(3),
        lambda: complex(rng.random(), -1),
        lambda: range(rng.randrange(9)),
    ]
    if depth > 3 or rng.random() < 0.4:
        return rng.choice(atoms)()
    items = [some_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = [rng.choice(atoms)() for _ in items]
    pairs = list(zip(keys, items, strict=True))
    return rng.choice(
        [
            lambda: items,
            lambda: tuple(items),
            lambda: deque(items),
            lambda: set(keys),
            lambda: frozenset(keys),
            lambda: dict(pairs),
            lambda: OrderedDict(pairs),
            lambda: bytearray(rng.randbytes(2)),
            lambda: defaultdict(None, pairs),
            lambda: Counter(map(str, keys)),
            lambda: dict(pairs).keys(),
        ]
    )()


@pytest.mark.parametrize("count", [100, pytest.param(20_000, marks=pytest.mark.long)])
def test_values_cross_as_they_are(count):
    rng = random.Random(12)
    for _ in range(count):
        value = some_value(rng)
        found = decode(json.loads(json.dumps(encode(value))))
        assert type(found) is type(value) and found == value


def some_line(rng):
    value = encode(some_value(rng))
    kinds = ["value", "raised", "bad", "object", 5, None]
    spoiled = rng.choice(
        [
            [rng.choice(kinds), value, rng.choice([None, value])],
            [
                rng.choice(kinds),
                {rng.choice(["int", "dict", "object", "function", "Counter", "range", "x"]): value},
                None,
            ],
            value,
            ["value"] * rng.randrange(5),
        ]
    )
    line = bytearray(json.dumps(spoiled).encode())
    for _ in range(rng.choice([0, 0, 1, 5])):
        line[rng.randrange(len(line))] = rng.randrange(256)
    return bytes(line).replace(b"\n", b"") + rng.choice([b"\n", b"\n", b""])


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.long)])
def test_no_answer_of_a_candidate_breaks_the_judge(count):
    rng = random.Random(13)
    for _ in range(count):
        requests, responses = os.memfd_create("requests"), os.memfd_create("responses")
        os.write(responses, line := some_line(rng))
        os.lseek(responses, 0, os.SEEK_SET)
        proxy = Proxy(requests, responses)
        given = [1, [2]]
        try:
            value = proxy(given, {3}, x={})
        except (Lost, Exception) as error:
            assert proxy.lost or type(error).__module__ == "builtins", line
        else:
            assert not proxy.lost, line
            assert type(value).__module__ in ("builtins", "collections"), line
        proxy.requests.close()
        proxy.responses.close()
