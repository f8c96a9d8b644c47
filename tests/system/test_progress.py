"""The line of a long phase: on a terminal (a pseudo-terminal, read as it is written) and without one."""

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from system.progress import Progress
for number in Progress("rows checked", iterable=range(4)):
    time.sleep(0.15)
with Progress("bytes read", 4000) as bar:
    bar.update(1000)
    time.sleep(0.15)
    bar.update(1000)
with Progress("start, 2 of 3: vLLM engine"):
    time.sleep(0.05)
print("end")
"""


def on_a_terminal(**env):
    """What a process writes to its terminal."""
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, 80))
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=there, stderr=there, env={**os.environ, **env})
    os.close(there)
    output = b""
    try:
        while part := os.read(here, 65536):
            output += part
    except OSError:  # EIO: the other end is closed
        pass
    os.close(here)
    assert process.wait() == 0, output
    return output.decode().replace("\r\n", "\n")


def test_on_a_terminal_the_line_is_rewritten_and_gone_at_the_end():
    output = on_a_terminal()
    drawn = [line.strip() for line in output.split("\r") if line.strip()]
    assert any(line.startswith("rows checked:  75%") and "3/4" in line for line in drawn), drawn
    assert any(line.startswith("bytes read:") and "2000/4000" in line for line in drawn), drawn
    assert "start, 2 of 3: vLLM engine" in [line.rstrip(": ") for line in drawn]
    assert drawn[-1] == "end" and output.count("\n") == 1


def test_without_a_terminal_and_on_other_ranks_nothing_is_added():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("end\n", "")
    assert on_a_terminal(RANK="1") == "end\n"
