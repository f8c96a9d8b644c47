"""What only a GPU runs, at real sizes: `pytest -m gpu -s tests/gpu`; without a GPU all of it is skipped.

    GRPO_DEVICE=cpu pytest -m gpu -s tests/gpu --tiny        the same on a CPU, the kernels in Triton's interpreter

The other tests hold the same on a CPU. Here it is the compiled kernels, chunks as in production, offsets beyond 2^31,
varlen_attn, and bfloat16 tensor cores.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from base.system.ranks import Ranks
from run.build import choose_attention


@dataclass(frozen=True)
class Place:
    """Where a test runs. dtype: of hidden states and weights. backend: of the kernels."""

    is_tiny: bool
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    backend: str = "triton"

    @property
    def gradient_limit(self) -> float:
        """The relative (Frobenius) error of a gradient against float64: what the rounding of its factors costs."""
        return 3e-3 if self.dtype == torch.bfloat16 else 1e-5


@pytest.fixture(scope="session")
def place(request) -> Place:
    is_tiny = request.config.getoption("--tiny")
    if not is_tiny and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ranks, device, _ = request.getfixturevalue("one_rank")
    print(choose_attention(device, torch.bfloat16))
    return Place(is_tiny, ranks, device, torch.float32 if is_tiny else torch.bfloat16)


@pytest.fixture
def check():
    """check(name, value, limit) prints the number. The test fails at its end if one was over its limit; NaN is over."""
    over = []
    print()  # pytest has written a dot in this line

    def check(name: str, value: float, limit: float) -> None:
        holds = value <= limit
        print(f"{'PASS' if holds else 'FAIL'} {name}: {value:.3g} (at most {limit:g})", flush=True)
        if not holds:
            over.append(name)

    yield check
    assert over == []


def relative(ours: Tensor, reference: Tensor) -> float:
    difference = ours.double() - reference.double()
    return (difference.norm() / reference.double().norm()).item()


@pytest.fixture
def relative_error():
    """||ours - reference|| / ||reference||, in float64."""
    return relative
