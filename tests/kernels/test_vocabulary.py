"""The head over all rows of a weight that is padded beyond the tokenizer's vocabulary, of any size, against float64.

What lies beyond would be seen: it has large weights, and buffers start as NaN.
"""

import pytest
import torch
from cases import long_but
from test_linear_loss import COVER, DEVICE, TORCH, Case, close, path_of

import kernels.softmax
from kernels import KernelBackend, linear_logp
from kernels.softmax import logit_chunks

TRITON = KernelBackend("triton", 4)
PATHS = {"torch": TORCH} | {kind: path_of(kind, TRITON) for kind in ("one pass", "fused", "two passes")}
DTYPES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 2 * 2**-8)}
ROWS = 6  # a chunk of 4 and one of 2; of the first, a program of the fused kernel walks two
# (vocabulary, rows of the weight): odd, prime, padded; one below and above a block of 32 columns, a tile of 256.
SIZES = [(97, 97), (97, 128), (95, 96), (96, 96), (65, 96), (64, 113), (63, 64), (31, 33), (33, 47), (1, 1), (1, 16)]
SIZES += [(63, 63), (255, 256), (256, 300), (257, 263), (257, 512), (512, 769)]
FEW = [("fused", "bfloat16", 97, 97), ("fused", "float32", 64, 113), ("one pass", "bfloat16", 97, 128)]
FEW += [("one pass", "float32", 31, 33), ("two passes", "bfloat16", 65, 96), ("two passes", "float32", 257, 263)]
FEW += [("torch", "float32", 97, 128), ("torch", "bfloat16", 63, 64), ("fused", "bfloat16", 63, 64)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of 32 columns, so that a row has many; and nothing that is not written can pass for a number."""
    monkeypatch.setattr(kernels.softmax, "BLOCK", 32)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, vocab, columns",
    long_but(
        [("float32", 64, 113), ("bfloat16", 97, 128), ("bfloat16", 63, 63)],
        [(dtype, *size) for dtype in DTYPES for size in SIZES],
    ),
)
def test_dlogits_beyond_the_vocabulary_are_0(dtype, vocab, columns):
    """To the end of the row in memory, which is a multiple of 16 elements long, so that 16 bytes move at a time."""
    dtype, _ = DTYPES[dtype]
    hidden_RD, weight_VD = beyond(ROWS, 13, dtype) / 100, beyond(columns, 13, dtype) / 100
    target_R = torch.arange(ROWS, device=DEVICE) * 7 % vocab
    g_R, h_R = torch.linspace(-1, 1, ROWS, device=DEVICE), torch.linspace(2, -1, ROWS, device=DEVICE)
    logits_RV = (hidden_RD.double() @ weight_VD[:vocab].double().T / 0.7).requires_grad_()
    logp_RV = logits_RV.log_softmax(1)
    value = (g_R * logp_RV[range(ROWS), target_R]).sum() - (h_R[:, None] * logp_RV.exp() * logp_RV).sum()
    (want_RV,) = torch.autograd.grad(value, logits_RV)
    for chunk in logit_chunks(hidden_RD, weight_VD, target_R, vocab, 0.7, TRITON):
        stride = chunk.logits_CV.stride(0)
        assert stride % 16 == 0 and stride < columns + 16 and chunk.logits_CV.shape[1] == columns
        chunk.logp_and_entropy()
        dz_CV = chunk.dlogits_(g_R[chunk.rows], h_R[chunk.rows])
        assert dz_CV.stride(0) * dz_CV.element_size() == 4 * stride and dz_CV.shape[1] == columns
        torch.testing.assert_close(0.7 * dz_CV[:, :vocab].double(), want_RV[chunk.rows], rtol=2**-8, atol=1e-5)
        rows_CV = dz_CV.as_strided((len(dz_CV), stride), dz_CV.stride())
        assert (rows_CV[:, vocab:] == 0).all() and not rows_CV[:, vocab:].signbit().any()


@pytest.mark.parametrize("backend", [TORCH.backend, TRITON], ids=["torch", "triton"])
def test_a_slice_of_the_weight_is_the_same(backend):
    """`weight[:vocab]`, which cuts a padded vocabulary off: to the bit with PyTorch, forward and backward."""
    results = []
    for whole in (True, False):
        case = Case(ROWS, 65)
        case.weight = torch.cat([case.weight, beyond(31, 13, torch.float32)])
        hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
        options = {"temperature": 0.7, "return_entropy": True, "backend": backend}
        matrix, vocab = (weight, 65) if whole else (weight[:65], None)
        logp, entropy = linear_logp(hidden, matrix, case.target, vocab=vocab, **options)
        grads = torch.autograd.grad((logp * logp.detach() + entropy).sum(), (hidden, weight))
        results.append((logp, entropy, *grads))
    for a, b in zip(*results, strict=True):
        assert a.equal(b) if backend is TORCH.backend else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


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
