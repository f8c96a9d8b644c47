"""How the loss of this run is trained: found out at start from the loss itself, by its source and by probes of it.

    two passes   `linear_logp`, the loss outside, autograd: where the derivative at a token depends on other tokens
    one pass     `linear_loss`: each token's derivative is its own
    fused        `linear_loss` with the Triton copy of the loss in clipped_pg.py, where that is the loss of this run

No option is listed here: whoever edits loss.py gets the path that the edited loss needs.
"""

import ast
import hashlib
import inspect
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.backend import KernelBackend, LossPath
from kernels.linear_logp import linear_logp
from kernels.linear_loss import linear_loss

# `syntax_of(loss.policy_loss)` when tests/kernels last held kernels/clipped_pg.py equal to loss.py. Whoever changes
# both runs those tests, and then prints the new one:
#   python -c "import loss, run.loss_path as p; print(p.syntax_of(loss.policy_loss))"
PROVEN = {
    "BY_SEQUENCE": "fa4d1af7",
    "MAX_LOG_RATIO": "585348db",
    "_Sequences": "4ef81bab",
    "_Tokens": "da4dc072",
    "_aggregation_weights": "53e18eeb",
    "_at_least_one": "07224915",
    "_ratios": "264ff076",
    "_reference_kl": "c9a7ff0a",
    "_sampler_weights": "01878a09",
    "_token_loss": "f1959549",
    "clamp_abs": "b71bf0f5",
    "kl_estimate": "bd25fe27",
    "policy_loss": "45fd5ef5",
}
PROBE_SIZES = (1e-3, 0.03, 0.3, 3.0, 30.0)  # nats


def choose_loss_path(
    policy_loss: Callable,
    cfg: Any,
    *,
    has_old: bool,
    has_ref: bool,
    backend: KernelBackend,
    device: torch.device,
    max_log_ratio: float,
) -> LossPath:
    """The path of policy_loss (`loss.policy_loss`) with the options cfg. has_old, has_ref: whether old_logp_T and
    ref_logp_T are given in this run. A second at most; nothing random, so all ranks find the same."""
    coupled, idle_moves, positive_moves = _probe(policy_loss, cfg, has_old, has_ref)
    path = LossPath("one pass", "", max_log_ratio, idle_moves, positive_moves)
    if coupled:
        return replace(path, kind="two passes", why="the loss couples the tokens of a sequence")
    if backend.name != "triton":
        return path
    edited = edited_names(policy_loss)
    if edited:
        return replace(path, why=f"loss.py was edited: {', '.join(edited)}")
    differ = _fused_differences(policy_loss, cfg, has_old, has_ref, replace(path, kind="fused"), backend, device)
    if differ:
        return replace(path, why=f"the fused kernel has another gradient at {differ} probes")
    return replace(path, kind="fused")


# ---------------------------------------------------------------------------------------------------------- the source


def edited_names(policy_loss: Callable) -> list[str]:
    """What of `PROVEN` is no longer as it was, or is new."""
    now = syntax_of(policy_loss)
    return sorted(name for name in now.keys() | PROVEN.keys() if now.get(name) != PROVEN.get(name))


def syntax_of(function: Callable) -> dict[str, str]:
    """Name -> digest of each function, class and constant that `function` reaches by name, itself included.

    Comments, docstrings, annotations and layout do not count. Left out are torch, the standard library, and functions
    whose names end in _metrics or _problems: they take no part in a token's loss.
    """
    digests, todo = {}, [(function.__name__, function)]
    while todo:
        name, value = todo.pop()
        if name in digests:
            continue
        text, names = _normal_form(value)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()[:8]
        namespace = vars(sys.modules[value.__module__]) if isinstance(value, FunctionType | type) else {}
        for used in sorted(names):
            owner, _, attribute = used.partition(".")
            reached = namespace.get(owner)
            if isinstance(reached, ModuleType):
                reached = getattr(reached, attribute, None)
            home = (getattr(reached, "__module__", None) or "").split(".")[0]
            if (
                reached is None
                or home in ("torch", *sys.stdlib_module_names)
                or owner.endswith(("_metrics", "_problems"))
            ):
                continue
            todo.append((used, reached))
    return digests


def _normal_form(value: Any) -> tuple[str, set[str]]:
    """(source without comments, docstrings and annotations, the names in it: `name` or `name.attribute`)."""
    if not isinstance(value, FunctionType | type):
        return repr(value), set()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, SyntaxError):  # made at run time: of unknown content
        return "unknown", set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return ast.unparse(tree), names


# ---------------------------------------------------------------------------------------------------------- the probes


def _random_pack(size: float, cfg: Any, has_old: bool, has_ref: bool) -> tuple[Tensor, Tensor, dict]:
    """(logp_R, entropy_R, the other arguments of policy_loss), float64: log-probabilities differ by about `size`."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return size * torch.randn(24, generator=generator, dtype=torch.float64)

    token_R = torch.arange(24)
    logp_R = -4 * torch.rand(24, generator=generator, dtype=torch.float64) - 0.1
    old_R = logp_R + noise()
    pack = {
        "old_logp_T": old_R if has_old else None,
        "sampler_logp_T": (old_R if has_old else logp_R) + noise(),
        "ref_logp_T": logp_R + noise() if has_ref else None,
        "adv_T": torch.tensor([1.3, 0.0, -0.7, -2.1, 0.0], dtype=torch.float64)[token_R % 5],
        "mask_T": token_R % 7 != 6,
        "seq_T": token_R // 6,
        "positive_T": token_R % 2 == 0,
    }
    return logp_R, torch.rand(24, generator=generator, dtype=torch.float64), pack | _counts(cfg)


def _counts(cfg: Any) -> dict:
    return {"num_valid_tokens": 1, "num_valid_seqs": 1, "num_positive_tokens": 1, "cfg": cfg}


def _slopes(policy_loss: Callable, logp_R: Tensor, entropy_R: Tensor, pack: dict) -> Tensor:
    """[2, R]: derivatives of the loss in logp and in entropy."""
    with torch.enable_grad():
        leaves = logp_R.clone().requires_grad_(), entropy_R.clone().requires_grad_()
        loss, _ = policy_loss(leaves[0], entropy_T=leaves[1], **pack)
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
    return torch.stack([torch.zeros_like(logp_R) if slope_R is None else slope_R for slope_R in slopes])


def _probe(policy_loss: Callable, cfg: Any, has_old: bool, has_ref: bool) -> tuple[bool, bool, bool]:
    """(whether the derivatives at a token depend on other tokens, idle_moves, positive_moves of `LossPath`).

    Every second token is moved, by little and by much, and the derivatives at the others are compared.
    """
    coupled = idle_moves = positive_moves = False
    for size in PROBE_SIZES:
        logp_R, entropy_R, pack = _random_pack(size, cfg, has_old, has_ref)
        slopes_KR = _slopes(policy_loss, logp_R, entropy_R, pack)
        moved_R = (slopes_KR != 0).any(0) & (pack["adv_T"] == 0)
        idle_moves |= bool((moved_R & ~pack["positive_T"]).any())
        positive_moves |= bool((moved_R & pack["positive_T"]).any())
        for first in (0, 1):
            others = slice(first, None, 2)
            for push in (-30.0, -0.3, -3e-3, 3e-3, 0.3, 30.0):
                moved_logp_R, moved_entropy_R = logp_R.clone(), entropy_R.clone()
                moved_logp_R[1 - first :: 2] += push
                moved_entropy_R[1 - first :: 2] += abs(push)
                again_KR = _slopes(policy_loss, moved_logp_R, moved_entropy_R, pack)
                same = torch.isclose(again_KR, slopes_KR, rtol=1e-9, atol=0, equal_nan=True)
                coupled |= not bool(same[:, others].all())
    return coupled, idle_moves, positive_moves


def _edge_values(cfg: Any, max_log_ratio: float) -> list[tuple[float, float, float, float]]:
    """(logp - old, advantage, old - sampler, ref - logp): both sides of every bound of cfg for each sign of the
    advantage, and extremes. What is not varied is gentle: an extreme would hide the others."""

    def sides(*bounds: float | None) -> list[float]:
        return [bound + side for bound in bounds if bound is not None for side in (-1e-3, 1e-3)]

    def log(x: float | None) -> float | None:
        return math.log(x) if x else None

    low, high = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    bound = cfg.kl_input_clamp_value
    clips = (log(1 - cfg.ratio_clip_min), log(1 + cfg.ratio_clip_max), log(cfg.ratio_clip_c))
    log_ratios = [0.01, 0.7, -0.7, 3.0, -3.0, 50.0, -50.0, *sides(-max_log_ratio, max_log_ratio, *clips)]
    gaps = [0.2, -0.2, 2.0, -2.0, 200.0, -200.0, math.inf, *sides(log(low), log(high))]
    refs = [-0.1, 0.8, -0.8, 5.0, -5.0, 15.0, -15.0, 30.0, *sides(bound, bound and -bound)]
    rows = [(log_ratio, adv, 0.1, 0.1) for log_ratio in log_ratios for adv in (1.3, -0.7, 0.0)]
    rows += [(0.01, adv, gap, 0.1) for gap in gaps for adv in (1.3, -0.7)]
    return rows + [(0.01, adv, 0.1, ref) for ref in refs for adv in (-2.1, 0.0)]


def _fused_differences(
    policy_loss: Callable,
    cfg: Any,
    has_old: bool,
    has_ref: bool,
    path: LossPath,
    backend: KernelBackend,
    device: torch.device,
) -> int:
    """Probes at which the fused kernel gives another gradient than autograd of policy_loss: rows of a small head."""
    values = torch.tensor(_edge_values(cfg, path.max_log_ratio), device=device)
    values = torch.cat([values, values[:8]])  # the last 8 are masked
    generator, num_rows = torch.Generator().manual_seed(0), len(values)
    hidden_RD = torch.randn(num_rows, 8, generator=generator).to(device).requires_grad_()
    weight_VD = torch.randn(33, 8, generator=generator).to(device)
    target_R = torch.randint(33, (num_rows,), generator=generator).to(device)
    logp_R = linear_logp(hidden_RD, weight_VD, target_R, temperature=0.9, backend=backend).detach()
    log_ratio_R, adv_R, gap_R, ref_R = values.unbind(1)
    row_R = torch.arange(num_rows, device=device)
    mask_R = row_R < num_rows - 8
    adv_R = torch.where(mask_R, adv_R, torch.nan)
    old_R = logp_R - log_ratio_R if has_old else logp_R
    pack_loss = partial(
        policy_loss,
        old_logp_T=torch.where(mask_R, old_R, torch.nan) if has_old else None,
        sampler_logp_T=old_R - gap_R,
        ref_logp_T=logp_R + ref_R if has_ref else None,
        adv_T=adv_R,
        mask_T=mask_R,
        seq_T=row_R // 7,
        positive_T=row_R % 2 == 0,
        **_counts(cfg),
    )
    slopes = []
    for kind in ("one pass", "fused"):
        loss, _ = linear_loss(
            hidden_RD, weight_VD, target_R, temperature=0.9, num_grad_rows=num_rows, pack_loss=pack_loss,
            path=replace(path, kind=kind), backend=backend,
        )  # fmt: skip
        slopes += torch.autograd.grad(loss, hidden_RD)
    error_R, size_R = (slopes[1] - slopes[0]).abs().amax(1), slopes[0].abs().amax(1)
    return int((~(error_R <= 1e-4 * size_R + 1e-5)).sum())
