"""Runs what a config names by dotted path: an environment, a reward function, a dataset, a sampler. No torch."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from config import ConfigError, DataError
from support.system.exits import LIBRARIES, Interrupted

PROGRAM = ("envs", "judges", "support")  # these call the user's code


def import_attribute(path: str, key: str) -> Any:
    """The attribute that `path`, "module:name", names; ConfigError with the config key `key` if it has none."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there shadows our modules
    name = f"{key} '{path}': cannot be imported from the working directory ({os.getcwd()}) or PYTHONPATH: it"
    return call(name, lambda: getattr(importlib.import_module(module), attribute))


def call(name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
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
    text = " ".join("".join(traceback.format_exception_only(error)).split()).removeprefix(f"{type(error).__module__}.")
    places = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not file.startswith(("<", *LIBRARIES)) and module.split(".")[0] not in PROGRAM:
            places.append((file, line))
    lines = [line for file, line in places if file == places[0][0]]
    return text[:300] + (f" ({places[0][0]}:{lines[-1]})" if places else "")
