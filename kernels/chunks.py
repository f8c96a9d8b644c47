"""Logits of a linear head, a chunk of rows at a time in one buffer: statistics, then gradients in place.

z, p, H, g, h, dz: as in logp.py. `TorchChunk` says in PyTorch what `TritonChunk` does with two kernels.

In examples/naive.py this is `rms_norm(hidden_GTD, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T`: the
logits of all rows at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels import sizes
from kernels.backend import KernelBackend, choose_backend
from kernels.logits import LogitChunk, LogitOptions
from kernels.matmul import mm_wide, wide_dtype


@dataclass(slots=True)
class TorchChunk(LogitChunk):
    """The buffer holds logits of the vocabulary, then logits less the largest of their row, then z, then dz, in float32
    or float64. A second buffer holds exp."""

    max_C: Tensor = field(init=False)  # m, the largest of the row
    shifted_CV: Tensor = field(init=False)  # logit - m
    sum_C: Tensor = field(init=False)  # of exp((logit - m) / temperature): exact, however large logits are
    entropy_C: Tensor = field(init=False)

    def logp_and_entropy(self) -> Tensor:
        temperature = self.options.temperature
        self.max_C = self.logits_CV.amax(1)
        self.shifted_CV = self.logits_CV.sub_(self.max_C[:, None])
        exp_CV = self.shifted_CV.div(temperature).exp_()
        self.sum_C = exp_CV.sum(1)
        target_logit_C = self.shifted_CV.gather(1, self.target_C[:, None])[:, 0]
        logp_C = target_logit_C / temperature - self.sum_C.log()
        weighted_C = exp_CV.mul_(self.shifted_CV).sum(1)
        self.entropy_C = self.sum_C.log() - weighted_C / (self.sum_C * temperature)
        if self.options.sampling_filter:
            self.options.sampling_filter.mark_cut_targets_(logp_C)
        return torch.stack([logp_C, self.entropy_C])

    def dlogits(self, g_C: Tensor, h_C: Tensor | None) -> Tensor:
        temperature, softcap = self.options.temperature, self.options.softcap
        if softcap is not None:
            tanh_CV = (self.shifted_CV + self.max_C[:, None]).div_(softcap).clamp_(min=-1)  # of a cut logit -1
            slope_of_cap_CV = tanh_CV.square_().neg_().add_(1)
        z_CV = self.shifted_CV
        if temperature != 1:
            z_CV = z_CV.div_(temperature)
        scale_C = 1 / (self.sum_C * temperature)
        if h_C is None:  # -p g
            dz_CV = z_CV.exp_().mul_((-g_C * scale_C)[:, None])
        else:  # -p (g + h (log p + H)), with log p = z - log of the sum
            exp_CV = z_CV.exp()
            offset_C = g_C + h_C * (self.entropy_C - self.sum_C.log())
            dz_CV = z_CV.mul_((-h_C * scale_C)[:, None]).sub_((offset_C * scale_C)[:, None]).mul_(exp_CV)
        row_C = torch.arange(len(dz_CV), device=dz_CV.device)
        dz_CV[row_C, self.target_C] += g_C / temperature
        if softcap is not None:
            dz_CV.mul_(slope_of_cap_CV)
        return dz_CV.to(self.dtype)


def logit_chunks(hidden_RD: Tensor, weight_VD: Tensor, target_R: Tensor, options: LogitOptions) -> Iterator[LogitChunk]:
    """The logits hidden_RD @ weight_VD.T in chunks of rows, capped, then cut by the sampling_filter, in one buffer for
    all chunks."""
    num_rows, device_type = len(hidden_RD), hidden_RD.device.type
    backend = options.backend or choose_backend("auto", device_type)
    if hidden_RD.dtype == torch.float64:
        backend = KernelBackend("torch")
    vocab = options.vocab
    if vocab is None:
        vocab = len(weight_VD)
        options = replace(options, vocab=vocab)
    assert 0 < vocab <= len(weight_VD), (vocab, weight_VD.shape)
    torch._assert_async(((target_R >= 0) & (target_R < vocab)).all(), "a target is outside the vocabulary")
    most_rows = max(num_rows, backend.pack_rows)  # so that the memory which a pack leaves is what the next one asks for
    if backend.name == "triton":
        from kernels.row_kernels import TritonChunk  # PyTorch's does without Triton

        row_stride = sizes.row_stride(len(weight_VD))
        chunk_rows = sizes.triton_rows(most_rows, row_stride, backend.chunk_rows)
        chunk_class = TritonChunk
    else:
        weight_VD = weight_VD[:vocab]
        row_stride = vocab
        chunk_rows = sizes.torch_rows(vocab, device_type)
        chunk_class = TorchChunk
    buffer_CV = hidden_RD.new_empty(min(chunk_rows, most_rows), row_stride, dtype=wide_dtype(hidden_RD))
    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, min(start + chunk_rows, num_rows))
        logits_CV = buffer_CV[: rows.stop - start, : len(weight_VD)]
        mm_wide(hidden_RD[rows], weight_VD.T, out=logits_CV)
        if options.softcap is not None:
            logits_CV.div_(options.softcap).tanh_().mul_(options.softcap)
        if options.sampling_filter:
            options.sampling_filter.cut_(logits_CV[:, :vocab], options.temperature)
        yield chunk_class(rows, logits_CV, target_R[rows], options, hidden_RD.dtype)


def write_gradients(
    dz_CV: Tensor,
    rows: slice,
    hidden_RD: Tensor,
    weight_VD: Tensor,
    grad_hidden_RD: Tensor | None,
    grad_weight_VD: Tensor | None,
    *,
    accumulate: bool,
) -> None:
    """From dz of a chunk's rows, dX = dz W and dW = dz^T X, which is added to grad_weight_VD if `accumulate`. None: the
    gradient is not needed."""
    num_columns = dz_CV.shape[1]  # PyTorch's chunk has the vocabulary's alone
    if grad_hidden_RD is not None:
        torch.mm(dz_CV, weight_VD[:num_columns], out=grad_hidden_RD[rows])
    if grad_weight_VD is not None:
        mm_wide(dz_CV.T, hidden_RD[rows], out=grad_weight_VD[:num_columns], accumulate=accumulate)
