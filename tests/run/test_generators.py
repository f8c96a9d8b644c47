"""A split job, both ends. Whole jobs of `grpo.main` with a stand-in for vLLM: the bits are those of a job that is not
split, and a rank of either side that is killed, hangs or is told to stop ends the job in time and by name."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import config
from engine import SamplingOptions
from run.generators import Generators, serve
from system.exits import Interrupted, Saved, StopRun

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------- the two ends, without processes


class Cable:
    """A bridge between two threads: what rank 0 broadcasts, the generator (rank 1) gets, and the other way round."""

    num_trainers = 1

    def __init__(self):
        self.to = {0: queue.Queue(), 1: queue.Queue()}
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

        return SimpleNamespace(
            num_trainers=1,
            broadcast=broadcast,
            send_weights=lambda tensors: self.tensors.put(list(tensors)),
            receive_weights=lambda shapes, dtype, device: self.named(shapes),
        )


class Sleepless:
    """An engine and a sampler that keep what they are asked for. It must never sleep: the memory is its own."""

    dtype = torch.float32
    should_stop = staticmethod(lambda: False)

    def __init__(self):
        self.weights = {}
        self.asked = []
        self.error = None

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
        return ["samples"]


@pytest.fixture
def ends(one_rank, tiny):
    """(the trainers' end, the generator's engine, its phases, its thread)."""
    from hf.tokenizer import Tokenizer

    cable, engine, phases = Cable(), Sleepless(), []
    ranks = SimpleNamespace(bridge=cable.end(1), tp_size=1)
    watchdog = SimpleNamespace(step=0, enter=phases.append)
    thread = threading.Thread(target=serve, args=(engine, engine, ranks, torch.device("cpu"), watchdog), daemon=True)
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
        assert generators.sample([(0, "problem")], 4, options, (42, 8)) == ["samples"]
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
    asked = [7, ([(0, "problem")], 4, options, (42, 8)), ([[1, 2]], [0], options, False)]
    assert engine.asked == [*asked, ([], 4, options, (42, 9)), ([], 4, options, (42, 9))]
    waiting = "waiting for the trainers"
    done = ["weight_sync", "generation", "canary", "generation", "generation", "generation", "end"]
    assert phases == [phase for task in done for phase in (waiting, task)]


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
    return jobs_of(tmp_path_factory.mktemp("split"), "colocated", "split", "killed generator", "resumed")


def records(job, name):
    """Of a run's file, without what depends on time."""
    lines = map(json.loads, (Path(job["run"]) / name).read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith(("timing/", "performance/"))} for line in lines]


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
    assert jobs["split"]["exit"] == {"code": 0, "reason": "trained to step 10", "rank": 0}
    assert "Traceback" not in jobs["split"]["log"] and jobs["split"]["log"].count("engine: 1 x vLLM") == 1


def test_a_killed_generator_is_named_and_the_run_goes_on_to_the_same_bits(jobs):
    """SIGKILL amid the samples of step 6."""
    killed = jobs["killed generator"]
    assert killed["codes"] == [1, -9] and killed["exit"]["code"] == 1
    assert killed["exit"]["reason"].startswith("crashed: generator rank 1 (process ")
    assert "is gone; continue with checkpointing.resume_from=" in killed["exit"]["reason"]
    assert jobs["resumed"]["codes"] == [0, 0] and "/checkpoints/step_000004\n" in jobs["resumed"]["log"]
    assert_same(jobs["resumed"], jobs["split"])


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
    assert reason.startswith("hung: generator rank 1 did not come; generator rank 1: step 6, generation, ")
    go_on = "continue with checkpointing.resume_from="
    assert ends == {
        "killed trainer": ([-9, 1], "crashed: trainer rank 0"),
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
