"""The head's extra memory at full size, counted on the device `meta`: what is allocated, and nothing computed.

CUDA's branches run there. The kernels are replaced by stand-ins: a launch of Triton's allocates nothing of its own.
"""

import itertools
from functools import partial

import pytest
import torch
from cases import long_but
from count_memory import LiveBytes

import kernels.softmax
from config import LossConfig
from kernels import KernelBackend, LossPath, SamplingFilter, linear_loss
from kernels.softmax import CHUNK_ELEMENTS, SORT_ELEMENTS, logit_chunks
from loss import policy_loss

ROWS, WIDTH = 32768, 2048
KINDS = ("one pass", "two passes")
KERNELS = ("row_stats_kernel", "dlogits_kernel")


class Launches:
    """Stands for a kernel. chunks: (rows, columns, row stride) of the logits of each launch."""

    def __init__(self):
        self.chunks = []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, logits, *_, **__):
        if isinstance(logits, torch.Tensor):  # the forward of two passes has descriptors, and no logits
            self.chunks.append((*logits.shape, logits.stride(0)))


@pytest.fixture
def launches(monkeypatch):
    """name -> what was launched."""
    stand_ins = {name: Launches() for name in KERNELS}
    for name in KERNELS:
        monkeypatch.setattr(kernels.softmax, name, stand_ins[name])
    return stand_ins


def train(kind, vocab, columns, backend, sampling_filter=None, ref=False):
    """(extra MiB of forward and backward: beyond the inputs, and dX, dW in their dtype; the two; MiB of the largest
    tensor)."""
    inputs = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    hidden_RD, weight_VD = torch.empty(ROWS, WIDTH, **inputs), torch.empty(columns, WIDTH, **inputs)
    x_R, target_R = torch.empty(ROWS, device="meta"), torch.empty(ROWS, device="meta", dtype=torch.int64)
    pack = {"old_logp_R": x_R, "sampler_logp_R": x_R, "adv_R": x_R, "mask_R": x_R, "seq_R": target_R}
    pack |= {"ref_logp_R": x_R if ref else None, "num_valid_tokens": ROWS, "num_valid_seqs": 16, "cfg": LossConfig()}
    options = {"temperature": 1.0, "num_grad_rows": ROWS, "pack_loss": partial(policy_loss, **pack), "vocab": vocab}
    options |= {"path": LossPath(kind), "backend": backend, "sampling_filter": sampling_filter}
    with LiveBytes() as count:
        loss, _ = linear_loss(hidden_RD, weight_VD, target_R, **options)
        grads = torch.autograd.grad(loss, (hidden_RD, weight_VD))
    return (count.largest - sum(grad.nbytes for grad in grads)) / 2**20, grads, count.largest_one / 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, vocab, columns",
    long_but(
        [("one pass", 151936, 151936), ("one pass", 151665, 151936), ("two passes", 151665, 151665)],
        list(itertools.product(KINDS, (151665, 151669, 151936), (151936,)))
        + [(kind, 151665, 151665) for kind in KINDS],
    ),
)
def test_extra_memory(launches, kind, vocab, columns):
    extra, grads, _ = train(kind, vocab, columns, KernelBackend("triton"))
    print(f"{kind}, {vocab} of {columns}: {extra:.0f} MiB")
    assert [grad.shape for grad in grads] == [(ROWS, WIDTH), (columns, WIDTH)]
    assert all(grad.dtype == torch.bfloat16 for grad in grads)
    stride = -(-columns // 16) * 16
    chunks = launches["dlogits_kernel"].chunks
    # Equal but for the rest of a tile; the logits of the whole weight.
    assert chunks == 5 * [(5504, columns, stride)] + [(5248, columns, stride)]
    assert 5504 * stride * 4 / 2**20 < extra <= 4096


@pytest.mark.parametrize(("pack_rows", "same"), [(8192, True), (0, False)])
def test_packs_of_any_size_ask_for_one_buffer(pack_rows, same):
    """Of the logits: memory that one pack leaves serves the next one."""
    backend = KernelBackend("triton", None, pack_rows)
    weight_VD = torch.empty(151936, 8, device="meta", dtype=torch.bfloat16)
    asked = []
    for num_rows in (90, 4097, 5000, 8192):
        hidden_RD, target_R = weight_VD.new_empty(num_rows, 8), torch.empty(num_rows, device="meta", dtype=torch.int64)
        chunks = list(logit_chunks(hidden_RD, weight_VD, target_R, 151665, 1.0, backend))
        assert [chunk.rows.start for chunk in chunks[1:]] + [num_rows] == [chunk.rows.stop for chunk in chunks]
        asked.append({chunk.logits_CV.untyped_storage().nbytes() for chunk in chunks})
    assert (asked == 4 * [{4096 * 151936 * 4}]) == same


@pytest.mark.slow
def test_extra_memory_with_512_rows(launches):
    """Then the most is taken where dW, 1,187 MiB in float32, and dX are scaled into the gradients that are returned."""
    extra, *_ = train("one pass", 151665, 151936, KernelBackend("triton", 512))
    print(f"{extra:.0f} MiB")
    assert extra <= 1320


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(KernelBackend("triton"), id="triton"),
        pytest.param(KernelBackend("torch"), id="torch", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind, ref", [("one pass", False), ("two passes", True)])
def test_extra_memory_with_a_filter(launches, monkeypatch, kind, ref, backend):
    """Of a chunk of logits (3,190 MiB with Triton; 1,024, and two of them, with PyTorch) no second one is made. Sorting
    takes 64 MiB of logits at a time. All logits would be 19 GiB. In two passes dW is there twice."""
    for elements in (CHUNK_ELEMENTS, SORT_ELEMENTS):
        monkeypatch.setitem(elements, "meta", elements["cuda"])
    plain, *_ = train(kind, 151665, 151936, backend, None, ref)
    extra, _, largest_one = train(kind, 151665, 151936, backend, SamplingFilter(0.9, 50), ref)
    print(f"{kind}, {backend.name}: {plain:.0f} MiB without, {extra:.0f} with a filter, a tensor {largest_one:.0f}")
    assert plain <= 4096  # all logits would be 19,456
    assert extra <= plain + 400 + 1200 * ref
    assert largest_one <= (3200 if backend.name == "triton" else 1190)


def test_the_count_sees_what_is_alive_at_once():
    with LiveBytes() as count:
        a = torch.empty(1000, dtype=torch.uint8, device="meta")
        b = a.view(10, 100).float()  # 4,000 more; a view is none
        del a
        c = torch.empty(500, dtype=torch.uint8, device="meta")
        torch.empty(10, 100, device="meta").copy_(b)  # 4,000 more, and gone
        c.add_(1)
    assert count.largest == 4000 + 500 + 4000


def test_chunks_are_equal_and_as_few_as_can_be():
    """Rows of 151,936 logits: 5,632 at most. The last chunk lacks less than 128 rows for each of the others."""
    chosen = KernelBackend("triton")
    assert [chosen.rows(n, 151936) for n in (0, 1, 128, 5632, 5633)] == [128, 128, 128, 5632, 2944]
    assert chosen.most_rows(151936) == 5632 and chosen.most_rows(10**9) == 1024
    for num_rows in (*range(1, 40000, 997), 32768, 8192, 11264, 11265):
        size = chosen.rows(num_rows, 151936)
        count = -(-num_rows // size)
        assert size % 128 == 0 and count == -(-num_rows // 5632) and size * count - num_rows < 128 * count
    assert [KernelBackend("triton", 300).rows(n, 151936) for n in (100, 301, 10**6)] == [128, 256, 300]
