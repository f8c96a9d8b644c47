"""docs/metrics.md as data: the metrics that it has rows for, with their formulas."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = "| key | formula |"
PLACEHOLDERS = {
    "<mode>": "(greedy|sampled)",
    "<k>": r"\d+",
    "<from>": r"\d{6}",
    "<to>": r"\d{6}",
    "<outcome>": "(ok|wrong|parse_fail|timeout|error)",
    "<finish_reason>": "(stop|length|max_turns)",
    "<phase>": "(generation|policy_and_reference_logprobs|policy_training|prepare_for_generation)",
    "<rule>": r"\w+",
    "<env>": "[^/]+",
    "<part>": "[^/]+",
    "<set>": "[^/]+",
    "<name>": ".+",
}


def rows() -> dict[str, list[str]]:
    """Pattern of a key, as the page has it -> the other cells of its row: formula, healthy, what to do, elsewhere."""
    found: dict[str, list[str]] = {}
    in_table = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        in_table = line.startswith(HEAD) or (in_table and line.startswith("|"))
        if not in_table or line.startswith((HEAD, "|---")):
            continue
        key, *cells = line.strip("|").split(" | ")
        for name in re.findall("`(.+?)`", key):
            assert name not in found, f"docs/metrics.md has two rows of {name}"
            found[name] = cells
    return found


def formulas() -> dict[str, str]:
    """Pattern of a key -> its formula, where it is given in Python: a row has one for each of its keys, or none."""
    found: dict[str, str] = {}
    all_rows = rows()
    for cells in {id(cells): cells for cells in all_rows.values()}.values():
        keys = [name for name, row in all_rows.items() if row is cells]
        texts = re.findall("`(.+?)`", cells[0])
        if cells[0].startswith("`"):
            found |= dict(zip(keys, texts[: len(keys)], strict=True))
    return found


def as_regex(pattern: str) -> str:
    return "".join(PLACEHOLDERS.get(part, re.escape(part)) for part in re.split("(<[a-z_]+>)", pattern))


def matches(pattern: str, key: str) -> bool:
    return re.fullmatch(as_regex(pattern), key) is not None


def undocumented(keys) -> list[str]:
    """The keys of metrics.jsonl that no row of the page names."""
    any_row = re.compile("|".join(f"(?:{as_regex(pattern)})" for pattern in rows()))
    return sorted(key for key in set(keys) - {"step"} if not any_row.fullmatch(key))
