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
def ranks(tiny, tmp_path_factory):
    """What tests/helpers/numbers_worker.py wrote, of both ranks."""
    work = tmp_path_factory.mktemp("numbers")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    command = [sys.executable, *launch, "tests/helpers/numbers_worker.py", str(tiny[0]), str(work)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((work / f"rank_{rank}.json").read_text()) for rank in range(2)]


def same(ranks, case):
    """What both ranks say."""
    assert ranks[0][case] == ranks[1][case]
    return ranks[0][case]


def test_a_step_without_faults_is_applied_and_saved(ranks):
    found = same(ranks, "nothing")
    assert (found["moved"], found["saved"], found["num_bad_steps"]) == (True, ["step_000001"], "0")
    assert math.isfinite(float(found["grad_norm"])) and found["num_nonfinite_sampler_logp"] == "0.0"


@pytest.mark.parametrize("case", ["gradient", "loss"])
def test_what_is_not_finite_on_one_rank_is_applied_on_none(ranks, case):
    found = same(ranks, case)
    assert (found["moved"], found["finite"], found["saved"], found["num_bad_steps"]) == (False, True, [], "1")
    assert not math.isfinite(float(found["grad_norm"])) and math.isfinite(float(found["loss"])) == (case == "gradient")


def test_a_sampler_logp_that_is_no_number_is_left_out_and_counted_or_stops_the_run(ranks):
    found = same(ranks, "sampler")
    assert (found["moved"], found["finite"], found["num_nonfinite_sampler_logp"]) == (True, True, "1.0")
    assert math.isfinite(float(found["loss"])) and found["saved"] == ["step_000001"]
    stopped = same(ranks, "sampler, limit")
    assert "1 of the sampler's not finite" in stopped["stopped"] and "not applied" in stopped["stopped"]
    assert (stopped["moved"], stopped["saved"]) == (False, [])


def test_patience_skips_steps_whose_sampler_is_off(ranks):
    skipped = same(ranks, "sampler, patience")
    assert (skipped["moved"], skipped["saved"], skipped["num_bad_steps"]) == (False, [], "1")
    assert "1 of the sampler's not finite" in same(ranks, "patience is over")["stopped"]


def test_every_process_group_has_the_runs_timeout(ranks):
    assert same(ranks, "timeouts") == [29 * 60] * 2  # of all ranks, and of an engine's; the mesh and FSDP use the first


def test_too_many_in_a_row_stop_the_run_on_all_ranks(ranks):
    found = same(ranks, "third in a row")
    assert "are not finite: 3 bad steps in a row (grpo.max_bad_steps=2)" in found["stopped"] and not found["moved"]
