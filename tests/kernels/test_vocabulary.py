"""The head over all rows of a weight that is padded beyond the tokenizer's vocabulary, of any size, against float64.

What lies beyond would be seen: it has large weights, and buffers start as NaN.
"""

import pytest
import torch
from cases import long_but
from test_linear_loss import COVER, DEVICE, TORCH, Case, close, path_of

from kernels import row_kernels
from kernels.backend import KernelBackend

TRITON = KernelBackend("triton", 4)
PATHS = {"torch": TORCH} | {kind: path_of(kind, TRITON) for kind in ("one pass", "two passes")}
DTYPES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 2 * 2**-8)}
ROWS = 6  # a chunk of 4 and one of 2
# (vocabulary, rows of the weight): odd, prime, padded; one below and above a block of 32 columns, a tile of 256.
SIZES = [(97, 97), (97, 128), (95, 96), (96, 96), (65, 96), (64, 113), (63, 64), (31, 33), (33, 47), (1, 1), (1, 16)]
SIZES += [(63, 63), (255, 256), (256, 300), (257, 263), (257, 512), (512, 769)]
FEW = [("one pass", "bfloat16", 97, 97), ("one pass", "float32", 64, 113), ("one pass", "bfloat16", 97, 128)]
FEW += [("one pass", "float32", 31, 33), ("two passes", "bfloat16", 65, 96), ("two passes", "float32", 257, 263)]
FEW += [("torch", "float32", 97, 128), ("torch", "bfloat16", 63, 64), ("one pass", "bfloat16", 63, 64)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of 32 columns, so that a row has many; and nothing that is not written can pass for a number."""
    monkeypatch.setattr(row_kernels, "BLOCK", 32)
    empty = torch.Tensor.new_empty

    def new_empty(self, *size, **options):
        new = empty(self, *size, **options)
        return new.fill_(torch.nan) if new.is_floating_point() and "device" not in options else new

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def beyond(rows, width, dtype):
    """Rows of a weight that must not be seen."""
    return (100 * torch.randn(rows, width, generator=torch.Generator().manual_seed(1))).to(DEVICE, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, dtype, vocab, columns",
    long_but(FEW, [(path, dtype, *size) for path in PATHS for dtype in DTYPES for size in SIZES]),
)
def test_padded_vocabulary(path, dtype, vocab, columns):
    """Loss, statistics and both gradients; dW of the rows beyond is exactly 0."""
    cfg, (dtype, gradient) = COVER[1], DTYPES[dtype]
    case = Case(ROWS, vocab, dtype=dtype, seed=columns)
    want = case.oracle(cfg)
    case.weight = torch.cat([case.weight, beyond(columns - vocab, 13, dtype)])
    *got, grad_VD = case.ours(cfg, PATHS[path], vocab=vocab)
    close((*got, grad_VD[:vocab]), want, gradient)
    assert grad_VD.shape == (columns, 13) and (grad_VD[vocab:] == 0).all()


def test_ids_beyond_the_vocabulary_are_refused():
    if DEVICE == "cpu":  # a device assert would be the end of CUDA in this process
        for path in PATHS.values():
            case = Case(5, 37)
            case.target[2] = 33
            with pytest.raises((IndexError, RuntimeError)):
                case.ours(COVER[0], path, vocab=33)
    for vocab in (0, 38):
        with pytest.raises(AssertionError):
            Case(5, 37).ours(COVER[0], TORCH, vocab=vocab)
