"""The commands that the pages show: those of README.md, CONTRIBUTING.md, docs/, the READMEs of examples/, bench/ and
tests/, and of the usage at the top of scripts and configs. A command is a line of a code block, or an inline code, that
begins as one (STARTS). docs/LOG.md is left out: its commands are those of the commits that it names.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HISTORY = {"docs/LOG.md"}
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/**/*.md", "bench/README.md", "tests/README.md")
SCRIPTS = ("*.py", "run/*.py", "bench/*.py", "examples/**/*.py", "tests/layout_table.py")  # their docstrings
HEADS = ("*.sh", "tests/*.sh", "bench/*.sh", "configs/*.yaml", "examples/**/*.yaml")  # their comments at the top

SETTINGS = r"(?:[A-Z][A-Z0-9_]*=\S* )*"
PROGRAMS = r"python3?|torchrun|sbatch|pip|bash|sh|tensorboard|git|source|patch|sky|kubectl|npm|npx|node|ruff|pytest"
PROGRAMS += r"|\.venv/bin/[\w-]+"
STARTS = re.compile(
    rf"{SETTINGS}(?:"
    rf"(?:{PROGRAMS}|/usr/bin/time|\(export) [^\s=-]"  # with an argument: the name alone is a mention
    rf"|(?:{PROGRAMS}|/usr/bin/time) --?\w.*\.\w|(?:python|bash) -\w+ \S|tensorboard --\w"
    r"|\./[\w./-]+(?: |$)|tests/run\.sh(?: |$)|\.ci/run(?: |$)"
    r"|[\w/]+\.(?:py|sh) [-\w.])"
)
# Within a line of prose only what names a file of ours, or a module, is more than a mention.
NAMES_A_FILE = re.compile(
    rf"{SETTINGS}(?:(?:{PROGRAMS})(?: -\S+)* [\w./-]+\.(?:py|sh|yaml)|python -m \w+\.\w|\./\w+\.sh)"
)
NOTE = re.compile(r"\s{3,}|\s{2}(?![A-Z-])|\s+#\s|(?<=\w)\.(?: [A-Z]|$)")


class Command(NamedTuple):
    text: str
    page: str


def tidy(text: str) -> str:
    """One form for one command: no [optional] parts and no notes, `python` for that of the environment."""
    text = NOTE.split(text.strip())[0]
    while (shorter := re.sub(r" ?\[[^\[\]]*\]", "", text)) != text:
        text = shorter
    text = re.sub(r"\s+", " ", re.sub(r"\.venv/bin/(?=\w+ )", "", text))
    text = text.replace("python3 ", "python ").replace("./tests/", "tests/")
    text = re.sub(r"^([\w/]+\.py) ", r"python \1 ", text)
    return re.sub(r"^((?!tests/)[\w/]+\.sh) ", r"bash \1 ", text).strip()


def in_markdown(text: str) -> list[str]:
    """The commands of a page, with their optional parts and notes."""
    found, prose = [], []
    fenced = False
    lines = iter(text.splitlines())
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            while line.endswith("\\"):
                line = f"{line[:-1].rstrip()} {next(lines).strip()}"
            table = [] if STARTS.match(line.strip()) else re.split(r"\s{3,}", line)  # what a run prints at its end
            found += [line.strip(), *re.findall(r"# or: (.*)", line), *table]
        else:
            prose.append(line)
    codes = re.findall(r"`([^`]+)`", "\n".join(prose))
    found += [re.sub(r"\s*\n\s*", " ", code) for code in codes]
    return [code for code in found if STARTS.match(code)]


def in_comment(text: str) -> list[str]:
    """The commands of a docstring, of a usage, or of the comment at the top of a file: also where a line of prose ends
    in one, or begins with it."""
    parts = [part for line in text.splitlines() for part in re.split(r"^\s*|\s{2,}then\s+|(?<=\w): ", line) if part]
    found = [part for part in parts if NAMES_A_FILE.match(part)]
    known = {tidy(part) for part in found}
    return found + [code for code in in_markdown(text) if tidy(code) not in known]


def comment_of(name: str, text: str) -> str:
    """What the file says of itself at its top."""
    if name.endswith(".py"):
        return ast.get_docstring(ast.parse(text)) or ""
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    usage = re.search(r"<<'USAGE'\nUsage: (.*?)\nUSAGE", text, re.DOTALL)
    return "\n".join([*(line[1:] for line in lines[:end]), *(usage[1].splitlines() if usage else [])])


def paths(patterns: tuple[str, ...], root: Path) -> list[str]:
    found = {str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)}
    return sorted(found - HISTORY)


def documented(root: Path = ROOT) -> list[Command]:
    """All of them, as written."""
    found = []
    for name in [*paths(PAGES, root), *paths(SCRIPTS, root), *paths(HEADS, root)]:
        text = (root / name).read_text(encoding="utf-8")
        codes = in_markdown(text) if name.endswith(".md") else in_comment(comment_of(name, text))
        found += [Command(code, name) for code in codes]
    return found
