"""Finds the program in a reply: `read_codes`."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from textwrap import dedent
from typing import NamedTuple

from .codec import Json
from .reply import behind_thought

MAX_PARSED_CHARS = 100_000  # of Python code: 0.2 s
MAX_READINGS = 5  # of one block, and so many blocks
FENCE = re.compile(r"(.*?)(?:`{3,}|~{3,})([^`~]*)$")  # a line with a fence: what is before it, its info string
PYTHON = re.compile(r"(?i)\W*(?:python|py)[\d.]*(?!\w)")  # an info string: py, python3.11, {.python}
# An info string that slipped into the block, and a heading of one word, which Python would run as a name.
NO_CODE = re.compile(r"(?:\s*(?:(?i:python|py)[\d.]*|[A-Z][a-z]+)[ \t]*\n)+")
# A line that stands for a fence: [BEGIN] and [DONE] are MBPP's.
TAG = re.compile(
    r"^[ \t]*(?:\[/?(?:BEGIN|END|DONE|PYTHON|CODE|ANSWER)\]|</?(?:code|answer|solution|python)>)[ \t]*$", re.MULTILINE
)
DEFINITION = re.compile(  # a line of code that is no prose
    r"[ \t]*(?:@\w|(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(|class[ \t]+\w+[ \t]*(?:\(.*\))?[ \t]*:"
    r"|from[ \t]+[\w.]+[ \t]+import\b|import[ \t]+[\w.]+[ \t]*(?:$|,|#|as\b))"
)
STATEMENT = re.compile(  # one that may be
    r"[ \t]*(?:(?:if|for|while|with|try)\b.*:|(?:return|yield|print|assert)\b"
    r"|[A-Za-z_][\w.,\[\] ]*[-+*/]?=[^=]|[\w.]+\(.*\)\s*$)"
)
BYTE_ORDER_MARK = "\ufeff"


class Fence(NamedTuple):
    line: int
    before: str  # in its line
    info: str  # behind it


def is_python(code: str) -> bool:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return len(code) <= MAX_PARSED_CHARS and bool(ast.parse(code))
    return False


def completed(prompt: str) -> str | None:
    """The prompt as a module of its own: a signature alone, or the head of a block, gets the body `pass`. None if it is
    no Python even so, as a question is."""
    if is_python(prompt):
        return prompt
    last_line = prompt.rstrip().rpartition("\n")[2]
    indent = last_line[: len(last_line) - len(last_line.lstrip())]
    with_body = f"{prompt.rstrip()}\n{indent}    pass\n"
    return with_body if is_python(with_body) else None


def read_codes(reply: str, tests: Mapping[str, Json]) -> list[str]:
    """What may be the program in a reply, behind a thought that is closed, the likeliest first: that is the first that
    Python can compile (sandbox.py).

    Blocks that define the entry point come first; where there is none, those that print or import. Of those, blocks
    that are marked as Python come before blocks without a mark, the last one first; then the whole reply; then what
    stands before a fence, as the prompt may have opened the block; then the same without the prose above the code. A
    prompt of the tests stands before each code.
    """
    prompt = tests.get("prompt", "")
    name = re.escape(tests.get("entry_point", ""))
    if name:
        defines = rf"(?:async[ \t]+)?def[ \t]+{name}\b|{name}[ \t]*=(?!=)|(?:from|import)\b.*\b{name}\b"
        whole = re.compile(rf"^[ \t]*(?:{defines})", re.MULTILINE)
    else:
        whole = re.compile(r"\b(?:print|import)\b")
    ends_a_function = re.compile(r"^[ \t]+(?:return|yield)\b", re.MULTILINE)

    def is_likely(code: str) -> bool:
        return bool(whole.search(code)) or (bool(prompt) and bool(ends_a_function.search(code)))

    codes = [clean(code) for code in blocks(behind_thought(reply))]
    codes.sort(key=is_likely, reverse=True)
    found = []
    for code in codes:
        # The end of a function that the prompt begins stays indented; a whole function does not.
        forms = [code, dedent(code)]
        if whole.search(code):
            forms.reverse()
        for form in forms:
            if form.strip():
                found += with_prompt(form, prompt)
    return list(dict.fromkeys(found))


def with_prompt(code: str, prompt: str) -> list[str]:
    """The code behind the prompt: it has imports and helpers, or a function that the code ends. A signature alone gets
    a body where the code is a function of its own."""
    if not prompt:
        return [code]
    return list(dict.fromkeys([f"{prompt}\n{code}", f"{completed(prompt)}\n{code}"]))


def clean(code: str) -> str:
    """Without a byte order mark, a line that names the language, and headings of one word."""
    code = code.removeprefix(BYTE_ORDER_MARK)
    lines = NO_CODE.match(code)
    if lines:
        code = code[lines.end() :]
    return code


def blocks(reply: str) -> Iterator[str]:
    """The blocks of a reply in the order that `read_codes` states, each to its next fences, as code may hold some, and
    to the end of the reply."""
    text = TAG.sub("```", re.sub(r"\r\n?", "\n", reply))
    lines = text.split("\n")
    fences = [Fence(number, *match.groups()) for number, line in enumerate(lines) if (match := FENCE.match(line))]
    ends = [fence for fence in fences if not fence.info.strip()]
    for start in reversed(starts_of_blocks(fences)):
        for end in [fence for fence in ends if fence.line > start][:MAX_READINGS]:
            yield between(lines, start, end)
        yield "\n".join(lines[start + 1 :])
    yield text
    for end in fences[:MAX_READINGS]:
        yield between(lines, -1, end)
    yield reply
    if not fences:
        end = Fence(len(lines), "", "")
    elif fences[0] in ends:  # nothing opens it
        end = fences[0]
    else:
        return
    for start in starts_of_code(lines[: end.line]):
        yield between(lines, start - 1, end)


def starts_of_code(lines: Sequence[str]) -> list[int]:
    """The lines where code may begin below prose: the first one that defines or imports, and those before that may be
    statements or prose."""
    starts = []
    for number, line in enumerate(lines):
        if DEFINITION.match(line):
            return [*starts[:MAX_READINGS], number]
        if STATEMENT.match(line):
            starts.append(number)
    return starts[:MAX_READINGS]


def starts_of_blocks(fences: Sequence[Fence]) -> list[int]:
    """The lines of fences behind which a block may begin: the last ones without a mark, then the last ones that are
    marked as Python."""
    marked: list[int] = []
    plain: list[int] = []
    is_open = False
    for fence in fences:
        has_info = bool(fence.info.strip())
        if has_info and PYTHON.match(fence.info):
            marked.append(fence.line)
        if not has_info and not is_open:
            plain.append(fence.line)
        is_open = has_info or not is_open
    return [*plain[-MAX_READINGS:], *marked[-MAX_READINGS:]]


def between(lines: Sequence[str], start: int, end: Fence) -> str:
    """The lines behind the line `start`, and what is before the fence that ends them."""
    return "\n".join([*lines[start + 1 : end.line], end.before])
