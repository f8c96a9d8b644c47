"""bench/golden.py: a run that is recorded and replayed is the same to the bit, and what is changed in it is seen."""

import json
import subprocess
import sys

import fake_vllm
import pytest
from one_process import use_stand_in
from small_run import ROOT, arguments, write_rows

import engine
from bench import golden
from run import start

pytestmark = pytest.mark.slow

WORDS = ("grpo.max_num_steps=2", "grpo.val_at_end=true", "grpo.canary_period=1")
WORDS += ("policy.ppo_epochs=2", "loss_fn.reference_policy_kl_penalty=0.1")


@pytest.fixture
def run(one_rank, monkeypatch, tmp_path):
    """Runs a task in this process; what is recorded is sampled by a stand-in, too."""
    use_stand_in(monkeypatch)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(start, "start_process_group", lambda *_: one_rank[:2])
    write_rows(tmp_path)

    def run(name, recording, *words):
        (tmp_path / name).mkdir()
        return golden.run([*arguments(tmp_path), *WORDS, *words], recording, tmp_path / name, rank=0)

    return run


def test_a_replay_is_the_recorded_run(run, tmp_path, capfd):
    old, same, other = (tmp_path / name for name in ("old", "same", "other"))
    assert run("old", None) == run("same", old) == run("other", old, "loss_fn.reference_policy_kl_penalty=0.11") == 0
    report = golden.compare_task(old, same)
    assert report["equal"] and report["optimizer_steps"] == report["gradients_bitwise"] == 4, report
    replies = [sorted((folder / "samples_0.jsonl").read_text().splitlines()) for folder in (old, same)]
    assert replies[0] == replies[1] != []
    assert len((old / "syncs_0.jsonl").read_text().splitlines()) == 3

    report = golden.compare_task(old, other)
    assert not report["equal"] and report["syncs_changed"] == 0, "each step goes on with the recorded weights"
    assert report["gradients_bitwise"] == 1, "the first one: there the policy is still the reference"
    assert report["weights_changed"] == 3 and 0 < report["weight_largest_difference"] < 0.1
    assert 0 < report["gradient_largest_relative_difference"] < 0.1 and "train/loss" in report["metrics_changed"]

    (old / "samples_0.jsonl").write_text("")
    assert run("unknown", old) == 1
    assert "the recording has no reply to [" in capfd.readouterr().err


class Narrow(fake_vllm.LLM):
    """Has room for a part of a batch."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.max_num_seqs = 10


def test_responses_that_outlast_a_step_are_replayed_as_far_as_they_came(run, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "LLM", Narrow)
    old, same = tmp_path / "old", tmp_path / "same"
    words = [*golden.ASYNC, "grpo.max_num_steps=3"]
    assert run("old", None, *words) == run("same", old, *words) == 0
    report = golden.compare_task(old, same)
    assert report["equal"] and report["optimizer_steps"] == 6, report
    replies = [json.loads(line) for line in (old / "samples_0.jsonl").read_text().splitlines()]
    assert any(0 < num_tokens < len(ids) for _, ids, _, _, versions in replies for _, num_tokens in versions)


@pytest.mark.long
def test_the_command_records_replays_and_compares(tmp_path):
    """Two ranks, vLLM when recording, 20 steps."""
    golden_py = [sys.executable, str(ROOT / "bench" / "golden.py")]
    for words in (["record", "old", "smoke"], ["replay", "old", "new", "smoke"], ["compare", "old", "new"]):
        folders = [str(tmp_path / word) if word in ("old", "new") else word for word in words]
        done = subprocess.run([*golden_py, *folders], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout[: done.stdout.rindex("differ:")])
    assert report["tasks"]["smoke"]["gradients_bitwise"] == 20
