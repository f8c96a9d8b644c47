"""The page of derivations runs: each of its formulas holds, in numbers, and is a line of the code it names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "derivation.md"
LINES = re.findall(r"^In the code: `(.+)` \((.+), `(.+)`\)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_block_holds():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)


@pytest.mark.house
def test_each_section_names_a_line():
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("In the code: ") == len(LINES), "a line that LINES does not read"
    sections = text.split("\n## ")[1:]
    assert [section for section in sections if "In the code: " not in section and "head.py, `" not in section] == []


@pytest.mark.house
@pytest.mark.parametrize(("line", "file", "function"), LINES)
def test_a_line_is_where_the_page_says(line, file, function):
    source = (ROOT / file).read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    bodies = [ast.get_source_segment(source, node) for node in functions if node.name == function]
    assert any(line in body for body in bodies)
