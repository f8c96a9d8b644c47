"""Links of all pages lead somewhere, a symbol stands in the file that its link names, and quoted code is the code."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.house

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "examples", "bench", "tests", "base", "run", "judges")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
PICTURE = re.compile(r'<(?:img|source)[^>]*?\ssrc(?:set)?="([^"]+)"')
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)


def anchors(text: str) -> set[str]:
    """Of a page: those that GitHub gives its headings, and its own <a id="...">."""
    titles = [LINK.sub(r"\1", title) for title in re.findall(r"^#+ +(.*?) *$", FENCE.sub("", text), re.M)]
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return {*slugs, *re.findall(r'<a id="([^"]+)">', text)}


def defines(code: str, symbol: str) -> bool:
    """The last part of a dotted name is a function, class, field, attribute or constant in this code."""
    name = re.escape(symbol.removesuffix("()").split(".")[-1])
    return bool(re.search(rf"^\s*(?:def|class)\s+{name}\b|^\s*(?:self\.)?{name}\s*[:=,]", code, re.M))


def dead_links(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    prose = FENCE.sub("", text)
    dead = []
    for label, target in [*LINK.findall(prose), *(("", target) for target in PICTURE.findall(prose))]:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if re.match(r"[a-z]+:", target):
            continue
        symbol = re.fullmatch(r"`([\w.]+(?:\(\))?)`", label)
        if not file.exists():
            dead.append(f"{target} does not exist")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            dead.append(f"{target}: the page has no such heading")
        elif symbol and file.suffix == ".py" and symbol[1] != file.name:
            if not defines(file.read_text(encoding="utf-8"), symbol[1]):
                dead.append(f"{target} does not define {symbol[1]}")
    return dead


def stale_quotations(page: Path) -> list[str]:
    """The blocks of Python under a line that ends with a link to a file, which does not hold their lines."""
    text = page.read_text(encoding="utf-8")
    stale = []
    for path, block in re.findall(r"\]\(([^()\s]+\.py)\):?\n+```python\n(.*?)^```$", text, re.M | re.S):
        code = [line.strip() for line in (page.parent / path).read_text(encoding="utf-8").splitlines()]
        if "\n".join(line.strip() for line in dedent(block).splitlines()) not in "\n".join(code):
            stale.append(f"{path} does not hold this block: {block.splitlines()[0]}")
    return stale


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of(page):
    assert dead_links(page) + stale_quotations(page) == []


def test_the_log_has_one_row_for_each_entry():
    """In the order of the entries. That each link leads to an entry is tested above."""
    rows = re.findall(r"\]\(log/([\d-]+)\.md#([\d-]+)\)", (ROOT / "docs" / "LOG.md").read_text(encoding="utf-8"))
    entries = []
    for month in sorted((ROOT / "docs" / "log").glob("*.md"), reverse=True):
        text = month.read_text(encoding="utf-8")
        anchors_of_entries = re.findall(r'^<a id="([^"]+)"></a>\n\n## ', text, re.M)
        assert len(anchors_of_entries) == len(re.findall(r"^## ", text, re.M)), f"{month}: an entry without an anchor"
        entries += [(month.stem, anchor) for anchor in anchors_of_entries]
    assert len(rows) > 100
    assert rows == entries


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("[x](nothing.py)", 1),
        ("[x](#no-heading)", 1),
        ('<img alt="x" src="none.svg">', 1),
        ("[`pack.Pack.cut`](pack.py) [`LIMIT`](pack.py) [`size`](pack.py) [a](#a-page) [s](https://x.org/#y)", 0),
        ("[`pack.Pack.slice`](pack.py)", 1),
        ("From [the file](pack.py):\n\n```python\ndef cut(self):\n    return 1\n```", 0),
        ("From [the file](pack.py):\n\n```python\ndef cut(self):\n    return 2\n```", 1),
    ],
)
def test_what_is_wrong_is_seen(tmp_path, line, number):
    (tmp_path / "pack.py").write_text(
        "LIMIT = 3\n\nclass Pack:\n    size: int\n\n    def cut(self):\n        return 1\n"
    )
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{line}\n")
    assert len(dead_links(page) + stale_quotations(page)) == number
