"""Hostile inputs against the real `grpo.py --check`, each in a process of its own that can be killed.

A warm process imports what `--check` imports, and forks a child for each input, which runs grpo.py as `__main__`: so an
input takes a tenth of a second, and one that hangs, aborts or eats memory ends alone.
"""

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_SECONDS = 20  # of any input
MAX_MESSAGE_CHARS = 500
MEMORY_BYTES = 6 << 30


@dataclass(frozen=True, slots=True)
class Answer:
    """How a check ended. code: its exit code, the negative number of the signal that killed it, or None if it hung."""

    code: int | None
    message: str  # all of stderr
    output: str
    seconds: float


class Checks:
    """The warm process. `with Checks() as check: answer = check(folder, "run.yaml", "grpo.seed=1")`."""

    def __enter__(self) -> "Checks":
        unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GRPO_EXIT_FILE", "PYTEST_CURRENT_TEST")
        env = {name: value for name, value in os.environ.items() if name not in unset} | {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        return self

    def __call__(self, folder: Path, *words: str, seconds: float = MAX_SECONDS) -> Answer:
        request = {"folder": str(folder), "words": words, "seconds": seconds}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Answer(**json.loads(self.process.stdout.readline()))

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait()


def assert_answered(answer: Answer, *names: str, code: int | None = None) -> None:
    """0 or 2 (or `code`), in time; a refusal is one message, not too long, that names one of `names`."""
    assert answer.code in ((0, 2) if code is None else (code,)), answer
    assert "Traceback" not in answer.message, answer.message
    if answer.code == 2:
        assert len(answer.message) <= MAX_MESSAGE_CHARS, (len(answer.message), answer.message)
        assert not names or any(name in answer.message for name in names), answer.message


def _serve() -> None:
    sys.path.insert(0, str(ROOT))
    from check import preflight  # noqa: F401  warm: the children find it imported

    out = Path(f"/tmp/red_team_{os.getpid()}")
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _check(request, out)
        code = _wait(pid, start + request["seconds"])
        message = out.with_suffix(".err").read_text(errors="replace")
        output = out.with_suffix(".out").read_text(errors="replace")
        answer = {"code": code, "message": message, "output": output, "seconds": time.monotonic() - start}
        print(json.dumps(answer), flush=True)
    for suffix in (".err", ".out"):
        out.with_suffix(suffix).unlink(missing_ok=True)


def _wait(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            os.killpg(pid, signal.SIGKILL)  # what it started
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _check(request: dict, out: Path) -> None:
    """In the child: grpo.py --check with the words, in the folder."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(out.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.chdir(request["folder"])
    sys.argv = [str(ROOT / "grpo.py"), "--check", *request["words"]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    _serve()
