"""What a sampled token teaches: settings side by side on rows made of the smoke task, at equal generated tokens.

    python bench/learning.py prompts        [--seeds 42 43 44] [--out logs/prompts.md]
    python bench/learning.py units          after examples/smollm2/get_model.py
    python bench/learning.py best_of_k --model FOLDER          FOLDER: the hf_model of `./train.sh`

prompts: 600 rows, of which the starter always solves 120, 120 need the carry, and 360 have an answer that no reply
gives. Scored on held-out sums with a carry. units: 30 problems of configs/smollm2.yaml, and 60 with an answer that no
reply gives, scored on its held-out ones. best_of_k: sums with a carry, whose expected answer is the right sum for
60% of the rows and the sum without its carry for 40%, which the prompt does not tell. Scored on held-out rows of the
same kind. Runs `./train.sh` with each setting and seed, one after the other; the table is written after each.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from examples.smollm2 import conversions

SELECTION = "data.train.prompt_selection"
DYNAMIC = ["grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=40"]
DYNAMIC += ["grpo.dynamic_sampling_when_exhausted=train"]
SETTINGS = {
    "prompts": {
        "uniform": [],
        "dynamic sampling": DYNAMIC,
        "p(1-p)": [f"{SELECTION}=p(1-p)"],
        "thompson": [f"{SELECTION}=thompson"],
        "p(1-p), dynamic sampling": [f"{SELECTION}=p(1-p)", *DYNAMIC],
        "thompson, dynamic sampling": [f"{SELECTION}=thompson", *DYNAMIC],
    },
    "units": {
        "uniform": [],
        "p(1-p)": [f"{SELECTION}=p(1-p)"],
        "thompson": [f"{SELECTION}=thompson"],
        "dynamic sampling": DYNAMIC,
    },
    "best_of_k": {
        "grpo": [],
        "pkpo, pass_k 4": ["grpo.adv_estimator.name=pkpo"],
        "grpo_passk": ["grpo.adv_estimator.name=grpo_passk"],
    },
}
ACCURACIES = ["greedy/accuracy", "sampled/accuracy"]
COLUMNS = {"prompts": ACCURACIES, "units": ACCURACIES, "best_of_k": ["sampled/accuracy", "sampled/pass_at_4"]}
TOKENS = {"prompts": [30_000, 60_000, 120_000], "units": [4_000, 8_000], "best_of_k": [100_000]}  # generated
TOKENS_OF_STEP = {"prompts": 850, "units": 400, "best_of_k": 850}  # about
SMOKE = ["configs/smoke.yaml", "grpo.val_num_generations_per_prompt=8", "grpo.max_val_samples=200"]
UNITS = ["configs/smollm2.yaml", "grpo.val_num_generations_per_prompt=3", "grpo.max_val_samples=100"]
UNITS += ["grpo.max_num_epochs=100", "grpo.val_at_start=false", "grpo.val_at_end=false"]
RECIPES = {"prompts": SMOKE, "units": UNITS, "best_of_k": SMOKE}


def carry_and_other_sums(name: str) -> tuple[list[dict], list[dict]]:
    with_carry, others = [], []
    for line in (ROOT / "examples/arithmetic" / name).read_text().splitlines():
        row = json.loads(line)
        first, second = row["messages"][0]["content"].strip("=").split("+")
        needs_carry = int(first[-1]) + int(second[-1]) >= 10
        (with_carry if needs_carry else others).append(row)
    return with_carry, others


def plus(row: dict, number: int) -> dict:
    return row | {"answer": str(int(row["answer"]) + number)}


def write_rows(task: str, folder: Path) -> None:
    if task == "units":
        rows = [conversions.row(problem) for problem in conversions.draw_both_sets()[0][:90]]
        rows_of = {"train": rows[:30] + [plus(row, 100_000) for row in rows[30:]]}
        rows_of["heldout"] = [conversions.row(problem) for problem in conversions.draw_both_sets()[1]]
    else:
        rows_of = rows_of_sums(task)
    for name, rows in rows_of.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of_sums(task: str) -> dict[str, list[dict]]:
    chance = random.Random(0)
    with_carry, others = carry_and_other_sums("train.jsonl")
    held_out, _ = carry_and_other_sums("heldout.jsonl")
    if task == "prompts":
        impossible = [plus(row, 1000) for row in with_carry[120:480]]
        train = others[:120] + with_carry[:120] + impossible
    else:
        train = [plus(row, -10 * (chance.random() < 0.4)) for row in with_carry]
        held_out = [plus(row, -10 * (chance.random() < 0.4)) for row in held_out]
    return {"train": train, "heldout": held_out}


def run(task: str, words: list[str], seed: int, model: str | None, folder: Path) -> dict[str, dict[int, float]]:
    """Column -> generated tokens -> its value at the last validation before them."""
    command = ["./train.sh", "--nproc_per_node=1", *RECIPES[task], f"logger.log_dir={folder}"]
    command += ["data.train.dataset_name=null", "data.validation.dataset_name=null"]
    command += ["data.train.output_key=answer", "data.validation.output_key=answer"]
    command += [f"data.train.data_path={folder}/train.jsonl", f"data.validation.data_path={folder}/heldout.jsonl"]
    period = 1 if DYNAMIC[0] in words else 5  # a step may then draw ten batches
    command += [f"grpo.seed={seed}", f"grpo.val_period={period}"]
    command += ["checkpointing.enabled=false", "checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false"]
    num_steps = TOKENS[task][-1] // TOKENS_OF_STEP[task]
    if DYNAMIC[0] in words:
        num_steps //= 2
    command.append(f"grpo.max_num_steps={num_steps}")
    if model:
        command.append(f"policy.model_name={model}")
    subprocess.run([*command, *words], cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, dict[int, float]] = {column: {} for column in COLUMNS[task]}
    num_tokens = 0.0
    for line in (folder / "exp_001" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        num_tokens += record.get("train/total_gen_tokens", 0)
        for column in COLUMNS[task]:
            if f"validation/{column}" in record:
                for limit in TOKENS[task]:
                    if num_tokens <= limit:
                        found[column][limit] = record[f"validation/{column}"]
    return found


def table(task: str, results: dict[str, list[dict[str, dict[int, float]]]]) -> str:
    columns = [(column, limit) for column in COLUMNS[task] for limit in TOKENS[task]]
    lines = ["| setting | " + " | ".join(f"{column} at {limit:,}" for column, limit in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for name, found in results.items():
        cells = []
        for column, limit in columns:
            values = [of_seed[column][limit] for of_seed in found]
            cells.append(f"**{statistics.mean(values):.3f}** ({', '.join(f'{value:.3f}' for value in values)})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=[*SETTINGS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    task = arguments.task
    out = arguments.out or ROOT / "logs" / f"{task}.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, dict[int, float]]]] = {}
    for seed in arguments.seeds:
        for name, words in SETTINGS[task].items():
            with tempfile.TemporaryDirectory() as folder:
                write_rows(task, Path(folder))
                results.setdefault(name, []).append(run(task, words, seed, arguments.model, Path(folder)))
            out.write_text(table(task, results))
            print(name, seed, results[name][-1], flush=True)


if __name__ == "__main__":
    main()
