"""Numbers that go wrong on one rank alone: all ranks do the same about it, and nothing of it is applied or saved."""

import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_run import ROOT, arguments, write_rows

import base.system.ranks
from base.system.ranks import Ranks

LOOSE = ("grpo.logp_gap_limit=null", "grpo.max_bad_steps=2")
LIMIT = ("grpo.logp_gap_limit=100", "grpo.max_bad_steps=0")
PATIENCE = ("grpo.logp_gap_limit=100", "grpo.max_bad_steps=1")
CASES = {  # name -> (what goes wrong on rank 1, number of steps, overrides)
    "nothing": ("nothing", 1, LOOSE),
    "gradient": ("clip_grad_norm", 1, LOOSE),
    "loss": ("compute_loss", 1, LOOSE),
    "sampler": ("make_minibatches", 1, LOOSE),
    "sampler, limit": ("make_minibatches", 1, LIMIT),
    "sampler, patience": ("make_minibatches", 1, PATIENCE),
    "patience is over": ("make_minibatches", 2, PATIENCE),
    "third in a row": ("clip_grad_norm", 3, LOOSE),
}
NUMBERS = ("loss", "grad_norm", "num_bad_steps", "num_nonfinite_sampler_logp")
MORE = ("grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.save_period=1")


def go_wrong(fault, result):
    """What the function of grpo.py with this name returns on rank 1."""
    if fault == "compute_loss":
        loss, metrics = result
        return loss, metrics | {"loss": metrics["loss"] + float("inf")}
    if fault == "make_minibatches":
        result[-1].micros[-1].sampler_logp_R[-1] = float("nan")
    return result


@ranks(2, seconds=900, stand_in=True)
def runs_with_faults(folder: Path) -> dict[str, dict]:
    """Of each case: the exit code and reason, the numbers of the last step, whether the weights moved and are finite,
    and what was saved; and the timeouts of all process groups."""
    import grpo
    from run import job, steps

    os.chdir(ROOT)
    base.system.ranks.COLLECTIVE_TIMEOUT = timedelta(minutes=29)  # torch's own default for gloo is the 30 of ours
    place, device = base.system.ranks.start_process_group(tp_size=2)  # with a group for the engine
    groups = dist.distributed_c10d._world.pg_map
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    place = Ranks(place.rank, place.world_size, place.local_rank, tp_size=1)
    job.start_process_group = lambda *_: (place, device)
    results = {name: run_of(name, grpo, steps, place, folder / name) for name in CASES}
    return results | {"timeouts": timeouts}


def run_of(name, grpo, steps, place, work):
    fault, num_steps, overrides = CASES[name]
    original, train_all, end, found = getattr(grpo, fault, None), grpo.train, steps.end_step, {}

    def spoiled(*args):
        if fault == "clip_grad_norm":
            next(args[0].parameters()).grad.to_local()[0] = float("nan")
        return go_wrong(fault, original(*args))

    def end_step(run, samples, minibatches, metrics):
        found["numbers"] = {key: float(metrics[key]) for key in NUMBERS}
        end(run, samples, minibatches, metrics)

    def train(run):
        before = [param.to_local().clone() for param in run.model.parameters()]
        try:
            train_all(run)
        finally:
            after = [param.to_local() for param in run.model.parameters()]
            found["moved"] = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
            found["finite"] = all(bool(param.isfinite().all()) for param in after)

    if place.rank == 0:
        work.mkdir()
        write_rows(work)
    dist.barrier()
    sys.argv = ["grpo.py", *arguments(work), *MORE, f"grpo.max_num_steps={num_steps}", *overrides]
    patches = {"train": train} | ({fault: spoiled} if original and place.rank == 1 else {})
    with mock.patch.multiple(grpo, **patches), mock.patch.object(steps, "end_step", end_step):
        found["code"] = grpo.main()
    dist.barrier()
    found["reason"] = json.loads((work / "exp_001" / "exit.json").read_text())["reason"]
    found["saved"] = sorted(path.name for path in (work / "exp_001" / "checkpoints").glob("*"))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks found, which is the same."""
    first, second = runs_with_faults(tmp_path_factory.mktemp("numbers"))
    assert repr(first) == repr(second)  # NaN is NaN
    return first


def test_a_step_without_faults_is_applied_and_saved(found):
    run = found["nothing"]
    assert (run["code"], run["moved"], run["saved"]) == (0, True, ["step_000001"])
    assert math.isfinite(run["numbers"]["grad_norm"]) and run["numbers"]["num_bad_steps"] == 0
    assert run["numbers"]["num_nonfinite_sampler_logp"] == 0


@pytest.mark.parametrize("case", ["gradient", "loss"])
def test_what_is_not_finite_on_one_rank_is_applied_on_none(found, case):
    run = found[case]
    assert (run["moved"], run["finite"], run["saved"], run["code"]) == (False, True, [], 0)
    assert run["numbers"]["num_bad_steps"] == 1
    assert math.isfinite(run["numbers"]["grad_norm"]) == (case == "loss")
    assert math.isfinite(run["numbers"]["loss"]) == (case == "gradient")


def test_a_sampler_logp_that_is_no_number_is_left_out_and_counted_or_stops_the_run(found):
    run, stopped = found["sampler"], found["sampler, limit"]
    assert (run["moved"], run["finite"], run["numbers"]["num_nonfinite_sampler_logp"]) == (True, True, 1)
    assert math.isfinite(run["numbers"]["loss"]) and run["saved"] == ["step_000001"]
    assert "1 non-finite sampler logps" in stopped["reason"] and "not applied" in stopped["reason"]
    assert (stopped["code"], stopped["moved"], stopped["saved"]) == (3, False, [])


def test_patience_skips_steps_whose_sampler_is_off(found):
    skipped, over = found["sampler, patience"], found["patience is over"]
    assert (skipped["code"], skipped["moved"], skipped["saved"]) == (0, False, [])
    assert skipped["numbers"]["num_bad_steps"] == 1
    assert over["code"] == 3 and "1 non-finite sampler logps" in over["reason"]


def test_too_many_in_a_row_stop_the_run_on_all_ranks(found):
    run = found["third in a row"]
    assert run["code"] == 3 and not run["moved"]
    assert "Bad steps in a row: 3 (grpo.max_bad_steps=2)" in run["reason"]


def test_every_process_group_has_the_runs_timeout(found):
    assert found["timeouts"] == [29 * 60] * 2  # of all ranks, and of an engine's; the mesh and FSDP use the first
