"""Commands of pages and messages name what is there, and run as they are in a fresh shell: no environment is active."""

import ast
import re
from pathlib import Path

import pytest

from check.reader import load

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
    known = "".join(Path(file).read_text() for file in ("grpo.py", "tests/conftest.py", "check/preflight.py")) + code
    passes_on = script in ("./train.sh", "slurm.sh")  # to torchrun
    assert [option for option in options if option not in known and not passes_on] == []
    settings = [word for word in words if re.match(r"[a-z_]+(\.\w+)+=", word)]
    configs = [word for word in words if word.endswith(".yaml") and word == word.lower()]
    if configs or settings:
        load(configs[0] if configs else "configs/smoke.yaml", settings)
    assert [word for word in words if word.startswith("tests/") and not Path(word).exists()] == []


FOLDERS = ("docs", "examples", "bench", "tests")
PLACES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
PLACES = [page for page in PLACES if page.name != "LOG.md" and page.parent.name != "results"]  # these tell of the past
OF_ENVIRONMENT = r"(?:[A-Z_]+=\S+ )*(?:python3?|torchrun|pip3?|pytest|ruff) +(?:-|\S+\.py|install)"


def commands_of_page(page: Path) -> list[str]:
    """Lines of indented and fenced blocks, and code within a sentence, that would need an active environment."""
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"^ *(\S.*)$", text, re.M) + re.findall(r"`([^`\n]+)", text)
    return [line for line in shown if re.match(OF_ENVIRONMENT, line)]


def commands_of_module(file: Path) -> list[str]:
    """The same of its strings: messages and docstrings."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    shown = [line.strip() for text in strings for part in text.splitlines() for line in part.split("`")]
    return [line for line in shown if re.match(OF_ENVIRONMENT, line)]


@pytest.mark.parametrize("page", PLACES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_of_a_page_needs_no_environment(page):
    assert commands_of_page(page) == []


def test_a_command_of_a_message_needs_no_environment():
    files = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]
    files = [file for file in files if file.relative_to(ROOT).parts[0] not in ("tests", "bench", "logs")]
    assert {file.name: found for file in files if (found := commands_of_module(file))} == {}


def test_what_needs_an_environment_is_seen(tmp_path):
    """The search above would find nothing for ever if it were wrong."""
    (tmp_path / "page.md").write_text(
        "Text.\n\n    python grpo.py --help\n\n`OMP=1 torchrun --x` and `.venv/bin/python x.py`\n"
    )
    (tmp_path / "module.py").write_text("print(f'to go on, `pip install {1}`')\n")
    assert len(commands_of_page(tmp_path / "page.md")) == 2 and len(commands_of_module(tmp_path / "module.py")) == 1
