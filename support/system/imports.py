"""Runs what a config names by dotted path: an environment, a reward function, a dataset, a sampler. No torch."""

import ast
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from config import ConfigError, DataError
from support.system.exits import LIBRARIES, Interrupted

P = ParamSpec("P")
T = TypeVar("T")
PROGRAM = ("envs", "judges", "support")  # these call the user's code
ROOT = Path(__file__).resolve().parents[2]


def import_attribute(path: str, key: str) -> Any:
    """The attribute that `path`, "module:name", names; ConfigError with the config key `key` if it has none."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there shadows our modules
    check_names(module, f"{key} '{path}'")
    name = f"{key} '{path}': cannot be imported from the working directory ({os.getcwd()}) or PYTHONPATH: it"
    return call(name, lambda: getattr(importlib.import_module(module), attribute))


def check_names(module: str, name: str) -> None:
    """In this process our modules come before the user's. Raises ConfigError, which begins with `name`, where the
    user's module imports one that lies in the user's folders and has the name of one of ours."""
    folders = [Path(path).resolve() for path in sys.path if not path.startswith(LIBRARIES)]
    folders = [folder for folder in folders if folder != ROOT]
    todo = [module]
    seen = set()
    while todo:
        imported = todo.pop()
        if imported in seen:
            continue
        seen.add(imported)
        first = imported.partition(".")[0]
        theirs = _file_of(imported, folders) or _file_of(first, folders)
        if theirs is None:
            continue
        ours = _file_of(first, [ROOT])
        if ours is not None:
            clash = f"'{first}' is {theirs}, but in the trainer's process it is {ours}"
            raise ConfigError(f"{name} needs a module of a name that is taken: {clash}: rename your module")
        todo += _imports_of(theirs, imported)


def _file_of(module: str, folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        place = folder.joinpath(*module.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _imports_of(file: Path, module: str) -> Iterator[str]:
    """Dotted names of all that a module imports; of `from a import b` both a and a.b."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    with suppress(SyntaxError, ValueError):  # the import will say it
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    source = importlib.util.resolve_name("." * node.level + source, package)
                yield source
                yield from (f"{source}.{alias.name}" for alias in node.names)


def call(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls the user's code. What it raises, even SystemExit, becomes a DataError that begins with `name`."""
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, ConfigError, Interrupted):
        raise
    except BaseException as error:
        raise DataError(f"{name} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """What the user's code raised, on one line, with " (file:line)": the last line that ran of the first file that
    belongs neither to a library nor to this program."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    text = text.removeprefix(f"{type(error).__module__}.")[:300]
    first_file = None
    last_line = 0
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        package = frame.f_globals.get("__name__", "").split(".")[0]
        if file.startswith(("<", *LIBRARIES)) or package in PROGRAM:
            continue
        if first_file is None:
            first_file = file
        if file == first_file:
            last_line = line
    if first_file is None:
        return text
    return f"{text} ({first_file}:{last_line})"
