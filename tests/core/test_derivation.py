"""The page of derivations runs: each of its formulas holds, in numbers."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "derivation.md"


def test_every_block_holds():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
