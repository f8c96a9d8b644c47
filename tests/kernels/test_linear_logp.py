"""kernels.logp.linear_logp: both backends against float64 logits and Python floats.

Without a GPU, Triton's kernels run in its interpreter on CPU tensors (conftest.py); with one, all of this runs there.
"""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from base.system.ranks import start_process_group
from kernels.backend import KernelBackend, choose_backend
from kernels.chunks import logit_chunks
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from kernels.matmul import bfloat16_factors, mm_wide
from kernels.reference import reference_logp
from kernels.sizes import TORCH_CHUNK_ELEMENTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH, TRITON = KernelBackend("torch"), KernelBackend("triton", 16)
backends = pytest.mark.parametrize("backend", [TORCH, TRITON], ids=["torch", "triton"])


def make_inputs(T, V=37, D=8, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(T, D, generator=generator, dtype=torch.float64) * scale
    weight_VD = torch.randn(V, D, generator=generator, dtype=torch.float64)
    target_T = torch.randint(V, (T,), generator=generator)
    hidden_TD, weight_VD = (x.to(DEVICE, dtype).requires_grad_() for x in (hidden_TD, weight_VD))
    return hidden_TD, weight_VD, target_T.to(DEVICE)


def run(function, hidden_TD, weight_VD, target_T, temperature=1.0, entropy_coef=0.4):
    """logp, entropy, dX, dW of sum(coefficient * logp) + entropy_coef * sum(coefficient^2 * entropy)."""
    hidden_TD, weight_VD = hidden_TD.detach().requires_grad_(), weight_VD.detach().requires_grad_()
    logp_T, entropy_T = function(hidden_TD, weight_VD, target_T, temperature)
    coef_T = torch.randn(len(target_T), generator=torch.Generator().manual_seed(9)).to(logp_T)
    (logp_T * coef_T + entropy_coef * coef_T**2 * entropy_T).sum().backward()
    return logp_T, entropy_T, hidden_TD.grad, weight_VD.grad


def ours(backend):
    return lambda x, w, y, tau: linear_logp(x, w, y, LogitOptions(temperature=tau, backend=backend))


def oracle(hidden_TD, weight_VD, target_T, temperature=1.0):
    return run(reference, hidden_TD.double(), weight_VD.double(), target_T, temperature)


def reference(hidden_TD, weight_VD, target_T, temperature=1.0):
    return reference_logp(hidden_TD, weight_VD, target_T, LogitOptions(temperature))


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(inputs, backend, temperature=1.0, logp=1e-4, gradient=1e-5):
    """Against float64: absolute error of logp and entropy; error of each gradient relative to its norm, or to 1."""
    got, want = run(ours(backend), *inputs, temperature), oracle(*inputs, temperature)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a - b).abs().max() <= logp, (a - b).abs().max()
    for a, b in zip(got[2:], want[2:], strict=True):
        assert a.dtype == inputs[0].dtype and a.shape == b.shape
        assert (a - b).norm() <= gradient * b.norm().clamp(min=1), (a - b).norm() / b.norm()
    return got


@pytest.mark.parametrize(
    "backend, dtype, rel",
    [
        (TORCH, torch.float64, 1e-12),
        (TORCH, torch.float32, 2e-6),
        (TRITON, torch.float64, 1e-12),
        (TRITON, torch.float32, 2e-6),
    ],
)
def test_values_equal_a_loop_over_python_floats(backend, dtype, rel):
    hidden_TD, weight_VD, target_T = make_inputs(6, V=11, dtype=dtype)
    for tau in (1.0, 0.7):
        logp_T, entropy_T = ours(backend)(hidden_TD, weight_VD, target_T, tau)
        assert logp_T.dtype == entropy_T.dtype == dtype  # float64 never goes to Triton
        for t, row in enumerate(hidden_TD.tolist()):
            z = [sum(a * b for a, b in zip(row, w, strict=True)) / tau for w in weight_VD.tolist()]
            log_sum = math.log(sum(math.exp(x) for x in z))
            entropy = sum(math.exp(x - log_sum) * (log_sum - x) for x in z)
            assert logp_T[t].item() == pytest.approx(z[target_T[t]] - log_sum, rel=rel)
            assert entropy_T[t].item() == pytest.approx(entropy, rel=rel)


@pytest.mark.slow
def test_gradients_equal_finite_differences(monkeypatch):
    monkeypatch.setitem(TORCH_CHUNK_ELEMENTS, DEVICE, 14)  # chunks of 2, 2 and 1 rows
    hidden_TD, weight_VD, target_T = make_inputs(5, V=7, D=3, dtype=torch.float64)
    for function in (
        lambda x, w: ours(TORCH)(x, w, target_T, 1.0),
        lambda x, w: ours(TORCH)(x, w, target_T, 0.7),
        lambda x, w: linear_logp(x, w, target_T, LogitOptions(0.7))[0],
        lambda x, w: ours(TORCH)(x, w, target_T, 0.7)[1],  # entropy alone: logp's gradient is absent
    ):
        assert torch.autograd.gradcheck(function, (hidden_TD, weight_VD))


def test_chunks_stay_within_the_budget(monkeypatch):
    for rows, vocab, budget in [(100, 7, 70), (100, 7, 76), (5, 7, 700), (3, 50, 7), (0, 7, 70)]:
        monkeypatch.setitem(TORCH_CHUNK_ELEMENTS, "cpu", budget)
        matrices = torch.zeros(rows, 3), torch.zeros(vocab, 3)
        chunks = logit_chunks(*matrices, torch.zeros(rows), LogitOptions(vocab=vocab, backend=TORCH))
        parts = [chunk.rows for chunk in chunks]
        assert [t for c in parts for t in range(c.start, c.stop)] == list(range(rows))
        assert all((c.stop - c.start) * vocab <= max(budget, vocab) for c in parts)


@backends
@pytest.mark.parametrize("temperature", [1e-3, 0.1, 50.0])
def test_temperatures(backend, temperature):
    check(make_inputs(9, V=300, scale=min(1, temperature)), backend, temperature)


@backends
def test_no_rows(backend):
    hidden_TD, weight_VD, target_T = make_inputs(0)
    logp_T, entropy_T = ours(backend)(hidden_TD, weight_VD, target_T, 0.7)
    assert logp_T.shape == entropy_T.shape == (0,)
    (logp_T.sum() + entropy_T.sum()).backward()
    assert hidden_TD.grad.shape == (0, 8) and (weight_VD.grad == 0).all()


@pytest.mark.slow("triton")
@backends
def test_sliced_and_strided_inputs(backend):
    hidden_TD, weight_VD, target_T = make_inputs(20, V=37)
    cut = hidden_TD[:, 1:6], weight_VD[:29, 1:6], (target_T % 29).repeat_interleave(2)[::2]
    want = check(cut, backend, 1.0, 4e-6, 1e-6)
    wide_DT = hidden_TD.detach().T.contiguous().requires_grad_()  # so that .T of it is not contiguous
    logp_T, entropy_T = ours(backend)(wide_DT.T[:, 1:6], *cut[1:], 1.0)
    coef_T = torch.randn(20, generator=torch.Generator().manual_seed(9)).to(logp_T)
    (logp_T * coef_T + 0.4 * coef_T**2 * entropy_T).sum().backward()
    torch.testing.assert_close(logp_T, want[0])
    torch.testing.assert_close(wide_DT.grad.T[:, 1:6], want[2])
    torch.testing.assert_close(weight_VD.grad[:29, 1:6], want[3])
    assert (weight_VD.grad[29:] == 0).all()  # rows beyond the vocabulary take no part


@pytest.mark.slow
@pytest.mark.parametrize("backend", [TORCH, KernelBackend("triton", 4)], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype, gradient", [(torch.bfloat16, 2.5e-3), (torch.float16, 4e-4)])
def test_sixteen_bits_have_float32_logits_and_sums(monkeypatch, backend, dtype, gradient):
    """16 chunks; what is left is the rounding of dz, of dX and, once, of dW."""
    monkeypatch.setitem(TORCH_CHUNK_ELEMENTS, DEVICE, 4 * 501)
    check(make_inputs(64, V=501, D=64, dtype=dtype, scale=0.3), backend, 1.0, 2e-5, gradient)


@pytest.mark.parametrize("dtypes", list(itertools.product((torch.float32, torch.bfloat16), repeat=2)), ids=str)
def test_products_are_float32_whatever_the_factors(dtypes):
    """Had factors of float32 been rounded, as a CPU may those that were bfloat16 before, it would be off by 1e-3."""
    if DEVICE == "cuda" and dtypes[0] != dtypes[1]:
        pytest.skip("CUDA's matmul takes factors of one dtype")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(96, 96, generator=generator).to(DEVICE, dtype) for dtype in dtypes)
    out = torch.full((96, 96), torch.nan, device=DEVICE)
    want, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((mm_wide(a, b, out) - want).abs() / size).max() < 1e-6
    assert ((mm_wide(a, b, out, accumulate=True) - 2 * want).abs() / size).max() < 1e-6


def test_a_run_sums_in_float32(monkeypatch):
    """cuBLAS may split a sum over the vocabulary or over many rows into parts, and by default add those in bfloat16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = True

    def join(*_, **__):
        raise ConnectionError

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    try:
        with pytest.raises(ConnectionError):
            start_process_group(1)
        assert not matmul.allow_bf16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def test_rounding_of_factors_ends_with_its_block():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), bfloat16_factors(True):
        assert matmul.fp32_precision == "bf16"
        raise ZeroDivisionError
    assert matmul.fp32_precision == before != "bf16"


@pytest.mark.slow("triton")
@backends
def test_entropy_alone_has_its_gradient(backend):
    inputs = make_inputs(20)
    for function in (reference, ours(backend)):
        hidden_TD, weight_VD = (x.detach().double().requires_grad_() for x in inputs[:2])
        narrow = (hidden_TD, weight_VD) if function is reference else (hidden_TD.float(), weight_VD.float())
        function(*narrow, inputs[2], 0.7)[1].sum().backward()
        if function is reference:
            want = hidden_TD.grad, weight_VD.grad
    assert relative(hidden_TD.grad, want[0]) <= 1e-6 and relative(weight_VD.grad, want[1]) <= 1e-6


@pytest.mark.slow
@backends
@pytest.mark.parametrize("hidden_grad, weight_grad, matmuls", [(1, 1, 4), (1, 0, 3), (0, 1, 3), (0, 0, 1)])
def test_only_needed_gradients_are_computed(backend, hidden_grad, weight_grad, matmuls):
    hidden_TD, weight_VD, target_T = make_inputs(20)
    hidden_TD.requires_grad_(bool(hidden_grad))
    weight_VD.requires_grad_(bool(weight_grad))
    want = run(ours(backend), hidden_TD, weight_VD, target_T, entropy_coef=0)
    with FlopCounterMode(display=False) as flops:
        logp_T, _ = linear_logp(hidden_TD, weight_VD, target_T, LogitOptions(backend=backend))
        coef_T = torch.randn(20, generator=torch.Generator().manual_seed(9)).to(logp_T)
        if logp_T.requires_grad:
            (logp_T * coef_T).sum().backward()
    assert flops.get_total_flops() == matmuls * 2 * 20 * 37 * 8
    for x, used, grad in ((hidden_TD, hidden_grad, want[2]), (weight_VD, weight_grad, want[3])):
        assert (x.grad is None) == (not used)
        if used:
            torch.testing.assert_close(x.grad, grad)


@backends
def test_programming_errors_are_refused(backend):
    hidden_TD, weight_VD, target_T = make_inputs(5)
    options = LogitOptions(backend=backend)
    for bad in [
        (hidden_TD.bfloat16(), weight_VD, target_T),
        (hidden_TD[:, :-1], weight_VD, target_T),
        (hidden_TD, weight_VD, target_T[:-1]),
    ]:
        with pytest.raises(AssertionError):
            linear_logp(*bad, options)
    with pytest.raises(AssertionError):
        linear_logp(hidden_TD, weight_VD, target_T, LogitOptions(0.0, backend=backend))
    if DEVICE == "cpu":  # a device assert would be the end of CUDA in this process
        for wrong in (target_T + 37, target_T - 37):
            with pytest.raises((IndexError, RuntimeError)):
                linear_logp(hidden_TD, weight_VD, wrong, options)


def test_the_choice():
    assert (
        choose_backend("auto", "cuda", 512) == KernelBackend("triton", 512) and choose_backend("auto", "cpu") == TORCH
    )
    assert choose_backend("torch", "cuda") == TORCH and choose_backend("triton", "cuda") == KernelBackend("triton")
    assert KernelBackend("torch").describe(151936).startswith("output layer: PyTorch")
    chosen = KernelBackend("triton").describe(151936)
    assert chosen == "output layer: Triton kernels, at most 5632 rows of logits at a time"
