"""examples/gsm8k: prepare.py writes the files of GitHub or refuses, and its recipes read what it writes."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from base.inputs import reader
from base.inputs.sources import Source
from config import DataError
from examples.gsm8k import prepare

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
# Of grade_school_math/data/{train,test}.jsonl in openai/grade-school-math at 3101c7d, by sha256sum.
SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
needs_data = pytest.mark.skipif(
    not (DATA / "gsm8k_train.jsonl").exists(), reason=f"{DATA} is not here: GSM8K is not part of this project"
)


def rows_of(split: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def is_prepared(folder: Path) -> bool:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()} == SHA256


@needs_data
def test_the_command_writes_the_files_of_github(tmp_path):
    command = [sys.executable, "examples/gsm8k/prepare.py", "--from", str(DATA), "--to", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "") and is_prepared(tmp_path)
    assert [line.split(": ")[1][:14] for line in run.stdout.splitlines()] == ["7,473 problems", "1,319 problems"]


@needs_data
def test_from_the_hub(tmp_path, monkeypatch):
    """prepare.py without --from, with a stand-in for what base/inputs/sources.py fetches: rows of parquet, maybe
    with more columns."""
    asked = []

    def fetched(section):
        asked.append((section.data_path, section.subset, section.split))
        rows = [{"answer": row["answer"], "id": 1, "question": row["question"]} for row in rows_of(section.split)]
        return Source("openai/gsm8k", range(len(rows)), rows.__getitem__, 0)

    monkeypatch.setattr(prepare, "open_source", fetched)
    prepare.prepare(None, tmp_path)
    assert is_prepared(tmp_path)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


@pytest.fixture
def files(tmp_path):
    """A folder with two rows for each split, and those as what is expected."""
    folder = tmp_path / "from"
    folder.mkdir()
    lines = [json.dumps({"question": f"{n}+1?", "answer": f"#### {n + 1}"}) + "\n" for n in (1, 2)]
    for split in ("train", "test"):
        (folder / f"my_{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("none", None),
        ("a word", "test: 2 rows with sha256"),
        ("another key", "my_test.jsonl:2: a row of GSM8K has the keys question and answer"),
        ("no file", "one file whose name ends in test.jsonl is needed, there is: none"),
    ],
)
def test_what_is_not_gsm8k_is_refused_and_nothing_written(files, tmp_path, monkeypatch, damage, problem):
    test = files / "my_test.jsonl"
    first, second = test.read_text().splitlines(keepends=True)
    digest = hashlib.sha256((first + second).encode()).hexdigest()
    monkeypatch.setattr(prepare, "SPLITS", {"train": (2, digest), "test": (2, digest)})
    changed = {
        "a word": first + second.replace("2+1?", "2 + 1?"),
        "another key": first + second.replace("question", "problem"),
    }
    test.write_text(changed.get(damage, first + second))
    if damage == "no file":
        test.unlink()
    if problem is None:
        prepare.prepare(files, tmp_path / "to")
        assert (tmp_path / "to" / "test.jsonl").read_text() == first + second
        return
    with pytest.raises(DataError) as error:
        prepare.prepare(files, tmp_path / "to")
    assert problem in str(error.value) and not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_recipes_read_what_prepare_writes(name):
    cfg = reader.load(ROOT / "examples/gsm8k" / f"{name}.yaml", [])
    paths = [section.data_path for section in (*cfg.data.train, *cfg.data.validation)]
    assert paths == [f"examples/gsm8k/data/{split}.jsonl" for split in ("train", "test")]
    assert (cfg.data.train[0].env_name or cfg.data.default.env_name) == "math"
    assert cfg.policy.generation.max_new_tokens < cfg.policy.max_total_sequence_length
