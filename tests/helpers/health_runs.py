"""The runs behind run/health.py: what each fires, and the metrics that the rules read of it, in tests/run/health.

python tests/helpers/health_runs.py run [NAME ...]      runs them anew; keeps their metrics in tests/run/health
python tests/helpers/health_runs.py table               writes tests/run/health/README.md from what is kept
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


def margins(steps: list[dict[str, float]]) -> dict[str, str]:
    """How near a run comes to each threshold: its worst value at any step, of what the rule compares."""
    worst = dict.fromkeys(("gap", "gradient", "clipped", "drop", "cut", "unread", "entropy", "flat"), 0.0)
    flat = 0
    for n in range(1, len(steps) + 1):
        seen, recent, few = steps[:n], steps[:n][-health.RECENT :], steps[:n][-health.FEW :]
        accuracy = health.mean(recent, "accuracy")
        flat = flat + 1 if health.has_no_signal(steps[n - 1]) and accuracy < health.MOST else 0
        now = {"gap": health.mean(recent, health.GAP), "flat": flat}
        now["clipped"] = sum(health.mean(recent, name) for name in health.CLIPPED)
        now["cut"] = min(health.column(few, "truncation_rate"))
        now["unread"] = min(health.column(few, "outcome/parse_fail"))
        if accuracy < health.MOST and n >= health.RECENT:
            now["entropy"] = 0.005 / health.mean(recent, "entropy")
        first = [x for x in health.column(seen[:15][:-5], "grad_norm") if x > 0]
        if len(first) >= health.FEW:
            middle = sorted(health.column(recent, "grad_norm"))[2]
            now["gradient"] = middle / max(1, 30 * sorted(first)[len(first) // 2])
        if n >= 2 * health.START:
            first, last = (health.mean(part, "reward") for part in (seen[: health.START], seen[-health.START :]))
            now["drop"] = (first - last) / (abs(first) / 2 or math.inf)
        worst |= {name: max(worst[name], value) for name, value in now.items()}
    worst["gap"] /= max(0.02, 3 * health.mean(steps[: health.RECENT], health.GAP))
    limits = {"clipped": 0.2, "cut": health.MOST, "unread": health.MOST, "flat": health.RECENT}
    return {name: f"{value / limits.get(name, 1):.0%}" for name, value in worst.items()}


def table() -> str:
    """The text of tests/run/health/README.md."""
    lines = [
        "# What real runs fire",
        "",
        "The metrics that the rules of run/health.py read, of whole runs, a file each: a line with the command and the",
        "columns, then a step a line, in 6 digits. `python tests/helpers/health_runs.py run` makes them anew (2 CPU",
        "cores, half an hour), `... table` this page. smollm2 is `examples/smollm2/metrics.jsonl`.",
        "",
        "## Sick runs",
        "",
        "| run | what differs from configs/smoke.yaml | fires first | at step | what follows, at step |",
        "|---|---|---|---|---|",
    ]
    for name, (_, arguments) in SICK.items():
        (first, step), *others = fired(kept(name)).items()
        changes = " ".join(f"`{word}`" for word in arguments if word not in (SMOKE, SHORT))
        follow = ", ".join(f"{rule} {at}" for rule, at in others) or "nothing"
        lines.append(f"| {name} | {changes} | {first} | {step} | {follow} |")
    lines += [
        "",
        "## Healthy runs",
        "",
        "They fire nothing. How near each comes to a threshold, at its worst step: 100% is the threshold.",
        "",
        "- gap, gradient, clipped, cut, unread: the value over the threshold (logp_gap_grows, gradient_explodes,",
        "  many_clipped, truncated, parse_fail)",
        "- drop: the fall of the reward over ten steps, over half of what it was in the first ten (reward_fell)",
        "- entropy: 0.005 nats over the entropy, where less than 90% of the answers are right (entropy_gone)",
        "- flat: steps in a row without a gradient and with less than 90% of the answers right, of 5 (no_gradient)",
        "",
        "| run | steps | gap | gradient | clipped | drop | cut | unread | entropy | flat | solved |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (*HEALTHY, "smollm2"):
        steps = kept(name)
        solved = f"at {step}" if (step := fired(steps).get("solved")) else "no"
        lines.append(f"| {name} | {len(steps)} | {' | '.join(margins(steps).values())} | {solved} |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    arguments = HEALTHY | {name: arguments for name, (_, arguments) in SICK.items()}
    if words[:1] == ["run"]:
        for name in words[1:] or arguments:
            with tempfile.TemporaryDirectory() as log_dir:
                code, steps = run(arguments[name], Path(log_dir))
            keep(name, arguments[name], steps)
            print(f"{name}: exit code {code}, {len(steps)} steps, fires {fired(steps)}", flush=True)
    elif words == ["table"]:
        (KEPT / "README.md").write_text(table())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
