"""Commands of README.md and CONTRIBUTING.md name what is there."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from base.inputs.reader import load

pytestmark = pytest.mark.house

ROOT = Path(__file__).resolve().parents[2]
PAGES = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
LINES = [re.split(r"\s{2,}#|\s+# or", line)[0].strip() for line in re.findall(r"^    (\S.*)$", PAGES, re.M)]
COMMANDS = sorted({line for line in LINES if re.match(r"\./|(\.venv/bin/)?python |torchrun |sbatch ", line)})


def test_there_are_commands():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_names_is_there(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = re.sub(r"^((\.venv/bin/)?python|torchrun --\S+|sbatch --\S+) ", "", command).split()
    script = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
    if not Path(script).is_file() and Path(script.removesuffix(".py")).is_dir():
        script = script.removesuffix(".py") + "/__main__.py"
    code = Path(script).read_text(encoding="utf-8")
    options = [word.split("=")[0] for word in words[1:] if word.startswith("--")]
    readers = ("grpo.py", "tests/conftest.py", "base/check/preflight.py")
    known = "".join(Path(file).read_text() for file in readers) + code
    passes_on = script in ("./train.sh", "slurm.sh")  # to torchrun
    assert [option for option in options if option not in known and not passes_on] == []
    settings = [word for word in words if re.match(r"[a-z_]+(\.\w+)+=", word)]
    configs = [word for word in words if word.endswith(".yaml") and word == word.lower()]
    if configs or settings:
        load(configs[0] if configs else "configs/smoke.yaml", settings)
    assert [word for word in words if word.startswith("tests/") and not Path(word).exists()] == []


def test_the_task_of_readme_grades_the_sums(tmp_path, monkeypatch):
    """my_task.py as README prints it: its function grades a right and a wrong reply, and --check accepts the command
    below it."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"`my_task\.py`.*?```python\n(.*?)```", page, re.S)
    (tmp_path / "my_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("my_task")
    assert task.reward([[{"content": "85"}], [{"content": "75"}]], answer=["85", "85"]) == [1.0, 0.0]
    commands = [line for line in COMMANDS if "my_task:" in line]
    assert len(commands) == 1
    for command in commands:
        settings = command.removeprefix("./train.sh ").split()
        checked = subprocess.run(
            [sys.executable, "grpo.py", "--check", "configs/smoke.yaml", *settings],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr
