"""Seconds and memory of one rank of 64 that packs a rollout of 16,384 samples, and what the exchange of them costs it.

    python -m bench.packing [--exchange] [--out FILE]  half a minute of one core, 0.5 GB; --exchange: its lines alone
    PYTHONPATH=CHECKOUT python bench/packing.py        the same with the packing of another checkout, as far as it goes

Samples of up to 8,192 tokens, in packs of as many: 1,024 prompts x 16 and 16,384 x 1, with and without shared prompts,
for heavy-tailed lengths and for samples that are all of the longest. Their arrays are views of one, so that memory is
what `batch.make_minibatches` adds: the peak by tracemalloc (numpy's and Python's), in a call of its own, and what the
resident set grew by in the first call. Seconds and CPU seconds: the best of three calls.
exchange: what system/exchange.py does in the process, without a network: MB of the numbers, which go to all ranks, and
of the tokens that this rank sends and receives; CPU seconds of both. When all ranks got all samples pickled, they
received 444 and 1,168 MB and worked for 0.29 and 0.65 s (results/packing_2026-11-22.json).
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import config
from batch import Minibatch, make_minibatches
from data import Sample, assign_to_ranks
from system import exchange
from system.ranks import Ranks

ROOT = Path(__file__).resolve().parent.parent
WORLD_SIZE, NUM_SAMPLES, MAX_TOKENS = 64, 16384, 8192
BOUNDS = {"seconds": 1.0, "peak_MiB": 500.0}
CPU = torch.device("cpu")


def lengths_of(kind: str, num_prompts: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each prompt [P] and of each response [P, G]. "heavy": prompts of 100 to 500, lognormal responses of
    which one in eight is cut at the limit; "longest": every sample has MAX_TOKENS."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 501, num_prompts)
    room = MAX_TOKENS - prompts[:, None]
    if kind == "longest":
        return prompts, np.broadcast_to(room, (num_prompts, group_size))
    drawn = rng.lognormal(np.log(2000), 1.2, (num_prompts, group_size)).astype(np.int64)
    return prompts, np.clip(drawn, 2, room)


def make_samples(kind: str, num_prompts: int, group_size: int) -> list[Sample]:
    """All samples of a step, graded: their arrays are views of one."""
    ids = np.random.default_rng(1).integers(0, 150_000, MAX_TOKENS).astype(np.int32)
    logps = np.full(MAX_TOKENS, -0.5, np.float32)
    mask = np.ones(MAX_TOKENS, bool)
    prompts, responses = lengths_of(kind, num_prompts, group_size)
    samples = []
    for prompt, size in enumerate(prompts.tolist()):
        prompt_ids = ids[:size].tolist()
        for index, n in enumerate(responses[prompt].tolist()):
            arrays = {"output_ids": ids[:n], "sampler_logps": logps[:n], "mask": mask[:n], "versions": ids[:n]}
            sample = Sample(prompt, index, prompt, prompt_ids, **arrays, finish_reason="stop")
            sample.reward = float((prompt + index) % 2)
            samples.append(sample)
    return samples


def pack(samples: list[Sample], share_prefix: bool) -> list[Minibatch]:
    """What rank 0 trains on."""
    packing = config.SequencePackingConfig(MAX_TOKENS, share_prefix)
    cfg = config.Config(policy=config.PolicyConfig(sequence_packing=packing))
    return make_minibatches(samples, [0.5] * len(samples), cfg, Ranks(0, WORLD_SIZE, 0, 1), CPU)


def resident_peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(kind: str, num_prompts: int, share_prefix: bool) -> dict:
    """One line of the table, in a process that has done nothing else."""
    samples = make_samples(kind, num_prompts, NUM_SAMPLES // num_prompts)
    tokens = sum(sample.num_tokens for sample in samples)
    line = {"lengths": kind, "prompts": num_prompts, "share_prefix": share_prefix, "tokens": tokens}
    before = resident_peak()
    (minibatch,) = pack(samples, share_prefix)
    line |= {"resident_growth_MiB": resident_peak() - before, "packs": len(minibatch.micros)}
    line["rank_tokens"] = sum(len(micro.token_T) for micro in minibatch.micros)
    del minibatch
    times = []
    for _ in range(3):
        start = time.perf_counter(), time.process_time()
        pack(samples, share_prefix)
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    line["seconds"], line["cpu_seconds"] = map(min, zip(*times, strict=True))
    tracemalloc.start()
    pack(samples, share_prefix)
    line["peak_MiB"] = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return line | {"within": all(line[name] <= bound for name, bound in BOUNDS.items())}


def measure_exchange(kind: str, num_prompts: int) -> dict:
    """Rank 0's part. The collectives are stand-ins: of the first it gets what all ranks would give, of the second noise
    of the right size."""
    samples = make_samples(kind, num_prompts, NUM_SAMPLES // num_prompts)
    whole: list[torch.Tensor] = []
    sizes: list[list[int]] = []
    dist.get_rank, dist.get_world_size = lambda: 0, lambda: WORLD_SIZE
    dist.all_reduce = lambda tensor: whole.append(tensor.clone())
    dist.all_to_all_single = lambda incoming, outgoing, received, sent: sizes.extend([received, sent])
    for sample in samples:
        sample.holder = 0
    exchange.share_numbers(samples, [])
    for i, sample in enumerate(samples):
        sample.holder = i * WORLD_SIZE // NUM_SAMPLES
    dist.all_reduce = lambda tensor: tensor.copy_(whole[0])
    start = time.process_time()
    exchange.share_numbers(samples, [])
    numbers = time.process_time() - start
    shares = assign_to_ranks(samples, WORLD_SIZE, MAX_TOKENS, share_prefix=True)
    needed = [[sample for part in share for sample in part] for share in shares]
    start = time.process_time()
    exchange.move_tokens(needed)
    seconds = {"numbers_cpu_seconds": numbers, "tokens_cpu_seconds": time.process_time() - start}
    (received, sent), numbers_bytes = map(sum, sizes), whole[0].nbytes
    megabytes = {"numbers_MB": numbers_bytes / 1e6, "sent_MB": sent / 1e6, "received_MB": received / 1e6}
    return {"exchange": kind, "prompts": num_prompts} | megabytes | seconds


def facts() -> dict[str, str]:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    command = " ".join(["python -m bench.packing", *sys.argv[1:]])
    day = datetime.date.today().isoformat()
    return {
        "date": day,
        "commit": commit,
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    } | versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the results as JSON")
    parser.add_argument("--case", nargs=3, help="one line alone: LENGTHS PROMPTS true|false|exchange")
    parser.add_argument("--exchange", action="store_true")
    args = parser.parse_args()
    if args.case:
        kind, num_prompts, way = args.case
        size = int(num_prompts)
        print(json.dumps(measure_exchange(kind, size) if way == "exchange" else measure(kind, size, way == "true")))
        return
    cases = [(k, p, way) for k in ("heavy", "longest") for p in (1024, NUM_SAMPLES) for way in ("true", "false")]
    lines = []
    cases = [] if args.exchange else cases
    for case in [*cases, ("heavy", 1024, "exchange"), ("longest", 1024, "exchange")]:
        command = [sys.executable, __file__, "--case", *map(str, case)]
        env = {"PYTHONPATH": str(ROOT)} | os.environ
        lines.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout))
        print(*(f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in lines[-1].items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(facts() | {"bounds": BOUNDS, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
