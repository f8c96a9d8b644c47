"""Writes a kept checkpoint of a run as Hugging Face folders, which transformers, vLLM and eval.py load.

    .venv/bin/python -m tools.export logs/exp_001 [40 | best] [key.sub=value ...]

Without a step it is the newest. `hf_model`, and with LoRA `hf_adapter`, go to logs/exp_001/exports/step_000040. Under
torchrun the ranks share the weights of a model that is too large for one.
"""

import sys
from functools import partial
from pathlib import Path

from base.check.command_line import ALL_RANKS_GENERATE
from base.hf.folder import resolve_folder
from base.inputs import reader
from base.inputs.checkpoints import checkpoint_folder
from base.inputs.resume import check_resumable
from base.inputs.run_inputs import RunInputs, read_policy_config, read_tokenizer
from base.system.disk import keep_console
from base.system.exits import exit_process
from base.system.failure import run_command
from base.system.ranks import on_rank0, start_process_group
from config import ConfigError
from run import restore
from run.build import build_policy, hash_of_base
from run.steps import export

USAGE = "usage: [torchrun --nproc_per_node=N | python] -m tools.export logs/exp_001 [STEP | best] [key.sub=value ...]"


def work() -> str:
    """Exports the checkpoint of the command line, and says where it is."""
    words = sys.argv[1:]
    if not words or not Path(words[0], "config.yaml").is_file():
        raise ConfigError(USAGE)
    run = Path(words.pop(0))
    asked = [f"checkpointing.resume_from={run}", "checkpointing.resume=must", *ALL_RANKS_GENERATE]
    if words and "=" not in words[0]:
        asked.append(f"checkpointing.resume_step={words.pop(0)}")
    cfg = reader.load(run / "config.yaml", [*words, *asked])
    ranks, device = start_process_group(1)
    on_rank0(partial(check_resumable, cfg, to_train=False))
    folder = resolve_folder(cfg.policy.model_name, "policy.model_name")
    model_config = read_policy_config(cfg, folder)
    tokenizer = read_tokenizer(cfg.policy.tokenizer, "policy.tokenizer.name", folder)
    inputs = RunInputs(folder, model_config, tokenizer, None, {}, {})
    model = build_policy(cfg, inputs, ranks, device)
    base = hash_of_base(cfg, inputs, ranks)
    saved = checkpoint_folder(cfg.checkpointing, run)
    step = restore.load(saved, cfg.checkpointing, model, None, ranks, {}, base)["step"]
    out = run / "exports" / f"step_{step:06d}"
    export(cfg, model, out, inputs, base)
    return f"exported step {step}: {out / 'hf_model'}"


def main() -> int:
    """One rank from start to exit code."""
    return run_command(work)


if __name__ == "__main__":
    keep_console()
    exit_process(main())
