"""loss.py against golden numbers of NeMo RL (its code, executed) and a per-token loop in Python floats."""

import itertools
import math

import pytest
import torch

from config import LossConfig
from loss import group_advantages, policy_loss

PRINTED = 1e-6  # the golden numbers are printed to six decimals, from float32


# ---------------------------------------------------------------- advantages


@pytest.mark.parametrize(
    "reward, leave_one_out, adv",
    [
        ([1, 0, 0, 0], True, [1, -0.577349, -0.577349, -0.577349]),
        ([1, 0, 0, 0], False, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0], True, [1.154698, 1.154698, -1.154698, -1.154698]),
        ([1, 1, 0, 0], False, [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1, 0], True, [1, -1]),
        ([1, 0], False, [0.707106, -0.707106]),
        ([0.3, 1, -0.5, 2], True, [-0.423850, 0.313304, -1.872656, 2.309398]),
        ([0.3, 1, -0.5, 2], False, [-0.376844, 0.282633, -1.130533, 1.224744]),
    ],
)
def test_advantages_golden(reward, leave_one_out, adv):
    reward_B = torch.tensor(reward, dtype=torch.float32)
    group_B = torch.zeros(len(reward), dtype=torch.long)
    got_B = group_advantages(reward_B, group_B, leave_one_out=leave_one_out, normalize=True)
    assert got_B.dtype == torch.float32
    torch.testing.assert_close(got_B, torch.tensor(adv, dtype=torch.float32), rtol=0, atol=PRINTED)


def test_advantages_without_normalization_are_distances_to_the_baseline():
    reward_B, group_B = torch.tensor([0.3, 1, -0.5, 2]), torch.zeros(4, dtype=torch.long)
    got_B = group_advantages(reward_B, group_B, leave_one_out=True, normalize=False)
    torch.testing.assert_close(got_B, torch.tensor([0.3 - 2.5 / 3, 1 - 0.6, -0.5 - 1.1, 2 - 0.8 / 3]))
    got_B = group_advantages(reward_B, group_B, leave_one_out=False, normalize=False)
    torch.testing.assert_close(got_B, torch.tensor([-0.4, 0.3, -1.2, 1.3]))


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_have_no_spread_whatever_the_rounding(leave_one_out):
    # 0.1 and 0.3 are not representable: their mean differs from them in the last bit, and a std from 0.
    for value, size in itertools.product([0.1, 0.3, 0.7, 1 / 3, 1e4 + 0.1], [*range(2, 18), 32, 33, 64, 100]):
        reward_B = torch.full((size,), value, dtype=torch.float64)
        group_B = torch.zeros(size, dtype=torch.long)
        adv_B = group_advantages(reward_B, group_B, leave_one_out=leave_one_out, normalize=True)
        assert adv_B.abs().max() < 1e-10 * value, (value, size, adv_B)
        if leave_one_out:
            reward_B[0] = value + 1  # the others stay equal: unnormalized, so 1 and not a million
            adv_B = group_advantages(reward_B, group_B, leave_one_out=True, normalize=True)
            assert abs(adv_B[0] - 1) < 1e-9, (value, size, adv_B)


@pytest.mark.parametrize("leave_one_out, normalize", [(a, b) for a in (True, False) for b in (True, False)])
def test_groups_are_independent_in_any_order(leave_one_out, normalize):
    rewards = {7: [1, 0, 0, 0], -2: [0.3, 1, -0.5, 2], 40: [5.0], 3: [1, 0]}  # a group of one gets 0
    options = {"leave_one_out": leave_one_out, "normalize": normalize}
    reward_B = torch.tensor([r for group in rewards.values() for r in group], dtype=torch.float64)
    group_B = torch.tensor([name for name, group in rewards.items() for _ in group])
    alone = [torch.tensor(group, dtype=torch.float64) for group in rewards.values()]
    want_B = torch.cat([group_advantages(r, torch.zeros(len(r)), **options) for r in alone])
    assert want_B[8] == 0 and want_B[0] > 0
    for seed in range(3):
        order_B = torch.randperm(len(reward_B), generator=torch.Generator().manual_seed(seed))
        got_B = group_advantages(reward_B[order_B], group_B[order_B], **options)
        torch.testing.assert_close(got_B, want_B[order_B], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- golden losses


def golden_batch(dtype=torch.float32):
    """Two sequences of three tokens, the last one masked: the inputs the golden numbers were made with."""
    return {
        "logp_T": torch.tensor([-1, -0.5, -2, -0.2, -3, -0.7], dtype=dtype, requires_grad=True),
        "old_logp_T": torch.tensor([-1.2, -0.5, -1.5, -0.3, -2, -0.7], dtype=dtype),
        "sampler_logp_T": torch.tensor([-1.1, -0.6, -1.5, -0.3, -2.3, -0.9], dtype=dtype),
        "adv_T": torch.tensor([1, 1, 1, -0.5, -0.5, -0.5], dtype=dtype),
        "mask_T": torch.tensor([1, 1, 1, 1, 1, 0]),
        "seq_T": torch.tensor([0, 0, 0, 1, 1, 1]),
        "num_valid_tokens": 5,
        "num_valid_seqs": 2,
    }


@pytest.mark.parametrize(
    "options, value, grad",
    [
        ({}, -0.370789, [0, -0.2, -0.121306, 0.110517, 0, 0]),
        ({"token_level_loss": False}, -0.229609, [0, -0.166667, -0.101088, 0.138146, 0, 0]),
        ({"ratio_clip_max": 0.28}, -0.375070, [-0.244281, -0.2, -0.121306, 0.110517, 0, 0]),
        ({"ratio_clip_c": 1.05}, -0.376306, [0, -0.2, -0.121306, 0, 0, 0]),
        ({"disable_ppo_ratio": True}, 0.38, [-0.2, -0.2, -0.2, 0.1, 0.1, 0]),
        ({"force_on_policy_ratio": True}, -0.4, [-0.2, -0.2, -0.2, 0.1, 0.1, 0]),
        ({"use_importance_sampling_correction": True}, -0.340996, [0, -0.221034, -0.121306, 0.110517, 0, 0]),
    ],
)
def test_loss_golden(options, value, grad):
    batch = golden_batch()
    loss, metrics = policy_loss(**batch, cfg=LossConfig(**options))
    loss.backward()
    assert abs(loss.item() - value) <= PRINTED and metrics["loss"] == loss
    torch.testing.assert_close(batch["logp_T"].grad, torch.tensor(grad), rtol=0, atol=PRINTED)


def reduced(*parts):
    """Metrics of several micro-batches as one number each, by the rule of loss.py's docstring."""
    out = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if isinstance(values[0], tuple):
            out[name] = float(sum(v[0] for v in values) / sum(v[1] for v in values))
        elif name.endswith(("_min", "_max")):
            out[name] = float((min if name.endswith("_min") else max)(values))
        else:
            out[name] = float(sum(values))
    return out


def test_metrics_golden():
    entropy_T = torch.tensor([1.0, 2, 3, 4, 5, 1000])
    _, metrics = policy_loss(**golden_batch(), cfg=LossConfig(), entropy_T=entropy_T)
    want = {
        "loss": -0.370789,
        "probs_ratio": 0.860197,
        "probs_ratio_min": 0.367879,
        "probs_ratio_max": 1.221403,
        "probs_ratio_clamped": 0.981034,
        "probs_ratio_clamped_min": 0.8,
        "probs_ratio_clamped_max": 1.2,
        "token_mult_prob_error": 1.112040,
        "gen_kl_error": 0.011973,
        "policy_kl_error": 0.010165,
        "js_divergence_error": 0.002741,
        "sampling_importance_ratio": 1.071973,
        "approx_entropy": 0.916322,
        "num_valid_samples": 2,
        # Not NeMo RL's, so by hand. Clipped where it matters: token 0 above, token 4 below (token 2: A > 0).
        "ratio_clip_low_fraction": 1 / 5,
        "ratio_clip_high_fraction": 1 / 5,
        "logp_gap_mean": (0.1 + 0.1 + 0 + 0 + 0.3) / 5,
        "logp_gap_max": 0.3,
        "entropy": 3,
        "num_nonfinite_sampler_logp": 0,
    }
    got = reduced(metrics)
    assert got.keys() == want.keys()
    assert {name: got[name] for name in want if abs(got[name] - want[name]) > PRINTED} == {}


# ---------------------------------------------------------------- against a loop over tokens


def hard_batch(dtype):
    """Every side of both clips for both signs of A; seven sequences interleaved, one of them masked whole.

    The ratios lie in every interval that 0.2, 0.28 and the dual clips cut, and at least 0.01 from its ends.
    """
    generator = torch.Generator().manual_seed(1)
    ratios = [0.3, 0.7, 0.9, 1.0, 1.04, 1.15, 1.24, 1.5, 2.9, 3.3]
    cases = list(itertools.product(ratios, [1.3, -0.7, 0.0, -2.1]))
    logp_T = -3 * torch.rand(len(cases), generator=generator) - 0.1
    old_logp_T = logp_T - torch.tensor([r for r, _ in cases]).log()
    mask_T = torch.rand(len(cases), generator=generator) < 0.8
    seq_T = torch.randint(7, (len(cases),), generator=generator) * 1000 - 500
    mask_T[seq_T == 500] = False
    batch = {
        "logp_T": logp_T,
        "old_logp_T": old_logp_T,
        "sampler_logp_T": old_logp_T + 0.3 * torch.randn(len(cases), generator=generator),
        "adv_T": torch.tensor([a for _, a in cases]),
    }
    batch = {name: x_T.to(dtype) for name, x_T in batch.items()}
    num_seqs = len(set(seq_T[mask_T].tolist()))
    assert num_seqs == 6 and 25 < mask_T.sum() < 35
    batch["logp_T"].requires_grad_()
    counts = {
        "num_valid_tokens": int(mask_T.sum()) + 11,
        "num_valid_seqs": num_seqs + 2,
    }  # other ranks have some
    return batch | {"mask_T": mask_T, "seq_T": seq_T} | counts


def loop_loss(batch, cfg):
    """(loss, gradient) by the formulas, one token after the other, derivatives by hand."""
    names = ("logp_T", "old_logp_T", "sampler_logp_T", "adv_T", "mask_T", "seq_T")
    tokens = list(zip(*(batch[name].tolist() for name in names), strict=True))
    length = {seq: sum(t[4] for t in tokens if t[5] == seq) for seq in {t[5] for t in tokens}}
    total, grad = 0.0, []
    for logp, old, sampler, adv, mask, seq in tokens:
        old = logp if cfg.force_on_policy_ratio else old
        ratio = math.exp(logp - old)
        value = slope = -adv * ratio
        if cfg.disable_ppo_ratio:
            value, slope = -adv * logp, -adv
        elif not cfg.force_on_policy_ratio:
            if adv > 0 and ratio > 1 + cfg.ratio_clip_max:
                value, slope = -adv * (1 + cfg.ratio_clip_max), 0.0
            if adv < 0 and ratio < 1 - cfg.ratio_clip_min:
                value, slope = -adv * (1 - cfg.ratio_clip_min), 0.0
            if cfg.ratio_clip_c is not None and adv < 0 and ratio > cfg.ratio_clip_c:
                value, slope = -adv * cfg.ratio_clip_c, 0.0
        weight = math.exp(old - sampler) if cfg.use_importance_sampling_correction else 1.0
        weight /= (
            batch["num_valid_tokens"]
            if cfg.token_level_loss
            else batch["num_valid_seqs"] * max(length[seq], 1)
        )
        total += weight * value * mask
        grad.append(weight * slope * mask)
    return total, torch.tensor(grad, dtype=torch.float64)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 1e-6)])
def test_every_combination_equals_the_loop(dtype, tolerance):
    # The 1e-8 in the denominators is NeMo RL's and not the loop's: it is seen in float64.
    for clip_max, dual, weighted, token_level, mode in itertools.product(
        [0.2, 0.28],
        [None, 1.05, 3.0],
        [False, True],
        [True, False],
        [{}, "disable_ppo_ratio", "force_on_policy_ratio"],
    ):
        cfg = LossConfig(
            ratio_clip_max=clip_max,
            ratio_clip_c=dual,
            use_importance_sampling_correction=weighted,
            token_level_loss=token_level,
            **({mode: True} if mode else {}),
        )
        batch = hard_batch(dtype)
        loss, _ = policy_loss(**batch, cfg=cfg)
        loss.backward()
        want, want_T = loop_loss(batch, cfg)
        assert abs(loss.item() - want) <= tolerance * abs(want), cfg
        error_T = (batch["logp_T"].grad.double() - want_T).abs()
        assert (error_T <= tolerance * want_T.abs()).all(), (cfg, error_T, want_T)


def test_clip_fractions_count_where_clipping_stops_the_gradient():
    batch = hard_batch(torch.float32)
    tokens = list(
        zip(batch["logp_T"].tolist(), batch["old_logp_T"].tolist(), batch["adv_T"].tolist(), strict=True)
    )
    sides = [(math.exp(a - b) < 0.8 and adv < 0, math.exp(a - b) > 1.28 and adv > 0) for a, b, adv in tokens]
    low, high = (
        sum(s for s, m in zip(side, batch["mask_T"], strict=True) if m) for side in zip(*sides, strict=True)
    )
    for options, want in [
        ({}, (low, high)),
        ({"disable_ppo_ratio": True}, (0, 0)),
        ({"force_on_policy_ratio": True}, (0, 0)),
    ]:
        _, metrics = policy_loss(**batch, cfg=LossConfig(ratio_clip_max=0.28, **options))
        got = metrics["ratio_clip_low_fraction"][0], metrics["ratio_clip_high_fraction"][0]
        assert got == want and min(low, high) > 0 and low != high, (got, want)


@pytest.mark.parametrize("token_level", [True, False])
def test_sequence_order_and_micro_batches_do_not_matter(token_level):
    cfg = LossConfig(token_level_loss=token_level, use_importance_sampling_correction=True)
    whole = hard_batch(torch.float32)
    entropy_T = torch.rand(len(whole["seq_T"]), generator=torch.Generator().manual_seed(2))
    loss, metrics = policy_loss(**whole, cfg=cfg, entropy_T=entropy_T)
    loss.backward()
    whole_grad_T, whole_metrics = whole["logp_T"].grad, reduced(metrics)

    def check(parts):
        batch = hard_batch(torch.float32)
        losses, metrics = [], []
        for part in parts:
            piece = {name: x[part] if name.endswith("_T") else x for name, x in batch.items()}
            loss_part, metrics_part = policy_loss(**piece, cfg=cfg, entropy_T=entropy_T[part])
            losses.append(loss_part)
            metrics.append(metrics_part)
        sum(losses).backward()
        torch.testing.assert_close(sum(losses), loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(batch["logp_T"].grad, whole_grad_T, rtol=1e-6, atol=0)
        assert reduced(*metrics) == pytest.approx(whole_metrics, rel=1e-6)

    by_seq = [torch.nonzero(whole["seq_T"] == seq)[:, 0] for seq in whole["seq_T"].unique()]
    assert len(by_seq) == 7
    check([torch.cat(by_seq)])  # packed one after the other
    check([torch.cat(by_seq[::-1])])
    check(by_seq)  # each alone, the masked one and an empty micro-batch among them
    check([torch.cat(by_seq[:2]), torch.zeros(0, dtype=torch.long), torch.cat(by_seq[2:])])


# ---------------------------------------------------------------- masks and dropped tokens


@pytest.mark.parametrize("gap", [200.0, -200.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["logp_T", "old_logp_T", "sampler_logp_T", "adv_T", "entropy_T"])
def test_what_is_masked_may_hold_anything(name, gap):
    cfg = LossConfig(use_importance_sampling_correction=True)

    def run(change):
        batch = golden_batch() | {"entropy_T": torch.ones(6)}
        x_T = batch[name].detach().clone()
        x_T[5] += change
        batch[name] = x_T.requires_grad_(name == "logp_T")
        loss, metrics = policy_loss(**batch, cfg=cfg)
        loss.backward()
        return loss, batch["logp_T"].grad, metrics

    assert repr(run(gap)) == repr(run(0.0))  # every number of it
    assert run(gap)[1].isfinite().all()


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_without_finite_sampler_logp_are_dropped_and_counted(bad, token_level):
    cfg = LossConfig(token_level_loss=token_level)
    batch = golden_batch()
    batch["sampler_logp_T"][1] = bad
    loss, metrics = policy_loss(**batch, cfg=cfg)
    loss.backward()
    # Token 1 has A = 1 and r = 1: the loss of the whole batch without its -1, over the same denominators.
    whole = -0.370789 + 1 / 5 if token_level else -0.229609 + 1 / 6
    assert abs(loss.item() - whole) <= PRINTED
    assert batch["logp_T"].grad[1] == 0 and batch["logp_T"].grad[2] != 0
    got = reduced(metrics)
    assert got["num_nonfinite_sampler_logp"] == 1 and got["num_valid_samples"] == 2
    assert got["probs_ratio"] == pytest.approx((0.860197 * 5 - 1) / 5, abs=PRINTED)
    assert all(math.isfinite(x) for x in got.values())


def test_no_valid_token_or_no_token_gives_zero():
    for size in (6, 0):
        batch = golden_batch() | {"num_valid_tokens": 0, "num_valid_seqs": 0}
        batch = {name: x[:size] if name.endswith("_T") else x for name, x in batch.items()}
        batch["logp_T"] = batch["logp_T"].detach().requires_grad_()
        batch["mask_T"] = torch.zeros(size)
        for token_level in (True, False):
            loss, metrics = policy_loss(**batch, cfg=LossConfig(token_level_loss=token_level))
            loss.backward()
            assert loss == 0 and (batch["logp_T"].grad == 0).all()
            assert metrics["num_valid_samples"] == 0 and metrics["probs_ratio"] == (0, 0)
            assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == (math.inf, -math.inf)


def test_nothing_is_read_back_from_the_device():
    # A meta tensor has no values: whatever would wait for one on a GPU (item, unique, x[mask]) raises.
    batch = golden_batch()
    batch = {name: x.to("meta") if name.endswith("_T") else x for name, x in batch.items()}
    for token_level in (True, False):
        cfg = LossConfig(
            token_level_loss=token_level, ratio_clip_c=3.0, use_importance_sampling_correction=True
        )
        policy_loss(**batch, cfg=cfg, entropy_T=torch.ones(6, device="meta"))


def test_terms_it_does_not_have_are_refused():
    for name, value in [
        ("ref_logp_T", torch.zeros(6)),
        ("positive_T", torch.ones(6)),
        ("num_positive_tokens", 3),
    ]:
        with pytest.raises(NotImplementedError, match="ref_logp_T"):
            policy_loss(**golden_batch(), cfg=LossConfig(), **{name: value})
