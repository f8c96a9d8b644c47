"""One rank of tests/command/test_numbers.py, under torchrun with 2: numbers_worker.py MODEL_FOLDER RESULT_FOLDER

On rank 1 alone a number goes wrong, in one of several places; writes what an optimizer step made of it on each rank.
"""

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import numpy as np
import torch
import torch.distributed as dist
import update
from dist_case import batch_of, make_samples, rank_share

import config
import data
import grpo
import system.ranks
from hf.tokenizer import Tokenizer
from model import load_policy
from run import checkpoint
from system.exits import StopRun, exit_process

LOOSE = config.GRPOConfig(logp_gap_limit=None, max_bad_steps=2)
CASES = {
    "nothing": LOOSE,
    "gradient": LOOSE,
    "loss": LOOSE,
    "sampler": LOOSE,
    "sampler, limit": replace(LOOSE, logp_gap_limit=100.0, max_bad_steps=0),
    "sampler, patience": replace(LOOSE, logp_gap_limit=100.0, max_bad_steps=1),
}


def corrupt(case, samples, adv_B, monkeypatch_gradient):
    """In place, what this rank (1) alone does wrong."""
    if case == "loss":
        adv_B[-1] = float("inf")
    if case.startswith("sampler"):
        samples[-1].sampler_logps[-1] = np.nan
    monkeypatch_gradient(case == "gradient")


def one(case, policy, optimizer, ranks, vocab_size, work, num_bad_steps=0):
    """An optimizer step: what it said, what the weights are then, whether it was saved."""
    samples, adv_B = make_samples(vocab_size)
    compute = update.compute_gradients

    def spoil(wanted):
        def spoiled(model, *args):
            found = compute(model, *args)
            next(model.parameters()).grad.to_local()[0] = float("nan")
            return found

        update.compute_gradients = spoiled if wanted else compute

    if ranks.rank == 1:
        corrupt(case, samples, adv_B, spoil)
    packs = data.pack_samples(
        [samples[i] for i in rank_share[ranks.rank]], [adv_B[i] for i in rank_share[ranks.rank]], 1024
    )
    assert len(packs) == 1
    cfg = config.Config(grpo=CASES[case], policy=config.PolicyConfig(max_total_sequence_length=64))
    before = [param.to_local().clone() for param in policy.parameters()]
    found = {}
    try:
        state = {"step": 1, "cursor": {}, "last_validation": {}}
        found = update.train_step(policy, optimizer, [batch_of(packs, samples)], cfg, vocab_size, 1, num_bad_steps)
        state["num_bad_steps"] = found["num_bad_steps"]
        saver = checkpoint.Saver(work / case, config.CheckpointingConfig(), ranks)
        grpo.save(saver, policy, optimizer, state, {}, found)
        saver.finish()
    except StopRun as error:
        found = {"stopped": str(error)}
    finally:
        update.compute_gradients = compute
    moved = [not torch.equal(a, b.to_local()) for a, b in zip(before, policy.parameters(), strict=True)]
    keys = ("stopped", "loss", "grad_norm", "num_bad_steps", "num_nonfinite_sampler_logp")
    numbers = {key: repr(found[key]) for key in keys if key in found}
    finite = all(p.to_local().isfinite().all() for p in policy.parameters())
    dist.barrier()
    return numbers | {"moved": any(moved), "finite": finite, "saved": sorted(f.name for f in (work / case).glob("*"))}


if __name__ == "__main__":
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    system.ranks.COLLECTIVE_TIMEOUT = timedelta(minutes=29)  # torch's own default for gloo is the 30 of ours
    ranks, device = system.ranks.start_process_group(tp_size=2)  # with a group for the engine
    vocab_size = Tokenizer(folder).vocab_size
    policy = load_policy(folder, device=device, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    results = {case: one(case, policy, optimizer, ranks, vocab_size, work) for case in CASES}
    groups = dist.distributed_c10d._world.pg_map
    results["timeouts"] = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    results["patience is over"] = one("sampler, patience", policy, optimizer, ranks, vocab_size, work, num_bad_steps=1)
    results["third in a row"] = one("gradient", policy, optimizer, ranks, vocab_size, work, num_bad_steps=2)
    (work / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    dist.barrier()
    exit_process(0)
