"""What a dotted path in a config names, and what a user hears where it names nothing."""

import sys

import pytest

from config import ConfigError
from support.system.imports import import_attribute


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


def test_who_has_no_module_hears_where_modules_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        import_attribute("my_rewards.math:f", "env_name")
    message = str(error.value)
    assert message.startswith("env_name 'my_rewards.math:f': ") and f"working directory ({tmp_path})" in message
    assert "PYTHONPATH" in message and "No module named 'my_rewards'" in message
    monkeypatch.syspath_prepend(tmp_path / "there")  # as PYTHONPATH does
    (tmp_path / "there" / "my_rewards").mkdir(parents=True)
    (tmp_path / "there" / "my_rewards" / "math.py").write_text("f = 5\n")
    assert import_attribute("my_rewards.math:f", "env_name") == 5


@pytest.mark.parametrize("text", ["import no_such_library", "1 / 0"])
def test_a_module_that_is_there_but_fails_is_not_looked_for(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"failing_{len(text)}.py").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=r"cannot be imported .*raised .*failing_\d+\.py:1\)$"):
        import_attribute(f"failing_{len(text)}:f", "env_name")
