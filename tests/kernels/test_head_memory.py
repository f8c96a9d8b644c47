"""The head's extra memory at full size, counted on the device `meta`: what is allocated, and nothing computed.

CUDA's branches run there. The kernels are replaced by stand-ins: a launch of Triton's allocates nothing of its own.
"""

import pytest
import torch
from count_memory import LiveBytes

from kernels import sizes
from kernels.backend import KernelBackend
from kernels.chunks import logit_chunks
from kernels.logits import LogitOptions


@pytest.mark.parametrize(("pack_rows", "same"), [(8192, True), (0, False)])
def test_packs_of_any_size_ask_for_one_buffer(pack_rows, same):
    """Of the logits: memory that one pack leaves serves the next one."""
    options = LogitOptions(vocab=151665, backend=KernelBackend("triton", None, pack_rows))
    weight_VD = torch.empty(151936, 8, device="meta", dtype=torch.bfloat16)
    asked = []
    for num_rows in (90, 4097, 5000, 8192):
        hidden_RD, target_R = weight_VD.new_empty(num_rows, 8), torch.empty(num_rows, device="meta", dtype=torch.int64)
        chunks = list(logit_chunks(hidden_RD, weight_VD, target_R, options))
        assert [chunk.rows.start for chunk in chunks[1:]] + [num_rows] == [chunk.rows.stop for chunk in chunks]
        asked.append({chunk.logits_CV.untyped_storage().nbytes() for chunk in chunks})
    assert (asked == 4 * [{4096 * 151936 * 4}]) == same


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
    assert [sizes.triton_rows(n, 151936) for n in (0, 1, 128, 5632, 5633)] == [128, 128, 128, 5632, 2944]
    assert sizes.most_triton_rows(151936) == 5632 and sizes.most_triton_rows(10**9) == 1024
    for num_rows in (*range(1, 40000, 997), 32768, 8192, 11264, 11265):
        size = sizes.triton_rows(num_rows, 151936)
        count = -(-num_rows // size)
        assert size % 128 == 0 and count == -(-num_rows // 5632) and size * count - num_rows < 128 * count
    assert [sizes.triton_rows(n, 151936, 300) for n in (100, 301, 10**6)] == [128, 256, 300]
