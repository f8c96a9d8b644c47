"""The line of a long phase: on a terminal, which is a pseudo-terminal here, and without one."""

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from base.system.progress import Progress
for number in Progress("rows checked", range(4)):
    time.sleep(0.15)
with Progress("start, 2 of 3: vLLM engine"):
    time.sleep(0.05)
print("end")
"""


def on_a_terminal(**env):
    """What a process writes to its terminal."""
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, 80))
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=there, stderr=there, env={**os.environ, **env}):
        os.close(there)
        output = b""
        try:
            while part := os.read(here, 65536):
                output += part
        except OSError:  # EIO: the other end is closed
            os.close(here)
    return output.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_the_line_is_rewritten_on_a_terminal_and_gone_at_the_end():
    output = on_a_terminal()
    drawn = [line.strip() for line in output.split("\r") if line.strip()]
    assert any("rows checked" in line and "3/4" in line for line in drawn), drawn
    assert any("start, 2 of 3: vLLM engine" in line for line in drawn), drawn
    assert drawn[-1] == "end" and output.count("\n") == 1
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("end\n", ""), "without a terminal"
    assert on_a_terminal(RANK="1") == "end\n"
