"""The real command by train.sh, 2 ranks on CPU, told to stop or killed: what is saved goes on to the same bits."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    *("configs/smoke.yaml", "checkpointing.save_period=3", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *(
        "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=8",
        "grpo.val_period=2",
        "grpo.max_val_samples=8",
    ),
    *("data.train.env_name=slow_env:Slow", "data.validation.env_name=slow_env:Slow"),
)
SECONDS = 20  # a run that was told to stop has


class Life:
    """train.sh in a session of its own. slow: (phase, call) of slow_env.py."""

    def __init__(self, work, num_steps, slow=None, resume=None):
        self.mark = work / "here"
        self.mark.unlink(missing_ok=True)
        env = os.environ | {"GRPO_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
        env |= {"SLOW": json.dumps(slow), "SLOW_MARK": str(self.mark)}
        settings = [*SETTINGS, f"grpo.max_num_steps={num_steps}", f"logger.log_dir={work / 'logs'}"]
        settings += [f"checkpointing.resume_from={resume}"] if resume else []
        self.log = work / f"life_{len(list(work.glob('life_*')))}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["./train.sh", *settings], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def wait_for(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def processes(self):
        """pid -> command of all below train.sh."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return {pid: command(pid) for pid in found}

    def end(self, number, pid=None):
        """Sends the signal, to train.sh or another; (exit code, seconds it took); nothing may be left."""
        before, start = self.processes(), time.monotonic()
        os.kill(pid or self.process.pid, number)
        code = self.process.wait(timeout=120)
        seconds = time.monotonic() - start
        time.sleep(1)
        left = {pid: line for pid, line in before.items() if line and command(pid) == line}
        assert not left, left
        return code, seconds


def command(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return None if state in "ZX" else Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None


def run_to_the_end(work, num_steps, **how):
    life = Life(work, num_steps, **how)
    assert life.process.wait(timeout=400) == 0, life.log.read_text()[-3000:]
    return work / "logs" / "exp_001"


def final(folder):
    """All that a checkpoint holds of the last step, and the ids that were sampled in each step."""
    newest = max((folder / "checkpoints").glob("step_*"))
    tensors = {f"{file.name}/{k}": t for file in newest.glob("*.safetensors") for k, t in load_file(file).items()}
    state = json.loads((newest / "meta.json").read_text())["state"]
    samples = [line for line in (folder / "samples.jsonl").read_text().splitlines() if '"train"' in line]
    return newest.name, tensors, state["cursor"], samples


def assert_same(folder, reference):
    (step, tensors, cursor, samples), (ref_step, ref_tensors, ref_cursor, ref_samples) = final(folder), final(reference)
    assert (step, cursor, tensors.keys()) == (ref_step, ref_cursor, ref_tensors.keys())
    assert [name for name in tensors if not equal(tensors[name], ref_tensors[name])] == []
    assert samples == ref_samples and len(samples) > 10


def steps(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return [json.loads(line)["step"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run_to_the_end(tmp_path_factory.mktemp("reference"), 6)


def told_to_stop(work, number, slow, resume=None, num_steps=6):
    """A run that is told to stop when it is in the slow phase: saved, exit code 75 in time. Its folder."""
    life = Life(work, num_steps, slow=slow, resume=resume)
    life.wait_for(life.mark.exists)
    code, seconds = life.end(number)
    folder = work / "logs" / "exp_001"
    assert (code, seconds < SECONDS) == (75, True), (code, seconds, life.log.read_text()[-3000:])
    newest = max((folder / "checkpoints").glob("step_*"))
    last = steps(folder)[-1] if steps(folder) else 0
    assert newest.name == f"step_{last:06d}" and json.loads((folder / "exit.json").read_text())["code"] == 75
    return folder


def test_told_to_stop_twice_and_killed_once(tmp_path, reference):
    """SIGTERM amid decoding, SIGUSR1 amid grading, SIGKILL to a rank: it ends as the unbroken run, to the bit."""
    folder = told_to_stop(tmp_path, signal.SIGTERM, ("rollout", 1))
    assert steps(folder) == [1]
    told_to_stop(tmp_path, signal.SIGUSR1, ("grading", 3), resume=folder)  # step 2, its validation, then step 3
    life = Life(tmp_path, 6, slow=("update", 3), resume=folder)
    life.wait_for(life.mark.exists)
    rank = next(pid for pid, line in life.processes().items() if b"-u\0grpo.py" in (line or b""))
    code, _ = life.end(signal.SIGKILL, rank)
    assert code == 1 and "crashed" in json.loads((folder / "exit.json").read_text())["reason"]
    run_to_the_end(tmp_path, 6, resume=folder)
    assert_same(folder, reference)


PHASES = {"rollout": 1, "grading": 5, "update": 2, "sync": 2, "validation": 2, "save": 5}


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_told_to_stop_in_each_phase(tmp_path, reference, phase, number):
    folder = told_to_stop(tmp_path, number, (phase, PHASES[phase]))
    run_to_the_end(tmp_path, 6, resume=folder)
    assert_same(folder, reference)


@pytest.mark.long
def test_chain_of_25_kills(tmp_path):
    """A random rank, or torchrun, at random instants; each life goes on from what the last one has committed."""
    num_steps, rng, folder, lost, seen = 60, random.Random(7), None, [], 0
    whole_work, work = tmp_path / "whole", tmp_path / "killed"
    whole_work.mkdir()
    work.mkdir()
    whole = run_to_the_end(whole_work, num_steps)
    for _ in range(25):
        life = Life(work, num_steps, resume=folder)
        life.wait_for(lambda life=life: re.search(r"^engine: ", life.log.read_text(), re.M))
        time.sleep(rng.uniform(0, 6))
        victims = [pid for pid, line in life.processes().items() if b"grpo.py" in (line or b"")]
        if life.process.poll() is not None or not victims:
            break
        assert life.end(signal.SIGKILL, rng.choice(victims))[0] != 0
        found = sorted((work / "logs" / "exp_001" / "checkpoints").glob("step_??????"))
        folder = work / "logs" / "exp_001" if found else None
        committed = int(found[-1].name[5:]) if found else 0
        assert committed >= seen, "a committed checkpoint is gone"
        lost.append(max(steps(work / "logs" / "exp_001"), default=0) - committed)
        seen = committed
        if folder is None:
            for left in (work / "logs").glob("exp_*"):
                left.rename(work / f"nothing_{len(list(work.glob('nothing_*')))}")
    assert len(lost) == 25 and max(lost) <= 3, lost  # save_period
    run_to_the_end(work, num_steps, resume=folder)
    assert_same(folder, whole)
