"""Runs what may raise anything or may not be there: the user's code, and parts of the program. No torch."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from base.system.exits import LIBRARIES, Interrupted
from config import ConfigError, DataError

P = ParamSpec("P")
T = TypeVar("T")
PROGRAM = ("base", "envs", "judges", "run")  # these call the user's code
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """In this block a part of the program is imported that most runs do without, and that a fork may have deleted."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs the module {error.name}, which is not here: restore it, or do without"
        ) from error


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
