"""500 steps of the smoke run: memory, open files, threads and processes stay as they are, and so does the reward."""

import json
import statistics
import time
from pathlib import Path

import pytest
from run_life import Life, newest_step

NUM_STEPS = 500
SMOKE = ("grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=16", "grpo.val_period=40")
OVERRIDES = (*SMOKE, "checkpointing.save_period=40", "grpo.max_val_samples=100")


def usage(pid):
    """What a rank holds: resident MiB, open files, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"rss_mib": int(status["VmRSS"].split()[0]) / 1024, "files": files, "threads": int(status["Threads"])}


def watch(life, folder):
    """A record of all ranks about every second: the steps done by then, and what they hold."""
    records = []
    while life.process.poll() is None:
        time.sleep(1)
        metrics = folder / "metrics.jsonl"
        step = metrics.read_text().count('"train/loss"') if metrics.exists() else 0
        processes = life.processes()
        try:
            ranks = [usage(pid) for pid, line in processes.items() if b"-u\0grpo.py" in line]
        except (FileNotFoundError, ProcessLookupError):
            break  # they are leaving
        records.append({"step": step, "ranks": ranks, "processes": len(processes)})
    return records


@pytest.mark.long
def test_500_steps_hold_no_more_at_the_end_than_at_the_start(tmp_path):
    life, folder = Life(tmp_path, NUM_STEPS, *OVERRIDES), tmp_path / "logs" / "exp_001"
    records = watch(life, folder)
    assert life.process.wait(timeout=60) == 0, life.log.read_text()[-3000:]
    early = [r for r in records if 100 <= r["step"] < 200 and len(r["ranks"]) == 2]
    late = [r for r in records if NUM_STEPS - 100 <= r["step"] < NUM_STEPS and len(r["ranks"]) == 2]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    reward = [line["train/reward"] for line in lines if "train/loss" in line]

    def mean(part, rank, what):
        return statistics.mean(record["ranks"][rank][what] for record in part)

    def most(part, what):
        return max(usage[what] for record in part for usage in record["ranks"])

    found = {
        "rss_mib": [[mean(part, rank, "rss_mib") for part in (early, late)] for rank in range(2)],
        "files": [most(part, "files") for part in (early, late)],
        "threads": [most(part, "threads") for part in (early, late)],
        "processes": [max(record["processes"] for record in part) for part in (early, late)],
        "reward": [statistics.mean(reward[100:200]), statistics.mean(reward[-100:])],
        "records": [len(early), len(late)],
    }
    print(json.dumps(found))
    assert min(found["records"]) >= 10 and len(reward) == NUM_STEPS and newest_step(folder) == NUM_STEPS
    assert all(last <= 1.02 * first for first, last in found["rss_mib"]), found
    assert all(found[what][1] <= found[what][0] for what in ("files", "threads", "processes")), found
    assert found["reward"][1] >= found["reward"][0] - 0.01 > 0.9, found
