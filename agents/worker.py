"""Runs an agent for one rollout, in a worker process of graders/pool.py: a Python function, or a command.

The interpreter may be another one than the trainer's: this file needs the standard library alone.
"""

import asyncio
import inspect
import json
import math
import os
import pkgutil
import signal
import subprocess
import tempfile
from typing import Any

from graders.pool import ENDING

TAIL_BYTES = 1 << 16  # of what a command writes
OUTCOMES = ("ok", "wrong", "parse_fail", "timeout", "error")
GIVEN = ("base_url", "row", "messages", "answer", "tools", "seed", "is_validation", "deadline_s")


def run(job: dict) -> dict | None:
    """The agent's verdict {reward, outcome, rewards, extracted}, or None: not its fault, so it counts for nothing."""
    function, kwargs = job["function"] and pkgutil.resolve_name(job["function"]), job["kwargs"]
    if "base_url" not in job:  # before the run: is the function there, and can it be called?
        if function:
            inspect.signature(function).bind(**_accepted(function, dict.fromkeys(GIVEN)), **kwargs)
        return None
    os.environ.update(OPENAI_BASE_URL=job["base_url"], OPENAI_API_KEY="none")  # clients read them by themselves
    if not function:
        return verdict(json.loads(run_command(job["command"], job["row"])))
    try:
        found = function(**_accepted(function, {name: job[name] for name in GIVEN}), **kwargs)
        return verdict(asyncio.run(found) if inspect.iscoroutine(found) else found)
    except SystemExit as error:
        raise RuntimeError(f"the agent exits with {error.code}") from error


def _accepted(function: Any, given: dict) -> dict:
    """What the function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if takes_all or name in names}


def run_command(command: list[str], row: dict) -> str:
    """The last line that the command writes. It gets the row as JSON on its standard input."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # not pipes: a child of its may hold them
        files: dict = {"stdout": out, "stderr": err, "preexec_fn": _heed_signals}
        code = subprocess.run(command, input=json.dumps(row).encode(), check=False, **files).returncode
        lines = []
        for file in (out, err):
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines.append(file.read().decode(errors="replace").strip().rpartition("\n")[2])
    if code:
        raise RuntimeError(f"{command[0]} ended with exit code {code}: {lines[1]:.300}")
    return lines[0]


def _heed_signals() -> None:
    for number in ENDING:  # which a worker ignores, and its children would
        signal.signal(number, signal.SIG_DFL)


def verdict(value: Any) -> dict | None:
    """What an agent gave, in full. Raises ValueError for what is no number, no null and no such object."""
    if value is None:
        return None
    found = dict(value) if isinstance(value, dict) else {"reward": value}
    parts = found.get("rewards") or {}
    if unknown := found.keys() - {"reward", "outcome", "rewards", "extracted"}:
        raise ValueError(f"the agent gave {sorted(unknown)}: expected reward, outcome, rewards or extracted")
    if isinstance(found.get("reward"), str) or any(isinstance(part, str) for part in parts.values()):
        raise ValueError(f"the agent gave a text as its reward: {str(found)[:200]}")
    reward, parts = float(found["reward"]), {str(name): float(part) for name, part in parts.items()}
    outcome = found.get("outcome") or ("ok" if reward > 0 else "wrong")
    if outcome not in OUTCOMES:
        raise ValueError(f"the agent gave the outcome {outcome!r:.80}: expected one of {', '.join(OUTCOMES)}")
    if not all(map(math.isfinite, (reward, *parts.values()))):
        reward, outcome, parts = math.nan, "error", {}
    extracted = found.get("extracted")
    return {"reward": reward, "outcome": outcome, "rewards": parts, "extracted": extracted and str(extracted)}
