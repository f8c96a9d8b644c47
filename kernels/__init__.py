"""The output layer without logits of all rows in memory, in Triton or PyTorch: tensors only.

    logp.linear_logp   log-probabilities and entropies, differentiable: the interface of this package

logp.py has the mathematics, reference.py the same in four lines with all logits, logits.py what logits are, chunks.py
a chunk of them and what is computed from it, row_kernels.py Triton's kernels.

In examples/naive.py this is `logp_GTV = decode(w, config, token_GT)[:, :-1].log_softmax(-1)`.

Imports no torch: --check, which has none, imports kernels.sizes.
"""
