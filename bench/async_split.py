"""Three ways to lay out one GRPO run on two cores, with responses whose lengths have a long tail: which one pays?

    python -m bench.async_split [--repeats 3] [--steps 18] [--out bench/results/async_split_DATE.json] [MODE ...]

Each mode is a real job of `grpo.main` on two ranks of one thread, with real vLLM engines and the starter model:
`colocated` (both ranks generate, then train), `carry-over` (the same with grpo.async_grpo: what is unfinished goes on
in the next step), `split` (one rank generates, one trains, in step), `asynchronous split` (both at once, a step apart).
Responses end where a table says, by the sample's seed, not by an end token; rewards are a coin's, so that every token
is trained. Two epochs and a reference make generation half of a colocated step, as with 8B models on 8 GPUs.

The window is from one weight sync to a later one, away from both ends of the run. A rank is at work while its main
thread runs, or is ready to run and waits for a core (/proc/PID/task/PID/schedstat); the rest of the window it is idle.
`ready` is the share of such waits: others use this machine. They slow a run, so the fastest repeat counts; what depends
less on them are the seconds of a core that each rank needs for a step, below which no step can be.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from envs import Environment, StepResult

# 64 quantiles of a log-normal distribution with median 32 and sigma 1: the mean is 52, the longest 359 tokens.
LENGTHS = [round(32 * math.exp(statistics.NormalDist().inv_cdf((i + 0.5) / 64))) for i in range(64)]
SETTINGS = "grpo.num_prompts_per_step=8 grpo.num_generations_per_prompt=8 grpo.val_period=0 grpo.val_at_start=false "
SETTINGS += "grpo.val_at_end=false grpo.canary_period=0 checkpointing.enabled=false logger.tensorboard_enabled=false "
SETTINGS += "policy.max_total_sequence_length=512 policy.generation.max_new_tokens=400 "
SETTINGS += "checkpointing.save_hf_at_end=false data.train.env_name=bench.async_split:Coin "
SETTINGS += (
    "loss_fn.use_importance_sampling_correction=true policy.ppo_epochs=2 loss_fn.reference_policy_kl_penalty=0.01"
)
ASYNC = "grpo.async_grpo.enabled=true grpo.async_grpo.max_trajectory_age_steps=1 "
SPLIT = "policy.generation.colocated.enabled=false policy.generation.colocated.resources.gpus_per_node=1 "
MODES = {"colocated": "", "carry-over": ASYNC, "split": SPLIT, "asynchronous split": ASYNC + SPLIT}
MODES["asynchronous split"] += "grpo.async_grpo.in_flight_weight_updates=true"
FIRST, LAST = 3, 2  # steps before and after the window


class Coin(Environment):
    """Rewards that no policy can learn: every group has both kinds, so every token has an advantage."""

    def step(self, turns):
        heads = [sum(turn.completion_ids) % 2 == 0 for turn in turns]
        return [StepResult(float(head), "ok" if head else "wrong") for head in heads]


def at_work() -> tuple[float, float, float]:
    """Seconds: the clock's, those in which the main thread ran, and those in which it was ready to."""
    ran, ready, _ = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
    return time.perf_counter(), int(ran) / 1e9, int(ready) / 1e9


def rank(words: list[str], folder: Path) -> int:
    """grpo.main with responses of the table's lengths; writes what this rank had done at each weight sync."""
    import engine
    import grpo

    marks: dict[int, tuple] = {}
    sync, sampling = engine.Engine.sync, engine.SamplingParams
    sync_weights = grpo.sync_weights

    def table_params(*, seed, max_tokens, stop_token_ids, **others):
        length = min(max_tokens, LENGTHS[(seed or 0) % len(LENGTHS)])
        return sampling(seed=seed, max_tokens=length, ignore_eos=True, **others)

    def generator_sync(self, weights, version):
        num_bytes = sync(self, weights, version)
        marks[version] = at_work()
        return num_bytes

    def trainer_sync(model, engine, version):
        num_bytes = sync_weights(model, engine, version)
        marks[version] = at_work()
        return num_bytes

    engine.SamplingParams, engine.Engine.sync, grpo.sync_weights = table_params, generator_sync, trainer_sync
    number = os.environ["RANK"]  # in a split job grpo changes it
    sys.argv = ["grpo.py", *words]
    code = grpo.main()
    (folder / f"rank_{number}.json").write_text(json.dumps(marks))
    return code


def job(mode: str, num_steps: int, folder: Path) -> dict:
    """Runs a mode, of `num_steps` steps; its figures."""
    words = ["configs/smoke.yaml", *SETTINGS.split(), *MODES[mode].split()]
    words += [f"grpo.max_num_steps={num_steps}", f"logger.log_dir={folder}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "bench.async_split", "--rank", str(folder), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "GRPO_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{mode}: {(done.stdout + done.stderr)[-3000:]}")
    return figures(folder, num_steps)


def figures(folder: Path, num_steps: int) -> dict:
    """Of a run; the window is all but FIRST and LAST of its steps."""
    first, last = str(FIRST), str(num_steps - LAST)
    marks = [json.loads((folder / f"rank_{number}.json").read_text()) for number in (0, 1)]
    used = [np.subtract(each[last], each[first]) for each in marks]  # [clock, ran, ready] of each rank
    log = map(json.loads, (folder / "exp_001" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in log if FIRST < line["step"] <= num_steps - LAST]
    tokens = sum(line["train/total_gen_tokens"] for line in steps)
    timings = [name for name in steps[-1] if name.startswith(("timing/train/", "idle/")) and "_per_" not in name]
    return {
        "steps_per_second": len(steps) / used[0][0],
        "tokens_per_second": tokens / used[0][0],
        "tokens_per_step": tokens / len(steps),
        "core_seconds_of_a_step": [ran / len(steps) for _, ran, _ in used],
        "idle": [1 - (ran + ready) / clock for clock, ran, ready in used],
        "ready": [ready / clock for clock, _, ready in used],
        "seconds_of_a_step": {name: statistics.median(line[name] for line in steps) for name in timings},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)}; none = all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--out", type=Path, help="the results as JSON, added to those that are there")
    arguments = parser.parse_args()
    git = ["git", "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    results = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else []
    for _ in range(arguments.repeats):  # in turns: what else the machine does changes slowly
        for mode in arguments.modes or MODES:
            with tempfile.TemporaryDirectory() as folder:
                measured = job(mode, arguments.steps, Path(folder))
            results.append({"mode": mode, "steps": arguments.steps, "commit": commit} | measured)
            print(json.dumps(results[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        from system.exits import exit_process

        exit_process(rank(sys.argv[3:], Path(sys.argv[2])))
    main()
