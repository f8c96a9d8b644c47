"""A training step of a random-weight Qwen2.5-1.5B on one GPU: tokens/s, FLOPs utilisation, memory, the head's time.

    python -m bench.train_step [--samples 128] [--eager] [--out FILE]        --dry: the same with a tiny model, on a CPU

Through the project's own code (model.shard, batch, grpo.compute_gradients, optim; one rank), with packs like those of
configs/math_1b.yaml: 8,192 tokens, groups of 16, prompts of 60 to 160, responses of 100 to 400, no reference policy.
One pass, with prompts shared and not, with gradients summed once, in larger packs; two passes, as losses that couple
tokens have it; one pass in PyTorch. flops: run.speed.train_flops, as a run logs them. utilisation: that per second over
the GPU's peak in run.speed.PEAK_TFLOPS, 0 for another GPU. head: the same step without the blocks, 6 R D V for R rows.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

try:
    import engine  # noqa: F401
except Exception as error:  # nothing here has an engine: on a machine without vLLM the rest is measured
    print(f"no vLLM: {type(error).__name__}: {error}", flush=True)
    sys.modules.update(dict.fromkeys(("vllm", "vllm.sampling_params"), mock.MagicMock()))

import grpo
import records
from attention import PackLayout
from bench.head import ROOT, facts
from config import Config
from head import HeadOptions, LossPath
from kernels.backend import choose_backend
from model import Decoder, shard
from optim import build_optimizer, clip_grad_norm
from pack import Minibatch, finish_minibatches, make_minibatches
from support.hf.weights import sharded_parameters
from support.inputs import reader
from support.inputs.model_config import ModelConfig
from support.run.speed import PEAK_TFLOPS, train_flops
from support.run.start import choose_attention, compiles
from support.system.exits import exit_process
from support.system.ranks import Ranks, start_process_group

QWEN = {"model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_size": 1536}
QWEN |= {"vocab_size": 151936, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
QWEN |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
TOKENIZER = {151936: 151665, 515: 509}  # of a model with so many rows in its head, the tokenizer's: Qwen2.5's
TINY = QWEN | {"vocab_size": 515, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
WAYS = {  # policy.kernel_backend and the kind of loss path
    "one pass": ("auto", "one pass"),
    "two passes": ("auto", "two passes"),
    "torch": ("torch", "one pass"),
}
CASES = [  # way, share_prefix, train_mb_tokens, defer_fsdp_grad_sync
    ("one pass", True, 8192, False),
    ("one pass", False, 8192, False),
    ("one pass", True, 8192, True),
    ("one pass", True, 16384, True),
    ("two passes", True, 8192, False),
    ("torch", True, 8192, False),
]


def config_of(way: str, *overrides: str) -> Config:
    """configs/math_1b.yaml without a reference policy."""
    own = ("loss_fn.reference_policy_kl_penalty=0", f"policy.kernel_backend={WAYS[way][0]}")
    return reader.load(ROOT / "configs/math_1b.yaml", [*own, *overrides])


def head_of(way: str, model: Decoder, device: torch.device, pack_tokens: int = 8192) -> HeadOptions:
    backend, kind = WAYS[way]
    return HeadOptions(
        vocab=TOKENIZER[model.config.vocab_size],
        backend=choose_backend(backend, device.type, None, pack_tokens),
        path=LossPath(kind, zero_adv_has_grad=False),
    )


@torch.no_grad()
def random_policy(hf: dict, device: torch.device, precision: str) -> Decoder:
    """Sharded over one rank and filled on the device: nothing is downloaded, read or written."""
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(hf))
    mesh = dist.init_device_mesh(device.type, (1,))
    shard(model, mesh, precision=precision)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, param in sharded_parameters(model).items():
        if name.endswith("norm.weight"):
            param.to_local().fill_(1)
        else:
            param.to_local().normal_(0, 0.02, generator=generator)
    return model


def random_batch(cfg: Config, vocab: int, num_samples: int, ranks: Ranks, device: torch.device) -> Minibatch:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(num_samples):
        if i % 16 == 0:
            prompt = rng.integers(0, vocab, rng.integers(60, 161))
        response = rng.integers(0, vocab, rng.integers(100, 401))
        sample = records.Sample(
            prompt=i // 16,
            index=i % 16,
            row_id=0,
            prompt_ids=prompt.tolist(),
            output_ids=response,
            sampler_logps=np.full(len(response), -math.log(vocab), np.float32),
            mask=np.ones(len(response), bool),
            finish_reason="stop",
            versions=np.zeros(len(response), int),
            grade=records.Grade(reward=float(i % 2), outcome="ok"),
        )
        samples.append(sample)
    adv_B = rng.standard_normal(num_samples).tolist()
    minibatches = make_minibatches(samples, adv_B, cfg, ranks, device)
    path = LossPath("one pass", zero_adv_has_grad=False)
    finish_minibatches(minibatches, cfg, path, 0)
    return minibatches[0]


class HeadAlone(nn.Module):
    """Stands for the decoder: random hidden states, the same head on the same rows."""

    def __init__(self, model: Decoder, device: torch.device, dtype: torch.dtype):
        super().__init__()
        shape = (model.config.vocab_size, model.config.hidden_size)
        self.weight_VD = nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02)

    def forward(self, token_T, position_T, layout, pos_R, head: Callable) -> tuple:
        hidden_RD = self.weight_VD.new_empty(len(pos_R), self.weight_VD.shape[1]).normal_().requires_grad_()
        return head(hidden_RD, self.weight_VD)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        loss.backward()


def count(model: Decoder, batch: Minibatch) -> dict[str, int]:
    """Tokens, rows and FLOPs of the step."""
    tokens, rows = (sum(len(getattr(m, name)) for m in batch.micros) for name in ("token_T", "pos_R"))
    assert rows == sum(micro.num_grad_rows for micro in batch.micros), "no advantage is 0"
    head = 6 * rows * model.config.hidden_size * model.config.vocab_size
    return {"tokens": tokens, "rows": rows, "flops": train_flops(model.config, batch.micros), "head_flops": head}


def seconds(run: Callable, rounds: int) -> float:
    """Median, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--eager", action="store_true", help="as with policy.compile=false")
    parser.add_argument("--out", type=Path, help="a line of JSON is added for each way")
    args = parser.parse_args()
    ranks, device = start_process_group(tp_size=1)
    cfg = config_of("one pass")
    model = random_policy(TINY if args.dry else QWEN, device, cfg.policy.precision)
    compiled = compiles(False if args.eager else cfg.policy.compile, device.type)
    if compiled:
        model.compile_blocks()
    peak = 1e12 * PEAK_TFLOPS.get(torch.cuda.get_device_name(), 0) if device.type == "cuda" else 0
    print(choose_attention(device, getattr(torch, cfg.policy.precision)))
    head_alone = HeadAlone(model, device, getattr(torch, cfg.policy.precision))
    vocab = TOKENIZER[model.config.vocab_size]
    optimizer = build_optimizer(model, cfg.policy.optimizer)
    packing = "policy.sequence_packing"
    for way, share_prefix, pack_tokens, defers in CASES:
        cfg = config_of(way, f"{packing}.share_prefix={share_prefix}", f"{packing}.train_mb_tokens={pack_tokens}")
        batch = random_batch(cfg, vocab, args.samples, ranks, device)
        model.defers_sync = defers
        work = count(model, batch)
        head_options = head_of(way, model, device, pack_tokens)

        def step(cfg=cfg, batch=batch, head_options=head_options) -> None:
            grpo.compute_gradients(model, head_options, batch, cfg)
            clip_grad_norm(model, cfg.policy.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def step_of_head(cfg=cfg, batch=batch, head_options=head_options) -> None:
            grpo.compute_gradients(head_alone, head_options, batch, cfg)
            head_alone.zero_grad(set_to_none=True)

        line = {"way": way, "share_prefix": share_prefix, "pack_tokens": pack_tokens, "defers_sync": defers}
        line |= {"num_packs": len(batch.micros), "compiled": compiled} | work
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        line["seconds"] = seconds(step, args.rounds)
        if device.type == "cuda":
            line["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
        line["head_seconds"] = seconds(step_of_head, args.rounds)
        pack = batch.micros[0]  # the layout of which the host makes once, for all forwards
        of_pack = (pack.cu_seqlens, pack.prefix_S, len(pack.token_T), device)
        line["layout_ms"] = 1e3 * seconds(lambda of_pack=of_pack: PackLayout.of(*of_pack), 20)
        line["tokens_per_second"] = work["tokens"] / line["seconds"]
        line["utilisation"] = peak and work["flops"] / line["seconds"] / peak
        line["head_utilisation"] = peak and work["head_flops"] / line["head_seconds"] / peak
        text = json.dumps(line | facts())
        print(text, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n")
    exit_process(0)


if __name__ == "__main__":
    main()
