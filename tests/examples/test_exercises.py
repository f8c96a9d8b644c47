"""docs/exercises.md: each task has a check, which fails as long as nothing is done, and a solution, which passes it.

mistakes.yaml has mistakes that are easily made: the check finds each, and says where.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ranks import ranks
from small_run import ROOT
from test_forks import copy_with

pytestmark = [pytest.mark.slow, pytest.mark.house]  # each solution is a process
PAGE = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^### `(\w+)`", PAGE, re.MULTILINE)
TRANSFORMERS = ("gemma", "cwm")  # importing it takes seconds

MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))


@ranks(1)
def said_in(copy: str, name: str) -> str:
    """What the check says in a copy of the repository."""
    os.chdir(copy)
    sys.path.insert(0, copy)
    from tests import exercises

    assert exercises.__file__ == f"{copy}/tests/exercises.py"
    return exercises.answer(name)


def cases(names):
    """Those that import transformers are long."""
    params = []
    for exercise, *rest in names:
        marks = [pytest.mark.long] if exercise in TRANSFORMERS else []
        params.append(pytest.param(exercise, *rest, marks=marks))
    return params


def test_the_page_has_each_check_and_each_diff():
    from tests import exercises

    assert [*exercises.CHECKS] == NAMES
    diffs = {file.stem for file in (ROOT / "examples" / "forks").glob("*.diff")}
    assert diffs - {"token_value"} == set(NAMES), "token_value alone is no exercise"
    for name in NAMES:
        section = PAGE.split(f"### `{name}`")[1].split("\n##")[0]
        assert f"    .venv/bin/python -m tests.exercises {name}\n" in section and "*Learn:*" in section, name


def test_nothing_is_solved_before_it_is_done():
    command = [sys.executable, "-m", "tests.exercises"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == NAMES
    assert all(": not yet: " in line for line in lines), done.stdout
    assert subprocess.run([*command, "none"], cwd=ROOT, capture_output=True).returncode == 2


@pytest.mark.parametrize("name", cases([(name,) for name in NAMES]))
def test_a_solution_is_right(name, tmp_path):
    copy = copy_with(name, tmp_path / "copy", tests=True)
    assert said_in(str(copy), name) == ["right"]


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["exercise"] for mistake in MISTAKES])
def test_a_mistake_is_found_and_named(mistake, tmp_path):
    copy = copy_with(mistake["exercise"], tmp_path / "copy", tests=True)
    file = copy / mistake["file"]
    text = file.read_text()
    assert text.count(mistake["right"]) == 1
    file.write_text(text.replace(mistake["right"], mistake["wrong"]))
    (said,) = said_in(str(copy), mistake["exercise"])
    assert said.startswith("not yet: ") and mistake["says"] in said, said
