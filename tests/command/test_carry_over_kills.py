"""The real command and engine, 2 ranks on CPU, with responses that outlast steps: killed again and again."""

import json
import os
import random
import signal
import time

import pytest
from record_samples import recorded
from run_life import ROOT, Life, newest_step, run_to_the_end, steps

NUM_STEPS, MAX_AGE = 24, 2  # two epochs of 12 steps of 8 prompts: 72 of one set, 24 of the other
POINTS = [("rollout", 3), ("update", 4), ("sync", 3), ("save", 2), ("grading", 3)]


def overrides(work):
    """3 prompts of one set to 1 of the other, as run_life.py has it, so that an epoch of both is 12 steps."""
    words = ["grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={MAX_AGE}"]
    words += ["loss_fn.use_importance_sampling_correction=true", "grpo.max_num_epochs=9", "grpo.val_period=0"]
    words += ["policy.generation.temperature=2.0", "policy.generation.max_new_tokens=20"]
    words += ["policy.max_total_sequence_length=48", "checkpointing.save_period=1"]
    for i, (name, num_rows) in enumerate((("train", 72), ("heldout", 24))):
        rows = (ROOT / "examples" / "arithmetic" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (work / f"{name}.jsonl").write_text("".join(rows[:num_rows]))
        words.append(f"data.train.{i}.data_path={work / name}.jsonl")
    os.environ["RECORD"] = str(work / "tokens.jsonl")
    return words


def check(work, folder):
    """All lives together: each row is trained once an epoch, and no token is older than the run allows."""
    history = recorded(work / "tokens.jsonl")
    assert list(history) == steps(folder) == list(range(1, NUM_STEPS + 1))
    for epoch in range(2):
        samples = [s for step in range(12 * epoch + 1, 12 * epoch + 13) for s in history[step]]
        used = sorted((s["dataset"], s["row_id"], s["index"]) for s in samples)
        sizes = {"heldout": 24, "train": 72}
        assert used == sorted((name, row, i) for name, size in sizes.items() for row in range(size) for i in range(8))
    ages = {step - 1 - version for step, samples in history.items() for s in samples for version in s["versions"]}
    assert ages == set(range(MAX_AGE + 1))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(record["train/logp_gap_max"] <= 1e-4 for record in records if "train/loss" in record)
    split = [s for samples in history.values() for s in samples if len(set(s["versions"])) > 1]
    assert len(split) >= NUM_STEPS
    print(f"{len(split)} samples are of several weights")


def killed(work, words, folder, before, slow=None, after=(0, 0.0), torchrun=False):
    """A life that ends by SIGKILL, to a rank or to torchrun; the step of the newest checkpoint after it.
    after: more steps than `before`, and seconds; or in the slow phase."""
    life = Life(work, NUM_STEPS, *words, slow=slow, resume=folder if before else None)
    if slow:
        life.wait_for(life.mark.exists)
    else:
        life.wait_for(lambda: f"\nstep {before + after[0]}/" in life.log.read_text())
        time.sleep(after[1])
    ranks = [pid for pid, line in life.processes().items() if b"-u\0grpo.py" in line]
    parent = [pid for pid, line in life.processes().items() if b"grpo.py\0" in line and pid not in ranks]
    code, _ = life.end(signal.SIGKILL, parent[-1] if torchrun else ranks[-1])
    assert code not in (0, 75), life.log.read_text()[-3000:]
    if not torchrun:
        assert code == 1 and "is gone" in json.loads((folder / "exit.json").read_text())["reason"]
    done, committed = max(steps(folder), default=0), newest_step(folder)
    assert committed >= before and done - committed <= 2, (before, done, committed)
    when = slow or f"{after[0]} steps and {after[1]:.2f} s later"
    print(f"killed {when}{', torchrun' * torchrun}: step {done}, saved {committed}")
    return committed


@pytest.mark.long
def test_killed_at_named_points_and_at_random_instants(tmp_path, monkeypatch):
    monkeypatch.setenv("RECORD", "")
    words, folder, committed = overrides(tmp_path), tmp_path / "logs" / "exp_001", 0
    for number, slow in enumerate(POINTS):
        committed = killed(tmp_path, words, folder, committed, slow, torchrun=number == 3)
    rng = random.Random(5)
    for _ in range(3):
        committed = killed(tmp_path, words, folder, committed, after=(rng.randint(1, 3), rng.uniform(0, 0.5)))
    run_to_the_end(tmp_path, NUM_STEPS, *words, resume=folder)
    check(tmp_path, folder)
