"""For the tests of kernels/ without a GPU."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def exact_bfloat16_matmuls():
    """oneDNN's bfloat16 matmul on CPUs with AMX reads between the rows of a strided factor: NaN there times 0 is NaN.

    Only Triton leaves gradients in such rows, so on a CPU only its interpreter meets this.
    """
    with torch.backends.mkldnn.flags(enabled=torch.cuda.is_available()):
        yield
