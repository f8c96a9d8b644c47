"""HSDP: four ranks as two replicas of two compute what four and one do, and the replicas stay one policy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hf_folders import FAMILIES, make_hf_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def launch(folders, results, *words):
    """What the four ranks of tests/helpers/replicas_worker.py wrote."""
    command = [sys.executable, "tests/helpers/replicas_worker.py", str(folders), str(results), *words]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((results / f"rank_{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folders = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "qwen3"):  # tied, untied
        make_hf_folder(folders / family, **FAMILIES[family])
    make_hf_folder(folders / "three blocks", **FAMILIES["qwen3"], num_hidden_layers=3)
    return launch(folders, tmp_path_factory.mktemp("four_ranks"))


def test_gradient_and_its_norm_are_those_of_one_rank(four_ranks):
    """Of packs that differ in number and tokens; with LoRA of rank 3, which two ranks cannot halve."""
    for rank in four_ranks:
        assert rank["gradients"].keys() == {"2 x 2", "4", "4 x 1", "2", "1"}
        for errors in (*rank["gradients"].values(), *rank["lora"]["gradients"].values()):
            assert max(errors) <= 1e-6, errors


def test_after_twenty_steps_the_replicas_are_equal_to_the_bit(four_ranks):
    """Weights and moments; the gradients were clipped. The clip norm of all ranks is one number."""
    facts = four_ranks[0]["replicas"]
    first, second, *others = facts["after"]
    assert [first, second] == others and first != second
    assert all(before != after for before, after in zip(facts["before"], facts["after"], strict=True))
    norms = facts["norms"]
    assert len(norms[0]) == 20 == len({*norms[0]}) and min(norms[0]) > 0.05 and all(its == norms[0] for its in norms)


def test_the_memory_plan_divides_by_the_ranks_of_a_replica(four_ranks):
    for (planned_weights, weights), (planned_moments, moments) in four_ranks[0]["replicas"]["memory"]:
        assert weights <= planned_weights <= 1.01 * weights and planned_moments == 2 * planned_weights
        assert moments == 2 * weights


@pytest.mark.long
def test_the_memory_plan_of_a_step(tmp_path):
    """Within 2% of the bytes at its peak, as tests/check/test_memory_plan.py has it of one rank."""
    for rank in launch(tmp_path, tmp_path, "memory"):
        assert rank == {"qwen3, 2 x 2": {}, "qwen3 tied, 4 x 1": {}, "lora, 2 x 2": {}}


def test_a_number_that_goes_wrong_on_one_rank_stops_the_step_on_all(four_ranks):
    """On rank 3 alone: the loss, the sampler's log-probability, and a gradient when the replicas have been added up."""
    verdicts = four_ranks[0]["verdicts"]
    assert verdicts.keys() == {"compute_loss", "clip_grad_norm", "make_minibatches"}
    for fault, of_ranks in verdicts.items():
        assert of_ranks == [[1, False, True]] * 4, fault  # one bad step; weights did not move; they are finite


def test_an_engine_that_one_rank_left_stale_stops_all(four_ranks):
    canary = four_ranks[0]["canary"]
    assert max(canary["gap"]) <= 1e-6
    assert len({*canary["stale"]}) == 1
    assert canary["stale"][0].startswith("then: on a fixed prompt sampler and trainer disagree by 0.0")


def test_collectives_of_a_step_depend_on_blocks_and_micro_batches(four_ranks):
    """Of the model's part: of U units each is gathered in a forward, each block again in its backward, and all
    gradients reduced. Between replicas each unit's gradient goes once, and the norm. The rest is the samples' and the
    metrics', which neither blocks nor micro-batches make more."""
    cases = four_ranks[0]["collectives"]
    assert [case["micro_batches"] for case in cases] == [1, 1, 2, 2]
    assert all([c["numbers"] for c in rank["collectives"]] == [c["numbers"] for c in cases] for rank in four_ranks)
    for case in cases:
        blocks, packs, (family, mesh) = case["blocks"], case["micro_batches"], case["case"]
        units = blocks + (1 if family == "qwen2" else 3)
        numbers = {
            "shard _allgather_base_": packs * (units + blocks),
            "shard _reduce_scatter_base_": packs * units,
            "shard all_reduce": 1,  # the norm
            "shard all_gather_into_tensor": blocks + 2,  # the weight sync
        }
        samples_and_metrics = {"world allreduce_": 3, "world allgather_": 2}
        if mesh == "4":  # one group has all
            both = {name.replace("shard", "shard or world"): number for name, number in numbers.items()}
            both |= {f"shard or {name}": number for name, number in samples_and_metrics.items()}
            assert case["numbers"] == both
            continue
        assert case["numbers"] == numbers | samples_and_metrics | {"replicate allreduce_": units + 1}
        assert case["bytes"]["replicate allreduce_"] == case["shard_bytes"] + 4  # float32, not once for each pack
    assert cases[0]["bytes"]["shard _allgather_base_"] == cases[1]["bytes"]["shard or world _allgather_base_"]


def test_a_sync_gathers_within_the_replica(four_ranks):
    for rank in four_ranks:
        sync = rank["sync"]
        assert sync["same"] and sync["complete"] and len({*sync["digests"]}) == 1
        assert sync["by_shard_group"] == [["all_gather_into_tensor", True]] * 4
        gathered, sent = sync["bytes"]
        assert sent <= gathered <= sent + 1000  # rows that even out the ranks'
        assert len({tuple(its) for of_rank in rank["lora"]["sent"] for its in of_rank.values()}) == 1


def test_checkpoints_and_exports_are_those_of_every_mesh(four_ranks):
    """Weights, moments and the reference to the bit."""
    facts = four_ranks[0]["checkpoints"]
    for saved, num_loads in (("2 x 2", 5), ("4", 1), ("4 x 1", 1)):
        states = facts["states"][saved]
        assert len({state for of_rank in states for state in of_rank}) == 1 and len(states[0]) == 1 + num_loads
        assert len({export for mesh, export in facts["exports"] if mesh == saved}) == 1
    assert len(facts["exports"]) == 7


def test_one_replica_writes(four_ranks):
    files = four_ranks[0]["checkpoints"]["files"]
    numbers = {mesh: sorted(int(name[5:10]) for name in its) for mesh, its in files.items()}
    assert numbers == {"2 x 2": [0, 1], "4": [0, 1, 2, 3], "4 x 1": [0]}
    sizes = {mesh: sum(its.values()) for mesh, its in files.items()}
    assert sizes["4 x 1"] < sizes["2 x 2"] < sizes["4"] < 1.05 * sizes["4 x 1"]  # headers
