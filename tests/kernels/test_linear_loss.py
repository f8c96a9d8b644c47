"""head.linear_loss against kernels/reference.py with `policy_loss`, in one pass.

Without a GPU, Triton's kernels run in its interpreter on CPU tensors (conftest.py); with one, all of this runs there.
"""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import long_but
from loss_cases import WEIGHTS as ALL_WEIGHTS
from loss_cases import numbers_of
from torch.utils.flop_counter import FlopCounterMode

from config import LossConfig
from head import DEVIATION, HeadOptions, LossOptions, LossPath, linear_loss, one_pass_problem
from kernels import sizes
from kernels.backend import KernelBackend
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from kernels.reference import reference_gradients, reference_logp
from loss import policy_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def path_of(kind, backend):
    return HeadOptions(backend=backend, loss=LossOptions(path=LossPath(kind)))


TORCH = path_of("one pass", KernelBackend("torch"))
TRITON = path_of("one pass", KernelBackend("triton", 16))
PATHS = {"torch": TORCH, "triton": TRITON}

WEIGHTS = [x for x in ALL_WEIGHTS if x.get("truncated_importance_sampling_type") in (None, "tis", "icepop")]
EVERYTHING = {"reference_policy_kl_penalty": 0.3, "entropy_coef": 0.2, "positive_example_nll_weight": 0.3}
COVER = [  # three sets of options that together use every branch but the other two KLs
    LossConfig(reference_policy_kl_penalty=0.0),
    LossConfig(
        **EVERYTHING,
        **WEIGHTS[2],
        ratio_clip_c=1.2,
        token_level_loss=False,
        use_on_policy_kl_approximation=True,
        kl_input_clamp_value=None,
    ),
    LossConfig(**EVERYTHING, **WEIGHTS[3], use_cispo=True, kl_gradient="plain", kl_output_clamp_value=0.1),
]
COVER_NAMES = ("plain", "dual", "cispo")


@pytest.fixture
def path(request):
    return PATHS[request.param]


@pytest.fixture
def cfg(request):
    return COVER[COVER_NAMES.index(request.param)]


all_paths = pytest.mark.parametrize("path", PATHS, indirect=True)
cover = pytest.mark.parametrize("cfg", COVER_NAMES, indirect=True)
FEW_TERMS = [("torch", "dual"), ("triton", "dual"), ("triton", "cispo")]
every_path_and_term = pytest.mark.parametrize(
    "path, cfg", long_but(FEW_TERMS, list(itertools.product(PATHS, COVER_NAMES))), indirect=True
)
FEW_WIDTHS = [("torch", torch.bfloat16), ("triton", torch.float32), ("triton", torch.bfloat16)]
WIDTHS = (torch.float32, torch.bfloat16)
every_path_and_width = pytest.mark.parametrize(
    "path, dtype", long_but(FEW_WIDTHS, list(itertools.product(PATHS, WIDTHS))), indirect=["path"]
)
PASSES = ("one pass", "two passes")  # the second is kernels.logp.linear_logp, which scoring calls too


class Case:
    """Inputs of linear_loss, what the reference makes of them in float64, and what linear_loss does."""

    def __init__(self, R, V, D=13, dtype=torch.float32, seed=0, temperature=0.7, hidden=None, weight=None):
        self.generator, self.temperature, self.R = torch.Generator().manual_seed(seed), temperature, R
        # Logits of a few units, for logp of about -7, of which float32 rounds 5e-7 off.
        self.hidden = (0.3 * self.randn(R, D) if hidden is None else hidden).to(DEVICE, dtype)
        self.weight = (self.randn(V, D) if weight is None else weight).to(DEVICE, dtype)
        self.target = torch.randint(V, (R,), generator=self.generator).to(DEVICE)
        self.target[:1], self.target[1:2] = V - 1, 0  # first and last column
        self.inputs = (self.hidden.double(), self.weight.double(), self.target)
        self.logp, self.entropy = reference_logp(*self.inputs, LogitOptions(temperature))
        ratio = torch.tensor([1.5, 1.5, 1.0, 0.5, 1.0, 0.7, 0.9, 1.1, 1.25, 3.3])
        adv = torch.tensor([1.0, -0.7, 0.5, -2.1, 0.0, 0.8, -1.2])
        turn = torch.arange(R) + seed
        self.old = self.logp - ratio[turn % 10].log().to(DEVICE)
        self.sampler = self.old + 0.3 * self.randn(R)
        gap = 0.5 * self.randn(R)
        self.ref = self.logp + gap + 0.2 * gap.sign()  # a gap of 0.01 would have lost 1e-5 when it is formed
        self.adv = adv[turn % 7].double().to(DEVICE)
        self.mask, self.seq = (turn % 5 != 3).to(DEVICE), (torch.arange(R) // 3).to(DEVICE)
        self.sampler[(turn % 11 == 6).to(DEVICE)] = torch.inf
        for x in (self.old, self.sampler, self.adv, self.ref):
            x[~self.mask] = torch.nan

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(DEVICE)

    def pack(self, cfg, has_old=True, dtype=torch.float64):
        """The arguments of policy_loss but logp and entropy."""
        pack = {"old_logp_R": self.old if has_old else None, "sampler_logp_R": self.sampler, "adv_R": self.adv}
        pack = {name: None if x is None else x.to(dtype) for name, x in pack.items()}
        pack |= {"ref_logp_R": self.ref.to(dtype), "mask_R": self.mask, "seq_R": self.seq, "cfg": cfg}
        counts = {"num_valid_tokens": self.R + 3, "num_valid_seqs": self.R // 3 + 2, "num_positive_tokens": self.R + 1}
        return pack | counts | {"positive_R": self.seq % 2 == 0}

    def oracle(self, cfg, has_old=True, **options):
        pack = self.pack(cfg, has_old)

        def loss_of(logp_R, entropy_R):
            return policy_loss(logp_R, entropy_R=entropy_R, **pack)[0]

        return reference_gradients(loss_of, *self.inputs, LogitOptions(self.temperature, **options))

    def run(self, cfg, path, *, has_old=True, num_grad_rows=None, hidden=None, weight=None, pack=None, **changed):
        """(loss, metrics, logp, entropy) of linear_loss: the last two as policy_loss saw them last."""
        seen = []

        def recording_loss(logp_R, entropy_R, **rest):
            seen[:] = logp_R.detach().clone(), entropy_R.detach().clone()
            return policy_loss(logp_R, entropy_R=entropy_R, **rest)

        wide = torch.promote_types(self.hidden.dtype, torch.float32)
        loss_of = partial(recording_loss, **self.pack(cfg, has_old, wide) | (pack or {}))
        hidden = self.hidden if hidden is None else hidden
        weight = self.weight if weight is None else weight
        num_grad_rows = self.R if num_grad_rows is None else num_grad_rows
        options = replace(path, **{"temperature": self.temperature} | changed)
        result = linear_loss(hidden, weight, self.target, loss_of, options, num_grad_rows=num_grad_rows)
        loss, metrics, logp_R = result
        assert torch.equal(logp_R, seen[0]) and not logp_R.requires_grad
        return loss, metrics, *seen

    def ours(self, cfg, path, has_old=True, num_grad_rows=None, scale=1.0, **changed):
        hidden, weight = (x.detach().requires_grad_() for x in (self.hidden, self.weight))
        options = {"has_old": has_old, "num_grad_rows": num_grad_rows, "hidden": hidden, "weight": weight}
        loss, metrics, logp, entropy = self.run(cfg, path, **options | changed)
        assert float(metrics[DEVIATION]) == 0 and metrics["loss"] == loss
        (loss * scale).backward()
        return loss.detach(), logp, entropy, hidden.grad, weight.grad


def close(got, want, gradient, logp=1e-4, loss=1e-5):
    """Absolute errors of logp and entropy; of the loss to its size or 1; of gradients relative in Frobenius norm, which
    are returned."""
    assert abs(got[0] - want[0]) <= loss * want[0].abs().clamp(min=1), (got[0], want[0])
    for a, b in zip(got[1:3], want[1:3], strict=True):
        assert a.shape == b.shape and (a - b).abs().le(logp).all(), (a - b).abs().max()
    for a, b in zip(got[3:], want[3:], strict=True):
        assert a.shape == b.shape and (a.double() - b).norm() <= gradient * b.norm().clamp(min=0.03), (a - b).norm()
    return [
        ((a.double() - b).norm() / b.norm()).item() if b.any() else 0.0 for a, b in zip(got[3:], want[3:], strict=True)
    ]


# Rounding to bfloat16 is off by 1.6e-3 on average and 2^-8 at most; dz is rounded, then what is made of it.
BARS = [  # path, dtype, bars of `close`
    ("torch", torch.float64, (1e-12, 1e-12, 1e-12)),
    ("torch", torch.bfloat16, (2 * 2**-8,)),
    ("triton", torch.float32, (1e-5,)),
    ("triton", torch.bfloat16, (2 * 2**-8,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("path, dtype, bars", BARS, indirect=["path"])
def test_value_and_gradients(path, dtype, bars):
    """No kernel knows the options of the loss: core/test_loss_exact.py has their combinations."""
    errors = []
    for i, (cfg, has_old, softcap) in enumerate(itertools.product(COVER, (True, False), (None, 2.0))):
        case = Case(5, 257, dtype=dtype, seed=i, temperature=(1.0, 0.7)[i // 6])
        found = case.ours(cfg, path, has_old, softcap=softcap)
        errors += close(found, case.oracle(cfg, has_old, softcap=softcap), *bars)
    assert torch.tensor(errors).square().mean().sqrt() <= 3e-3


# Columns around powers of 2 and around a block's 8192; rows around a chunk's 16 and its double.
EDGE_SHAPES = [(5, V, 24) for V in (1, 2, 33, 127, 128, 129, 255, 256, 257, 1000)]
EDGE_SHAPES += [(R, 40, 71) for R in (0, 1, 15, 16, 17, 33)]
EDGE_SHAPES += [(3, 8192, 8), (3, 8193, 8), (7, 32000, 8), (7, 151936, 8)]
FEW_SHAPES = [(5, V, 24) for V in (1, 33, 128, 257, 1000)] + [(R, 40, 71) for R in (0, 1, 16, 17, 33)]
FEW_SHAPES += [(3, 8192, 8), (3, 8193, 8), (7, 151936, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "R, V, D, number",
    long_but(
        [(*shape, i % 3) for i, shape in enumerate(FEW_SHAPES, start=1)],
        [(*shape, number) for shape in EDGE_SHAPES for number in range(3)],
    ),
)
def test_edge_shapes(monkeypatch, R, V, D, number):
    cfg = COVER[number]
    if V >= 32000:  # CPU's own matmul errs by 3e-5 when it sums 151,936 products: an exact one shows what else does
        monkeypatch.setattr(torch, "mm", lambda a, b, out, **_: out.copy_(a.double() @ b.double()))
    case = Case(R, V, D, seed=R)
    for path, kind in itertools.product(PATHS.values(), PASSES):
        close(case.ours(cfg, path_of(kind, path.backend)), case.oracle(cfg), gradient=1e-5)


@pytest.mark.slow
@every_path_and_term
@pytest.mark.parametrize("kind", ["low", "equal", "one huge", "high"])
def test_extreme_logits(path, cfg, kind):
    """Logits are multiples of 1/4 and so the matmul's in float32 are exact: what is left is the softmax's own error."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-2, 3, (9, 8), generator=generator) * (0.0 if kind == "equal" else 1.0)
    weight = torch.randint(-4, 5, (300, 8), generator=generator) / 4
    hidden[:, -1] = 1
    weight[:, -1] = {"low": -1000, "equal": 300, "one huge": 0, "high": 1000}[kind]
    if kind == "one huge":
        weight[7, -1] = 200  # of the others, exp(-logp) is infinite: not to be met where a token is masked
    case = Case(9, 300, hidden=hidden, weight=weight, temperature=1.0)
    want = list(case.oracle(cfg))
    want[3] = want[3][:, :-1]  # the last column is its weight times the sum of dz, which is 0
    for passes in PASSES:
        got = list(case.ours(cfg, path_of(passes, path.backend)))
        got[3] = got[3][:, :-1]
        close(got, want, gradient=1e-5)
        if kind == "equal":
            torch.testing.assert_close(got[2], torch.full_like(got[2], np.log(300)), rtol=1e-6, atol=0)


@pytest.mark.slow
@all_paths
@cover
def test_no_trained_token(path, cfg):
    case = Case(20, 37)
    case.mask[:] = False
    for x in (case.old, case.sampler, case.adv, case.ref):
        x[:] = torch.nan
    loss, logp, entropy, *grads = case.ours(cfg, path)
    assert loss == 0 and all((x == 0).all() for x in grads)
    close((loss, logp, entropy), (loss, case.logp, case.entropy), gradient=0)


@pytest.mark.slow
@all_paths
@pytest.mark.parametrize("num_grad_rows", [0, 7, 16, 20])
def test_rows_without_gradient(path, num_grad_rows):
    """They add nothing to the loss, and cost one matmul instead of three."""
    case, cfg = Case(20, 37), COVER[1]
    case.mask[num_grad_rows:] = False
    with FlopCounterMode(display=False) as flops:
        got = case.ours(cfg, path, num_grad_rows=num_grad_rows)
    close(got, case.oracle(cfg), gradient=1e-5)
    assert flops.get_total_flops() == 2 * 37 * 13 * (3 * num_grad_rows + 20 - num_grad_rows)


@all_paths
@cover
def test_without_grad_there_is_only_a_forward(path, cfg):
    case = Case(20, 37)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        loss, metrics, *seen = case.run(cfg, path, hidden=case.hidden.requires_grad_())
    close((loss, *seen), case.oracle(cfg)[:3], gradient=0)
    assert flops.get_total_flops() == 2 * 37 * 13 * 20 and not loss.requires_grad
    assert float(metrics[DEVIATION]) == 0


@pytest.mark.slow
@all_paths
@pytest.mark.parametrize("hidden_grad, weight_grad", [(True, False), (False, True)])
def test_only_needed_gradients_are_computed(path, hidden_grad, weight_grad):
    case, cfg = Case(20, 37), COVER[1]
    want = case.ours(cfg, path)
    hidden, weight = case.hidden.requires_grad_(hidden_grad), case.weight.requires_grad_(weight_grad)
    with FlopCounterMode(display=False) as flops:
        case.run(cfg, path, hidden=hidden, weight=weight)[0].backward()
    assert flops.get_total_flops() == 2 * 2 * 37 * 13 * 20
    for x, used, grad in ((hidden, hidden_grad, want[3]), (weight, weight_grad, want[4])):
        assert x.grad.equal(grad) if used else x.grad is None


@pytest.mark.slow
@every_path_and_width
def test_incoming_gradient_and_autocast(path, dtype):
    case, cfg = Case(20, 37, dtype=dtype), COVER[1]
    want = case.ours(cfg, path)
    for x, y in zip(case.ours(cfg, path, scale=-2.0)[3:], want[3:], strict=True):
        assert x.dtype == dtype and x.equal(-2 * y)
    assert case.ours(cfg, path, scale=0.3)[3].equal((0.3 * want[3].float()).to(dtype))  # 0.3 itself is not rounded
    with torch.autocast(DEVICE, torch.float16):
        assert all(x.equal(y) for x, y in zip(case.ours(cfg, path), want, strict=True))


@pytest.mark.slow
@every_path_and_term
def test_one_pass_equals_two(path, cfg):
    """Value, gradient and metrics: of the path, of the path with two passes, and of `linear_logp` by hand."""
    case = Case(20, 37)
    results = []
    for either in (path, path_of("two passes", path.backend)):
        hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
        loss, metrics, logp, entropy = case.run(cfg, either, hidden=hidden, weight=weight)
        loss.backward()
        results.append((metrics, (loss.detach(), logp, entropy, hidden.grad, weight.grad)))
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    logp, entropy = linear_logp(hidden, weight, case.target, LogitOptions(0.7, backend=path.backend))
    policy_loss(logp, entropy_R=entropy, **case.pack(cfg, dtype=torch.float32))[0].backward()
    (metrics, got), (expected_metrics, expected) = results
    assert expected[3].equal(hidden.grad) and expected[4].equal(weight.grad)
    close(got, [x.double() for x in expected], gradient=1e-5)
    assert metrics.keys() == expected_metrics.keys() >= {DEVIATION, "loss", "probs_ratio"}
    for name in metrics:
        got, expected = numbers_of(metrics[name]), numbers_of(expected_metrics[name])
        torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=1e-5, atol=1e-6)


def centered(logp_R):
    return (logp_R - logp_R.mean()).square().mean()


def cancelling(logp_R):
    """The errors of two chunks of 16 rows add up to 0."""
    return (logp_R[:16].sum() - logp_R[16:32].sum()) * logp_R[34]


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [centered, cancelling])
@pytest.mark.parametrize("path", ["torch", "triton"], indirect=True)
def test_a_loss_that_couples_tokens_is_found_out(monkeypatch, path, coupled):
    """In one chunk its gradient is right and nothing is said; in several it is not, and the deviation is not 0."""
    case = Case(35, 37)

    def coupled_loss(logp_R, entropy_R, with_metrics):
        return coupled(logp_R), {"loss": coupled(logp_R).detach()}

    *_, want_hidden, want_weight = reference_gradients(
        lambda logp_R, _: coupled(logp_R), *case.inputs, LogitOptions(0.7)
    )
    for rows, holds in ((64, True), (16, False)):
        monkeypatch.setitem(sizes.TORCH_CHUNK_ELEMENTS, DEVICE, rows * 37)
        sized = replace(path, backend=KernelBackend(path.backend.name, rows), temperature=0.7)
        hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
        loss, metrics, _ = linear_loss(hidden, weight, case.target, coupled_loss, sized, num_grad_rows=35)
        loss.backward()
        errors = [
            (x.double() - y).norm() / y.norm() for x, y in ((hidden.grad, want_hidden), (weight.grad, want_weight))
        ]
        assert (max(errors) <= 1e-5) == holds and (one_pass_problem(float(metrics[DEVIATION])) is None) == holds
    _, metrics, _ = linear_loss(hidden, weight, case.target, coupled_loss, sized, num_grad_rows=7)
    assert "trains tokens without advantage" in one_pass_problem(float(metrics[DEVIATION]))


@pytest.mark.parametrize("num_grad_rows, num_calls", [(35, 4), (16, 2), (0, 1)])
@pytest.mark.parametrize("path", ["torch"], indirect=True)
def test_metrics_are_computed_once_a_pack(monkeypatch, path, num_grad_rows, num_calls):
    """In the call after the last chunk, of 16 rows each, which knows all rows; without chunks in the only call."""
    case = Case(35, 37)
    monkeypatch.setitem(sizes.TORCH_CHUNK_ELEMENTS, DEVICE, 16 * 37)
    calls = []

    def loss_of(logp_R, entropy_R, with_metrics):
        calls.append((with_metrics, int(logp_R.count_nonzero())))
        return logp_R.sum(), {"loss": logp_R.detach().sum()} if with_metrics else {}

    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    loss, metrics, _ = linear_loss(hidden, weight, case.target, loss_of, path, num_grad_rows=num_grad_rows)
    assert [with_metrics for with_metrics, _ in calls] == [False] * (num_calls - 1) + [True]
    assert calls[-1][1] == 35 and metrics["loss"] == loss


@pytest.mark.slow
@every_path_and_width
@pytest.mark.parametrize("passes", PASSES)
def test_buffers_are_written_where_they_should_be(monkeypatch, path, dtype, passes):
    """Every buffer starts as NaN between two guards. Nothing of it is left, no guard is touched, inputs stay; and a
    second call gives the same bits."""
    guard, buffers, unguarded = 64, [], torch.Tensor.new_empty

    def new_empty(like, *size, dtype=None, device=None):
        if device:  # the interpreter's own
            return unguarded(like, *size, device=device)
        shape = torch.Size(size if not size or isinstance(size[0], int) else size[0])
        flat = torch.full((shape.numel() + 2 * guard,), torch.nan, dtype=dtype or like.dtype, device=like.device)
        flat[:guard] = flat[-guard:] = 7.0
        buffers.append(flat)
        return flat[guard:-guard].view(shape)

    path = path_of(passes, path.backend)
    case, cfg = Case(35, 259, D=21, dtype=dtype), COVER[1]  # two chunks of 16 rows and one of 3
    pack = case.pack(cfg, dtype=torch.float32)
    inputs = (case.hidden, case.weight, case.target, *(x for x in pack.values() if isinstance(x, torch.Tensor)))
    before = [x.clone() for x in inputs]
    want = case.ours(cfg, path, pack=pack)
    monkeypatch.setitem(sizes.TORCH_CHUNK_ELEMENTS, DEVICE, 16 * 259)
    in_chunks = case.ours(cfg, path, pack=pack)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, dtype=None: x.new_empty(x.shape, dtype=dtype))
    got = case.ours(cfg, path, pack=pack)
    assert len(buffers) >= 4 and all((x[:guard] == 7).all() and (x[-guard:] == 7).all() for x in buffers)
    assert all(a.equal(b) for a, b in zip(got, in_chunks, strict=True))
    close(got, [x.double() for x in want], gradient=1e-6 if dtype == torch.float32 else 1e-3, logp=1e-5)
    assert all(a.nan_to_num().equal(b.nan_to_num()) for a, b in zip(inputs, before, strict=True))


@all_paths
def test_programming_errors_are_refused(path):
    case, cfg = Case(5, 37), COVER[0]
    for bad in ({"num_grad_rows": 6}, {"temperature": 0.0}, {"pack": {"adv_R": case.adv[:-1]}}):
        with pytest.raises((AssertionError, RuntimeError)):
            case.ours(cfg, path, **bad)
    if DEVICE == "cpu":  # a device assert would be the end of CUDA in this process
        case.target[0] = 37
        with pytest.raises((IndexError, RuntimeError)):
            case.ours(cfg, path)
