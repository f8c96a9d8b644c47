"""Judges the code in a reply by the tests of its problem.

Runs in a worker process (pool.py) and starts two more processes for each answer (sandbox.py). The judge runs the test
code of the dataset and knows what is expected. The candidate runs the code of the reply and sees only arguments. Calls
cross as values of built-in types (codec.py), so no code of the candidate runs where values are compared. No exit code
is trusted.
"""

import json
import keyword
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from . import sandbox
from .code_text import MAX_PARSED_CHARS, completed, is_python, read_codes
from .codec import Json, near
from .sandbox import Limits

MAX_TESTS_BYTES = 8 << 20  # of one problem
MAX_OUTCOME_BYTES = 1000
DEFAULTS = {"seconds": 10.0, "memory_mib": 1024, "isolation": "required"}  # of the command
RETRY_PAUSES = (0.1, 0.2, 0.5, 1, 2, 3, 3)  # seconds; environments.py waits for longer than their sum
FORMS = (
    "`test` (code that calls the function, or defines check(candidate)) with `entry_point`, or `tests`: a list of "
    "{input, output}, or of {args, expected} with `entry_point`"
)
# The test for a list of {args, expected}.
CALLS = f"""
import json
from {sandbox.PACKAGE}.codec import same

def check(candidate):
    for case in json.loads(CASES):
        assert same(candidate(*case["args"]), case["expected"])
"""
# A number that is no part of a word, a version or a date.
NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)(?!\w|\.\d)", re.ASCII)

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


def read_tests(answer: str, fields: Mapping[str, Json]) -> dict[str, Json]:
    """The tests of a problem: {tests} for a program, or {test, entry_point, prompt} for a function.

    They are fields of the problem or, if it has neither `test` nor `tests`, of the JSON object in its answer. `prompt`
    counts only if it is Python, as in HumanEval, or a signature to which only the body is missing: it is put before
    the code, and the test may use what it defines. ValueError says what is wrong.
    """
    source: Json | Mapping[str, Json] = fields
    if fields.get("test") is None and fields.get("tests") is None:
        with suppress(ValueError, RecursionError):  # an answer that is no JSON has no tests
            source = json.loads(answer)
    if not isinstance(source, Mapping) or (source.get("test") is None) == (source.get("tests") is None):
        raise ValueError(f"no tests, or two kinds of them: give {FORMS}")
    test, tests, name, prompt = map(source.get, ("test", "tests", "entry_point", "prompt"))
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        text = json.dumps(tests)
        num_bytes = len(text) + len(json.dumps(test))
    except (TypeError, ValueError, RecursionError) as error:  # parquet has types that JSON has not
        raise ValueError(f"`test` or `tests` is not valid JSON, or cannot be written as JSON ({error})") from error
    if num_bytes > MAX_TESTS_BYTES:
        raise ValueError(f"tests of {num_bytes:,} bytes: more than {MAX_TESTS_BYTES >> 20} MiB")
    if are_cases(tests, input=str, output=str):
        return {"tests": tests}
    if are_cases(tests, args=list, expected=object):
        test = f"CASES = {text!r}\n{CALLS}"
    elif tests is not None:
        raise ValueError(f"`tests` is not a list of objects: give {FORMS}")
    elif not isinstance(test, str) or (len(test) <= MAX_PARSED_CHARS and not is_python(test)):
        raise ValueError("`test` is not Python code")
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"entry_point {repr(name)[:80]} is not the name of a function that the tests can call")
    is_code = isinstance(prompt, str) and completed(prompt) is not None
    return {"test": test, "entry_point": name, "prompt": prompt if is_code else ""}


def are_cases(tests: Json, **types: type) -> bool:
    """Whether `tests` is a list of objects with fields of these types."""
    objects = isinstance(tests, list) and len(tests) > 0 and all(isinstance(case, dict) for case in tests)
    return objects and all(key in case and isinstance(case[key], types[key]) for case in tests for key in types)


def grade(job: dict) -> str:
    """The outcome of a job {reply, answer, fields (of the row), seconds (for all tests), memory_mib, isolation}. Raises
    sandbox.Unavailable if no process could be made."""
    tests = read_tests(job["answer"], job["fields"])
    codes = read_codes(job["reply"], tests)
    if not codes:
        return "parse_fail"
    sandbox.libc("prctl", sandbox.PR_SET_DUMPABLE, 0)  # this process knows what is expected: no other may look into it
    limits = Limits(job["seconds"], job["memory_mib"], job["isolation"])
    judge = by_programs if "tests" in tests else by_test
    for pause in RETRY_PAUSES:
        with suppress(OSError):  # no process, memory or descriptor: others may give some back
            return judge(codes, tests, limits)
        time.sleep(pause)
    return judge(codes, tests, limits)


def by_programs(codes: Sequence[str], tests: Mapping[str, Json], limits: Limits) -> str:
    """Runs the program once for each input."""
    deadline = time.monotonic() + limits.seconds
    for case in tests["tests"]:
        left = max(deadline - time.monotonic(), 0.001)
        exited, output = sandbox.run(codes[0], case["input"], limits._replace(seconds=left), codes[1:])
        if exited == sandbox.TIMED_OUT:
            return "timeout"
        if exited != sandbox.ENDED or not same_output(output, case["output"]):
            return "wrong"
    return "ok"


def same_output(output: str, expected: str) -> bool:
    """Whether two texts are equal but for blanks at the ends of lines and of the whole, and for numbers: a decimal is
    met within the tolerance, an integer by itself or with .0."""
    printed, wanted = (text.rstrip(" \t\r\n").split("\n") for text in (output, expected))
    return len(printed) == len(wanted) and all(map(same_line, printed, wanted))


def same_line(line: str, expected: str) -> bool:
    parts, wanted = (NUMBER.split(text.rstrip(" \t\r")) for text in (line, expected))  # at odd places, the numbers
    if len(parts) != len(wanted) or parts[::2] != wanted[::2]:
        return False
    for number, other in zip(parts[1::2], wanted[1::2], strict=True):
        if number == other or number.rstrip("0") == f"{other}.":
            continue
        is_decimal = not other.lstrip("+-").isdigit() and math.isfinite(float(other))
        if not is_decimal or not near(float(number), float(other)):
            return False
    return True


def by_test(codes: Sequence[str], tests: Mapping[str, Json], limits: Limits) -> str:
    """Starts the judge, then the candidate, which runs when no process can look into the judge any more."""
    ends = requests_out, requests_in, responses_out, responses_in = *os.pipe(), *os.pipe()
    inherited = {"requests": requests_in, "responses": responses_out}
    candidate = None
    try:
        longer = limits._replace(seconds=limits.seconds + 2)  # the deadline of the candidate comes first
        prompt = completed(tests["prompt"])
        names = {"test": tests["test"], "entry_point": tests["entry_point"], "prompt": prompt}
        judge = sandbox.start("judge", longer, fds=tuple(inherited.values()), **inherited, **names)
        if judge.stdout.readline(MAX_OUTCOME_BYTES) == b"ready\n":
            work = {"codes": codes, "name": tests["entry_point"]}
            candidate = sandbox.start("serve", limits, stdin=requests_out, stdout=responses_in, **work)
    finally:
        for descriptor in ends:
            os.close(descriptor)
    with judge.stdout:
        outcome = judge.stdout.readline(MAX_OUTCOME_BYTES)  # the test may write anything; nothing if the judge died
    exit_codes = [sandbox.end(keeper) for keeper in (candidate, judge) if keeper]
    if candidate is None:
        raise sandbox.Unavailable("the test process did not start")
    if outcome == b"ok\n":
        return "ok"
    for exit_code in exit_codes:
        sandbox.check_keeper(exit_code)
    if sandbox.TIMED_OUT in exit_codes:
        return "timeout"
    return "wrong" if outcome == b"wrong\n" else "error"


def main(path: str) -> int:
    """Prints the outcome of each line of a file of JSON lines: {reply}, the tests in one of FORMS, and {seconds,
    memory_mib, isolation} where they are not the defaults."""
    from .pool import GraderPool

    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        print(f"{path}: {error}: give a file of JSON lines, {{reply}} and {FORMS}", file=sys.stderr)
        return 2
    jobs = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            read_tests("", row)
            reply = row["reply"]
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            print(f"{path}:{number}: {error!r}: give {{reply}} and {FORMS}", file=sys.stderr)
            return 2
        limits = {name: row.get(name, default) for name, default in DEFAULTS.items()}
        jobs.append({**limits, "reply": reply, "answer": "", "fields": row})
    longest = max((job["seconds"] for job in jobs), default=0.0)
    most_memory = max((job["memory_mib"] for job in jobs), default=0)
    pool = GraderPool(".code:grade", num_workers=2, deadline_s=longest + 20, memory_mib=most_memory + 1024)
    for graded in pool.grade(jobs):
        print(graded.value if graded.outcome == "ok" else f"error: {graded.message}")
    pool.close()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: python -m judges.code FILE, of JSON lines: {{reply}} and {FORMS}")
    sys.exit(main(sys.argv[1]))
