"""A LoRA run that is killed (SIGKILL) and resumed: PASS or FAIL, and the seconds of both parts.

    python -m bench.gpu_killed --out FOLDER [key=value ...]        --dry: on a CPU

The smoke recipe with adapters of rank 8 saves every second step. It is killed after its fifth step has begun, and goes
on from its newest checkpoint to step 8. The result is metrics.jsonl of the run, each step once, and the exit code.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.head import ROOT

NUM_STEPS = 8
KILLED_AFTER = 4
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8")
QUIET = ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "checkpointing.save_hf_at_end=false")


def rows_of(logs: Path) -> list[dict]:
    """The steps that the run has logged; a line that is being written is left out."""
    rows = []
    for file in logs.glob("exp_*/metrics.jsonl"):
        rows += [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="*", help="key=value")
    args = parser.parse_args()
    logs = Path(tempfile.mkdtemp())
    words = [f"logger.log_dir={logs}", f"grpo.max_num_steps={NUM_STEPS}", "checkpointing.save_period=2"]
    words += ["policy.generation.vllm_cfg.enforce_eager=true", *LORA, *QUIET]
    if not args.dry:
        words += ["policy.precision=bfloat16", "grpo.logp_gap_limit=0.1"]
        words += ["policy.generation.vllm_cfg.gpu_memory_utilization=0.05"]
    command = [sys.executable, "grpo.py", "configs/smoke.yaml", *words, *args.words]

    begun = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and len(rows_of(logs)) < KILLED_AFTER:
        time.sleep(0.02)
    process.kill()
    process.wait()
    killed_after = time.perf_counter() - begun
    num_before = len(rows_of(logs))

    begun = time.perf_counter()
    code = subprocess.run([*command, "checkpointing.resume=auto"], cwd=ROOT).returncode
    resumed_after = time.perf_counter() - begun
    rows = rows_of(logs)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "killed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [row["step"] for row in rows]
    gaps = [round(row["train/logp_gap_mean"], 8) for row in rows]
    passed = code == 0 and num_before < NUM_STEPS and steps == list(range(1, NUM_STEPS + 1))
    print(
        f"{'PASS' if passed else 'FAIL'} LoRA, killed after {num_before} steps ({killed_after:.0f} s) and resumed "
        f"({resumed_after:.0f} s): exit code {code}, steps {steps}, gaps {gaps}"
    )
    sys.exit(not passed)


if __name__ == "__main__":
    main()
