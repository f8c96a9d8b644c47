"""kernels/: linear_logp against Python floats, float64 logits, finite differences, and its memory bound."""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import linear_logp

module = importlib.import_module("kernels.linear_logp")  # `kernels.linear_logp` is the function


def make_inputs(T, V=37, D=8, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(T, D, generator=generator, dtype=torch.float64) * scale
    weight_VD = torch.randn(V, D, generator=generator, dtype=torch.float64)
    target_T = torch.randint(V, (T,), generator=generator)
    return hidden_TD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), target_T


def run(function, hidden_TD, weight_VD, target_T, temperature=1.0, entropy_coef=0.4):
    """logp, entropy, dX, dW of sum(coefficient * logp) + entropy_coef * sum(coefficient^2 * entropy)."""
    hidden_TD, weight_VD = hidden_TD.detach().requires_grad_(), weight_VD.detach().requires_grad_()
    logp_T, entropy_T = function(hidden_TD, weight_VD, target_T, temperature)
    coef_T = torch.randn(len(target_T), generator=torch.Generator().manual_seed(9)).to(logp_T.dtype)
    (logp_T * coef_T + entropy_coef * coef_T**2 * entropy_T).sum().backward()
    return logp_T, entropy_T, hidden_TD.grad, weight_VD.grad


def ours(hidden_TD, weight_VD, target_T, temperature):
    return linear_logp(hidden_TD, weight_VD, target_T, temperature=temperature, return_entropy=True)


def oracle(hidden_TD, weight_VD, target_T, temperature=1.0):
    return run(module.reference, hidden_TD.double(), weight_VD.double(), target_T, temperature)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def test_values_equal_a_loop_over_python_floats():
    hidden_TD, weight_VD, target_T = make_inputs(6, V=11, dtype=torch.float64)
    for tau in (1.0, 0.7):
        logp_T, entropy_T = ours(hidden_TD, weight_VD, target_T, tau)
        assert logp_T.dtype == entropy_T.dtype == torch.float64
        for t, row in enumerate(hidden_TD.tolist()):
            z = [sum(a * b for a, b in zip(row, w, strict=True)) / tau for w in weight_VD.tolist()]
            log_sum = math.log(sum(math.exp(x) for x in z))
            assert logp_T[t].item() == pytest.approx(z[target_T[t]] - log_sum, rel=1e-13)
            assert entropy_T[t].item() == pytest.approx(
                sum(math.exp(x - log_sum) * (log_sum - x) for x in z), rel=1e-12
            )


def test_gradients_equal_finite_differences(monkeypatch):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 14)  # chunks of 2, 2 and 1 rows
    hidden_TD, weight_VD, target_T = make_inputs(5, V=7, D=3, dtype=torch.float64)
    for tau in (1.0, 0.7):
        assert torch.autograd.gradcheck(
            lambda x, w, tau=tau: ours(x, w, target_T, tau), (hidden_TD, weight_VD)
        )
        assert torch.autograd.gradcheck(
            lambda x, w, tau=tau: linear_logp(x, w, target_T, temperature=tau), (hidden_TD, weight_VD)
        )
        # Entropy alone, so that logp's gradient is absent.
        assert torch.autograd.gradcheck(
            lambda x, w, tau=tau: ours(x, w, target_T, tau)[1], (hidden_TD, weight_VD)
        )


@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunk_boundaries(monkeypatch, T, temperature):
    V = 37
    inputs = make_inputs(T, V)
    want = oracle(*inputs, temperature)
    for budget in (16 * V, 17 * V - 1, 1, 1 << 24):  # 16 rows twice, one row, everything in one chunk
        monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", budget)
        got = run(ours, *inputs, temperature)
        assert [x.dtype for x in got] == [torch.float32] * 4
        assert max(relative(a, b) for a, b in zip(got, want, strict=True)) < 1e-6


def test_chunks_stay_within_the_budget(monkeypatch):
    for rows, vocab, budget in [(100, 7, 70), (100, 7, 76), (5, 7, 700), (3, 50, 7), (0, 7, 70)]:
        monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", budget)
        chunks = module._chunks(rows, vocab, "cpu")
        assert [t for c in chunks for t in range(c.start, c.stop)] == list(range(rows))
        assert all((c.stop - c.start) * vocab <= max(budget, vocab) for c in chunks)


def test_no_rows():
    hidden_TD, weight_VD, target_T = make_inputs(0)
    logp_T, entropy_T = ours(hidden_TD, weight_VD, target_T, 0.7)
    assert logp_T.shape == entropy_T.shape == (0,)
    (logp_T.sum() + entropy_T.sum()).backward()
    assert hidden_TD.grad.shape == (0, 8) and weight_VD.grad.equal(torch.zeros(37, 8))


@pytest.mark.parametrize(
    "kind, offset",
    [("equal", 0.0), ("equal", 300.0), ("low", -1000.0), ("one huge", 0.0), ("one column", 0.0)],
)
def test_extreme_logits(kind, offset):
    # The last hidden unit is 1, so that the last weight column is added to the logits as it is.
    hidden_TD, weight_VD, _ = (x.detach() for x in make_inputs(9, V=1 if kind == "one column" else 37))
    target_T = torch.arange(9) % len(weight_VD)
    hidden_TD[:, -1], weight_VD[:, -1] = 1, offset
    if kind == "equal":
        hidden_TD[:, :-1] = 0
    if kind == "one huge":
        weight_VD[3, -1] = 800.0
    got, want = run(ours, hidden_TD, weight_VD, target_T), oracle(hidden_TD, weight_VD, target_T)
    assert all(x.isfinite().all() for x in got) and (got[0] <= 0).all()
    # The matmul rounds logits near 1000 to 3e-5 already. dX's last column, offset * sum(dz) = 0, is noise.
    for a, b in zip((*got[:2], got[2][:, :-1], got[3]), (*want[:2], want[2][:, :-1], want[3]), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    if kind == "equal":
        torch.testing.assert_close(got[1], torch.full((9,), math.log(37)), rtol=1e-6, atol=0)


def test_sliced_and_strided_inputs():
    hidden_TD, weight_VD, target_T = make_inputs(20, V=37)
    want = run(ours, hidden_TD[:, 1:6], weight_VD[:29, 1:6], target_T % 29)
    wide_DT = hidden_TD.detach().T.contiguous().requires_grad_()  # so that .T of it is not contiguous
    logp_T, entropy_T = ours(wide_DT.T[:, 1:6], weight_VD[:29, 1:6], target_T % 29, 1.0)
    coef_T = torch.randn(20, generator=torch.Generator().manual_seed(9))
    (logp_T * coef_T + 0.4 * coef_T**2 * entropy_T).sum().backward()
    torch.testing.assert_close(logp_T, want[0])
    torch.testing.assert_close(wide_DT.grad.T[:, 1:6], want[2])
    torch.testing.assert_close(weight_VD.grad[:29, 1:6], want[3])
    # Rows beyond the vocabulary take no part: no probability, no gradient.
    assert (weight_VD.grad[29:] == 0).all()
    torch.testing.assert_close(
        want[0].double(),
        oracle(hidden_TD[:, 1:6], weight_VD[:29, 1:6], target_T % 29)[0],
        rtol=1e-6,
        atol=1e-6,
    )


def test_bfloat16_is_as_good_as_bfloat16_logits_allow(monkeypatch):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 4 * 501)
    inputs = make_inputs(512, V=501, D=64, dtype=torch.bfloat16, scale=0.3)
    got, naive, want = run(ours, *inputs), run(module.reference, *inputs), oracle(*inputs)
    assert [x.dtype for x in got] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    # 128 chunks: with dW summed in bfloat16 instead of float32, its error would be more than twice naive's.
    errors = [(relative(a, c), relative(b, c)) for a, b, c in zip(got, naive, want, strict=True)]
    assert all(error <= 1.1 * naive_error < 6e-3 for error, naive_error in errors), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    inputs = make_inputs(20, dtype=dtype)
    want = run(ours, *inputs)
    with torch.autocast("cpu", torch.float16):
        got = run(ours, *inputs)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_entropy_changes_nothing_else_and_inputs_stay():
    hidden_TD, weight_VD, target_T = make_inputs(20)
    before = hidden_TD.detach().clone(), weight_VD.detach().clone(), target_T.clone()
    linear_logp(hidden_TD, weight_VD, target_T).sum().backward()
    want = hidden_TD.grad.clone(), weight_VD.grad.clone()
    hidden_TD.grad = weight_VD.grad = None
    ours(hidden_TD, weight_VD, target_T, 1.0)[0].sum().backward()
    assert hidden_TD.grad.equal(want[0]) and weight_VD.grad.equal(want[1])
    assert hidden_TD.equal(before[0]) and weight_VD.equal(before[1]) and target_T.equal(before[2])


@pytest.mark.parametrize("hidden_grad, weight_grad, matmuls", [(1, 1, 4), (1, 0, 3), (0, 1, 3), (0, 0, 1)])
def test_only_needed_gradients_are_computed(hidden_grad, weight_grad, matmuls):
    hidden_TD, weight_VD, target_T = make_inputs(20)
    hidden_TD.requires_grad_(bool(hidden_grad))
    weight_VD.requires_grad_(bool(weight_grad))
    want = run(ours, hidden_TD, weight_VD, target_T, entropy_coef=0)
    with FlopCounterMode(display=False) as flops:
        logp_T = linear_logp(hidden_TD, weight_VD, target_T)
        coef_T = torch.randn(20, generator=torch.Generator().manual_seed(9))
        if logp_T.requires_grad:
            (logp_T * coef_T).sum().backward()
    assert flops.get_total_flops() == matmuls * 2 * 20 * 37 * 8
    for x, used, grad in ((hidden_TD, hidden_grad, want[2]), (weight_VD, weight_grad, want[3])):
        assert (x.grad is None) == (not used)
        if used:
            torch.testing.assert_close(x.grad, grad)


def test_programming_errors_are_refused():
    hidden_TD, weight_VD, target_T = make_inputs(5)
    for bad in [
        (hidden_TD.bfloat16(), weight_VD, target_T),
        (hidden_TD[:, :-1], weight_VD, target_T),
        (hidden_TD, weight_VD, target_T[:-1]),
    ]:
        with pytest.raises(AssertionError):
            linear_logp(*bad)
    with pytest.raises(AssertionError):
        linear_logp(hidden_TD, weight_VD, target_T, temperature=0.0)
    with pytest.raises((IndexError, RuntimeError)):
        linear_logp(hidden_TD, weight_VD, target_T + 37)


MEMORY_SCRIPT = """
import torch
from kernels import linear_logp
def status(key):  # KiB
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
torch.set_num_threads(1)
T, V, D = 8192, 32768, 256
hidden_TD = torch.randn(T, D).requires_grad_()
weight_VD = torch.randn(V, D).div_(16).requires_grad_()
target_T = torch.randint(V, (T,))
linear_logp(torch.randn(8, D, requires_grad=True), torch.randn(8, D), target_T[:8] % 8).sum().backward()
before = min(status("VmHWM"), status("VmRSS"))  # the lower: a peak of start-up must not hide what is used now
logp_T, entropy_T = linear_logp(hidden_TD, weight_VD, target_T, return_entropy=True)
(logp_T.sum() + 0.1 * entropy_T.sum()).backward()
assert hidden_TD.grad.abs().sum() > 0 and weight_VD.grad.abs().sum() > 0
print(status("VmHWM") - before)
"""


def test_peak_memory_is_below_a_quarter_of_the_logits():
    # In the costliest case: entropy and its gradient, dX and dW included, in a fresh process.
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], cwd=root, capture_output=True, text=True, check=True
    )
    growth_mib, logits_mib = int(done.stdout) / 1024, 8192 * 32768 * 4 / 2**20
    print(f"growth {growth_mib:.0f} MiB, logits {logits_mib:.0f} MiB")
    assert growth_mib < logits_mib / 4
