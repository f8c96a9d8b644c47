"""The way of one step through the code, traced: which files and functions it enters, stage by stage.

    python bench/walk.py [--long] [--write] [key.sub=value ...]

Runs the first step of `configs/three_tasks.yaml` with the math task alone, one prompt and four samples, on one rank and
with the real engine, under `sys.setprofile`. Prints a table of stages; docs/walkthrough.md holds it. A stage is a timed
phase of `grpo.train`, and what follows the last one. Operation (run/, base/system/) is listed apart: no
token, reward or gradient goes through it. With --long every function in the order of its first call. --write: the step
as docs/walkthrough.md reads it, its samples, metrics and functions, to RECORDING.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

RECORDING = ROOT / "bench" / "results" / "walk_2026-11-22.json"
SETTINGS = [
    # At the seed of the config, 42, the four rewards of the first step differ: there is a gradient.
    *("grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=1"),
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "grpo.canary_period=0"),
    *("data.use_multiple_dataloader=false", "data.num_prompts_per_dataloader=null"),
    *("data.train=null", "data.train.data_path=examples/three_tasks/subtract.jsonl", "data.train.env_name=math"),
    *("checkpointing.enabled=false", "checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false"),
]
OPERATION = ("run/", "base/system/", "base/check/", "base/plan/")


class Trace:
    """Calls of our functions while it is on: (stage, file, function) in the order of first calls, and crossings."""

    def __init__(self):
        self.stage = "before the first stage"
        self.calls: dict[tuple[str, str, str], int] = {}
        self.crossings: Counter[str] = Counter()
        self.stages: list[str] = []
        self.step: dict = {}  # the samples and the metrics

    def enter(self, stage: str) -> None:
        self.stage = stage
        self.stages.append(stage)

    def __call__(self, frame, event, argument) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(f"{ROOT}/"):
            return
        file = frame.f_code.co_filename[len(str(ROOT)) + 1 :]
        if file.startswith((".venv", "bench")):
            return
        key = (self.stage, file, frame.f_code.co_qualname)
        self.calls[key] = self.calls.get(key, 0) + 1
        caller = frame.f_back
        if caller and caller.f_code.co_filename != frame.f_code.co_filename:
            self.crossings[self.stage] += 1


def trace_step(words: list[str]) -> Trace:
    """Runs the program, and traces its only step."""
    import grpo
    from run import steps

    trace = Trace()
    remaining_steps, end_step, sample_metrics = steps.remaining_steps, steps.end_step, grpo.sample_metrics

    def traced_steps(run):
        for step in remaining_steps(run):
            enter = run.timer.enter
            run.timer.enter = lambda phase, enter=enter: (trace.enter(phase), enter(phase))
            sys.setprofile(trace)
            yield step

    def traced_sample_metrics(*samples):
        trace.enter("counters and log")
        return sample_metrics(*samples)

    def traced_end_step(run, samples, minibatches, metrics):
        end_step(run, samples, minibatches, metrics)
        sys.setprofile(None)
        trace.step = {"samples": [recorded(sample) for sample in samples.trained], "metrics": metrics}

    steps.remaining_steps, steps.end_step = traced_steps, traced_end_step
    grpo.sample_metrics = traced_sample_metrics
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["grpo.py", "configs/three_tasks.yaml", *SETTINGS, f"logger.log_dir={folder}", *words]
        code = grpo.main()
    assert code == 0, code
    return trace


def files_of_stages(trace: Trace) -> dict[str, dict[str, list[str]]]:
    """Stage -> file -> functions, in the order of first calls, without operation."""
    stages: dict[str, dict[str, list[str]]] = {}
    for stage, file, function in trace.calls:
        name = function.replace(".<locals>", "")
        if not file.startswith(OPERATION) and "<" not in name:
            stages.setdefault(stage, {}).setdefault(file, []).append(name)
    return stages


def recorded(sample) -> dict:
    """The sample with its one sequence, and each column of the tokens by itself."""
    record = asdict(sample)
    (sequence,) = record.pop("sequences")
    tokens = sequence.pop("tokens")
    return record | sequence | {name: tokens[name] for name in tokens.dtype.names}


def table(trace: Trace) -> str:
    lines = ["| stage | files, in the order in which they are entered: functions |", "|---|---|"]
    for stage, files in files_of_stages(trace).items():
        cells = [f"**{file}** {', '.join(f'`{name}`' for name in names)}" for file, names in files.items()]
        lines.append(f"| {stage} | {'; '.join(cells)} |")
    ways = list(dict.fromkeys(file for _, file, _ in trace.calls if not file.startswith(OPERATION)))
    rest = list(dict.fromkeys(file for _, file, _ in trace.calls if file.startswith(OPERATION)))
    again = [stage for stage, count in Counter(trace.stages).items() if count > 1]
    lines += [
        "",
        f"{len(ways)} files: {', '.join(ways)}; and judges/math.py, in a worker process.",
        f"Operation, {len(rest)} files: {', '.join(rest)}.",
        f"Stages visited twice: {', '.join(again) or 'none'}.",
    ]
    return "\n".join(lines)


def recording(trace: Trace, words: list[str]) -> str:
    """What docs/walkthrough.md reads; a sample's floats are the shortest that give its float32 numbers again."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return [float(str(x)) for x in value] if value.dtype == np.float32 else value.tolist()
        return value.item() if isinstance(value, np.generic) else value

    operation = dict.fromkeys(file for _, file, _ in trace.calls if file.startswith(OPERATION))
    content = {"settings": [*SETTINGS, *words], "operation": list(operation)} | trace.step
    content |= {"stages": files_of_stages(trace)}
    lines = [f"{json.dumps(name)}: {json.dumps(value, default=plain)}" for name, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    options = {word for word in sys.argv[1:] if word.startswith("--")}
    words = [word for word in sys.argv[1:] if word not in options]
    os.chdir(ROOT)
    trace = trace_step(words)
    if "--write" in options:
        RECORDING.write_text(recording(trace, words), encoding="utf-8")
    if "--long" in options:
        for stage, file, function in trace.calls:
            print(f"{stage:32} {file:28} {function}  x{trace.calls[stage, file, function]}")
    print(table(trace))
    from base.system.exits import exit_process

    exit_process(0)


if __name__ == "__main__":
    main()
