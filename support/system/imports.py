"""Runs what a config names by dotted path: an environment, a reward function, a dataset, a sampler. No torch."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from config import ConfigError, DataError
from support.system.exits import LIBRARIES, Interrupted

P = ParamSpec("P")
T = TypeVar("T")
PROGRAM = ("envs", "judges", "support")  # these call the user's code


def import_attribute(path: str, key: str) -> Any:
    """The attribute that `path`, "module:name", names; ConfigError with the config key `key` if it has none."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there shadows our modules
    name = f"{key} '{path}': cannot be imported from the working directory ({os.getcwd()}) or PYTHONPATH: it"
    return call(name, lambda: getattr(importlib.import_module(module), attribute))


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
