"""A split job of 2 trainers and 2 generators: who is who on each side, and weights in buckets of any size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bridge_worker import BUCKETS, SHAPES

from system import bridge, exits

WORKER = Path(__file__).resolve().parents[1] / "helpers" / "bridge_worker.py"


@pytest.mark.parametrize("size", [1, 2, 7, 8, 24, 25, 100])
def test_buckets_are_all_tensors_in_a_row_cut_into_equal_pieces(monkeypatch, size):
    monkeypatch.setattr(bridge, "BUCKET_BYTES", 4 * size + 3)  # bytes that no element fills are left
    tensors = [torch.randn(shape) for shape in [(2, 3), (0, 5), (), (17,), (1, 1), (0,)]]
    row = torch.cat([tensor.flatten() for tensor in tensors])
    assert len(row) == 25
    buckets = list(bridge.fill_buckets(tensors))
    assert [bucket.tolist() for bucket in buckets] == [row[i : i + size].tolist() for i in range(0, 25, size)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the four ranks of tests/helpers/bridge_worker.py wrote."""
    folder = tmp_path_factory.mktemp("bridge")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, WORKER, folder], env=env, stderr=subprocess.PIPE, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(4)]


def test_each_side_is_a_job_of_its_own_and_knows_its_place_in_the_whole(ranks):
    assert [facts["rank"] for facts in ranks] == [[job, 4, job % 2, 2, job % 2, 2] for job in range(4)]
    assert [facts["env"] for facts in ranks] == [["0", "2"], ["1", "2"]] * 2  # as vLLM reads them
    trainer, leader, follower = [False, 1, 2, True], [True, 2, 1, True], [True, 2, 1, False]
    assert [facts["engine"] for facts in ranks] == [trainer, trainer, leader, follower]
    assert [facts["of_engine"] for facts in ranks] == [False, False, True, True]  # rank 3 shares its engine with rank 2
    assert [facts["side"] for facts in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [facts["any"] for facts in ranks] == [False, False, True, True]
    assert [facts["first"] for facts in ranks] == [0, 0, 2, 2]
    for number, facts in enumerate(ranks):
        assert facts["job"] == [0, 1, 2, 3] and facts["first_of_job"] == 0
        assert facts["on_rank0"] == "made by 0" and facts["from_2"] == {"rank": 2}
        assert facts["announced"] == ([False, True] if number >= 2 else [])
        assert facts["peers"] == [0, 1, 2, 3]
        named = ["trainer rank 0", "trainer rank 1", "generator rank 2", "generator rank 3"]
        assert facts["names"] == [f"{name} on {exits.host_name()}" for name in named]


def test_weights_arrive_whatever_the_buckets(ranks):
    """The generators have compared them; a second sync sends other numbers."""
    total = sum(torch.Size(shape).numel() for shape in SHAPES)
    expected = [[min(size, total - i) for i in range(0, total, size)] for size in BUCKETS for sync in (1, 2)]
    for facts in (ranks[0], *ranks[2:]):
        assert facts["buckets"] == expected
    assert ranks[1]["buckets"] == [[] for _ in expected]  # a trainer that sends nothing
