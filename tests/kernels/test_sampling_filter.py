"""top_p and top_k in the head: against Python's loops in float64, NeMo RL's own function, and vLLM's.

Without a GPU, Triton's kernels run in its interpreter on CPU tensors (conftest.py); with one, all of this runs there.
"""

import json
import math
from functools import partial
from pathlib import Path

import fake_vllm
import pytest
import torch

from config import LossConfig
from head import DEVIATION, HeadOptions, LossOptions, LossPath, linear_loss
from kernels import sizes
from kernels.backend import KernelBackend
from kernels.filter import SamplingFilter
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from loss import policy_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH, TRITON = KernelBackend("torch"), KernelBackend("triton", 16)
backends = pytest.mark.parametrize("backend", [TORCH, TRITON], ids=["torch", "triton"])
VOCAB, COLUMNS, ROWS, WIDTH = 37, 41, 21, 6
FILTERS = [(1.0, 1), (1.0, 3), (1.0, 500), (1e-7, None), (0.6, None), (0.9, 5), (0.45, 12), (0.97, VOCAB)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Chunks of 8 rows with PyTorch, and filters of 3 rows at a time."""
    monkeypatch.setitem(sizes.TORCH_CHUNK_ELEMENTS, DEVICE, 8 * VOCAB)
    monkeypatch.setitem(sizes.SORT_ELEMENTS, DEVICE, 3 * VOCAB)


def make_inputs(ties, dtype=torch.float32):
    """Ties: logits are whole numbers, of which each row has many, equal in every precision."""
    generator = torch.Generator().manual_seed(3)
    hidden_RD = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(COLUMNS, WIDTH, generator=generator, dtype=torch.float64)
    if ties:
        hidden_RD, weight_VD = (x.mul(0.8).round() for x in (hidden_RD, weight_VD))
    target_R = torch.randint(VOCAB, (ROWS,), generator=generator)
    logits_RV = hidden_RD @ weight_VD[:VOCAB].T
    target_R[::2] = logits_RV.argmax(1)[::2]  # some are kept for certain
    return *(x.to(DEVICE, dtype).requires_grad_() for x in (hidden_RD, weight_VD)), target_R.to(DEVICE)


def kept_ids(logits, top_p, top_k, temperature):
    """What stays of one row, by loops over Python's floats."""
    ascending = sorted(range(len(logits)), key=lambda i: (logits[i], i))
    if top_k is not None and top_k < len(logits):
        least = logits[ascending[-top_k]]
        ascending = [i for i in ascending if logits[i] >= least]
    mass = [math.exp((logits[i] - max(logits)) / temperature) for i in ascending]
    below, kept = 0.0, []
    for i, part in zip(ascending, mass, strict=True):
        below += part / sum(mass)
        if below > 1 - top_p + 1e-9 or top_p == 1:  # 1e-9: a sum that is 1 - top_p is one in every precision
            kept.append(i)
    return kept or ascending[-1:]


def oracle(hidden_RD, weight_VD, target_R, temperature, top_p=1.0, top_k=None, softcap=None):
    """(logp_R, entropy_R) in float64, from each row's kept logits alone; autograd goes through them."""
    pairs = []
    for hidden_D, target in zip(hidden_RD, target_R.tolist(), strict=True):
        logits_V = weight_VD[:VOCAB] @ hidden_D
        if softcap:
            logits_V = softcap * (logits_V / softcap).tanh()
        kept = kept_ids(logits_V.tolist(), top_p, top_k, temperature)
        logp_K = (logits_V[kept] / temperature).log_softmax(0)
        logp = logp_K[kept.index(target)] if target in kept else torch.tensor(-math.inf, dtype=torch.float64)
        pairs.append(torch.stack([logp.to(logp_K), -(logp_K.exp() * logp_K).sum()]))
    return torch.stack(pairs, 1)


def total(logp_R, entropy_R):
    """A sum with a weight for each row, of the targets that are kept."""
    weight_R = torch.linspace(-1, 2, ROWS, device=DEVICE, dtype=logp_R.dtype)
    return (torch.where(logp_R > -math.inf, logp_R, 0.0) * weight_R + 0.3 * weight_R**2 * entropy_R).sum()


@pytest.mark.slow("(ties|-5|-3|-1|e-07|-500|0.6-None).*triton")
@backends
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("top_p, top_k", FILTERS)
def test_value_and_gradient_equal_the_loops(backend, ties, top_p, top_k):
    inputs, temperature = make_inputs(ties), 0.7 if ties else 1.0
    wide = [x.detach().double().requires_grad_() for x in inputs[:2]]
    got = linear_logp(*inputs, LogitOptions(temperature, VOCAB, SamplingFilter(top_p, top_k), backend))
    want = oracle(*wide, inputs[2], temperature, top_p, top_k)
    cut_R = want[0] == -math.inf
    assert cut_R.any() == (top_k != 500) and not cut_R.all() and got[0].isneginf().equal(cut_R)
    torch.testing.assert_close(torch.stack(got).double(), want, atol=2e-6, rtol=0)
    grads = torch.autograd.grad(total(*got), inputs[:2])
    for a, b in zip(grads, torch.autograd.grad(total(*want), wide), strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm().clamp(min=1)
    assert not grads[1][VOCAB:].any()


@backends
def test_a_filter_sees_capped_logits(backend):
    """And of those that it cuts, no derivative of the cap remains."""
    inputs = make_inputs(ties=False)
    wide = [x.detach().double().requires_grad_() for x in inputs[:2]]
    got = linear_logp(*inputs, LogitOptions(0.7, VOCAB, SamplingFilter(0.8, 12), backend, softcap=2.0))
    want = oracle(*wide, inputs[2], 0.7, 0.8, 12, softcap=2.0)
    assert (want[0] == -math.inf).any()
    torch.testing.assert_close(torch.stack(got).double(), want, atol=2e-6, rtol=0)
    grads = torch.autograd.grad(total(*got), inputs[:2])
    for a, b in zip(grads, torch.autograd.grad(total(*want), wide), strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()


NEMO = json.loads((Path(__file__).parents[1] / "helpers/peers/sampling_filter.json").read_text())
LOGITS = NEMO["logits"]  # the last two rows have equal ones at many places of a cut


@pytest.mark.parametrize("case", range(len(NEMO["cases"])))
def test_nemo_rls_own_function(case):
    expected = NEMO["cases"][case]
    top_k, top_p, temperature = (expected[name] for name in ("top_k", "top_p", "temperature"))
    num_rows, vocab = len(LOGITS), len(LOGITS[0])
    for target in range(vocab):
        logits = torch.tensor(LOGITS, device=DEVICE, requires_grad=True)  # of an identity's rows, the head's input
        identity, target_R = torch.eye(vocab, device=DEVICE), torch.full((num_rows,), target, device=DEVICE)
        options = LogitOptions(temperature, sampling_filter=SamplingFilter(top_p, top_k))
        logp_R, _ = linear_logp(logits, identity, target_R, options)
        found = [None if x == -math.inf else round(x, 5) for x in logp_R.tolist()]
        want = [row[target] for row in expected["logp"]]
        assert [x is None for x in found] == [x is None for x in want]
        assert [x for x in found if x is not None] == pytest.approx([x for x in want if x is not None], abs=2e-5)
    assert len({x is None for row in expected["logp"] for x in row}) == 1 + (case != 2)
    logits = torch.tensor(LOGITS, device=DEVICE).repeat_interleave(vocab, 0).requires_grad_()
    logp_R, _ = linear_logp(logits, identity, torch.arange(vocab, device=DEVICE).repeat(num_rows), options)
    weight_R = torch.arange(1.0, 1 + vocab, device=DEVICE).repeat(num_rows)
    (grad,) = torch.autograd.grad((torch.where(logp_R > -math.inf, logp_R, 0.0) * weight_R).sum(), logits)
    want = torch.tensor(expected["gradient"], device=DEVICE)
    torch.testing.assert_close(grad.view(num_rows, vocab, vocab).sum(1), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("top_p, top_k", FILTERS)
def test_the_stand_in_for_vllm_filters_alike(top_p, top_k):
    """It had top_p of the whole distribution beside top_k (found with the trainer's: a gap of 0.1 nats)."""
    logits_CV = torch.randn(40, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2
    for logits_V in logits_CV:
        params = fake_vllm.SamplingParams(
            temperature=0.7, max_tokens=1, stop_token_ids=[0], ignore_eos=True, logprobs=0, flat_logprobs=True,
            detokenize=False, output_kind=fake_vllm.RequestOutputKind.FINAL_ONLY, top_p=top_p, top_k=top_k or 0, seed=1,
        )  # fmt: skip
        request = fake_vllm.Request("0", [1], params)
        request.add_token(logits_V)
        kept = kept_ids(logits_V.tolist(), top_p, top_k, 0.7)
        logp_K = (logits_V[sorted(kept)] / 0.7).log_softmax(0)
        token, logp = request.reply.token_ids[0], request.reply.logprobs.logprobs[0]
        assert logp == pytest.approx(logp_K[sorted(kept).index(token)].item(), abs=1e-9)


@pytest.mark.parametrize("top_p, top_k", FILTERS)
def test_vllms_own_function(top_p, top_k):
    """With torch's stable sort in it, so that both break ties alike."""
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits_CV = torch.randn(9, 400, generator=torch.Generator().manual_seed(0)).mul(8).round().div(4)
    k = None if top_k is None else torch.full((9,), min(top_k, 400))
    p = None if top_p == 1 else torch.full((9,), top_p)
    sort = torch.Tensor.sort
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sort", lambda x, **options: sort(x, stable=True, **options))
        theirs_CV = sampler.apply_top_k_top_p_pytorch(logits_CV.clone(), k, p, allow_cpu_sync=True)
    SamplingFilter(top_p, top_k).cut_(logits_CV, 1.0)
    assert (logits_CV > -1e29).equal(theirs_CV > -math.inf)


def run_loss(cfg, backend, kind, sampling_filter, ref):
    hidden_RD, weight_VD, target_R = make_inputs(ties=False)
    seq_R = torch.arange(ROWS, device=DEVICE) // 4
    sampler_R = torch.linspace(-3, -0.5, ROWS, device=DEVICE)
    mask_R = (seq_R != 1) & (seq_R < 4)  # the last rows have no gradient
    pack = {"old_logp_R": None, "sampler_logp_R": sampler_R, "adv_R": sampler_R + 2, "mask_R": mask_R, "cfg": cfg}
    pack |= {"seq_R": seq_R, "ref_logp_R": sampler_R - 0.5 if ref else None, "positive_R": seq_R % 2}
    pack |= {"num_valid_tokens": 19, "num_valid_seqs": 5, "num_positive_tokens": 8}
    options = HeadOptions(0.7, VOCAB, sampling_filter, backend, loss=LossOptions(path=LossPath(kind)))
    rows = {"num_grad_rows": ROWS - 3 if kind == "one pass" else ROWS, "needs_unfiltered": ref}
    loss, metrics, _ = linear_loss(hidden_RD, weight_VD, target_R, partial(policy_loss, **pack), options, **rows)
    return loss, metrics, torch.autograd.grad(loss, (hidden_RD, weight_VD)), pack


@pytest.mark.slow("triton")
@backends
@pytest.mark.parametrize("ref", [False, True], ids=["", "ref"])
@pytest.mark.parametrize("token_level", [True, False])
def test_the_loss_is_that_of_the_filtered_logits(backend, ref, token_level):
    """In one pass; and in two, where the KL sees the whole distribution: by the oracle and autograd of loss.py."""
    cfg = LossConfig(
        reference_policy_kl_penalty=0.3 * ref, entropy_coef=0.1, positive_example_nll_weight=0.2,
        token_level_loss=token_level,
    )  # fmt: skip
    kind = "two passes" if ref else "one pass"
    loss, metrics, grads, pack = run_loss(cfg, backend, kind, SamplingFilter(0.8, 9), ref)
    *matrices, target_R = make_inputs(ties=False)
    wide = [x.detach().double().requires_grad_() for x in matrices]
    logp_R, entropy_R = oracle(*wide, target_R, 0.7, 0.8, 9)
    all_R, _ = oracle(*wide, target_R, 0.7)
    pack = {name: x.double() if name.endswith("logp_R") and x is not None else x for name, x in pack.items()}
    want, of_oracle = policy_loss(logp_R, entropy_R=entropy_R, unfiltered_logp_R=all_R if ref else None, **pack)
    assert loss.item() == pytest.approx(want.item(), abs=2e-6)
    for a, b in zip(grads, torch.autograd.grad(want, wide), strict=True):
        assert (a - b).norm() <= 5e-6 * b.norm()
    kept, counted = metrics["kept_fraction/sampling_filter"]
    assert (kept, counted) == of_oracle["kept_fraction/sampling_filter"] and 0 < kept < counted == 12
    assert metrics["kl_penalty"].item() == pytest.approx(of_oracle["kl_penalty"].item(), abs=2e-6)
    assert float(metrics[DEVIATION]) == 0


def test_paths_that_would_train_another_loss_are_refused():
    with pytest.raises(AssertionError):
        run_loss(LossConfig(reference_policy_kl_penalty=0.3), TRITON, "one pass", SamplingFilter(0.8), True)
