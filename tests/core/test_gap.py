"""bench/gap.py: float32 that rounds where the trainer does is the trainer in bfloat16, and each point counts."""

from types import SimpleNamespace

import pytest
import torch
from hf_folders import make_pack
from tiny import make_tiny

from bench import gap
from model import load_policy


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """The same weights, of bfloat16, in float32 and in bfloat16."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, family="qwen2", tied=False)
    trainer = load_policy(folder, device="cpu").bfloat16()
    reference = load_policy(folder, device="cpu")
    reference.load_state_dict(trainer.state_dict())
    return reference, trainer


def test_the_trainers_points_are_what_bfloat16_rounds(decoders):
    reference, trainer = decoders
    token_T, position_T, cu_seqlens = make_pack([40, 60, 90])
    inputs = (token_T, position_T, cu_seqlens, torch.arange(len(token_T) - 1), token_T[1:])
    batch = SimpleNamespace(micros=[SimpleNamespace(model_inputs=inputs)])

    def rounded(points):
        with gap.rounding(points, reference):
            return gap.scores(reference, batch, gap.rounded_logits_logp if "logits" in points else None)

    exact_R, trainer_R = gap.scores(reference, batch), gap.scores(trainer, batch)
    points = {point for point, side in gap.POINTS.items() if side in ("trainer", "both")}
    between = gap.gap(exact_R, trainer_R)["mean"]
    assert gap.gap(rounded(set()), exact_R)["max"] < 1e-5 < 5e-3 < between
    assert gap.gap(rounded(points), trainer_R)["mean"] < 1e-5
    for point in gap.POINTS:  # without one of them, or with another one, it is another model
        assert gap.gap(rounded(points ^ {point}), trainer_R)["mean"] > between / 10, point
    assert torch.equal(gap.scores(reference, batch), exact_R)  # what was put in the decoder's place is taken out


def test_the_gaps_by_hand():
    """Differences 0.5 and -0.25: k3 of the trainer to the sampler, e^d - d - 1 with d = trainer - sampler."""
    gaps = gap.gap(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.75]))
    k3 = ((0.60653066 + 0.5 - 1) + (1.28402542 - 0.25 - 1)) / 2
    by_hand = {"mean": 0.375, "max": 0.5, "gen_kl_error": k3, "token_mult_prob_error": (1.64872127 + 1.28402542) / 2}
    assert gaps == pytest.approx(by_hand, abs=1e-6)
