"""The smoke task cut to seconds: arguments of grpo.py and eval.py for a run over few problems."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "examples" / "arithmetic" / "starter"
NUM_ROWS = 40  # of each file: reading all of them takes longer than four steps
SETTINGS = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=8",
    "grpo.max_num_steps=4",
    "grpo.max_val_samples=20",
    "grpo.val_num_generations_per_prompt=2",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.scheduler.warmup_steps=0",
    "checkpointing.save_period=2",
    "logger.num_samples_to_log=32",
)


def write_rows(folder: Path) -> None:
    for name in ("train.jsonl", "heldout.jsonl"):
        rows = (STARTER.parent / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(rows[:NUM_ROWS]))


def arguments(folder: Path) -> list[str]:
    """Of a run whose rows are in the folder (write_rows) and whose log goes there; from the root of the repository."""
    files = [f"data.train.data_path={folder}/train.jsonl", f"data.validation.data_path={folder}/heldout.jsonl"]
    return ["configs/smoke.yaml", f"logger.log_dir={folder}", f"policy.model_name={STARTER}", *files, *SETTINGS]
