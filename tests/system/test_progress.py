"""The line of a long phase: on a terminal (a pseudo-terminal, read as it is written) and without one."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from system.progress import CLEAR, Progress

ROOT = Path(__file__).resolve().parents[2]
START = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from system import progress; progress.SECONDS = 0.02\n"
SCAN = """
with progress.Progress("rows checked") as line:
    line.total = 10
    for line.done in range(10):
        time.sleep(0.03)
        if line.done == 4:
            print("one", "row"); print("of another stream", file=sys.stderr)
            sys.stdout.write("half a line")
            time.sleep(0.06)
            print(", whole")
with progress.Progress("start, 2 of 3: vLLM engine"):
    time.sleep(0.1)
print("end")
"""
PRINTED = ["one row", "of another stream", "half a line, whole", "end"]


def on_a_terminal(code, stderr=None, **env):
    """What a process writes to a terminal of 60 columns; its stderr too, unless that is a file."""
    here, there = pty.openpty()
    env = {**os.environ, "COLUMNS": "60", **env}
    process = subprocess.Popen([sys.executable, "-c", START + code], stdout=there, stderr=stderr or there, env=env)
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


def as_seen(output):
    """The lines that a terminal ends up with, of what is written, \\r and the code that clears a line."""
    lines, column = [""], 0
    for text in re.findall(r"\x1b\[2K|[\s\S]", output):
        if text == "\n":
            lines.append("")
        elif text == "\x1b[2K":
            lines[-1] = ""
        elif text != "\r":
            lines[-1] = lines[-1][:column] + text + lines[-1][column + 1 :]
        column = 0 if text in "\n\r" else column + (text != "\x1b[2K")
    return lines


def test_on_a_terminal_the_line_is_rewritten_and_gone_at_the_end():
    output = on_a_terminal(SCAN)
    drawn = [text.rstrip("\r") for text in re.findall(r"\x1b\[2K([^\x1b\n]+\r)", output)]
    counts = [text for text in drawn if re.fullmatch(r"rows checked: \d of 10 \(\d0%\), \d s left", text)]
    assert len(set(counts)) >= 4 and counts == sorted(counts)
    assert "start, 2 of 3: vLLM engine, 0 s" in drawn
    assert as_seen(output) == [*PRINTED, ""]


def test_a_stream_that_is_no_terminal_gets_no_codes(tmp_path):
    with (tmp_path / "errors").open("w") as errors:
        assert as_seen(on_a_terminal(SCAN, stderr=errors)) == [*PRINTED[:1], *PRINTED[2:], ""]
    assert (tmp_path / "errors").read_text() == "of another stream\n"


def test_without_a_terminal_and_on_other_ranks_nothing_is_added():
    run = subprocess.run([sys.executable, "-c", START + SCAN], capture_output=True, text=True)
    assert (run.stdout.splitlines(), run.stderr) == ([PRINTED[0], *PRINTED[2:]], f"{PRINTED[1]}\n")
    assert on_a_terminal(SCAN, RANK="1") == "\n".join([*PRINTED, ""])


def test_text():
    line = Progress("bytes read", 4_000, iter([0, 1000, 500, 4000]).__next__)
    texts = [line.text(3.0) for _ in range(4)]
    quarter = "bytes read: 1,000 of 4,000 (25%), 9 s left"
    assert texts == ["bytes read, 3 s", quarter, quarter, "bytes read: 4,000 of 4,000 (100%), 0 s left"]
    assert Progress("export").text(61.4) == "export, 61 s" and CLEAR.startswith("\r")
