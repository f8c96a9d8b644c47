"""One rank of tests/command/test_numbers.py, under torchrun with 2: numbers_worker.py RESULT_FOLDER

Short runs of grpo.main with a stand-in for vLLM. On rank 1 alone a number goes wrong, in one of several places; writes
what the run made of it on each rank.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import fake_vllm

fake_vllm.install()

import torch
import torch.distributed as dist
from small_run import arguments, write_rows

import grpo
import system.ranks
from run import setup
from system.exits import exit_process
from system.ranks import Ranks

LOOSE = ("grpo.logp_gap_limit=null", "grpo.max_bad_steps=2")
LIMIT = ("grpo.logp_gap_limit=100", "grpo.max_bad_steps=0")
PATIENCE = ("grpo.logp_gap_limit=100", "grpo.max_bad_steps=1")
CASES = {  # name -> (what goes wrong, number of steps, overrides)
    "nothing": ("nothing", 1, LOOSE),
    "gradient": ("gradient", 1, LOOSE),
    "loss": ("loss", 1, LOOSE),
    "sampler": ("sampler", 1, LOOSE),
    "sampler, limit": ("sampler", 1, LIMIT),
    "sampler, patience": ("sampler", 1, PATIENCE),
    "patience is over": ("sampler", 2, PATIENCE),
    "third in a row": ("gradient", 3, LOOSE),
}
LOSS = grpo.compute_loss
CLIP = grpo.clip_grad_norm
MINIBATCHES = grpo.make_minibatches
TRAIN = grpo.train
END = setup.end_step


def spoil(fault: str) -> None:
    """Has this rank do wrong from now on."""

    def compute_loss(*args):
        loss, metrics = LOSS(*args)
        return loss, metrics | {"loss": metrics["loss"] + float("inf")}

    def clip_grad_norm(model, max_norm):
        next(model.parameters()).grad.to_local()[0] = float("nan")
        return CLIP(model, max_norm)

    def make_minibatches(*args):
        minibatches = MINIBATCHES(*args)
        minibatches[-1].micros[-1].sampler_logp_R[-1] = float("nan")
        return minibatches

    grpo.compute_loss = compute_loss if fault == "loss" else LOSS
    grpo.clip_grad_norm = clip_grad_norm if fault == "gradient" else CLIP
    grpo.make_minibatches = make_minibatches if fault == "sampler" else MINIBATCHES


def one(name: str, ranks: Ranks, folder: Path) -> dict:
    """A run: its exit code and reason, the numbers of its last step, whether the weights moved, what was saved."""
    fault, num_steps, overrides = CASES[name]
    found = {}

    def end_step(run, samples, minibatches, metrics):
        keys = ("loss", "grad_norm", "num_bad_steps", "num_nonfinite_sampler_logp")
        found["numbers"] = {key: repr(float(metrics[key])) for key in keys}
        END(run, samples, minibatches, metrics)

    def train(run):
        before = [param.to_local().clone() for param in run.model.parameters()]
        try:
            TRAIN(run)
        finally:
            after = [param.to_local() for param in run.model.parameters()]
            found["moved"] = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
            found["finite"] = all(bool(param.isfinite().all()) for param in after)

    setup.end_step = end_step
    grpo.train = train
    if ranks.rank == 1:
        spoil(fault)
    work = folder / name
    if ranks.rank == 0:
        work.mkdir()
        write_rows(work)
    dist.barrier()
    more = ("grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.save_period=1")
    sys.argv = ["grpo.py", *arguments(work), *more, f"grpo.max_num_steps={num_steps}", *overrides]
    found["code"] = grpo.main()
    dist.barrier()
    found["reason"] = json.loads((work / "exp_001" / "exit.json").read_text())["reason"]
    found["saved"] = sorted(path.name for path in (work / "exp_001" / "checkpoints").glob("*"))
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    os.chdir(ROOT)
    system.ranks.COLLECTIVE_TIMEOUT = timedelta(minutes=29)  # torch's own default for gloo is the 30 of ours
    ranks, device = system.ranks.start_process_group(tp_size=2)  # with a group for the engine
    groups = dist.distributed_c10d._world.pg_map
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    ranks = Ranks(ranks.rank, ranks.world_size, ranks.local_rank, tp_size=1)
    grpo.start_process_group = lambda *_: (ranks, device)
    results = {name: one(name, ranks, folder) for name in CASES} | {"timeouts": timeouts}
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    dist.barrier()
    exit_process(0)
