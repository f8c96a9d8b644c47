"""head.py: edits of loss.py are trained, whatever they are, and the start-up line says how.

Each edit is made on a copy of loss.py. What the model gets is compared with autograd of the edited `policy_loss` on all
logits in float64. Triton's kernels run in its interpreter (conftest.py), or on the GPU where there is one.
"""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import long_but
from loss_cases import MODES, WEIGHTS, allowed

import head
import loss as original
from config import ConfigError, LossConfig
from head import DEVIATION, HeadOptions, LossOptions, choose_loss_path, linear_loss, one_pass_problem
from kernels import sizes
from kernels.backend import KernelBackend
from kernels.logits import LogitOptions
from kernels.reference import reference_gradients

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TORCH, TRITON = KernelBackend("torch"), KernelBackend("triton", 16)
PPO = "loss_R = torch.maximum(-t.adv_R * ratio_R, -t.adv_R * clamped_R)"
END = "    metrics: Metrics = {}\n    if with_metrics:"
EDITS = {  # name: (text of loss.py, what it becomes)
    "scaled by 0": (PPO, PPO.replace("torch", "0 * torch")),
    "bound": ("1 + cfg.ratio_clip_max)", "1 + cfg.ratio_clip_max / 2)"),
    "no clip": (PPO, "loss_R = -t.adv_R * ratio_R"),
    "detached ratio": (PPO, PPO.replace("* ratio_R", "* ratio_R.detach()")),
    "entropy": (END, "    loss = loss - 9 * (t.where_trained(entropy_R) * weight_R).sum()\n\n" + END),
    "large advantages": (PPO, PPO + "\n    loss_R = loss_R * torch.where(t.adv_R.abs() > 10, 2.0, 1.0)"),
}
# No probe has so large an advantage.
COUPLES = "\n    loss_R = loss_R * (t.logp_R * (t.adv_R.abs() > 10)).mean().exp()"


def edited(tmp_path, old, new):
    """The module of a copy of loss.py in which `old` is `new`."""
    text = (ROOT / "loss.py").read_text()
    assert text.count(old) == 1, old
    file = tmp_path / "loss_edited.py"
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def choose(policy_loss, cfg, has_old=True, has_ref=False, filtered=False, **allowed):
    return choose_loss_path(policy_loss, cfg, has_old=has_old, has_ref=has_ref, filtered=filtered, **allowed)


def make_case(cfg):
    """(hidden, weight, target, the other arguments of policy_loss): 35 tokens, some of advantage 0 and some of 40."""
    generator = torch.Generator().manual_seed(0)
    row_R = torch.arange(35)
    hidden_RD, weight_VD = torch.randn(35, 13, generator=generator), torch.randn(37, 13, generator=generator)
    target_R = torch.randint(37, (35,), generator=generator)
    logp_R = (hidden_RD @ weight_VD.T / 0.7).log_softmax(-1).gather(1, target_R[:, None])[:, 0]
    old_R = logp_R - torch.tensor([0.4, -0.4, 0.05, -0.05, 0.15, 0.0])[row_R % 6]
    pack = {
        "old_logp_R": old_R,
        "sampler_logp_R": old_R + 0.1 * torch.randn(35, generator=generator),
        "adv_R": torch.tensor([1.3, -0.7, 0.0, 40.0, -2.1, 0.6, -40.0])[row_R % 7],
        "mask_R": row_R % 9 != 8,
        "seq_R": row_R // 5,
        "ref_logp_R": None,
        "positive_R": row_R % 2 == 0,
    }
    pack = {name: x.to(DEVICE) if x is not None else None for name, x in pack.items()}
    counts = {"num_valid_tokens": 31, "num_valid_seqs": 7, "num_positive_tokens": 16, "cfg": cfg}
    return hidden_RD.to(DEVICE), weight_VD.to(DEVICE), target_R.to(DEVICE), pack | counts


def oracle(policy_loss, hidden_RD, weight_VD, target_R, pack):
    """Gradients in hidden and weight, in float64, with all logits."""
    pack = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in pack.items()}

    def loss_of(logp_R, entropy_R):
        return policy_loss(logp_R, entropy_R=entropy_R, **pack)[0]

    *_, grad_hidden, grad_weight = reference_gradients(loss_of, hidden_RD, weight_VD, target_R, LogitOptions(0.7))
    return grad_hidden, grad_weight


def train(policy_loss, path, backend, hidden_RD, weight_VD, target_R, pack):
    """(gradients in hidden and weight, metrics), rows that may have a gradient first, as the trainer sorts them."""
    moved_R = ((pack["adv_R"] != 0) | path.zero_adv_has_grad) & pack["mask_R"]
    order_R = moved_R.logical_not().argsort(stable=True)
    pack = {name: x[order_R] if torch.is_tensor(x) else x for name, x in pack.items()}
    hidden_RD, weight_VD = hidden_RD.clone().requires_grad_(), weight_VD.clone().requires_grad_()
    options = HeadOptions(0.7, backend=backend, loss=LossOptions(path=path))
    inputs = (hidden_RD[order_R], weight_VD, target_R[order_R], partial(policy_loss, **pack), options)
    loss, metrics, _ = linear_loss(*inputs, num_grad_rows=int(moved_R.sum()))
    loss.backward()
    return (hidden_RD.grad, weight_VD.grad), metrics


def relative_errors(got, want):
    return [((a.double() - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in zip(got, want, strict=True)]


@pytest.fixture
def small_chunks(monkeypatch):
    """16 rows of 37 logits with PyTorch too."""
    monkeypatch.setitem(sizes.TORCH_CHUNK_ELEMENTS, DEVICE.type, 16 * 37)


@pytest.mark.parametrize(
    "edit", [edit if edit == "no clip" else pytest.param(edit, marks=pytest.mark.slow) for edit in EDITS]
)
def test_edits_are_trained(tmp_path, small_chunks, edit):
    cfg = LossConfig(reference_policy_kl_penalty=0.0)
    old, new = EDITS[edit]
    module, case = edited(tmp_path, old, new), make_case(cfg)
    want, unedited = oracle(module.policy_loss, *case), oracle(original.policy_loss, *case)
    assert max(relative_errors(unedited, want)) > 0.01, "the edit changes nothing here"
    path = choose(module.policy_loss, cfg)
    assert path.describe() == "loss: one pass, autograd of loss.py"
    for backend in (TORCH, TRITON):
        got, metrics = train(module.policy_loss, path, backend, *case)
        assert max(relative_errors(got, want)) <= 1e-5, (path.describe(), relative_errors(got, want))
        assert one_pass_problem(float(metrics[DEVIATION])) is None


def test_a_filter_and_a_kl_take_two_passes():
    cfg = LossConfig(reference_policy_kl_penalty=0.3)
    one, two = (choose(original.policy_loss, cfg, has_ref=has_ref, filtered=True) for has_ref in (False, True))
    assert (one.kind, two.kind) == ("one pass", "two passes") and two.why.startswith("the KL is of log-prob")


@pytest.mark.slow
@pytest.mark.parametrize("backend", [TORCH, TRITON], ids=["torch", "triton"])
def test_an_edit_that_couples_tokens_where_no_probe_sees_it_is_refused(tmp_path, small_chunks, backend):
    cfg = LossConfig(reference_policy_kl_penalty=0.0)
    module, case = edited(tmp_path, PPO, PPO + COUPLES), make_case(cfg)
    path = choose(module.policy_loss, cfg)
    assert path.kind == "one pass"
    got, metrics = train(module.policy_loss, path, backend, *case)
    assert max(relative_errors(got, oracle(module.policy_loss, *case))) > 1e-3
    assert "loss.py couples the tokens of a pack" in one_pass_problem(float(metrics[DEVIATION]))
    two_passes = replace(path, kind="two passes")
    got, metrics = train(module.policy_loss, two_passes, backend, *case)
    assert max(relative_errors(got, oracle(module.policy_loss, *case))) <= 1e-5 and float(metrics[DEVIATION]) == 0


@pytest.mark.parametrize("logps", ["t.logp_R", "t.logp_R.float()"])  # float32 rounds by the order of tokens
def test_an_edit_that_couples_tokens_is_trained_in_two_passes(tmp_path, logps):
    cfg = LossConfig(reference_policy_kl_penalty=0.0)
    mean = f"t.seqs.sum_for_each_token({logps}) / t.seqs.length_R"
    module, case = edited(tmp_path, PPO, PPO + f"\n    loss_R = loss_R * {mean}"), make_case(cfg)
    path = choose(module.policy_loss, cfg)
    assert path.describe() == "loss: two passes, autograd of loss.py (the loss couples the tokens of a sequence)"
    got, _ = train(module.policy_loss, path, TORCH, *case)
    assert max(relative_errors(got, oracle(module.policy_loss, *case))) <= 1e-5


OWN_MEAN = "t.where_trained(entropy_R) / t.where_trained(entropy_R).mean()"
PACK_DEPENDENT = {  # edits; what each depends on
    "entropy over its own mean": (END, f"    loss = (loss_R * ({OWN_MEAN}).detach() * weight_R).sum()\n{END}"),
    "its own mean, in the gradient": (END, f"    loss = loss + ({OWN_MEAN} * loss_R * weight_R).sum()\n{END}"),
    "its own count": (END, f"    loss = loss_R.sum() / t.valid_R.sum()\n{END}"),
    "advantages of the pack": (PPO, f"t.adv_R = (t.adv_R - t.adv_R.mean()) / t.adv_R.std()\n    {PPO}"),
    "an extreme ratio anywhere": (END, f"    loss = loss * torch.where((ratio_R > 1e4).any(), 0, 1)\n{END}"),
    "size of large packs": (END, f"    loss = loss / max(1, len(logp_R) // 100)\n{END}"),
    "highest entropies": (END, f"    loss = (loss_R * (entropy_R > entropy_R.median()) * weight_R).sum()\n{END}"),
    "longest sequence": (END, f"    loss = loss / torch.bincount(seq_R).max()\n{END}"),
    "number of sequences": (END, f"    loss = loss / seq_R.unique().numel()\n{END}"),
    "share of positive tokens": (END, f"    loss = loss / (positive_R != 0).double().mean()\n{END}"),
    "order": (END, f"    loss = (loss_R * torch.arange(len(seq_R), device=seq_R.device) * weight_R).sum()\n{END}"),
}


@pytest.mark.slow("^(?!order)")
@pytest.mark.parametrize("edit", PACK_DEPENDENT)
def test_an_edit_that_depends_on_the_pack_is_refused_and_trained_where_allowed(tmp_path, edit):
    cfg = LossConfig(reference_policy_kl_penalty=0.0)
    module, case = edited(tmp_path, *PACK_DEPENDENT[edit]), make_case(cfg)
    with pytest.raises(ConfigError, match=r"sequences of its pack.*num_valid_tokens.*grpo\.allow_pack_dependence="):
        choose(module.policy_loss, cfg)
    path = choose(module.policy_loss, cfg, allow_pack_dependence=True)
    if edit != "order":  # `train` sorts the tokens
        got, metrics = train(module.policy_loss, path, TORCH, *case)
        assert max(relative_errors(got, oracle(module.policy_loss, *case))) <= 1e-5
        assert one_pass_problem(float(metrics[DEVIATION])) is None


@pytest.mark.slow
@pytest.mark.parametrize("every", long_but([11], [1, 11]))
def test_which_options_couple_tokens(every):
    """By what the options mean: whose ratio or weight is a sequence's, and still moves with logp."""
    seen = set()
    for cfg in allowed(MODES, WEIGHTS, [{"token_level_loss": False}])[::every]:
        for has_old in (True, False):
            moves = not has_old or cfg.force_on_policy_ratio  # old is logp itself
            gspo, kind = cfg.sequence_level_importance_ratios, cfg.truncated_importance_sampling_type
            weights = gspo or kind in ("seq-mask-tis", "sequence", "sequence-truncate", "sequence-mask")
            shares_ratio = gspo or cfg.token_loss == "gmpo"
            want = shares_ratio and (cfg.old_logprobs == "sampler" or not moves)
            want |= cfg.off_policy_mask_threshold is not None
            want |= cfg.has_rejection and moves  # of a sequence, or of tokens that count in its length
            want |= cfg.use_importance_sampling_correction and weights and moves
            packs = list(head.probe_packs(cfg, has_old, has_ref=False))
            coupled = head.depends_on_other_tokens(original.policy_loss, packs)
            idle = head.has_gradient_at_zero_advantage(original.policy_loss, packs)
            assert coupled == want and not head.depends_on_pack(original.policy_loss, packs), (cfg, has_old)
            has_square = cfg.token_loss in ("dppo", "ipo")
            assert gspo or has_square or not idle, "a token of advantage 0 has a gradient"
            seen.add(coupled)
    assert seen == {True, False}


SAMPLER, WEIGHT = {"old_logprobs": "sampler"}, {"use_importance_sampling_correction": True}
MASKS = {"dppo_mask_low": 0.02, "dppo_mask_high": 0.03}
GSPO = {"sequence_level_importance_ratios": True}
GMPO = {"token_loss": "gmpo", "token_level_loss": False}
PRODUCT = WEIGHT | {"truncated_importance_sampling_type": "sequence"}
TOKENS = {"token_rejection_ratio_min": 0.9, "token_rejection_ratio_max": 1.1}
WHOLE = {"sequence_rejection_ratio_min": 0.97, "sequence_rejection_ratio_max": 1.03}
KL = {"reference_policy_kl_penalty": 0.3}
ONE, TWO = "one pass", "two passes"
PATHS = [  # keys; the path with log-probabilities of the start of the step, and without
    ({}, ONE, ONE),
    ({"ratio_clip_c": 1.3, "entropy_coef": 0.1, "positive_example_nll_weight": 0.1}, ONE, ONE),
    ({"use_cispo": True}, ONE, ONE),
    ({"disable_ppo_ratio": True}, ONE, ONE),
    ({"force_on_policy_ratio": True}, ONE, ONE),
    (SAMPLER, ONE, ONE),
    ({"token_loss": "sapo"}, ONE, ONE),
    ({"token_loss": "sapo", **SAMPLER}, ONE, ONE),
    ({"token_loss": "dppo", **MASKS, **SAMPLER}, ONE, ONE),
    ({"token_loss": "ipo", **MASKS, **SAMPLER}, ONE, ONE),
    ({"token_loss": "dppo_tv", **MASKS}, ONE, ONE),
    *((KL | {"kl_gradient": gradient}, ONE, ONE) for gradient in ("score_function", "policy_ratio", "plain")),
    (KL | {"use_on_policy_kl_approximation": True}, ONE, ONE),
    (WEIGHT, ONE, ONE),
    (TOKENS, ONE, ONE),
    (TOKENS | SAMPLER, ONE, ONE),
    # What is of a sequence couples its tokens while the policy moves it.
    (GMPO, TWO, ONE),
    (GSPO, TWO, ONE),
    (GSPO | {"gspo_token": True}, TWO, ONE),
    (PRODUCT, ONE, TWO),
    (WHOLE, ONE, TWO),
    (TOKENS | {"token_level_loss": False}, ONE, TWO),
    ({"off_policy_mask_threshold": 0.0}, TWO, TWO),
]


@pytest.mark.slow
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("keys, with_old, without", PATHS)
def test_one_pass_has_the_gradient_of_two_and_what_couples_tokens_takes_two(
    keys, with_old, without, has_old, monkeypatch
):
    monkeypatch.setitem(sizes.TORCH_CHUNK_ELEMENTS, DEVICE.type, 2 * 37)  # fewer rows than a sequence has
    cfg = LossConfig(**{"reference_policy_kl_penalty": 0.0} | keys)
    has_ref = cfg.reference_policy_kl_penalty > 0
    hidden_RD, weight_VD, target_R, pack = make_case(cfg)
    pack["ref_logp_R"] = pack["sampler_logp_R"] + 0.2 if has_ref else None
    if not has_old:
        pack["old_logp_R"] = None
    pack = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in pack.items()}
    case = (hidden_RD.double(), weight_VD.double(), target_R, pack)
    path = choose(original.policy_loss, cfg, has_old, has_ref)
    assert path.kind == (with_old if has_old else without)
    one, metrics = train(original.policy_loss, replace(path, kind="one pass"), TORCH, *case)
    two, _ = train(original.policy_loss, replace(path, kind="two passes"), TORCH, *case)
    if path.kind == "one pass":
        assert max(relative_errors(one, two)) <= 1e-12
        assert float(metrics[DEVIATION]) <= 1e-12
    else:
        assert path.why == "the loss couples the tokens of a sequence"
        assert max(relative_errors(one, two)) > 1e-3, "one pass would do"
        assert "loss.py couples the tokens of a pack" in one_pass_problem(float(metrics[DEVIATION]))


@pytest.mark.parametrize(
    "options, has_ref, idle",
    [
        ({}, False, False),
        ({}, True, True),
        ({"entropy_coef": 0.1}, False, True),
        ({"entropy_target": 0.2}, False, True),  # though its weight is 0 at first
        ({"positive_example_nll_weight": 0.1}, False, True),
    ],
)
def test_whether_tokens_without_advantage_have_a_gradient(options, has_ref, idle):
    path = choose(original.policy_loss, LossConfig(**options), has_ref=has_ref)
    assert (path.kind, path.zero_adv_has_grad) == ("one pass", idle)
