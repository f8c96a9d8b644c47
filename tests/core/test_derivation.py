"""The page of derivations runs: each of its formulas holds, in numbers, and is a line of the code it names."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch

from advantages import group_advantages

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "derivation.md"
LINES = re.findall(r"^In the code: `(.+)` \((.+), `(.+)`\)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_block_holds():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)


def weight_of_a_prompt(q, std, size=16):
    """The mean over all groups of 0 and 1 of the advantage times the slope of log p in q."""
    total = 0.0
    for right in range(size + 1):
        reward_B = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
        group_B = torch.zeros(size, dtype=torch.long)
        adv_B = group_advantages(reward_B, group_B, leave_one_out=True, normalize=True, std=std, std_floor=0.05)
        slope = adv_B[:right].sum() / q - adv_B[right:].sum() / (1 - q)
        total += math.comb(size, right) * q**right * (1 - q) ** (size - right) * slope.item() / size
    return total


def test_trials4_f8_the_weights_of_prompts_are_those_that_the_page_tells():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    told = re.search(r"=group` the weight is ([\d.]+) at q = 0.5, ([\d.]+) at 0.1 and ([\d.]+) at 0.01", text)
    default = re.search(r"the weights are ([\d.]+), ([\d.]+) and ([\d.]+). Dr. GRPO", text)
    for std, numbers in (("group", told), ("baseline", default)):
        found = [f"{weight_of_a_prompt(q, std):.2f}" for q in (0.5, 0.1, 0.01)]
        assert found == list(numbers.groups())


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
