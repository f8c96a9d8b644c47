"""A split job, both ends. Whole jobs of `grpo.main` with a stand-in for vLLM: the bits are those of a job that is not
split, and a rank of either side that is killed, hangs or is stopped on request ends the job in time and by name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from base.system.exits import host_name

ROOT = Path(__file__).resolve().parents[2]


def jobs_of(work, *names):
    """What tests/helpers/split_worker.py wrote of these jobs."""
    command = [sys.executable, "tests/helpers/split_worker.py", str(work), *names]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return json.loads((work / "answer.json").read_text())


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return jobs_of(tmp_path_factory.mktemp("split"), "colocated", "split")


def records(job, name):
    """Of a run's file, without what depends on time or on the number of engines."""
    lines = map(json.loads, (Path(job["run"]) / name).read_text().splitlines())
    unlike = ("timing/", "performance/", "train/idle_engine_fraction")
    return [{k: v for k, v in line.items() if not k.startswith(unlike)} for line in lines]


def assert_same(job, other):
    assert records(job, "metrics.jsonl") == records(other, "metrics.jsonl")
    assert_same_state(job, other)


def assert_same_state(job, other):
    """Samples and every tensor of every checkpoint."""
    assert records(job, "samples.jsonl") == records(other, "samples.jsonl")
    files = [sorted((Path(ended["run"]) / "checkpoints").glob("step_*/*.safetensors")) for ended in (job, other)]
    assert [f.parts[-2:] for f in files[0]] == [f.parts[-2:] for f in files[1]] and len(files[0]) >= 2
    for one, two in zip(*(map(load_file, pair) for pair in files), strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_ten_steps_are_those_of_a_job_that_is_not_split(jobs):
    """One trainer and one generator; with validation, canary and the bytes of each sync."""
    assert jobs["colocated"]["codes"] == [0] and jobs["split"]["codes"] == [0, 0], jobs["split"]["log"]
    assert_same(jobs["colocated"], jobs["split"])
    dumps = [load_file(Path(jobs[name]["run"]) / "rollouts/step_000006/rank_000.safetensors") for name in jobs]
    assert len(dumps[0]["id_T"]) > 100 and dumps[0].keys() == dumps[1].keys()
    for name in dumps[0]:
        one, other = (dump[name].nan_to_num(9) for dump in dumps)
        assert torch.equal(one, other), name
    steps = [line for line in records(jobs["split"], "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 11)] and all(line["train/grad_norm"] > 0 for line in steps)
    assert sum("train/canary_logp_gap" in line for line in steps) == 3
    assert jobs["split"]["exit"] == {"code": 0, "reason": "trained to step 10", "rank": 0, "host": host_name()}
    assert "Traceback" not in jobs["split"]["log"] and jobs["split"]["log"].count("engine: 1 x vLLM") == 1


@pytest.mark.long
def test_a_killed_generator_is_named_and_the_run_goes_on_to_the_same_bits(jobs, tmp_path):
    """SIGKILL amid the samples of step 6."""
    jobs |= jobs_of(tmp_path, "killed generator", "resumed")
    killed = jobs["killed generator"]
    assert killed["codes"] == [1, -9] and killed["exit"]["code"] == 1
    assert killed["exit"]["reason"].startswith(f"crashed: generator rank 1 on {host_name()} (process ")
    assert "is gone; continue with checkpointing.resume_from=" in killed["exit"]["reason"]
    assert jobs["resumed"]["codes"] == [0, 0] and "/checkpoints/step_000004\n" in jobs["resumed"]["log"]
    assert_same(jobs["resumed"], jobs["split"])


@pytest.mark.long
def test_a_generator_that_stops_ends_the_job_with_its_reason(tmp_path):
    stopped = jobs_of(tmp_path, "stopped generator")["stopped generator"]
    assert stopped["codes"] == [3, 0] and "Traceback" not in stopped["log"], stopped["log"]
    assert stopped["exit"]["reason"].startswith("stopped: the graders say nothing. Step 5: saved; ")
    assert (Path(stopped["run"]) / "checkpoints" / "step_000005" / "meta.json").exists()


GO_ON = "continue with checkpointing.resume_from="
AGES = {"train/avg_trajectory_age", "train/max_trajectory_age", "train/buffer_size", "train/carried_groups"}


@pytest.mark.long
def test_with_age_0_an_asynchronous_split_is_the_split_to_the_bit(jobs, tmp_path):
    jobs |= jobs_of(tmp_path, "async 0")
    assert jobs["async 0"]["codes"] == [0, 0], jobs["async 0"]["log"]
    lines = records(jobs["async 0"], "metrics.jsonl")
    assert sum(line.items() >= dict.fromkeys(AGES, 0).items() for line in lines) == 10
    without = [{name: value for name, value in line.items() if name not in AGES} for line in lines]
    assert without == records(jobs["split"], "metrics.jsonl")
    assert_same_state(jobs["async 0"], jobs["split"])


def assert_one_epoch(job, max_age):
    """Of 40 rows with 8 samples each, by weights that are at most so old; sampler and trainer agree where they can."""
    samples = [line for line in records(job, "samples.jsonl") if line["kind"] == "train"]
    assert sorted(line["row_id"] for line in samples) == sorted(list(range(40)) * 8)
    ages = {line["step"] - 1 - line["weight_version"] for line in samples}
    assert 0 in ages and max_age in ages and ages <= set(range(max_age + 1)), ages
    steps = [line for line in records(job, "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 11)]
    assert max(line["train/logp_gap_max"] for line in steps) <= 1e-4
    assert max(line["train/max_trajectory_age"] for line in steps) == max_age
    assert sum(line["train/buffer_size"] + line["train/carried_groups"] for line in steps) > 0


@pytest.mark.long
def test_a_group_that_an_engine_loses_is_named_and_the_run_goes_on(tmp_path):
    """The engine drops one of the requests for step 6: each prompt is used once, in both lives together. In the second
    one, the engine finishes its responses before each sync."""
    jobs = jobs_of(tmp_path, "async lost group", "async found")
    lost = jobs["async lost group"]
    assert lost["codes"] == [3, 0] and lost["exit"]["code"] == 3
    assert re.match(r"stopped: .* lost 1 requests: group 20 \(row \d+ of train\), sample 0; ", lost["exit"]["reason"])
    assert jobs["async found"]["codes"] == [0, 0] and "resumed from " in jobs["async found"]["log"]
    assert_one_epoch(jobs["async found"], 1)
    at = int(re.search(r"resumed from \S+/step_(\d+)", jobs["async found"]["log"])[1])
    later = [line for line in records(jobs["async found"], "metrics.jsonl") if line["step"] > at]
    assert later and not any(line.get("train/carried_groups") for line in later)


@pytest.mark.long
def test_faults_of_asynchronous_splits(tmp_path):
    """Ranks that are killed, hang or are stopped on request while a generator works ahead."""
    faults = [f"async {kind}" for kind in ("killed generator", "killed trainer", "hung generator", "hung trainer")]
    jobs = jobs_of(tmp_path, *faults[:1], "async resumed", *faults[1:], "async signalled generator", "async went on")
    for name, rank in zip(faults[:2], ("generator rank 1", "trainer rank 0"), strict=True):
        assert jobs[name]["exit"]["code"] == 1
        assert jobs[name]["exit"]["reason"].startswith(f"crashed: {rank}"), jobs[name]["exit"]
        assert GO_ON in jobs[name]["exit"]["reason"]
    for name, rank in zip(faults[2:], ("generator rank 1", "trainer rank 0"), strict=True):
        assert jobs[name]["exit"]["code"] == 4
        assert re.match(rf"hung: {rank}( on \S+)? reached no collective; ", jobs[name]["exit"]["reason"]), jobs[name][
            "exit"
        ]
    signalled = jobs["async signalled generator"]
    assert signalled["codes"] == [75, 0] and "Traceback" not in signalled["log"], signalled["log"]
    assert GO_ON in signalled["exit"]["reason"]
    for name in ("async resumed", "async went on"):
        assert jobs[name]["codes"] == [0, 0] and "resumed from " in jobs[name]["log"], jobs[name]["log"]
        assert_one_epoch(jobs[name], 1)


@pytest.mark.long
def test_what_one_generator_has_lost_stops_all(tmp_path):
    """The second of two: the first one, which has nothing to complain of, does not wait for it."""
    lost = jobs_of(tmp_path, "async 2 lost group")["async 2 lost group"]
    assert lost["codes"] == [3, 0, 0], lost["log"]
    assert lost["exit"]["reason"].startswith("stopped: the engine has lost 1 requests: group "), lost["exit"]


@pytest.mark.long
def test_other_asynchronous_splits(tmp_path):
    """Drained before each sync; an age of 2 and two generators; dynamic sampling; conversations of two turns."""
    jobs = jobs_of(tmp_path, "async", "async drained", "async 1 + 2", "async dynamic", "async two turns")
    for name, max_age in (("async", 1), ("async drained", 1), ("async 1 + 2", 2)):
        assert set(jobs[name]["codes"]) == {0}, jobs[name]["log"]
        assert_one_epoch(jobs[name], max_age)
    assert jobs["async dynamic"]["codes"] == jobs["async two turns"]["codes"] == [0, 0], jobs["async two turns"]["log"]
    steps = [line for line in records(jobs["async two turns"], "metrics.jsonl") if "train/loss" in line]
    assert len(steps) == 10 and max(line["train/logp_gap_max"] for line in steps) <= 1e-4
    assert max(line["train/max_turns_per_sample"] for line in steps) == 2
    for line in records(jobs["async drained"], "metrics.jsonl"):
        assert line.get("train/carried_groups", 0) == 0


@pytest.mark.long
def test_other_sizes_and_a_trainer_that_is_told_to_stop(tmp_path):
    sizes = ("colocated", "colocated 2", "split 2 + 1", "split 1 + 2", "dynamic", "split dynamic")
    jobs = jobs_of(tmp_path, *sizes, "signalled trainer")
    assert_same(jobs["colocated 2"], jobs["split 2 + 1"])
    assert_same(jobs["colocated"], jobs["split 1 + 2"])
    assert_same(jobs["dynamic"], jobs["split dynamic"])
    signalled = jobs["signalled trainer"]
    assert signalled["codes"] == [75, 0] and "Traceback" not in signalled["log"], signalled["log"]
    assert signalled["exit"]["reason"].startswith(f"saved: stopped on request, after step 6; {GO_ON}{signalled['run']}")
    assert (Path(signalled["run"]) / "checkpoints" / "step_000006" / "meta.json").exists()
