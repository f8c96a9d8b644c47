"""Executes the lines behind >>> of a page, block after block, in one namespace.

python tests/helpers/run_page.py docs/walkthrough.md       writes what they print now below them
python -i tests/helpers/run_page.py docs/walkthrough.md    and stays in a console with the page's variables
"""

import contextlib
import doctest
import io
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?<=^```pycon\n)(.*?)(?=^```$)", re.M | re.S)


def executed(page: str, names: dict) -> str:
    """The page with what its lines print now. names: the namespace, which afterwards has what they define."""

    def run(block: re.Match) -> str:
        lines = []
        for example in doctest.DocTestParser().get_examples(block[1]):
            first, *rest = example.source.splitlines()
            lines += [f">>> {first}", *(f"... {line}" for line in rest)]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                where = f"line {page.count(chr(10), 0, block.start()) + example.lineno + 1} of the page"
                exec(compile(example.source, where, "single"), names)
            lines += printed.getvalue().splitlines()
        return "\n".join(lines) + "\n"

    return BLOCK.sub(run, page)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    import fake_vllm

    fake_vllm.install()  # the page starts no engine: this only saves its import
    for path in map(Path, sys.argv[1:]):
        path.write_text(executed(path.read_text(encoding="utf-8"), globals()), encoding="utf-8")
