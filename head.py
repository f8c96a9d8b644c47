"""How the loss meets the output layer: what loss.py says is what gets optimized, in one pass over the logits or in two.

The loss of a pack is a function of its log-probabilities and entropies, `loss.policy_loss`. It is called, never copied,
and its derivatives come from autograd:

    two passes   forward computes the logits, chunk by chunk, and from them logp and entropy; the loss is outside.
                 Backward computes the logits again for the gradients: matmuls of 8 R V D flops. Right for any loss.
    one pass     forward computes the gradients, too, while a chunk's logits are there: 6 R V D flops. Right where the
                 loss's derivatives at a token depend on that token alone, for the chunks to come are not known yet.

In examples/naive.py this is `loss_of_group(w, config, group, adv_G, num_tokens, len(adv_B)).backward()`: all logits
stay in memory, and autograd goes through them and the loss.

In one pass the loss is called after each chunk with the log-probabilities and entropies of the whole pack, 0 for chunks
to come, and its derivatives at the chunk's rows are used. After the last chunk all rows are known: that call gives the
loss, the metrics, and the true derivatives of all rows. If these differ from those used, the gradient is wrong:
`DEVIATION`, on which `gap.judge_step` stops the run.

On a GPU, compiled_loss.py has the compiler write the kernels of the loss and of its derivatives.

No token loss is listed here. `choose_loss_path` probes the loss at start, so whoever edits loss.py gets the
path that the edited loss needs. The output layer's weight exists whole only during the model's forward (FSDP2), so
these functions run there: `model.Decoder.forward` calls a function of (hidden_RD, weight_VD).

Dims, as in grpo.py. 2: the statistics of a row, logp and entropy. J: the reference's likeliest ids of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from config import ConfigError, LossConfig
from kernels.chunks import logit_chunks, write_gradients
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from kernels.matmul import wide_dtype
from loss import Max, Metrics, policy_loss

# A metric: the relative error of the derivatives that one pass used, at most MAX_DEVIATION if the loss does not couple
# tokens; 0 with two passes.
DEVIATION = "one_pass_deviation_max"
MAX_DEVIATION = 1e-6  # float sums in another order stay below

PACK_DEPENDENCE = (
    "loss.py: the gradient at a token depends on the other sequences of its pack, or on the order of tokens; packs "
    "change with policy.sequence_packing and with the number of ranks. Divide by num_valid_tokens, num_valid_seqs or "
    "num_positive_tokens, which count the whole optimizer step, and not by a mean, sum or length of the pack; or set "
    "grpo.allow_pack_dependence=true to train it anyway"
)

PolicyLoss = Callable[..., tuple[Tensor, Metrics]]  # `loss.policy_loss`, or what a compiler makes of it


@dataclass(frozen=True, slots=True)
class LossPath:
    """How the gradient of a loss is computed; the default is right for any loss.

    zero_adv_has_grad: the loss has a gradient at tokens with advantage 0, from a KL, an entropy bonus or an NLL.
    """

    kind: Literal["one pass", "two passes"] = "two passes"
    why: str = ""
    zero_adv_has_grad: bool = True

    def describe(self) -> str:
        reason = f" ({self.why})" if self.why else ""
        return f"loss: {self.kind}, autograd of loss.py{reason}"


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The loss of a run, and how its gradient is computed. call, kernels: of compiled_loss.py."""

    call: PolicyLoss = policy_loss
    kernels: str = "eager"
    path: LossPath = LossPath()

    def describe(self) -> str:
        return f"{self.path.describe()}, {self.kernels}"


@dataclass(frozen=True, slots=True)
class HeadOptions(LogitOptions):
    """What a run computes from the logits, and how: constants of the run. loss: what is made of the
    log-probabilities."""

    loss: LossOptions = LossOptions()

    @property
    def unfiltered(self) -> "HeadOptions":
        return replace(self, sampling_filter=None)

    def describe(self, num_columns: int) -> str:
        """For the log. num_columns: rows of the output layer's weight."""
        assert self.backend is not None
        return f"{self.backend.describe(num_columns)}; {self.loss.describe()}"


class LossOfLogps(Protocol):
    """`loss.policy_loss` with its other arguments given: (loss, metrics). Without with_metrics, no metrics."""

    def __call__(
        self, logp_R: Tensor, *, entropy_R: Tensor, with_metrics: bool, unfiltered_logp_R: Tensor | None = None
    ) -> tuple[Tensor, Metrics]: ...


# ------------------------------------------------------------------------------------------------- log-probabilities


def response_logps(
    model: Callable, inputs: tuple, target_R: Tensor, options: HeadOptions, top_k: int | None = None
) -> tuple[Tensor, ...]:
    """(logp_R, entropy_R) of the target tokens under the model, a `model.Decoder`, float32, in nats. inputs:
    `MicroBatch.model_inputs`. With top_k also (logp_RJ, ids_RJ), of the ids that are likeliest under the model."""
    return model(*inputs, partial(linear_logp, target_T=target_R, options=options, top_k=top_k))


# ---------------------------------------------------------------------------------------------------------- the loss


def linear_loss(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    loss_of: LossOfLogps,
    options: HeadOptions,
    *,
    num_grad_rows: int,
    needs_unfiltered: bool = False,
    ids_RJ: Tensor | None = None,
) -> tuple[Tensor, Metrics, Tensor]:
    """(loss, metrics and `DEVIATION`) of loss_of, on log softmax(hidden_RD @ weight_VD[:vocab].T / temperature); and
    these log-probabilities, [R], without a gradient.

    hidden_RD, weight_VD, target_R, precision: as `linear_logp`; differentiable once in the first two.
    num_grad_rows: in one pass, only the first num_grad_rows rows get a gradient; the rest get logp and entropy alone.
    A gradient that the loss has at the rest counts in `DEVIATION`.
    needs_unfiltered: loss_of also gets unfiltered_logp_R, without the sampling_filter, for the KL. Only with two passes
    (`choose_loss_path` sees to it). ids_RJ: and logp_RJ, of these ids, likewise.
    Memory of one pass: a chunk of logits in float32 (twice with torch), and both gradients; the weight's is in float32
    until backward.
    """
    assert 0 <= num_grad_rows <= len(hidden_RD), (num_grad_rows, hidden_RD.shape)
    needs_both = needs_unfiltered and options.sampling_filter is not None
    needs_grad = torch.is_grad_enabled() and (hidden_RD.requires_grad or weight_VD.requires_grad)
    if options.loss.path.kind == "one pass" and needs_grad:
        assert not needs_both and ids_RJ is None, options
        return _OnePass.apply(hidden_RD, weight_VD, target_R.contiguous(), num_grad_rows, loss_of, options)
    if ids_RJ is None:
        logp_R, entropy_R = linear_logp(hidden_RD, weight_VD, target_R, options)
    else:
        logp_R, entropy_R, logp_RJ, _ = linear_logp(hidden_RD, weight_VD, target_R, options, ids_TJ=ids_RJ)
        loss_of = partial(loss_of, logp_RJ=logp_RJ)
    if needs_both:
        unfiltered_logp_R, _ = linear_logp(hidden_RD, weight_VD, target_R, options.unfiltered)
        loss_of = partial(loss_of, unfiltered_logp_R=unfiltered_logp_R)
    loss, metrics = loss_of(logp_R, entropy_R=entropy_R, with_metrics=True)
    metrics[DEVIATION] = Max(loss.new_zeros(()))
    return loss, metrics, logp_R.detach()


class _OnePass(torch.autograd.Function):
    """Forward computes (loss, metrics, logp_R) and both gradients; backward scales the gradients."""

    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, target_R, num_grad_rows, loss_of, options):
        wide = wide_dtype(hidden_RD)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_RD = grad_weight_VD = None
        if need_hidden:
            grad_hidden_RD = hidden_RD.new_zeros(hidden_RD.shape)
        if need_weight:
            grad_weight_VD = weight_VD.new_empty(weight_VD.shape, dtype=wide)  # the first chunk overwrites it
            if num_grad_rows == 0:  # there is no chunk
                grad_weight_VD.zero_()
            if options.vocab is not None:  # no chunk writes the rows of padding
                grad_weight_VD[options.vocab :] = 0
        stats_2R = hidden_RD.new_zeros(2, len(hidden_RD), dtype=wide)
        used_2R = torch.zeros_like(stats_2R)  # the derivatives that the gradients use

        rest = slice(num_grad_rows, None)
        stats_2R[0, rest], stats_2R[1, rest] = linear_logp(hidden_RD[rest], weight_VD, target_R[rest], options)
        for chunk in logit_chunks(hidden_RD[:num_grad_rows], weight_VD, target_R[:num_grad_rows], options):
            rows = chunk.rows
            stats_2R[:, rows] = chunk.logp_and_entropy()
            so_far = derivatives(loss_of, stats_2R, with_metrics=False)
            used_2R[:, rows] = so_far.slopes_2R[:, rows]
            slope_of_logp_C, slope_of_entropy_C = so_far.slopes_2R[:, rows]
            dz_CV = chunk.dlogits(slope_of_logp_C, slope_of_entropy_C if so_far.uses_entropy else None)
            is_first = rows.start == 0
            write_gradients(dz_CV, rows, hidden_RD, weight_VD, grad_hidden_RD, grad_weight_VD, accumulate=not is_first)
        # Now the statistics of all rows are there: these derivatives are the true ones of each row.
        final = derivatives(loss_of, stats_2R, with_metrics=True)

        ctx.save_for_backward(grad_hidden_RD, grad_weight_VD)
        ctx.dtype = hidden_RD.dtype
        final.metrics[DEVIATION] = Max(deviation_of(used_2R, final.slopes_2R))
        logp_R = stats_2R[0]
        ctx.mark_non_differentiable(logp_R)
        return final.loss, final.metrics, logp_R

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        scale = grad_loss.view(1, 1)  # with a 0-dim tensor torch would compute in the 16 bits of the gradient
        grads = []
        for grad in ctx.saved_tensors:
            if grad is not None:
                grad = torch.mul(grad, scale, out=torch.empty_like(grad, dtype=ctx.dtype))
            grads.append(grad)
        no_grad_of_options = [None] * 4  # target_R, num_grad_rows, loss_of, options
        return *grads, *no_grad_of_options


class Derivatives(NamedTuple):
    loss: Tensor
    metrics: Metrics
    slopes_2R: Tensor  # of the loss, in logp and entropy; 0 where it does not use them
    uses_entropy: bool


def derivatives(loss_of: LossOfLogps, stats_2R: Tensor, *, with_metrics: bool) -> Derivatives:
    """The loss at stats_2R (logp, entropy), and its derivatives there, by autograd."""
    with torch.enable_grad():
        logp_R, entropy_R = (x_R.detach().requires_grad_() for x_R in stats_2R)
        loss, metrics = loss_of(logp_R, entropy_R=entropy_R, with_metrics=with_metrics)
        slope_of_logp_R = slope_of_entropy_R = None
        if loss.requires_grad:
            slope_of_logp_R, slope_of_entropy_R = torch.autograd.grad(loss, (logp_R, entropy_R), allow_unused=True)
    uses_entropy = slope_of_entropy_R is not None
    if slope_of_logp_R is None:
        slope_of_logp_R = torch.zeros_like(logp_R)
    if slope_of_entropy_R is None:
        slope_of_entropy_R = torch.zeros_like(entropy_R)
    slopes_2R = torch.stack([slope_of_logp_R, slope_of_entropy_R])
    return Derivatives(loss.detach(), metrics, slopes_2R, uses_entropy)


def deviation_of(used_2R: Tensor, true_2R: Tensor) -> Tensor:
    """Sum of |used - true| / sum of |true|, the larger of the two rows. Equal infinities and NaNs count as equal: the
    loss is not finite then."""
    is_same_2R = (used_2R == true_2R) | (used_2R.isnan() & true_2R.isnan())
    error_2R = torch.where(is_same_2R, 0.0, (used_2R - true_2R).abs())
    size_2R = torch.where(true_2R.isfinite(), true_2R, 0.0).abs()
    relative_2 = error_2R.sum(1) / size_2R.sum(1).clamp(min=torch.finfo(true_2R.dtype).tiny)
    return relative_2.max()


def one_pass_problem(deviation: float) -> str | None:
    """The error of a step with this `DEVIATION`, if its gradients must not be applied."""
    if deviation <= MAX_DEVIATION:
        return None
    return (
        f"the computed gradient differs from the gradient of loss.py by {deviation:.2g}: loss.py couples the tokens "
        "of a pack, or trains tokens without advantage, in a way that the probes at start missed. Extend "
        "`probe_packs` in head.py, or return the path 'two passes' from `choose_loss_path`"
    )


# -------------------------------------------------------------------------------------------- which path, from probes


def choose_loss_path(
    objective: Callable,
    cfg: LossConfig,
    has_old: bool,
    has_ref: bool,
    filtered: bool = False,
    allow_pack_dependence: bool = False,
) -> LossPath:
    """The path of the objective (`loss.policy_loss`) with the options cfg. has_old, has_ref: whether this run gives
    old_logp_R and ref_logp_R; filtered: whether it filters logits. Deterministic, so all ranks choose the same path.
    ConfigError if the gradient depends on how sequences are packed, unless allow_pack_dependence."""
    packs = list(probe_packs(cfg, has_old, has_ref))
    on_pack = depends_on_pack(objective, packs)
    if on_pack and not allow_pack_dependence:
        raise ConfigError(PACK_DEPENDENCE)
    reads_top_ids = has_ref and cfg.topk_logits_k is not None
    zero_adv_has_grad = reads_top_ids or has_gradient_at_zero_advantage(objective, packs)
    if depends_on_other_tokens(objective, packs):
        coupled = "pack" if on_pack else "sequence"
        return LossPath("two passes", f"the loss couples the tokens of a {coupled}", zero_adv_has_grad)
    if filtered and has_ref:
        why = "the KL is of log-probabilities without top_p and top_k"
        return LossPath("two passes", why, zero_adv_has_grad)
    if reads_top_ids:
        return LossPath("two passes", "the KL reads the reference's likeliest ids", zero_adv_has_grad)
    return LossPath("one pass", zero_adv_has_grad=zero_adv_has_grad)


NUM_PROBE_TOKENS = 24
PROBE_SIZES = (1e-3, 0.03, 0.3, 3.0, 30.0)  # nats: log r; old - sampler, unless old_logprobs=sampler; ref - logp
PUSHES = (-30.0, -0.3, -3e-3, 3e-3, 0.3, 30.0)  # nats, by which a probe moves logp


@dataclass(frozen=True, slots=True)
class ProbePack:
    """A small pack that the loss is probed with: what `policy_loss` gets in a run, in float64."""

    stats_2R: Tensor
    arguments: dict[str, Tensor | int | LossConfig | None]  # the others that a run gives `policy_loss`

    @property
    def adv_R(self) -> Tensor:
        return self.arguments["adv_R"]

    @property
    def seq_R(self) -> Tensor:
        return self.arguments["seq_R"]

    def slopes(self, objective: Callable) -> Tensor:
        """slopes_2R of `derivatives`."""
        return derivatives(partial(objective, **self.arguments), self.stats_2R, with_metrics=False).slopes_2R

    def moved(self, is_moved_R: Tensor, push: float) -> "ProbePack":
        """logp is higher by push at the chosen tokens, entropy by |push|."""
        push_2R = torch.stack([torch.where(is_moved_R, push, 0.0), torch.where(is_moved_R, abs(push), 0.0)])
        return replace(self, stats_2R=self.stats_2R + push_2R)

    def taken(self, row_M: Tensor) -> "ProbePack":
        """The pack of the tokens row_M. Each further 24 of them count as a copy with sequences of its own."""
        arguments = {name: x[row_M] if torch.is_tensor(x) else x for name, x in self.arguments.items()}
        copy_M = torch.arange(len(row_M)) // NUM_PROBE_TOKENS
        arguments["seq_R"] = arguments["seq_R"] + 99 * copy_M
        return ProbePack(self.stats_2R[:, row_M], arguments)


def probe_packs(cfg: LossConfig, has_old: bool, has_ref: bool) -> Iterator[ProbePack]:
    """Packs of 24 tokens, with log-ratios from small to large: four sequences of 4, 8, 4 and 8 tokens, back to
    back, with unlike shares of positive tokens, advantages of both signs and 0, some tokens masked."""
    has_top_ids = has_ref and cfg.topk_logits_k is not None
    generator = torch.Generator().manual_seed(0)
    token_R = torch.arange(NUM_PROBE_TOKENS)
    seq_R = torch.tensor([0] * 4 + [1] * 8 + [2] * 4 + [3] * 8)
    adv_R = torch.tensor([1.3, 0.0, -0.7, -2.1, 0.0], dtype=torch.float64)[token_R % 5] * (1 + token_R / 24)
    for size in PROBE_SIZES:
        stats_2R = torch.rand(2, NUM_PROBE_TOKENS, generator=generator, dtype=torch.float64) + token_R / 24
        stats_2R[0] = -2 * stats_2R[0] - 0.1
        logp_R, _ = stats_2R
        normal = torch.randn(3, NUM_PROBE_TOKENS, generator=generator, dtype=torch.float64)
        log_ratio_R, gap_R, ref_gap_R = size * normal
        old_R = ref_R = ref_RJ = top_RJ = None
        start_R = logp_R  # under the weights before the step; where no old_logp_R is passed, these have not moved
        if has_old:
            old_R = start_R = logp_R - log_ratio_R
        sampler_R = start_R - gap_R
        if cfg.old_logprobs == "sampler":  # log r is of the sampler's
            sampler_R = logp_R - log_ratio_R
        if has_ref:
            ref_R = logp_R + ref_gap_R
        if has_top_ids:
            top_RJ = logp_R[:, None] - torch.arange(1, 4)
            ref_RJ = top_RJ - 1
        arguments = {
            "old_logp_R": old_R,
            "sampler_logp_R": sampler_R,
            "ref_logp_R": ref_R,
            "ref_logp_RJ": ref_RJ,
            "logp_RJ": top_RJ,
            "adv_R": adv_R,
            "mask_R": token_R % 7 != 6,
            "seq_R": seq_R,
            "share_R": torch.tensor([1.0, 0.5, 0.25, 0.75], dtype=torch.float64)[seq_R],
            "positive_R": token_R % 7 < 3,
            "num_valid_tokens": 1,  # 1: only ratios of derivatives matter
            "num_valid_seqs": 1,
            "num_positive_tokens": 1,
            "entropy_coef": None if cfg.entropy_target is None else 0.5,  # in a run it may be 0 at first
            "cfg": cfg,
        }
        yield ProbePack(stats_2R, arguments)


def depends_on_other_tokens(objective: Callable, packs: list[ProbePack]) -> bool:
    """Whether the derivatives at a token depend on other tokens' logp or entropy. Every second token moves, then every
    second sequence, by little and by much: those that stay must keep their derivatives."""
    for pack in packs:
        token_R = torch.arange(NUM_PROBE_TOKENS)
        for odd in (0, 1):
            if _moves_others(objective, pack, token_R % 2 == odd):
                return True
            if _moves_others(objective, pack, pack.seq_R % 2 == odd):
                return True
    return False


def depends_on_pack(objective: Callable, packs: list[ProbePack]) -> bool:
    """Whether the derivatives at a token depend on other sequences, on their number, or on the order of tokens. They
    must stay (1) when every second sequence moves, (2) when a sequence is alone and in reverse order, (3) when the pack
    is repeated fifty times. In (2) and (3) sums of the loss in float32 may round differently."""
    for pack in packs:
        for odd in (0, 1):
            if _moves_others(objective, pack, pack.seq_R % 2 == odd):
                return True
        slopes_2R = pack.slopes(objective)
        rows = [(pack.seq_R == seq).nonzero()[:, 0].flip(0) for seq in pack.seq_R.unique()]
        rows.append(torch.arange(NUM_PROBE_TOKENS).repeat(50))
        for row_M in rows:
            if not _are_equal(pack.taken(row_M).slopes(objective), slopes_2R[:, row_M], 1e-4):
                return True
    return False


def has_gradient_at_zero_advantage(objective: Callable, packs: list[ProbePack]) -> bool:
    """Whether a token of advantage 0 has a derivative: from a KL, an entropy bonus or an NLL."""
    return any(bool((pack.slopes(objective)[:, pack.adv_R == 0] != 0).any()) for pack in packs)


def _moves_others(objective: Callable, pack: ProbePack, is_moved_R: Tensor) -> bool:
    """Whether the derivatives of the tokens that stay change as the others move."""
    staying_2R = pack.slopes(objective)[:, ~is_moved_R]
    for push in PUSHES:
        again_2R = pack.moved(is_moved_R, push).slopes(objective)[:, ~is_moved_R]
        if not _are_equal(again_2R, staying_2R, 1e-9):
            return True
    return False


def _are_equal(a_2R: Tensor, b_2R: Tensor, rtol: float) -> bool:
    return bool(torch.isclose(a_2R, b_2R, rtol=rtol, atol=0, equal_nan=True).all())
