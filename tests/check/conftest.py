"""Fixtures of the tests of configs."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a yaml file into the working directory of the test; messages then name it as a user would."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.yaml") -> str:
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    return write
