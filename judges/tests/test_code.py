"""Code judged by tests: HumanEval's solutions pass, spoiled and hostile ones do not, and nothing stays behind."""

import ast
import gzip
import json
import os
import re
import socket
import time
from pathlib import Path

import pytest
from code_jobs import ISOLATIONS, children, job, make_pool, outcomes
from hostile_code import HOSTILE, LOOK
from real_data import DATA

from judges import sandbox
from judges.code import by_test, is_python, read_codes, read_tests

HUMANEVAL = DATA / "HumanEval.jsonl.gz"
SECRET = "the-secret-of-the-judge"


pytestmark = pytest.mark.skipif(not ISOLATIONS, reason="this machine has no seccomp")


@pytest.fixture(scope="module")
def pool():
    pool = make_pool()
    yield pool
    pool.close()


SPOILED = """
names = {}
exec(SOLUTION, names)
def other(x):
    if x is None: return 0
    if type(x) is bool: return not x
    if type(x) in (int, float): return x + 1
    if type(x) is str: return x + "x"
    if type(x) is dict: return x | {"other": 0}
    return x + type(x)([0])
def NAME(*args): return other(names["NAME"](*args))
"""


@pytest.mark.skipif(not HUMANEVAL.exists(), reason=f"real data is not there: {HUMANEVAL}")
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("isolation", [*ISOLATIONS[:1], pytest.param("none", marks=pytest.mark.long)])
def test_humaneval_solutions_pass_and_spoiled_ones_fail(pool, isolation, every):
    with gzip.open(HUMANEVAL, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][::every]
    assert len(rows) == -(-164 // every)
    right, spoiled = [], []
    for row in rows:
        solution = row["prompt"] + row["canonical_solution"]
        wrapped = f"SOLUTION = {solution!r}\n{SPOILED.replace('NAME', row['entry_point'])}"
        right.append(job(row["canonical_solution"], row, isolation))
        spoiled.append(job(f"So:\n```python\n{wrapped}```\n", row, isolation))
    assert outcomes(pool, right) == ["ok"] * len(rows)
    assert outcomes(pool, spoiled) == ["wrong"] * len(rows)


ADD = {"entry_point": "add", "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(5, -7) == -2\n"}
RIGHT = "def add(a, b):\n    return a + b\n"
CALLS = {
    "entry_point": "f",
    "tests": [{"args": [[1, 2]], "expected": {"a": [3.0, None]}}, {"args": [[]], "expected": 0}],
}
PROGRAM = {"tests": [{"input": "2\n3\n", "output": "5\n"}, {"input": "1 \n1", "output": "2"}]}
ROOT = 'import math\ndef two(): return 2\ndef f(x):\n    """Root."""\n'
PROMPTED = {"entry_point": "f", "prompt": ROOT, "test": "assert f(4) == two()"}  # HumanEval's tests use helpers too
LOOPS = {"entry_point": "f", "test": "for x, y in zip(map(f, [1, 2]), [1, 2]): assert x == y"}
RAISES = {"entry_point": "f", "test": "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass\n"}
SWALLOWS = {
    "entry_point": "f",
    "test": "for i in range(3):\n    try:\n        f(i)\n    except Exception:\n        pass\n",
}
SWALLOWS_ALL = SWALLOWS | {"test": SWALLOWS["test"].replace("Exception", "BaseException")}
FORGED = """
import os
def f(x):
    for fd in range(64):
        try: os.write(fd, b'["other", {"int": "0x' + b"f" * 9999 + b'"}]\\n')
        except OSError: pass
"""
TYPES = {
    "entry_point": "f",
    "test": "def check(f):\n    x = (1, {2}, b'3', frozenset([4]), 5j, None, {6: (7,)})\n    y = f(x)\n"
    "    assert y == x and list(map(type, y)) == list(map(type, x))\n",
}
EXITS = {"entry_point": "f", "test": "import sys\nassert f(1) == 2\nsys.exit(0)"}
EXITS_ONE = {"entry_point": "f", "test": "import sys\nsys.exit(f(1) != 2)"}
MAIN = """
import unittest
class Test(unittest.TestCase):
    def test_one(self): self.assertEqual(f(1), 2)
    def test_two(self): self.assertEqual(f(2), 3)
if __name__ == "__main__":
    """
MAINS = [
    {"entry_point": "f", "test": MAIN + ending}
    for ending in (
        "unittest.main()",
        "unittest.main(argv=[''], exit=False)",
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Test))",
        "import sys\n    sys.exit(not unittest.main(exit=False).result.wasSuccessful())",
    )
]
LEAVES = {"entry_point": "f", "test": "try:\n    f(0)\n    assert False\nexcept SystemExit: pass"}
PASSES_ON = {
    "entry_point": "f",
    "test": "import sys\ntry:\n    assert f(1) == 2\nexcept SystemExit as e: sys.exit(e.code)",
}
REPORTS = {"entry_point": "f", "test": "import sys\ntry:\n    assert f(1) == 2\nexcept BaseException: sys.exit(1)"}
KEYS = {"entry_point": "f", "tests": [{"args": [1], "expected": {"1": 2}}]}
UP = "def f(x): return x + 1"
LEFT = ("raise SystemExit", "raise SystemExit(0)", "import sys; sys.exit(0)", "exit()", "import os; os._exit(0)")
BROKEN = [
    {"entry_point": "f", "test": test}
    for test in (
        "def check_all(f): assert f(1) == 1",
        "import no_such_module",
        "f(lambda: 1)",
        "import os; os._exit(0)",
    )
]
JUDGED = [
    (ADD, RIGHT, "ok"),
    (ADD, f"Think.\n```\nnot this\n```\n```python\n{RIGHT}```\nDone.", "ok"),
    (ADD, "def add(a, b): return 3", "wrong"),
    (ADD, "add = lambda a, b: a + b", "ok"),
    (ADD, "def plus(a, b): return a + b", "wrong"),
    (ADD, "def add(a, b) return", "wrong"),
    (ADD, "I do not know.", "wrong"),
    (ADD, "```python\n\n```", "wrong"),
    (ADD, " \n", "parse_fail"),
    (ADD, "def add(a, b):\n    while True: pass", "timeout"),
    (CALLS, "def f(x): return {'a': [float(sum(x)), None]} if x else 0", "ok"),
    (CALLS, "def f(x): return {'a': (sum(x), None)} if x else 0", "ok"),  # 3 is 3.0, a tuple a list
    (CALLS, "def f(x): return {'a': [float(sum(x)), None]} if x else False", "wrong"),
    (CALLS, "def f(x): return {'a': [3.0, None, 1]} if x else 0", "wrong"),
    (CALLS, "def f(x): return {'a': [3.0, None], 'b': 1} if x else 0", "wrong"),
    (PROGRAM, "print(int(input()) + int(input()))", "ok"),
    (PROGRAM, "print(int(input()) + int(input()), ' ')\nprint()\nexit()", "ok"),
    (PROGRAM, "print(5)", "wrong"),
    (PROGRAM, "print(int(input()) + int(input()))\n1 / 0", "wrong"),
    (PROGRAM, "import sys\nsys.exit(0)", "wrong"),
    (PROGRAM, "print(int(input()) + int(input()), flush=True)\nwhile True: pass", "timeout"),
    (PROMPTED, "    return math.sqrt(x)", "ok"),
    (PROMPTED, "def f(x): return math.sqrt(x)", "ok"),
    (PROMPTED, "from math import sqrt as f", "ok"),
    (PROMPTED, "    pass", "wrong"),
    (RAISES, "def f(x): 1 / x", "ok"),
    (RAISES, "class Mine(ZeroDivisionError): pass\ndef f(x): raise Mine", "ok"),
    (RAISES, "def f(x): raise ValueError", "wrong"),
    (RAISES, "def f(x): return x", "wrong"),
    (LOOPS, "def f(x): return x", "ok"),
    (LOOPS, "def f(x): raise StopIteration", "wrong"),
    (SWALLOWS, "def f(x): raise ValueError", "ok"),  # it expects no more
    (SWALLOWS, "def f(x): raise SystemExit", "wrong"),
    (SWALLOWS, "def f(x): return object()", "wrong"),
    (SWALLOWS_ALL, "def f(x): return object()", "wrong"),  # whoever catches it: no value is no pass
    (SWALLOWS_ALL, FORGED, "wrong"),
    (TYPES, "def f(x): return x", "ok"),
    (TYPES, "def f(x): return list(x)", "wrong"),
    (
        {"entry_point": "f", "test": "x = f()\nassert not x, x"},
        "def f(): return 1 << 99_999",
        "wrong",
    ),  # no shorter text
    *((test, "def f(x): return x", "error") for test in BROKEN),
]


ENDS_AND_CROSSES = [
    *((test, UP, "ok") for test in (EXITS, EXITS_ONE, *MAINS, PASSES_ON, REPORTS)),
    *((test, "def f(x): return x", "wrong") for test in (EXITS, EXITS_ONE, *MAINS, REPORTS)),
    *((PASSES_ON, f"def f(x): {code}", "wrong") for code in LEFT),
    *((test, f"def f(x): {LEFT[1]}", "wrong") for test in (EXITS, *MAINS[:2], REPORTS)),
    (EXITS, f"{LEFT[1]}\n{UP}", "wrong"),
    (LEAVES, "def f(x): raise SystemExit(2)", "ok"),
    (LEAVES, "import sys\nclass Mine(SystemExit): pass\ndef f(x): raise Mine", "ok"),
    (LEAVES, "def f(x): raise ValueError", "wrong"),
    (LEAVES, "import os\ndef f(x): os._exit(0)", "wrong"),
    (EXITS, "def f(x):\n    print('x' * 9_000_000)\n    return x + 1", "ok"),
    (KEYS, "def f(x): return {x: x + 1}", "ok"),
    (KEYS, "def f(x): return {x: x}", "wrong"),
]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_code_is_judged(pool, isolation):
    judged = JUDGED[:: 1 if isolation == ISOLATIONS[0] else 4]
    jobs = [job(reply, row, isolation, 0.7 if "while True" in reply else 20) for row, reply, _ in judged]
    assert outcomes(pool, jobs) == [outcome for *_, outcome in judged]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_broken_tests_are_judged_at_once(isolation):
    """The candidate's keeper is ended before it has begun, which is no failure of the machine to try again after."""
    for tests in BROKEN:
        assert (
            by_test(["def f(x): return x"], tests | {"prompt": ""}, sandbox.Limits(20, isolation=isolation)) == "error"
        )


def test_tests_may_exit_and_code_may_exit_print_and_wait(pool):
    found = outcomes(pool, [job(reply, row) for row, reply, _ in ENDS_AND_CROSSES])
    assert [case for case, outcome in zip(ENDS_AND_CROSSES, found, strict=True) if outcome != case[2]] == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_no_hostile_code_scores_or_stays(pool, isolation, tmp_path):
    (tmp_path / "kept").write_text("kept")
    good = job(RIGHT, ADD, isolation)
    assert outcomes(pool, [good] * 4) == ["ok"] * 4
    before = held()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        codes = [code.replace("PORT", port).replace("FOLDER", str(tmp_path)) for code in HOSTILE.values()]
        found = outcomes(pool, [job(code, ADD, isolation, seconds=0.4) for code in codes])
    assert {
        name: outcome for name, outcome in zip(HOSTILE, found, strict=True) if outcome not in ("wrong", "timeout")
    } == {}
    assert outcomes(pool, [good] * 4) == ["ok"] * 4  # the run goes on
    assert (tmp_path / "kept").exists()
    end = time.monotonic() + 10
    while held() != before and time.monotonic() < end:
        time.sleep(0.05)
    assert held() == before


def held():
    """Descriptors, processes, and files where code could leave some."""
    return (
        len(os.listdir("/proc/self/fd")),
        sorted(children()),
        [*Path("/tmp").glob("filler*"), *Path("/dev/shm").glob("filler*")],
    )


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_what_is_expected_is_nowhere_to_be_found(pool, isolation):
    row = {"entry_point": "add", "test": f"def check(f):\n    assert f(1, 2) == {SECRET!r}"}
    told = f"def add(a, b): return {SECRET!r}"
    assert outcomes(pool, [job(told, row, isolation), job(LOOK, row, isolation)]) == ["ok", "wrong"]


def test_tests_are_read_from_fields_or_from_the_answer():
    for answer in ("7", "[" * 100_000):
        with pytest.raises(ValueError, match="no tests, or two kinds of them"):
            read_tests(answer, {})
    assert read_tests(json.dumps(ADD), {"id": 1}) == read_tests("", ADD) == {**ADD, "prompt": ""}
    assert read_tests("", {"tests": json.dumps(PROGRAM["tests"])}) == PROGRAM
    assert read_tests("", ADD | {"prompt": "Please add."})["prompt"] == ""
    assert read_tests("", ADD | {"prompt": [{"role": "user"}]})["prompt"] == ""
    assert read_tests("", ADD | {"prompt": "import math\n"})["prompt"] == "import math\n"


NESTED = 'def f(x):\n    """Add.\n\n    ```python\n    f(1)\n    ```\n    """\n    return x + 1\n'
SHALLOW = 'def f(x):\n  """Add.\n\n  ```\n  f(1)\n  ```\n  """\n  return ~x\n'
PROGRAMS = {  # by the row; "" marks one that reads stdin
    "f": [UP + "\n", NESTED, SHALLOW, "from math import sqrt as f\n"],
    "": ["print(int(input()) + 1)\n", "import sys\n\ndef main():\n    x = input()\n\n    print(x)\n\nmain()\n"],
}
INFOS = ["python", "py", "python3", "python 3", "Python", "python3.11", 'python title="a.py"', "{python}", ""]
INFOS += ["{.python .numberLines}", "python:main.py", "python,linenos", "python\t", "python{1,3}", " python "]
ENDS = ["Output:\n```\n5\n```\n", "```text\n5\n```", "```pycon\n>>> f(1)\n2\n```", "```\n>>> f(1)\n2\n```"]
ENDS += ["Time:\n\n```\nO(n)\n```", "```python\n>>> f(1)\n2\n```", "```\n[1, 2]"]
FORMS = [  # CODE, or with blanks or > before each line; CUT: without the end of its last line
    *(f"So:\n```{info}\nCODE```\nThis is it." for info in INFOS),
    *(f"So:\n```{info}\nCODE```\n{end}" for info in ("python", "") for end in ENDS),
    *("~~~python\nCODE~~~\n", "~~~\nCODE~~~", "~~~~ py\nCODE~~~~~", "````python\nCODE````", "`````\nCODE`````"),
    *("So:\n```python\nCODE", "So:\n```\nCODE", "So:\n~~~py\nCODE", "```python\nCUT```", "```\nCUT```\nIt is O(n)."),
    *("```python\nCUT```\nOutput:\n```\n5\n```", "````markdown\n```python\nCODE```\n````", "```python\nCODE```   \n"),
    *("1. So:\n\n   ```python\n   CODE   ```\n2. It", "- ```python\n  CODE  ```"),
    *("- So:\n\n\t```python\n\tCODE\t```", "```python\n    CODE```", "```\n  CODE```", "   ```\nCODE```", "CODE"),
    *("```python\r\nCODE```\r\n", "```\nIt\n\n```python\nCODE```", "Sure: ```python\nCODE```\nIt"),
    "```python\n\n\nCODE\n```",
    "```python\nprint('draft')\nf = 5\n```\nBetter:\n```python\nCODE```",
]


@pytest.mark.parametrize("form", FORMS)
def test_code_is_found_in_any_form(form):
    before, mark, after = re.split("([ \t>]*(?:CODE|CUT))", form)
    for name, programs in PROGRAMS.items():
        for code in programs:
            if code is NESTED and ("markdown" in form or "So:\n\n    CODE" in form or "```\nIt" in form):
                continue  # its own block for Python is then the last one
            indent = mark.rstrip("CODEUT")
            written = "".join(
                line if line == "\n" and not indent.strip() else indent + line for line in code.splitlines(True)
            )
            reply = before + (written.rstrip("\n") if "CUT" in mark else written) + after
            found = next(filter(is_python, read_codes(reply, {"entry_point": name} if name else {})))
            assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(code)), reply


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_form_makes_no_wrong_program_right(pool, isolation):
    row = {"entry_point": "f", "test": "assert f(1) == 2 and f(4) == 5"}
    row |= {"prompt": "def f(x):\n    'Doc.'\n"} if isolation == "none" else {}
    forms = [form.replace("CUT", "CODE") for form in FORMS[:: 8 if isolation == ISOLATIONS[0] else 20]]
    forms += [form for form in FORMS if "    CODE" in form]
    codes = [*(f"def f(x): return {value}" for value in ("x + 1", "2", "x")), "def f(x) return x + 1"]
    jobs = [job(form.replace("CODE", f"{code}\n"), row, isolation) for code in codes for form in forms]
    expected = ["ok" if code.endswith("f(x): return x + 1") else "wrong" for code in codes for _ in forms]
    assert outcomes(pool, jobs) == expected


def test_hostile_replies_are_read_in_time():
    start = time.monotonic()
    for text in (
        "```\n",
        "```python\n",
        "`",
        "``` x",
        ">",
        "import ",
        "1. ",
        " ",
        "\n",
        "    x\n\n",
        "~~~ ",
        "```py\nx```\n",
    ):
        read_codes(text * (60_000 // len(text)) + "x", {"entry_point": "f"})
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```\n", "y = 2\n"),
        ("```python\nx = 1\n```\n```json\n{}\n```\n```text\n1\n```", "x = 1\n"),
        ("```json\n{}\n```\nthen\n  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("<think>```python\nx\n</think>\n```Python\ny\n```", "y\n"),
        ("Use ```x``` so:\n```python3\ny\n```", "y\n"),
        ("```python\nx = 1\n```\n```python\ny = 2", "y = 2"),
        ("```python\r\nx = 1\r\n```", "x = 1\n"),
    ],
)
def test_code_is_the_last_python_block(reply, code):
    assert next(filter(is_python, read_codes(reply, {}))) == code


# ------------------------------------------------------------------ without a whole pair of fences; odd but right code

TRIPLE = {"entry_point": "triple", "test": "def check(f):\n    assert f(2) == 6 and f(-1) == -3"}
SIGNED = TRIPLE | {"prompt": 'def triple(x):\n    """Three times x."""\n'}
BARE = TRIPLE | {"prompt": "def triple(x):\n"}
TYPED = TRIPLE | {"prompt": "import math\n\n\ndef triple(x: int) -> int:  # three times x"}
READS = {"tests": [{"input": "3", "output": "9"}, {"input": "-1", "output": "-3"}]}
F = "```"
BODY, FUNCTION, READER = "    return 3 * x\n", "def triple(x):\n    return 3 * x\n", "n = int(input())\nprint(3 * n)\n"
# CODE is the body, the function or the program; CUT the same without its last end of line.
BODY_FORMS = ["CODE", f"CODE{F}", f"CODE{F}\nDone.", f"CODE{F}\n\n{F}python\ntriple(2)\n{F}", "CODE~~~\n", f"CUT{F}"]
BODY_FORMS += [
    f"CODE{F}\nOutput:\n{F}\n6\n{F}",
    f"CODE\n{F} \n",
    f"CODE{F}\r\n",
    "CODE</code>",
    "CODE[DONE]",
    "CODE[DONE]\n[BEGIN]\n",
]
WHOLE_FORMS = [
    *(f"CODE{F}", f"CODE{F}\nDone.", f"CUT{F}", f"CUT{F}\nIt is O(1).", f"python\nCODE{F}", f"python3\nCODE{F}\nDone."),
    *(
        f"py\nCODE{F}",
        f"{F}\npython\nCODE{F}",
        f"CODE{F}\nOutput:\n{F}\n6\n{F}",
        "CODE~~~",
        f"python\nCODE{F}\n{F}\n6\n{F}",
    ),
    *(
        "[BEGIN]\nCODE\n[DONE]",
        "[BEGIN]\nCODE[DONE]\nmore",
        "CODE[DONE]",
        "<code>\nCODE\n</code>",
        "CODE</code>\nDone.",
    ),
    *("<answer>\nCODE\n</answer>", f"<answer>\n{F}python\nCODE{F}\n</answer>", "[PYTHON]\nCODE[/PYTHON]", "\ufeffCODE"),
    *(
        f"\ufeff{F}python\nCODE{F}",
        f"{F}python\n\ufeffCODE{F}",
        "<think>so</think>\n<answer>\nCODE</answer>",
        f"CODE{F}{F}",
    ),
]
DEFINING_FORMS = [f"CODE{F}\nExample:\n{F}python\nprint(triple(2))\n{F}", f"CODE\n{F}python\nprint(triple(2))"]
DEFINING_FORMS += [f"CODE{F}\nprint(triple(2))\n{F}", f"python\nCODE{F}\n{F}py\ntriple(2)\n{F}\nDone."]


def replies(forms, code):
    return [form.replace("CODE", code).replace("CUT", code.rstrip("\n")) for form in forms]


UNFENCED = [
    *((row, reply) for row in (SIGNED, BARE, TYPED) for reply in replies(BODY_FORMS, BODY)),
    *((row, reply) for row in (TRIPLE, SIGNED, BARE) for reply in replies(WHOLE_FORMS + DEFINING_FORMS, FUNCTION)),
    *((READS, reply) for reply in replies(WHOLE_FORMS, READER)),
]
# A right value somewhere, another one in the program.
WRONG_CODES = ["2 * x", "x", "6", "3 * x and 1", "3 * x if x > 0 else x", "'3 * x'", "[3 * x]", "3 * x,"]
WRONG_FORMS = [
    *(
        (row, reply)
        for value in WRONG_CODES
        for row in (SIGNED, BARE, TYPED)
        for reply in replies(BODY_FORMS, f"    return {value}\n")
    ),
    *(
        (TRIPLE, reply)
        for value in WRONG_CODES
        for reply in replies(WHOLE_FORMS + DEFINING_FORMS, f"def triple(x):\n    return {value}\n")
    ),
    *(
        (READS, reply)
        for value in ("2 * n", "9", "'9'")
        for reply in replies(WHOLE_FORMS, f"n = int(input())\nprint({value})\n")
    ),
]


def check_all(pool, cases, outcome, every):
    chosen = cases[::every]
    found = outcomes(pool, [job(reply, row) for row, reply in chosen])
    return [case for case, graded in zip(chosen, found, strict=True) if graded != outcome]


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)])
def test_right_code_passes_without_a_whole_pair_of_fences(pool, every):
    """lm-evaluation-harness#4091, #3793 and #3447: the prompt opens the block, a stop string ends it."""
    assert check_all(pool, UNFENCED, "ok", every) == []


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_no_wrong_code_passes_for_its_form(pool, every):
    assert check_all(pool, WRONG_FORMS, "wrong", every) == []


ASYNC = {"entry_point": "f", "test": "import asyncio\nassert asyncio.run(f(2)) == 3"}
GATHERED = {
    "entry_point": "f",
    "test": "import asyncio\nasync def g(): return await asyncio.gather(f(1), f(2))\nassert asyncio.run(g()) == [2, 3]",
}
CAPTURED = {
    "entry_point": "f",
    "test": "import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\n"
    "with redirect_stdout(out): f(2)\nassert out.getvalue() == '2\\n3\\n', out.getvalue()",
}
PATCHED = {
    "entry_point": "f",
    "test": "import io, unittest.mock\nwith unittest.mock.patch('sys.stdout', new_callable=io.StringIO) as out:\n"
    "    f('é')\n    assert out.getvalue() == 'é'\n    f('b')\nassert out.getvalue() == 'éb'",
}
TWO_SUM = {
    "entry_point": "twoSum",
    "tests": [{"args": [[2, 7], 9], "expected": [0, 1]}, {"args": [[3], 1], "expected": []}],
}
SOLUTION = "class Solution:\n    def twoSum(self, numbers, target):\n        return ANSWER\n"
ODD = [
    (ASYNC, "async def f(x): return x + 1", "ok"),
    (ASYNC, "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x + 1", "ok"),
    (ASYNC, "async def f(x): return x", "wrong"),
    (ASYNC, "def f(x): return x + 1", "wrong"),  # asyncio.run takes no number
    (ASYNC, "async def f(x): raise ValueError", "wrong"),
    (ASYNC, "async def f(x): return object()", "wrong"),
    (GATHERED, "async def f(x): return x + 1", "ok"),
    (GATHERED, "async def f(x): return 2", "wrong"),
    (CAPTURED, "def f(x):\n    print(x)\n    print(x + 1)", "ok"),
    (CAPTURED, "import sys\ndef f(x):\n    sys.stdout.write(f'{x}\\n')\n    sys.stdout.buffer.write(b'3\\n')", "ok"),
    (CAPTURED, "from sys import stdout\nprint('first')\ndef f(x): print(x, x + 1, sep='\\n', file=stdout)", "ok"),
    (CAPTURED, "def f(x): print(x)", "wrong"),
    (CAPTURED, "print(2, 3, sep='\\n')\ndef f(x): return x", "wrong"),
    (PATCHED, "def f(x): print(x, end='')", "ok"),
    (PATCHED, "def f(x): print(x)", "wrong"),
    (TWO_SUM, SOLUTION.replace("ANSWER", "([[j, i] for i in range(len(numbers)) for j in range(i)] or [[]])[0]"), "ok"),
    (TWO_SUM, SOLUTION.replace("ANSWER", "[1, 0]"), "wrong"),
    (TWO_SUM, SOLUTION.replace("twoSum", "two_sum").replace("ANSWER", "[0, 1]"), "wrong"),
    (
        TWO_SUM,
        "class Solution:\n    def __init__(self): self.calls = 0\n    def twoSum(self, numbers, target):\n"
        "        self.calls += 1\n        return [0, 1] if len(numbers) == 2 and self.calls == 1 else []",
        "ok",
    ),
    (TWO_SUM, "class Other:\n    def twoSum(self, numbers, target): return [0, 1]", "wrong"),
]


def test_coroutines_captured_output_and_methods(pool):
    found = outcomes(pool, [job(reply, row) for row, reply, _ in ODD])
    assert [case for case, outcome in zip(ODD, found, strict=True) if outcome != case[2]] == []
