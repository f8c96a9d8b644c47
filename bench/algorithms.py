"""Every algorithm on the smoke task: same data, same steps, two seeds; a table of accuracy and seconds.

    python bench/algorithms.py [--steps 150] [--seeds 1 2] [--out logs/algorithms.md] [NAME ...]

Runs `./train.sh configs/smoke.yaml` with each row's overrides, one after the other, and writes the table after each
run, so that a cut run still counts. Accuracies are of the last validation (500 held-out problems, 4 samples each).
"""

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = {
    "GRPO": [],
    "Dr. GRPO": [
        "grpo.normalize_rewards=false",
        "grpo.use_leave_one_out_baseline=false",
        "loss_fn.token_level_loss=false",
        "loss_fn.loss_scale_factor=8",
    ],
    "DAPO": [
        "loss_fn.ratio_clip_max=0.28",
        "grpo.use_leave_one_out_baseline=false",
        "grpo.use_dynamic_sampling=true",
        "grpo.dynamic_sampling_max_gen_batches=20",  # once the task is solved no batch fills a step: the run then stops
        "grpo.val_period=25",
        "grpo.reward_shaping.enabled=true",
        "grpo.reward_shaping.overlong_buffer_length=3",
    ],
    "GSPO": ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
    "CISPO": ["loss_fn.use_cispo=true"],
    "REINFORCE++": ["grpo.adv_estimator.name=reinforce_plus_plus"],
    "KL + reference": ["loss_fn.reference_policy_kl_penalty=0.01"],
    "4 minibatches x 2 epochs": ["policy.train_global_batch_size=64", "policy.ppo_epochs=2"],
    # With two epochs the ratio is not always 1.
    "SAPO": ["loss_fn.token_loss=sapo", "loss_fn.token_level_loss=false", "policy.ppo_epochs=2"],
    "DPPO": ["loss_fn.token_loss=dppo", "loss_fn.old_logprobs=sampler", "policy.ppo_epochs=2"],
    "IPO": ["loss_fn.token_loss=ipo", "loss_fn.old_logprobs=sampler", "policy.ppo_epochs=2"],
    "dppo_tv": ["loss_fn.token_loss=dppo_tv", "policy.ppo_epochs=2"],
    "GMPO": ["loss_fn.token_loss=gmpo", "loss_fn.token_level_loss=false", "policy.ppo_epochs=2"],
    "GSPO-token": [
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.token_level_loss=false",
        "loss_fn.gspo_token=true",
        "policy.ppo_epochs=2",
    ],
    "off-policy mask": ["loss_fn.off_policy_mask_threshold=0.05", "policy.ppo_epochs=2"],
    "KL, r k3": ["loss_fn.reference_policy_kl_penalty=0.01", "loss_fn.kl_gradient=policy_ratio", "policy.ppo_epochs=2"],
    "rejected tokens": [
        "loss_fn.token_rejection_ratio_min=0.9",
        "loss_fn.token_rejection_ratio_max=1.1",
        "loss_fn.old_logprobs=sampler",
        "policy.ppo_epochs=2",
    ],
    "rejected sequences": [
        "loss_fn.sequence_rejection_ratio_min=0.98",
        "loss_fn.sequence_rejection_ratio_max=1.02",
        "loss_fn.old_logprobs=sampler",
        "policy.ppo_epochs=2",
    ],
    "MaxRL": ["grpo.adv_estimator.name=max_rl"],
    "OPO": ["grpo.adv_estimator.name=opo"],
    "GPG": ["grpo.adv_estimator.name=gpg", "loss_fn.disable_ppo_ratio=true"],
}


def run(overrides: list[str], seed: int, steps: int, log_dir: str) -> dict:
    """Accuracies before and after, their step, seconds of all steps, median seconds of one, largest logp gap."""
    words = [f"grpo.seed={seed}", f"grpo.max_num_steps={steps}", "grpo.val_period=0", f"logger.log_dir={log_dir}"]
    command = ["./train.sh", "configs/smoke.yaml", *words, "checkpointing.enabled=false", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    folders = sorted(Path(log_dir).glob("exp_*/metrics.jsonl"))
    if not folders:
        return {"failed": f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}"}
    folder = folders[-1].parent
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if "validation/greedy/accuracy" in line]
    steps_done = [line for line in lines if "train/reward" in line]
    seconds = [line["timing/train/total_step_time"] for line in steps_done]
    early = f" (then exit code {done.returncode}, after step {len(steps_done)})" if done.returncode else ""
    return {
        "before": [validations[0][f"validation/{mode}/accuracy"] for mode in ("greedy", "sampled")],
        "after": [validations[-1][f"validation/{mode}/accuracy"] for mode in ("greedy", "sampled")],
        "steps": f"{validations[-1]['step']}{early}",
        "seconds": sum(seconds),
        "median": statistics.median(seconds),
        "gap": max(line["train/logp_gap_max"] for line in steps_done),
    }


def table(results: dict[tuple[str, int], dict], arguments: argparse.Namespace) -> str:
    git = ["git", "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        f"Commit {commit}, {platform.processor() or platform.machine()}, 2 ranks of one thread; command: "
        f"`python bench/algorithms.py --steps {arguments.steps} --seeds {' '.join(map(str, arguments.seeds))}`",
        "",
        "| algorithm | seed | greedy | sampled | steps | seconds of steps | median step | largest logp gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, seed), r in results.items():
        if "failed" in r:
            lines.append(f"| {name} | {seed} | {r['failed']} | | | | | |")
            continue
        (greedy, sampled), (greedy_0, sampled_0) = r["after"], r["before"]
        lines.append(
            f"| {name} | {seed} | {greedy_0:.3f} -> {greedy:.3f} | {sampled_0:.3f} -> {sampled:.3f} | {r['steps']} | "
            f"{r['seconds']:.0f} | {r['median']:.2f} s | {r['gap']:.1e} |"
        )
    lines += ["", "Overrides of `configs/smoke.yaml`:", ""]
    lines += [f"- {name}: {' '.join(f'`{word}`' for word in words) or 'none'}" for name, words in ALGORITHMS.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=[], help=f"of {', '.join(ALGORITHMS)}; none = all")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "logs" / "algorithms.md")
    arguments = parser.parse_args()
    results: dict[tuple[str, int], dict] = {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or ALGORITHMS:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as log_dir:
                results[name, seed] = run(ALGORITHMS[name], seed, arguments.steps, log_dir)
            print(name, seed, results[name, seed], flush=True)
            arguments.out.write_text(table(results, arguments))


if __name__ == "__main__":
    main()
