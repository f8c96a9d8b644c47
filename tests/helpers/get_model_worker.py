"""The process of tests/examples/test_get_model.py: get_model_worker.py CONSTANTS [ARGUMENT...]

examples/smollm2/get_model.py with some of its constants set to others (a JSON object), and with `tmpfs`, among them, a
disk of that many bytes at the folder of its last argument, in a mount namespace of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.smollm2 import get_model


def main(constants: dict, argv: list[str]) -> int:
    if size := constants.pop("tmpfs", None):
        disk = Path(argv[-1]).parent
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    else:
        disk = None
    for name, value in constants.items():
        assert hasattr(get_model, name), name
        setattr(get_model, name, value)
    get_model.GGUF_IS = tuple(get_model.GGUF_IS)
    get_model.FILES = {name: tuple(value) for name, value in get_model.FILES.items()}
    code = get_model.main(argv)
    if disk:
        print("left:", sorted(os.listdir(disk)))
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
