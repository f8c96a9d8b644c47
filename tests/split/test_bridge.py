"""A split job of 2 trainers and 2 generators: who is who on each side, and the weights that cross."""

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import ranks

from base.system import exits
from base.system.ranks import any_rank, gather, on_rank0, start_process_group
from run.split.bridge import split

SHAPES = [(3, 5), (), (7,), (0, 4), (2, 2, 2), (41,), (1,)]  # 15 + 1 + 7 + 0 + 8 + 41 + 1 elements: 73


def tensors(factor):
    numbers = torch.arange(73, dtype=torch.bfloat16) * factor
    parts = numbers.split([torch.Size(shape).numel() for shape in SHAPES])
    return [(f"t{i}", part.view(shape)) for i, (part, shape) in enumerate(zip(parts, SHAPES, strict=True))]


@ranks(4)
def join_sides(folder):
    """What each of two trainers and two generators is, and what came over the bridge."""
    ranks, _ = start_process_group(2, partial(split, num_generators=2))
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
        "engine": [ranks.generates, ranks.tp_size, ranks.dp_size, ranks.is_tp_leader],
        "of_engine": ranks.any_rank_of_engine(ranks.job_rank == 3),
        "side": gather(ranks.job_rank),
        "job": gather(ranks.job_rank, ranks.job),
        "any": any_rank(ranks.job_rank == 3),
        "first": on_rank0(lambda: ranks.job_rank),
        "first_of_job": on_rank0(lambda: ranks.job_rank, ranks.job),
        "from_2": ranks.bridge.broadcast({"rank": ranks.job_rank}, root=2),
        "peers": sorted(ranks.peers.processes),
        "names": [ranks.peers.name(rank) for rank in range(4)],
        "sent": [],
    }
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors(1)]
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, **options: facts["sent"].append(tensor.numel()) or broadcast(tensor, **options)
    for sync in (1, 2):
        if ranks.generates:
            got = dict(ranks.bridge.receive_weights(shapes, torch.bfloat16, torch.device("cpu")))
            assert list(got) == [name for name, _ in tensors(1)], list(got)
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors(sync)), (sync, got)
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
        assert of_rank["from_2"] == {"rank": 2}
        assert of_rank["announced"] == ([False, True] if number >= 2 else [])
        assert of_rank["peers"] == [0, 1, 2, 3]
        named = ["trainer rank 0", "trainer rank 1", "generator rank 2", "generator rank 3"]
        assert of_rank["names"] == [f"{name} on {exits.host_name()}" for name in named]


@pytest.mark.slow
def test_weights_arrive_whatever_their_shapes(facts):
    """The generators have compared them; a second sync sends other numbers."""
    for of_rank in (facts[0], *facts[2:]):
        assert of_rank["sent"] == 2 * [torch.Size(shape).numel() for shape in SHAPES]
    assert facts[1]["sent"] == []  # a trainer that sends nothing
