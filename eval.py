"""Scores a model on the validation sets of a config, with the code that scores them during training.

    .venv/bin/torchrun eval.py CONFIG.yaml policy.model_name=FOLDER [key.sub=value ...]         any Hugging Face folder
    .venv/bin/torchrun eval.py CONFIG.yaml checkpointing.resume_from=RUN [key.sub=value ...]    a checkpoint

Writes eval.json into a new folder eval_001 of logger.log_dir and prints its path. Exit codes are those of grpo.py.
"""

import json
import os
import sys

from system.exits import die_with_parent

if "RANK" in os.environ and __name__ == "__main__":  # before torch and vllm are imported, which takes a while
    die_with_parent()

from check.preflight import ALL_RANKS_GENERATE, gpu_memory, parse_command_line, read_inputs
from config import ConfigError
from run.folder import open_run_folder
from run.start import plan_memory
from run.validation import evaluate
from system.disk import keep_console, write_whole
from system.exits import NO_PEERS, describe_failure, exit_process, report_exit
from system.ranks import on_rank0, start_process_group

USAGE = "usage: [torchrun --nproc_per_node=N] eval.py CONFIG.yaml [policy.model_name=X | checkpointing.resume_from=RUN]"


def main() -> int:
    """One rank from start to exit code."""
    folder = None
    memory = None
    peers = NO_PEERS
    try:
        if len(sys.argv) == 1 or {"--help", "-h"} & set(sys.argv):
            raise ConfigError(USAGE)
        gpu_bytes, words = gpu_memory(sys.argv[1:])
        cfg = parse_command_line([*words, *ALL_RANKS_GENERATE], USAGE)
        ranks, device = start_process_group(cfg.policy.generation.vllm_cfg.tensor_parallel_size)
        peers = ranks.peers
        inputs = read_inputs(cfg, to_train=False, on_rank0=on_rank0)
        if not inputs.validation:
            raise ConfigError("data.validation.data_path is not set: name the jsonl file with the problems")
        folder = open_run_folder(cfg, ranks, to_train=False)
        memory = plan_memory(cfg, inputs, ranks, device, gpu_bytes, trains=False)
        report = evaluate(cfg, inputs, ranks, device, folder)
        if ranks.rank == 0:
            write_whole(folder / "eval.json", json.dumps(report, indent=2) + "\n")
        code, reason = 0, f"scored: {folder / 'eval.json'}"
    except BaseException as error:
        code, reason = describe_failure(memory.explained(error, "evaluation") if memory else error, peers=peers)
    report_exit(code, reason, folder, peers)
    return code


if __name__ == "__main__":
    keep_console()
    exit_process(main())
