"""docs/scale.md has the tables that bench/scale.py prints; what it counts is what FSDP2 does, and one time by hand."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCALE = runpy.run_path(str(ROOT / "bench" / "scale.py"))


def test_the_page_is_what_the_script_prints():
    page = (ROOT / "docs" / "scale.md").read_text()
    _, _, rest = page.partition("<!-- written by bench/scale.py -->\n")
    tables, end, _ = rest.partition("<!-- end -->\n")
    assert end and tables == SCALE["page"]() + "\n", "run bench/scale.py"


@pytest.mark.parametrize(("name", "weights"), [("Qwen2.5-1.5B", 1.54e9), ("Qwen3-8B", 8.2e9), ("Qwen2.5-32B", 32.5e9)])
def test_the_models_have_the_weights_of_their_cards(name, weights):
    assert SCALE["Shape"].of(name).size == pytest.approx(weights, rel=0.01)


def test_a_time_by_hand():
    """The reduce-scatters of Qwen3-8B on 64 GPUs: 39 units, 4 micro-batches of 4 bytes for each of 8.1907 G weights.

    8 nodes: 8 hops of 14 us and 55 of 3.4 us after 8.4 us; 320 GB/s into a node.
    """
    shape = SCALE["Shape"].of("Qwen3-8B")
    each = next(c for c in SCALE["fsdp"](shape, 64, 320e9) if c.name == "reduce-scatter")
    assert each.count == 39 * 4 and each.num_bytes == pytest.approx(131.05e9, rel=1e-4)
    assert each.seconds == pytest.approx(131.05e9 * 63 / 64 / 320e9 + 156 * 307.4e-6, rel=1e-3)


COUNT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from model import load_policy

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
model = load_policy(sys.argv[1], device="cpu", mesh=dist.init_device_mesh("cpu", (64,)))
ids = torch.arange(7)
for _ in range(3):
    with CommDebugMode() as comms:
        model(ids, ids, torch.tensor([0, 7])).float().mean().backward()
counts = {str(op): count for op, count in comms.get_comm_counts().items()}
gathers, scatters = (sum(n for op, n in counts.items() if kind in op) for kind in ("gather", "reduce_scatter"))
print(len(model.model["layers"]), gathers, scatters, sum(counts.values()))
"""


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_a_micro_batch(tmp_path, tied):
    """On 64 ranks of which one is there: FSDP2's own collectives of a forward and its backward."""
    from tiny import make_tiny

    make_tiny(tmp_path, tied=tied)
    command = [sys.executable, "-c", COUNT, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    num_blocks, gathers, scatters, all_of_them = map(int, done.stdout.split())
    shape = SCALE["Shape"](num_blocks, 1, 1, 1 if tied else 3)
    counts = {c.name: c.count / SCALE["num_micro_batches"](64) for c in SCALE["fsdp"](shape, 64, 320e9)}
    assert gathers == counts["gather, forward"] + counts["gather, backward"]
    assert scatters == counts["reduce-scatter"] == num_blocks + shape.num_rest_units
    assert all_of_them == gathers + scatters
