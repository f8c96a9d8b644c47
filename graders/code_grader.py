"""Judges code by tests: the code in a reply, run in a process that nobody trusts, against what a row says it must do.

Runs in a grader's worker process (grader.py) and starts two more for each answer (sandbox.py): the judge runs the
dataset's test code and knows what is expected; the candidate runs the reply's code and sees arguments only. A call
crosses as values of built-in types, so nothing of the candidate's runs where it is compared; exit codes prove nothing.
"""

import ast
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from config import ConfigError
from graders import sandbox
from graders.sandbox import Limits

MAX_TESTS_BYTES = 8 << 20  # of a row
FORMS = (
    "`test` (code that calls the function, or defines check(candidate)) with `entry_point`, or `tests`: a list of "
    "{input, output}, or of {args, expected} with `entry_point`"
)
# The test that a list of {args, expected} stands for. JSON has no tuples: where types like that matter, give `test`.
CALLS = """
import json

def same(value, expected):
    if type(value) is not type(expected):
        return False
    if type(value) is list:
        return len(value) == len(expected) and all(map(same, value, expected))
    if type(value) is dict:
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in value)
    return value == expected

def check(candidate):
    for number, case in enumerate(json.loads(CASES), 1):
        value = candidate(*case["args"])
        assert same(value, case["expected"]), f"call {number} gave {value!r:.100}, not {case['expected']!r:.100}"
"""

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


def check_isolation(limits: dict) -> None:
    """Raises ConfigError if this machine cannot run a program under `limits` (arguments of sandbox.Limits)."""
    try:
        sandbox.run("", "", Limits(**limits))
    except sandbox.Unavailable as error:
        isolation = limits["isolation"]
        other = ", or set env.code.isolation=none (see README.md)" if isolation == "required" else ""
        raise ConfigError(
            f"env.code.isolation={isolation}: this machine does not let a program be kept apart ({error}): "
            f"allow user namespaces and seccomp{other}"
        ) from error


def read_tests(answer: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of its tests: {tests} of a program, or {test, entry_point, prompt} of a function.

    They are fields of the row or, if it has neither `test` nor `tests`, of the JSON object that is its answer. `prompt`
    counts only where it is Python, as HumanEval's: then it comes before the code, and the test may use what it defines.
    ValueError that says what is wrong.
    """
    found: Any = columns
    if columns.get("test") is None and columns.get("tests") is None:
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, Mapping) or (found.get("test") is None) == (found.get("tests") is None):
        raise ValueError(f"no tests, or two kinds of them: give {FORMS}")
    test, tests = found.get("test"), found.get("tests")
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"`tests` is not valid JSON ({error})") from error
    if tests is not None and not (isinstance(tests, list) and tests and all(isinstance(case, dict) for case in tests)):
        raise ValueError(f"`tests` is no list of objects, or empty: give {FORMS}")
    if len(json.dumps([test, tests])) > MAX_TESTS_BYTES:
        raise ValueError(f"more than {MAX_TESTS_BYTES >> 20} MiB of tests")
    if tests is not None and all(isinstance(case.get(k), str) for case in tests for k in ("input", "output")):
        return {"tests": tests}
    name, prompt = found.get("entry_point"), found.get("prompt")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"entry_point {name!r} is no name of a function, which the tests call")
    if tests is not None:
        if not all(isinstance(case.get("args"), list) and "expected" in case for case in tests):
            raise ValueError(f"`tests` has neither text under input and output, nor args and expected: give {FORMS}")
        test = f"CASES = {json.dumps(tests)!r}\n{CALLS}"
    elif not isinstance(test, str) or not is_python(test):
        raise ValueError("`test` is not Python code")
    return {
        "test": test,
        "entry_point": name,
        "prompt": prompt if isinstance(prompt, str) and is_python(prompt) else "",
    }


def is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def extract_code(reply: str) -> str:
    """The last fenced block in Python or in no language, else the reply."""
    found, block, language = reply, None, ""
    for line in reply.splitlines(keepends=True):
        fence = line.strip()
        if block is not None and fence == "```":
            found, block = ("".join(block) if language in ("", "python", "py", "python3") else found), None
        elif fence.startswith("```") and "`" not in fence[3:]:
            block, language = [], fence[3:].strip().lower()
        elif block is not None:
            block.append(line)
    return found


def grade(job: dict) -> dict:
    """{outcome, message} of a job: reply, tests (of `read_tests`), seconds (of all tests together), memory_mib and
    isolation. sandbox.Unavailable where no process could be made."""
    code, tests = extract_code(job["reply"]), job["tests"]
    if not code.strip():
        return {"outcome": "parse_fail", "message": "no code"}
    code = f"{tests.get('prompt', '')}\n{code}"  # its imports and helpers; or the function that the reply goes on with
    sandbox.libc("prctl", sandbox.PR_SET_DUMPABLE, 0)  # nobody looks into this process, which knows what is expected
    limits = Limits(job["seconds"], job["memory_mib"], job["isolation"])
    outcome, message = by_programs(code, tests["tests"], limits) if "tests" in tests else by_test(code, tests, limits)
    return {"outcome": outcome, "message": message}


def by_programs(code: str, tests: list[dict], limits: Limits) -> tuple[str, str]:
    """Every input in a process of its own. Outputs are compared without the spaces that end lines and the whole."""
    deadline = time.monotonic() + limits.seconds
    for number, case in enumerate(tests, 1):
        left = deadline - time.monotonic()
        exited, output = sandbox.run(code, case["input"], limits._replace(seconds=max(left, 0.001)))
        if exited == sandbox.TIMED_OUT:
            return "timeout", f"test {number}"
        if exited != sandbox.ENDED or lines(output) != lines(case["output"]):
            return "wrong", f"test {number}: " + ("crashed" if exited else f"printed {output!r:.100}")
    return "ok", ""


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def by_test(code: str, tests: Mapping[str, Any], limits: Limits) -> tuple[str, str]:
    """The judge first: the candidate runs when nobody can look into the judge any more."""
    pipes = (requests_out, requests_in), (answers_out, answers_in) = os.pipe(), os.pipe()
    name, candidate = tests["entry_point"], None
    job = {"prompt": tests["prompt"], "test": tests["test"], "name": name}
    try:
        ends = {"requests": requests_in, "responses": answers_out}
        longer = limits._replace(seconds=limits.seconds + 2)  # the candidate's deadline comes first
        judge = sandbox.start("judge", longer, fds=tuple(ends.values()), **job, **ends)
        ready = judge.stdout.readline()
        if ready == b"ready\n":
            candidate = sandbox.start("serve", limits, stdin=requests_out, stdout=answers_in, code=code, name=name)
    finally:
        for descriptor in sum(pipes, ()):
            os.close(descriptor)
    with judge.stdout:
        said = judge.stdout.readline()  # nothing, if it dies
    exited = [sandbox.end(keeper) for keeper in (candidate, judge) if keeper]
    if candidate is None or sandbox.NO_SANDBOX in exited:
        raise sandbox.Unavailable(f"judge or candidate did not start: {ready.decode().strip()}")
    outcome, message = json.loads(said) if said else ("error", "the judge died")
    return ("timeout" if outcome != "ok" and sandbox.TIMED_OUT in exited else outcome), message
