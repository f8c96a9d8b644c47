"""The runs that set run/health.py: what each fires, and the metrics that the rules read, in tests/run/health.

python tests/helpers/health_runs.py [NAME ...]      runs them anew; keeps their metrics in tests/run/health
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from bench.golden import TASKS
from run import health

KEPT = ROOT / "tests" / "run" / "health"
SMOKE = "configs/smoke.yaml"
# Only training; the samples of a step do not depend on any of these.
QUIET = [
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "checkpointing.enabled=false"),
    *("checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false"),
]
HEALTHY = {
    "smoke_42": TASKS["smoke"],
    "smoke_43": [SMOKE, "grpo.seed=43"],
    "smoke_44": [SMOKE, "grpo.seed=44"],
    **{name: TASKS[name] for name in ("three_tasks", "two_turns", "dr_grpo", "gspo", "cispo", "reinforce_plus_plus")},
    "dapo": [*TASKS["dapo"], "grpo.dynamic_sampling_max_gen_batches=20"],  # ends with exit code 3 once it is solved
    "kl": TASKS["kl"],
    "minibatches": TASKS["minibatches"],
    "lora": [SMOKE, "policy.dtensor_cfg.lora_cfg.enabled=true", "policy.optimizer.kwargs.lr=3e-3"],
    "async": [SMOKE, "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"],
}
SHORT = "grpo.max_num_steps=25"
SICK = {  # name -> (the rule that fires first, arguments)
    "stale_layer": (
        "logp_gap_grows",
        [SMOKE, "grpo.max_num_steps=40", "data.train.env_name=sick:StaleLayer", "grpo.logp_gap_limit=null"],
    ),
    "wrong_answers": ("no_gradient", [SMOKE, SHORT, "data.train.processor=sick:wrong_answer"]),
    "mostly_wrong": ("few_groups", [SMOKE, "grpo.max_num_steps=40", "data.train.processor=sick:mostly_wrong_answer"]),
    "constant_reward": ("no_gradient", [SMOKE, SHORT, "data.train.env_name=sick:constant_reward"]),
    "one_token": ("truncated", [SMOKE, SHORT, "policy.generation.max_new_tokens=1"]),
    "rate_0.05": ("reward_fell", [SMOKE, SHORT, "policy.optimizer.kwargs.lr=0.05"]),
    "rate_10": ("reward_fell", [SMOKE, SHORT, "policy.optimizer.kwargs.lr=10"]),
    "cold": ("entropy_gone", [SMOKE, "grpo.max_num_steps=40", "policy.generation.temperature=0.1"]),
    "narrow_clip": (
        "many_clipped",
        [
            *(SMOKE, "grpo.max_num_steps=12", "policy.train_global_batch_size=128", "policy.ppo_epochs=16"),
            *("loss_fn.ratio_clip_min=3e-4", "loss_fn.ratio_clip_max=4e-4"),
        ],
    ),
    "unbounded_reward": (
        "gradient_explodes",
        [
            *(SMOKE, "grpo.max_num_steps=60", "data.train.env_name=sick:size_of_number"),
            *("grpo.normalize_rewards=false", "policy.optimizer.kwargs.lr=1e-3"),
        ],
    ),
    "near_ties": ("one_group", [*(SMOKE, SHORT, "grpo.reward_std_floor=0", "data.train.env_name=sick:NearTies")]),
    "no_box": ("parse_fail", [SMOKE, SHORT, "data.default.env_name=math"]),
}


def run(arguments: list[str], log_dir: Path) -> tuple[int, list[dict[str, float]]]:
    """The exit code of ./train.sh, and the training steps of its metrics.jsonl."""
    command = ["./train.sh", *arguments, *QUIET, f"logger.log_dir={log_dir}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "tests/helpers"}, capture_output=True)
    return done.returncode, training_steps(log_dir / "exp_001" / "metrics.jsonl")


def training_steps(file: Path) -> list[dict[str, float]]:
    """metric -> value of each training step, without `train/`, and `step`."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [{k.removeprefix("train/"): v for k, v in x.items()} for x in records if "train/reward" in x]


def keep(name: str, arguments: list[str], steps: list[dict[str, float]]) -> None:
    """What the rules read: a line with the command and the columns, and one of values for each step, in 6 digits."""
    prefix = "PYTHONPATH=tests/helpers " if "sick:" in " ".join(arguments) else ""
    head = {"command": f"{prefix}./train.sh {' '.join([*arguments, *QUIET])}", "columns": health.READ}
    rows = [[float(f"{step.get(column, math.nan):.6g}") for column in health.READ] for step in steps]
    lines = [json.dumps(row, separators=(",", ":")).replace(".0,", ",") for row in rows]
    (KEPT / f"{name}.jsonl").write_text("\n".join([json.dumps(head), *lines]) + "\n")


def kept(name: str) -> list[dict[str, float]]:
    """The steps of a kept run, as `training_steps` gives them. smollm2: the metrics of examples/smollm2, whole."""
    if name == "smollm2":
        return training_steps(ROOT / "examples" / "smollm2" / "metrics.jsonl")
    head, *rows = map(json.loads, (KEPT / f"{name}.jsonl").read_text().splitlines())
    return [dict(zip(head["columns"], row, strict=True)) for row in rows]


def fired(steps: list[dict[str, float]]) -> dict[str, int]:
    """Rule, or `solved` -> the first step at which it holds, by steps and then in the order of the rules."""
    report = health.Health()
    for number, step in enumerate(steps, 1):
        report.add(number, step)
    return dict(sorted(((name, held[0]) for name, held in report.held.items()), key=lambda item: item[1]))


def main(names: list[str]) -> None:
    arguments = HEALTHY | {name: arguments for name, (_, arguments) in SICK.items()}
    for name in names or arguments:
        with tempfile.TemporaryDirectory() as log_dir:
            code, steps = run(arguments[name], Path(log_dir))
        keep(name, arguments[name], steps)
        print(f"{name}: exit code {code}, {len(steps)} steps, fires {fired(steps)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
