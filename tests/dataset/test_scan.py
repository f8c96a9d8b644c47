"""The pass over all rows: what is usable, counted, shown to environments, split off, fingerprinted."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from dataset_case import GOOD, USER, load, read, refused

ROOT = Path(__file__).resolve().parents[2]


def test_answers_are_shown_to_each_environment_in_portions(tokenizer):
    seen = []
    rows = [GOOD | {"output": str(i), "task_name": ("code", "maths", "rows", None)[i % 4]} for i in range(5000)]
    dataset = load(tokenizer, rows, tasks={"maths": "math"}, check=lambda name, answers: seen.append((name, *answers)))
    assert [row.env_name for row in dataset.problems[:4]] == ["code", "math", "exact", "exact"]
    assert max(map(len, seen)) == 257
    assert [len(answers) for name, *answers in seen if name == "exact"] == [256] * 9 + [2500 - 9 * 256, 0]
    exact = [answer for name, *answers in seen if name == "exact" for answer in answers]
    kept = [i for i in range(5000) if i % 4 > 1]
    assert exact == [(f"rows.jsonl:{i + 1}", str(i), rows[i]) for i in kept]


def test_rows_left_out_are_counted(tokenizer, monkeypatch):
    def processor(raw):
        return None if raw["q"] == "no" else {"input": raw["q"], "output": raw["a"], "reward": raw["r"]}

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(processor=processor, wrong=lambda raw: [raw]))
    rows = [{"q": q, "a": a, "r": r} for q, a, r in (("no", 1, 1), ("x" * 9, 2, 0.5), ("x" * 30, 3, 1), ("y", 4, 0.4))]
    dataset = load(tokenizer, rows, 10, processor="mine:processor", min_reward=0.5)
    assert [(row.row_id, row.answer, row.fields["reward"]) for row in dataset.problems] == [(1, "2", 0.5)]
    assert (dataset.counts.num_too_long, dataset.counts.num_filtered) == (1, 2)
    for options, told in (
        ({"min_reward": 2}, "rows.jsonl: no usable row: 4 left out: by min_reward or processor"),
        (
            {"min_reward": 0, "max_prompt_tokens": 0},
            "no usable row: 3 left out: over 0 tokens, 1 left out: by min_reward or",
        ),
        ({"processor": "mine:wrong"}, "rows.jsonl:1: processor mine:wrong gave list, not a row or None"),
        ({"processor": "mine:absent"}, "processor 'mine:absent': cannot be imported"),
    ):
        assert told in refused(tokenizer, rows, **{"processor": "mine:processor"} | options)
    assert refused(tokenizer, [{}], processor="mine:processor").startswith("rows.jsonl:1: processor mine:processor rai")


def test_prompts_over_the_limit_are_left_out_and_counted(tokenizer):
    rows = [{"input": "x" * length, "output": "1"} for length in (9, 10, 11, 30, 1)]
    dataset = load(tokenizer, rows, 10)
    assert [(row.row_id, len(row.prompt_ids)) for row in dataset.problems] == [(0, 9), (1, 10), (4, 1)]
    assert dataset.counts.num_too_long == 2


def test_rollouts_of_one_task_may_share_an_id(tokenizer):
    row = {"responses_create_params": {"input": [USER]}, "answer": "1", "id": 7}
    assert len(load(tokenizer, [row, row]).problems) == 2


MEMORY = """
from pathlib import Path
from config import DatasetConfig
from dataset.scan import load_dataset
from hf.tokenizer import Tokenizer
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
tokenizer = Tokenizer(Path("."))
def load(name):
    return load_dataset(DatasetConfig(data_path=name), tokenizer, 100, {}, lambda *answers: None)[0]
load("small.jsonl")
before = peak()
dataset = load("large.jsonl")
print(len(dataset.problems), dataset.problems[-1].answer, peak() - before)
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


def test_split_takes_rows_out_and_repeat_counts_them_again(tokenizer):
    rows = [GOOD | {"output": str(i)} for i in range(50)] + [{"input": "x" * 30, "output": "0"}]

    def answers(**cfg):
        return [part and [row.answer for row in part.problems] for part in read(tokenizer, rows, 20, **cfg)]

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
    assert (whole.counts.num_too_long, part.counts.num_too_long) == (1, 0)


def test_fingerprint_is_of_what_is_trained_on(tokenizer):
    rows = [{"input": "1+1", "output": "2"}, {"input": "2+2", "output": "4"}]
    first = load(tokenizer, rows).fingerprint
    assert load(tokenizer, [row | {"note": "x"} for row in rows]).fingerprint == first
    changed = [rows[::-1], rows[:1], *([rows[0], rows[1] | change] for change in CHANGES)]
    assert len({first, *(load(tokenizer, other).fingerprint for other in changed)}) == 7


CHANGES = ({"output": "5"}, {"input": "2+3"}, {"task_name": "math"}, {"loss_multiplier": 0})
