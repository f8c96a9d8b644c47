"""What bench/head.py measures: the inputs, the reference in float64, the heads by name, and one run of a head.

A shape is (N rows, D, V rows of the weight, vocab): of the V, the tokenizer has the first `vocab`. The logits of the
others are near -300, as of ids that are never sampled: so heads that know no vocabulary compute the same numbers.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench import peers
from config import LossConfig
from head import HeadOptions, LossOptions, LossPath, PolicyLoss, linear_loss
from kernels.backend import KernelBackend
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from kernels.reference import reference_gradients, reference_logp
from loss import policy_loss

OURS_COMPILED = "linear_loss, compiled"
BARE, NAIVE, OURS, OURS_SMALL, LOGP = "bare matmuls", "naive", "linear_loss", "linear_loss, 512 rows", "linear_logp"
LIGER_GRPO, VERL = "Liger GRPO", "verl"


@dataclass(slots=True)
class Inputs:
    hidden_ND: Tensor
    weight_VD: Tensor
    target_N: Tensor
    vocab: int
    old_N: Tensor | None = None
    adv_N: Tensor | None = None


@torch.no_grad()
def make_inputs(
    num_rows: int, width: int, columns: int, device: str, dtype: torch.dtype, vocab: int | None = None
) -> Inputs:
    vocab = columns if vocab is None else vocab
    generator = torch.Generator(device).manual_seed(0)
    like = {"generator": generator, "device": device}
    weight_VD = torch.randn(columns, width, **like).mul_(0.02).to(dtype)
    weight_VD[vocab:, 0] = -300
    target_N = torch.randint(vocab, (num_rows,), **like)
    own_ND = weight_VD[target_N].float()
    lean_N1 = 12 + 16 * torch.rand(num_rows, 1, **like)  # the target's logit; the others' are normal, 3 wide
    hidden_ND = own_ND * (lean_N1 / own_ND.square().sum(1, keepdim=True))
    hidden_ND += torch.randn(num_rows, width, **like) * (3 / (0.02 * width**0.5))
    hidden_ND[:, 0] = 1
    x = Inputs(hidden_ND.to(dtype), weight_VD, target_N, vocab)
    wide = torch.float64 if device == "cuda" else torch.float32
    logp_N = torch.cat([exact_logp(x, rows, wide) for rows in parts_of(num_rows)])
    x.old_N = logp_N.float() + 0.2 * torch.rand(num_rows, **like) - 0.1
    length = peers.seq_len(num_rows)
    x.adv_N = torch.randn(-(-num_rows // length), **like).repeat_interleave(length)[:num_rows]
    x.hidden_ND.requires_grad_(), x.weight_VD.requires_grad_()
    return x


def parts_of(num_rows: int) -> list[slice]:
    """Rows whose logits fit into memory at once in float64."""
    return [slice(start, min(start + 512, num_rows)) for start in range(0, num_rows, 512)]


def exact_logp(x: Inputs, rows: slice, dtype: torch.dtype) -> Tensor:
    inputs = x.hidden_ND[rows].to(dtype), x.weight_VD.to(dtype), x.target_N[rows]
    logp_C, _ = reference_logp(*inputs, LogitOptions(vocab=x.vocab))
    return logp_C


def exact_part(x: Inputs, rows: slice, computes: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, logp, entropy, dX, dW) of the rows' part of the GRPO or CE loss, whose sum over parts is the loss."""
    num_rows = len(x.hidden_ND)

    def loss_of(logp_C: Tensor, entropy_C: Tensor) -> Tensor:
        if computes == "CE":
            return -logp_C.sum() / num_rows
        ratio_C = (logp_C - x.old_N[rows]).exp()
        assert ((ratio_C - 1).abs() < 0.19).all(), "a ratio near the clip"
        return -(x.adv_N[rows] * ratio_C).sum() / num_rows

    return reference_gradients(loss_of, x.hidden_ND[rows], x.weight_VD, x.target_N[rows], LogitOptions(vocab=x.vocab))


@torch.no_grad()
def oracle(x: Inputs) -> dict[str, Tensor]:
    """logp, entropy, and of both losses value, dX and dW, in float64."""
    hidden_ND, num_rows = x.hidden_ND.detach().double(), len(x.hidden_ND)
    exact = {"logp": hidden_ND.new_empty(num_rows), "entropy": hidden_ND.new_empty(num_rows)}
    for computes in ("GRPO", "CE"):
        loss, dX = hidden_ND.new_zeros(()), torch.empty_like(hidden_ND)
        dW = torch.zeros_like(x.weight_VD, dtype=torch.float64)
        for rows in parts_of(num_rows):
            part, exact["logp"][rows], exact["entropy"][rows], dX[rows], part_of_dW = exact_part(x, rows, computes)
            loss += part
            dW += part_of_dW
        exact |= {f"{computes} loss": loss, f"{computes} dX": dX, f"{computes} dW": dW}
    return exact


def ours(backend: KernelBackend, policy_loss: PolicyLoss = policy_loss) -> Callable:
    """`linear_loss` on the PPO-clip loss, one sequence for each advantage."""
    path = LossPath("one pass", zero_adv_has_grad=False)

    def forward(x: Inputs):
        num_rows, seen = len(x.old_N), []

        def recording_loss(logp_N, entropy_R, **pack):
            seen[:] = [logp_N.detach()]
            return policy_loss(logp_N, entropy_R=entropy_R, **pack)

        seq_N = torch.arange(num_rows, device=x.old_N.device) // peers.seq_len(num_rows)
        count = torch.full((), num_rows, device=x.old_N.device)
        pack = {"old_logp_R": x.old_N, "sampler_logp_R": x.old_N, "adv_R": x.adv_N, "mask_R": torch.ones_like(x.old_N)}
        pack |= {"seq_R": seq_N, "num_valid_tokens": count, "num_valid_seqs": count, "cfg": LossConfig()}
        loss_of = partial(recording_loss, **pack)
        options = HeadOptions(vocab=x.vocab, backend=backend, loss=LossOptions(path=path))
        loss, *_ = linear_loss(x.hidden_ND, x.weight_VD, x.target_N, loss_of, options, num_grad_rows=num_rows)
        return loss, *seen

    return forward


def compiled() -> PolicyLoss:
    """As a run on a GPU has it (`compiled_loss.compiled_loss`)."""
    return torch.compile(policy_loss, fullgraph=True, dynamic=True)


def scored(backend: KernelBackend) -> Callable:
    """`linear_logp`, with the entropy that comes free, under the PPO loss."""

    def forward(x: Inputs):
        logp_N, _ = linear_logp(x.hidden_ND, x.weight_VD, x.target_N, LogitOptions(vocab=x.vocab, backend=backend))
        return peers.ppo_loss(logp_N, x), logp_N

    return forward


def heads(backend: str) -> dict[str, tuple[str, Callable]]:
    """Name -> (what it computes, the function that makes it)."""
    return {
        OURS: ("GRPO", lambda: ours(KernelBackend(backend))),
        OURS_COMPILED: ("GRPO", lambda: ours(KernelBackend(backend), compiled())),
        OURS_SMALL: ("GRPO", lambda: ours(KernelBackend(backend, 512))),
        "linear_loss, 2048 rows": ("GRPO", lambda: ours(KernelBackend(backend, 2048))),
        "linear_loss, 8192 rows": ("GRPO", lambda: ours(KernelBackend(backend, 8192))),
        LOGP: ("GRPO", lambda: scored(KernelBackend(backend))),
        NAIVE: ("GRPO", lambda: peers.of_logp(peers.naive_logp)),
        "naive, torch.compile": ("GRPO", lambda: peers.of_logp(torch.compile(peers.naive_logp, dynamic=False))),
        VERL: ("GRPO", peers.verl),
        "cut-cross-entropy": ("GRPO", lambda: peers.cut_ce("high")),
        "cut-cross-entropy, no filter": ("GRPO", lambda: peers.cut_ce(None)),
        "Liger FLSCE": ("GRPO", peers.liger_flsce),
        LIGER_GRPO: ("GRPO", peers.liger_grpo),
        "Liger FLCE": ("CE", peers.liger_ce),
        "F.linear_cross_entropy": ("CE", peers.torch_ce),
        "linear_loss, torch": ("GRPO", lambda: ours(KernelBackend("torch"))),
    }


def call(forward: Callable, x: Inputs, backward: bool) -> tuple:
    """(loss, logp_N or None, dX, dW), or without `backward` only the first two."""
    with torch.set_grad_enabled(backward):
        loss, logp_N = forward(x)
    return loss.detach(), logp_N, *(torch.autograd.grad(loss, (x.hidden_ND, x.weight_VD)) if backward else ())


@torch.no_grad()
def bare(x: Inputs, buffers: list[Tensor], backward: bool) -> None:
    """The matmuls themselves, each at once over all rows, into memory that is there: what cannot be done faster."""
    torch.mm(x.hidden_ND, x.weight_VD.T, out=buffers[0])
    if backward:
        torch.mm(buffers[0], x.weight_VD, out=buffers[1])
        torch.mm(buffers[0].T, x.hidden_ND, out=buffers[2])


def milliseconds(run: Callable, cuda: bool) -> float:
    if not cuda:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def first_run(forward: Callable, x: Inputs, exact: dict, computes: str, backward: bool, cuda: bool) -> dict:
    """Errors against `exact`, and the peak of a second call: the first may compile and tune."""
    loss, logp_N, *grads = call(forward, x, backward)
    found = {"loss_error": (loss - exact[f"{computes} loss"]).abs().item()}
    if logp_N is not None:
        error_N = (logp_N.detach() - exact["logp"]).abs()
        found |= {"logp_error": error_N.mean().item(), "logp_error_max": error_N.max().item()}
    for name, grad in zip(("dX", "dW"), grads, strict=False):
        found[f"{name}_error"] = (
            (grad - exact[f"{computes} {name}"]).norm() / exact[f"{computes} {name}"].norm()
        ).item()
    size = sum(grad.nbytes for grad in grads)
    del loss, logp_N, grads
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(forward, x, backward)
        found["extra_MiB"] = (torch.cuda.max_memory_allocated() - before - size) / 2**20
    return found | {"first_ms": milliseconds(lambda: call(forward, x, backward), cuda)}
