"""selection.py: the weights are a plain loop's, the draws have them, and a checkpoint loses nothing."""

import json
import sys
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mixes import MIXES, batches, mixture_of
from ranks import ranks
from small_run import ROOT, arguments, write_rows

from ahead import Ahead
from base.check.rules import check_config
from base.inputs.reader import load
from base.system.exits import StopRun
from config import AsyncGRPOConfig, Config, ConfigError, GRPOConfig
from records import Grade, Sample, TokenSequence

CHI_SQUARE = 16.27  # with 3 degrees of freedom, one in a thousand exceeds it


def group(row, outcomes, name="a", prompt=0):
    return [
        Sample(prompt, k, row, [TokenSequence([])], Grade(0.0, outcome), dataset=name)
        for k, outcome in enumerate(outcomes)
    ]


def see(mixture, cursor, *groups):
    """Draws all rows of set a, so that they are known, then records the groups."""
    mixture.draw(cursor, 400)
    mixture.record(cursor, {}, [sample for samples in groups for sample in samples])


def right_and_graded(groups):
    """Of the groups of one row, oldest first, as the page says: a group counts half as much as the next one."""
    graded = [group for group in groups if set(group) != {"error"}]
    ages = range(len(graded) - 1, -1, -1)
    right = sum(0.5**age * group.count("ok") for age, group in zip(ages, graded, strict=True))
    total = sum(0.5**age * (len(group) - group.count("error")) for age, group in zip(ages, graded, strict=True))
    return right, total


def test_weights_are_those_of_a_plain_loop(monkeypatch):
    """Of rows with any number of groups, some of whose samples could not be graded."""
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(weight=lambda right, graded: 1 + 3 * right + graded))
    for rule in ("p(1-p)", "mine:weight"):
        random, seen, groups = np.random.default_rng(0), {}, []
        for prompt in range(60):
            row, outcomes = int(random.integers(5)), random.choice(["ok", "wrong", "timeout", "error"], 4).tolist()
            if prompt % 9 == 0:
                outcomes = ["error"] * 4
            seen.setdefault(row, []).append(outcomes)
            groups.append(group(row, outcomes, prompt=prompt))
        mixture = mixture_of([6], rules=[rule])
        see(mixture, mixture.start(), *groups)
        for row in range(6):
            right, graded = right_and_graded(seen.get(row, []))
            rate = (right + 1) / (graded + 2)
            want = rate * (1 - rate) if rule == "p(1-p)" else 1 + 3 * right + graded
            assert mixture.selections["a"].weight_N[row] == pytest.approx(want, rel=1e-12), (rule, row)
    assert len(seen) == 5, "row 5 was never seen"


def four_rows(rule):
    """A set of four rows: never seen, solved twice, unsolvable, and right now and then."""
    mixture = mixture_of([4], rules=[rule])
    see(
        mixture,
        mixture.start(),
        *(group(1, ["ok"] * 8), group(1, ["ok"] * 8, prompt=1), group(2, ["wrong"] * 8, prompt=2)),
        group(3, ["ok", "wrong", "ok", "wrong", "wrong"], prompt=3),
    )
    return mixture


def chi_square(found, chances, num_draws):
    return sum((found[row] - num_draws * chance) ** 2 / (num_draws * chance) for row, chance in chances.items())


@pytest.mark.parametrize("rule", ["p(1-p)", "mine:weight"])
def test_rows_are_drawn_in_proportion_to_their_weights(rule, monkeypatch):
    own = SimpleNamespace(weight=lambda right, graded: 0 if graded > 10 else 1 + right)
    monkeypatch.setitem(sys.modules, "mine", own)
    mixture = four_rows(rule)
    weights = dict(enumerate(mixture.selections["a"].weight_N))
    found, _ = batches(mixture, [40] * 250, mixture.start() | {"position": 1000})
    rows = Counter(row for batch in found for _, row in batch)
    if rule == "mine:weight":
        assert rows[1] == 0 == weights.pop(1), "a row of weight 0 never comes"
    chances = {row: weight / sum(weights.values()) for row, weight in weights.items()}
    assert chi_square(rows, chances, 10_000) < CHI_SQUARE


def test_thompson_draws_the_nearest_to_one_half_of_eight():
    """The chance of each row, by a sum over the pass rate of the nearest: densities of Beta posteriors, on a grid."""
    mixture = four_rows("thompson")
    selection = mixture.selections["a"]
    middles = (np.arange(20_000) + 0.5) / 20_000
    densities = []
    for right, graded in zip(selection.right_N, selection.graded_N, strict=True):
        density = middles**right * (1 - middles) ** (graded - right)
        densities.append(density / density.sum())
    order = np.abs(middles - 0.5).argsort(kind="stable")
    by_distance = np.array(densities)[:, order]
    not_nearer = 1 - by_distance.mean(0).cumsum()
    chances = (2 * by_distance * not_nearer**7).sum(1)  # any of eight may be it, each is one of four rows
    assert chances.sum() == pytest.approx(1, abs=1e-3)
    found, _ = batches(mixture, [40] * 250, mixture.start() | {"position": 1000})
    rows = Counter(row for batch in found for _, row in batch)
    assert chi_square(rows, dict(enumerate(chances / chances.sum())), 10_000) < CHI_SQUARE
    assert rows[1] < rows[2] < rows[0] < rows[3]


def test_a_restored_run_draws_what_the_other_draws():
    """To the bit, at other positions than before, through JSON."""
    for rule in ("p(1-p)", "thompson"):
        mixture = four_rows(rule)
        at = mixture.start() | {"position": 400}
        saved = json.loads(json.dumps(mixture.saved_selections()))
        again = mixture_of([4], rules=[rule])
        again.restore_selections(saved)
        for name in ("right_N", "graded_N", "weight_N"):
            one, other = getattr(mixture.selections["a"], name), getattr(again.selections["a"], name)
            assert one.tobytes() == other.tobytes()
        assert batches(again, [8] * 5, at) == batches(mixture, [8] * 5, at)
        assert batches(mixture_of([4], rules=[rule]), [8] * 5, at) != batches(mixture, [8] * 5, at)
        several = [batches(mixture, [8], at | {"position": 400 + 8 * k})[0] for k in range(5)]
        assert batches(mixture, [8] * 5, at)[0] == [batch for (batch,) in several], "a draw depends on its place alone"


@pytest.mark.parametrize("max_age", [1, 3])
def test_a_batch_ahead_of_its_step_is_drawn_by_what_is_known_when_it_starts(max_age):
    """Batch k starts in step k - max_age: its rows are those of a mixture that has seen the steps before that one."""
    mixture, num_steps, cursor = mixture_of([5], rules=["p(1-p)"]), 8, None
    started, trained, ahead = [], [], Ahead()

    class Samples:
        def start(self, prompts, num_samples, options, seed_key, step):
            started.append([problem.row_id for _, problem in prompts])
            return prompts

        def finish(self, prompts):
            samples = []
            for number, problem in prompts:
                samples += group(problem.row_id, ["ok"] * (problem.row_id + 1) + ["wrong"], prompt=number)
            return samples

    async_cfg = AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=max_age)
    cfg = Config(grpo=GRPOConfig(num_prompts_per_step=6, async_grpo=async_cfg))
    cursor = mixture.start()
    for step in range(1, num_steps + 1):
        samples, cursor = ahead.draw(Samples(), cfg, mixture, cursor, step, num_steps)
        trained.append(samples)
        cursor = mixture.record(cursor, {}, samples)
    assert len(started) == num_steps and not ahead.batches
    for number, rows in enumerate(started):
        other = mixture_of([5], rules=["p(1-p)"])
        for samples in trained[: max(0, number - max_age)]:
            other.draw(other.start(), 30)  # so that all rows are known
            other.record(cursor, {}, samples)
        problems, _ = other.draw(other.start() | {"position": 6 * number}, 6)
        assert rows == [problem.row_id for problem in problems], number


@pytest.mark.parametrize("mix", MIXES)
def test_the_mix_chooses_the_set_and_the_rule_the_row(mix):
    """The sets of each prompt are those without a rule; a set without one has its epochs as before."""
    plain, _ = batches(mixture_of([6, 5, 4], **MIXES[mix]), [12] * 5)
    mixture = mixture_of([6, 5, 4], rules=["p(1-p)", "uniform", "thompson"], **MIXES[mix])
    found, cursor = batches(mixture, [12] * 5)
    assert [[name for name, _ in batch] for batch in found] == [[name for name, _ in batch] for batch in plain]
    of_b = [[row for batch in rows for name, row in batch if name == "b"] for rows in (found, plain)]
    assert of_b[0] == of_b[1] and set(mixture.selections) == {"a", "c"}
    assert cursor["position"] == 60


def test_the_copies_of_a_repeated_row_are_one_row():
    mixture = mixture_of([6], rules=["p(1-p)"], repeat=2)
    see(mixture, mixture.start(), group(2, ["ok", "wrong"]))
    assert mixture.selections["a"].graded_N.tolist() == [0, 0, 2]
    found, _ = batches(mixture, [50])
    assert {row for _, row in found[0]} == {0, 1, 2}
    mixture.selections["a"].note_drawn(1, 4)  # a sampler of the user's may name a copy
    mixture.record(mixture.start(), {}, group(1, ["ok"]))
    assert mixture.selections["a"].graded_N.tolist() == [0, 1, 2]


def test_weights_that_are_none_are_refused_and_zeros_end_the_run(monkeypatch):
    for value in (1e308, -1.0, float("nan"), float("inf"), None, "1", 0):
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(weight=lambda right, graded, value=value: value))
        with pytest.raises(ConfigError, match="mine:weight"):
            mixture_of([3], rules=["mine:weight"])
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(weight=lambda right, graded: graded == 0))
    mixture = mixture_of([2], rules=["mine:weight"])
    see(mixture, mixture.start(), group(0, ["ok"]), group(1, ["wrong"], prompt=1))
    with pytest.raises(StopRun, match="mine:weight"):
        mixture.draw(mixture.start(), 2)


def test_rules_that_cannot_be_are_refused(tmp_path):
    given = ["data.train.data_path=train.jsonl", "data.validation.data_path=val.jsonl"]
    for words, said in (
        (["data.train.prompt_selection=hard"], "prompt_selection=hard"),
        (["data.validation.prompt_selection=thompson"], "data.validation.prompt_selection"),
        (["data.train.prompt_selection=thompson", "data.shuffle=false"], "data.shuffle=false"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_config(load(ROOT / "configs/smoke.yaml", [*given, *words]), 1)
    check_config(load(ROOT / "configs/smoke.yaml", [*given, "data.default.prompt_selection=p(1-p)"]), 1)


WORDS = ["data.train.prompt_selection=thompson", "grpo.use_dynamic_sampling=true", "grpo.max_num_epochs=9"]
WORDS += ["grpo.val_at_start=false", "grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.save_period=1"]
WORDS += ["logger.tensorboard_enabled=false", "checkpointing.save_hf_at_end=false", "checkpointing.keep_latest=9"]


def train(folder: str, *words: str) -> tuple[list[tuple[int, int]], dict[str, str]]:
    """(step and row of each logged sample, the counts of the newest checkpoint) of a run in this process."""
    import grpo
    from run import job

    place = job.start_process_group(1)
    job.start_process_group = lambda *_: place
    sys.argv = ["grpo.py", *arguments(Path(folder)), *WORDS, *words]
    with redirect_stdout(StringIO()) as said:
        assert grpo.main() == 0, said.getvalue()
    run = max(Path(folder).glob("exp_*"))
    rows = [(row["step"], row["row_id"]) for row in map(json.loads, (run / "samples.jsonl").read_text().splitlines())]
    newest = max(run.glob("checkpoints/step_*"))
    return rows, json.loads((newest / "meta.json").read_text())["state"]["selections"]


@ranks(1, stand_in=True)
def train_on_one_rank(folder, *words):
    return train(folder, *words)


@ranks(2, stand_in=True)
def train_on_two_ranks(folder, *words):
    return train(folder, *words)


@pytest.mark.slow
def test_a_run_is_the_same_on_two_ranks_and_after_a_resume(tmp_path):
    """With dynamic sampling: what it discards is counted, too."""
    folders = [tmp_path / name for name in ("one", "two", "cut")]
    for folder in folders:
        folder.mkdir()
        write_rows(folder)
    one, two, cut = map(str, folders)
    ((rows, counts),) = train_on_one_rank(one)
    assert train_on_two_ranks(two) == [(rows, counts)] * 2 and counts.keys() == {"train"}
    train_on_one_rank(cut, "grpo.max_num_steps=2")
    assert train_on_one_rank(cut, f"checkpointing.resume_from={cut}/exp_001") == [(rows, counts)]
