"""Whether the kernels are right on this GPU, at real sizes: PASS or FAIL lines with figures; exit code 1 if one fails.

    python -m bench.gpu_check            --dry: tiny sizes on a CPU (with TRITON_INTERPRET=1 the Triton kernels)

The tests hold the same on a CPU, in Triton's interpreter; here it is the compiled kernels, the chunks of production,
offsets beyond 2^31, varlen_attn, and bfloat16 tensor cores. Errors against float64: relative (Frobenius) for gradients.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import attention
from bench.head import facts
from bench.head_cases import LOGP, OURS, OURS_SMALL, call, exact_part, heads, make_inputs, oracle, ours, parts_of
from bench.train_step import QWEN, TINY, TOKENIZER, WAYS, config_of, head_of, random_batch, random_policy
from config import LossConfig
from grpo import compute_gradients
from head import HeadOptions, LossPath, linear_loss
from kernels import linear_logp
from kernels.backend import KernelBackend
from loss import policy_loss
from support.hf.weights import sharded_parameters
from support.run.start import choose_attention
from support.system.exits import exit_process
from support.system.ranks import Ranks, start_process_group

EVERY_TERM = {"ratio_clip_c": 3.0, "use_importance_sampling_correction": True, "entropy_coef": 0.1}
EVERY_TERM |= {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}
EVERY_TERM |= {"reference_policy_kl_penalty": 0.1, "positive_example_nll_weight": 0.1}

failed: list[str] = []


def check(name: str, value: float, limit: float) -> None:
    """NaN fails."""
    holds = value <= limit
    failed.extend([] if holds else [name])
    print(f"{'PASS' if holds else 'FAIL'} {name}: {value:.3g} (at most {limit:g})", flush=True)


def relative(ours: Tensor, reference: Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def check_head(shape: tuple[int, ...], device: str, dtype: torch.dtype, backend: str) -> None:
    """Both operations against float64, all rows; and each twice, to the bit. shape: (N, D, V) or with the vocabulary,
    beyond which logits are near 300."""
    x = make_inputs(*shape[:3], device, dtype, *shape[3:])
    with torch.no_grad():
        x.weight_VD[x.vocab :].neg_()
    exact, narrow = oracle(x), 3e-3 if dtype == torch.bfloat16 else 1e-5
    where = "x".join(map(str, shape))
    for name in (OURS, OURS_SMALL, LOGP):
        forward = heads(backend)[name][1]()
        loss, logp_N, grad_ND, grad_VD = first = call(forward, x, True)
        check(f"{name} {where}: logp, mean", (logp_N - exact["logp"]).abs().mean().item(), 1e-4)
        check(f"{name} {where}: logp, largest", (logp_N - exact["logp"]).abs().max().item(), 1e-3)
        check(f"{name} {where}: loss", (loss - exact["GRPO loss"]).abs().item(), 1e-4)
        check(f"{name} {where}: dX", relative(grad_ND, exact["GRPO dX"]), narrow)
        check(f"{name} {where}: dW", relative(grad_VD, exact["GRPO dW"]), narrow)
        differ = sum((a != b).sum().item() for a, b in zip(first, call(forward, x, True), strict=True))
        check(f"{name} {where}: numbers that a second run changes", differ, 0)
    with torch.no_grad():
        options = {"vocab": x.vocab, "return_entropy": True, "backend": KernelBackend(backend)}
        entropy_N = linear_logp(x.hidden_ND, x.weight_VD, x.target_N, **options)[1]
    check(f"linear_logp {where}: entropy, largest", (entropy_N - exact["entropy"]).abs().max().item(), 1e-3)


def check_every_term(shape: tuple[int, int, int], device: str, dtype: torch.dtype, backend: str) -> None:
    """Every term of the loss at once, entropy bonus included, against the float64 reference."""
    x, generator = make_inputs(*shape, device, dtype), torch.Generator(device).manual_seed(1)
    noise_KN = 0.1 * torch.rand(2, shape[0], generator=generator, device=device)
    rows = {"old_logp_R": x.old_N, "sampler_logp_R": x.old_N + noise_KN[0], "ref_logp_R": x.old_N - noise_KN[1]}
    num_rows, row_N = shape[0], torch.arange(shape[0], device=device)
    pack = {"mask_R": row_N < num_rows * 3 // 4, "seq_R": row_N // 64, "positive_R": x.target_N % 2 == 1}
    pack |= {name: num_rows for name in ("num_valid_tokens", "num_valid_seqs", "num_positive_tokens")}
    found = {}
    for kind, wide in (("one pass", torch.float64), ("one pass", dtype), ("two passes", dtype)):
        hidden_ND, weight_VD = (t.detach().to(wide).requires_grad_() for t in (x.hidden_ND, x.weight_VD))
        tensors = {
            name: t.to(torch.promote_types(wide, torch.float32)) for name, t in (rows | {"adv_R": x.adv_N}).items()
        }
        loss_of = partial(policy_loss, **tensors, **pack, cfg=LossConfig(**EVERY_TERM))
        options = HeadOptions(1.3, backend=KernelBackend(backend, 1024), path=LossPath(kind))
        inputs = (hidden_ND, weight_VD, x.target_N, loss_of, options)
        loss, _ = linear_loss(*inputs, num_grad_rows=num_rows * 3 // 4)
        found[kind, wide] = [loss.detach(), *torch.autograd.grad(loss, (hidden_ND, weight_VD))]
    narrow = 3e-3 if dtype == torch.bfloat16 else 1e-5
    exact = found.pop(("one pass", torch.float64))
    for (kind, _), own in found.items():
        for name, limit, a, b in zip(("loss", "dX", "dW"), (1e-4, narrow, narrow), own, exact, strict=True):
            error = relative(a, b) if name[0] == "d" else (a - b).abs().max().item()
            check(f"linear_loss, {kind}, every term, {'x'.join(map(str, shape))}: {name}", error, limit)


def check_far_rows(shape: tuple[int, int, int], device: str, dtype: torch.dtype, backend: str) -> None:
    """One chunk of more than 2^31 logits: its last rows."""
    x = make_inputs(*shape, device, dtype)
    _, logp_N, grad_ND, _ = call(ours(KernelBackend(backend, shape[0])), x, True)
    *_, rows = parts_of(shape[0])
    _, exact_logp, _, exact_dX, _ = exact_part(x, rows, "GRPO")
    where = f"{shape[0] * shape[2] / 2**31:.2f} x 2^31 logits, last {len(exact_logp)} rows"
    check(f"{where}: logp", (logp_N[rows] - exact_logp).abs().max().item(), 1e-3)
    check(f"{where}: dX", relative(grad_ND[rows], exact_dX), 3e-3 if dtype == torch.bfloat16 else 1e-5)


def check_attention(device: torch.device, lengths: list[int], prefixes: list[int]) -> None:
    """A pack through varlen_attn in bfloat16 against SDPA, segment by segment, in float32: output and gradients."""
    generator, total = torch.Generator(device).manual_seed(0), sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    layout = attention.PackLayout.of(ends, torch.tensor(prefixes), total, device)
    wide = [torch.randn(total, heads, 128, generator=generator, device=device) for heads in (12, 2, 2, 12)]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        *qkv, weight = (x.bfloat16().to(dtype) for x in wide)
        qkv = [x.requires_grad_() for x in qkv]
        out = attention.packed_attention(*qkv, layout)
        found.append([out, *torch.autograd.grad((out * weight.flatten(1)).sum(), qkv)])
    kind = "varlen_attn" if attention.uses_flash_attention(device.type, torch.bfloat16) else "SDPA"
    for name, narrow, exact in zip(("output", "dQ", "dK", "dV"), *found, strict=True):
        shared = "whole sequences" if max(prefixes) < 0 else "a shared prompt"
        check(f"packed attention, {kind} in bfloat16, {shared}: {name}", relative(narrow, exact), 2e-2)


def check_step(ranks: Ranks, device: torch.device, dry: bool) -> None:
    """The gradient of a training step, sharded over one rank, tied and untied: each way against the PyTorch head, and
    with compiled blocks, which round less often."""
    for tied in (True, False):
        hf = (TINY if dry else QWEN | {"num_hidden_layers": 2}) | {"tie_word_embeddings": tied}
        policy = random_policy(hf, device, "bfloat16")
        batch = random_batch(config_of("one pass"), TOKENIZER[hf["vocab_size"]], 16, ranks, device)
        gradient = {}
        for name in [*WAYS] if dry else [*WAYS, "compiled"]:
            way = name
            if name == "compiled":
                way = "torch"
                policy.compile_blocks()
            compute_gradients(policy, head_of(way, policy, device), batch, config_of(way))
            shards = {param: tensor.grad.to_local() for param, tensor in sharded_parameters(policy).items()}
            gradient[name] = torch.cat([shard.flatten() for shard in shards.values()])
            head = "model.embed_tokens.weight" if tied else "lm_head.weight"
            gradient[f"{name}, {head}"] = shards[head].flatten()
            policy.zero_grad(set_to_none=True)
        for name in gradient:
            way = name.split(",")[0]
            if way != "torch":
                error = relative(gradient[name], gradient[name.replace(way, "torch")])
                limit = 3e-2 if way == "compiled" else 1e-2
                check(f"step, {'tied' if tied else 'untied'}, {name}: gradient", error, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    ranks, device = start_process_group(tp_size=1)
    print(facts(), choose_attention(device, torch.bfloat16))
    backend = "triton" if not dry or os.environ.get("TRITON_INTERPRET") == "1" else "torch"
    how = (device.type, torch.float32 if dry else torch.bfloat16, backend)
    lengths = [7, 5, 5, 1, 12, 3] if dry else [700, 33, 700, 1, 2048, 128]
    checks: list[tuple[str, Callable]] = [
        ("head", lambda: check_head((66, 64, 515, 509) if dry else (8196, 2048, 151936, 151665), *how)),
        ("head of other sizes", lambda: check_head((34, 72, 300) if dry else (1030, 1536, 128256), *how)),
        ("every term", lambda: check_every_term((64, 64, 515) if dry else (4096, 2048, 151936), *how)),
        ("far rows", lambda: check_far_rows((10, 64, 515) if dry else (16384, 1536, 151936), *how)),
        ("attention", lambda: check_attention(device, lengths, [-1] * len(lengths))),
        ("attention to shared prompts", lambda: check_attention(device, lengths, [-1, -1, 0, 0, 1, -1])),
        ("step", lambda: check_step(ranks, device, dry)),
    ]
    for name, run in checks:
        try:
            run()
        except Exception as error:  # a check that cannot run has failed; the others are still told
            failed.append(name)
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print("FAIL: " + "; ".join(failed) if failed else "PASS: all", flush=True)
    exit_process(1 if failed else 0)


if __name__ == "__main__":
    main()
