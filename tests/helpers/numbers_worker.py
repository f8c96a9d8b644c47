"""One rank of tests/command/test_numbers.py, under torchrun with 2: numbers_worker.py MODEL_FOLDER RESULT_FOLDER

On rank 1 alone a number goes wrong, in one of several places; writes what an optimizer step made of it on each rank.
"""

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import numpy as np
import torch
import torch.distributed as dist
from dist_case import CONFIG, make_samples, rank_share
from loop import make_run, train

import config
import grpo
import system.ranks
from hf.tokenizer import Tokenizer
from model import load_policy
from run import checkpoint
from system.exits import StopRun, exit_process

LOOSE = replace(CONFIG.grpo, max_bad_steps=2)
CASES = {
    "nothing": LOOSE,
    "gradient": LOOSE,
    "loss": LOOSE,
    "sampler": LOOSE,
    "sampler, limit": replace(LOOSE, logp_gap_limit=100.0, max_bad_steps=0),
    "sampler, patience": replace(LOOSE, logp_gap_limit=100.0, max_bad_steps=1),
}


def spoiled_clip(model, max_norm):
    """clip_grad_norm, of a gradient whose first row on this rank is no number."""
    next(model.parameters()).grad.to_local()[0] = float("nan")
    return clip_grad_norm(model, max_norm)


clip_grad_norm = grpo.clip_grad_norm


def one(case, policy, optimizer, ranks, work, num_bad_steps=0):
    """A step of the loop: its metrics or why it stopped, whether the weights moved, what was saved."""
    samples, adv_B = make_samples(policy.vocab_limit)
    clip = clip_grad_norm
    if ranks.rank == 1:  # it alone has sample 19
        if case == "loss":
            adv_B[-1] = float("inf")
        if case.startswith("sampler"):
            samples[-1].sampler_logps[-1] = np.nan
        if case == "gradient":
            clip = spoiled_clip
    saver = checkpoint.Saver(work / case, config.CheckpointingConfig(), ranks)
    run = make_run(policy, replace(CONFIG, grpo=CASES[case]), ranks, optimizer=optimizer, saver=saver)
    run.state.num_bad_steps = num_bad_steps
    before = [param.to_local().clone() for param in policy.parameters()]
    numbers = {}
    try:
        with (
            mock.patch("batch.assign_to_ranks", lambda lengths, world_size: rank_share),
            mock.patch.object(grpo, "clip_grad_norm", clip),
        ):
            train(run, samples, adv_B)
        saver.finish()
    except StopRun as error:
        numbers["stopped"] = str(error)
    policy.zero_grad()
    keys = ("loss", "grad_norm", "num_bad_steps", "num_nonfinite_sampler_logp")
    numbers |= {key: repr(run.metrics[key]) for key in keys if key in run.metrics}
    moved = [not torch.equal(a, b.to_local()) for a, b in zip(before, policy.parameters(), strict=True)]
    finite = all(p.to_local().isfinite().all() for p in policy.parameters())
    dist.barrier()
    return numbers | {"moved": any(moved), "finite": finite, "saved": sorted(f.name for f in (work / case).glob("*"))}


if __name__ == "__main__":
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    system.ranks.COLLECTIVE_TIMEOUT = timedelta(minutes=29)  # torch's own default for gloo is the 30 of ours
    ranks, device = system.ranks.start_process_group(tp_size=2)  # with a group for the engine
    policy = load_policy(folder, device=device, mesh=dist.init_device_mesh("cpu", (2,)))
    policy.temperature = 0.8
    policy.vocab_limit = Tokenizer(folder).vocab_size
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    results = {case: one(case, policy, optimizer, ranks, work) for case in CASES}
    groups = dist.distributed_c10d._world.pg_map
    results["timeouts"] = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    results["patience is over"] = one("sampler, patience", policy, optimizer, ranks, work, num_bad_steps=1)
    results["third in a row"] = one("gradient", policy, optimizer, ranks, work, num_bad_steps=2)
    (work / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    dist.barrier()
    exit_process(0)
