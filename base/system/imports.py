"""Imports what a config names by dotted path: an environment, a reward function, a dataset, a sampler. No torch."""

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from base.system.exits import LIBRARIES
from base.system.users_code import ROOT, call
from config import ConfigError

_users_modules: dict[str, ModuleType] = {}  # that have names of ours, which they have only while they are imported


def import_attribute(path: str, key: str) -> Any:
    """The attribute that `path`, "module:name", names; ConfigError with the config key `key` if it has none."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there shadows our modules
    name = f"{key} '{path}'"
    problem = f"{name}: cannot be imported from the working directory ({os.getcwd()}) or PYTHONPATH: it"
    with users_first(taken_names(module, name)):
        return call(problem, lambda: getattr(importlib.import_module(module), attribute))


@contextmanager
def users_first(names: Collection[str]) -> Iterator[None]:
    """In this block, these names are modules of the user's; before and after it, they are ours."""
    if not names:
        yield
        return
    ours = _with_names(sys.modules, names)
    paths = list(sys.path)
    for module in ours:
        del sys.modules[module]
    sys.modules.update(_with_names(_users_modules, names))
    sys.path.sort(key=lambda folder: Path(folder).resolve() == ROOT)  # ours last; the others keep their order
    try:
        yield
    finally:
        theirs = _with_names(sys.modules, names)
        for module in theirs:
            del sys.modules[module]
        _users_modules.update(theirs)
        sys.modules.update(ours)
        sys.path[:] = paths


def _with_names(modules: Mapping[str, ModuleType], names: Collection[str]) -> dict[str, ModuleType]:
    """The modules of these names, and those of packages of these names."""
    return {module: found for module, found in modules.items() if module.partition(".")[0] in names}


def taken_names(module: str, name: str) -> set[str]:
    """The names of our modules that the user's module, or one that it imports, has for a module of the user's. Raises
    ConfigError, which begins with `name`, where a function imports one: when it runs, the name is ours."""
    folders = [Path(path).resolve() for path in sys.path if not path.startswith(LIBRARIES)]
    folders = [folder for folder in folders if folder != ROOT]
    todo = [(module, False)]
    seen = set()
    taken = set()
    while todo:
        imported, is_late = todo.pop()
        if (imported, is_late) in seen:
            continue
        seen.add((imported, is_late))
        first = imported.partition(".")[0]
        theirs = _file_of(imported, folders) or _file_of(first, folders)
        if theirs is None:
            continue
        ours = _file_of(first, [ROOT])
        if ours is not None:
            taken.add(first)
            if is_late:
                clash = f"'{first}' is {theirs}, but when the function runs it is {ours}"
                raise ConfigError(f"{name}: a function imports {clash}: import it at the top, or rename your module")
        todo += [(name_there, is_late or in_function) for name_there, in_function in _imports_of(theirs, imported)]
    return taken


def _file_of(module: str, folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        place = folder.joinpath(*module.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _imports_of(file: Path, module: str) -> Iterator[tuple[str, bool]]:
    """What a module imports, and whether a function does: dotted names, of `from a import b` both a and a.b."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    with suppress(SyntaxError, ValueError):  # the import will say it
        tree = ast.parse(file.read_bytes())
        late = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                late.update(ast.walk(node))
        for node in ast.walk(tree):
            is_late = node in late
            if isinstance(node, ast.Import):
                yield from ((alias.name, is_late) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    source = importlib.util.resolve_name("." * node.level + source, package)
                yield source, is_late
                yield from ((f"{source}.{alias.name}", is_late) for alias in node.names)
