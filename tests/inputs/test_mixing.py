"""mixing.py: the mix that a config asks for is the mix that is drawn, to the prompt, on any rank, after a resume."""

import json
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mixes import MIXES, batches, mixture_of

from base.inputs.mixing import epoch_order
from base.inputs.resume import check_same_data
from config import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def shares(batch):
    return Counter(name for name, _ in batch)


# ----------------------------------------------------------------------------------------------------- the mixes


def test_by_size_every_row_comes_once_an_epoch():
    found, _ = batches(mixture_of([3, 5, 12]), [5] * 8)
    for epoch in (found[:4], found[4:]):
        assert sorted(chain(*epoch)) == [(n, i) for n, size in (("a", 3), ("b", 5), ("c", 12)) for i in range(size)]
    assert found[:4] != found[4:]
    order = np.random.Generator(np.random.PCG64([42, 0])).permutation(20)
    rows = [("a", i) for i in range(3)] + [("b", i) for i in range(5)] + [("c", i) for i in range(12)]
    assert list(chain(*found[:4])) == [rows[i] for i in order]


def test_guides_example_of_one_loader_and_of_several():
    """NeMo RL's docs/guides/grpo.md, Multiple Dataloaders: sets [a..d] and [1..8], batches of four."""
    one, _ = batches(mixture_of([4, 8], shuffle=False), [4] * 3)
    assert one == [[(name, i + k) for i in range(4)] for name, k in (("a", 0), ("b", 0), ("b", 4))]
    turns = {"use_multiple_dataloader": True, "num_prompts_per_dataloader": 2}
    several, _ = batches(mixture_of([4, 8], shuffle=False, **turns), [4] * 3)
    assert several == [
        [("a", 0), ("a", 1), ("b", 0), ("b", 1)],
        [("a", 2), ("a", 3), ("b", 2), ("b", 3)],
        [("a", 0), ("a", 1), ("b", 4), ("b", 5)],
    ]


def test_turns_go_on_where_a_step_has_not_all_sets():
    turns = {"use_multiple_dataloader": True, "num_prompts_per_dataloader": 4}
    found, _ = batches(mixture_of([9, 9, 9], **turns), [8] * 3)
    assert [shares(batch) for batch in found] == [{"a": 4, "b": 4}, {"c": 4, "a": 4}, {"b": 4, "c": 4}]
    of_a = [row for name, row in chain(*found) if name == "a"]
    assert len(set(of_a)) == 8, "within an epoch of a set no row comes twice"


@pytest.mark.parametrize(
    ("weights", "count", "drawn"),
    [
        ((3, 1), 4, {"a": 3, "b": 1}),
        ((3.0, 1.0), 32, {"a": 24, "b": 8}),
        ((0.7, 0.2, 0.1), 10, {"a": 7, "b": 2, "c": 1}),
        ((1, 1, 1), 6, {"a": 2, "b": 2, "c": 2}),
        ((0.5, 0.25, 0.25), 8, {"a": 4, "b": 2, "c": 2}),
    ],
)
def test_weights_are_met_in_every_batch_they_divide(weights, count, drawn):
    found, cursor = batches(mixture_of([50] * len(weights), weights), [count] * 30)
    assert all(shares(batch) == drawn for batch in found)
    assert cursor["drawn"] == {name: 30 * number for name, number in drawn.items()}


def test_weights_that_do_not_divide_are_never_a_prompt_off():
    weights, drawn = (5.5, 2.3, 1.1, 0.7), Counter()
    found, _ = batches(mixture_of([7] * 4, weights), [1] * 500)
    for number, batch in enumerate(found, start=1):
        drawn += shares(batch)
        for name, weight in zip("abcd", weights, strict=True):
            ahead = drawn[name] - number * weight / 9.6
            assert -3 < ahead < 1, (number, name)
    assert drawn == {"a": 287, "b": 120, "c": 57, "d": 36}  # of 286.46, 119.79, 57.29, 36.46


def test_each_set_has_epochs_of_its_own():
    found, _ = batches(mixture_of([3, 6], (1, 1)), [6] * 4)
    of = {name: [row for found_name, row in chain(*found) if found_name == name] for name in "ab"}
    for name, size in (("a", 3), ("b", 6)):
        epochs = [of[name][i : i + size] for i in range(0, 12, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    streams = {tuple(epoch_order(6, 0, 6, seed=42, shuffle=True, stream=stream)) for stream in ((0,), (1,))}
    assert len(streams) == 2 and tuple(of["b"][:6]) == tuple(epoch_order(6, 0, 6, seed=42, shuffle=True, stream=(1,)))


# ------------------------------------------------------------------------------------------- a sampler of one's own


def easy_first(*, num_prompts, sizes, records, memory, position, seed):
    """A curriculum: set a until its reward is above 0.5, then b; every eighth prompt is row 0 of c."""
    memory["stage"] = memory.get("stage", 0) or int(records.get("reward_by_dataset/a", 0) > 0.5)
    assert sizes == {"a": 20, "b": 20, "c": 20} and seed == 42
    name = "ab"[memory["stage"]]
    return [("c", 0) if (position + k) % 8 == 7 else name for k in range(num_prompts)]


@pytest.fixture
def curriculum(monkeypatch):
    def make(sampler):
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(sampler=sampler))
        return mixture_of([20, 20, 20], use_multiple_dataloader=True, custom_dataloader="mine:sampler")

    return make


def test_sampler_sees_the_metrics_of_the_step_before(curriculum):
    mixture = curriculum(easy_first)
    cursor, found = mixture.start(), []
    for reward in (0.2, 0.6, 0.1, 0.1):
        (batch,), cursor = batches(mixture, [8], cursor)
        found.append(batch)
        cursor = mixture.record(cursor, {"reward_by_dataset/a": reward})
    assert [shares(batch) for batch in found] == [{"a": 7, "c": 1}] * 2 + [{"b": 7, "c": 1}] * 2
    assert all(batch[7] == ("c", 0) for batch in found)
    assert (cursor["memory"], cursor["drawn"]) == ({"stage": 1}, {"a": 14, "b": 14, "c": 0})
    again, _ = batches(mixture, [8], {**cursor, "records": {}})
    assert shares(again[0]) == {"b": 7, "c": 1}, "its memory is in the cursor"


def test_a_draw_leaves_the_cursor_before_it_as_it_was(curriculum):
    """A run draws ahead of the cursor that its checkpoint keeps."""

    def in_turn(*, num_prompts, sizes, records, memory, position, seed):
        todo = memory.setdefault("todo", list(range(20)))
        return [("a", todo.pop()) for _ in range(num_prompts)]

    mixture = curriculum(in_turn)
    (_,), cursor = batches(mixture, [2], mixture.start())
    first, _ = batches(mixture, [2, 2], cursor)
    again, _ = batches(mixture, [2, 2], cursor)
    assert first == again == [[("a", 17), ("a", 16)], [("a", 15), ("a", 14)]]


@pytest.mark.parametrize(
    "asked", [["a"] * 3, ["a"] * 5, ["a", "b", "d", "a"], ["a", "b", ("a", 20), "a"], ["a", "b", ("a", -1), "a"], None]
)
def test_sampler_that_asks_for_what_is_not_there(curriculum, asked):
    with pytest.raises(ConfigError, match=r"^data\.custom_dataloader 'mine:sampler' "):
        batches(curriculum(lambda **_: asked), [4])


def test_a_samplers_memory_must_fit_into_a_checkpoint(curriculum):
    def sampler(*, memory, **_):
        memory["set"] = {1}
        return ["a"]

    with pytest.raises(
        ConfigError, match=r"^data\.custom_dataloader 'mine:sampler' raised TypeError: .*set is not JSON"
    ):
        batches(curriculum(sampler), [1])


def test_sampler_that_cannot_be_imported():
    with pytest.raises(ConfigError, match=r"data\.custom_dataloader 'nowhere:f': cannot be imported"):
        mixture_of([2, 2], use_multiple_dataloader=True, custom_dataloader="nowhere:f")
    mixture_of([2, 2], custom_dataloader="nowhere:f")  # NeMo RL's example names one and does not use it


# -------------------------------------------------------------------------------------- ranks, resumes, other data


@pytest.mark.parametrize("mix", MIXES)
def test_resumes_anywhere_whatever_the_draws(mix):
    mixture = mixture_of([5, 9, 2], **MIXES[mix])
    whole, end = batches(mixture, [120])
    for size in (1, 4, 8, 40):
        parts, cursor = [], None
        for _ in range(120 // size):
            (part,), cursor = batches(mixture_of([5, 9, 2], **MIXES[mix]), [size], cursor)  # a new process each time
            parts += part
        assert (parts, cursor) == (whole[0], end)


RANKS = """
import json, sys
sys.path[:0] = ["tests/helpers"]
from mixes import MIXES, batches, mixture_of
print(json.dumps([batches(mixture_of([5, 9, 2], **mix), [8] * 9) for mix in MIXES.values()]))
"""


@pytest.mark.slow
def test_one_rank_and_two_draw_the_same():
    """Each rank draws for itself, from the files and the cursor: processes with other hash seeds agree to the row."""
    here = [batches(mixture_of([5, 9, 2], **mix), [8] * 9) for mix in MIXES.values()]
    for rank in ("0", "1"):
        env = {"RANK": rank, "WORLD_SIZE": "2", "PYTHONHASHSEED": rank, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, "-c", RANKS], cwd=ROOT, env=env, capture_output=True, text=True)
        assert run.stdout == json.dumps(here) + "\n", run.stderr


def test_other_data_is_named():
    mixture, saved = mixture_of([2, 3]), mixture_of([2, 3]).fingerprints
    check_same_data(mixture, saved, "logs/exp_001")
    for other, told in (
        (
            {**saved, "b": "x"},
            "data.train: 'b' is new or changed (b.jsonl), compared with the data of the run logs/exp_001",
        ),
        ({**saved, "c": "x"}, "data.train: 'c' is missing, compared with the data of the run logs"),
        ({"a": saved["a"]}, "data.train: 'b' is new or changed (b.jsonl), compared with the data of the run"),
    ):
        with pytest.raises(ConfigError) as error:
            check_same_data(mixture, other, "logs/exp_001")
        assert str(error.value).startswith(told)


# ----------------------------------------------------------------------------------------------- order of one set


def test_order_is_numpys_permutation_of_each_epoch():
    orders = [np.random.Generator(np.random.PCG64([3, epoch])).permutation(5) for epoch in range(4)]
    assert epoch_order(5, 3, 14, seed=3, shuffle=True) == np.concatenate(orders)[3:17].tolist()
    assert epoch_order(5, 3, 9, seed=3, shuffle=False) == [3, 4, 0, 1, 2, 3, 4, 0, 1]
