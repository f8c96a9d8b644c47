"""`python -m judges.math` and `python -m judges.code`, as a user starts them."""

import json
import subprocess
import sys

import pytest
from code_jobs import ISOLATIONS
from real_data import ROOT


def run(*words):
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("gold", "answer", "printed", "code"),
    [
        ("1/2", "0.5", "ok: 1/2\n", 0),
        ("1/2", r"so \boxed{\frac12}", "ok: 1/2\n", 0),
        ("1/2", "The answer is 0.6.", "wrong: 3/5\n", 1),
        ("x^2+2x+1", "(x+1)^2", "ok: (x+1)^2\n", 0),
    ],
)
def test_math(gold, answer, printed, code):
    done = run("judges.math", gold, answer)
    assert (done.stdout, done.returncode) == (printed, code), done.stderr


@pytest.mark.skipif(not ISOLATIONS, reason="this machine has no seccomp")
def test_code(tmp_path):
    rows = [
        {"reply": "def add(a, b): return a + b", "entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]},
        {"reply": "def add(a, b): return a", "entry_point": "add", "test": "assert add(1, 2) == 3"},
        {"reply": "print(int(input()) * 3)", "tests": [{"input": "3", "output": "9"}]},
        {"reply": "while True: pass", "tests": [{"input": "3", "output": "9"}], "seconds": 0.5},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row | {"isolation": ISOLATIONS[0]}) for row in rows))
    done = run("judges.code", str(path))
    assert (done.stdout.split(), done.returncode) == (["ok", "wrong", "ok", "timeout"], 0), done.stderr


@pytest.mark.parametrize("line", ["7", "{}", "[", '{"reply": "x"}', '{"tests": [{"input": "1", "output": "1"}]}'])
def test_a_row_that_cannot_be_read_is_named(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(line)
    done = run("judges.code", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 2 and "rows.jsonl:1: " in done.stderr and "Traceback" not in done.stderr


def test_math_asks_for_two_words():
    assert run("judges.math", "1").returncode == 1
