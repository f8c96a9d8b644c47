"""The losses of other systems, to the digits that their own code printed: TRL 1.16.0, verl 0.9.1, prime-rl 559b447.

Two sequences of three tokens each; of the third case the second token of the first sequence is masked.
"""

import pytest
import torch

from config import LossConfig
from loss import policy_loss

CASES = {
    "S1": {
        "logp": [-0.5, -1.2, -0.1, -2, -0.3, -0.7],
        "old": [-0.4, -1.6, 0.1, -2.1, 0.3, -0.7],
        "sampler": [-0.35, -1.9, 0.2, -1.9, 0.2, -0.7],
        "ref": [0, -1.4, -0.1, -3, 0, -0.6],
        "adv": [1, 1, 1, -0.5, -0.5, -0.5],
        "mask": [1, 1, 1, 1, 1, 1],
    },
    "S2": {
        "logp": [-0.02, -3, -1, -0.9, -0.05, -2.5],
        "old": [-0.32, -2.5, -1.1, -0.5, -0.25, -3.2],
        "sampler": [-0.42, -2.3, -1.5, -0.4, 0.05, -3.4],
        "ref": [-2.02, -2, -0.8, -0.4, -0.45, 2.5],
        "adv": [-1.5, -1.5, -1.5, 0.8, 0.8, 0.8],
        "mask": [1, 1, 1, 1, 1, 1],
    },
    "S3": {
        "logp": [-1, -0.4, -0.6, -0.2, -1.5, -0.8],
        "old": [-1, -0.4, -0.6, -0.2, -1.5, -0.8],
        "sampler": [-0.7, -0.6, -0.5, -0.7, -1.4, -0.6],
        "ref": [-0.9, -0.2, -0.9, 1, -2.1, -0.4],
        "adv": [0.7, 0.7, 0.7, -1.1, -1.1, -1.1],
        "mask": [1, 0, 1, 1, 1, 1],
    },
}
NO_KL = {"reference_policy_kl_penalty": 0.0}
NO_CLAMPS = {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
PRIME_MASKS = {"dppo_mask_low": 0.1, "dppo_mask_high": 0.1, "old_logprobs": "sampler"}
TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.2,
}
GSPO = {"sequence_level_importance_ratios": True}
BY_SEQUENCE = {"token_level_loss": False}

# keys -> loss, gradient in logp of the tokens, for each case
PRINTED = {
    "TRL beta=0.1, r k3": (
        NO_CLAMPS | {"reference_policy_kl_penalty": 0.1, "kl_gradient": "policy_ratio"},
        (-0.235137, [-0.158347, 0.004973, -0.136455, 0.110517, -0.002744, 0.081667]),
        (5.220420, [0.382460, -0.010109, 0.272609, -0.094962, 0.008143, -0.167813]),
        (0.408135, [-0.142000, 0, -0.134000, 0.196000, 0.232000, 0.212000]),
    ),
    "TRL gspo, token_truncate": (
        NO_KL | GSPO | BY_SEQUENCE | TIS | {"importance_sampling_correction_level": "token"},
        (-0.320356, [-0.175536, -0.175536, -0.175536, 0.068751, 0.068751, 0.068751]),
        (0.307139, [0.251791, 0.251791, 0.251791, -0.149411, -0.149411, -0.149411]),
        (0.247998, [-0.143995, 0, -0.143995, 0.178662, 0.178662, 0.178662]),
    ),
    "verl gspo, token-mean": (
        NO_KL | GSPO,
        (-0.305327, [-0.172316, -0.172316, -0.172316, 0.070540, 0.070540, 0.070540]),
        (0.252868, [0.241804, 0.241804, 0.241804, -0.157515, -0.157515, -0.157515]),
        (0.380000, [-0.140000, 0, -0.140000, 0.220000, 0.220000, 0.220000]),
    ),
    "verl gspo, sequences, token TIS": (
        NO_KL | GSPO | BY_SEQUENCE | TIS | {"importance_sampling_correction_level": "token", "gspo_token": True},
        (-0.320356, [-0.163912, -0.206779, -0.155918, 0.057753, 0.077959, 0.070540]),
        (0.307139, [0.267235, 0.197972, 0.290165, -0.142525, -0.116690, -0.189018]),
        (0.247998, [-0.129643, 0, -0.158347, 0.220000, 0.165887, 0.150101]),
    ),
    "verl seq-mean-token-sum-norm, 16": (
        NO_KL | BY_SEQUENCE | {"loss_scale_factor": 16.0},
        (-0.045968, [-0.028276, 0, -0.025585, 0.017268, 0, 0.015625]),
        (0.075822, [0.063275, 0, 0.051805, -0.016758, 0, 0]),
        (0.059375, [-0.021875, 0, -0.021875, 0.034375, 0.034375, 0.034375]),
    ),
    "SAPO (TRL and verl)": (
        NO_KL | BY_SEQUENCE | {"token_loss": "sapo"},
        (-0.586345, [-0.150465, -0.234188, -0.135340, 0.091817, 0.043261, 0.083333]),
        (0.533834, [0.326331, 0.145342, 0.275452, -0.086991, -0.160874, -0.209816]),
        (0.347619, [-0.175000, 0, -0.175000, 0.183333, 0.183333, 0.183333]),
    ),
    "verl dppo_tv": (
        NO_KL | {"token_loss": "dppo_tv", "dppo_mask_low": 0.1, "dppo_mask_high": 0.1, "ratio_clip_c": 3.0},
        (0.144885, [-0.150806, -0.248637, -0.136455, 0.092098, 0, 0.083333]),
        (0.013749, [0.337465, 0.151633, 0.276293, -0.089376, 0, -0.268500]),
        (-0.326000, [-0.140000, 0, -0.140000, 0.220000, 0.220000, 0.220000]),
    ),
    "verl geo_mean": (
        NO_KL | BY_SEQUENCE | {"token_loss": "gmpo"},
        (-0.241804, [-0.161203, 0, -0.161203, 0.080601, 0, 0.080601]),
        (0.401704, [0.267235, 0, 0.267235, -0.133333, -0.133333, 0]),
        (0.200000, [-0.175000, 0, -0.175000, 0.183333, 0.183333, 0.183333]),
    ),
    "TRL off_policy_mask_threshold=0.02": (
        NO_KL | {"off_policy_mask_threshold": 0.02},
        (-0.487261, [-0.150806, 0, -0.136455, 0, 0, 0]),
        (0.404381, [0.337465, 0, 0.276293, -0.089376, 0, 0]),
        (0.380000, [-0.140000, 0, -0.140000, 0.220000, 0.220000, 0.220000]),
    ),
    "prime-rl default": (
        NO_KL | PRIME_MASKS | {"token_loss": "dppo"},
        (-0.108041, [-0.143501, 0.000233, -0.123570, 0.075370, -0.000167, 0.083333]),
        (0.380148, [0.373090, 0.123913, 0.412347, -0.081037, -0.120678, -0.327647]),
        (0.511592, [-0.103835, 0, -0.126717, 0.362919, 0.199024, 0.180041]),
    ),
    "prime-rl ipo": (
        NO_KL | PRIME_MASKS | {"token_loss": "ipo"},
        (0.015429, [-0.143501, 0.000233, -0.000100, 0.075370, -0.000167, 0.083333]),
        (-0.203472, [0.000133, 0.123913, 0.000167, -0.000167, -0.000033, -0.327647]),
        (0.252588, [-0.000120, 0, -0.126717, 0.000200, 0.199024, 0.180041]),
    ),
}


def computed(case: dict, keys: dict) -> tuple[float, list[float]]:
    """(loss, gradient in logp) of a case."""
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in case.items()}
    mask_R = tensors["mask"] != 0
    for name in ("old", "sampler", "ref", "adv"):
        tensors[name][~mask_R] = torch.nan  # what is masked is never read
    logp_R = tensors["logp"].requires_grad_()
    loss, _ = policy_loss(
        logp_R,
        old_logp_R=tensors["old"],
        sampler_logp_R=tensors["sampler"],
        ref_logp_R=tensors["ref"],
        adv_R=tensors["adv"],
        mask_R=mask_R,
        seq_R=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_valid_tokens=int(mask_R.sum()),
        num_valid_seqs=2,
        cfg=LossConfig(**keys),
    )
    loss.backward()
    return loss.item(), logp_R.grad.tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PRINTED)
def test_the_numbers_of_their_own_code(name, case):
    keys, *printed = PRINTED[name]
    expected_loss, expected_gradient = printed[[*CASES].index(case)]
    loss, gradient = computed(CASES[case], keys)
    assert loss == pytest.approx(expected_loss, abs=6e-7)
    assert gradient == pytest.approx(expected_gradient, abs=6e-7)


def test_token_sum_is_the_sum_over_all_tokens():
    """verl's token-sum: the mean over tokens, times their number."""
    for case in CASES.values():
        mean, mean_gradient = computed(case, NO_KL)
        total, gradient = computed(case, NO_KL | {"loss_scale_factor": 1.0})
        num_tokens = sum(case["mask"])
        assert total == pytest.approx(mean * num_tokens)
        assert gradient == pytest.approx([x * num_tokens for x in mean_gradient])


def test_the_cap_of_dppo_tv_bounds_the_weight_of_a_token():
    """Ratios of at most exp(0.7) = 2.01: with a cap of 1.5 the last token of S2 keeps 1.5 / 2.01 of its gradient."""
    keys = NO_KL | {"token_loss": "dppo_tv", "dppo_mask_low": 9.0, "dppo_mask_high": 9.0}
    _, free = computed(CASES["S2"], keys)
    _, capped = computed(CASES["S2"], keys | {"ratio_clip_c": 1.5})
    assert capped[:5] == pytest.approx(free[:5])
    assert capped[5] == pytest.approx(-0.8 * 1.5 / 6)
