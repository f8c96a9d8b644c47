"""Files, the hub and functions of the user's: the rows they give, and what a user hears where they give none."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dataset_case import GOOD, USER, load, refused

from base.inputs import sources
from config import DataError


def test_files_without_a_usable_row(tokenizer, tmp_path):
    assert refused(tokenizer, [b"", b"  "]) == "rows.jsonl: no usable row: it is empty"
    for path in ("absent.jsonl", "data/absent.json", "./absent"):
        assert refused(tokenizer, [], data_path=path).startswith(
            f"{path}: cannot be read (No such file or directory; relative paths start in /"
        )
    assert refused(tokenizer, [], data_path=str(tmp_path)) == f"{tmp_path}: cannot be read (Is a directory)"


@pytest.mark.parametrize("blank", [b"", b" ", b"\t\r"])
def test_a_byte_order_mark_alone_is_a_blank_line(tokenizer, blank):
    (row,) = load(tokenizer, [b"\xef\xbb\xbf" + blank, GOOD]).problems
    assert (row.row_id, row.answer) == (1, "2")


def test_blank_lines_and_a_byte_order_mark(tokenizer):
    dataset = load(tokenizer, [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", GOOD | {"output": "3"}, b" "])
    assert [(row.row_id, row.answer) for row in dataset.problems] == [(0, "2"), (2, "3")]
    assert dataset.problems[-1].answer == "3" and [row.answer for row in dataset.problems[0:5]] == ["2", "3"]
    with pytest.raises(IndexError):
        dataset.problems[2]


@pytest.mark.parametrize("start", ["", "\ufeff \n"])
def test_json_array(tokenizer, start):
    def dataset(rows):
        Path("rows.json").write_text(start + json.dumps(rows, indent=1))
        return load(tokenizer, [], data_path="rows.json")

    assert [row.answer for row in dataset([GOOD, GOOD | {"output": "3"}]).problems] == ["2", "3"]
    for rows, told in (([GOOD, 3], "rows.json, row 2: expected an object, got int"), ([], "rows.json: no usable")):
        with pytest.raises(DataError, match=told):
            dataset(rows)
    Path("rows.json").write_text('[\n{"input": 1}\n{"input": 2}]')
    assert refused(tokenizer, [], data_path="rows.json").startswith("rows.json: not valid JSON (")
    assert "line 3 column 1" in refused(tokenizer, [], data_path="rows.json")


def write_parquet(file, rows):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def test_parquet(tokenizer):
    write_parquet(Path("rows.parquet"), [GOOD, GOOD | {"output": "3", "messages": None}])
    problems = load(tokenizer, [], data_path="rows.parquet").problems
    assert [problem.answer for problem in problems] == ["2", "3"] and problems[1].fields["input"] == "1+1"
    Path("rows.parquet").write_bytes(b"PAR1 no")
    assert refused(tokenizer, [], data_path="rows.parquet").startswith("rows.parquet: cannot be read as parquet (")
    assert "No such file" in refused(tokenizer, [], data_path="none.parquet")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Puts rows where huggingface_hub, without network, looks for the hub's parquet copy of a dataset."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(name, folder, *files):
        repository = tmp_path / "hub" / f"datasets--{name.replace('/', '--')}"
        reference = repository / "refs" / "refs" / "convert" / "parquet"
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text("c" * 40)
        for number, rows in enumerate(files):
            write_parquet(repository / "snapshots" / ("c" * 40) / folder / f"{number:04}.parquet", rows)

    return put


HUB_ROW = {"problem": "p", "question": "p", "prompt": [USER], "answer": "1"}


@pytest.mark.parametrize(
    ("keys", "name", "folder"),
    [
        ({"data_path": "org/rows"}, "org/rows", "default/train"),
        ({"data_path": "org/rows-v1.5", "subset": "a", "split": "test"}, "org/rows-v1.5", "a/test"),
        ({"dataset_name": "gsm8k"}, "openai/gsm8k", "main/train"),
        ({"dataset_name": "GSM8K", "split": "test"}, "openai/gsm8k", "main/test"),
        ({"dataset_name": "MATH-500"}, "HuggingFaceH4/MATH-500", "default/test"),
        ({"dataset_name": "Deep_Scale R"}, "agentica-org/DeepScaleR-Preview-Dataset", "default/train"),
        ({"dataset_name": "AIME2024"}, "HuggingFaceH4/aime_2024", "default/train"),
        (
            {"dataset_name": "OpenMathInstruct-2", "output_key": "answer"},
            "nvidia/OpenMathInstruct-2",
            "default/train_1M",
        ),
        ({"dataset_name": "DAPOMathAIME2024", "output_key": "answer"}, "BytedTsinghua-SIA/AIME-2024", "default/train"),
    ],
)
def test_what_is_taken_of_the_hub(tokenizer, hub, keys, name, folder):
    hub(name, folder, [HUB_ROW])
    hub(name, "other/train", [HUB_ROW | {"answer": "2"}])
    hub(name, "default/validation", [HUB_ROW | {"answer": "3"}])
    dataset = load(tokenizer, [], **{"data_path": None} | keys)
    (problem,) = dataset.problems
    assert problem.answer == "1" and problem.dataset == dataset.name
    assert dataset.name == (keys["dataset_name"] if "data_path" not in keys else Path(keys["data_path"]).stem)
    is_preset = keys.get("dataset_name") is not None
    assert problem.env_name == ("math" if is_preset else "exact")


def test_subsets_and_files_follow_one_another(tokenizer, hub):
    for part in ("I", "II"):
        rows = [[{"question": f"{part}{i}", "answer": "1"}] for i in range(2)]
        rows[1][0] |= {"note": "a field that the other file lacks"}
        hub("opencompass/AIME2025", f"AIME2025-{part}/test", *rows)
    problems = load(tokenizer, [], data_path=None, dataset_name="AIME2025", env_name="exact").problems
    assert [problem.messages[0]["content"] for problem in problems] == ["I0", "I1", "II0", "II1"]
    assert {problem.env_name for problem in problems} == {"exact"}


def test_what_the_hub_does_not_give(tokenizer, hub):
    message = refused(tokenizer, [], data_path="org/rows")
    assert all(part in message for part in ("data_path: 'org/rows'", "LocalEntryNotFoundError", "data_path=FILE"))
    hub("org/rows", "default/train", [HUB_ROW])
    message = refused(tokenizer, [], data_path="org/rows", split="tset")
    assert all(part in message for part in ("data_path: 'org/rows' has no default/tset", "subset and split"))


def test_the_hub_is_asked_for_these_files_alone(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **how: asked.append((name, how)) or "absent")
    refused(tokenizer, [], data_path="org/rows", subset="a+b", split="test")
    options = {"repo_type": "dataset", "revision": "refs/convert/parquet"}
    assert asked == [("org/rows", options | {"allow_patterns": ["a/test/*.parquet", "b/test/*.parquet"]})]


def test_rows_of_a_preset_in_a_file(tokenizer):
    row = {"problem": "p", "expected_answer": "5", "output": "a whole solution"}
    (found,) = load(tokenizer, [row], dataset_name="OpenMathInstruct-2").problems
    assert (found.answer, found.env_name, found.dataset) == ("5", "math", "rows")
    assert refused(tokenizer, [row], dataset_name="OpenMath").startswith(
        "dataset_name 'OpenMath' is unknown; known: gsm8k, MATH-500, OpenMathInstruct-2, DeepScaler, AIME2024, "
    )


def test_dataset_of_the_users_own(tokenizer, monkeypatch):
    given = []
    mine = SimpleNamespace(
        make=lambda section: given.append(section) or [GOOD, {"input": "3", "output": section.split}]
    )
    monkeypatch.setitem(sys.modules, "mine", mine)
    dataset = load(tokenizer, [], data_path=None, dataset_name="mine:make", split="7")
    assert [row.answer for row in dataset.problems] == ["2", "7"] and dataset.name == "make" and given[0].split == "7"


DAPO = {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "1+1=?"}], "ability": "MATH"}
DAPO |= {"reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "x"}}
FORMS = {  # a row of each known data set in the fields that it has on the hub -> its answer
    "gsm8k": ({"question": "1+1=?", "answer": "It is <<1+1=2>>2.\n#### 2"}, "2"),
    "MATH-500": ({"problem": "1+1=?", "solution": "2.", "answer": "\\frac{4}{2}", "level": 1}, "\\frac{4}{2}"),
    "OpenMathInstruct-2": ({"problem": "1+1=?", "generated_solution": "so 2", "expected_answer": "2"}, "2"),
    "DeepScaler": ({"problem": "1+1=?", "answer": "2", "solution": "so 3"}, "2"),
    "AIME2024": ({"id": 60, "problem": "1+1=?", "solution": "so 3", "answer": "204", "year": "2024"}, "204"),
    "AIME2025": ({"question": "1+1=?", "answer": "70"}, "70"),
    "AIME2026": ({"problem_idx": 1, "problem": "1+1=?", "answer": 277, "problem_type": ["Algebra"]}, "277"),
    "DAPOMath17K": (DAPO, "2"),
    "DAPOMathAIME2024": (DAPO, "2"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_known_data_sets(tokenizer, name):
    row, answer = FORMS[name]
    (problem,) = load(tokenizer, [row], dataset_name=name).problems
    assert problem.messages == [{"role": "user", "content": "1+1=?"}]
    assert (problem.answer, problem.env_name) == (answer, "math")


def test_each_known_data_set_has_a_form():
    assert FORMS.keys() == sources.PRESETS.keys()


def odd_columns():
    """Columns that pyarrow reads and Python cannot hold."""
    pyarrow = pytest.importorskip("pyarrow")
    number = pyarrow.array([1_600_000_000_000_000_001] * 2, pyarrow.int64())
    days = pyarrow.array([2**31 - 1] * 2, pyarrow.int32())
    binary = pyarrow.array([b"\xff\xfe"] * 2, pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(2, binary.buffers()[1], binary.buffers()[2])
    return {
        "nanoseconds": number.cast(pyarrow.timestamp("ns")),
        "duration": number.cast(pyarrow.duration("ns")),
        "date": days.cast(pyarrow.date32()),
        "bytes": text,
    }


@pytest.mark.parametrize("name", ["nanoseconds", "duration", "date", "bytes"])
def test_a_column_that_python_cannot_hold(tokenizer, name):
    """It matters where it is read, and nowhere else."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"input": ["1+1", "2+2"], "output": ["2", "4"], name: odd_columns()[name]})
    pyarrow.parquet.write_table(table, "rows.parquet")
    problems = load(tokenizer, [], data_path="rows.parquet").problems
    assert [problem.answer for problem in problems] == ["2", "4"]
    for key in ("input_key", "output_key"):
        message = refused(tokenizer, [], data_path="rows.parquet", **{key: name})
        assert f"rows.parquet, row 1: column '{name}'" in message
