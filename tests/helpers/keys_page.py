"""docs/keys.md, from config.py: `python tests/helpers/keys_page.py` writes it anew."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "keys.md"
sys.path.insert(0, str(ROOT))

from base.inputs.key_help import default_text, meanings, type_name
from base.inputs.keys import FIELDS, bounds

TOP = """# All keys

Written by `.venv/bin/python tests/helpers/keys_page.py` from [config.py](../config.py). `grpo.py --help` prints the
same. A key is set in the yaml file of a run, or behind it on the command line: `grpo.num_prompts_per_step=16`.
"""


def text_of_page() -> str:
    """A table for each section, in the order of config.py."""
    lines = [TOP]
    section_before = None
    for name, meaning in meanings().items():
        section = name.split(".")[0]
        if section != section_before:
            lines += [f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        section_before = section
        kind = type_name(FIELDS[name].type)
        if bounds(name):
            kind += f" ({bounds(name)})"
        cells = [f"`{name}`", kind, f"`{default_text(name)}`", meaning]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines).replace("|\n## ", "|\n\n## ") + "\n"


if __name__ == "__main__":
    PAGE.write_text(text_of_page(), encoding="utf-8")
