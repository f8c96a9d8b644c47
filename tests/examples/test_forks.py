"""examples/forks: each diff applies, edits two files of the product and the table of contradictions at most, and does
what it says in a run.

The metric, a loss and the optimizer are trained always, and with --long all are. Then `tests/run.sh --fork` runs with
each diff, and what judges losses, advantages and metrics with each edit of edits.yaml.
"""

import json
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
from contextlib import closing, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from ranks import ranks
from safetensors.torch import load_file
from small_run import ROOT, arguments, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.house]  # each fork is a process that trains
FOLDER = ROOT / "examples" / "forks"
RULES = "base/check/contradictions.yaml"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
EDITS = yaml.safe_load(Path(__file__).with_name("edits.yaml").read_text(encoding="utf-8"))
NAMES = sorted(file.stem for file in FOLDER.glob("*.diff"))
QUIET = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"]
SHORT = [*QUIET, "grpo.max_num_steps=2", "policy.ppo_epochs=2", "checkpointing.save_period=1"]  # ratios leave 1


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def copy_with(name: str | None, copy: Path, *, tests: bool = False) -> Path:
    """The repository as git has it, with the diff in it if one is named."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        if (ROOT / file).is_file() and (tests or not file.startswith(("tests/", "bench/", "docs/"))):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}  # the copy is no repository, nor in one
    if name is None:
        return copy
    diff = str(FOLDER / f"{name}.diff")
    applied = subprocess.run(["git", "apply", diff], cwd=copy, env=env, capture_output=True, text=True)
    assert applied.returncode == 0, f"{name} no longer applies; its README says how to mend it: {applied.stderr}"
    return copy


@ranks(1, stand_in=True)
def train(copy: str, folder: str, runs: list[list[str]]) -> list[tuple[list[dict], str]]:
    """The metrics of each step of each run of the copy, and what was printed. The runs share a process."""
    os.chdir(copy)
    sys.path.insert(0, copy)
    import grpo
    from run import job

    assert grpo.__file__ == f"{copy}/grpo.py"
    place = job.start_process_group(1)
    job.start_process_group = lambda *_: place
    answers = []
    for overrides in runs:
        sys.argv = ["grpo.py", *arguments(Path(folder)), *overrides]
        with redirect_stdout(StringIO()) as said:
            code = grpo.main()
        assert code == 0, said.getvalue()
        newest = max(Path(folder).glob("exp_*/metrics.jsonl"), key=lambda file: file.stat().st_mtime_ns)
        answers.append(([row for row in read_lines(newest) if "train/loss" in row], said.getvalue()))
    return answers


@pytest.fixture
def fork(tmp_path):
    """fork(name, *runs): what `train` gives, in a copy with the diff; the runs' files are in tmp_path/work."""
    work = tmp_path / "work"
    work.mkdir()
    write_rows(work)

    def train_with(name, *runs):
        copy = copy_with(name, tmp_path / "copy")
        (answers,) = train(str(copy), str(work), [[*SHORT, *overrides] for overrides in runs])
        return answers

    return train_with


def samples_of(tmp_path, step):
    return [row for row in read_lines(tmp_path / "work" / "exp_001" / "samples.jsonl") if row["step"] == step]


@pytest.mark.parametrize("name", NAMES)
def test_a_diff_edits_two_files_at_most_and_stands_in_the_table(name):
    applied = subprocess.run(["git", "apply", "--check", FOLDER / f"{name}.diff"], cwd=ROOT, capture_output=True)
    assert applied.returncode == 0, f"{name} no longer applies; its README says how to mend it: {applied.stderr}"
    edited = re.findall(r"^\+\+\+ b/(.+)$", (FOLDER / f"{name}.diff").read_text(), re.MULTILINE)
    product = [file for file in edited if not re.match(r"(tests|bench|docs|examples)/", file) and file != RULES]
    (row,) = re.findall(rf"^\| \[{name}\]\({name}.diff\) \| (.*?) \|", README, re.MULTILINE)
    assert len(product) <= (3 if name == "token_value" else 2)
    assert all((ROOT / file).is_file() for file in product), "a fork edits files, it adds none"
    assert [file for file in edited if file not in row] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_lines_of_a_diff_are_no_longer_than_ours(name):
    of_files = (FOLDER / f"{name}.diff").read_text().split("\n+++ b/")
    lines = [line for diff in of_files if not diff.partition("\n")[0].endswith(".json") for line in diff.splitlines()]
    added = [line.removeprefix("+") for line in lines if line.startswith("+")]
    assert [line for line in added if len(line) > 120] == []


LOSSES = [("loss_term", "ratio_l2_coef=0.5"), ("topr", "token_loss=topr"), ("kl_by_sample", "kl_by_sample=true")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "key"), LOSSES)
def test_the_edited_loss_is_trained(fork, name, key):
    kl = ["loss_fn.reference_policy_kl_penalty=1"]
    (off, _), (on, said) = fork(name, kl, [*kl, f"loss_fn.{key}"])
    assert "autograd of loss.py" in said
    assert off[0]["train/reward"] == on[0]["train/reward"], "the same first rollout"
    for one, other in zip(off, on, strict=True):
        assert other["train/grad_norm"] != pytest.approx(one["train/grad_norm"], rel=1e-3)


def test_a_value_of_each_token_goes_from_the_engine_to_a_metric_and_into_dumps(fork, tmp_path):
    """The likeliest id's log-probability: none is above it, and where only one id is kept it is 0."""
    (rows, _), (alone, _) = fork("token_value", ["logger.dump_rollouts=1"], ["policy.generation.top_k=1"])
    columns = load_file(tmp_path / "work" / "exp_001" / "rollouts" / "step_000001" / "rank_000.safetensors")
    assert (columns["top_logp_T"] >= columns["logp_T"]).all() and (columns["top_logp_T"] > columns["logp_T"]).any()
    mean = columns["top_logp_T"][columns["mask_T"]].mean().item()
    assert rows[0]["train/sampler_top_logp"] == pytest.approx(mean, rel=1e-5) and mean < 0
    assert alone[0]["train/sampler_top_logp"] == 0


@pytest.mark.long
def test_metrics_that_are_added_change_nothing_else(fork, tmp_path):
    ((rows, _),) = fork("metric", [])
    plain = tmp_path / "plain"
    plain.mkdir()
    write_rows(plain)
    (((before, _),),) = train(str(ROOT), str(plain), [SHORT])
    for row, old in zip(rows, before, strict=True):
        assert all(row[name] == old[name] for name in ("train/loss", "train/grad_norm", "train/reward"))
        rewards = [sample["reward"] for sample in samples_of(tmp_path, row["step"])]
        assert row["train/reward_std"] == pytest.approx(statistics.pstdev(rewards))
        assert 0 < row["train/ratio_above_1.1_fraction"] < 1


@pytest.mark.long
def test_the_median_is_the_baseline(fork, tmp_path):
    keys = ("adv_estimator.name=median", "normalize_rewards=false", "use_leave_one_out_baseline=false")
    ((rows, _),) = fork("median", [f"grpo.{key}" for key in keys])
    for row in rows:
        groups: dict = {}
        for sample in samples_of(tmp_path, row["step"]):
            groups.setdefault(sample["row_id"], []).append(sample["reward"])
        adv = [reward - statistics.median(group) for group in groups.values() for reward in group]
        assert {len(group) for group in groups.values()} == {8}
        assert row["train/advantages/mean"] == pytest.approx(statistics.mean(adv))
        assert row["train/advantages/min"] == pytest.approx(min(adv))


@pytest.mark.long
def test_the_best_of_two_is_trained(fork, tmp_path):
    """A pair is right if one of its samples is: the advantage of a right one is the share of pairs that are not."""
    ((rows, _),) = fork("pass_at_2", ["grpo.adv_estimator.name=pass_at_2"])
    for row in rows:
        groups: dict = {}
        for sample in samples_of(tmp_path, row["step"]):
            groups.setdefault(sample["row_id"], []).append(sample["reward"])
        largest = 0.0
        for rewards in groups.values():
            num_wrong = rewards.count(0.0)
            if num_wrong < len(rewards):
                largest = max(largest, num_wrong * (num_wrong - 1) / len(rewards) / (len(rewards) - 1))
        assert row["train/advantages/max"] == pytest.approx(largest) and largest > 0
        assert row["train/advantages/mean"] == pytest.approx(0, abs=1e-7)


@pytest.mark.long
def test_the_environment_grades_digits(fork, tmp_path):
    ((rows, _),) = fork("environment", ["data.default.env_name=examples.envs.digits:Digits"])
    assert len(rows) == 2 and any(0 < sample["reward"] < 1 for sample in samples_of(tmp_path, 1))


@pytest.mark.long
def test_the_optimizer_is_saved_and_resumed(fork, tmp_path):
    """Its momentum is in the checkpoint, and a resumed run goes on with it: p_t = p_(t-1) - lr v_t, by hand."""
    sgd = ["policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs.weight_decay=0", "policy.ppo_epochs=1"]
    sgd += ["policy.optimizer.kwargs.lr=0.015625", "policy.max_grad_norm=1000", "checkpointing.keep_latest=9"]
    run = tmp_path / "work" / "exp_001"
    fork("optimizer", sgd, [*sgd, f"checkpointing.resume_from={run}", "grpo.max_num_steps=3"])
    folders = [run / "checkpoints" / f"step_{step:06d}" for step in (1, 2, 3)]
    steps = [load_file(folder / "rank_00000.safetensors") for folder in folders]
    for name in [name.removeprefix("param.") for name in steps[0] if name.startswith("param.")]:
        for old, new in pairwise(steps):
            moved = old[f"param.{name}"].double() - new[f"param.{name}"].double()
            velocity = new[f"sharded.momentum_buffer.{name}"].double()
            assert (moved - velocity / 64).abs().max() <= 2e-7 and moved.any()


@pytest.mark.long
@pytest.mark.parametrize(("name", "config_class"), [("gemma", "GemmaConfig"), ("cwm", "CwmConfig")])
def test_another_family_is_trained(fork, tmp_path, monkeypatch, name, config_class):
    import transformers
    from tiny import FAMILIES, make_tiny

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    monkeypatch.setitem(FAMILIES, name, (getattr(transformers, config_class), heads))
    make_tiny(tmp_path / name, family=name)
    settings = ["loss_fn.entropy_coef=0.1", "policy.max_total_sequence_length=48"]  # it gets no reward
    settings.append(f"policy.model_name={tmp_path}/{name}")
    command = [sys.executable, "grpo.py", "--check", "configs/smoke.yaml", *settings]
    check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 2 and f"model_type='{name}'" in check.stderr
    ((rows, _),) = fork(name, settings)
    assert all(row["train/grad_norm"] > 1e-3 and row["train/logp_gap_max"] <= 1e-4 for row in rows)


@pytest.mark.long
def test_a_table_is_read(fork, tmp_path):
    file = tmp_path / "train.db"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE rows (problem TEXT, answer INTEGER, note REAL)")
        rows = [(f"{a}+{a + 7}=", 2 * a + 7, None) for a in range(20, 60)]
        database.executemany("INSERT INTO rows VALUES (?, ?, ?)", rows)
    fork("sqlite", [f"data.train.data_path={file}"])
    samples, answers = samples_of(tmp_path, 1), {problem: answer for problem, answer, _ in rows}
    for sample in samples:
        (problem,) = (problem for problem in answers if problem in sample["prompt"])
        is_right = sample["reply"].startswith(f"{answers[problem]}<") and sample["finish_reason"] == "stop"
        assert sample["reward"] == is_right, sample
    assert 0 < sum(sample["reward"] for sample in samples) < len(samples)
    command = [sys.executable, "grpo.py", "--check", "configs/smoke.yaml"]
    command += [f"data.train.data_path={file}", "data.train.subset=others"]
    check = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True)
    assert check.returncode == 2 and "others" in check.stderr + check.stdout


JUDGES = (
    "core/test_loss.py core/test_loss_exact.py core/test_loss_path.py core/test_advantages.py core/test_metrics.py "
)
JUDGES += "core/test_pack.py core/test_grpo.py kernels/test_linear_loss.py"


def failures(copy: Path, *selection: str) -> set[str]:
    """The tests that fail in the copy, of those that `tests/run.sh --fork` runs."""
    marks = ["-m", "not long and not house and not gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *marks, *selection]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-3000:]
    return set(re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_what_judges_numbers_passes_with(name, tmp_path):
    copy = copy_with(name, tmp_path / "copy", tests=True)
    assert failures(copy, "--fast") | failures(copy, "tests/core", "tests/kernels") == set()


def test_each_edit_has_its_place():
    for edit in EDITS:
        for name, old, _ in edit["edits"]:
            assert (ROOT / name).read_text().count(old) == 1, f"edits.yaml, {edit['name']}: {old!r} in {name}"


@pytest.mark.long
@pytest.mark.parametrize("edit", EDITS, ids=[edit["name"] for edit in EDITS])
def test_what_judges_numbers_passes_with_a_right_edit_and_fails_with_a_wrong_one(edit, tmp_path):
    copy = copy_with(None, tmp_path / "copy", tests=True)
    for name, old, new in edit["edits"]:
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace(old, new))
    found = failures(copy, "--fast", *(f"tests/{name}" for name in JUDGES.split()))
    assert bool(found) == edit.get("is_wrong", False), found
