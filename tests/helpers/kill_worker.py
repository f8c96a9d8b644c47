"""Kills ranks while they save, again and again: python tests/helpers/kill_worker.py FOLDER NUM_KILLS SEED

One process that has imported torch forks two gloo ranks for each life: they load, go on from there, save after every
step, and one of them is killed, at a named point of the save or at a random instant. What a life loads must be a state
that was committed, whole, and not older than the last commit that `finish` has returned from. Prints a JSON object.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import torch
import torch._dynamo  # what each optimizer imports: here once for all lives
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from base.inputs.checkpoints import numbered
from base.system.ranks import Ranks
from config import CheckpointingConfig, ConfigError
from run import checkpoint, restore

# name -> (rank, module, function, before or after it, at which of its calls in a life)
POINTS = {
    "before the shard": (1, checkpoint, "save_file", "before", 1),
    "within the shard": (0, checkpoint, "save_file", "within", 1),
    "after the shard": (1, checkpoint, "save_file", "after", 1),
    "shard flushed": (0, checkpoint, "flush", "after", 1),
    "meta.json flushed": (0, checkpoint, "flush", "after", 2),
    "before the rename": (0, checkpoint.os, "rename", "before", 1),
    "after the rename": (0, checkpoint.os, "rename", "after", 1),
    "an old one out of the way": (0, checkpoint.os, "rename", "after", 4),
    "an old one half removed": (0, checkpoint.shutil, "rmtree", "within", 1),
    "an old one removed": (0, checkpoint.shutil, "rmtree", "after", 1),
}


def model_at(step: int, mesh: DeviceMesh):
    model = torch.nn.Linear(64, 6, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(torch.full((6, 64), float(step)), mesh, [Shard(0)]))
    return model, torch.optim.AdamW(model.parameters())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Has this process killed when it gets there."""
    _, module, name, when, number = POINTS[point]
    original, calls = getattr(module, name), 0

    def wrapped(*arguments, **options):
        nonlocal calls
        if name == "rmtree" and not (Path(arguments[0]).suffix == ".old" and os.path.exists(arguments[0])):
            return original(*arguments, **options)  # of an unfinished save, or of nothing
        calls += 1
        if calls == number and when == "before":
            die()
        if calls == number and when == "within":
            if name == "rmtree":
                for path in sorted(Path(arguments[0]).iterdir())[:1]:  # a kill may have left an empty folder
                    path.unlink()
            else:
                Path(arguments[1]).write_bytes(b"\x40\0\0\0\0\0\0\0half")
            die()
        result = original(*arguments, **options)
        if calls == number and when == "after":
            die()
        return result

    setattr(module, name, wrapped)


def live(rank: int, folder: Path, life: int, point: str | None) -> None:
    """One rank from load to the end; never returns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / f'meet_{life}'}", rank=rank, world_size=2)
    ranks, checkpoints = Ranks(rank, 2, rank, 1), folder / "checkpoints"
    mesh = dist.init_device_mesh("cpu", (2,))
    model, optimizer = model_at(-1, mesh)
    step = 0
    if numbered(checkpoints, "step_"):
        state = restore.load(checkpoints, CheckpointingConfig(resume="auto"), model, optimizer, ranks, {})
        step = state["step"]
        assert state == {"step": step, "cursor": step * 7}, state
        assert model.weight.to_local().unique().tolist() == [float(step)], (step, model.weight.to_local())
        newest = int((folder / "committed").read_text()) if (folder / "committed").exists() else 0
        assert step >= newest, f"loads step {step}, {newest} was committed"
        if rank == 0:
            (folder / f"loaded_{life}").write_text(str(step))
    if point and POINTS[point][0] == rank:
        arm(point)
    saver = checkpoint.Saver(checkpoints, CheckpointingConfig(keep_latest=2), ranks)
    for step in range(step + 1, step + 5):  # noqa: B020
        saver.save(step, *model_at(step, mesh), {"cursor": step * 7}, {}, {})
        saver.finish()
        if rank == 0:
            (folder / "committed.tmp").write_text(str(step))
            os.rename(folder / "committed.tmp", folder / "committed")
    os._exit(0)


def fork_rank(rank: int, folder: Path, life: int, point: str | None) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            live(rank, folder, life, point)
        except (AssertionError, ConfigError):  # the peer's death raises others
            traceback.print_exc()
            os._exit(66)
        finally:
            os._exit(1)
    return pid


def wait(pids: list[int]) -> list[int]:
    """Exit codes; when one has died, the other one is killed as torchrun does: it may wait for the dead one."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] == -signal.SIGKILL and len(codes) == 1:
            os.kill(next(other for other in pids if other != pid), signal.SIGKILL)
    return [codes[pid] for pid in pids]


def main(folder: Path, num_kills: int, seed: int) -> None:
    rng, kills, life, has_loaded = random.Random(seed), Counter(), 0, []
    while kills.total() < num_kills:
        named = None if life % 3 == 0 else sorted(POINTS)[(life - life // 3 - 1) % len(POINTS)]
        pids = [fork_rank(rank, folder, life, named) for rank in range(2)]
        if named is None:
            time.sleep(rng.uniform(0.05, 0.5))
            os.kill(pids[rng.randrange(2)], signal.SIGKILL)
        codes = wait(pids)
        assert 66 not in codes, f"life {life} ({named}) found a bad state"
        kills[named or "a random instant"] += -signal.SIGKILL in codes
        has_loaded.append((folder / f"loaded_{life}").exists())
        life += 1
    assert wait([fork_rank(rank, folder, life, None) for rank in range(2)]) == [0, 0]
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    print(json.dumps({"kills": kills, "lives": life, "loaded": sum(has_loaded), "left": left}))
    shutil.rmtree(folder / "checkpoints")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
