"""The heads of other projects, the naive one, and the loss they are measured under: what bench/head.py compares with.

Each function makes a head: (its Inputs) -> (loss, logp_N or None), differentiable in hidden_ND and weight_VD. It raises
ImportError where the project is not installed. Those in .gpu/peers (bench/pack_gpu.sh) need no installation.
"""

import importlib.util
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

PEERS = Path(__file__).resolve().parent.parent / ".gpu" / "peers"


def unpack() -> None:
    """From .gpu/peers into a folder of their own: Triton wants to read the source of its kernels in a file."""
    folder = tempfile.mkdtemp(prefix="peers_")
    for wheel in PEERS.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.append(folder)


def seq_len(num_rows: int) -> int:
    """Of the equal sequences that a head wants who knows only sequences: what fills Liger's inner chunks."""
    return min(2048, num_rows // 2)


def ppo_loss(logp_N: Tensor, x) -> Tensor:
    ratio_N = (logp_N - x.old_N).exp()
    return -torch.minimum(ratio_N * x.adv_N, ratio_N.clamp(0.8, 1.2) * x.adv_N).mean()


def naive_logp(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    return -F.cross_entropy((hidden_ND @ weight_VD.T).float(), target_N, reduction="none")


def of_logp(logp: Callable) -> Callable:
    """A head that scores tokens, under the PPO loss."""

    def forward(x):
        logp_N = logp(x.hidden_ND, x.weight_VD, x.target_N)
        return ppo_loss(logp_N, x), logp_N

    return forward


def liger_grpo() -> Callable:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", use_ref_model=False)

    def forward(x):
        hidden_BTD, target_BT, old_BT, adv_BT = (
            t.unflatten(0, (-1, seq_len(len(x.old_N)))) for t in (x.hidden_ND, x.target_N, x.old_N, x.adv_N)
        )
        mask_BT = torch.ones_like(old_BT)
        return head(hidden_BTD, x.weight_VD, target_BT, mask_BT, adv_BT[:, 0], old_per_token_logps=old_BT)[0], None

    return forward


def liger_ce() -> Callable:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    def forward(x):  # its default chunks are N D / V rows, its default sum over them is in bfloat16
        options = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32, False, False, False, None, None, 16)
        return Function.apply(x.hidden_ND, x.weight_VD, x.target_N, *options)[0], None

    return forward


def liger_flsce() -> Callable:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction as Function,
    )

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        import cutlass  # noqa: F401  (nvidia-cutlass-dsl: absent is absent, the fallback is another head)
    return of_logp(lambda hidden, weight, target: -Function.apply(hidden, weight, target, 1.0, -100, 1, True)[0])


def torch_ce() -> Callable:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x: (F.linear_cross_entropy(x.hidden_ND, x.weight_VD, x.target_N, options=options), None)


def cut_ce(filter_eps: str | None) -> Callable:
    from cut_cross_entropy import linear_cross_entropy

    return of_logp(lambda *x: -linear_cross_entropy(*x, reduction="none", filter_eps=filter_eps).float())


def verl() -> Callable:
    """Its kernel file alone: the one module of the package that it imports is made up."""
    device = types.ModuleType("verl.utils.device")
    device.get_device_capability, device.get_device_name = torch.cuda.get_device_capability, lambda: "cuda"
    device.is_cuda_available, device.get_torch_device = torch.cuda.is_available(), lambda: torch.cuda
    sys.modules.update({"verl": types.ModuleType("verl"), "verl.utils": types.ModuleType("verl.utils")})
    sys.modules["verl.utils.device"] = device
    spec = importlib.util.spec_from_file_location("verl_kernels", PEERS / "verl_kernels.py")
    if not (PEERS / "verl_kernels.py").exists():
        raise ImportError("no verl_kernels.py in .gpu/peers (bench/pack_gpu.sh)")
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)

    class Logp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            logp, entropy, *stats = kernels.efficient_entropy_forward(*inputs, 0, 1.0, None)
            ctx.save_for_backward(*inputs, *stats)
            return logp, entropy

        @staticmethod
        def backward(ctx, grad_logp, grad_entropy):
            gradients = (grad_logp.contiguous(), grad_entropy.contiguous())
            return *kernels.efficient_entropy_backward(*gradients, *ctx.saved_tensors, 0, False, 1.0, None), None

    return of_logp(lambda *x: Logp.apply(*x)[0])
