"""What a dotted path in a config names, and what a user hears where it names nothing."""

import sys

import pytest

from config import ConfigError
from system.imports import import_attribute


def test_modules_of_the_working_directory_come_last(tmp_path, monkeypatch):
    (tmp_path / "only_in_tmp.py").write_text("value = 5\n")
    (tmp_path / "json.py").write_text("raise SystemExit\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert import_attribute("only_in_tmp:value", "processor") == 5
    monkeypatch.delitem(sys.modules, "json")
    assert import_attribute("json:dumps", "processor")([1]) == "[1]", "no file there takes the place of another"


@pytest.mark.parametrize("path", ["no_such_module:x", ":x", "json:absent", "json"])
def test_what_is_not_there_is_named_with_its_key(path):
    with pytest.raises(ConfigError, match=f"^processor '{path}': cannot be imported"):
        import_attribute(path, "processor")
