"""Runs what a config names by dotted path: an environment, a reward function, a dataset, a sampler. No torch."""

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

from config import ConfigError, DataError

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
PROGRAM = ("dataset", "envs", "graders", "run", "system")  # what calls the user's code


def import_attribute(path: str, key: str) -> Any:
    """The attribute that `path`, "module:name", names. Modules may lie in the working directory. Raises ConfigError,
    which names the config key `key`, where the module or its attribute cannot be imported."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there takes the place of ours
    try:
        return getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module of the user's runs here: SystemExit too
        raise ConfigError(f"{key} '{path}': cannot be imported ({describe(error)})") from error


def call(name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """What a function that runs the user's code returns. DataError, which begins with `name`, where that code raises
    something else than a ConfigError, or would end this process."""
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, ConfigError):
        raise
    except BaseException as error:
        raise DataError(f"{name} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """What the user's code raised, on one line, and as " (file:line)" the last line that ran of the first file that is
    neither a library's nor this program's."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    places = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not file.startswith(("<", *LIBRARIES)) and module.split(".")[0] not in PROGRAM:
            places.append((file, line))
    lines = [line for file, line in places if file == places[0][0]]
    return text.removeprefix(f"{type(error).__module__}.")[:300] + (f" ({places[0][0]}:{lines[-1]})" if lines else "")
