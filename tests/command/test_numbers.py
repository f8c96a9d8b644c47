"""Numbers that go wrong on one rank alone: all ranks do the same about it, and nothing of it is applied or saved."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What tests/helpers/numbers_worker.py wrote, of both ranks."""
    work = tmp_path_factory.mktemp("numbers")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    command = [sys.executable, *launch, "tests/helpers/numbers_worker.py", str(work)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((work / f"rank_{rank}.json").read_text()) for rank in range(2)]


def same(ranks, case):
    """What both ranks say."""
    assert ranks[0][case] == ranks[1][case]
    return ranks[0][case]


def numbers(found):
    return {name: float(value) for name, value in found["numbers"].items()}


def test_a_step_without_faults_is_applied_and_saved(ranks):
    found = same(ranks, "nothing")
    assert (found["code"], found["moved"], found["saved"]) == (0, True, ["step_000001"])
    assert math.isfinite(numbers(found)["grad_norm"]) and numbers(found)["num_bad_steps"] == 0
    assert numbers(found)["num_nonfinite_sampler_logp"] == 0


@pytest.mark.parametrize("case", ["gradient", "loss"])
def test_what_is_not_finite_on_one_rank_is_applied_on_none(ranks, case):
    found = same(ranks, case)
    assert (found["moved"], found["finite"], found["saved"], found["code"]) == (False, True, [], 0)
    assert numbers(found)["num_bad_steps"] == 1
    assert math.isfinite(numbers(found)["grad_norm"]) == (case == "loss")
    assert math.isfinite(numbers(found)["loss"]) == (case == "gradient")


def test_a_sampler_logp_that_is_no_number_is_left_out_and_counted_or_stops_the_run(ranks):
    found = same(ranks, "sampler")
    assert (found["moved"], found["finite"], numbers(found)["num_nonfinite_sampler_logp"]) == (True, True, 1)
    assert math.isfinite(numbers(found)["loss"]) and found["saved"] == ["step_000001"]
    stopped = same(ranks, "sampler, limit")
    assert "1 of the sampler's not finite" in stopped["reason"] and "not applied" in stopped["reason"]
    assert (stopped["code"], stopped["moved"], stopped["saved"]) == (3, False, [])


def test_patience_skips_steps_whose_sampler_is_off(ranks):
    skipped = same(ranks, "sampler, patience")
    assert (skipped["code"], skipped["moved"], skipped["saved"]) == (0, False, [])
    assert numbers(skipped)["num_bad_steps"] == 1
    over = same(ranks, "patience is over")
    assert over["code"] == 3 and "1 of the sampler's not finite" in over["reason"]


def test_every_process_group_has_the_runs_timeout(ranks):
    assert same(ranks, "timeouts") == [29 * 60] * 2  # of all ranks, and of an engine's; the mesh and FSDP use the first


def test_too_many_in_a_row_stop_the_run_on_all_ranks(ranks):
    found = same(ranks, "third in a row")
    assert found["code"] == 3 and not found["moved"]
    assert "are not finite: 3 bad steps in a row (grpo.max_bad_steps=2)" in found["reason"]
