"""What strangers read first: each cell of docs/comparison.md has a source, counted lines are right."""

import re
import tomllib
from datetime import date

import yaml
from layout_table import product_files

from tests.helpers.red_team import ROOT

PEERS = {"G": "grpo.py", "T": "TRL", "V": "verl", "N": "NeMo RL", "M": "Molt", "A": "nano-aha-moment", "P": "prime-rl"}
MARK = re.compile(r"<sup>([^<]*)</sup>")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, without its header's rule."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    rows = [[line.strip("|\n ").split(" | ") for line in block.splitlines()] for block in blocks]
    return [[cells for cells in table if not set("".join(cells)) <= set("-| ")] for table in rows]


def sources(text: str) -> list[str]:
    return re.findall(r"^\| ([A-Z]\d+) \|", text[text.index("## Sources") :], flags=re.MULTILINE)


def unsourced(text: str) -> list[str]:
    """What is wrong with the cells of the tables of systems."""
    found, known = [], set(sources(text))
    for header, *rows in tables(text):
        if not header[0].startswith("system"):
            continue
        for system, *cells in rows:
            letter = next(key for key, name in PEERS.items() if system.startswith(name))
            for title, cell in zip(header[1:], cells, strict=True):
                marks = [mark for group in MARK.findall(cell) for mark in group.split(", ")]
                found += [f"{system}, {title}: {mark} is no source" for mark in marks if mark not in known]
                if not any(mark[0] in {letter, "G"} for mark in marks):
                    found.append(f"{system}, {title}: no source of its own")
    return found


def test_every_cell_has_a_source_of_its_system():
    text = page("docs/comparison.md")
    assert unsourced(text) == []
    marks = {mark for group in MARK.findall(text) for mark in group.split(", ")}
    listed = sources(text)
    assert len(listed) == len(set(listed)) and set(listed) == marks, "a source without a cell, or a cell without one"
    compared = [rows for header, *rows in tables(text) if header[0].startswith("system")]
    assert [len(rows) for rows in compared] == [6] * 4, "six systems in each of four tables"


def test_a_cell_without_a_source_is_seen():
    text = page("docs/comparison.md")
    assert len(unsourced(text.replace("yes, PEFT <sup>T3</sup>", "yes, PEFT"))) == 1
    assert len(unsourced(text.replace("yes, PEFT <sup>T3</sup>", "yes, PEFT <sup>V6</sup>"))) == 1
    assert len(unsourced(text.replace("yes, PEFT <sup>T3</sup>", "yes, PEFT <sup>T99</sup>"))) == 1


def lines_of(names) -> int:
    return sum(len(page(name).splitlines()) for name in names)


def test_our_lines_are_what_wc_says():
    """All .py of the product and of the core, in thousands; what this prints is what to write."""
    names = product_files()
    core = [name for name in names if "/" not in name or name.startswith("kernels/")]
    whole, inner = (f"{lines_of(part) / 1000:.1f} thousand" for part in (names, core))
    comparison, readme = page("docs/comparison.md"), page("README.md")
    assert f"| {whole}, of which the core is {inner} <sup>G1</sup> |" in comparison, (whole, inner)
    loop = f"{lines_of(['grpo.py', 'loss.py', 'advantages.py', 'rollout.py']) / 1000:.1f} thousand"
    assert f"rollout.py: {loop} <sup>G1</sup>" in comparison, loop
    assert f"decoder of {lines_of(['model.py']) / 1000:.1f} thousand lines" in comparison
    told = set(re.findall(r"\d+\.\d thousand(?= lines)", readme))
    assert told == {whole, inner}, f"README: write {whole} and {inner}"


def test_readme_is_short():
    assert len(page("README.md").splitlines()) <= 200
    assert len(page("CONTRIBUTING.md").splitlines()) <= 60


def test_citation():
    """The fields that the format's version 1.2.0 asks for, with the version of the project."""
    cited = yaml.safe_load(page("CITATION.cff"))
    project = tomllib.loads(page("pyproject.toml"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited["cff-version"] == "1.2.0"
    assert all(author.keys() <= {"name", "website"} for author in cited["authors"])
    assert (str(cited["version"]), cited["license"]) == (project["version"], project["license"])
    assert isinstance(cited["date-released"], date) and cited["type"] == "software"
