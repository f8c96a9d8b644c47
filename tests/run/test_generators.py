"""A split job, both ends. Whole jobs of `grpo.main` with a stand-in for vLLM: the bits are those of a job that is not
split, and a rank of either side that is killed, hangs or is told to stop ends the job in time and by name."""

import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import config
from engine import SamplingOptions
from run.generators import Generators, serve
from system.exits import Interrupted, Saved, StopRun, host_name

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = SimpleNamespace(holder=None)  # of which all tokens are there


# ------------------------------------------------------------------------------------- the two ends, without processes


class Cable:
    """A bridge between two threads: what rank 0 broadcasts, the generator (rank 1) gets, and the other way round."""

    num_trainers = 1

    def __init__(self):
        self.to = {0: queue.Queue(), 1: queue.Queue()}
        self.announced = queue.Queue()
        self.tensors = queue.Queue()

    def named(self, shapes):
        tensors = next(filter(None, iter(self.tensors.get, None)))  # other requests have sent none
        assert [tuple(tensor.shape) for tensor in tensors] == [shape for _, shape in shapes]
        return zip([name for name, _ in shapes], tensors, strict=True)

    def end(self, rank):
        def broadcast(value, root):
            if root == rank:
                self.to[1 - rank].put(value)
                return value
            return self.to[rank].get(timeout=None if rank else 10)

        def announce(async_op=False):
            assert async_op == bool(rank)
            if rank == 0:
                self.announced.put(True)
            wait = self.announced.get if rank else lambda: None
            return SimpleNamespace(wait=wait, is_completed=lambda: not self.announced.empty())

        return SimpleNamespace(
            num_trainers=1,
            announce=announce,
            broadcast=broadcast,
            send_weights=lambda tensors: self.tensors.put(list(tensors)),
            receive_weights=lambda shapes, dtype, device: self.named(shapes),
        )


class Sleepless:
    """An engine and a sampler that keep what they are asked for, and work for so many decode steps. It must never
    sleep: the memory is its own."""

    dtype = torch.float32
    should_stop = staticmethod(lambda: False)

    def __init__(self):
        self.weights = {}
        self.asked, self.in_flight, self.unclaimed = [], deque(), {}
        self.error, self.ranks = None, None
        self.engine, self.versions_by_request, self.steps = self, {}, 0

    @property
    def is_idle(self):
        return self.asked.count("step") >= self.steps

    def step(self):
        self.asked.append("step")
        if self.is_idle:
            self.unclaimed |= {each.request_id: None for each in self.in_flight[0][0]}

    def start(self, *request):
        self.asked.append(request)
        sample = SimpleNamespace(prompt=4, row_id=9, dataset="a", index=0)
        return [SimpleNamespace(sample=sample, request_id="7", name="group 4")]

    def finish(self, conversations):
        return self.sample([each.name for each in conversations])

    def groups_under_way(self):
        conversations = [each for batch, _ in self.in_flight for each in batch]
        return {each.sample.prompt: each.request_id in self.unclaimed for each in conversations}

    def sync(self, weights, version):
        self.weights = dict(weights)
        self.asked.append(version)
        return sum(tensor.nbytes for tensor in self.weights.values())

    def generate(self, prompts, seeds, options, *, may_stop):
        self.asked.append((prompts, seeds, options, may_stop))
        return [f"reply to {prompt}" for prompt in prompts]

    def sample(self, *request):
        self.asked.append(request)
        if self.error:
            raise self.error
        return [SAMPLE]


@pytest.fixture
def ends(one_rank, tiny):
    """(the trainers' end, the generator's engine, its phases, its thread)."""
    from hf.tokenizer import Tokenizer

    cable, engine, phases = Cable(), Sleepless(), []
    ranks = SimpleNamespace(bridge=cable.end(1), tp_size=1, any_rank_of_engine=lambda flag: flag)
    engine.ranks = ranks
    watchdog = SimpleNamespace(step=0, enter=lambda phase, **_: phases.append(phase))
    thread = threading.Thread(target=serve, args=(engine, torch.device("cpu"), watchdog), daemon=True)
    thread.start()
    generators = Generators(cable.end(0), [("a", (3,)), ("b", (2, 2))], Tokenizer(tiny[0]), config.Config())
    return generators, engine, phases, thread


def test_each_request_reaches_the_generator_and_its_answer_the_trainer(ends):
    generators, engine, phases, thread = ends
    options = SamplingOptions(1.0, 8)
    with generators as same:
        assert same is generators and (generators.dtype, generators.max_total_tokens) == (torch.bfloat16, 512)
        generators.sleep()
        generators.wake("weights")
        assert generators.sync([("a", torch.ones(3)), ("b", torch.zeros(2, 2))], 7) == 28
        assert {name: tensor.tolist() for name, tensor in engine.weights.items()} == {"a": [1] * 3, "b": [[0, 0]] * 2}
        assert generators.sample([(0, "problem")], 4, options, (42, 8)) == [SAMPLE]
        assert generators.generate([[1, 2]], [0], options, may_stop=False) == ["reply to [1, 2]"]
        for error in (Interrupted("told to"), StopRun("too many errors")):
            engine.error = error
            with pytest.raises(type(error), match=str(error)):
                generators.sample([], 4, options, (42, 9))
        engine.error = None
        engine.should_stop = lambda: True  # a signal to the generator alone, between two rollouts
        with pytest.raises(Interrupted):
            generators.sample([], 4, options, (42, 9))
    thread.join(timeout=10)
    assert not thread.is_alive()
    asked = [7, ([(0, "problem")], 4, options, (42, 8), 0), ([[1, 2]], [0], options, False)]
    assert engine.asked == [*asked, ([], 4, options, (42, 9), 0), ([], 4, options, (42, 9), 0)]
    waiting = "waiting for the trainers"
    done = ["weight_sync", "validation", "canary", "validation", "validation", "validation"]
    assert phases == [phase for task in done for phase in (waiting, task)] + [waiting]


@pytest.mark.parametrize("drains", [False, True])
def test_a_batch_is_begun_a_step_before_it_is_asked_for(ends, drains):
    """It goes on by itself; weights come amid it, or with in_flight_weight_updates=false behind it."""
    generators, engine, phases, thread = ends
    generators.drains = drains
    engine.steps = 3 if drains else 10**9
    options = SamplingOptions(1.0, 8)
    with generators:
        generators.start([(4, "problem")], 2, options, (42,), 3)
        generators.sync([("a", torch.ones(3)), ("b", torch.zeros(2, 2))], 2)
        assert generators.groups_under_way() == {4: drains} and engine.is_idle == drains
        assert generators.sample([], 4, options, (42, -1)) == [SAMPLE]
        engine.steps = 0
        assert generators.finish(None) == [SAMPLE]
    thread.join(timeout=10)
    started, validation, asked = (
        ([(4, "problem")], 2, options, (42,), 3),
        ([], 4, options, (42, -1), 0),
        (["group 4"],),
    )
    assert [each for each in engine.asked if each != "step"] == [started, 2, validation, asked]
    assert not drains or engine.asked[1:4] == ["step"] * 3
    assert not engine.in_flight
    tasks = [phase for phase in phases if phase != "waiting for the trainers"]
    assert tasks == ["start", *["drain"] * drains, "weight_sync", "validation", "generation"]


def test_who_is_told_to_stop_does_not_drain(ends):
    """The step that is trained is saved before the longest response under way has ended."""
    generators, engine, _, _ = ends
    generators.drains, engine.steps, engine.should_stop = True, 10**9, lambda: len(engine.asked) > 20
    with generators:
        generators.start([(4, "problem")], 2, SamplingOptions(1.0, 8), (42,), 3)
        generators.sync([("a", torch.ones(3)), ("b", torch.zeros(2, 2))], 2)
        assert generators.groups_under_way() == {4: False} and 2 in engine.asked


@pytest.mark.parametrize(("error", "ends_there"), [(StopRun(), True), (Saved(), True), (RuntimeError(), False)])
def test_generators_end_with_what_all_trainers_raise_together(ends, error, ends_there):
    generators, _, _, thread = ends
    with pytest.raises(type(error)), generators:
        raise error
    thread.join(timeout=10 if ends_there else 0.3)
    assert thread.is_alive() != ends_there
    if not ends_there:
        generators.__exit__(None, None, None)


# ------------------------------------------------------------------------------------------------------- whole jobs


def jobs_of(work, *names):
    """What tests/helpers/split_worker.py wrote of these jobs."""
    command = [sys.executable, "tests/helpers/split_worker.py", str(work), *names]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return json.loads((work / "answer.json").read_text())


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """What tests/helpers/split_worker.py wrote of these."""
    names = ("colocated", "split", "killed generator", "resumed", "async 0", "async lost group", "async found")
    return jobs_of(tmp_path_factory.mktemp("split"), *names)


def records(job, name):
    """Of a run's file, without what depends on time."""
    lines = map(json.loads, (Path(job["run"]) / name).read_text().splitlines())
    unlike = ("timing/", "performance/")
    return [{k: v for k, v in line.items() if not k.startswith(unlike)} for line in lines]


def assert_same(job, other):
    """Metrics, samples and every tensor of every checkpoint."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert records(job, name) == records(other, name)
    files = [sorted((Path(each["run"]) / "checkpoints").glob("step_*/*.safetensors")) for each in (job, other)]
    assert [f.parts[-2:] for f in files[0]] == [f.parts[-2:] for f in files[1]] and len(files[0]) >= 2
    for one, two in zip(*(map(load_file, each) for each in files), strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_ten_steps_are_those_of_a_job_that_is_not_split(jobs):
    """One trainer and one generator; with validation, canary and the bytes of each sync."""
    assert jobs["colocated"]["codes"] == [0] and jobs["split"]["codes"] == [0, 0], jobs["split"]["log"]
    assert_same(jobs["colocated"], jobs["split"])
    steps = [line for line in records(jobs["split"], "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 11)] and all(line["train/grad_norm"] > 0 for line in steps)
    assert sum("train/canary_logp_gap" in line for line in steps) == 3
    assert jobs["split"]["exit"] == {"code": 0, "reason": "trained to step 10", "rank": 0, "host": host_name()}
    assert "Traceback" not in jobs["split"]["log"] and jobs["split"]["log"].count("engine: 1 x vLLM") == 1


def test_a_killed_generator_is_named_and_the_run_goes_on_to_the_same_bits(jobs):
    """SIGKILL amid the samples of step 6."""
    killed = jobs["killed generator"]
    assert killed["codes"] == [1, -9] and killed["exit"]["code"] == 1
    assert killed["exit"]["reason"].startswith(f"crashed: generator rank 1 on {host_name()} (process ")
    assert "is gone; continue with checkpointing.resume_from=" in killed["exit"]["reason"]
    assert jobs["resumed"]["codes"] == [0, 0] and "/checkpoints/step_000004\n" in jobs["resumed"]["log"]
    assert_same(jobs["resumed"], jobs["split"])


AGES = {"train/avg_trajectory_age", "train/max_trajectory_age", "train/buffer_size", "train/carried_groups"}


def test_with_age_0_an_asynchronous_split_is_the_split_to_the_bit(jobs):
    assert jobs["async 0"]["codes"] == [0, 0], jobs["async 0"]["log"]
    names = {"avg_trajectory_age": 0, "max_trajectory_age": 0, "buffer_size": 0, "carried_groups": 0}
    lines = records(jobs["async 0"], "metrics.jsonl")
    assert (
        sum(line.items() >= {f"train/{name}": value for name, value in names.items()}.items() for line in lines) == 10
    )
    without = [{name: value for name, value in line.items() if name not in AGES} for line in lines]
    assert without == records(jobs["split"], "metrics.jsonl")
    assert records(jobs["async 0"], "samples.jsonl") == records(jobs["split"], "samples.jsonl")
    files = [
        sorted((Path(jobs[name]["run"]) / "checkpoints").glob("step_*/*.safetensors")) for name in ("async 0", "split")
    ]
    assert len(files[0]) == len(files[1]) == 5
    for one, two in zip(*(map(load_file, each) for each in files), strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


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


def test_a_group_that_an_engine_loses_is_named_and_the_run_goes_on(jobs):
    """The engine drops one of the requests for step 6: each prompt is used once, in both lives together."""
    lost = jobs["async lost group"]
    assert lost["codes"] == [3, 0] and lost["exit"]["code"] == 3
    reason = (
        r"stopped: the engine has lost 1 requests: group 20 \(row \d+ of train\), sample 0; resume the run from a .*"
    )
    assert re.fullmatch(reason, lost["exit"]["reason"])
    assert jobs["async found"]["codes"] == [0, 0] and "resumed from " in jobs["async found"]["log"]
    assert_one_epoch(jobs["async found"], 1)


@pytest.mark.long
def test_faults_of_asynchronous_splits(tmp_path):
    """Ranks that are killed, hang or are told to stop while a generator works ahead."""
    faults = [f"async {kind}" for kind in ("killed generator", "killed trainer", "hung generator", "hung trainer")]
    jobs = jobs_of(tmp_path, *faults[:1], "async resumed", *faults[1:], "async signalled generator", "async went on")
    for name, rank in zip(faults[:2], ("generator rank 1", "trainer rank 0"), strict=True):
        assert jobs[name]["exit"]["code"] == 1
        assert jobs[name]["exit"]["reason"].startswith(f"crashed: {rank}"), jobs[name]["exit"]
        assert "continue with checkpointing.resume_from=" in jobs[name]["exit"]["reason"]
    for name, rank in zip(faults[2:], ("generator rank 1", "trainer rank 0"), strict=True):
        assert jobs[name]["exit"]["code"] == 4
        assert re.match(rf"hung: {rank}( on \S+)? did not come; ", jobs[name]["exit"]["reason"]), jobs[name]["exit"]
    assert jobs["async signalled generator"]["codes"] == [75, 0], jobs["async signalled generator"]["log"]
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
def test_other_sizes_and_other_ends(tmp_path):
    faults = ("killed trainer", "hung generator", "signalled generator", "signalled trainer", "stopped generator")
    sizes = ("colocated", "colocated 2", "split 2 + 1", "split 1 + 2", "dynamic", "split dynamic")
    jobs = jobs_of(tmp_path, *sizes, *faults)
    assert_same(jobs["colocated 2"], jobs["split 2 + 1"])
    assert_same(jobs["colocated"], jobs["split 1 + 2"])
    assert_same(jobs["dynamic"], jobs["split dynamic"])
    ends = {name: (jobs[name]["codes"], jobs[name]["exit"]["reason"].partition(" (")[0]) for name in faults}
    codes, reason = ends.pop("hung generator")
    assert 4 in codes and {*codes} <= {1, 4} and jobs["hung generator"]["exit"]["code"] == 4  # who leaves first says it
    assert reason.startswith(
        f"hung: generator rank 1 on {host_name()} did not come; generator rank 1 on {host_name()}: step 6, "
    )
    go_on = "continue with checkpointing.resume_from="
    assert ends == {
        "killed trainer": ([-9, 1], f"crashed: trainer rank 0 on {host_name()}"),
        "signalled generator": (
            [75, 0],
            f"saved: told to stop, after step 6; {go_on}{jobs['signalled generator']['run']}",
        ),
        "signalled trainer": ([75, 0], f"saved: told to stop, after step 6; {go_on}{jobs['signalled trainer']['run']}"),
        "stopped generator": ([3, 0], "stopped: the graders say nothing"),
    }
    for name in ("signalled generator", "signalled trainer"):
        assert (Path(jobs[name]["run"]) / "checkpoints" / "step_000006" / "meta.json").exists()
    assert not any("Traceback" in jobs[name]["log"] for name in faults if name != "hung generator")
