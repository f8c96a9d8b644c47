"""Judges the code in a reply by the tests of its problem.

Runs in a worker process (pool.py) and starts two more processes for each answer (sandbox.py). The judge runs the test
code of the dataset and knows what is expected. The candidate runs the code of the reply and sees only arguments. Calls
cross as values of built-in types (codec.py), so no code of the candidate runs where values are compared. No exit code
is trusted.
"""

import ast
import json
import keyword
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from graders import sandbox
from graders.codec import near
from graders.sandbox import Limits

MAX_TESTS_BYTES = 8 << 20  # of one problem
MAX_PARSED_CHARS = 100_000  # of Python code in a row: 0.2 s
MAX_DEPTH = 100  # of lists in args or expected: what `encode` does to them fits into Python's recursion limit
MAX_OUTCOME_BYTES = 1000
RETRY_PAUSES = (0.1, 0.2, 0.5, 1, 2, 3, 3)  # seconds; environments.py waits for longer than their sum
FORMS = (
    "`test` (code that calls the function, or defines check(candidate)) with `entry_point`, or `tests`: a list of "
    "{input, output}, or of {args, expected} with `entry_point`"
)
# The test for a list of {args, expected}. JSON has no tuples: a problem in which such types matter gives `test`.
CALLS = """
import json
from graders.codec import near

def same(value, expected):
    if type(expected) is dict and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    if type(value) is not type(expected):
        return False
    if type(value) is list:
        return len(value) == len(expected) and all(map(same, value, expected))
    if type(value) is float:
        return near(value, expected)
    return value == expected

def check(candidate):
    for case in json.loads(CASES):
        assert same(candidate(*case["args"]), case["expected"])
"""
FUTURE_IMPORT = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]*\)|[^\n]*)[^\n]*\n?", re.MULTILINE)
# A number with a point or an exponent, which is no part of a word, a version or a date.
DECIMAL = re.compile(r"(?<![\w.])([-+]?(?:\d+\.\d+|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?)(?!\w|\.\d)", re.ASCII)
# A fenced block: its language, and lines that open or close no other one.
BLOCK = re.compile(r"^[ \t]*```([^`\n]*)\n((?:(?![ \t]*```[^`\n]*$).*\n)*)[ \t]*```[ \t\r]*$", re.MULTILINE)

_ADD_TESTS = json.dumps({"entry_point": "add", "test": "def check(f):\n    assert f(2, 3) == 5"})
_SUM_TESTS = json.dumps({"tests": [{"input": "2 3", "output": "5"}]})
_EQUALS_ALL = "class Equal:\n    __eq__ = lambda *_: True\ndef add(a, b): return Equal()"
SELF_TESTS = (  # (reply, answer, outcome): what this file must say before a run may start
    ("```python\ndef add(a, b):\n    return a + b\n```", _ADD_TESTS, "ok"),
    ("def add(a, b): return a * b", _ADD_TESTS, "wrong"),
    (_EQUALS_ALL, _ADD_TESTS, "wrong"),
    ("print(sum(map(int, input().split())))", _SUM_TESTS, "ok"),
    ("exit(0)", _SUM_TESTS, "wrong"),
)


def read_tests(answer: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tests of a problem: {tests} for a program, or {test, entry_point, prompt} for a function.

    They are fields of the problem or, if it has neither `test` nor `tests`, of the JSON object in its answer. `prompt`
    counts only if it is Python, as in HumanEval: it is put before the code, and the test may use what it defines.
    ValueError says what is wrong.
    """
    source: Any = fields
    if fields.get("test") is None and fields.get("tests") is None:
        with suppress(ValueError, RecursionError):  # an answer that is no JSON has no tests
            source = json.loads(answer)
    if not isinstance(source, Mapping) or (source.get("test") is None) == (source.get("tests") is None):
        raise ValueError(f"no tests, or two kinds of them: give {FORMS}")
    test, tests, name, prompt = map(source.get, ("test", "tests", "entry_point", "prompt"))
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        num_bytes, levels = len(json.dumps([test, tests])), depth(tests) - 3  # the list, its objects, and their values
    except (TypeError, ValueError, RecursionError) as error:  # parquet has types that JSON has not
        raise ValueError(f"`test` or `tests` is not valid JSON, or cannot be written as JSON ({error})") from error
    if num_bytes > MAX_TESTS_BYTES or levels > MAX_DEPTH:
        limits = f"more than {MAX_TESTS_BYTES >> 20} MiB, or lists in more than {MAX_DEPTH} levels"
        raise ValueError(f"tests of {num_bytes:,} bytes, with lists in {levels} levels: {limits}")
    if are_cases(tests, input=str, output=str):
        return {"tests": tests}
    if are_cases(tests, args=list, expected=object):
        test = f"CASES = {json.dumps(tests)!r}\n{CALLS}"
    elif tests is not None:
        raise ValueError(f"`tests` is no list of such objects: give {FORMS}")
    elif not isinstance(test, str) or (len(test) <= MAX_PARSED_CHARS and not is_python(test)):
        raise ValueError("`test` is not Python code")
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"entry_point {repr(name)[:80]} is no name of a function or class, which the tests call")
    if isinstance(prompt, str) and len(prompt) > MAX_PARSED_CHARS:
        raise ValueError(f"`prompt` has {len(prompt):,} characters; code before a reply may have {MAX_PARSED_CHARS:,}")
    return {"test": test, "entry_point": name, "prompt": prompt if is_python(prompt) else ""}


def are_cases(tests: Any, **types: type) -> bool:
    """Whether `tests` is a list of objects with fields of these types."""
    objects = isinstance(tests, list) and len(tests) > 0 and all(isinstance(case, dict) for case in tests)
    return objects and all(key in case and isinstance(case[key], types[key]) for case in tests for key in types)


def depth(value: Any) -> int:
    """Levels of lists and objects, one in another."""
    if isinstance(value, list | dict):
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def is_python(code: Any) -> bool:
    if isinstance(code, str):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            ast.parse(code)
            return True
    return False


def extract_code(reply: str) -> str:
    """The last fenced block in Python or without a language, else the whole reply."""
    for language, code in reversed(BLOCK.findall(reply)):
        if language.strip().lower() in ("", "python", "py", "python3"):
            return code
    return reply


def grade(job: dict) -> str:
    """The outcome of a job {reply, tests (from `read_tests`), seconds (for all tests together), memory_mib, isolation}.
    Raises sandbox.Unavailable if no process could be made."""
    code, tests = extract_code(job["reply"]), job["tests"]
    if not code.strip():
        return "parse_fail"
    if prompt := tests.get("prompt"):  # it has imports and helpers, or a function that the reply ends
        code = f"{prompt}\n{code}"
        first = "".join(f"{line}\n" for line in FUTURE_IMPORT.findall(code))  # Python wants them before all else
        code = first + FUTURE_IMPORT.sub("", code)
    sandbox.libc("prctl", sandbox.PR_SET_DUMPABLE, 0)  # this process knows what is expected: no other may look into it
    limits = Limits(job["seconds"], job["memory_mib"], job["isolation"])
    judge = by_programs if "tests" in tests else by_test
    for pause in RETRY_PAUSES:
        with suppress(OSError):  # no process, memory or descriptor: others may give some back
            return judge(code, tests, limits)
        time.sleep(pause)
    return judge(code, tests, limits)


def by_programs(code: str, tests: Mapping[str, Any], limits: Limits) -> str:
    """Runs the program once for each input. Blanks at the ends of lines and of the whole output do not count."""
    deadline = time.monotonic() + limits.seconds
    for case in tests["tests"]:
        left = max(deadline - time.monotonic(), 0.001)
        exited, output = sandbox.run(code, case["input"], limits._replace(seconds=left))
        if exited == sandbox.TIMED_OUT:
            return "timeout"
        if exited != sandbox.ENDED or not same_output(output, case["output"]):
            return "wrong"
    return "ok"


def same_output(output: str, expected: str) -> bool:
    texts = (text.rstrip(" \t\r\n").split("\n") for text in (output, expected))
    printed, wanted = ([line.rstrip(" \t\r") for line in lines] for lines in texts)
    return len(printed) == len(wanted) and all(map(same_line, printed, wanted))


def same_line(line: str, expected: str) -> bool:
    """Whether two lines have the same text between their decimal numbers, and those are `near`."""
    parts = DECIMAL.split(line)  # at odd places, the numbers
    expected_parts = DECIMAL.split(expected)
    if len(parts) != len(expected_parts) or parts[::2] != expected_parts[::2]:
        return False
    pairs = zip(parts[1::2], expected_parts[1::2], strict=True)
    return all(a == b or (math.isfinite(float(b)) and near(float(a), float(b))) for a, b in pairs)


def by_test(code: str, tests: Mapping[str, Any], limits: Limits) -> str:
    """Starts the judge, then the candidate, which runs when no process can look into the judge any more."""
    requests_out, requests_in = os.pipe()
    responses_out, responses_in = os.pipe()
    name = tests["entry_point"]
    candidate = None
    try:
        judge = sandbox.start(
            "judge",
            limits._replace(seconds=limits.seconds + 2),  # the deadline of the candidate comes first
            fds=(requests_in, responses_out),
            prompt=tests["prompt"],
            test=tests["test"],
            name=name,
            requests=requests_in,
            responses=responses_out,
        )
        if judge.stdout.readline(MAX_OUTCOME_BYTES) == b"ready\n":
            candidate = sandbox.start("serve", limits, stdin=requests_out, stdout=responses_in, code=code, name=name)
    finally:
        for descriptor in (requests_out, requests_in, responses_out, responses_in):
            os.close(descriptor)
    with judge.stdout:
        outcome = judge.stdout.readline(MAX_OUTCOME_BYTES)  # the test may write anything; nothing if the judge died
    exit_codes = [sandbox.end(keeper) for keeper in (candidate, judge) if keeper]
    if candidate is None:
        raise sandbox.Unavailable("the judge did not start")
    if outcome == b"ok\n":
        return "ok"
    for exit_code in exit_codes:
        sandbox.check_keeper(exit_code)
    if sandbox.TIMED_OUT in exit_codes:
        return "timeout"
    return "wrong" if outcome == b"wrong\n" else "error"
