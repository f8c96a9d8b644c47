"""What a dotted path in a config names, and what a user hears where it names nothing."""

import sys
from pathlib import Path

import pytest

from config import ConfigError
from support.system.imports import import_attribute

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize(
    ("module", "files", "taken"),
    [
        ("mine", {"mine.py": "from config import KEY", "config.py": "KEY = 3"}, "config"),
        ("mine", {"mine.py": "def f():\n    import judges.own", "judges/own.py": ""}, "judges"),
        ("mine", {"mine.py": "import helper", "helper.py": "import model", "model/__init__.py": ""}, "model"),
        ("pack_a.mine", {"pack_a/mine.py": "from .b import x", "pack_a/b.py": "import loss", "loss.py": ""}, "loss"),
        ("rollout", {"rollout.py": "x = 1"}, "rollout"),
        # What is ours alone, what lies unused, and what is named by its package is no clash.
        ("mine", {"mine.py": "from config import ConfigError\nimport envs", "envs/notes.txt": ""}, None),
        ("mine", {"mine.py": "import json", "config.py": "1 / 0", "tools/a.py": ""}, None),
        (
            "pack_b.mine",
            {"pack_b/__init__.py": "", "pack_b/mine.py": "from .config import x", "pack_b/config.py": "x = 1"},
            None,
        ),
    ],
)
def test_a_users_module_of_a_name_of_ours_is_refused_with_both_paths(module, files, taken, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if taken is None:
        assert import_attribute(f"{module}:__name__", "env_name") == module
        monkeypatch.delitem(sys.modules, module)
        return
    with pytest.raises(ConfigError) as error:
        import_attribute(f"{module}:f", "env_name")
    [ours] = [path for path in (ROOT / f"{taken}.py", ROOT / taken / "__init__.py") if path.exists()]
    assert f"'{taken}' is {tmp_path}/{taken}" in str(error.value) and str(ours) in str(error.value)
