"""Tokens go between ranks as arrays: to the bit what they were as objects, in as many collectives on any number of
ranks."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from data import Sample
from system.exchange import move_tokens

ROOT = Path(__file__).resolve().parents[2]
RUNS = [(1, 1), (2, 1), (4, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where tests/helpers/exchange_worker.py wrote."""
    folder = tmp_path_factory.mktemp("exchange")
    command = [sys.executable, "tests/helpers/exchange_worker.py", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """(ranks, ranks of an engine) -> by rank: case -> its answers."""
    return {
        (size, tp): [json.loads((folder / f"{size}_{tp}_{rank}.json").read_text()) for rank in range(size)]
        for size, tp in RUNS
    }


@pytest.mark.parametrize("run", RUNS)
def test_packs_and_numbers_are_those_of_pickled_samples(runs, run):
    for rank in runs[run]:
        for case, answers in rank.items():
            assert answers["arrays"] == answers["objects"], case


def test_all_ranks_decide_alike_on_any_number_of_ranks(runs):
    (alone,) = runs[1, 1]
    for run in RUNS[1:]:
        for number, rank in enumerate(runs[run]):
            for case in rank:
                rank[case]["arrays"]["metrics"].pop("idle_engine_fraction", None)  # of several engines
                for name in ("metrics", "adv", "validation"):
                    assert rank[case]["arrays"][name] == alone[case]["arrays"][name], (run, case, name)
                shown = [] if number else alone[case]["arrays"]["shown"]
                assert rank[case]["arrays"]["shown"] == shown  # rank 0 has the tokens that it logs
    packs = [len({p for rank in runs[run] for p in rank["plain"]["arrays"]["packs"]}) for run in RUNS]
    assert packs == [7, 8, 8]  # and no pack is empty, or there twice


def test_the_collectives_of_a_step_do_not_depend_on_ranks_or_samples(runs):
    """Whether to stop, the samples without tokens, the tokens."""
    for (_, tp), ranks in runs.items():
        for rank in ranks:
            for case, answers in rank.items():
                turns = 2 if case in ("two turns", "minibatches", "gdpo") else 1 + 2 * (case == "turn advantages")
                verdicts = [name for name in answers["collectives"] if name == "broadcast_object_list"]
                assert (len(verdicts) >= turns) if tp > 1 else not verdicts, case  # as results come
                exchange = ["all_reduce", "all_gather_object", "all_to_all_single", "all_to_all_single"]
                assert answers["collectives"] == verdicts + exchange, case


def test_who_packs_tokens_that_never_came_is_told():
    from data import pack_samples

    none = np.zeros(0, np.int32)
    sample = Sample(0, 0, 0, [5, 7], none, none, none, "stop", none, holder=3, num_output_tokens=2)
    with pytest.raises(AssertionError, match="tokens of group 0 are not here"):
        pack_samples([[sample]], 10)


def test_nothing_moves_where_all_ranks_have_all_tokens():
    """Without a process group, too."""
    ids = np.zeros(2, np.int32)
    move_tokens([[Sample(0, 0, 0, [5], ids, ids, ids == 0, "stop", ids)]])
    move_tokens([])


def left(folder, name, rank):
    """(weights and moments, metrics) of a run's rank."""
    metrics = json.loads((folder / f"{name}_{rank}.json").read_text())
    return load_file(folder / f"{name}_{rank}.safetensors"), metrics


def test_a_step_replayed_on_as_many_ranks_is_the_same_to_the_bit(folder):
    """Each rank has dumped a part of the samples, and reads all of them."""
    dump = folder / "replay" / "exp_001" / "rollouts" / "step_000002"
    parts = [load_file(dump / f"rank_00{rank}.safetensors")["sample_S"] for rank in range(2)]
    assert sorted(np.concatenate(parts)) == list(range(32)) and min(map(len, parts)) > 0
    for rank in range(2):
        (run, metrics), (again, replayed) = (left(folder / "replay", name, rank) for name in ("run", "again"))
        assert run.keys() == again.keys() and len(run) > 30 and len(replayed) > 30
        assert replayed == {name: metrics[name] for name in replayed}
        assert all(np.array_equal(run[name], again[name]) for name in run)
