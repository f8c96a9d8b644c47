"""A run with agents by the real command: killed and resumed it is the unbroken one, and no key is in what it leaves."""

import json
import os
import signal

import pytest
from run_life import Life, assert_same, newest_step, run_to_the_end, steps

pytestmark = pytest.mark.long
AGENT = {"name": "fork", "function": "forking_agent:solve", "num_workers": 4, "deadline_s": 60}
SETTINGS = [f"env.agents.{name}={value}" for name, value in AGENT.items()]
SETTINGS += [f"data.{part}.env_name=fork" for part in ("train.0", "train.1", "validation")]
SETTINGS += ["policy.max_total_sequence_length=64", "grpo.max_val_samples=20"]
AHEAD = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=1", "checkpointing.save_period=6"]
AHEAD += ["loss_fn.use_importance_sampling_correction=true"]


def lines_of(folder, name, kind):
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [line for line in lines if kind in line or line.get("kind") == kind]


@pytest.mark.parametrize(("num_steps", "changes"), [(6, []), (12, AHEAD)], ids=["synchronous", "age 1"])
def test_killed_and_resumed_it_is_the_unbroken_run(tmp_path, num_steps, changes):
    works = [tmp_path / "unbroken", tmp_path / "killed"]
    for work in works:
        work.mkdir()
    keys = [f"env.custom.fork.keys_file={tmp_path}/keys"]
    unbroken = run_to_the_end(works[0], num_steps, *SETTINGS, *changes, *keys)
    life = Life(works[1], num_steps, *SETTINGS, *changes, *keys)
    folder = works[1] / "logs" / "exp_001"
    life.wait_for(lambda: newest_step(folder) == num_steps // 2 and steps(folder)[-1] > num_steps // 2, 900)
    for pid in life.processes():
        os.kill(pid, signal.SIGKILL)
    life.process.wait()
    run_to_the_end(works[1], num_steps, *SETTINGS, *changes, *keys, resume=folder)
    folder = sorted((works[1] / "logs").glob("exp_*"))[-1]
    assert steps(folder)[-1] == num_steps
    ours, theirs = (lines_of(run, "metrics.jsonl", "train/loss") for run in (folder, unbroken))
    records, others = (lines_of(run, "samples.jsonl", "train") for run in (folder, unbroken))
    assert max(line["train/logp_gap_max"] for line in ours) < 1e-4
    numbers = [(step, index) for step in range(1, num_steps + 1) for index in 4 * [*range(8)]]
    assert [(r["step"], r["index"]) for r in records] == numbers
    assert [r["row_id"] for r in records] == [r["row_id"] for r in others], "each prompt once"
    assert "timeout" not in {record["outcome"] for record in records}
    assert all(0 <= r["step"] - 1 - r["weight_version"] <= bool(changes) for r in records)
    if not changes:
        assert_same(folder, unbroken, num_steps)
        for our, their in zip(ours, theirs, strict=True):
            exact = {name: x for name, x in their.items() if name.startswith("train/")}
            assert exact == {name: our.get(name) for name in exact}
    secrets = set((tmp_path / "keys").read_text().split())
    assert len(secrets) >= 32 * num_steps
    for path in (path for work in works for path in work.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), path
