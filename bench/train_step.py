"""A training step of a random-weight Qwen2.5-1.5B on one GPU: tokens/s, FLOPs utilisation, memory, the head's time.

    python -m bench.train_step [--samples 128] [--eager] [--out FILE]        --dry: the same with a tiny model, on a CPU

Through the project's own code (model.shard, batch, grpo.compute_gradients, optim; one rank), with packs like those of
configs/math_1b.yaml: 8,192 tokens, groups of 16, prompts of 60 to 160, responses of 100 to 400, no reference policy.
The cases of a group take turns, step by step: A B A B. One pass and two, as losses that couple tokens have it; larger
packs; the step as it was until 2026-11-28 (`set_way`), with the loss as it is in place of compiled kernels; prompts
shared and not; one pass in PyTorch. flops: run.speed.train_flops, as a run logs them. utilisation: that per second over
base.plan.gpus.PEAK_FLOPS of the GPU, 0 for another GPU. head: the same step without the blocks, 6 R D V for R rows.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

try:
    import engine  # noqa: F401
except Exception as error:  # nothing here has an engine: on a machine without vLLM the rest is measured
    print(f"no vLLM: {type(error).__name__}: {error}", flush=True)
    sys.modules.update(dict.fromkeys(("vllm", "vllm.sampling_params"), mock.MagicMock()))

import grpo
import records
from attention import PackLayout
from base.hf.folder import from_hf
from base.hf.weights import sharded_parameters
from base.inputs import reader
from base.plan.gpus import PEAK_FLOPS
from base.system.exits import exit_process
from base.system.optimizer import Optimizer
from base.system.ranks import Ranks, start_process_group
from bench.head import ROOT, facts
from compiled_loss import compiled_loss
from config import Config, Recompute
from head import HeadOptions, LossOptions, LossPath
from kernels.backend import choose_backend
from loss import policy_loss
from model import Decoder, shard
from optim import build_optimizer, clip_grad_norm
from pack import Minibatch, finish_minibatches, make_minibatches
from run.build import choose_attention, compiles
from run.speed import train_flops

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


class Case(NamedTuple):
    """as_before: see `set_way`."""

    way: str
    share_prefix: bool = True
    pack_tokens: int = 8192
    as_before: bool = False


GROUPS = [
    [Case("one pass", pack_tokens=16384), Case("two passes", pack_tokens=16384)],
    [Case("one pass"), Case("two passes"), Case("one pass", as_before=True)],
    [Case("one pass", share_prefix=False), Case("torch")],
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
        loss=LossOptions(path=LossPath(kind, zero_adv_has_grad=False)),
    )


@torch.no_grad()
def random_policy(hf: dict, device: torch.device, precision: str, recompute: Recompute = False) -> Decoder:
    """Sharded over one rank and filled on the device: nothing is downloaded, read or written."""
    with torch.device("meta"):
        model = Decoder(from_hf(hf), keeps_gathered=True, recompute=recompute)
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


def set_way(model: Decoder, as_before: bool) -> None:
    """Gathered weights stay and gradients are summed once, as the program has it on one rank; or as it was until
    2026-11-28: a block is gathered twice for each pack, and its gradient divided by 1 and copied."""
    model.keeps_gathered = not as_before
    model.defers_sync = not as_before
    for block in model.model.layers:
        block.set_reshard_after_forward(as_before, recurse=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0 if as_before else None)


def random_batch(cfg: Config, vocab: int, num_samples: int, ranks: Ranks, device: torch.device) -> Minibatch:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(num_samples):
        if i % 16 == 0:
            prompt = rng.integers(0, vocab, rng.integers(60, 161))
        response = rng.integers(0, vocab, rng.integers(100, 401))
        tokens = records.make_tokens(response, logp=-math.log(vocab), mask=True)
        sample = records.Sample(
            prompt=i // 16,
            index=i % 16,
            row_id=0,
            sequences=[records.TokenSequence(prompt.tolist(), tokens)],
            grade=records.Grade(reward=float(i % 2), outcome="ok"),
            finish_reason="stop",
        )
        samples.append(sample)
    adv_B = rng.standard_normal(num_samples).tolist()
    minibatches = make_minibatches(samples, adv_B, cfg, ranks, device)
    path = LossPath("one pass", zero_adv_has_grad=False)
    finish_minibatches(minibatches, path, 0)
    return minibatches[0]


class HeadAlone(nn.Module):
    """Stands for the decoder: random hidden states, the same head on the same rows."""

    def __init__(self, model: Decoder, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.config = model.config
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


def seconds(run: Callable) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def median_seconds(run: Callable, rounds: int) -> float:
    """After one that warms up."""
    times = [seconds(run) for _ in range(rounds + 1)]
    return statistics.median(times[1:])


@dataclass
class Step:
    """A step of a case, measured again and again, in turns with others."""

    case: Case
    cfg: Config
    batch: Minibatch
    head_options: HeadOptions
    model: Decoder
    head_alone: HeadAlone
    optimizer: Optimizer
    times: list[float] = field(default_factory=list)
    head_times: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def measure(self, is_warm: bool) -> None:
        """One whole step, and one of the head alone."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        set_way(self.model, self.case.as_before)
        step_seconds = seconds(self.run)
        if torch.cuda.is_available():
            self.peak_bytes = torch.cuda.max_memory_allocated()
        head_seconds = seconds(self.run_head)
        if is_warm:
            self.times.append(step_seconds)
            self.head_times.append(head_seconds)

    def run(self) -> None:
        grpo.compute_gradients(self.model, self.head_options, self.batch, self.cfg)
        clip_grad_norm(self.model, self.cfg.policy.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run_head(self) -> None:
        grpo.compute_gradients(self.head_alone, self.head_options, self.batch, self.cfg)
        self.head_alone.zero_grad(set_to_none=True)

    def line(self, peak: float) -> dict:
        """What was measured. peak: the GPU's FLOPs a second, or 0."""
        work = count(self.model, self.batch)
        micro = self.batch.micros[0]  # the layout of which the host makes once, for all forwards
        of_pack = (micro.layout.bounds, micro.layout.prefixes, len(micro.token_T), micro.token_T.device)
        step_seconds = statistics.median(self.times)
        head_seconds = statistics.median(self.head_times)
        line = self.case._asdict() | {"num_packs": len(self.batch.micros)} | work
        line["seconds"] = step_seconds
        line["all_seconds"] = self.times
        line["peak_GiB"] = self.peak_bytes / 2**30
        line["head_seconds"] = head_seconds
        line["layout_ms"] = 1e3 * median_seconds(lambda: PackLayout.of(*of_pack), 20)
        line["tokens_per_second"] = work["tokens"] / step_seconds
        line["utilisation"] = peak and work["flops"] / step_seconds / peak
        line["head_utilisation"] = peak and work["head_flops"] / head_seconds / peak
        return line


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
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name(), 0) if device.type == "cuda" else 0
    print(choose_attention(device, getattr(torch, cfg.policy.precision)))
    head_alone = HeadAlone(model, device, getattr(torch, cfg.policy.precision))
    vocab = TOKENIZER[model.config.vocab_size]
    optimizer = build_optimizer(model, cfg.policy.optimizer)
    loss = policy_loss
    if compiled:
        loss, kernels = compiled_loss(policy_loss, cfg.loss_fn, device, has_old=False, has_ref=False)
        print(f"loss: {kernels}", flush=True)
    packing = "policy.sequence_packing"
    for group in GROUPS:
        steps = []
        for case in group:
            words = (f"{packing}.share_prefix={case.share_prefix}", f"{packing}.train_mb_tokens={case.pack_tokens}")
            cfg = config_of(case.way, *words)
            batch = random_batch(cfg, vocab, args.samples, ranks, device)
            head_options = head_of(case.way, model, device, case.pack_tokens)
            if not case.as_before:
                head_options = replace(head_options, loss=replace(head_options.loss, call=loss))
            steps.append(Step(case, cfg, batch, head_options, model, head_alone, optimizer))
        for turn in range(args.rounds + 1):
            for step in steps:
                step.measure(is_warm=turn > 0)
        for step in steps:
            line = step.line(peak) | {"compiled": compiled}
            text = json.dumps(line | facts())
            print(text, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(text + "\n")
    exit_process(0)


if __name__ == "__main__":
    main()
