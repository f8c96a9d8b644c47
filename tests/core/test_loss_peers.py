"""The losses of other systems, to the digits that their own code printed (loss_peers.yaml)."""

from pathlib import Path

import pytest
import torch
import yaml

from config import LossConfig
from loss import policy_loss

PEERS = yaml.safe_load(Path(__file__).with_name("loss_peers.yaml").read_text(encoding="utf-8"))
CASES = [(name, case) for name, printed in PEERS["printed"].items() for case in printed if case in PEERS["inputs"]]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_numbers_of_their_own_code(name, case):
    keys = PEERS["printed"][name]["keys"]
    expected_loss, expected_gradient = PEERS["printed"][name][case]
    inputs = {key: torch.tensor(rows, dtype=torch.float64) for key, rows in PEERS["inputs"][case].items()}
    mask_R = inputs["mask"].flatten() != 0
    rows = {key: inputs[key].flatten() for key in ("old", "sampler", "ref")}
    rows["adv"] = inputs["adv"].repeat_interleave(3)
    for row_R in rows.values():
        row_R[~mask_R] = torch.nan  # what is masked is never read
    logp_R = inputs["logp"].flatten().requires_grad_()
    loss, _ = policy_loss(
        logp_R,
        old_logp_R=rows["old"],
        sampler_logp_R=rows["sampler"],
        ref_logp_R=rows["ref"],
        adv_R=rows["adv"],
        mask_R=mask_R,
        seq_R=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_valid_tokens=int(mask_R.sum()),
        num_valid_seqs=2,
        cfg=LossConfig(**keys),
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss, abs=6e-7)
    assert logp_R.grad.tolist() == pytest.approx(expected_gradient, abs=6e-7)
