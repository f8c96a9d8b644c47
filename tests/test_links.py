"""Links of all pages lead to files, headings and lines that are there; tests/links.py writes the lines."""

import re

import links
import pytest
from links import ROOT

PAGES = links.pages()
CODE = "import os\n\nLIMIT = 3\n\n\nclass Pack:\n    size: int\n\n    def cut(self):\n        return os.sep  # once\n"
PAGE = """# A page

[`pack.Pack.cut`]() and [`Pack.size`](../pack.py#L1),
[`LIMIT`](../pack.py#L99), [once](../pack.py#L1 "# once").
[heading](#a-page) [item](#7) <a id="7"></a> [file](../pack.py) [site](https://example.org/#x)

From [the file](../pack.py#L7-L9):

```python
class Pack:
    size: str
    def cut(self):
        return os.sep  # once
```
"""
WRITTEN = """# A page

[`pack.Pack.cut`](../pack.py#L9) and [`Pack.size`](../pack.py#L7),
[`LIMIT`](../pack.py#L3), [once](../pack.py#L10 "# once").
[heading](#a-page) [item](#7) <a id="7"></a> [file](../pack.py) [site](https://example.org/#x)

From [the file](../pack.py#L6-L10):

```python
class Pack:
    size: int

    def cut(self):
        return os.sep  # once
```
"""


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of(page):
    text, problems = links.rewritten(page)
    assert problems + links.dead_links(page) == []
    assert text == page.read_text(encoding="utf-8"), "the code has moved: run `python tests/links.py --write`"


def test_every_detail_leads_to_its_line():
    page = (ROOT / "docs" / "details.md").read_text(encoding="utf-8")
    items = re.findall(
        r'^(?:(\d+)\.|-) <a id="(\w+)"></a>\*\*(?:([A-Z]\d+)\. )?(.*?)(?=^(?:\d+\.|-) |\Z)', page, re.M | re.S
    )
    numbers = [number or letter for number, _, letter, _ in items]
    assert numbers[:3] == ["1", "2", "3"] and {"H1", "L20", "A9"} <= set(numbers) and len(set(numbers)) == len(items)
    assert len(items) == len(re.findall(r"^(?:\d+\.|- \*\*|- <a)", page, re.M))
    assert [anchor for _, anchor, _, _ in items] == [number.lower() for number in numbers]
    assert [
        number for number, (*_, text) in zip(numbers, items, strict=True) if not re.search(r"\.\w+#L\d+", text)
    ] == []


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "pack.py").write_text(CODE)
    page = tmp_path / "docs" / "page.md"
    page.write_text(PAGE)
    return tmp_path, page


def test_lines_and_quotations_follow_the_code(tree):
    root, page = tree
    text, problems = links.rewritten(page, root)
    assert problems == [] and text == WRITTEN
    page.write_text(text)
    assert links.rewritten(page, root) == (text, []) and links.dead_links(page, root) == []
    (root / "pack.py").write_text('"""Its job."""\n\n' + CODE.replace("size: int", "size: float"))
    moved, problems = links.rewritten(page, root)
    assert problems == [] and moved != text
    assert all(part in moved for part in ("pack.py#L11)", "pack.py#L9)", "#L5)", "#L12 ", "#L8-L12", "size: float"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("def cut", "def slice", "`pack.Pack.cut`"),
        ("LIMIT", "BOUND", "`LIMIT`"),
        ("# once", "", "# once"),
        ("# once", "# once\n# once", '"# once"'),
        ("class Pack", "class Packs", "quotation: class Pack:"),
    ],
)
def test_what_the_code_has_no_longer(tree, old, new, problem):
    root, page = tree
    (root / "pack.py").write_text(CODE.replace(old, new))
    _, problems = links.rewritten(page, root)
    assert any(problem in line for line in problems), problems


@pytest.mark.parametrize("target", ["../nothing.py", "#no-heading", "page.md#none", "images/none.svg"])
def test_dead_links_are_seen(tree, target):
    root, page = tree
    for link in (f"[x]({target})", f"![x]({target})", f'<img alt="x" src="{target}">'):
        page.write_text(PAGE + f"\n{link}\n")
        assert len(links.dead_links(page, root)) == 1
