"""sources.py and rows.py: what is read of a row in each of its forms, and what a user hears of a row that is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_case import write_tokenizer

from config import ConfigError, DataError, DatasetConfig
from dataset import sources
from dataset.problems import load_dataset
from hf.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
USER, GOOD = {"role": "user", "content": "a"}, {"input": "1+1", "output": "2"}


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """No template: the prompt is the messages' text, an id per byte. The working directory is the test's own."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def read(tokenizer, lines, max_prompt_tokens=1000, tasks=None, check=lambda *answers: None, **cfg):
    """(dataset, split) of rows.jsonl with these lines: objects, or bytes as they are."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    Path("rows.jsonl").write_bytes(b"\n".join(encoded) + b"\n")
    cfg = DatasetConfig(**{"data_path": "rows.jsonl"} | cfg)
    return load_dataset(cfg, tokenizer, max_prompt_tokens, tasks or {}, check)


def load(*args, **kwargs):
    return read(*args, **kwargs)[0]


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as error:
        read(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------------------ forms of a row

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("row", "keys", "messages", "answer"),
    [
        ({"input": "p", "output": "5"}, {}, [("user", "p")], "5"),
        ({"input": "p", "output": 5.5}, {}, [("user", "p")], "5.5"),
        ({"problem": "p", "expected_answer": "5", "problem_source": "x"}, {}, [("user", "p")], "5"),  # OpenMathInstruct
        ({"question": "q", "answer": "She has 9 * 2 = 18.\n#### 18"}, {}, [("user", "q")], "18"),  # GSM8K
        ({"a": {"b": "p"}, "c": {"d": {"e": 7}}}, {"input_key": "a.b", "output_key": "c.d.e"}, [("user", "p")], "7"),
        ({"a.b": "p", "a": {"b": "no"}, "answer": "7"}, {"input_key": "a.b"}, [("user", "p")], "7"),
        (
            {"prompt": [USER], "reward_model": {"ground_truth": "34", "style": "rule"}},
            {"dataset_name": "DAPOMath17K"},
            [("user", "a")],
            "34",
        ),
        ({"messages": [USER], "answer": "7", "question": "unused"}, {"input_key": "question"}, [("user", "a")], "7"),
        ({"messages": [USER, {"role": "assistant", "content": "8"}]}, {}, [("user", "a")], "8"),  # the answer is there
        ({"messages": [USER | {"content": [{"type": "text", "text": "b"}]}], "output": "8"}, {}, [("user", "b")], "8"),
        ({"messages": None, "input": "p", "output": "1", "tools": None}, {}, [("user", "p")], "1"),  # arrow's nulls
        (
            {"responses_create_params": {"input": "p", "instructions": "s"}, "expected_answer": "9", "reward": 1.0},
            {},
            [("system", "s"), ("user", "p")],
            "9",
        ),
        (
            {"responses_create_params": {"input": [{"role": "developer", "content": "s"}, USER]}, "label": "B"},
            {"env_name": "m:C"},
            [("system", "s"), ("user", "a")],
            "B",
        ),
        *(
            ({"responses_create_params": {"input": [USER]}} | place, {}, [("user", "a")], "9")
            for place in (
                {"verifier_metadata": {"ground_truth": "9"}},
                {"metadata": {"answer": 9}},
                {"extra_env_info": {"expected_answer": "9"}},
                {"reward_model": {"ground_truth": "9"}},
            )
        ),
        ({"responses_create_params": {"input": [USER], "metadata": {"output": "9"}}}, {}, [("user", "a")], "9"),
        ({"input": "p"}, {"env_name": "reward_model"}, [("user", "p")], ""),  # what needs no answer asks for none
        ({"input": "p", "answer": {"a": [1]}}, {"env_name": "m:C"}, [("user", "p")], '{"a": [1]}'),
        ({"input": "p", "answer": "x\n#### 5"}, {"env_name": "code"}, [("user", "p")], "x\n#### 5"),  # a comment
    ],
)
def test_forms_of_a_row(tokenizer, row, keys, messages, answer):
    (found,) = load(tokenizer, [row], **keys).rows
    assert [(message["role"], message["content"]) for message in found.messages] == messages
    assert (found.answer, found.fields, found.dataset, found.loss_multiplier) == (answer, row, "rows", 1.0)
    assert bytes(tokenizer.decode(found.prompt_ids), "utf-8") == "".join(text for _, text in messages).encode()


def test_tools_of_a_row(tokenizer):
    gym = {"responses_create_params": {"input": "p", "tools": [TOOL]}, "answer": "1"}
    rows = load(tokenizer, [gym, GOOD | {"tools": [CHAT_TOOL]}, GOOD | {"tools": []}]).rows
    assert [row.tools for row in rows] == [[CHAT_TOOL], [CHAT_TOOL], None]


def test_prompts_go_around_the_last_user_message_and_a_rows_own_system_message_stays(tokenizer):
    Path("prompt.txt").write_text(r"<{}> \boxed{{}} {x}")
    Path("system.txt").write_text("Sys ü")
    talk = [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "{}c"}]
    own = [{"role": "system", "content": "own"}, USER]
    rows = [{"input": "1+{}", "output": "2"}, {"messages": talk, "output": "2"}, {"messages": own, "output": "2"}]
    dataset = load(tokenizer, rows, prompt_file="prompt.txt", system_prompt_file="system.txt")
    assert [[message["content"] for message in row.messages] for row in dataset.rows] == [
        ["Sys ü", r"<1+{}> \boxed{} {x}"],
        ["Sys ü", "a", "b", r"<{}c> \boxed{} {x}"],
        ["own", r"<a> \boxed{} {x}"],
    ]
    for text, number in (("no place", 0), ("{} and {}", 2), ("{{}}", 0)):
        Path("prompt.txt").write_text(text)
        message = refused(tokenizer, [GOOD], prompt_file="prompt.txt")
        assert message.startswith(f"prompt.txt: needs exactly one {{}} where the input goes, has {number}")
    Path("prompt.txt").write_bytes(b"\xff{}")
    assert "prompt.txt: cannot be read" in refused(tokenizer, [GOOD], prompt_file="prompt.txt")
    assert "absent.txt: cannot be read" in refused(tokenizer, [GOOD], system_prompt_file="absent.txt")


def test_answers_are_shown_to_each_environment_in_portions(tokenizer):
    seen = []
    rows = [GOOD | {"output": str(i), "task_name": ("code", "maths", "rows", None)[i % 4]} for i in range(5000)]
    dataset = load(tokenizer, rows, tasks={"maths": "math"}, check=lambda name, answers: seen.append((name, *answers)))
    assert [row.env_name for row in dataset.rows[:4]] == ["code", "math", "exact", "exact"]
    assert max(map(len, seen)) == 257 and [portion[0] for portion in seen].count("exact") == 10
    exact = [answer for name, *answers in seen if name == "exact" for answer in answers]
    kept = [i for i in range(5000) if i % 4 > 1]
    assert exact == [(f"rows.jsonl:{i + 1}", str(i), rows[i]) for i in kept]


def test_rows_left_out_are_counted(tokenizer, monkeypatch):
    def processor(raw):
        return None if raw["q"] == "no" else {"input": raw["q"], "output": raw["a"], "reward": raw["r"]}

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(processor=processor, wrong=lambda raw: [raw]))
    rows = [{"q": q, "a": a, "r": r} for q, a, r in (("no", 1, 1), ("x" * 9, 2, 0.5), ("x" * 30, 3, 1), ("y", 4, 0.4))]
    dataset = load(tokenizer, rows, 10, processor="mine:processor", min_reward=0.5)
    assert [(row.row_id, row.answer, row.fields["reward"]) for row in dataset.rows] == [(1, "2", 0.5)]
    assert (dataset.num_too_long, dataset.num_left_out) == (1, 2)
    for options, told in (
        ({"min_reward": 2}, "rows.jsonl: no usable row: 4 were left out by min_reward or processor"),
        ({"min_reward": 0, "max_prompt_tokens": 0}, "all 3 prompts are longer than 0 tokens and 1 were left out by"),
        ({"processor": "mine:wrong"}, "rows.jsonl:1: processor mine:wrong gave list, not a row or None"),
        ({"processor": "mine:absent"}, "processor 'mine:absent': cannot be imported"),
    ):
        assert told in refused(tokenizer, rows, **{"processor": "mine:processor"} | options)
    assert refused(tokenizer, [{}], processor="mine:processor").startswith("rows.jsonl:1: processor mine:processor rai")


def test_prompts_over_the_limit_are_left_out_and_counted(tokenizer):
    rows = [{"input": "x" * length, "output": "1"} for length in (9, 10, 11, 30, 1)]
    dataset = load(tokenizer, rows, 10)
    assert [(row.row_id, len(row.prompt_ids)) for row in dataset.rows] == [(0, 9), (1, 10), (4, 1)]
    assert dataset.num_too_long == 2


def test_loss_multiplier(tokenizer):
    rows = load(tokenizer, [GOOD | {"loss_multiplier": value} for value in (0, 1.0)] + [GOOD]).rows
    assert [row.loss_multiplier for row in rows] == [0, 1, 1]


# ------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"input": "1+1", "output"', "not valid JSON"),
        (b'{"input": "\xff", "output": "2"}', "not valid JSON ('utf-8' codec can't decode byte 0xff"),
        (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "not valid JSON (Unexpected UTF-8 BOM"),  # not the first line
        (b"[" * 100_000, "not valid JSON"),
        (b'["1+1"]', "expected a JSON object, got list"),
        (b'{"input": "\\ud800", "output": "2"}', "the chat template refuses these messages"),  # half a surrogate pair
        (
            {"input": "1+1", "result": "2"},
            "no key of output, expected_answer, ground_truth, answer; keys: input, resul",
        ),
        ({"input": "1+1", "output": None}, "no key of output"),
        (
            {"text": "1+1", "output": "2"},
            "neither 'messages' nor text under 'input' or 'problem' or 'question' or 'pro",
        ),
        ({"input": 5, "output": "2"}, "neither 'messages' nor text under 'input'"),
        ({"input": "", "output": "2"}, "the prompt is empty"),
        ({"messages": [], "output": "2"}, "'messages' must be a non-empty list"),
        ({"messages": [{"role": "user", "content": None}], "output": "2"}, "'messages' must be a non-empty list"),
        ({"messages": [{"role": "user"}], "output": "2"}, "'messages' must be a non-empty list"),
        ({"messages": ["a"], "output": "2"}, "'messages' must be a non-empty list"),
        ({"messages": [USER, USER | {"role": "assistant"}], "output": "2"}, "the last message is the assistant's, and"),
        ({"messages": [USER | {"role": "assistant"}]}, "no message before the assistant's"),
        (
            {"responses_create_params": {"input": 3}, "answer": "1"},
            "no text and no messages under responses_create_par",
        ),
        ({"responses_create_params": {"input": [{"type": "function_call"}]}, "answer": "1"}, "'messages' must be"),
        (GOOD | {"task_name": "algebra"}, "task_name 'algebra' is no environment; known: exact, math, code, reward_"),
        (GOOD | {"task_name": 3}, "task_name 3 is no environment"),
        (GOOD | {"task_name": "os:system"}, "task_name 'os:system' is no environment; known: exact, math, code, rew"),
        (GOOD | {"loss_multiplier": 0.5}, "loss_multiplier=0.5: 1 (trained on) or 0 (sampled and scored only)"),
        (GOOD | {"id": "a"}, "the `id` of rows.jsonl:1; give each row its own, or none"),
    ],
)
def test_every_error_of_a_row_names_file_and_line(tokenizer, line, problem):
    message = refused(tokenizer, [GOOD | {"id": "a"}, b"", line, GOOD | {"id": 3}])
    assert message.startswith(f"rows.jsonl:3: {problem}"), message


def test_explicit_keys_are_the_only_ones(tokenizer):
    assert "rows.jsonl:1: no key 'result'; keys: input, output (see output_key)" == refused(
        tokenizer, [GOOD], output_key="result"
    )
    assert "neither 'messages' nor text under 'text'; keys: " in refused(tokenizer, [GOOD], input_key="text")
    assert "rows.jsonl:1: no number under 'reward'" in refused(tokenizer, [GOOD], min_reward=0.5)
    Path("prompt.txt").write_text("{}")
    message = refused(tokenizer, [{"messages": [USER | {"role": "tool"}], "answer": "1"}], prompt_file="prompt.txt")
    assert message == "rows.jsonl:1: no user message, which prompt_file=prompt.txt goes around"


def test_rollouts_of_one_task_may_share_an_id(tokenizer):
    row = {"responses_create_params": {"input": [USER]}, "answer": "1", "id": 7}
    assert len(load(tokenizer, [row, row]).rows) == 2


def test_files_without_a_usable_row(tokenizer, tmp_path):
    assert refused(tokenizer, [b"", b"  "]) == "rows.jsonl: no usable row: it is empty"
    assert refused(tokenizer, [GOOD, GOOD], 2) == ("rows.jsonl: no usable row: all 2 prompts are longer than 2 tokens")
    for path in ("absent.jsonl", "data/absent.json", "./absent"):
        assert refused(tokenizer, [], data_path=path) == f"{path}: cannot be read (No such file or directory)"
    assert refused(tokenizer, [], data_path=str(tmp_path)) == f"{tmp_path}: cannot be read (Is a directory)"


# ------------------------------------------------------------------------------------------------------- files


def test_blank_lines_and_a_byte_order_mark(tokenizer):
    dataset = load(tokenizer, [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", GOOD | {"output": "3"}, b" "])
    assert [(row.row_id, row.answer) for row in dataset.rows] == [(0, "2"), (2, "3")]
    assert dataset.rows[-1].answer == "3" and [row.answer for row in dataset.rows[0:5]] == ["2", "3"]
    with pytest.raises(IndexError):
        dataset.rows[2]


@pytest.mark.parametrize("start", ["", "\ufeff \n"])
def test_json_array(tokenizer, start):
    def dataset(rows):
        Path("rows.json").write_text(start + json.dumps(rows, indent=1))
        return load(tokenizer, [], data_path="rows.json")

    assert [row.answer for row in dataset([GOOD, GOOD | {"output": "3"}]).rows] == ["2", "3"]
    for rows, told in (([GOOD, 3], "rows.json, row 2: expected a JSON object, got int"), ([], "rows.json: no usable")):
        with pytest.raises(DataError, match=told):
            dataset(rows)
    Path("rows.json").write_text('[\n{"input": 1}\n{"input": 2}]')
    assert refused(tokenizer, [], data_path="rows.json").startswith("rows.json: not valid JSON (")
    assert "line 3 column 1" in refused(tokenizer, [], data_path="rows.json")


def test_a_file_that_changes_under_the_run_is_noticed(tokenizer):
    rows = load(tokenizer, [GOOD, GOOD | {"output": "3"}]).rows
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace('"3"', '"4"'))
    assert rows[0].answer == "2"
    with pytest.raises(DataError, match=r"^rows\.jsonl:2: the file was changed after the run began"):
        rows[1]
    Path("rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"^rows\.jsonl: cannot be read any more \(No such file"):
        rows[0]


def test_a_line_without_end_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 20)
    message = refused(tokenizer, [GOOD, b'{"input": "' + b"x" * (1 << 20)])
    assert message == "rows.jsonl:2: a line of more than 1 MiB"


MEMORY = """
import sys, chat, rows, config
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
tokenizer = Tokenizer(__import__("pathlib").Path("."))
def load(name):
    return rows.load_dataset(config.DatasetConfig(data_path=name), tokenizer, 100, {}, lambda *answers: None)[0]
load("small.jsonl")
before = peak()
dataset = load("large.jsonl")
print(len(dataset.rows), dataset.rows[-1].answer, peak() - before)
"""


def test_a_large_file_is_streamed(tokenizer):
    """64 MiB in 2,048 rows, all fields of which the environment sees: 256 of them, 8 MiB, are in memory at once."""
    row = GOOD | {"note": "x" * (32 << 10)}
    for name, count in (("small.jsonl", 1), ("large.jsonl", 2048)):
        with open(name, "w") as file:
            for i in range(count):
                file.write(json.dumps(row | {"output": str(i), "task_name": None}) + "\n")
    command = [sys.executable, "-c", MEMORY]
    run = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    count, answer, growth = run.stdout.split()
    assert (count, answer) == ("2048", "2047") and float(growth) < 20, run.stdout


# ------------------------------------------------------------------------------------- parquet, the hub, functions


def test_parquet(tokenizer, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not among the pinned packages")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([GOOD, GOOD | {"output": "3"}]), "rows.parquet")
    assert [row.answer for row in load(tokenizer, [], data_path="rows.parquet").rows] == ["2", "3"]
    Path("rows.parquet").write_bytes(b"PAR1 no")
    assert refused(tokenizer, [], data_path="rows.parquet").startswith("rows.parquet: cannot be read as parquet (")


@pytest.mark.parametrize(
    ("library", "path", "message"),
    [
        ("pyarrow", "rows.parquet", "rows.parquet: to read parquet, `pip install pyarrow`, or give the rows as jsonl"),
        (
            "datasets",
            "org/rows",
            "'org/rows' is no file here; to read it from the Hugging Face hub, `pip install datasets`, or download it "
            "elsewhere and give its file: data_path=FILE, .jsonl, .json or .parquet",
        ),
    ],
)
def test_missing_library_is_named(tokenizer, monkeypatch, library, path, message):
    monkeypatch.setitem(sys.modules, library, None)  # an import then raises ImportError
    assert refused(tokenizer, [], data_path=path) == message


@pytest.fixture
def hub(monkeypatch):
    """Stands for the `datasets` package: what was asked of it, and what it gives."""
    hub = SimpleNamespace(asked=[], rows={}, error=None)

    def load_dataset(name, subset, *, split):
        hub.asked.append((name, subset, split))
        if hub.error:
            raise hub.error
        return hub.rows.get(subset, [{"problem": "p", "question": "p", "prompt": [USER], "answer": "1"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return hub


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({"data_path": "org/rows"}, ("org/rows", None, "train")),
        ({"data_path": "org/rows-v1.5", "subset": "a", "split": "test"}, ("org/rows-v1.5", "a", "test")),
        ({"dataset_name": "gsm8k"}, ("openai/gsm8k", "main", "train")),
        ({"dataset_name": "GSM8K", "split": "test"}, ("openai/gsm8k", "main", "test")),
        ({"dataset_name": "MATH-500"}, ("HuggingFaceH4/MATH-500", None, "test")),
        ({"dataset_name": "Deep_Scale R"}, ("agentica-org/DeepScaleR-Preview-Dataset", None, "train")),
        ({"dataset_name": "AIME2024"}, ("HuggingFaceH4/aime_2024", None, "train")),
        (
            {"dataset_name": "OpenMathInstruct-2", "output_key": "answer"},
            ("nvidia/OpenMathInstruct-2", None, "train_1M"),
        ),
        ({"dataset_name": "DAPOMathAIME2024", "output_key": "answer"}, ("BytedTsinghua-SIA/AIME-2024", None, "train")),
    ],
)
def test_what_is_asked_of_the_hub(tokenizer, hub, keys, asked):
    dataset = load(tokenizer, [], **{"data_path": None} | keys)
    (row,) = dataset.rows
    assert hub.asked == [asked] and row.answer == "1"
    assert (
        row.dataset
        == dataset.name
        == (keys["dataset_name"] if "data_path" not in keys else Path(keys["data_path"]).stem)
    )
    assert row.env_name == ("math" if "dataset_name" in keys else "exact")


def test_subsets_follow_one_another(tokenizer, hub):
    hub.rows = {f"AIME2025-{part}": [{"question": part, "answer": "1"}] for part in ("I", "II")}
    rows = load(tokenizer, [], data_path=None, dataset_name="AIME2025", env_name="exact").rows
    assert [row.messages[0]["content"] for row in rows] == ["I", "II"] and {row.env_name for row in rows} == {"exact"}


def test_what_the_hub_does_not_give(tokenizer, hub):
    hub.error = ConnectionError("Couldn't reach\nthe Hub")
    assert refused(tokenizer, [], data_path="org/rows", split="tset") == (
        "'org/rows' is no file here, and the Hugging Face hub did not give it (ConnectionError: Couldn't reach the "
        "Hub); check data_path, subset=None and split=tset, or download it elsewhere and give its file: "
        "data_path=FILE, .jsonl, .json or .parquet"
    )


def test_rows_of_a_known_dataset_in_a_file(tokenizer):
    row = {"problem": "p", "expected_answer": "5", "output": "a whole solution"}
    (found,) = load(tokenizer, [row], dataset_name="OpenMathInstruct-2").rows
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
    assert [row.answer for row in dataset.rows] == ["2", "7"] and dataset.name == "make" and given[0].split == "7"


# ---------------------------------------------------------------------------- split, repetition, fingerprint


def test_split_takes_rows_out_and_repeat_counts_them_again(tokenizer):
    rows = [GOOD | {"output": str(i)} for i in range(50)] + [{"input": "x" * 30, "output": "0"}]

    def answers(**cfg):
        return [part and [row.answer for row in part.rows] for part in read(tokenizer, rows, 20, **cfg)]

    assert answers(repeat=2) == [[str(i) for i in range(50)] * 2, None]
    train, held = answers(split_validation_size=0.1)
    assert len(held) == 5 and sorted(train + held, key=int) == [str(i) for i in range(50)]
    assert train == sorted(train, key=int) and held == sorted(held, key=int)  # each in the file's order
    assert answers(split_validation_size=0.1) == [train, held] != answers(split_validation_size=0.1, seed=43)
    assert answers(split_validation_size=5.0) == [train, held], "a whole number is a number of rows"
    assert len(answers(split_validation_size=0.001)[1]) == 1
    assert "split_validation_size=50 leaves none of 50 rows to train on" in refused(
        tokenizer, rows, 20, split_validation_size=50
    )
    whole, part = read(tokenizer, rows, 20, split_validation_size=5)
    prints = [load(tokenizer, rows, 20, **cfg).fingerprint for cfg in ({}, {"split_validation_size": 6}, {"repeat": 2})]
    assert len({whole.fingerprint, part.fingerprint, *prints}) == 5
    assert (whole.num_too_long, part.num_too_long) == (1, 0)


def test_fingerprint_is_of_what_is_trained_on(tokenizer):
    rows = [{"input": "1+1", "output": "2"}, {"input": "2+2", "output": "4"}]
    first = load(tokenizer, rows).fingerprint
    assert load(tokenizer, [row | {"note": "x"} for row in rows]).fingerprint == first
    changed = [rows[::-1], rows[:1], *([rows[0], rows[1] | change] for change in CHANGES)]
    assert len({first, *(load(tokenizer, other).fingerprint for other in changed)}) == 7


CHANGES = ({"output": "5"}, {"input": "2+3"}, {"task_name": "math"}, {"loss_multiplier": 0})
