"""Wrong configs and overrides: each is refused with a message that names the place, the key, the value and the fix.

wrong_inputs.yaml has the inputs and what the message must name; it holds no wording.
"""

from pathlib import Path

import pytest
import yaml

from config import ConfigError
from support.check.rules import load_checked

ROOT = Path(__file__).resolve().parents[2]
WITH_DATA = "data: {train: {data_path: train.jsonl}, validation: {data_path: val.jsonl}}"
ROWS = yaml.safe_load(Path(__file__).with_name("wrong_inputs.yaml").read_text(encoding="utf-8"))


def test_there_are_enough():
    assert len(ROWS) >= 150


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row["names"][:3])[:60])
def test_the_message_names(row, write):
    """`text` is run.yaml, or `files` are written; `words` are overrides; `ranks` is how many run it, on how many to a
    node."""
    for name, text in (row.get("files") or {"run.yaml": row.get("text", WITH_DATA)}).items():
        write(text, name)
    file = row.get("config", "run.yaml")
    with pytest.raises(ConfigError) as refused:
        load_checked(ROOT / file if file.startswith("configs/") else file, row.get("words", []), *row.get("ranks", [1]))
    missing = [name for name in row["names"] if str(name) not in str(refused.value)]
    assert not missing, str(refused.value)
