"""Commands of README.md and CONTRIBUTING.md name what is there."""

import re
from pathlib import Path

import pytest

from support.inputs.reader import load

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
    readers = ("grpo.py", "tests/conftest.py", "support/check/preflight.py")
    known = "".join(Path(file).read_text() for file in readers) + code
    passes_on = script in ("./train.sh", "slurm.sh")  # to torchrun
    assert [option for option in options if option not in known and not passes_on] == []
    settings = [word for word in words if re.match(r"[a-z_]+(\.\w+)+=", word)]
    configs = [word for word in words if word.endswith(".yaml") and word == word.lower()]
    if configs or settings:
        load(configs[0] if configs else "configs/smoke.yaml", settings)
    assert [word for word in words if word.startswith("tests/") and not Path(word).exists()] == []
