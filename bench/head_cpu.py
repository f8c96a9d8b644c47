"""The part of bench/head.py that measures the PyTorch heads on one CPU thread: `--cpu` there."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench import peers
from bench.head_cases import LOGP, NAIVE, OURS, Inputs, call, first_run, make_inputs, milliseconds, oracle, ours, scored
from bench.head_table import bar
from kernels import KernelBackend

ROOT = Path(__file__).resolve().parent.parent


def cpu_heads() -> dict[str, Callable]:
    backend = KernelBackend("torch")
    return {NAIVE: peers.of_logp(peers.naive_logp), LOGP: scored(backend), OURS: ours(backend)}


def resident(name: str) -> float:
    """GiB, of VmRSS (now) or VmHWM (at most)."""
    row = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return int(row.split()[1]) / 2**20


def cpu_growth(name: str, shape: tuple) -> float:
    """GiB by which forward + backward in this fresh process raise its peak above what it holds before."""
    x = make_inputs(*shape[:3], "cpu", torch.float32, shape[3])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the inputs
    before = resident("VmRSS")
    kept = call(cpu_heads()[name], x, True)
    assert kept[2].shape == x.hidden_ND.shape and kept[3].shape == x.weight_VD.shape
    return resident("VmHWM") - before


def measure_cpu(shape: tuple, rounds: int) -> dict[str, dict]:
    """Of each head: errors on 256 rows, growth, median seconds, and those over the naive head's."""
    num_rows, width, columns, vocab = shape
    small = make_inputs(min(256, num_rows), width, columns, "cpu", torch.float32, vocab)
    size = f"{num_rows},{width},{columns}:{vocab}"
    exact, results = oracle(small), {}
    for name, forward in cpu_heads().items():
        results[name] = first_run(forward, small, exact, "GRPO", backward=True, cuda=False)
        command = [sys.executable, "-m", "bench.head", "--cpu", "--growth", name, "--shapes", size]
        results[name]["growth_GiB"] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    x = make_inputs(num_rows, width, columns, "cpu", torch.float32, vocab)
    times: dict = {name: [] for name in results}
    for _ in range(rounds + 1):  # the first warms up
        for name, forward in cpu_heads().items():
            times[name].append(milliseconds(partial(call, forward, x, True), cuda=False) / 1e3)
    for name, result in results.items():
        result |= {"seconds_all": times[name], "seconds": statistics.median(times[name][1:])}
        result["of_naive"] = result["seconds"] / results[NAIVE]["seconds"]
    return results


TIMED_OLD = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
from config import LossConfig
from kernels import Head, grpo_head
def forward(x):
    rows = {"old_logp_R": x.old_N, "sampler_logp_R": x.old_N, "adv_R": x.adv_N, "ref_logp_R": None}
    rows |= {"share_R": torch.full_like(x.old_N, 1 / len(x.old_N)), "nll_share_R": None}
    from loss import policy_loss
    how = {"temperature": 1.0, "num_grad_rows": len(x.old_N), "cfg": LossConfig(), "head": Head("torch")}
    loss, logp_N, entropy_N = grpo_head(x.hidden_ND, x.weight_VD, x.target_N, **rows, **how)
    with torch.no_grad():  # its metrics, which were a call of their own
        counts = {"num_valid_tokens": len(x.old_N), "num_valid_seqs": len(x.old_N)}
        policy_loss(logp_N, old_logp_T=x.old_N, sampler_logp_T=x.old_N, adv_T=x.adv_N, entropy_T=entropy_N,
                    mask_T=torch.ones_like(x.old_N), seq_T=torch.arange(len(x.old_N)), cfg=LossConfig(), **counts)
    return loss, logp_N
"""
SERVE = """
torch.set_num_threads(1)
x = torch.load(sys.argv[2], weights_only=True)
x = type("Inputs", (), x)
x.hidden_ND.requires_grad_(), x.weight_VD.requires_grad_()
for line in sys.stdin:
    start = time.process_time()  # of one thread: others on the machine count for less
    loss, _ = forward(x)
    grads = torch.autograd.grad(loss, (x.hidden_ND, x.weight_VD))
    print(time.process_time() - start, loss.item(), *(grad.double().norm().item() for grad in grads), flush=True)
"""
TIMED_NEW = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
from bench.head_cases import KernelBackend, ours
forward = ours(KernelBackend("torch"))
"""


def measure_against(shape: tuple, folder: Path, rounds: int) -> dict:
    """CPU seconds of forward and backward here and in `folder`, in two processes that take turns on the same inputs."""
    x = make_inputs(*shape[:3], "cpu", torch.float32, shape[3])
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        values = {name: getattr(x, name) for name in Inputs.__slots__}
        torch.save({name: v.detach() if torch.is_tensor(v) else v for name, v in values.items()}, file.name)
        servers = {}
        for name, code, where in (("new", TIMED_NEW, ROOT), ("old", TIMED_OLD, folder)):
            command = [sys.executable, "-c", code + SERVE, str(where), file.name]
            servers[name] = subprocess.Popen(
                command, cwd=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        times: dict = {"new": [], "old": []}
        numbers = {}
        for number in range(rounds + 1):  # the first warms up; who begins takes turns too
            for name in ("new", "old") if number % 2 else ("old", "new"):
                print("go", file=servers[name].stdin, flush=True)
                seconds, *numbers[name] = map(float, servers[name].stdout.readline().split())
                times[name].append(seconds)
        for server in servers.values():
            server.stdin.close()
            server.wait()
    ratios = [new / old for new, old in zip(times["new"][1:], times["old"][1:], strict=True)]
    return {
        "cpu_seconds": times,
        "loss, |dX|, |dW|": numbers,
        "new_over_old_median_of_pairs": statistics.median(ratios),
        "new_over_old_of_medians": statistics.median(times["new"][1:]) / statistics.median(times["old"][1:]),
        "new_over_old_of_fastest": min(times["new"][1:]) / min(times["old"][1:]),
    }


def main_cpu(args: argparse.Namespace, facts: dict) -> None:
    torch.set_num_threads(1)
    shape = args.shapes[0] if args.shapes else (4096, 512, 151936, 151936)
    if args.growth:
        print(cpu_growth(args.growth, shape))
        return
    if args.against:
        results = measure_against(shape, args.against.absolute(), args.rounds)
    else:
        results = measure_cpu(shape, args.rounds)
    text = json.dumps(facts | {"shape": shape, "threads": 1, "results": results}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    if args.against:
        print(
            bar(
                "one pass by autograd over hand-written derivatives",
                results["new_over_old_median_of_pairs"],
                "<=",
                1.05,
            )
        )
        return
    for name in (LOGP, OURS):
        print(bar(f"{name}: time over naive's", results[name]["of_naive"], "<=", 1.15))
        print(bar(f"{name}: growth in GiB", results[name]["growth_GiB"], "<=", 1))
