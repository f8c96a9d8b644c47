"""The engine in the trainer's process on this GPU, smoke task: memory asleep and awake, weight sync, seeds, speed.

    python -m bench.gpu_smoke [--out FILE]       --dry: on a CPU, where sleep does nothing

Each parameter is perturbed alone: the samples then in the engine must no longer agree with the trainer, and after the
sync new ones must. bfloat16 on both sides, eager (no CUDA graphs); the model is examples/arithmetic/starter.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

import engine as engine_module
import model
from base.hf.weights import sharded_parameters, sync_weights
from base.inputs import reader
from base.inputs.run_inputs import read_inputs
from base.system.exits import exit_process
from base.system.ranks import Ranks, start_process_group
from bench.head import ROOT, facts
from gap import check_canary
from head import HeadOptions, response_logps
from pack import make_minibatches
from records import Engine, SamplingOptions
from rollout import sample_step
from run.build import build, build_head

failed: list[str] = []


def check(name: str, value: float, limit: float) -> None:
    """NaN fails."""
    holds = value <= limit
    if not holds:
        failed.append(name)
    print(f"{'PASS' if holds else 'FAIL'} {name}: {value:.3g} (at most {limit:g})", flush=True)


def used_gib() -> float:
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


@torch.no_grad()
def gap(policy: model.Decoder, head_options: HeadOptions, samples: list, cfg, ranks: Ranks, device) -> float:
    """Mean |sampler - trainer| logp."""
    minibatch = make_minibatches(samples, [1.0] * len(samples), cfg, ranks, device)[0]
    gaps = []
    for micro in minibatch.micros:
        logp_R, _ = response_logps(policy, micro.model_inputs, micro.target_R, head_options)
        gaps.append((logp_R - micro.sampler_logp_R).abs())
    return torch.cat(gaps).mean().item()


def check_sync(policy, engine, sample, gap_of, limit: float) -> None:
    """`sample`: new ones from the engine; gap_of: theirs."""
    base, generator = sample(), torch.Generator().manual_seed(0)
    check("logp gap after the first sync", gap_of(base), limit)
    stale, fresh = [], []
    for param in sharded_parameters(policy).values():
        local = param.detach().to_local()
        before = local.clone()
        size = 3 if local.dim() == 1 else 1  # far more than bfloat16 blurs: norms of short sequences matter little
        local.add_((torch.randn(local.shape, generator=generator) * size).to(local))
        stale.append(gap_of(base))
        sync_weights(policy, engine, 0)  # the version that the first step samples from
        fresh.append(gap_of(sample()))
        local.copy_(before)
    check(f"logp gap after a sync, {len(fresh)} parameters perturbed one by one, largest", max(fresh), limit)
    shares = [new / old for new, old in zip(fresh, stale, strict=True)]
    check("its share of the gap before the sync, largest", max(shares), 0.5)


def speed(engine: Engine, prompts: list[list[int]], seeds: list[int], options: SamplingOptions) -> tuple[float, list]:
    """Tokens per second of the second of two calls, and what both sampled. Neither meets the other's prefixes, with
    which matmuls would have other sizes and bfloat16 would round otherwise."""
    both = []
    for _ in range(2):
        assert engine.llm.reset_prefix_cache()
        start = time.perf_counter()
        both.append([completion.ids for completion in engine.generate(prompts, seeds, options)])
        elapsed = time.perf_counter() - start
    return sum(map(len, both[1])) / elapsed, both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, help="one line of JSON is added")
    args = parser.parse_args()
    words = [f"logger.log_dir={tempfile.mkdtemp()}", "policy.generation.vllm_cfg.enforce_eager=true"]
    words += [] if args.dry else ["policy.precision=bfloat16", "policy.generation.vllm_cfg.gpu_memory_utilization=0.1"]
    cfg = reader.load(ROOT / "configs/smoke.yaml", words)
    given = read_inputs(cfg)
    ranks, device = start_process_group(tp_size=1)
    line: dict = facts() | {"used_GiB_before": used_gib()}
    head_options = build_head(cfg, given, device)
    policy, sampler = build(cfg, given, ranks, device)
    engine = sampler.engine
    line["model_runner"] = engine.runner
    line["used_GiB_asleep"] = used_gib()
    sync_weights(policy, engine, 0)
    line["used_GiB_awake"] = used_gib()
    engine.sleep()
    line["used_GiB_asleep_again"] = used_gib()
    sync_weights(policy, engine, 0)
    line["used_GiB_awake_again"] = used_gib()
    if not args.dry:
        check("memory in use asleep, as a share of awake", line["used_GiB_asleep_again"] / line["used_GiB_awake"], 0.5)

    def sample() -> list:
        return sample_step(sampler, cfg, given.train, given.train.start(), 1, 1).trained

    def gap_of(samples: list) -> float:
        return gap(policy, head_options, samples, cfg, ranks, device)

    limit = 1e-4 if args.dry else 0.05
    check("canary after a sync", check_canary(policy, head_options, engine, None, device, "after a sync"), limit)
    engine.sleep(keep_weights=True)  # as for a reward model: the weights are not sent again
    engine.wake("weights")
    engine.wake("kv_cache")
    canary_gap = check_canary(policy, head_options, engine, None, device, "after a wake")
    check("canary after sleep and wake", canary_gap, limit)
    check_sync(policy, engine, sample, gap_of, limit)

    prompts = [row.prompt_ids for row in next(iter(given.train.datasets.values())).problems[: 64 if args.dry else 2048]]
    options = SamplingOptions(1.0, cfg.policy.generation.max_new_tokens)
    line["tokens_per_second_seeded"], (first, second) = speed(engine, prompts, list(range(len(prompts))), options)
    share = sum(a != b for a, b in zip(first, second, strict=True)) / len(first)
    check("share of seeded samples that differ when repeated", share, 0 if args.dry else 0.01)
    real = engine_module.SamplingParams
    with mock.patch.object(engine_module, "SamplingParams", lambda **params: real(**params | {"seed": None})):
        line["tokens_per_second_unseeded"], _ = speed(engine, prompts, list(range(len(prompts))), options)
    text = json.dumps(line)
    print(text)
    if args.out:
        with args.out.open("a") as file:
            file.write(text + "\n")
    print("FAIL: " + "; ".join(failed) if failed else "PASS: all", flush=True)
    sys.stdout.flush()
    exit_process(1 if failed else 0)


if __name__ == "__main__":
    main()
