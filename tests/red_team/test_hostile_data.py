"""Hostile datasets, in time and memory, and users' functions that fail: `--check` names the place in one sentence."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_case import write_tokenizer
from dataset_case import GOOD, load, refusal, refused

import envs
from base.graders.grading import Grading
from base.graders.reward_function import RewardFunction
from base.hf.tokenizer import Tokenizer
from base.inputs import scan

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "examples/arithmetic/starter"
CONFIG = f"""
grpo: {{num_prompts_per_step: 1, max_num_steps: 1, val_period: 0}}
policy:
  model_name: {STARTER}
  max_total_sequence_length: 32
  generation: {{max_new_tokens: 8}}
data:
  train: {{data_path: rows.jsonl, env_name: exact}}
"""
ROW = {"input": "1+1=", "answer": "2"}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a config and a good data file, which is the working directory."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """No template: the prompt is the messages' text, an id per byte. The working directory is the test's own."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def test_time_grows_with_an_answer_and_not_with_its_square(tokenizer):
    """2 MB of what a pattern of GSM8K's form would try from each line on: its square takes an hour."""
    for answer in ("\n#### " * 350_000 + "x", "a\n" * 1_000_000, "#" * 2_000_000, "\n####" * 400_000 + "\n#### 5"):
        load(tokenizer, [GOOD | {"output": answer}])


def test_only_the_start_of_a_hopeless_prompt_is_encoded(tokenizer):
    """All of 25 MB takes 24 s, and as much memory as a model."""
    encoded, encode = [], tokenizer.backend.encode
    tokenizer.backend = SimpleNamespace(encode=lambda text, **options: encoded.append(text) or encode(text, **options))
    rows = [{"input": text * 1_000_000, "output": "1"} for text in ("a", "\n", "é", "ab ")]
    rows.append({"messages": [{"role": "user", "content": [{"text": "x" * 1000}] * 1000}], "output": "1"})
    assert "5 left out: over 100 tokens" in refused(tokenizer, rows, 100)
    assert sum(map(len, encoded)) < 5 * 4096


def test_prompt_ids_are_whole_up_to_the_limit(tokenizer):
    """Around each length at which only the start of a text is encoded, a prompt has all of its ids or is left out."""
    for limit in (1, 7, 300):
        lengths = {*range(limit - 2, limit + 3), 16 * limit + 255, 16 * limit + 257, 64 * limit + 1024}
        rows = [{"input": "x" * max(1, length), "output": "1"} for length in sorted(lengths)]
        problems = load(tokenizer, rows, limit).problems
        assert [len(row.prompt_ids) for row in problems] == [
            n for n in map(len, (r["input"] for r in rows)) if n <= limit
        ]
    assert len(tokenizer.render([{"role": "user", "content": "x" * 5000}])) == 5000


# ----------------------------------------------------------------------------------------------- functions of a user's

DATASET, PROCESSOR, ENV = "data.train.dataset_name", "data.train.processor", "data.train.env_name"
SAMPLER = "data.custom_dataloader"
CLASS = "class C:\n def step(self, turns): {step}\n def check_answers(self, answers): {check}\n def close(self): pass\n"
CLASS += "f = C\n"
TESTED = "C.self_tests = [('a', 'b', 'ok')]"
USERS = [  # key, code, what the message names
    (DATASET, "x = = 1", 'mine.py", line 1'),
    (DATASET, "import sys\nsys.exit(7)", "SystemExit: 7 (FOLDER/mine.py:2)"),
    (DATASET, "import no_such_module", "No module named 'no_such_module' (FOLDER/mine.py:1)"),
    (DATASET, "f = 5", "TypeError: 'int' object is not callable"),
    (DATASET, "def f(cfg):\n return open('absent')", "No such file or directory: 'absent' (FOLDER/mine.py:2)"),
    (DATASET, "def f(cfg): return [1]", "mine:f, row 1: expected an object, got int"),
    (PROCESSOR, "def f(row):\n return row['x']", "rows.jsonl:1: KeyError: 'x' (FOLDER/mine.py:2)"),
    (PROCESSOR, "def f(row): raise ValueError('x\\n' * 9999)", "rows.jsonl:1: ValueError: x x x"),
    (PROCESSOR, "def f(row): return row | {'answer': {(1, 2): 3}}", "rows.jsonl:1: TypeError"),
    (PROCESSOR, "def f(row): return {1: 2, 'a': 3}", "rows.jsonl:1: there is none of messages, input"),
    (ENV, "def f(prompts): pass", "a reward function must take `completions`"),
    (ENV, "class f: pass", "no method step()"),
    (ENV, CLASS.format(step="1/0", check="raise KeyError('level')"), "raised KeyError: 'level' (FOLDER/mine.py:3)"),
    (ENV, CLASS.format(step="1/0", check="exit(3)"), "SystemExit: 3 (FOLDER/mine.py:3)"),
    (
        ENV,
        CLASS.format(step="1/0", check="pass") + "C.__init__ = lambda self: {}['a']",
        "raised KeyError: 'a' (FOLDER/",
    ),
    (ENV, CLASS.format(step="1/0", check="pass") + TESTED, "ZeroDivisionError: division by zero (FOLDER/mine.py:2)"),
    (ENV, CLASS.format(step="return []", check="pass") + "C.self_tests = 5", "in its self_tests, raised TypeError"),
    (SAMPLER, "def f(**given):\n return given['absent']", "'mine:f' raised KeyError: 'absent' (FOLDER/mine.py:2)"),
]


@pytest.mark.parametrize(("key", "code", "message"), USERS)
def test_a_users_function_that_fails_is_named(work, monkeypatch, key, code, message):
    (work / "mine.py").write_text(code + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(work)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    words = []
    if key == SAMPLER:
        words = ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=1"]
    if key == DATASET:
        words = ["data.train.data_path=null"]
    answer = refusal(f"{key}=mine:f", *words)
    assert message.replace("FOLDER", str(work)) in answer if message else not answer, answer


@pytest.mark.parametrize(
    "path", [".mine:f", "mine:", ":f", "builtins:min", "builtins:print", "builtins:dict", "os:path", "..:f"]
)
def test_what_is_no_environment_is_refused_by_its_path(work, path):
    assert path in refusal(f"{ENV}={path}")


def test_a_processor_gets_each_row_as_it_was_read(tokenizer, monkeypatch):
    """Of a large set it is called again when the row's turn comes: one that changes its row must give the same then."""
    monkeypatch.setattr(scan, "HELD_ROWS", 0)

    def processor(row):
        row["messages"][0]["content"] += "!"
        return row

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(processor=processor))
    Path("rows.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "1"}], "answer": "2"}]))
    problems = load(tokenizer, [], data_path="rows.json", processor="mine:processor").problems
    assert problems[0] == problems[0] and problems[0].messages[0]["content"] == "1!"


@pytest.mark.parametrize(
    ("function", "error"),
    [(lambda completions: sys.exit(7), "SystemExit: 7")]
    + [(lambda completions, x=x: x, "(Type|Overflow)Error: ") for x in (None, ["1"], [1j], [10**400], [[1]])],
)
def test_a_reward_function_that_fails_amid_the_run_is_named(function, error):
    turn = envs.Turn([{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}], "2", "stop")
    grading = Grading({"mine:f": RewardFunction(function, "mine:f")})
    assert grading.grade({"mine:f": [{"a": turn}]}, block=True)["a"].outcome == "error"
    assert re.match(f"env_name 'mine:f' raised {error}", grading.raised[0])
