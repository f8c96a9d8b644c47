"""A split job of 2 trainers and 2 generators: who is who on each side, and weights in buckets of any size."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import ranks

from system import bridge, exits
from system.ranks import any_rank, broadcast_from_rank0, gather, on_rank0, start_process_group

SHAPES = [(3, 5), (), (7,), (0, 4), (2, 2, 2), (41,), (1,)]  # 15 + 1 + 7 + 0 + 8 + 41 + 1 elements: 73
BUCKETS = (4, 20, 64, 73, 292, 1000)  # elements


def tensors(factor):
    numbers = torch.arange(73, dtype=torch.bfloat16) * factor
    parts = numbers.split([torch.Size(shape).numel() for shape in SHAPES])
    return [(f"t{i}", part.view(shape)) for i, (part, shape) in enumerate(zip(parts, SHAPES, strict=True))]


@ranks(4)
def join_sides(folder):
    """What each of two trainers and two generators is, and what came over the bridge."""
    ranks, _ = start_process_group(2, num_generators=2)
    announced = []
    if ranks.generates:
        arrival = ranks.bridge.announce(async_op=True)
        announced.append(arrival.is_completed())
        (folder / f"looked_{ranks.rank}").touch()
        arrival.wait()
        announced.append(arrival.is_completed())
    else:
        while len(list(folder.glob("looked_*"))) < 2:  # a trainer is not there before the generators have looked
            time.sleep(0.01)
        ranks.bridge.announce()
    facts = {
        "announced": announced,
        "rank": [ranks.job_rank, ranks.job_size, ranks.rank, ranks.world_size, dist.get_rank(), dist.get_world_size()],
        "env": [os.environ["RANK"], os.environ["WORLD_SIZE"]],
        "engine": [ranks.generates, ranks.tp_size, ranks.dp_size, ranks.leads_engine],
        "of_engine": ranks.any_rank_of_engine(ranks.job_rank == 3),
        "side": gather(ranks.job_rank),
        "job": gather(ranks.job_rank, ranks.job),
        "any": any_rank(ranks.job_rank == 3),
        "first": broadcast_from_rank0(ranks.job_rank),
        "first_of_job": broadcast_from_rank0(ranks.job_rank, ranks.job),
        "on_rank0": on_rank0(lambda: f"made by {ranks.job_rank}", ranks.job),
        "from_2": ranks.bridge.broadcast({"rank": ranks.job_rank}, root=2),
        "peers": sorted(ranks.peers.processes),
        "names": [ranks.peers.name(rank) for rank in range(4)],
        "buckets": [],
    }
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors(1)]
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, **options: facts["buckets"][-1].append(len(tensor)) or broadcast(tensor, **options)
    for size in BUCKETS:
        bridge.BUCKET_BYTES = 2 * size
        for sync in (1, 2):
            facts["buckets"].append([])
            if ranks.generates:
                got = dict(ranks.bridge.receive_weights(shapes, torch.bfloat16, torch.device("cpu")))
                assert list(got) == [name for name, _ in tensors(1)], (size, list(got))
                assert all(torch.equal(got[name], tensor) for name, tensor in tensors(sync)), (size, sync, got)
                assert [got[name].shape for name in got] == [torch.Size(shape) for shape in SHAPES]
            else:
                ranks.bridge.send_weights(tensor for _, tensor in tensors(sync))
    dist.broadcast = broadcast
    return facts


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return join_sides(tmp_path_factory.mktemp("bridge"))


@pytest.mark.slow
def test_each_side_is_a_job_of_its_own_and_knows_its_place_in_the_whole(facts):
    assert [of_rank["rank"] for of_rank in facts] == [[job, 4, job % 2, 2, job % 2, 2] for job in range(4)]
    assert [of_rank["env"] for of_rank in facts] == [["0", "2"], ["1", "2"]] * 2  # as vLLM reads them
    trainer, leader, follower = [False, 1, 2, True], [True, 2, 1, True], [True, 2, 1, False]
    assert [of_rank["engine"] for of_rank in facts] == [trainer, trainer, leader, follower]
    assert [of_rank["of_engine"] for of_rank in facts] == [False, False, True, True]  # 2 and 3 share an engine
    assert [of_rank["side"] for of_rank in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [of_rank["any"] for of_rank in facts] == [False, False, True, True]
    assert [of_rank["first"] for of_rank in facts] == [0, 0, 2, 2]
    for number, of_rank in enumerate(facts):
        assert of_rank["job"] == [0, 1, 2, 3] and of_rank["first_of_job"] == 0
        assert of_rank["on_rank0"] == "made by 0" and of_rank["from_2"] == {"rank": 2}
        assert of_rank["announced"] == ([False, True] if number >= 2 else [])
        assert of_rank["peers"] == [0, 1, 2, 3]
        named = ["trainer rank 0", "trainer rank 1", "generator rank 2", "generator rank 3"]
        assert of_rank["names"] == [f"{name} on {exits.host_name()}" for name in named]


@pytest.mark.slow
def test_weights_arrive_whatever_the_buckets(facts):
    """The generators have compared them; a second sync sends other numbers."""
    total = sum(torch.Size(shape).numel() for shape in SHAPES)
    expected = [[min(size, total - i) for i in range(0, total, size)] for size in BUCKETS for sync in (1, 2)]
    for of_rank in (facts[0], *facts[2:]):
        assert of_rank["buckets"] == expected
    assert facts[1]["buckets"] == [[] for _ in expected]  # a trainer that sends nothing
