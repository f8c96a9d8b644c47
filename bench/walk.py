"""The way of one step through the code, traced: which files and functions it enters, stage by stage.

    python bench/walk.py [--long] [key.sub=value ...]

Runs the third step of `configs/three_tasks.yaml` with the math task alone, one prompt and four samples, on one rank and
with the real engine, under `sys.setprofile`. Prints a table of stages; docs/walkthrough.md holds it. A stage is a timed
phase of `grpo.train`. Operation (run/, system/) is listed apart: no token, reward or gradient goes through it. With
--long every function in the order of its first call.
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

STEP = 3
SETTINGS = [
    *("grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=4", f"grpo.max_num_steps={STEP}"),
    "grpo.seed=1",  # with which the four rewards of that step differ: there is a gradient
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "grpo.canary_period=0"),
    *("data.use_multiple_dataloader=false", "data.num_prompts_per_dataloader=null"),
    *("data.train=null", "data.train.data_path=examples/three_tasks/subtract.jsonl", "data.train.env_name=math"),
    *("checkpointing.enabled=false", "checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false"),
]
OPERATION = ("run/", "system/")


class Trace:
    """Calls of our functions while it is on: (stage, file, function) in the order of first calls, and crossings."""

    def __init__(self):
        self.stage = "before the first stage"
        self.calls: dict[tuple[str, str, str], int] = {}
        self.crossings: Counter[str] = Counter()
        self.stages: list[str] = []

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
    """Runs the program, and traces its last step."""
    import grpo
    from run import setup

    trace, steps, end_step = Trace(), setup.steps, setup.end_step

    def traced_steps(run):
        for step in steps(run):
            if step == STEP:
                enter = run.timer.enter
                run.timer.enter = lambda phase, enter=enter: (trace.enter(phase), enter(phase))
                sys.setprofile(trace)
            yield step

    def traced_end_step(run, *arguments):
        if sys.getprofile():
            trace.enter("counters and log")
        end_step(run, *arguments)
        sys.setprofile(None)

    setup.steps, setup.end_step = traced_steps, traced_end_step
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["grpo.py", "configs/three_tasks.yaml", *SETTINGS, f"logger.log_dir={folder}", *words]
        code = grpo.main()
    assert code == 0, code
    return trace


def table(trace: Trace) -> str:
    lines = ["| stage | files, in the order in which they are entered: functions |", "|---|---|"]
    for stage in dict.fromkeys(stage for stage, _, _ in trace.calls):
        files: dict[str, list[str]] = {}
        for where, file, function in trace.calls:
            name = function.replace(".<locals>", "")
            if where == stage and not file.startswith(OPERATION) and "<" not in name:
                files.setdefault(file, []).append(name)
        if files:
            cells = [f"**{file}** {', '.join(f'`{name}`' for name in names)}" for file, names in files.items()]
            lines.append(f"| {stage} | {'; '.join(cells)} |")
    ways = list(dict.fromkeys(file for _, file, _ in trace.calls if not file.startswith(OPERATION)))
    rest = list(dict.fromkeys(file for _, file, _ in trace.calls if file.startswith(OPERATION)))
    again = [stage for stage, count in Counter(trace.stages).items() if count > 1]
    lines += [
        "",
        f"{len(ways)} files: {', '.join(ways)}; and graders/math_grader.py, in a worker process.",
        f"Operation, {len(rest)} files: {', '.join(rest)}.",
        f"Stages visited twice: {', '.join(again) or 'none'}.",
    ]
    return "\n".join(lines)


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--long"]
    os.chdir(ROOT)
    trace = trace_step(words)
    if "--long" in sys.argv:
        for stage, file, function in trace.calls:
            print(f"{stage:32} {file:28} {function}  x{trace.calls[stage, file, function]}")
    print(table(trace))
    from system.exits import exit_process

    exit_process(0)


if __name__ == "__main__":
    main()
