"""loss.py against golden numbers of NeMo RL (its code, executed); splits, masks. Combinations: test_loss_exact.py."""

import math

import pytest
import torch
from loss_cases import GOLDEN_REF, golden_batch, hard_batch, reduced

from config import LossConfig
from loss import policy_loss
from metrics import derived_metrics

PRINTED = 1e-6  # the golden numbers are printed to six decimals, from float32


# ---------------------------------------------------------------- golden losses


IS = {"use_importance_sampling_correction": True}
TIS = IS | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.2}


def bounded(kind: str, low: float, high: float) -> dict:
    bounds = {"truncated_importance_sampling_ratio_min": low, "truncated_importance_sampling_ratio": high}
    return IS | {"truncated_importance_sampling_type": kind} | bounds


ICEPOP, SEQ_MASK = bounded("icepop", 0.95, 1.2), bounded("seq-mask-tis", 0.9, 1.1)
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}


@pytest.mark.parametrize(
    "options, value, grad",
    [
        ({}, -0.370789, [0, -0.2, -0.121306, 0.110517, 0, 0]),
        ({"token_level_loss": False}, -0.229609, [0, -0.166667, -0.101088, 0.138146, 0, 0]),
        ({"ratio_clip_max": 0.28}, -0.375070, [-0.244281, -0.2, -0.121306, 0.110517, 0, 0]),
        ({"ratio_clip_c": 1.05}, -0.376306, [0, -0.2, -0.121306, 0, 0, 0]),
        (GSPO, -0.252419, [-0.150806, -0.150806, -0.150806, 0, 0, 0]),
        ({"use_cispo": True}, 0.397897, [-0.24, -0.2, -0.16, 0.110517, 0.08, 0]),
        ({"disable_ppo_ratio": True}, 0.38, [-0.2, -0.2, -0.2, 0.1, 0.1, 0]),
        ({"force_on_policy_ratio": True}, -0.4, [-0.2, -0.2, -0.2, 0.1, 0.1, 0]),
        (IS, -0.340996, [0, -0.221034, -0.121306, 0.110517, 0, 0]),
        (TIS, -0.352984, [0, -0.221034, -0.121306, 0.110517, 0, 0]),
        (ICEPOP, -0.231823, [0, -0.221034, -0.121306, 0.110517, 0, 0]),
        (SEQ_MASK, -0.559501, [0, -0.221034, -0.121306, 0, 0, 0]),
        ({"reference_policy_kl_penalty": 0.01}, -0.370299, [0.0002, -0.1992, -0.121706, 0.110517, -0.001, 0]),
        ({"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"}, -0.374789, None),
        (
            {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
            -0.366189,
            [0.0021, -0.1904, -0.124906, 0.110517, -0.0075, 0],
        ),
        ({"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True}, -0.367391, None),
    ],
)
def test_loss_golden(options, value, grad):
    batch = golden_batch()
    if "reference_policy_kl_penalty" in options:
        batch["ref_logp_R"] = torch.tensor(GOLDEN_REF)
    loss, metrics = policy_loss(**batch, cfg=LossConfig(**options))
    loss.backward()
    assert abs(loss.item() - value) <= PRINTED and metrics["loss"] == loss
    if grad is not None:
        torch.testing.assert_close(batch["logp_R"].grad, torch.tensor(grad), rtol=0, atol=PRINTED)


def test_metrics_golden():
    entropy_R = torch.tensor([1.0, 2, 3, 4, 5, 1000])
    _, metrics = policy_loss(**golden_batch(), cfg=LossConfig(), entropy_R=entropy_R)
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
        "entropy": 3,
        "num_nonfinite_sampler_logp": 0,
        "kept_fraction/finite_sampler_logp": 1,
        "kept_fraction/sampling_filter": 1,
        "kl_penalty": 0,
        "positive_nll_loss": 0,
        "importance_weight_mean": 1.071973,
        "importance_weight_square": (math.exp(-0.2) + math.exp(0.2) + 1 + 1 + math.exp(0.6)) / 5,
    }
    got = reduced(metrics)
    assert {name: got[name] for name in want if abs(got[name] - want[name]) > PRINTED} == {}


@pytest.mark.parametrize(
    "options, want",
    [
        (TIS, {"is_oob_ratio": 0.2, "sampling_importance_ratio": 1.042002}),
        (
            ICEPOP,
            {"is_oob_ratio": 0.4, "sampling_importance_ratio": 0.621034, "kept_fraction/importance_sampling": 0.6},
        ),
        (
            SEQ_MASK,
            {"is_oob_ratio": 0.5, "sampling_importance_ratio": 0.602002, "kept_fraction/importance_sampling": 0.6},
        ),
        # NeMo RL's sum over the two sequences, and what it means to be.
        (GSPO, {"sampling_importance_ratio": 2.349859, "importance_weight_mean": 2.349859 / 2}),
        (GSPO | TIS, {"is_oob_ratio": 0.4, "sampling_importance_ratio": 2.2}),
        # Not NeMo RL's, so by hand: of tokens, and the geometric means 1 and exp(.15) of sequences.
        (GSPO | {"importance_sampling_correction_level": "token"}, {"sampling_importance_ratio": 1.071973}),
        (GSPO | {"importance_sampling_correction_level": "sequence_mean"}, {"sampling_importance_ratio": 1.080917}),
        # Not NeMo RL's, so by hand: sequence weights 1 and exp(.3), over sequences.
        (IS | {"truncated_importance_sampling_type": "sequence"}, {"sampling_importance_ratio": 2.349859 / 2}),
        (bounded("sequence-truncate", 0, 1.2), {"is_oob_ratio": 0.5, "sampling_importance_ratio": 1.1}),
        (
            bounded("sequence-mask", 0, 1.2),
            {"is_oob_ratio": 0.5, "sampling_importance_ratio": 0.5, "kept_fraction/importance_sampling": 0.6},
        ),
        # By hand: the last of five tokens has a ratio of exp(.3) to the sampler, its sequence of two exp(.15).
        ({"token_rejection_ratio_max": 1.2}, {"kept_fraction/rejection": 0.8, "num_valid_samples": 2}),
        ({"sequence_rejection_ratio_max": 1.1}, {"kept_fraction/rejection": 0.6, "num_valid_samples": 1}),
    ],
)
def test_weight_metrics_golden(options, want):
    _, metrics = policy_loss(**golden_batch(), cfg=LossConfig(**options))
    got = reduced(metrics)
    assert {name: got[name] for name in want if abs(got[name] - want[name]) > PRINTED} == {}
    masks = {"icepop", "seq-mask-tis", "sequence-mask"}
    assert ("kept_fraction/importance_sampling" in got) == (options.get("truncated_importance_sampling_type") in masks)


def test_what_a_sampler_weight_with_gspo_is_of():
    """NVIDIA-NeMo/RL#2269: by bfloat16's rounding alone, the product over 8,000 tokens has a mean far from 1."""
    random = torch.Generator().manual_seed(0)
    logp_R = -torch.rand(16 * 8000, generator=random)
    seq_R = torch.arange(16 * 8000) // 8000
    noise_R = 0.02 * torch.randn(16 * 8000, generator=random)
    pack = {"old_logp_R": logp_R, "sampler_logp_R": logp_R + noise_R, "adv_R": noise_R, "mask_R": noise_R < 9}
    pack |= {"seq_R": seq_R, "num_valid_tokens": 1, "num_valid_seqs": 16}
    means = {}
    for level in ("token", "sequence_mean", "sequence_sum"):
        cfg = LossConfig(**GSPO | {"importance_sampling_correction_level": level})
        means[level] = reduced(policy_loss(logp_R, **pack, cfg=cfg)[1])["importance_weight_mean"]
    assert abs(means["token"] - 1) < 0.02 and abs(means["sequence_mean"] - 1) < 0.02, means
    assert abs(means["sequence_sum"] - 1) > 0.2, means


def test_the_ratio_to_the_sampler_clips():
    """SkyRL#1315: with one optimizer step `old` is the current policy, and the clip never acts."""
    batch = golden_batch() | {"old_logp_R": None}
    for old_logprobs, clipped in ("trainer", 0), ("sampler", 0.2):  # exp(-.7), of negative advantage
        _, metrics = policy_loss(**batch, cfg=LossConfig(old_logprobs=old_logprobs))
        got = reduced(metrics)
        assert got["ratio_clip_low_fraction"] + got["ratio_clip_high_fraction"] == pytest.approx(clipped)
        assert (got["probs_ratio_min"] == 1) == (old_logprobs == "trainer")


def test_kl_penalty_metric_is_the_term_over_its_weight():
    batch = golden_batch() | {"ref_logp_R": torch.tensor(GOLDEN_REF)}
    _, metrics = policy_loss(**batch, cfg=LossConfig(reference_policy_kl_penalty=0.01))
    assert abs(metrics["kl_penalty"] - (-0.370299 + 0.370789) / 0.01) < 1e-4  # from digits 6 printed
    assert policy_loss(**batch, cfg=LossConfig(reference_policy_kl_penalty=0))[1]["kl_penalty"] == 0
    # The sampler's KLs are of the same type, as in NeMo RL: k1 of old - sampler, by hand.
    got = reduced(policy_loss(**batch, cfg=LossConfig(reference_policy_kl_type="k1"))[1])
    assert (
        got["gen_kl_error"] == pytest.approx(-0.3 / 5, abs=PRINTED) and got["policy_kl_error"] == -got["gen_kl_error"]
    )


def test_a_kl_weight_beyond_float_is_no_kl_and_no_nan():
    cfg = LossConfig(reference_policy_kl_penalty=0.1, use_on_policy_kl_approximation=True)
    batch = golden_batch() | {"ref_logp_R": torch.tensor(GOLDEN_REF)}
    batch["sampler_logp_R"][0] = -200.0  # trained, and exp(199) is infinite in float32
    loss, _ = policy_loss(**batch, cfg=cfg)
    loss.backward()
    # The golden value without token 0's share: u = exp(.1), and k3 of x = -.1.
    share = 0.1 * math.exp(0.1) * (math.exp(-0.1) - 1 + 0.1) / 5
    assert abs(loss - (-0.367391 - share)) < PRINTED and batch["logp_R"].grad[0] == 0


def test_positive_nll_is_over_the_positive_tokens_of_the_whole_step():
    batch = golden_batch() | {"positive_R": torch.tensor([1, 1, 1, 0, 0, 0]), "num_positive_tokens": 7}
    loss, metrics = policy_loss(**batch, cfg=LossConfig(positive_example_nll_weight=0.5))
    loss.backward()
    assert abs(metrics["positive_nll_loss"] - (1 + 0.5 + 2) / 7) < PRINTED
    assert abs(loss - (-0.370789 + 0.5 * 3.5 / 7)) < PRINTED
    want_R = torch.tensor([0, -0.2, -0.121306, 0.110517, 0, 0]) - 0.5 / 7 * batch["positive_R"]
    torch.testing.assert_close(batch["logp_R"].grad, want_R, rtol=0, atol=PRINTED)


# ---------------------------------------------------------------- clip fractions, splits


def test_clip_fractions_count_where_clipping_stops_the_gradient():
    batch = hard_batch(torch.float32)
    rows = [x.tolist() for x in (batch["logp_R"], batch["old_logp_R"], batch["adv_R"], batch["mask_R"])]
    tokens = [(math.exp(a - b), adv) for a, b, adv, mask in zip(*rows, strict=True) if mask]
    ppo = sum(r < 0.8 and adv < 0 for r, adv in tokens), sum(r > 1.28 and adv > 0 for r, adv in tokens)
    either_sign = sum(r < 0.8 for r, _ in tokens), sum(r > 1.28 for r, _ in tokens)
    assert len({*ppo, *either_sign, 0}) == 5
    for mode, want in {
        None: ppo,
        "use_cispo": either_sign,  # its bound is the weight's, whatever the sign
        "disable_ppo_ratio": (0, 0),
        "force_on_policy_ratio": (0, 0),
    }.items():
        _, metrics = policy_loss(**batch, cfg=LossConfig(ratio_clip_max=0.28, **({mode: True} if mode else {})))
        got = metrics["ratio_clip_low_fraction"][0], metrics["ratio_clip_high_fraction"][0]
        assert got == want, (mode, got, want)


@pytest.mark.parametrize(
    "options",
    [
        TIS,
        IS | {"token_level_loss": False},
        GSPO | IS,
        bounded("sequence-mask", 0.5, 2.0) | {"token_level_loss": False, "loss_scale_factor": 9.0},
        {"use_cispo": True} | SEQ_MASK,
    ],
)
def test_sequence_order_micro_batches_and_ranks_do_not_matter(options):
    cfg = LossConfig(reference_policy_kl_penalty=0.1, entropy_coef=0.2, positive_example_nll_weight=0.3, **options)
    whole = hard_batch(torch.float32)
    loss, metrics = policy_loss(**whole, cfg=cfg)
    loss.backward()
    whole_metrics = derived_metrics(reduced(metrics))

    def check(parts):
        batch = hard_batch(torch.float32)
        losses, metrics = [], []
        for part in parts:
            piece = {name: x[part] if name.endswith("_R") else x for name, x in batch.items()}
            loss_part, metrics_part = policy_loss(**piece, cfg=cfg)
            losses.append(loss_part)
            metrics.append(metrics_part)
        sum(losses).backward()
        torch.testing.assert_close(sum(losses), loss, rtol=1e-6, atol=0)
        for name in ("logp_R", "entropy_R"):
            torch.testing.assert_close(batch[name].grad, whole[name].grad, rtol=1e-6, atol=1e-9)
        assert derived_metrics(reduced(*metrics)) == pytest.approx(whole_metrics, rel=1e-6)

    by_seq = [torch.nonzero(whole["seq_R"] == seq)[:, 0] for seq in whole["seq_R"].unique()]
    assert len(by_seq) == 7
    check([torch.cat(by_seq)])  # packed one after the other
    check([torch.cat(by_seq[::-1])])
    check(by_seq)  # each alone, the masked one and an empty micro-batch among them
    check([torch.cat(by_seq[:2]), torch.zeros(0, dtype=torch.long), torch.cat(by_seq[2:])])


# ---------------------------------------------------------------- masks and dropped tokens


@pytest.mark.slow
@pytest.mark.parametrize("gap", [200.0, -200.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "options", [IS, GSPO | IS, bounded("sequence-truncate", 0.0, 2.0), {"use_cispo": True} | SEQ_MASK]
)
@pytest.mark.parametrize("name", ["logp_R", "old_logp_R", "sampler_logp_R", "ref_logp_R", "adv_R", "entropy_R"])
def test_what_is_masked_may_hold_anything(name, gap, options):
    kl = {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True}
    cfg = LossConfig(entropy_coef=0.1, positive_example_nll_weight=0.1, **kl, **options)

    def run(change):
        batch = golden_batch() | {"entropy_R": torch.ones(6), "ref_logp_R": torch.tensor(GOLDEN_REF)}
        batch |= {"positive_R": torch.ones(6), "num_positive_tokens": 5}
        x_R = batch[name].detach().clone()
        x_R[5] += change
        batch[name] = x_R.requires_grad_(name == "logp_R")
        loss, metrics = policy_loss(**batch, cfg=cfg)
        loss.backward()
        return loss, batch["logp_R"].grad, metrics

    assert repr(run(gap)) == repr(run(0.0))  # every number of it
    assert run(gap)[1].isfinite().all()


@pytest.mark.parametrize(("gap", "log_ratio", "moves"), [(19, 19, True), (21, 20, False), (500, 20, False)])
def test_log_ratios_are_at_most_20(gap, log_ratio, moves):
    """A token of advantage -2 that the policy has come to like e^gap times more: its loss is 2 r, of 5 tokens."""
    batch = golden_batch()
    batch["adv_R"][2], batch["old_logp_R"][2] = -2.0, batch["logp_R"].detach()[2] - gap
    without = golden_batch()
    without["adv_R"][2] = 0.0
    loss, metrics = policy_loss(**batch, cfg=LossConfig(ratio_clip_c=None))
    rest, _ = policy_loss(**without, cfg=LossConfig(ratio_clip_c=None))
    loss.backward()
    assert (loss - rest).item() == pytest.approx(2 * math.exp(log_ratio) / 5, rel=1e-5)
    assert batch["logp_R"].grad[2].item() == pytest.approx(moves * 2 * math.exp(log_ratio) / 5, rel=1e-5)
    assert reduced(metrics)["probs_ratio"] > math.exp(log_ratio) / 6


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_without_finite_sampler_logp_are_dropped_and_counted(bad, token_level):
    cfg = LossConfig(token_level_loss=token_level)
    batch = golden_batch() | {"num_valid_tokens": 4}
    batch["sampler_logp_R"][1] = bad
    loss, metrics = policy_loss(**batch, cfg=cfg)
    loss.backward()
    # Token 1 has A = 1 and r = 1: the sums of the two golden losses without its -1, over 4 tokens, 2 of its sequence.
    both = -0.370789 * 5
    first = 6 * (both / 2 + 0.229609 * 2)  # of both = first + second and 2 * -.229609 = first / 3 + second / 2
    want = (both + 1) / 4 if token_level else ((first + 1) / 2 + (both - first) / 2) / 2
    assert loss.item() == pytest.approx(want, abs=10 * PRINTED)  # made of rounded sums
    assert batch["logp_R"].grad[1] == 0 and batch["logp_R"].grad[2] != 0
    got = reduced(metrics)
    assert got["num_nonfinite_sampler_logp"] == 1 and got["num_valid_samples"] == 2
    assert got["kept_fraction/finite_sampler_logp"] == pytest.approx(4 / 5)
    assert got["probs_ratio"] == pytest.approx((0.860197 * 5 - 1) / 4, abs=2 * PRINTED)
    assert all(math.isfinite(x) for x in got.values())


CUT = 1  # a token whose advantage is 1


@pytest.mark.parametrize("side", ["logp_R", "old_logp_R", "both"])
@pytest.mark.parametrize("options", [{}, {"token_level_loss": False}, GSPO, IS, TIS | {"token_level_loss": False}])
def test_a_token_that_the_filter_cuts(side, options):
    """NeMo RL (mask_out_neg_inf_logprobs) writes 0 for its log-probabilities: no gradient, a ratio of 1, which is a
    constant in the loss (with GSPO, the sequence's ratio), and denominators and lengths that count it."""
    cfg = LossConfig(**options)
    batch, theirs = golden_batch(torch.float64), golden_batch(torch.float64)
    with torch.no_grad():
        for name in ("logp_R", "old_logp_R") if side == "both" else (side,):
            batch[name][CUT] = -math.inf
        theirs["logp_R"][CUT] = theirs["old_logp_R"][CUT] = 0
        theirs["sampler_logp_R"][CUT] = 0  # so that the sum over the sequence, of some weights, is of the others
    loss, metrics = policy_loss(**batch, cfg=cfg)
    loss.backward()
    their_loss, _ = policy_loss(**theirs, cfg=cfg)
    their_loss.backward()
    want = theirs["logp_R"].grad.index_fill(0, torch.tensor([CUT]), 0)
    torch.testing.assert_close(batch["logp_R"].grad, want, rtol=1e-12, atol=1e-15)
    assert loss.item() == pytest.approx(their_loss.item())
    if options == {}:  # by hand: ratios clipped at 1.2 above, 1, min(e^-.5, .8); -.5 max(e^.1, .8), and clipped at .8
        assert loss.item() == pytest.approx((-1.2 - 1 - math.exp(-0.5) + 0.5 * math.exp(0.1) + 0.5 * 0.8) / 5)
    got = reduced(metrics)
    assert got["kept_fraction/sampling_filter"] == pytest.approx(4 / 5)
    assert (got["kept_fraction/finite_sampler_logp"], got["num_nonfinite_sampler_logp"]) == (1, 0)
    assert got["num_valid_samples"] == 2 and all(math.isfinite(x) for x in got.values())


@pytest.mark.parametrize("options", [{}, {"use_on_policy_kl_approximation": True}, {"token_level_loss": False}])
def test_the_kl_is_of_log_probabilities_without_filter(options):
    """Of a cut token too. By hand: k3 with the score function's gradient, d = logp - ref."""
    cfg = LossConfig(reference_policy_kl_penalty=0.5, **options)
    batch = golden_batch(torch.float64)
    unfiltered_R = torch.tensor([-1.3, -0.8, -2.4, -0.6, -3.2, -9], dtype=torch.float64, requires_grad=True)
    ref_R = torch.tensor(GOLDEN_REF, dtype=torch.float64)
    with torch.no_grad():
        batch["logp_R"][CUT] = -math.inf
    loss, metrics = policy_loss(**batch, cfg=cfg, ref_logp_R=ref_R, unfiltered_logp_R=unfiltered_R)
    loss.backward()
    d_R = (unfiltered_R - ref_R).detach()
    kl_R, slope_R = (-d_R).expm1() + d_R, d_R
    if "use_on_policy_kl_approximation" in options:
        u_R = (unfiltered_R.detach() - batch["sampler_logp_R"]).exp()
        kl_R, slope_R = u_R * kl_R, u_R * d_R
    weight_R = torch.tensor([1, 1, 1, 1, 1, 0.0], dtype=torch.float64) / 5
    if "token_level_loss" in options:
        weight_R = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4, 0.0], dtype=torch.float64)
    assert metrics["kl_penalty"].item() == pytest.approx((weight_R * kl_R).sum().item())
    torch.testing.assert_close(unfiltered_R.grad, 0.5 * weight_R * slope_R)
    rest, _ = policy_loss(**batch, cfg=LossConfig(reference_policy_kl_penalty=0, **options))
    assert loss.item() == pytest.approx((rest + 0.5 * (weight_R * kl_R).sum()).item())


def test_no_valid_token_or_no_token_gives_zero():
    for size in (6, 0):
        batch = golden_batch() | {"num_valid_tokens": 0, "num_valid_seqs": 0}
        batch = {name: x[:size] if name.endswith("_R") else x for name, x in batch.items()}
        batch["logp_R"] = batch["logp_R"].detach().requires_grad_()
        batch["mask_R"] = torch.zeros(size)
        for token_level in (True, False):
            loss, metrics = policy_loss(**batch, cfg=LossConfig(token_level_loss=token_level))
            loss.backward()
            assert loss == 0 and (batch["logp_R"].grad == 0).all()
            assert metrics["num_valid_samples"] == 0 and metrics["probs_ratio"] == (0, 0)
            assert float(metrics["probs_ratio_min"]) == math.inf
            assert float(metrics["probs_ratio_max"]) == -math.inf


def test_the_weight_of_the_entropy_bonus_may_be_a_tensor():
    """What optim.EntropyBonus gives, in place of cfg's; 0 too, as with no bonus."""
    for weight in (0.2, 0.0):
        found = []
        for cfg, coef in (
            (LossConfig(entropy_coef=weight), None),
            (LossConfig(entropy_target=1.0, entropy_coef=0.7), torch.tensor(weight, dtype=torch.float64)),
        ):
            batch = golden_batch(torch.float64)
            batch["entropy_R"] = torch.linspace(0.1, 2, len(batch["logp_R"]), dtype=torch.float64).requires_grad_()
            loss, _ = policy_loss(**batch, cfg=cfg, entropy_coef=coef)
            loss.backward()
            slope_R = batch["entropy_R"].grad
            found.append([loss.item(), *(torch.zeros(0) if slope_R is None else slope_R).tolist()])
        assert found[1][: len(found[0])] == found[0] and not any(found[1][len(found[0]) :])


def test_nothing_is_read_back_from_the_device():
    # A meta tensor has no values: whatever would wait for one on a GPU (item, unique, x[mask]) raises.
    batch = golden_batch()
    batch = {name: x.to("meta") if name.endswith("_R") else x for name, x in batch.items()}
    batch |= {name: torch.ones(6, device="meta") for name in ("entropy_R", "ref_logp_R", "positive_R")}
    terms = {"reference_policy_kl_penalty": 0.1, "entropy_coef": 0.1, "positive_example_nll_weight": 0.1}
    for options in (
        TIS,
        ICEPOP,
        SEQ_MASK,
        GSPO | IS,
        {"token_level_loss": False, "ratio_clip_c": 3.0},
        {"use_cispo": True},
    ):
        policy_loss(**batch, num_positive_tokens=4, cfg=LossConfig(**terms, **options))
