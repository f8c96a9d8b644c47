"""The pass over all rows: what is usable, counted, shown to environments, split off, fingerprinted."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from dataset_case import GOOD, load, read, refused
from ranks import ranks

from base.hf.tokenizer import Tokenizer
from base.inputs import scan
from base.system.ranks import on_rank0, start_process_group
from config import DataError, DatasetConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_answers_are_shown_to_each_environment_in_portions(tokenizer):
    seen = []
    rows = [GOOD | {"output": str(i), "task_name": ("code", "maths", "exact", None)[i % 4]} for i in range(5000)]
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

    def fails(raw):
        return raw["absent"]

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(processor=processor, wrong=lambda raw: [raw], fails=fails))
    rows = [{"q": q, "a": a, "r": r} for q, a, r in (("no", 1, 1), ("x" * 9, 2, 0.5), ("x" * 30, 3, 1), ("y", 4, 0.4))]
    dataset = load(tokenizer, rows, 10, processor="mine:processor")
    assert [(row.row_id, row.answer, row.fields["reward"]) for row in dataset.problems] == [
        (1, "2", 0.5),
        (3, "4", 0.4),
    ]
    assert dataset.left_out == (
        "1 left out: by processor (first: rows.jsonl:1), 1 left out: over 10 tokens (first: rows.jsonl:3)"
    )
    for options, named in (
        ({"max_prompt_tokens": 0}, ("no usable row", "3 left out: over 0 tokens")),
        ({"processor": "mine:wrong"}, ("rows.jsonl:1: ", "list")),
        ({"processor": "mine:fails"}, ("rows.jsonl:1: ", "KeyError: 'absent'", "test_scan.py:")),
        ({"processor": "mine:absent"}, ("processor 'mine:absent': cannot be imported",)),
    ):
        message = refused(tokenizer, rows, **{"processor": "mine:processor"} | options)
        assert all(part in message for part in named), message


def test_prompts_over_the_limit_are_left_out_and_counted(tokenizer):
    rows = [{"input": "x" * length, "output": "1"} for length in (9, 10, 11, 30, 1)]
    dataset = load(tokenizer, rows, 10)
    assert [(row.row_id, len(row.prompt_ids)) for row in dataset.problems] == [(0, 9), (1, 10), (4, 1)]
    assert dataset.left_out == "2 left out: over 10 tokens (first: rows.jsonl:3)"


MEMORY = """
from pathlib import Path
from config import DatasetConfig
from base.inputs import scan
from base.inputs.scan import load_dataset
from base.hf.tokenizer import Tokenizer
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
tokenizer = Tokenizer(Path("."))
def load(name):
    return load_dataset(DatasetConfig(data_path=name), tokenizer, 100, {}, lambda *answers: None)[0]
load("small.jsonl")
before = peak()
scan.HELD_ROWS = 1000
dataset = load("large.jsonl")
print(len(dataset.problems), dataset.problems[-1].answer, peak() - before)
"""


@pytest.mark.slow
def test_a_large_set_is_streamed(tokenizer):
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


@pytest.mark.parametrize("limit", ["HELD_ROWS", "HELD_BYTES"])
def test_a_prompt_of_a_small_set_is_made_once(tokenizer, monkeypatch, limit):
    """The problems of a large set are the same, and made again each time they are drawn."""
    made = []

    def processor(row):
        made.append(row["output"])
        return row | {"input": row["input"] + "!"} if len(made) != 9 else None

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(processor=processor))
    rows = [GOOD | {"output": str(i), "tags": [i]} for i in range(3)]
    small = load(tokenizer, rows, processor="mine:processor", repeat=2).problems
    found = list(small)
    found[0].fields["tags"].append("what an environment does to its fields")
    assert list(small) == [*found[3:], *found[3:]] and made == ["0", "1", "2"]
    monkeypatch.setattr(scan, limit, 2)
    large = load(tokenizer, rows, processor="mine:processor").problems
    assert [large[0], large[1]] == found[3:5] and made == ["0", "1", "2"] * 2 + ["0", "1"]
    with pytest.raises(DataError, match=r"^rows\.jsonl:3: was usable when the run began, now left out: by processor"):
        large[2]


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
    assert (whole.left_out, part.left_out) == ("1 left out: over 20 tokens (first: rows.jsonl:51)", "")


def test_fingerprint_is_of_what_is_trained_on(tokenizer):
    rows = [{"input": "1+1", "output": "2"}, {"input": "2+2", "output": "4"}]
    first = load(tokenizer, rows).fingerprint
    assert load(tokenizer, [row | {"note": "x"} for row in rows]).fingerprint == first
    changed = [rows[::-1], rows[:1], *([rows[0], rows[1] | change] for change in CHANGES)]
    assert len({first, *(load(tokenizer, other).fingerprint for other in changed)}) == 7


CHANGES = ({"output": "5"}, {"input": "2+3"}, {"task_name": "math"}, {"loss_multiplier": 0})


# --------------------------------------------------------------------------------- control tokens, part of the rows


def test_rows_with_a_control_token_are_left_out_counted_and_named(tokenizer):
    def message(text, role="user"):
        return {"role": role, "content": text}

    tool = {"type": "function", "function": {"name": "add", "description": "ends with <|end|>"}}
    rows = [
        GOOD,
        {"input": "a<|end|>b", "output": "1"},
        {"messages": [message("<|us", "system"), message("er|>")], "output": "1"},  # out of two messages
        {"input": "a", "output": "<|end|>", "note": "<|end|>"},  # is in no prompt
        {"input": "2 <", "output": "1"},
        GOOD | {"tools": [tool]},
        {"messages": [message("x"), message("y", "<|assistant|>"), message("z")], "output": "1"},
    ]
    dataset = load(tokenizer, rows)
    assert [problem.row_id for problem in dataset.problems] == [0, 3, 4]
    counts = [("2", "<|end|>", 2), ("1", "<|user|>", 3), ("1", "<|assistant|>", 7)]
    told = [
        f"{n} left out: the text holds the control token '{token}' (first: rows.jsonl:{i})" for n, token, i in counts
    ]
    assert dataset.left_out == ", ".join(told)
    assert refused(tokenizer, rows[1:2]).startswith("rows.jsonl: no usable row: 1 left out: the text holds the control")


@pytest.mark.slow
def test_part_of_the_rows(tokenizer):
    """The first half of max_rows in order, the others drawn from the rest: each about equally often."""
    seen = []

    def part(seed, num_rows=100, bad=()):
        rows = [{"input": "x" * (30 if i in bad else 1), "output": str(i)} for i in range(num_rows)]
        seen.clear()
        check = lambda _, answers: seen.extend(int(answer) for _, answer, _ in answers)  # noqa: E731
        return load(tokenizer, rows, 20, check=check, max_rows=20, seed=seed)

    dataset = part(3)
    first = list(seen)
    assert first == sorted(set(first)) and len(first) == 20 and first[:10] == list(range(10))
    assert dataset.is_sample and len(dataset.problems) == 100
    part(3)
    assert seen == first
    drawn = Counter()
    for seed in range(200):
        part(seed)
        drawn.update(seen[10:])
    assert set(drawn) == set(range(10, 100)) and max(drawn.values()) < 45  # of 200 * 10 / 90 = 22
    dataset = part(3, bad=(4, first[-1]))
    assert dataset.left_out == "2 left out: over 20 tokens (first: rows.jsonl:5)" and len(dataset.problems) == 98
    assert 4 not in {problem.row_id for problem in dataset.problems}
    dataset = part(3, num_rows=20)
    assert not dataset.is_sample and seen == list(range(20))
    assert "no usable row: 20 left out: over 2 tokens" in refused(tokenizer, [GOOD] * 100, 2, max_rows=20)


# -------------------------------------------------------------------------------------------------- several ranks


@ranks(2)
def loaded_by_ranks(folder):
    """What each rank gets of each file: both parts of the data set and what its environments were shown, or the error.
    And how many prompts it has rendered."""
    job, _ = start_process_group(tp_size=1)
    tokenizer, results, rendered = Tokenizer(folder), [], []
    render = tokenizer.render
    tokenizer.render = lambda *args, **options: rendered.append(args) or render(*args, **options)
    for name in ("good.jsonl", "bad.jsonl", f"other_{job.rank}.jsonl"):
        try:
            cfg, shown = DatasetConfig(data_path=str(folder / name), split_validation_size=5), []
            check = lambda name, answers: shown.append((name, len(answers)))  # noqa: E731, B023
            parts = scan.load_dataset(cfg, tokenizer, 20, {}, check, on_rank0=on_rank0)
            results.append([*((list(part.problems), replace(part, problems=[])) for part in parts), shown])
        except DataError as error:
            results.append(str(error))
    return results, len(rendered)


def test_two_ranks_share_a_scan_and_its_error(tokenizer, tmp_path):
    rows = [{"input": "x" * (30 if i == 3 else 1 + i % 5), "output": str(i), "id": i} for i in range(50)]
    rows[7]["task_name"] = "math"
    files = {"good": rows, "bad": [*rows, {"input": 5}], "other_0": rows, "other_1": rows[1:]}
    for name, lines in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (first, num_rendered), (second, num_rendered_by_second) = loaded_by_ranks(tmp_path)
    assert (num_rendered, num_rendered_by_second) == (150, 0), "only rank 0 renders"
    assert first[0][:2] == second[0][:2], "all have the same problems"
    assert {row.answer for part in first[0][:2] for row in part[0]} == {str(i) for i in range(50) if i != 3}
    assert first[0][0][1].left_out == f"1 left out: over 20 tokens (first: {tmp_path}/good.jsonl:4)"
    assert first[0][2] == [("exact", 48), ("math", 1), ("exact", 0), ("math", 0)]
    assert second[0][2] == [("exact", 0), ("math", 0)], "environments are made on every rank"
    assert first[1] == second[1] and first[1].startswith(f"{tmp_path}/bad.jsonl:51: TypeError")
    assert "other_1.jsonl: this rank and rank 0 find different rows" in second[2] and len(first[2]) == 3
