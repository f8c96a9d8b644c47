"""Breaks the code on purpose and says which test sees it: python tests/mutate.py [ROOT] [--out=FILE] [--id=NAME ...]

tests/mutations.yaml has the breaks. For each one, a copy beside ROOT (a checkout, by default this one) gets it, and the
test files that it names run there, one after another, until one fails. A file is found by its name wherever it lies,
and so is the text to break, which must be there once.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "logs", "__pycache__")
SECONDS = 600  # for all test files of a break
NO_PRODUCT = ("tests", "bench", "examples", "tools", "docs")


def place_of(root: Path, file: str, find: str) -> Path:
    """The file with the text: the one of this name, else whichever one has it."""
    files = sorted(file for kind in ("*.py", "base/*/*.yaml") for file in root.rglob(kind))
    files = [file for file in files if not {*NO_PRODUCT} & {*file.relative_to(root).parts}]
    holders = [file for file in files if find in file.read_text()]
    holders = [holder for holder in holders if holder.name == Path(file).name] or holders
    assert len(holders) == 1 and holders[0].read_text().count(find) == 1, (file, find, holders)
    return holders[0]


def run_tests(root: Path, names: list[str], known: str, select: str) -> str:
    """The first test that fails, "survived", or what else happened. known: the test that is tried first, if it is still
    there."""
    files = [file for name in names for file in sorted(root.rglob(name))]
    assert files, names
    function = known.partition("::")[2].partition("[")[0]
    first = [[f"{file}::{function}"] for file in files if function and f"def {function}(" in file.read_text()]
    env = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "GRPO_DEVICE": "cpu"}
    command = ["timeout", str(SECONDS), sys.executable, "-m", "pytest", "-vx", "-p", "no:cacheprovider", "-m", select]
    command += ["-c", "pyproject.toml"]  # judges/ has a configuration of its own
    for places in (*first, files):
        done = subprocess.run([*command, *places], cwd=root, env=env, capture_output=True, text=True)
        if done.returncode == 124:  # the test that has no end
            return f"no end in {SECONDS} s: {re.findall('^[^ ]+::.*', done.stdout, re.MULTILINE)[-1:]}"
        if failed := re.findall(r"^(?:FAILED|ERROR) (\S+?::\S.*?|\S+)(?: - .*)?$", done.stdout, re.MULTILINE):
            return failed[0]
    return "survived" if done.returncode == 0 else f"pytest ended with {done.returncode}"


def main() -> int:
    options = [word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--")]
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    root = Path(words[0] if words else Path(__file__).parents[1]).resolve()
    chosen, outs = ([value for name, value in options if name == key] for key in ("id", "out"))
    select = next((value for name, value in options if name == "select"), "not long and not gpu")
    survivors = 0
    for case in yaml.safe_load(Path(__file__).with_name("mutations.yaml").read_text()):
        if chosen and case["id"] not in chosen:
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=root.parent, prefix="broken_") as folder:
            copy = shutil.copytree(root, Path(folder), ignore=LEFT_OUT, dirs_exist_ok=True)
            place = place_of(copy, case["file"], case["find"])
            place.write_text(place.read_text().replace(case["find"], case["replace"]))
            found = run_tests(copy, case["tests"], case["found"], select)
        survivors += found.startswith("survived")
        line = f"{case['id']}\t{found.replace(f'{folder}/', '')}\t{time.monotonic() - start:.0f} s"
        print(line, flush=True)
        for out in outs:
            with open(out, "a") as file:
                file.write(line + "\n")
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main())
