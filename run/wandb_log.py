"""Copies a run's numbers to Weights & Biases, in a process of its own that reads the files of the run folder: whatever
W&B does or fails to do, training neither waits for it nor ends.

It imports nothing of this program. `wandb.json` in the run folder keeps W&B's id of the run, so that a resumed run is
the same one there, and the last row that was sent: rows that a resumed run repeats are not sent again. `wandb.log` has
what W&B says.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_SECONDS = 1.0
FINISH_SECONDS = 600.0  # to send what is left when the run has ended


def start(folder: Path, project: str | None, name: str | None) -> subprocess.Popen:
    """Begins to copy metrics.jsonl of the folder, until this process has ended or written exit.json."""
    command = [sys.executable, "-P", __file__, str(folder), str(os.getpid()), project or "", name or folder.name]
    with (folder / "wandb.log").open("a") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def describe(folder: Path) -> str:
    """Where the numbers are at W&B."""
    state = _state(folder)
    if "url" not in state:
        return f"nothing was sent so far, see {folder / 'wandb.log'}"
    return state["url"] or f"offline: wandb sync {folder / 'wandb' / 'offline-run-*'}"


def _state(folder: Path) -> dict:
    file = folder / "wandb.json"
    return json.loads(file.read_text()) if file.exists() else {"id": secrets.token_hex(4), "row": -1}


def _exit_code(folder: Path, parent: int) -> int | None:
    """Of the run, once it has ended."""
    is_gone = os.getppid() != parent
    if (folder / "exit.json").exists():
        return json.loads((folder / "exit.json").read_text())["code"]
    return 1 if is_gone else None


def copy(folder: Path, parent: int, project: str, name: str) -> None:
    """Sends the rows as they are written. `step` is the x-axis; W&B's own step, which may not fall and has one row
    each, is 2 * step for training and the number behind it for the validation after it."""
    import wandb
    import yaml

    state = _state(folder)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    settings = wandb.Settings(console="off", finish_timeout=FINISH_SECONDS)
    ids = {"project": project or None, "name": name, "id": state["id"], "resume": "allow"}
    run = wandb.init(**ids, dir=folder, config=config, settings=settings)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    state["url"] = run.url
    rest = b""
    with (folder / "metrics.jsonl").open("rb") as file:
        code = None
        while code is None:
            code = _exit_code(folder, parent)  # before the rows: who has ended has written all of them
            *lines, rest = (rest + file.read()).split(b"\n")
            for row in map(json.loads, lines):
                number = 2 * row["step"] + any(key.startswith("validation/") for key in row)
                if number > state["row"]:
                    run.log(row, step=number, commit=True)
                    state["row"] = number
            if lines:
                (folder / "wandb.json.new").write_text(json.dumps(state))
                os.replace(folder / "wandb.json.new", folder / "wandb.json")
            time.sleep(POLL_SECONDS if code is None else 0)
    run.finish(exit_code=code)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # the run is told, and has an end
        signal.signal(number, signal.SIG_IGN)
    copy(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
