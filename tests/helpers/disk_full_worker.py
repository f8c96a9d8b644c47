"""The process of tests/command/test_disk_full.py, in a mount namespace of its own: disk_full_worker.py FOLDER

Mounts a tmpfs of 6 MiB on FOLDER and saves toy states of 2 MiB there; another file takes the room while one is written.
Prints a JSON object of what there was after each save.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from config import CheckpointingConfig
from run import checkpoint
from system.exits import StopRun
from system.ranks import Ranks

MIB = 1 << 20


def state_at(step: int):
    """(model, optimizer): 2 MiB of float32 that all are `step`, and no moments yet."""
    model = torch.nn.Linear(512, 1024, bias=False)
    torch.nn.init.constant_(model.weight, float(step))
    return model, torch.optim.AdamW(model.parameters())


def take(file: Path, size: int) -> None:
    """As another program would, up to the last byte."""
    try:
        with file.open("wb", buffering=0) as stream:
            while size > 0:
                size -= stream.write(bytes(min(size, 4096)))
    except OSError as error:
        assert error.errno == 28, error


def main(folder: Path) -> dict:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    checkpoints, ballast, after = folder / "checkpoints", folder / "ballast", {}
    saver = checkpoint.Saver(checkpoints, CheckpointingConfig(keep_latest=2), Ranks(0, 1, 0, 1))
    save_file = checkpoint.save_file

    def save_on_full_disk(tensors, file):
        """The room that `save` has looked for is gone but for half of what it needs."""
        take(ballast, 100 * MIB)
        with ballast.open("r+b") as stream:
            stream.truncate(ballast.stat().st_size - MIB)
        save_file(tensors, file)

    def save(step, name):
        stopped = None
        try:
            saver.save(step, *state_at(step), {"cursor": 7 * step}, {}, {})
            saver.finish()
        except StopRun as error:
            stopped = str(error)
        model, optimizer = state_at(-1)
        loaded = checkpoint.load(checkpoints, CheckpointingConfig(resume="must"), model, optimizer, saver.ranks, {})
        after[name] = {
            "left": sorted(path.name for path in checkpoints.iterdir()),
            "loaded": loaded,
            "values": model.weight.unique().tolist(),
            "stopped": stopped,
        }

    save(1, "room")
    checkpoint.save_file = save_on_full_disk
    save(2, "full while it is written")
    checkpoint.save_file = save_file
    save(3, "full before")
    ballast.unlink()
    save(4, "room again")
    take(ballast, 100 * MIB)
    for step in (5, 6, 7):
        save(step, f"full, {step}")
    return after


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
