"""The one reader of what a run writes line by line: metrics.jsonl, samples.jsonl. No torch."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from config import ConfigError
from hf.files import MAX_BYTES, open_file


def read_records(file: Path, bad_lines: list[int] | None = None) -> Iterator[tuple[int, dict]]:
    """(offset of its end, object) of each line. The last line is skipped if a kill cut it. Any other line that the
    program cannot have written raises ConfigError; with `bad_lines`, its number is appended there instead."""
    end = 0
    with open_file(file) as lines:  # of bytes: text has other line ends too, and a cut line may be no text
        for number, line in enumerate(iter(partial(lines.readline, MAX_BYTES), b""), 1):
            end += len(line)
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
                    raise ValueError("not an object with a step")
            except (ValueError, RecursionError) as error:
                if bad_lines is not None:
                    bad_lines.append(number)
                elif line.endswith(b"\n"):
                    raise ConfigError(f"{file}:{number}: not written by this program ({error}): remove it") from error
                continue
            if line.endswith(b"\n"):
                yield end, record
