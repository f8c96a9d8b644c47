"""The four ranks of tests/system/test_bridge.py, of which two generate: bridge_worker.py FOLDER

One process that has imported everything forks them, as torchrun starts them. Each writes rank_<n>.json: what it is, and
what came over the bridge.
"""

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist

from system import bridge
from system.ranks import any_rank, broadcast_from_rank0, gather, on_rank0, start_process_group

SHAPES = [(3, 5), (), (7,), (0, 4), (2, 2, 2), (41,), (1,)]  # 15 + 1 + 7 + 0 + 8 + 41 + 1 elements: 73
BUCKETS = (4, 20, 64, 73, 292, 1000)  # elements


def tensors(factor: float) -> list[tuple[str, torch.Tensor]]:
    numbers = torch.arange(73, dtype=torch.bfloat16) * factor
    parts = numbers.split([torch.Size(shape).numel() for shape in SHAPES])
    return [(f"t{i}", part.view(shape)) for i, (part, shape) in enumerate(zip(parts, SHAPES, strict=True))]


def main(folder: Path) -> None:
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
    (folder / f"rank_{facts['rank'][0]}.json").write_text(json.dumps(facts))
    gather(None, ranks.job)  # nobody leaves before


def start(rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="4")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        main(Path(sys.argv[1]))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    pids = [start(rank, port) for rank in range(4)]
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
