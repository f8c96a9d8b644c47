"""Links of the pages: to files, to headings, and to lines of the code, which move whenever the code is edited.

    python tests/links.py             lists what is wrong
    python tests/links.py --write     first rewrites all line numbers, and the code that pages quote

A line number is never written by hand. A link to code names what it leads to, and the number follows from that:
    [`batch.finish_minibatches`]()                   a function, class, method, field or constant: its definition
    [any text](../engine.py "the text of a line")    the only line of that file that holds the text
--write fills in `../batch.py#L117` and `#L57`. A block of ```python under a line that ends with a link to a file of
code quotes that file. Its first and last line say where; what is between them is written anew.
"""

import ast
import functools
import os
import re
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r'(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]*)(?:\s+"([^"]*)")?\)')
PICTURE = re.compile(r'<(?:img|source)[^>]*?\ssrc(?:set)?="([^"]+)"')
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
QUOTED = re.compile(r"\]\(([^()\s#]+\.py)(?:#[^()\s]*)?\):?\n+\Z")
CODE_FOLDERS = ("", "kernels", "graders", "dataset", "hf", "system", "run", "bench", "tests", "tests/helpers")


def pages(root: Path = ROOT) -> list[Path]:
    folders = (f"{name}/**/*.md" for name in ("docs", "examples", "bench", "tests"))
    return sorted(path for pattern in ("*.md", *folders) for path in root.glob(pattern))


@functools.lru_cache(maxsize=512)
def _definitions(code: str) -> dict[str, int]:
    """Qualified name -> line, of all that a file defines at its top level and in its classes."""
    lines: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            names = [getattr(node, "name", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            for name in filter(None, names):
                lines.setdefault(prefix + name, node.lineno)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If):
                visit([*node.body, *node.orelse], prefix)

    visit(ast.parse(code).body, "")
    return lines


def line_of_symbol(file: Path, symbol: str) -> int | None:
    """`symbol` may begin with the names of the file and its folders: kernels.softmax.SamplingFilter."""
    lines = _definitions(file.read_text(encoding="utf-8"))
    parts = symbol.removesuffix("()").split(".")
    for start in range(len(parts)):
        if set(parts[:start]) <= {*file.parts, file.stem} and ".".join(parts[start:]) in lines:
            return lines[".".join(parts[start:])]
    return None


def file_of_symbol(symbol: str, root: Path) -> Path | None:
    """The file of code whose name begins the symbol, `batch.needs_old_logps` or `metrics.train_flops`, and which
    defines it; where no file does, one of the folder that begins it: `kernels.SamplingFilter`."""
    first, *_ = parts = symbol.split(".")
    candidates = [root.joinpath(*parts[:count]).with_suffix(".py") for count in range(1, len(parts))]
    candidates += [root / folder / f"{first}.py" for folder in CODE_FOLDERS]
    candidates += sorted((root / first).glob("*.py")) if len(parts) > 1 else []
    return next((file for file in candidates if file.is_file() and line_of_symbol(file, symbol)), None)


def line_of_text(file: Path, text: str) -> int | None:
    lines = file.read_text(encoding="utf-8").splitlines()
    places = [number for number, line in enumerate(lines, start=1) if text in line]
    return places[0] if len(places) == 1 else None


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives to the headings, and the page's own: <a id="..."></a>."""
    slugs: dict[str, int] = {}
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for title in re.findall(r"^#+ +(.*?) *$", text, re.M):
        title = LINK.sub(lambda link: link[2], title)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        slugs[slug] = slugs.get(slug, -1) + 1
    numbered = {slug if n == 0 else f"{slug}-{n}" for slug, count in slugs.items() for n in range(count + 1)}
    return numbered | set(re.findall(r'<a id="([^"]+)">', text))


def _quotation(file: Path, block: str) -> tuple[str, str] | None:
    """(the file's lines from the block's first to its last, dedented; their anchor); None where they are not there."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    wanted = [line.strip() for line in block.splitlines()]
    stripped = [line.strip() for line in lines]
    for first in (i for i, line in enumerate(stripped) if wanted and line == wanted[0]):
        ends = [i for i in range(first + min(1, len(wanted) - 1), len(lines)) if stripped[i] == wanted[-1]]
        exact = first + len(wanted)
        last = exact - 1 if stripped[first:exact] == wanted else ends[0] if ends else None
        if last is not None:
            return dedent(
                "".join(lines[first : last + 1])
            ), f"#L{first + 1}-L{last + 1}" if last > first else f"#L{last + 1}"
    return None


def _requoted(text: str, page: Path, problems: list[str]) -> str:
    """The page's text with each quotation as the file has it now."""
    parts = []
    rest = 0
    for fence in FENCE.finditer(text):
        above = QUOTED.search(text, rest, fence.start())
        if fence[1] != "python" or not above:
            continue
        path = above[1]
        file = page.parent / path
        quotation = _quotation(file, fence[2]) if file.is_file() else None
        if quotation is None:
            problems.append(f"{path} has not the first and the last line of this quotation: {fence[2].splitlines()[0]}")
            continue
        code, anchor = quotation
        between = text[text.index(")", above.start(1)) : fence.start(2)]
        parts += [text[rest : above.start()], f"]({path}{anchor}", between, code]
        rest = fence.end(2)
    return "".join(parts) + text[rest:]


def _relinked(text: str, page: Path, root: Path, problems: list[str]) -> str:
    """The page's text with the line that each link to code has now. The links of quotations are right already."""
    fences = list(FENCE.finditer(text))
    quoting = {above.start() for fence in fences if (above := QUOTED.search(text, 0, fence.start()))}

    def relink(link: re.Match) -> str:
        bang, label, target, title = link.groups()
        is_code = any(fence.start() <= link.start() < fence.end() for fence in fences)
        if bang or is_code or re.match(r"[a-z]+:", target) or link.start(3) - 2 in quoting:
            return link[0]
        symbol = label[1:-1] if re.fullmatch(r"`[\w.]+(\(\))?`", label) else ""
        file = page.parent / target.partition("#")[0] if target else file_of_symbol(symbol, root)
        if file is None:
            problems.append(f"{link[0]}: no file of code defines this")
        if file is None or file.suffix not in (".py", ".sh", ".yaml") or not file.is_file():
            return link[0]
        file = file.resolve()
        line = line_of_text(file, title) if title else None
        if symbol and not title and file.suffix == ".py":
            line = line_of_symbol(file, symbol)
        if line is None:
            if title or "#" in target:
                problems.append(f"{link[0]}: {file.name} does not define it, or has not one line with the title's text")
            return link[0]
        path = os.path.relpath(file, page.parent.resolve())
        return f"[{label}]({path}#L{line}" + (f' "{title}")' if title else ")")

    return LINK.sub(relink, text)


def rewritten(page: Path, root: Path = ROOT) -> tuple[str, list[str]]:
    """The page with the lines and the quotations that the code has now, and what nobody but its author can mend."""
    problems: list[str] = []
    text = _requoted(page.read_text(encoding="utf-8"), page, problems)
    text = _relinked(text, page, root, problems)
    return text, [f"{page.relative_to(root)}: {problem}" for problem in problems]


def dead_links(page: Path, root: Path = ROOT) -> list[str]:
    """Files, folders and headings that links and pictures name and that are not there."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text(encoding="utf-8"))
    targets = [(m.start(), m[3]) for m in LINK.finditer(text)] + [(m.start(), m[1]) for m in PICTURE.finditer(text)]
    problems = []
    for position, target in targets:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        where = f"{page.relative_to(root)}:{text.count(chr(10), 0, position) + 1}: {target}"
        if re.match(r"[a-z]+:", target):
            continue
        if not file.exists():
            problems.append(f"{where} is not there")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            problems.append(f"{where}: no such heading")
    return problems


def main() -> None:
    problems = []
    for page in pages():
        text, wrong = rewritten(page)
        if "--write" in sys.argv:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            problems.append(f"{page.relative_to(ROOT)}: the code has moved: run `python tests/links.py --write`")
        problems += wrong + dead_links(page)
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
