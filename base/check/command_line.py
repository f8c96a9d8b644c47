"""The words behind grpo.py, eval.py and their like: a checked config, and flags. No torch."""

import os
import re
from collections.abc import Sequence

from base.check import rules
from base.inputs.run_inputs import number_in_environment
from config import Config, ConfigError

COLOCATED = "policy.generation.colocated"
# Overrides for a run that only scores, on any number of ranks
ALL_RANKS_GENERATE = [
    f"{COLOCATED}.enabled=true",
    f"{COLOCATED}.resources.gpus_per_node=null",
    f"{COLOCATED}.resources.num_nodes=null",
    "policy.dtensor_cfg.dp_replicate_size=1",
]


def parse_command_line(argv: Sequence[str], usage: str, reads_data: bool = True) -> Config:
    """The validated config of a command line, with the run that it resumes, and, unless reads_data, without data and
    environments. ConfigError for whatever is wrong."""
    flags = {"--check", "--all", "--explain"} & set(argv) if "--check" in argv else set()
    words = [word for word in argv if word not in flags]
    if not words or words[0].startswith("-") or ("=" in words[0] and not os.path.exists(words[0])):
        raise ConfigError(usage)
    # Without torchrun, `--check` does not know the number of ranks: it takes the fewest that there may be.
    num_ranks = number_in_environment("WORLD_SIZE") or (None if flags else 1)
    ranks_of_node = number_in_environment("LOCAL_WORLD_SIZE")
    explain = "--explain" in flags
    cfg = rules.load_checked(words[0], words[1:], num_ranks, ranks_of_node, explain=explain, reads_data=reads_data)
    ckpt = cfg.checkpointing
    if ckpt.resume not in ("auto", "must") or ckpt.resume_from:
        return cfg
    from base.inputs.resume import resolve  # a run that looks for none to continue does without

    return resolve(cfg)


def last_value(flag: str, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """(what the last word says that begins with the flag, or None; the words without it)."""
    given = [word.removeprefix(flag) for word in argv if word.startswith(flag)]
    others = [word for word in argv if not word.startswith(flag)]
    return given[-1] if given else None, others


def gpu_memory(argv: Sequence[str]) -> tuple[float | None, list[str]]:
    """(bytes by the last `--gpu_memory=80`, in GiB, or None; the other words). A GPU of "80 GB" has 79 to 80 GiB."""
    flag = "--gpu_memory="
    gib, others = last_value(flag, argv)
    if gib is None:
        return None, others
    if not re.fullmatch(r"[1-9][0-9]{0,5}(\.[0-9]+)?", gib):
        raise ConfigError(f"{flag}{gib:.80}: expected a GPU's memory in GiB, such as {flag}80")
    from base.plan.gpus import GIB  # this flag alone needs it

    return float(gib) * GIB, others
