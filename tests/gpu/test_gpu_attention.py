"""Attention over a pack in bfloat16, by varlen_attn on a GPU, against SDPA in float32, segment by segment."""

import pytest
import torch

import attention

pytestmark = pytest.mark.gpu

WHOLE = [-1, -1, -1, -1, -1, -1]  # the segment whose keys a segment sees first; -1: none
SHARED = [-1, -1, 0, 0, 1, -1]


@pytest.mark.parametrize("is_windowed", [False, True], ids=["all keys", "a window"])
@pytest.mark.parametrize("prefixes", [WHOLE, SHARED], ids=["whole sequences", "a shared prompt"])
def test_output_and_gradients_are_those_of_float32(prefixes, is_windowed, place, check, relative_error):
    """The window ends within a prompt that is shared, and within a long response."""
    lengths = [7, 5, 5, 1, 12, 3] if place.is_tiny else [700, 33, 700, 1, 2048, 128]
    window = None
    if is_windowed:
        window = 9 if place.is_tiny else 1024
    total = sum(lengths)
    device = place.device
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    layout = attention.PackLayout.of(cu_seqlens, torch.tensor(prefixes), total, device)
    generator = torch.Generator(device).manual_seed(0)
    tensors = [torch.randn(total, heads, 128, generator=generator, device=device) for heads in (12, 2, 2, 12)]

    def run(dtype):
        query, key, value, weight = (x.bfloat16().to(dtype).requires_grad_() for x in tensors)
        out = attention.packed_attention(query, key, value, layout, window=window)
        grads = torch.autograd.grad((out * weight.detach().flatten(1)).sum(), (query, key, value))
        return out.detach(), *grads

    uses_flash = attention.uses_flash_attention(device.type, torch.bfloat16)
    assert uses_flash != place.is_tiny
    names = ("output", "dQ", "dK", "dV")
    for name, narrow, exact in zip(names, run(torch.bfloat16), run(torch.float32), strict=True):
        check(f"packed attention in bfloat16: {name}", relative_error(narrow, exact), 2e-2)
