"""How this run computes the gradient of its loss: chosen at start, from probes of the loss.

    two passes   `linear_logp`, the loss outside, autograd: where the derivative at a token depends on other tokens
    one pass     `linear_loss`: where each token's derivative depends on that token alone

No option is listed here: whoever edits loss.py gets the path that the edited loss needs.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from config import ConfigError, LossConfig
from kernels.backend import LossPath
from kernels.linear_loss import derivatives

PACK_DEPENDENCE = (
    "loss.py: the gradient at a token depends on the other sequences of its pack, or on the order of tokens; packs "
    "change with policy.sequence_packing and with the number of ranks. Divide by num_valid_tokens, num_valid_seqs or "
    "num_positive_tokens, which count the whole optimizer step, and not by a mean, sum or length of the pack; or set "
    "grpo.allow_pack_dependence=true to train it anyway"
)


def choose_loss_path(
    policy_loss: Callable,
    cfg: LossConfig,
    has_old: bool,
    has_ref: bool,
    filtered: bool = False,
    allow_pack_dependence: bool = False,
) -> LossPath:
    """The path of policy_loss (`loss.policy_loss`) with the options cfg. has_old, has_ref: whether this run gives
    old_logp_R and ref_logp_R; filtered: whether it filters logits. Deterministic, so all ranks choose the same path.
    ConfigError if the gradient depends on how sequences are packed, unless allow_pack_dependence."""
    coupled, depends_on_pack, has_grad = _probe(policy_loss, cfg, has_old, has_ref)
    if depends_on_pack and not allow_pack_dependence:
        raise ConfigError(PACK_DEPENDENCE)
    why = ""
    if coupled:
        why = f"the loss couples the tokens of a {'pack' if depends_on_pack else 'sequence'}"
    elif filtered and has_ref:
        why = "the KL is of log-probabilities without top_p and top_k"
    return LossPath("two passes" if why else "one pass", why, has_grad)


def _probe(policy_loss: Callable, cfg: LossConfig, has_old: bool, has_ref: bool) -> tuple[bool, bool, bool]:
    """(whether the derivatives at a token depend on other tokens; whether on other sequences or the order of tokens;
    zero_adv_has_grad).

    A pack of 24 tokens: four sequences of unlike length and share of positive tokens, log-ratios small and large.
    Every second token, then sequence, moves by little and by much; derivatives at the others are compared. Then each
    sequence alone, reversed, and the pack fifty times over: they must stay, up to float32 rounding."""

    def differ(pack_loss: Callable, stats_KR: Tensor, slopes_KR: Tensor, rtol: float, rows=slice(None)) -> bool:
        _, _, again_KR, _ = derivatives(pack_loss, stats_KR)
        same_KR = torch.isclose(again_KR, slopes_KR, rtol=rtol, atol=0, equal_nan=True)
        return not bool(same_KR[:, rows].all())

    coupled = depends_on_pack = has_grad = False
    token_R, generator = torch.arange(24), torch.Generator().manual_seed(0)
    seq_R = token_R // 12 * 2 + (token_R % 12 > 3)
    adv_R = torch.tensor([1.3, 0.0, -0.7, -2.1, 0.0], dtype=torch.float64)[token_R % 5] * (1 + token_R / 24)
    for size in (1e-3, 0.03, 0.3, 3.0, 30.0):  # nats: log r; old - sampler, unless old_logprobs=sampler; ref - logp
        stats_KR = torch.rand(2, 24, generator=generator, dtype=torch.float64) + token_R / 24
        stats_KR[0] = -2 * stats_KR[0] - 0.1
        logp_R, _ = stats_KR
        log_ratio_R, gap_R, ref_gap_R = size * torch.randn(3, 24, generator=generator, dtype=torch.float64)
        old_R = logp_R - log_ratio_R if has_old else logp_R
        pack = {
            "old_logp_R": old_R if has_old else None,
            "sampler_logp_R": logp_R - log_ratio_R if cfg.old_logprobs == "sampler" else old_R - gap_R,
            "ref_logp_R": logp_R + ref_gap_R if has_ref else None,
            "adv_R": adv_R,
            "mask_R": token_R % 7 != 6,
            "seq_R": seq_R,
            "positive_R": token_R % 7 < 3,
            "num_valid_tokens": 1,  # 1: only ratios of derivatives matter
            "num_valid_seqs": 1,
            "num_positive_tokens": 1,
            "cfg": cfg,
        }
        pack_loss = partial(policy_loss, **pack)
        _, _, slopes_KR, _ = derivatives(pack_loss, stats_KR)
        has_grad |= bool((slopes_KR[:, adv_R == 0] != 0).any())
        for is_moved_R in (token_R % 2 == 0, token_R % 2 == 1, seq_R % 2 == 0, seq_R % 2 == 1):
            for push in (-30.0, -0.3, -3e-3, 3e-3, 0.3, 30.0):
                moved_KR = stats_KR + torch.tensor([[push], [abs(push)]]) * is_moved_R
                differs = differ(pack_loss, moved_KR, slopes_KR, 1e-9, ~is_moved_R)
                coupled |= differs
                depends_on_pack |= differs and bool(is_moved_R[0] == is_moved_R[1])  # whole sequences move
        for row_R in (*((seq_R == seq).nonzero()[:, 0].flip(0) for seq in seq_R.unique()), token_R.repeat(50)):
            other = {name: x[row_R] if torch.is_tensor(x) else x for name, x in pack.items()}
            other["seq_R"] = other["seq_R"] + 99 * (torch.arange(len(row_R)) // 24)
            depends_on_pack |= differ(partial(policy_loss, **other), stats_KR[:, row_R], slopes_KR[:, row_R], 1e-4)
    return coupled, depends_on_pack, has_grad
