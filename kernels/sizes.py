"""How many rows of logits, or of a block's input in host memory, are a part of their own: what the trainer allocates,
and what the memory plan of --check counts.

Imports no torch, because --check has none.
"""

import math

TILE = 128  # rows; chunks of whole tiles have fast matmuls
ROW_ALIGNMENT = 16  # logits; a row's length in memory is a multiple, so that kernels move 16 bytes at a time
TRITON_CHUNK_BYTES = int(3.25 * 2**30)  # float32 logits of a chunk, unless the config gives its rows
MIN_TRITON_ROWS = 1024  # below, dW's matmul, which reads and writes all of dW, is memory-bound
# Logits of a chunk with PyTorch. In float32: 64 MiB on a CPU; 1 GiB on a GPU, which has 1000 rows and more then.
TORCH_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
SORT_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # logits that top_p sorts at once
SORT_BYTES = 20  # memory that sorting takes for each of them
# torch rounds a block of pinned memory up to a power of two: an input that waits there is in parts of this size.
HOST_PART = 16 << 20


def row_stride(num_columns: int) -> int:
    """Length in memory of a row of num_columns logits, with Triton."""
    return math.ceil(num_columns / ROW_ALIGNMENT) * ROW_ALIGNMENT


def most_triton_rows(stride: int, chunk_rows: int | None = None) -> int:
    """Most rows of a chunk with Triton, whose rows are `stride` logits long. chunk_rows: the config's limit, if any."""
    if chunk_rows is not None:
        return chunk_rows
    fitting = TRITON_CHUNK_BYTES // (4 * stride)
    return max(MIN_TRITON_ROWS, fitting // TILE * TILE)


def triton_rows(num_rows: int, stride: int, chunk_rows: int | None = None) -> int:
    """Rows of each chunk with Triton: whole tiles, and equal chunks, as even a small chunk rewrites all of dW."""
    most = most_triton_rows(stride, chunk_rows)
    num_chunks = max(1, math.ceil(num_rows / most))
    num_tiles = max(1, math.ceil(num_rows / num_chunks / TILE))
    return min(most, num_tiles * TILE)


def torch_rows(vocab: int, device_type: str) -> int:
    """Rows of each chunk with PyTorch: one at least, however large the vocabulary."""
    return max(1, TORCH_CHUNK_ELEMENTS[device_type] // vocab)


def host_rows(row_bytes: int) -> int:
    """Rows of a part in host memory."""
    return max(1, HOST_PART // row_bytes)


def sorted_rows(vocab: int, device_type: str) -> int:
    """Rows that top_p sorts at once."""
    return max(1, SORT_ELEMENTS[device_type] // vocab)
