"""A toy run on a disk that gets full; tests/test_disk_full.py starts it on a tmpfs of 3 MiB: FOLDER

Prints json: what is in the folder after each save, and what the checkpoints there give.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import checkpoint
import runtime
from config import CheckpointingConfig


def model_at(value):
    model = torch.nn.Linear(500, 500, bias=False)  # 1 MB
    torch.nn.init.constant_(model.weight, value)
    return model, torch.optim.SGD(model.parameters())


def main(folder):
    ranks, _ = runtime.start(tp_size=1)
    checkpoints, filler, seen = folder / "checkpoints", folder / "filler", []
    saver = checkpoint.Saver(checkpoints, CheckpointingConfig(), ranks)

    def save(step):
        saver.save(step, *model_at(float(step)), {"at": step}, {}, None)
        saver.finish()
        model, optimizer = model_at(-1.0)
        state = checkpoint.load(checkpoints, model, optimizer, ranks, mode="must")
        seen.append([sorted(f.name for f in checkpoints.iterdir()), state["at"], model.weight.unique().tolist()])

    save(1)
    filler.write_bytes(bytes(1_700_000))
    save(2)  # found before it is tried
    free, checkpoint.shutil.disk_usage = checkpoint.shutil.disk_usage, lambda _: type("Usage", (), {"free": 1 << 40})
    save(3)  # found by the write
    checkpoint.shutil.disk_usage = free
    filler.unlink()
    save(4)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    runtime.leave(0)
