"""The real command, `./train.sh` with 2 ranks on CPU, as a process that tests signal, kill, watch and compare."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file
from torch import equal

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["configs/smoke.yaml", "checkpointing.save_period=3", "grpo.val_at_start=false", "grpo.val_at_end=false"]
SETTINGS += ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=8", "logger.num_samples_to_log=32"]
SETTINGS += ["data.train.1.data_path=examples/arithmetic/heldout.jsonl", "data.train.1.output_key=answer"]
SETTINGS += ["data.train.0.weight=3", "data.train.1.weight=1"]  # the cursor is of two sets
SETTINGS += [f"data.{part}.env_name=slow_env:Slow" for part in ("train.0", "train.1", "validation")]


class Life:
    """train.sh in a session of its own. slow: (phase, call) of slow_env.py."""

    def __init__(self, work, num_steps, *overrides, slow=None, resume=None):
        self.mark = work / "here"
        self.mark.unlink(missing_ok=True)
        env = os.environ | {
            "GRPO_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT / "tests" / "helpers"),
            "OMP_NUM_THREADS": "1",
        }
        env |= {"SLOW": json.dumps(slow), "SLOW_MARK": str(self.mark)}
        settings = [*SETTINGS, f"grpo.max_num_steps={num_steps}", f"logger.log_dir={work / 'logs'}", *overrides]
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
        return {pid: line for pid in found if (line := command(pid))}

    def end(self, number, pid=None):
        """Sends the signal, to train.sh or another; (exit code, seconds it took); nothing may be left."""
        before, start = self.processes(), time.monotonic()
        os.kill(pid or self.process.pid, number)
        code = self.process.wait(timeout=120)
        seconds = time.monotonic() - start
        end = time.monotonic() + 2
        while left := {pid: line for pid, line in before.items() if command(pid) == line}:
            assert time.monotonic() < end, left
            time.sleep(0.02)
        return code, seconds


def command(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return None if state in "ZX" else Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None


def run_to_the_end(work, num_steps, *overrides, **how):
    life = Life(work, num_steps, *overrides, **how)
    assert life.process.wait(timeout=900) == 0, life.log.read_text()[-3000:]
    return work / "logs" / "exp_001"


def told_to_stop(work, number, slow, *overrides, resume=None):
    """A run that is told to stop when it is in the slow phase, whose minute it does not wait for: saved, exit code 75.
    Its folder."""
    life = Life(work, 6, *overrides, slow=slow, resume=resume)
    life.wait_for(life.mark.exists)
    code, seconds = life.end(number)
    folder = resume or work / "logs" / "exp_001"
    assert (code, seconds < 40) == (75, True), (code, seconds, life.log.read_text()[-3000:])
    assert json.loads((folder / "exit.json").read_text())["code"] == 75
    assert newest_step(folder) == steps(folder)[-1], "the last whole step was saved"
    print(f"{signal.Signals(number).name} in {slow[0]}: step {newest_step(folder)} saved, {seconds:.1f} s")
    return folder


def newest_step(folder):
    """Of the run's committed checkpoints; 0 without any."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step_??????")), default=0)


def steps(folder):
    """Those in the run's metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return [json.loads(line)["step"] for line in lines if "train/loss" in line]


def at_step(folder, step):
    """The run's state at a step that has a checkpoint: all its tensors, its cursor, and what was sampled up to it."""
    path = folder / "checkpoints" / f"step_{step:06d}"
    tensors = {f"{file.name}/{name}": t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    samples = [record for record in records if record["step"] <= step and record["kind"] == "train"]
    return tensors, json.loads((path / "meta.json").read_text())["state"]["cursor"], samples


def assert_same(folder, reference, step):
    """The run whose parts ended by signals is at `step` what the unbroken one is, to the bit."""
    (tensors, cursor, samples), (ref_tensors, ref_cursor, ref_samples) = at_step(folder, step), at_step(reference, step)
    assert tensors.keys() == ref_tensors.keys() and any("/sharded.exp_avg_sq." in name for name in tensors)
    assert [name for name in tensors if not equal(tensors[name], ref_tensors[name])] == []
    assert cursor == ref_cursor and samples == ref_samples and len(samples) == 32 * step
