"""bench/golden.py: a run that is recorded and replayed is the same to the bit, and what is changed in it is seen."""

import pytest
from one_process import use_stand_in
from small_run import ROOT, arguments, write_rows

from bench import golden
from run import job

pytestmark = pytest.mark.slow

WORDS = ("grpo.max_num_steps=2", "grpo.val_at_end=true", "grpo.canary_period=1")
WORDS += ("policy.ppo_epochs=2", "loss_fn.reference_policy_kl_penalty=0.1")


@pytest.fixture
def run(one_rank, monkeypatch, tmp_path):
    """Runs a task in this process; what is recorded is sampled by a stand-in, too."""
    use_stand_in(monkeypatch)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(job, "start_process_group", lambda *_: one_rank[:2])
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
