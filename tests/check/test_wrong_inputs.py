"""Configs and overrides, right and wrong: what is wrong is refused with a message that names the place, the key, the
value and the fix. wrong_inputs.yaml has what a message must name, no wording; right_inputs.yaml has what must pass."""

from pathlib import Path

import pytest
import yaml

from base.check.rules import load_checked
from config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
WITH_DATA = "data: {train: {data_path: train.jsonl}, validation: {data_path: val.jsonl}}"
WRONG, RIGHT = (
    yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("wrong_inputs.yaml", "right_inputs.yaml")
)


def read(row, write):
    """`text` is run.yaml, or `files` are written; `words` are overrides; `ranks` is how many run it, on how many to a
    node."""
    for name, text in (row.get("files") or {"run.yaml": row.get("text", WITH_DATA)}).items():
        write(text, name)
    file = row.get("config", "run.yaml")
    load_checked(ROOT / file if file.startswith("configs/") else file, row.get("words", []), *row.get("ranks", [1]))


@pytest.mark.parametrize("row", WRONG, ids=lambda row: " ".join(row["names"][:3])[:60])
def test_the_message_names(row, write):
    with pytest.raises(ConfigError) as refused:
        read(row, write)
    missing = [name for name in row["names"] if str(name) not in str(refused.value)]
    assert not missing, str(refused.value)


@pytest.mark.parametrize("row", RIGHT, ids=lambda row: " ".join(row.get("words", ["sets"]))[:60])
def test_what_is_right_passes(row, write):
    read(row, write)
