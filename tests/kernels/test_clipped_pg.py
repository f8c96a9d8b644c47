"""kernels/grpo_head against `policy_loss` on all logits in float64: options in combination, shapes, buffers.

Without a GPU, Triton's kernels run in its interpreter on CPU tensors (conftest.py); with one, all of this runs there.
"""

import itertools

import numpy as np
import pytest
import torch
from loss_cases import MODES as ALL_MODES
from loss_cases import WEIGHTS as ALL_WEIGHTS
from loss_cases import allowed, hard_batch
from torch.utils.flop_counter import FlopCounterMode

import kernels.softmax
from config import LossConfig
from kernels import Head, grpo_head, linear_logp, unsupported
from kernels.clipped_pg import token_terms
from loss import policy_loss, token_shares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH, TRITON = Head("torch"), Head("triton", 16)
both = pytest.mark.parametrize("head", [TORCH, TRITON], ids=["torch", "triton"])

MODES = [{}, {"ratio_clip_c": 1.2}, {"use_cispo": True}, {"disable_ppo_ratio": True}, {"force_on_policy_ratio": True}]
MODES[0] |= {"ratio_clip_max": 0.28}
WEIGHTS = [x for x in ALL_WEIGHTS if x.get("truncated_importance_sampling_type") in (None, "tis", "icepop")]
AGGREGATIONS = [{}, {"token_level_loss": False}, {"token_level_loss": False, "loss_scale_factor": 9.0}]
CLAMPS = [{}, {"kl_input_clamp_value": None}, {"kl_input_clamp_value": 0.4}, {"kl_output_clamp_value": 0.1}]
KLS = [{"reference_policy_kl_penalty": 0.0}] + [
    {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kind, "kl_gradient": gradient}
    | {"use_on_policy_kl_approximation": approximation, **clamps}
    for kind, gradient, approximation, clamps in itertools.product(
        ("k1", "k2", "k3"), ("score_function", "plain"), (False, True), CLAMPS
    )
]
EXTRAS = [{}, {"entropy_coef": 0.2}, {"positive_example_nll_weight": 0.3}]
EXTRAS.append(EXTRAS[1] | EXTRAS[2])
# (config, whether old log-probabilities are given); the aggregation, which reaches no kernel, takes turns.
CROSS = [
    (LossConfig(**mode, **weights, **kl, **extra, **({} if "use_cispo" in mode else AGGREGATIONS[i % 3])), has_old)
    for i, (kl, mode, weights, extra, has_old) in enumerate(
        itertools.product(KLS, MODES, WEIGHTS, EXTRAS, (True, False))
    )
]
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
cover = pytest.mark.parametrize("cfg", COVER, ids=["plain", "dual", "cispo"])


class Case:
    """RunInputs of the head, their oracle in float64, and what the head makes of them."""

    def __init__(self, R, V, D=13, dtype=torch.float32, seed=0, temperature=0.7, hidden=None, weight=None):
        self.generator, self.temperature, self.R = torch.Generator().manual_seed(seed), temperature, R
        # Logits of a few units, for logp of about -7, of which float32 rounds 5e-7 off.
        self.hidden = (0.3 * self.randn(R, D) if hidden is None else hidden).to(DEVICE, dtype)
        self.weight = (self.randn(V, D) if weight is None else weight).to(DEVICE, dtype)
        self.target = torch.randint(V, (R,), generator=self.generator).to(DEVICE)
        self.target[:1], self.target[1:2] = V - 1, 0  # first and last column
        self.leaves = [x.double().requires_grad_() for x in (self.hidden, self.weight)]
        logp_RV = (self.leaves[0] @ self.leaves[1].T / temperature).log_softmax(-1)
        self.logp = logp_RV.gather(1, self.target[:, None])[:, 0]
        self.entropy = -(logp_RV.exp() * logp_RV).sum(-1)
        ratio = torch.tensor([1.5, 1.5, 1.0, 0.5, 1.0, 0.7, 0.9, 1.1, 1.25, 3.3])
        adv = torch.tensor([1.0, -0.7, 0.5, -2.1, 0.0, 0.8, -1.2])
        turn = torch.arange(R) + seed
        self.old = self.logp.detach() - ratio[turn % 10].log().to(DEVICE)
        self.sampler = self.old + 0.3 * self.randn(R)
        gap = 0.5 * self.randn(R)
        self.ref = self.logp.detach() + gap + 0.2 * gap.sign()  # a gap of 0.01 would have lost 1e-5 when it is formed
        self.adv = adv[turn % 7].double().to(DEVICE)
        self.mask, self.seq = (turn % 5 != 3).to(DEVICE), (torch.arange(R) // 3).to(DEVICE)
        self.sampler[(turn % 11 == 6).to(DEVICE)] = torch.inf
        for x in (self.old, self.sampler, self.adv, self.ref):
            x[~self.mask] = torch.nan

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(DEVICE)

    def policy_loss(self, cfg, logp, entropy, has_old=True):
        """On any logp and entropy, in their dtype."""
        wide = {"old_logp_T": self.old if has_old else logp.detach(), "sampler_logp_T": self.sampler}
        wide |= {"adv_T": self.adv, "ref_logp_T": self.ref, "entropy_T": entropy}
        return policy_loss(logp, **{name: x.to(logp) for name, x in wide.items()}, mask_T=self.mask, **self.rest(cfg))

    def rest(self, cfg):
        counts = {"num_valid_tokens": self.R + 3, "num_valid_seqs": self.R // 3 + 2, "num_positive_tokens": self.R + 1}
        return counts | {"seq_T": self.seq, "positive_T": self.seq % 2 == 0, "cfg": cfg}

    def oracle(self, cfg, has_old=True):
        loss, _ = self.policy_loss(cfg, self.logp, self.entropy, has_old)
        return (loss, self.logp, self.entropy, *torch.autograd.grad(loss, self.leaves, retain_graph=True))

    def arguments(self, cfg, has_old=True):
        """The head's tensors but its two matrices, in float32 unless these are float64."""
        share, nll_share = token_shares(self.mask, sampler_logp_T=self.sampler, **self.rest(cfg))
        tensors = {"old_logp_R": self.old if has_old else None, "sampler_logp_R": self.sampler, "adv_R": self.adv}
        tensors |= {"share_R": share, "ref_logp_R": self.ref, "nll_share_R": nll_share}
        wide = torch.promote_types(self.hidden.dtype, torch.float32)
        return {name: None if x is None else x.to(wide) for name, x in tensors.items()}

    def ours(self, cfg, head, has_old=True, num_grad_rows=None, scale=1.0, **changed):
        hidden, weight = (x.detach().requires_grad_() for x in (self.hidden, self.weight))
        options = {"temperature": self.temperature, "cfg": cfg, "head": head} | self.arguments(cfg, has_old)
        rows = self.R if num_grad_rows is None else num_grad_rows
        loss, logp, entropy = grpo_head(hidden, weight, self.target, num_grad_rows=rows, **options | changed)
        assert not logp.requires_grad and not entropy.requires_grad
        (loss * scale).backward()
        return loss.detach(), logp, entropy, hidden.grad, weight.grad


def close(got, want, gradient, logp=1e-4, loss=1e-5):
    """Absolute errors of logp and entropy; of the loss to its size or 1; of gradients relative in Frobenius norm, which
    are returned."""
    assert abs(got[0] - want[0]) <= loss * want[0].abs().clamp(min=1), (got[0], want[0])
    for a, b in zip(got[1:3], want[1:3], strict=True):
        assert a.shape == b.shape and (a - b).abs().le(logp).all(), (a - b).abs().max()
    for a, b in zip(got[3:], want[3:], strict=True):
        assert a.shape == b.shape and (a.double() - b).norm() <= gradient * b.norm().clamp(min=0.01), (a - b).norm()
    return [
        ((a.double() - b).norm() / b.norm()).item() if b.any() else 0.0 for a, b in zip(got[3:], want[3:], strict=True)
    ]


def check_options(configs, head, dtype, bars):
    errors = []
    for i, (cfg, has_old) in configs:
        case = Case(5, 257, dtype=dtype, seed=i, temperature=(1.0, 0.7)[i % 2])
        try:
            errors += close(case.ours(cfg, head, has_old), case.oracle(cfg, has_old), *bars)
        except AssertionError as error:
            raise AssertionError(f"{cfg}, old {has_old}, case {i}") from error
    return torch.tensor(errors).square().mean().sqrt()


# Rounding to bfloat16 is off by 1.6e-3 on average and 2^-8 at most; dz is rounded, then what is made of it.
BARS = [  # head, dtype, every how many of the combinations, bars of `close`
    pytest.param(TORCH, torch.float64, 11, (1e-12, 1e-12, 1e-12), id="torch-float64"),
    pytest.param(TORCH, torch.bfloat16, 61, (2 * 2**-8,), id="torch-bfloat16"),
    pytest.param(TRITON, torch.float32, 25, (1e-5,), id="triton-float32"),  # all pairs of options
    pytest.param(TRITON, torch.bfloat16, 151, (2 * 2**-8,), id="triton-bfloat16"),
]


@pytest.mark.parametrize("head, dtype, every, bars", BARS)
def test_options(head, dtype, every, bars):
    assert check_options(list(enumerate(CROSS))[::every], head, dtype, bars) <= 3e-3


@pytest.mark.long
@pytest.mark.parametrize("head, dtype, every, bars", BARS)
def test_all_options(head, dtype, every, bars):
    assert len(CROSS) == 49 * 5 * 4 * 4 * 2
    assert check_options(list(enumerate(CROSS))[:: max(1, every // 50)], head, dtype, bars) <= 3e-3


def test_terms_of_many_tokens():
    """Every interval that the clips cut, for every sign of the advantage (loss_cases.hard_batch), in float64."""
    batch = hard_batch(torch.float64)
    whole = {name: batch[name] for name in batch if name.startswith(("num_", "seq", "positive"))}
    for cfg, has_old in CROSS[::5]:
        old = batch["old_logp_T"] if has_old else batch["logp_T"].detach()
        loss, _ = policy_loss(**batch | {"old_logp_T": old}, cfg=cfg)
        want = torch.autograd.grad(loss, (batch["logp_T"], batch["entropy_T"]), allow_unused=True)
        shares = token_shares(batch["mask_T"], sampler_logp_T=batch["sampler_logp_T"], **whole, cfg=cfg)
        columns = [
            old,
            *(batch[name] for name in ("sampler_logp_T", "adv_T")),
            shares[0],
            batch["ref_logp_T"],
            shares[1],
        ]
        inputs = torch.stack(
            [x.where(batch["mask_T"], 0 if x is shares[0] or x is shares[1] else torch.nan) for x in columns]
        )
        logp, entropy = batch["logp_T"].detach(), batch["entropy_T"].detach()
        has_ref = cfg.reference_policy_kl_penalty > 0
        loss_T, g_T, h_T = token_terms(logp, entropy, inputs, cfg, has_old and not cfg.force_on_policy_ratio, has_ref)
        assert (loss_T.sum() - loss).abs() <= 1e-13 and (g_T - want[0]).abs().max() <= 1e-13, (cfg, has_old)
        assert (h_T is None) == (want[1] is None) and (h_T is None or (h_T - want[1]).abs().max() <= 1e-15)


# Columns around powers of 2 and around a block's 8192; rows around a chunk's 16 and around 128.
@cover
@pytest.mark.parametrize(
    "R, V, D",
    [(5, V, 24) for V in (1, 2, 127, 128, 129, 255, 256, 257)]
    + [(R, 40, 71) for R in (0, 1, 7, 15, 16, 17, 127, 129)]
    + [(3, 8192, 8), (3, 8193, 8), (7, 32000, 8), (7, 151936, 8)],
)
def test_edge_shapes(monkeypatch, cfg, R, V, D):
    if V >= 32000:  # CPU's own matmul errs by 3e-5 when it sums 151,936 products: an exact one shows what else does
        monkeypatch.setattr(torch, "mm", lambda a, b, out, **_: out.copy_(a.double() @ b.double()))
    case = Case(R, V, D, seed=R)
    for head in (TRITON, TORCH):
        close(case.ours(cfg, head), case.oracle(cfg), gradient=1e-5)


@both
@cover
@pytest.mark.parametrize("kind", ["low", "equal", "one huge", "high"])
def test_extreme_logits(head, cfg, kind):
    """Logits are multiples of 1/4 and so the matmul's in float32 are exact: what is left is the softmax's own error."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-2, 3, (9, 8), generator=generator) * (0.0 if kind == "equal" else 1.0)
    weight = torch.randint(-4, 5, (300, 8), generator=generator) / 4
    hidden[:, -1] = 1
    weight[:, -1] = {"low": -1000, "equal": 300, "one huge": 0, "high": 1000}[kind]
    if kind == "one huge":
        weight[7, -1] = 200  # of the others, exp(-logp) is infinite: not to be met where a token is masked
    case = Case(9, 300, hidden=hidden, weight=weight, temperature=1.0)
    got, want = list(case.ours(cfg, head)), list(case.oracle(cfg))
    got[3], want[3] = got[3][:, :-1], want[3][:, :-1]  # the last column is its weight times the sum of dz, which is 0
    close(got, want, gradient=1e-5)
    if kind == "equal":
        torch.testing.assert_close(got[2], torch.full_like(got[2], np.log(300)), rtol=1e-6, atol=0)


@both
def test_weights_that_overflow_are_0(head):
    cfg = LossConfig(**EVERYTHING, **WEIGHTS[1], use_on_policy_kl_approximation=True, kl_output_clamp_value=None)
    case = Case(5, 37)
    case.sampler[:2] = -1000
    close(case.ours(cfg, head), case.oracle(cfg), gradient=1e-5)


@both
@cover
def test_ratios_that_would_overflow(head, cfg):
    """exp(95) is infinite in float32."""
    case = Case(6, 37)
    case.old[:4] = case.old[:4] + torch.tensor([95.0, -95.0, 30.0, -30.0], device=DEVICE)
    found = case.ours(cfg, head)
    assert all(x.isfinite().all() for x in found)
    close(found, case.oracle(cfg), gradient=1e-5)


@both
@cover
def test_no_trained_token(head, cfg):
    case = Case(20, 37)
    case.mask[:] = False
    for x in (case.old, case.sampler, case.adv, case.ref):
        x[:] = torch.nan
    loss, logp, entropy, *grads = case.ours(cfg, head)
    assert loss == 0 and all((x == 0).all() for x in grads)
    close((loss, logp, entropy), (loss, case.logp, case.entropy), gradient=0)


@both
@pytest.mark.parametrize("num_grad_rows", [0, 7, 16, 20])
def test_rows_without_gradient(head, num_grad_rows):
    """They add nothing to the loss, and cost one matmul instead of three."""
    case, cfg = Case(20, 37), COVER[1]
    case.mask[num_grad_rows:] = False
    with FlopCounterMode(display=False) as flops:
        got = case.ours(cfg, head, num_grad_rows=num_grad_rows)
    close(got, case.oracle(cfg), gradient=1e-5)
    # The counter sees torch's matmuls, so not those of Triton's forward.
    rest = 0 if head is TRITON else 20 - num_grad_rows
    assert flops.get_total_flops() == 2 * 37 * 13 * (3 * num_grad_rows + rest)


@both
@cover
def test_without_grad_there_is_only_a_forward(head, cfg):
    case = Case(20, 37)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        options = {"temperature": 0.7, "cfg": cfg, "num_grad_rows": 20, "head": head} | case.arguments(cfg)
        got = grpo_head(case.hidden.requires_grad_(), case.weight, case.target, **options)
    close(got, case.oracle(cfg)[:3], gradient=0)
    assert flops.get_total_flops() == (0 if head is TRITON else 2 * 37 * 13 * 20) and not got[0].requires_grad


@both
@pytest.mark.parametrize("hidden_grad, weight_grad", [(True, False), (False, True)])
def test_only_needed_gradients_are_computed(head, hidden_grad, weight_grad):
    case, cfg = Case(20, 37), COVER[1]
    want = case.ours(cfg, head)
    hidden, weight = case.hidden.requires_grad_(hidden_grad), case.weight.requires_grad_(weight_grad)
    with FlopCounterMode(display=False) as flops:
        options = {"temperature": 0.7, "cfg": cfg, "num_grad_rows": 20, "head": head} | case.arguments(cfg)
        grpo_head(hidden, weight, case.target, **options)[0].backward()
    assert flops.get_total_flops() == 2 * 2 * 37 * 13 * 20
    for x, used, grad in ((hidden, hidden_grad, want[3]), (weight, weight_grad, want[4])):
        assert x.grad.equal(grad) if used else x.grad is None


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_incoming_gradient_and_autocast(head, dtype):
    case, cfg = Case(20, 37, dtype=dtype), COVER[1]
    want = case.ours(cfg, head)
    for x, y in zip(case.ours(cfg, head, scale=-2.0)[3:], want[3:], strict=True):
        assert x.dtype == dtype and x.equal(-2 * y)
    assert case.ours(cfg, head, scale=0.3)[3].equal((0.3 * want[3].float()).to(dtype))  # 0.3 itself is not rounded
    with torch.autocast(DEVICE, torch.float16):
        assert all(x.equal(y) for x, y in zip(case.ours(cfg, head), want, strict=True))


@both
@pytest.mark.parametrize("low, high", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2)])
def test_ratios_on_the_edge_of_the_clip(head, low, high):
    """old is the head's own logp, so that every ratio is 1 and on an edge: there autograd lets the gradient through."""
    cfg = LossConfig(ratio_clip_min=low, ratio_clip_max=high, reference_policy_kl_penalty=0.0)
    case = Case(20, 37)
    case.old = case.ours(cfg, head)[1].double()
    close(case.ours(cfg, head), case.oracle(cfg, has_old=False), gradient=1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's exp is not numpy's")
@both
def test_ratio_on_the_edge_of_the_dual_clip(head):
    """There autograd gives half of the gradient to each side."""
    case = Case(1, 37, seed=3)
    case.adv[:], case.mask[:], case.sampler[:] = -0.7, True, -1.0
    logp = case.ours(COVER[0], head)[1]
    case.old = (logp - 0.5).double()
    log_ratio = logp - case.old.float()
    ratio = log_ratio.exp().item() if head is TORCH else float(np.exp(log_ratio.numpy())[0])
    norms = []
    for c in (ratio * 1.1, ratio, ratio / 1.1):
        cfg = LossConfig(ratio_clip_c=c, ratio_clip_max=0.1, reference_policy_kl_penalty=0.0)
        norms.append(case.ours(cfg, head)[3].norm().item())
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-6) and norms[0] > 0.01 and norms[2] == 0


@both
@cover
def test_equals_policy_loss_on_linear_logp(head, cfg):
    """Value, gradient, and statistics: what `policy_loss` makes of the logp and entropy of either."""
    case = Case(20, 37)
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    logp, entropy = linear_logp(hidden, weight, case.target, temperature=0.7, return_entropy=True, head=head)
    loss, metrics = case.policy_loss(cfg, logp, entropy)
    loss.backward()
    got = case.ours(cfg, head)
    close(got, (loss, logp, entropy, hidden.grad.double(), weight.grad.double()), gradient=1e-5)
    for name, value in case.policy_loss(cfg, *got[1:3])[1].items():
        torch.testing.assert_close(
            torch.stack([*value] if isinstance(value, tuple) else [value]).double(),
            torch.stack([*metrics[name]] if isinstance(value, tuple) else [metrics[name]]).double(),
            rtol=1e-5,
            atol=1e-6,
        )


def test_refuses_exactly_what_needs_whole_sequences():
    """Found out by moving one token of a sequence and looking at the gradient of another."""
    configs = allowed(ALL_MODES, ALL_WEIGHTS, AGGREGATIONS, [EXTRAS[3]])
    seen = set()
    for cfg in configs:
        slopes = []
        for moved in (0.0, 0.4):
            logp = torch.tensor([-1.0, -2.0 + moved], dtype=torch.float64, requires_grad=True)
            case = Case(2, 37)
            case.old, case.sampler = torch.tensor(
                [[-1.1, -1.9], [-1.05, -2.3 - moved]], dtype=torch.float64, device=DEVICE
            )
            case.adv[:], case.mask[:], case.seq[:] = 1.0, True, 0
            loss, _ = case.policy_loss(cfg, logp.to(DEVICE), logp.detach().to(DEVICE))
            slopes.append(torch.autograd.grad(loss, logp)[0][0].item())
        case, options = Case(2, 37), unsupported(cfg)
        seen.add(bool(options))
        if options:
            assert all(part.split("=")[0] in LossConfig.__slots__ for part in options)
            with pytest.raises(AssertionError, match=options[0]):
                case.ours(cfg, TORCH)
        else:
            assert slopes[0] == slopes[1], cfg
            close(case.ours(cfg, TORCH), case.oracle(cfg), gradient=1e-5)
    assert seen == {True, False}


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliced_and_strided_inputs(head, dtype):
    """`weight[:V]` of a padded matrix, every second hidden column, per-token inputs with gaps; gradients in place."""
    case, cfg = Case(20, 29, D=9, dtype=dtype), COVER[1]
    want = case.ours(cfg, head)
    wide = torch.full((20, 18), torch.nan, dtype=dtype, device=DEVICE)
    padded = torch.full((41, 9), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, ::2], padded[:29] = case.hidden, case.weight
    wide.requires_grad_(), padded.requires_grad_()
    arguments = {name: x.repeat_interleave(2)[::2] for name, x in case.arguments(cfg).items()}
    target = case.target.repeat_interleave(2)[::2]
    options = {"temperature": 0.7, "cfg": cfg, "num_grad_rows": 20, "head": head}
    loss, logp, entropy = grpo_head(wide[:, ::2], padded[:29], target, **options, **arguments)
    loss.backward()
    got = (loss.detach(), logp, entropy, wide.grad[:, ::2], padded.grad[:29])
    close(got, [x.double() for x in want], gradient=1e-6 if dtype == torch.float32 else 1e-3, logp=1e-5)
    assert (wide.grad[:, 1::2] == 0).all() and (padded.grad[29:] == 0).all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_written_where_they_should_be(monkeypatch, head, dtype):
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

    case, cfg = Case(35, 259, D=21, dtype=dtype), COVER[1]  # two chunks of 16 rows and one of 3
    arguments = case.arguments(cfg)
    before = [x.clone() for x in (case.hidden, case.weight, case.target, *arguments.values())]
    want = case.ours(cfg, head, **arguments)
    monkeypatch.setitem(kernels.softmax.CHUNK_ELEMENTS, DEVICE, 16 * 259)
    in_chunks = case.ours(cfg, head, **arguments)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, dtype=None: x.new_empty(x.shape, dtype=dtype))
    got = case.ours(cfg, head, **arguments)
    assert len(buffers) >= 4 and all((x[:guard] == 7).all() and (x[-guard:] == 7).all() for x in buffers)
    assert all(a.equal(b) for a, b in zip(got, in_chunks, strict=True))
    close(got, [x.double() for x in want], gradient=1e-6 if dtype == torch.float32 else 1e-3, logp=1e-5)
    after = (case.hidden, case.weight, case.target, *arguments.values())
    assert all(a.nan_to_num().equal(b.nan_to_num()) for a, b in zip(after, before, strict=True))


@both
def test_programming_errors_are_refused(head):
    case, cfg = Case(5, 37), COVER[0]
    for bad in ({"num_grad_rows": 6}, {"temperature": 0.0}, {"adv_R": case.adv[:-1]}):
        with pytest.raises(AssertionError):
            case.ours(cfg, head, **bad)
    if DEVICE == "cpu":  # a device assert would be the end of CUDA in this process
        case.target[0] = 37
        with pytest.raises((IndexError, RuntimeError)):
            case.ours(cfg, head)
