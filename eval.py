"""Scores a model on the validation sets of a config, with the code that scores them during training
(run/validation.py; metrics.py has its numbers), or serves it to a benchmark's harness (run/serve.py).

    .venv/bin/torchrun eval.py CONFIG.yaml policy.model_name=FOLDER [key.sub=value ...]         any Hugging Face folder
    .venv/bin/torchrun eval.py CONFIG.yaml checkpointing.resume_from=RUN [key.sub=value ...]    a checkpoint

    .venv/bin/torchrun eval.py --serve MODEL [key.sub=value ...]     a run folder, a Hugging Face folder or a config

Writes eval.json into a new folder eval_001 of logger.log_dir and prints its path. Exit codes are those of grpo.py.
"""

import os
import sys

from base.system.exits import die_with_parent

if "RANK" in os.environ and __name__ == "__main__":  # before torch and vllm are imported, which takes a while
    die_with_parent()

from base.check.command_line import ALL_RANKS_GENERATE
from base.system.disk import keep_console
from base.system.exits import exit_process
from run.evaluation import evaluate
from run.job import run_rank

USAGE = (
    "usage: [torchrun --nproc_per_node=N] eval.py CONFIG.yaml [policy.model_name=X | checkpointing.resume_from=RUN] "
    "[key.sub=value ...] | --serve MODEL [key.sub=value ...]"
)


def main() -> int:
    """One rank from start to exit code."""
    words = [] if {"--help", "-h"} & set(sys.argv) else sys.argv[1:]  # no words: run_rank prints USAGE
    if len(words) > 1 and words[0] == "--serve":
        from run.serve import config_words, serve  # with the endpoint, which scoring does not need

        words = [*config_words(words[1]), *words[2:], *ALL_RANKS_GENERATE]
        return run_rank(USAGE, words, serve, to_train=False, reads_data=False)
    if words:
        words = [*words, *ALL_RANKS_GENERATE]
    return run_rank(USAGE, words, evaluate, to_train=False)


if __name__ == "__main__":
    keep_console()
    exit_process(main())
