"""Where the gap between the sampler's and the trainer's log-probabilities comes from in bfloat16, cause by cause.

    python -m bench.gap MODEL_FOLDER --samples FOLDER [--out FILE]        about 6 minutes on one core

An engine for each row of SAMPLERS, in a process of its own, samples from the folder's weights. Every sample is scored
    reference   by the decoder in float32, from the same weights rounded to bfloat16
    trainer     by the decoder as a run in bfloat16 has it: FSDP2's mixed precision, one rank
and, of the first sampler's samples, by the reference with one of POINTS rounded to bfloat16, and with all of them. The
gaps are those of the metrics: |log p - log p'| of each sampled token (mean, largest), gen_kl_error,
token_mult_prob_error. A gap to the reference is the rounding of one side; sampler against trainer is what a run logs.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import model
from batch import Minibatch, make_minibatches
from bench.head import ROOT, facts
from check import reader
from config import Config
from data import Sample
from hf.tokenizer import Tokenizer
from loss import kl_estimate
from model import Decoder, load_policy
from system.exits import exit_process
from system.ranks import Ranks, start_process_group

SAMPLERS = {
    "bfloat16": "the engine of a run in bfloat16",
    "logits in bfloat16": "the same, with vLLM's own head: its logits are rounded",
    "residual in float32": "the first, with vLLM's residual stream and norms in float32",
    "float32": "the engine of a run in float32",
}
POINTS = {  # -> who rounds there
    "q, k, v": "both",
    "rope cos, sin": "sampler",
    "rope products": "neither",
    "rope result": "both",
    "softmax": "sampler",
    "attention": "both",
    "o_proj": "both",
    "gate, up": "both",
    "silu": "trainer",
    "silu * up": "both",
    "down_proj": "both",
    "residual": "sampler",
    "norm before its weight": "sampler",
    "norm": "both",
    "logits": "neither",
}
RESULTS = {"q_proj": "q, k, v", "k_proj": "q, k, v", "v_proj": "q, k, v", "o_proj": "o_proj"}  # of matmuls
RESULTS |= {"gate_proj": "gate, up", "up_proj": "gate, up", "down_proj": "down_proj"}


def config_of(folder: Path, precision: str, tokens: int) -> Config:
    own = (f"policy.model_name={folder}", f"policy.precision={precision}", f"policy.generation.max_new_tokens={tokens}")
    return reader.load(ROOT / "configs/smoke.yaml", [*own, "policy.max_total_sequence_length=256"])


def questions(count: int) -> list[str]:
    """Of several kinds, so that replies are short numbers and sentences."""
    rng = np.random.default_rng(0)
    kinds = (
        "How many cents are {} dollars and {} cents?",
        "A shop has {} apples and sells {} of them. How many are left?",
        "Name {} animals, then {} colors.",
        "Write a sentence about a train that is {} minutes late and has {} passengers.",
    )
    return [kinds[i % len(kinds)].format(*sorted(rng.integers(2, 40, 2).tolist(), reverse=True)) for i in range(count)]


# ------------------------------------------------------------------------------------------------------------- sampling


def patch_vllm(kind: str) -> None:
    """Makes one part of vLLM compute in another precision."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def norm(self, x, residual=None):
        total = x.float() if residual is None else x.float() + residual
        normed = F.rms_norm(total, x.shape[-1:], self.weight.float(), self.variance_epsilon).to(x.dtype)
        return normed if residual is None else (normed, total)

    if kind == "residual in float32":
        RMSNorm.forward_native = norm
    if kind == "logits in bfloat16":
        LogitsProcessor._apply_head = lambda self, head, x, bias: head.quant_method.apply(head, x, bias=bias)


def sample(kind: str, args: argparse.Namespace) -> None:
    """Writes to args.samples what the engine samples, and the seconds that took."""
    from engine import Engine, SamplingOptions, sync_weights

    patch_vllm(kind)
    _, device = start_process_group(tp_size=1)
    cfg = config_of(args.folder, "float32" if kind == "float32" else "bfloat16", args.tokens)
    tokenizer = Tokenizer(args.folder)
    mesh = dist.init_device_mesh(device.type, (1,))
    policy = load_policy(args.folder, device=device, mesh=mesh, precision=cfg.policy.precision)
    engine = Engine(args.folder, tokenizer, cfg)
    sync_weights(policy, engine, 0)
    prompts = [tokenizer.render([{"role": "user", "content": text}]) for text in questions(args.prompts)]
    seeds = range(args.prompts * args.group)
    jobs = [prompt for prompt in prompts for _ in range(args.group)]
    seconds = []
    for _ in range(3):  # the first one warms up
        start = time.perf_counter()
        replies = engine.generate(jobs, seeds, SamplingOptions(1.0, args.tokens))
        seconds.append(time.perf_counter() - start)
        sync_weights(policy, engine, 0)  # or prompts would be in the prefix cache
    rows = [{"prompt": p, "ids": r.ids.tolist(), "logps": r.logps.tolist()} for p, r in zip(jobs, replies, strict=True)]
    (args.samples / f"{kind}.json").write_text(json.dumps({"seconds": min(seconds[1:]), "rows": rows}))


def sampled_batch(rows: list[dict], group: int, cfg: Config, ranks: Ranks, device: torch.device) -> Minibatch:
    samples = []
    for i, row in enumerate(rows):
        ids, logps = np.asarray(row["ids"]), np.asarray(row["logps"], np.float32)
        mask, versions = np.ones(len(ids), bool), np.zeros(len(ids), np.int64)
        samples.append(Sample(i // group, i % group, 0, row["prompt"], ids, logps, mask, "stop", versions))
    return make_minibatches(samples, [0.0] * len(samples), cfg, ranks, device)[0]


# -------------------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def scores(decoder: Decoder, batch: Minibatch, logprob_fn: Callable | None = None) -> torch.Tensor:
    return torch.cat([decoder(*micro.model_inputs, logprob_fn=logprob_fn)[0] for micro in batch.micros])


@contextmanager
def rounding(points: set[str], reference: Decoder) -> Iterator[None]:
    """Within, `reference`, which is in float32, rounds to bfloat16 at these points."""

    def at(point: str, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float() if point in points else x

    def norm(self, x):
        return at("norm", self.weight * at("norm before its weight", F.rms_norm(x, x.shape[-1:], eps=self.eps)))

    def block(self, x, cos, sin, layout):
        query_key_value = self.self_attn.project(self.input_layernorm(x), cos, sin)
        x = at("residual", x + self.self_attn.o_proj(model.packed_attention(*query_key_value, layout)))
        return at("residual", x + self.mlp(self.post_attention_layernorm(x)))

    def mlp(self, x):
        return self.down_proj(at("silu * up", at("silu", F.silu(self.gate_proj(x))) * self.up_proj(x)))

    def rope(x, cos, sin):
        (a, b), cos, sin = x.chunk(2, -1), at("rope cos, sin", cos), at("rope cos, sin", sin)
        a_cos, b_sin, b_cos, a_sin = (at("rope products", product) for product in (a * cos, b * sin, b * cos, a * sin))
        return at("rope result", torch.cat((a_cos - b_sin, b_cos + a_sin), -1))

    def attention(query, key, value, attn_mask, is_causal, enable_gqa):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        weights = query @ key.mT / query.shape[-1] ** 0.5
        sees = torch.ones(weights.shape[-2:], dtype=torch.bool).tril() if is_causal else attn_mask
        exp = weights.masked_fill(~sees, -torch.inf)
        exp = (exp - exp.amax(-1, keepdim=True)).exp()  # rounded, then multiplied, then divided by their sum
        return at("softmax", exp) @ value / exp.sum(-1, keepdim=True)

    patches = [patch.object(model.RMSNorm, "forward", norm), patch.object(model.Block, "_forward", block)]
    patches += [patch.object(model.MLP, "forward", mlp), patch.object(model, "apply_rope", rope)]
    patches += [patch.object(F, "scaled_dot_product_attention", attention)]
    with ExitStack() as stack:
        for part in patches:
            stack.enter_context(part)
        for name, module in reference.named_modules():
            point = RESULTS.get(name.split(".")[-1])
            if point:
                hook = module.register_forward_hook(lambda _, inputs, out, point=point: at(point, out))
                stack.callback(hook.remove)
            if point == "o_proj":
                hook = module.register_forward_pre_hook(lambda _, inputs: at("attention", inputs[0]))
                stack.callback(hook.remove)
        yield


def rounded_logits_logp(hidden_RD, weight_VD, target_R, vocab, **_) -> tuple[torch.Tensor]:
    logits_RV = (hidden_RD @ weight_VD[:vocab].T).bfloat16().float()
    return (logits_RV.log_softmax(-1).gather(1, target_R[:, None])[:, 0],)


def gap(a_R: torch.Tensor, b_R: torch.Tensor) -> dict[str, float]:
    """As loss.py has them: of log-probabilities that stand for the sampler's, and for the trainer's."""
    gap_R = (a_R - b_R).double()
    return {
        "mean": gap_R.abs().mean().item(),
        "max": gap_R.abs().max().item(),
        "gen_kl_error": kl_estimate(-gap_R, "k3").mean().item(),
        "token_mult_prob_error": gap_R.abs().exp().mean().item(),
    }


def print_row(name: str, row: dict[str, float]) -> None:
    numbers = [row["mean"], row["max"], row["gen_kl_error"], row["token_mult_prob_error"]]
    print(f"{name:52}" + "".join(f"{number:12.3g}" for number in numbers[:3]) + f"{numbers[3]:10.5f}", flush=True)


def measure(args: argparse.Namespace, samples: Path) -> dict[str, dict]:
    """Name of a row -> its gaps."""
    ranks, device = start_process_group(tp_size=1)
    cfg, vocab = config_of(args.folder, "bfloat16", args.tokens), Tokenizer(args.folder).vocab_size
    reference = load_policy(args.folder, device=device)
    for param in reference.parameters():
        param.data = param.data.bfloat16().float()
    mesh = dist.init_device_mesh(device.type, (1,))
    trainer = load_policy(args.folder, device=device, mesh=mesh, precision="bfloat16")
    reference.vocab_limit = trainer.vocab_limit = vocab
    rows = {}

    def add(name: str, a_R: torch.Tensor, b_R: torch.Tensor, **more: float) -> None:
        rows[name] = gap(a_R, b_R) | more
        print_row(name, rows[name])

    for kind in SAMPLERS:
        drawn = json.loads((samples / f"{kind}.json").read_text())
        batch = sampled_batch(drawn["rows"], args.group, cfg, ranks, device)
        sampler_R = torch.cat([micro.sampler_logp_R for micro in batch.micros])
        exact_R, trainer_R = scores(reference, batch), scores(trainer, batch)
        if kind == "bfloat16":
            add("trainer against reference", trainer_R, exact_R)
        add(f"sampler ({kind}) against reference", sampler_R, exact_R, seconds=drawn["seconds"])
        add(f"sampler ({kind}) against trainer", sampler_R, exact_R if kind == "float32" else trainer_R)
    few = json.loads((samples / "bfloat16.json").read_text())["rows"][: args.points * args.group]
    batch = sampled_batch(few, args.group, cfg, ranks, device)
    exact_R = scores(reference, batch)
    sides = {side: {p for p, of in POINTS.items() if of in (side, "both")} for side in ("trainer", "sampler")}
    sets = {"none": set()} | {p: {p} for p in POINTS} | {f"all of the {side}'s": sides[side] for side in sides}
    for name, points in sets.items():
        with rounding(points, reference):
            logp_R = scores(reference, batch, rounded_logits_logp if "logits" in points else None)
        add(f"rounded: {name} ({POINTS.get(name, '-')})", logp_R, exact_R)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--points", type=int, default=8, help="prompts whose samples the points are measured on")
    parser.add_argument("--samples", type=Path, required=True, help="folder for the samples; those there are kept")
    parser.add_argument("--sample", choices=SAMPLERS, help="only draw this sampler's samples")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.samples.mkdir(parents=True, exist_ok=True)
    if args.sample:
        sample(args.sample, args)
        exit_process(0)
    for kind in SAMPLERS:
        if not (args.samples / f"{kind}.json").exists():
            command = [sys.executable, "-m", "bench.gap", *sys.argv[1:], "--sample", kind]
            subprocess.run(command, check=True, cwd=ROOT)
    rows = measure(args, args.samples)
    if args.out:
        args.out.write_text(json.dumps({"rows": rows} | facts(), indent=1) + "\n")
    exit_process(0)


if __name__ == "__main__":
    main()
