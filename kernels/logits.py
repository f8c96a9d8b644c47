"""What logits are, beside the weights, and what is computed from a chunk of them: in PyTorch or in Triton."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.backend import KernelBackend

if TYPE_CHECKING:
    from kernels.filter import SamplingFilter


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """What a run's logits are, beside the weights; temperature, vocab and sampling_filter match the sampler.

    temperature: > 0, divides the logits.
    vocab: the tokenizer's number of ids; None: all rows of the weight are ids. Rows from vocab on are padding.
    sampling_filter: the softmax is over the logits that it keeps; logp is -inf where it cuts the target. None: of all.
    backend: None is Triton on CUDA, PyTorch elsewhere; float64 always goes to PyTorch.
    softcap: the largest that a logit can be; None: no cap.
    """

    temperature: float = 1.0
    vocab: int | None = None
    sampling_filter: "SamplingFilter | None" = None
    backend: KernelBackend | None = None
    softcap: float | None = None


@dataclass(slots=True)
class LogitChunk:
    """The logits of some rows. Each method overwrites what the one before it has left in the buffer."""

    rows: slice
    logits_CV: Tensor  # of the vocabulary's columns or more, until the first method overwrites them
    target_C: Tensor
    options: LogitOptions  # with a vocab
    dtype: torch.dtype  # of dz

    def logp_and_entropy(self) -> Tensor:
        """[2, C] in nats, in the logits' dtype; logp is -inf where a filter cut the target."""
        raise NotImplementedError

    def dlogits(self, g_C: Tensor, h_C: Tensor | None) -> Tensor:
        """dz_CV in the inputs' dtype, after this chunk's own `logp_and_entropy`: with statistics of another matmul,
        1 - p of a near-certain token would be rounding error. g_C, h_C: derivatives of the loss in logp and entropy;
        None: 0."""
        raise NotImplementedError
