"""What ended a rank before its end: exit code and reason, in a line. A rank that ends well does without. No torch."""

import traceback
from collections.abc import Callable
from pathlib import Path

from base.system.disk import NO_ROOM, describe_os_error, say
from base.system.exits import (
    EXIT_CHECK,
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_MEMORY,
    EXIT_SAVED,
    LIBRARIES,
    NO_PEERS,
    OutOfMemory,
    Peers,
    Saved,
    StopRun,
    host_name,
    how_to_go_on,
    report_exit,
)
from config import ConfigError


def run_command(work: Callable[[], str]) -> int:
    """One rank of a command from start to exit code. work: returns how it ended."""
    try:
        code, reason = 0, work()
    except BaseException as error:
        code, reason = describe_failure(error)
    report_exit(code, reason, None)
    return code


def describe_failure(error: BaseException, run_folder: Path | None = None, peers: Peers = NO_PEERS) -> tuple[int, str]:
    """(exit code, one-line reason) of what ended the run; an unexpected error also leaves its traceback on stderr."""
    ends = {ConfigError: (EXIT_CONFIG, "error"), Saved: (EXIT_SAVED, "saved"), StopRun: (EXIT_CHECK, "stopped")}
    for kind, (code, end) in (ends | {OutOfMemory: (EXIT_MEMORY, "out of memory")}).items():
        if isinstance(error, kind):
            return code, f"{end}: {error}"
    lost = peers.find_lost(run_folder)
    if lost:
        return EXIT_CRASH, lost
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        reason = describe_os_error(error)
    else:
        say("".join(traceback.format_exception(error)).rstrip(), is_error=True)
    if not error.__cause__:  # else the message was made to name the place
        reason += place_of(error)
    has_other_hosts = any(host != host_name() for host, _ in peers.processes.values())
    if has_other_hosts:  # one of them may be gone
        reason += how_to_go_on(run_folder)
    return EXIT_CRASH, f"crashed: {reason}"


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The calls that led to the error and are no library's, the innermost last."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(LIBRARIES)]


def place_of(error: BaseException) -> str:
    """Where the error was raised, as " (file:line, in name)": the innermost call that is no library's."""
    frames = own_frames(error)
    return f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
