"""docs/coming_from.md: its tables are those of the files that the program reads, and what it names is there."""

import re

import coming_from_page as script
import pytest
import yaml
from small_run import ROOT

from check.keys import FIELDS

PAGE = script.PAGE.read_text(encoding="utf-8")
KEY = re.compile(r"`((?:grpo|loss_fn|policy|data|env|logger|checkpointing)\.[a-z_A-Z.]+)[`=]")


def test_the_tables_are_those_of_the_program():
    assert PAGE == script.filled_in(PAGE), "python tests/coming_from_page.py writes them anew"


@pytest.mark.parametrize("system", ["trl", "verl"])
def test_every_key_of_theirs_is_there_once(system):
    rows = yaml.safe_load((ROOT / "tools" / f"from_{system}.yaml").read_text())["keys"]
    lines = [line.split(" | ")[0] for line in script.tables_of(system).splitlines() if line.startswith("| `")]
    keys = [key for line in lines for key in re.findall("`(.+?)`", line)]
    assert sorted(keys) == sorted(rows)


def test_every_row_about_nemo_rl_is_there():
    names = {
        name for row in script.TABLE if row.keys() - {"in", "keys", "same"} for name in script.names_of(row).split(", ")
    }
    tables = script.tables_of_nemo()
    assert len(names) > 100 and [name for name in sorted(names) if name not in tables] == []


def test_keys_of_ours_by_hand_are_keys():
    """In what is written by hand; the tables' keys are checked by test_convert.py and test_nemo.py."""
    by_hand = re.sub(r"(?s)<!-- (?!end).*?<!-- end -->", "", PAGE)
    named = {name for name in KEY.findall(by_hand) if not name.startswith("data.train_batch_size")}
    assert len(named) >= 10 and named <= FIELDS.keys(), named - FIELDS.keys()
    rows = {
        key
        for system in ("trl", "verl")
        for key in yaml.safe_load((ROOT / f"tools/from_{system}.yaml").read_text())["keys"]
    }
    assert {key for _, *theirs in script.BITING for key in theirs} <= rows and len(script.BITING) == 10


def test_links_lead_somewhere():
    for page in ("coming_from.md", "metrics.md", "nemo_rl.md", "tasks.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (ROOT / "docs" / target).exists(), (page, target)
