"""The sampler's top_k and top_p on the trainer's logits, so that both compute the same renormalised distribution."""

import math
from dataclasses import dataclass

from torch import Tensor

from kernels import sizes

CUT = -1e30  # the logit of a cut token: exp gives 0; finite, so that 0 * CUT is 0, not NaN


@dataclass(frozen=True, slots=True)
class SamplingFilter:
    """top_k, then top_p, by the rule of vLLM and NeMo RL.

    A row keeps its top_k largest logits and ties with the last of them; of these, the likeliest that together hold
    top_p of the probability, at least one. Among exact ties at that cut, the largest ids are kept; vLLM's choice
    depends on its sort, which keeps others in large vocabularies.
    """

    top_p: float = 1.0
    top_k: int | None = None

    def cut_(self, logits_CV: Tensor, temperature: float) -> None:
        """Sets the logits of cut tokens to `CUT`, in place: every reader then sees the renormalised distribution, and a
        cut logit has no gradient. Rows are cut a part at a time, as sorting takes `sizes.SORT_BYTES` per logit."""
        num_rows = sizes.sorted_rows(logits_CV.shape[1], logits_CV.device.type)
        for part_CV in logits_CV.split(num_rows):
            self._cut_rows_(part_CV, temperature)

    def _cut_rows_(self, logits_CV: Tensor, temperature: float) -> None:
        if self.top_k is not None and self.top_k < logits_CV.shape[1]:
            last_C1 = logits_CV.topk(self.top_k).values[:, -1:]
            logits_CV.masked_fill_(logits_CV < last_C1, CUT)
        if self.top_p < 1:
            sorted_CV, index_CV = logits_CV.sort(stable=True)
            mass_CV = sorted_CV.div(temperature).softmax(1).cumsum_(1)  # of a token and all less likely tokens
            mass_CV[:, -1] = 2  # above any bound: the likeliest always stays
            logits_CV.scatter_(1, index_CV, sorted_CV.masked_fill_(mass_CV <= 1 - self.top_p, CUT))

    def mark_cut_targets_(self, logp_C: Tensor) -> None:
        """Sets logp to -inf, in place, where the target is cut. The bound is CUT divided by a temperature that none
        exceeds: a cut target is below it, any other log-probability above."""
        logp_C.masked_fill_(logp_C < CUT / 1e9, -math.inf)
