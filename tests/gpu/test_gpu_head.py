"""The output layer at real sizes: logp, entropy, the loss and its gradients against float64."""

from functools import partial

import pytest
import torch

from bench.head_cases import LOGP, OURS, OURS_SMALL, call, exact_part, heads, make_inputs, oracle, ours, parts_of
from config import LossConfig
from head import HeadOptions, LossOptions, LossPath, linear_loss
from kernels.backend import KernelBackend
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from loss import policy_loss

pytestmark = pytest.mark.gpu

EVERY_TERM = LossConfig(
    ratio_clip_c=3.0,
    use_importance_sampling_correction=True,
    truncated_importance_sampling_type="tis",
    truncated_importance_sampling_ratio=2.0,
    entropy_coef=0.1,
    reference_policy_kl_penalty=0.1,
    positive_example_nll_weight=0.1,
)


@pytest.fixture(scope="module", params=["main", "other"])
def case(request, place):
    """(inputs, what float64 makes of them). A shape is (rows, D, rows of the weight, of which the tokenizer has some):
    beyond the vocabulary the logits are near 300."""
    real = {"main": (8196, 2048, 151936, 151665), "other": (1030, 1536, 128256, 128256)}
    tiny = {"main": (66, 64, 515, 509), "other": (34, 72, 300, 300)}
    num_rows, width, size, vocab = (tiny if place.is_tiny else real)[request.param]
    x = make_inputs(num_rows, width, size, place.device.type, place.dtype, vocab)
    with torch.no_grad():
        x.weight_VD[x.vocab :].neg_()
    return x, oracle(x)


@pytest.mark.parametrize("name", [OURS, OURS_SMALL, LOGP])
def test_loss_and_gradients_are_those_of_float64(name, case, place, check, relative_error):
    """And a second run gives the same bits."""
    x, exact = case
    _, make = heads(place.backend)[name]
    forward = make()
    first = call(forward, x, True)
    loss, logp_N, grad_ND, grad_VD = first
    where = f"{name}, {len(x.hidden_ND)} rows"
    check(f"{where}: logp, mean", (logp_N - exact["logp"]).abs().mean().item(), 1e-4)
    check(f"{where}: logp, largest", (logp_N - exact["logp"]).abs().max().item(), 1e-3)
    check(f"{where}: loss", (loss - exact["GRPO loss"]).abs().item(), 1e-4)
    check(f"{where}: dX", relative_error(grad_ND, exact["GRPO dX"]), place.gradient_limit)
    check(f"{where}: dW", relative_error(grad_VD, exact["GRPO dW"]), place.gradient_limit)
    second = call(forward, x, True)
    num_changed = sum((a != b).sum().item() for a, b in zip(first, second, strict=True))
    check(f"{where}: numbers that a second run changes", num_changed, 0)


def test_entropy_is_that_of_float64(case, place, check):
    x, exact = case
    with torch.no_grad():
        options = LogitOptions(vocab=x.vocab, backend=KernelBackend(place.backend))
        _, entropy_N = linear_logp(x.hidden_ND, x.weight_VD, x.target_N, options)
    check(f"entropy, {len(entropy_N)} rows, largest", (entropy_N - exact["entropy"]).abs().max().item(), 1e-3)


def test_every_term_of_the_loss_in_one_pass_and_in_two(place, check, relative_error):
    """All terms at once, entropy bonus included, against one pass in float64."""
    num_rows, width, size = (64, 64, 515) if place.is_tiny else (4096, 2048, 151936)
    device = place.device
    x = make_inputs(num_rows, width, size, device.type, place.dtype)
    generator = torch.Generator(device).manual_seed(1)
    noise_2N = 0.1 * torch.rand(2, num_rows, generator=generator, device=device)
    row_N = torch.arange(num_rows, device=device)
    num_trained = num_rows * 3 // 4
    tensors = {
        "adv_R": x.adv_N,
        "old_logp_R": x.old_N,
        "sampler_logp_R": x.old_N + noise_2N[0],
        "ref_logp_R": x.old_N - noise_2N[1],
    }
    pack = {
        "mask_R": row_N < num_trained,
        "seq_R": row_N // 64,
        "positive_R": x.target_N % 2 == 1,
        "num_valid_tokens": num_rows,
        "num_valid_seqs": num_rows,
        "num_positive_tokens": num_rows,
    }

    def gradients(kind, dtype):
        hidden_ND = x.hidden_ND.detach().to(dtype).requires_grad_()
        weight_VD = x.weight_VD.detach().to(dtype).requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        loss_of = partial(policy_loss, **{name: y.to(wide) for name, y in tensors.items()}, **pack, cfg=EVERY_TERM)
        options = HeadOptions(1.3, backend=KernelBackend(place.backend, 1024), loss=LossOptions(path=LossPath(kind)))
        loss, *_ = linear_loss(hidden_ND, weight_VD, x.target_N, loss_of, options, num_grad_rows=num_trained)
        return loss.detach(), *torch.autograd.grad(loss, (hidden_ND, weight_VD))

    exact_loss, exact_ND, exact_VD = gradients("one pass", torch.float64)
    for kind in ("one pass", "two passes"):
        loss, grad_ND, grad_VD = gradients(kind, place.dtype)
        check(f"every term, {kind}: loss", (loss - exact_loss).abs().item(), 1e-4)
        check(f"every term, {kind}: dX", relative_error(grad_ND, exact_ND), place.gradient_limit)
        check(f"every term, {kind}: dW", relative_error(grad_VD, exact_VD), place.gradient_limit)


def test_rows_beyond_2_to_the_31_logits(place, check, relative_error):
    """One chunk of more than 2^31 logits: its last rows."""
    num_rows, width, size = (10, 64, 515) if place.is_tiny else (16384, 1536, 151936)
    x = make_inputs(num_rows, width, size, place.device.type, place.dtype)
    _, logp_N, grad_ND, _ = call(ours(KernelBackend(place.backend, num_rows)), x, True)
    *_, rows = parts_of(num_rows)
    _, exact_logp, _, exact_dX, _ = exact_part(x, rows, "GRPO")
    where = f"{num_rows * size / 2**31:.2f} x 2^31 logits, last {len(exact_logp)} rows"
    check(f"{where}: logp", (logp_N[rows] - exact_logp).abs().max().item(), 1e-3)
    check(f"{where}: dX", relative_error(grad_ND[rows], exact_dX), place.gradient_limit)
