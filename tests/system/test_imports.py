"""What a dotted path in a config names, and what a user hears where it names nothing."""

import sys
from pathlib import Path

import pytest

import envs  # noqa: F401 - is there before any module of a user, as in the trainer
from base.system import imports
from base.system.imports import import_attribute
from config import ConfigError

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


MINE = {"config.py": "KEY = 'mine'", "judges/__init__.py": "", "judges/own.py": "from config import KEY"}


@pytest.mark.parametrize(
    ("module", "files"),
    [
        ("mine", {"mine.py": "from config import KEY"}),
        ("mine", {"mine.py": "from helper import KEY", "helper.py": "from judges.own import KEY"}),
        (
            "bundle.mine",
            {"bundle/mine.py": "from .b import KEY", "bundle/b.py": "class A:\n    import config\nKEY = A.config.KEY"},
        ),
        ("rollout", {"rollout.py": "from config import KEY"}),
        # What is ours alone stays ours, and so does what is never imported; a name in a package is no name of ours.
        ("mine", {"mine.py": "from config import KEY\nfrom envs import Environment", "loss.py": "1 / 0"}),
        (
            "bundle.mine",
            {
                "bundle/mine.py": "def f():\n    from .config import KEY\n    return KEY\nKEY = f()",
                "bundle/config.py": "KEY = 'mine'",
            },
        ),
    ],
)
def test_a_users_module_may_have_a_name_of_ours(module, files, tmp_path, monkeypatch):
    """Ours are what they were, before and after."""
    write(tmp_path, MINE | files)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    before = dict(sys.modules), list(sys.path)
    for _ in range(2):
        assert import_attribute(f"{module}:KEY", "env_name") == "mine"
        changed = {name for name, found in sys.modules.items() if before[0].get(name) is not found}
        assert not {name.partition(".")[0] for name in changed} - {"mine", "helper", "bundle"}
        assert not before[0].keys() - sys.modules.keys() and sys.path == before[1]
    for name in changed:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(imports, "_users_modules", {})


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        ({"mine.py": "def f():\n    import judges.own"}, "judges"),
        (
            {
                "mine.py": "from helper import KEY",
                "helper.py": "f = lambda: 0\nasync def g():\n    from config import KEY",
            },
            "config",
        ),
        ({"mine.py": "def f():\n    import helper", "helper.py": "from config import KEY"}, "config"),
    ],
)
def test_a_function_that_would_import_ours_is_refused_with_both_paths(files, taken, tmp_path, monkeypatch):
    write(tmp_path, MINE | files)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        import_attribute("mine:f", "env_name")
    [ours] = [path for path in (ROOT / f"{taken}.py", ROOT / taken / "__init__.py") if path.exists()]
    assert f"'{taken}' is {tmp_path}/{taken}" in str(error.value) and str(ours) in str(error.value)


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}\n")
