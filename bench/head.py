"""Speed, memory and error of the output layer: ours, the bare matmuls, the naive one and other projects', in one run.

    python -m bench.head [--shapes 32768,2048,151936 ...] [--only NAME ...] [--out FILE]    one GPU, bfloat16
    python -m bench.head --dry                             the same course on a CPU, tiny: whether the script works
    python -m bench.head --table FILE                      the table of what FILE has so far
    python -m bench.head --cpu [--shapes 4096,512,151936] [--out FILE]       one CPU thread, float32, the torch heads
    python -m bench.head --cpu --against FOLDER [--out FILE]  one pass by autograd against a checkout of b1072a1, whose
                                                              derivatives were written by hand, by turns

All get the same inputs: hidden states that lean on the target's row of the weight, so that logits are peaked, and old
log-probabilities that keep every ratio between the clips: near one, heads that round logits would be judged by luck.
GRPO: mean PPO-clip loss; CE: mean cross-entropy; both with dX and dW; forward: logp alone, entropy where it comes free.
TFLOP/s count 6 N D V (forward: 2), whatever a head really does. extra MiB: peak of a call beyond its inputs, and dX, dW
in the inputs' dtype. Errors against float64: logp and loss absolute, dX and dW relative (Frobenius norm), all rows.
Every head's first result is written before the rounds, in which the heads take turns between two runs of the matmuls.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from bench import peers
from config import LossConfig
from kernels import KernelBackend, LossPath, linear_logp, linear_loss
from loss import policy_loss

ROOT = Path(__file__).resolve().parent.parent
MAIN_SHAPE = (32768, 2048, 151936)
SHAPES = [MAIN_SHAPE, *((n, d, 151936) for n in (32768, 8192) for d in (1536, 2048, 4096)), (4096, 4096, 128256)]
BARE, NAIVE, OURS, OURS_SMALL, LOGP = "bare matmuls", "naive", "linear_loss", "linear_loss, 512 rows", "linear_logp"
FUSED = "linear_loss, fused"
LIGER_GRPO, VERL = "Liger GRPO", "verl"
SECONDS = 60  # for the first run of a head, compilation included


@dataclass(slots=True)
class Inputs:
    hidden_ND: Tensor
    weight_VD: Tensor
    target_N: Tensor
    old_N: Tensor | None = None
    adv_N: Tensor | None = None


@torch.no_grad()
def make_inputs(num_rows: int, width: int, vocab: int, device: str, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    like = {"generator": generator, "device": device}
    weight_VD = torch.randn(vocab, width, **like).mul_(0.02).to(dtype)
    target_N = torch.randint(vocab, (num_rows,), **like)
    own_ND = weight_VD[target_N].float()
    lean_N1 = 12 + 16 * torch.rand(num_rows, 1, **like)  # the target's logit; the others' are normal, 3 wide
    hidden_ND = own_ND * (lean_N1 / own_ND.square().sum(1, keepdim=True))
    hidden_ND += torch.randn(num_rows, width, **like) * (3 / (0.02 * width**0.5))
    x = Inputs(hidden_ND.to(dtype), weight_VD, target_N)
    logp_N = torch.cat([logp for _, logp, _ in exact_rows(x, torch.float64 if device == "cuda" else torch.float32)])
    x.old_N = logp_N.float() + 0.2 * torch.rand(num_rows, **like) - 0.1
    length = peers.seq_len(num_rows)
    x.adv_N = torch.randn(num_rows // length, **like).repeat_interleave(length)
    x.hidden_ND.requires_grad_(), x.weight_VD.requires_grad_()
    return x


def exact_rows(x: Inputs, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, logp_C, all_logp_CV) of chunks, naively, in `dtype`."""
    weight_VD = x.weight_VD.detach().to(dtype)
    for start in range(0, len(x.hidden_ND), 512):
        rows = slice(start, min(start + 512, len(x.hidden_ND)))
        all_logp_CV = (x.hidden_ND[rows].detach().to(dtype) @ weight_VD.T).log_softmax(1)
        yield rows, all_logp_CV.gather(1, x.target_N[rows, None])[:, 0], all_logp_CV


@torch.no_grad()
def oracle(x: Inputs) -> dict[str, Tensor]:
    """logp, entropy, and of both losses value, dX and dW, in float64."""
    hidden_ND, weight_VD, num_rows = x.hidden_ND.detach().double(), x.weight_VD.detach().double(), len(x.hidden_ND)
    slope_ND, (grpo_VD, ce_VD) = torch.empty_like(hidden_ND), weight_VD.new_zeros(2, *weight_VD.shape)
    logp_N, entropy_N, g_N = (hidden_ND.new_empty(num_rows) for _ in range(3))
    for rows, logp_C, all_logp_CV in exact_rows(x, torch.float64):
        prob_CV = all_logp_CV.exp()
        logp_N[rows], entropy_N[rows] = logp_C, -(prob_CV * all_logp_CV).sum(1)
        slope_CV = prob_CV.neg_()  # of logp in the logits
        slope_CV[torch.arange(len(logp_C), device=logp_C.device), x.target_N[rows]] += 1
        ratio_C = (logp_C - x.old_N[rows]).exp()
        assert ((ratio_C - 1).abs() < 0.19).all(), "a ratio near the clip"
        g_N[rows] = -x.adv_N[rows] * ratio_C / num_rows
        slope_ND[rows] = slope_CV @ weight_VD
        grpo_VD.addmm_(slope_CV.T, hidden_ND[rows] * g_N[rows, None])
        ce_VD.addmm_(slope_CV.T, hidden_ND[rows], alpha=-1 / num_rows)
    exact = {"logp": logp_N, "entropy": entropy_N, "GRPO loss": g_N.sum(), "CE loss": -logp_N.mean()}
    exact |= {"GRPO dX": slope_ND * g_N[:, None], "GRPO dW": grpo_VD}
    return exact | {"CE dX": -slope_ND / num_rows, "CE dW": ce_VD}


def ours(backend: KernelBackend, kind: str = "one pass") -> Callable:
    """`linear_loss` on the PPO-clip loss, one sequence for each advantage."""
    path = LossPath(kind, idle_moves=False, positive_moves=False)

    def forward(x: Inputs):
        num_rows, seen = len(x.old_N), []

        def recording_loss(logp_N, entropy_T, **pack):
            seen[:] = [logp_N.detach()]
            return policy_loss(logp_N, entropy_T=entropy_T, **pack)

        seq_N = torch.arange(num_rows, device=x.old_N.device) // peers.seq_len(num_rows)
        pack = {"old_logp_T": x.old_N, "sampler_logp_T": x.old_N, "adv_T": x.adv_N, "mask_T": torch.ones_like(x.old_N)}
        pack |= {"seq_T": seq_N, "num_valid_tokens": num_rows, "num_valid_seqs": num_rows, "cfg": LossConfig()}
        pack_loss = partial(recording_loss, **pack, ref_logp_T=None)
        loss, _ = linear_loss(
            x.hidden_ND,
            x.weight_VD,
            x.target_N,
            temperature=1.0,
            num_grad_rows=num_rows,
            pack_loss=pack_loss,
            path=path,
            backend=backend,
        )
        return loss, *seen

    return forward


def heads(backend: str) -> dict[str, tuple[str, Callable]]:
    """Name -> (what it computes, the function that makes it)."""
    score = partial(linear_logp, return_entropy=True, backend=KernelBackend(backend))
    return {
        OURS: ("GRPO", lambda: ours(KernelBackend(backend))),
        FUSED: ("GRPO", lambda: ours(KernelBackend(backend), "fused")),
        OURS_SMALL: ("GRPO", lambda: ours(KernelBackend(backend, 512))),
        "linear_loss, 2048 rows": ("GRPO", lambda: ours(KernelBackend(backend, 2048))),
        "linear_loss, 8192 rows": ("GRPO", lambda: ours(KernelBackend(backend, 8192))),
        LOGP: ("GRPO", lambda: peers.of_logp(lambda *x: score(*x)[0])),
        NAIVE: ("GRPO", lambda: peers.of_logp(peers.naive_logp)),
        "naive, torch.compile": ("GRPO", lambda: peers.of_logp(torch.compile(peers.naive_logp, dynamic=False))),
        VERL: ("GRPO", peers.verl),
        "cut-cross-entropy": ("GRPO", lambda: peers.cut_ce("high")),
        "cut-cross-entropy, no filter": ("GRPO", lambda: peers.cut_ce(None)),
        "Liger FLSCE": ("GRPO", peers.liger_flsce),
        LIGER_GRPO: ("GRPO", peers.liger_grpo),
        "Liger FLCE": ("CE", peers.liger_ce),
        "F.linear_cross_entropy": ("CE", peers.torch_ce),
        "linear_loss, torch": ("GRPO", lambda: ours(KernelBackend("torch"))),
    }


# ---------------------------------------------------------------------------------------------------------- measuring


def call(forward: Callable, x: Inputs, backward: bool) -> tuple:
    """(loss, logp_N or None, dX, dW), or without `backward` only the first two."""
    with torch.set_grad_enabled(backward):
        loss, logp_N = forward(x)
    return loss.detach(), logp_N, *(torch.autograd.grad(loss, (x.hidden_ND, x.weight_VD)) if backward else ())


@torch.no_grad()
def bare(x: Inputs, buffers: list[Tensor], backward: bool) -> None:
    """The matmuls themselves, each at once over all rows, into memory that is there: what cannot be done faster."""
    torch.mm(x.hidden_ND, x.weight_VD.T, out=buffers[0])
    if backward:
        torch.mm(buffers[0], x.weight_VD, out=buffers[1])
        torch.mm(buffers[0].T, x.hidden_ND, out=buffers[2])


def milliseconds(run: Callable, cuda: bool) -> float:
    if not cuda:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def first_run(forward: Callable, x: Inputs, exact: dict, computes: str, backward: bool, cuda: bool) -> dict:
    """Errors against `exact`, and the peak of a second call: the first may compile and tune."""
    loss, logp_N, *grads = call(forward, x, backward)
    found = {"loss_error": (loss - exact[f"{computes} loss"]).abs().item()}
    if logp_N is not None:
        error_N = (logp_N.detach() - exact["logp"]).abs()
        found |= {"logp_error": error_N.mean().item(), "logp_error_max": error_N.max().item()}
    for name, grad in zip(("dX", "dW"), grads, strict=False):
        found[f"{name}_error"] = (
            (grad - exact[f"{computes} {name}"]).norm() / exact[f"{computes} {name}"].norm()
        ).item()
    size = sum(grad.nbytes for grad in grads)
    del loss, logp_N, grads
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(forward, x, backward)
        found["extra_MiB"] = (torch.cuda.max_memory_allocated() - before - size) / 2**20
    return found | {"first_ms": milliseconds(lambda: call(forward, x, backward), cuda)}


def first_runs(shape: tuple, x: Inputs, args: argparse.Namespace, write: Callable) -> dict:
    """(name, backward) -> (its line, its call), of all heads; without a call: absent or failed."""
    cuda, exact, found = not args.dry, oracle(x), {}
    top = (x.hidden_ND[:512].detach() @ x.weight_VD.detach().T).amax(1).float().mean().item()
    write({"shape": shape, "mean_entropy": exact["entropy"].mean().item(), "mean_top_logit": top})
    backend = "triton" if cuda or os.environ.get("TRITON_INTERPRET") == "1" else "torch"
    for name, (computes, make) in heads(backend).items():
        if name in args.skip or (args.only and name not in args.only):
            continue
        scores = computes == "GRPO" and not name.startswith((OURS, LIGER_GRPO))  # has a forward of its own
        for backward in (True, False) if scores else (True,):
            line, run = {"shape": shape, "name": name, "computes": computes, "backward": backward}, None
            signal.alarm(SECONDS)
            try:
                forward = make()
                line |= first_run(forward, x, exact, computes, backward, cuda) | {"status": "first run"}
                run = partial(call, forward, x, backward)
            except ImportError as error:
                line |= {"status": "absent", "reason": str(error)}
            except Exception as error:  # whatever another project's code raises is its result
                where = traceback.extract_tb(error.__traceback__)[-1].line
                line |= {"status": "failed", "reason": f"{type(error).__name__}: {str(error).strip()[:300] or where}"}
            signal.alarm(0)
            write(line)
            found[name, backward] = (line, run)
            if run is None and cuda:
                leave_broken_device(name)
    return found


def kernel_ms(run: Callable, cuda: bool) -> dict[str, float]:
    """Where the time of a call goes: the kernels that take longest, in ms."""
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        milliseconds(run, cuda)
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, name))[:8]
    return {f"{event.count} x {event.key[:80]}": getattr(event, name) / 1e3 for event in events}


def leave_broken_device(name: str) -> None:
    """A head can fail so that the device is of no more use to this process: then start again without that head."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os.execv(sys.executable, [sys.executable, "-m", "bench.head", *sys.argv[1:], "--skip", name])


def measure(shape: tuple, args: argparse.Namespace, write: Callable) -> list[dict]:
    """All heads on one shape, a line for each: first runs, then rounds in which they take turns."""
    cuda = not args.dry
    x = make_inputs(*shape, "cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)
    buffers = [x.hidden_ND.new_empty(s) for s in ((shape[0], shape[2]), x.hidden_ND.shape, x.weight_VD.shape)]
    found = first_runs(shape, x, args, write)
    for backward in (True, False):
        run = {BARE: partial(bare, x, buffers, backward)}  # first and last: clocks that fall, fall for all
        run |= {name: run for (name, mode), (_, run) in found.items() if mode == backward and run}
        run["again"] = run[BARE]
        times: dict = {name: [] for name in run}
        run[BARE]()
        for _ in range(args.rounds):
            for name in run:
                times[name].append(milliseconds(run[name], cuda))
        floor = statistics.median(times.pop(BARE) + times["again"])
        found[BARE, backward] = ({"shape": shape, "name": BARE, "computes": "matmuls", "backward": backward}, None)
        times[BARE] = times.pop("again")
        flops = 2.0 * shape[0] * shape[1] * shape[2] * (3 if backward else 1)
        for name, all_ms in times.items():
            ms = floor if name == BARE else statistics.median(all_ms)
            line = found[name, backward][0]
            line |= {"status": "ok", "ms": ms, "tflops": flops / ms / 1e9, "of_bare": floor / ms, "ms_all": all_ms}
            write(line)
    for key in ((OURS, True), (FUSED, True), (LOGP, True), (LOGP, False)):
        if key in found and found[key][1]:
            write({"shape": shape, "profile": key, "kernel_ms": kernel_ms(found[key][1], cuda)})
    return [line for line, _ in found.values()]


# ---------------------------------------------------------------------------------------------------------- reporting


def bars(lines: list[dict]) -> list[str]:
    """The project's own demands at MAIN_SHAPE."""
    at = {(line["name"], line["backward"]): line for line in lines if tuple(line["shape"]) == MAIN_SHAPE}
    ms = {key: line["ms"] for key, line in at.items() if "ms" in line}
    own, score, small = (at.get(key, {}) for key in ((OURS, True), (FUSED, True), (LOGP, False), (OURS_SMALL, True)))
    rivals = [ms[n, b] for n, b in ms if b and at[n, b]["computes"] == "GRPO" and not n.startswith((OURS, LOGP))]
    best = min(rivals) / own["ms"] if rivals and "ms" in own else None
    times = {name: ms[name, True] / own["ms"] for name in (LIGER_GRPO, VERL) if (name, True) in ms and "ms" in own}
    rows = [
        ("linear_loss: share of the bare matmuls' speed", own.get("of_bare"), ">=", 0.85),
        ("linear_loss: speed over the best other GRPO's", best, ">=", 1.25),
        ("linear_loss: speed over Liger GRPO's", times.get(LIGER_GRPO), ">=", 2),
        ("linear_loss: speed over verl's", times.get(VERL), ">=", 2),
        ("linear_logp forward: share of the bare matmul's speed", score.get("of_bare"), ">=", 0.75),
        ("linear_loss: extra MiB", own.get("extra_MiB"), "<=", 4096),
        ("linear_loss, 512 rows: extra MiB", small.get("extra_MiB"), "<=", 1024),
        ("linear_loss: mean logp error", own.get("logp_error"), "<=", 1e-4),
    ]  # fmt: skip
    return [bar(*row) for row in rows]


def bar(what: str, value: float | None, sign: str, limit: float) -> str:
    if value is None:
        return f"not measured  {what} (bar {sign} {limit:g})"
    holds = value >= limit if sign == ">=" else value <= limit
    return f"{'holds' if holds else 'FALLS SHORT':13s} {what}: {value:.4g} (bar {sign} {limit:g})"


def table(lines: list[dict]) -> str:
    """A row per shape, mode and head; the last line of each counts. Of other shapes than MAIN_SHAPE: the fastest 6."""
    last = {(tuple(line["shape"]), not line["backward"], line["name"]): line for line in lines if "name" in line}
    columns = ("ms", "tflops", "of_bare", "extra_MiB", "logp_error", "dX_error", "dW_error", "loss_error")
    out = [f"{'shape':>18s} {'head':28s} {'':8s}" + "".join(f"{column:>11s}" for column in columns)]
    rows = sorted(last.items(), key=lambda item: (item[0][:2], item[1].get("ms", 1e9)))
    for number, ((shape, forward, name), line) in enumerate(rows):
        if shape != MAIN_SHAPE and number >= 6 and rows[number - 6][0][:2] == (shape, forward):
            continue
        cells = "".join(f"{line[column]:11.4g}" if column in line else f"{'-':>11s}" for column in columns)
        reason = f" {line['status']}: {line['reason'].splitlines()[0][:100]}" if "reason" in line else ""
        size, mode = "x".join(map(str, shape)), "forward" if forward else line["computes"]
        out.append(f"{size:>18s} {name:28s} {mode:8s}{cells}{reason}")
    return "\n".join([*out, "", *bars(list(last.values()))])


def facts() -> dict:
    """Where, with what and how something was measured."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()  # empty in a copy without history
    cpu = next((row.split(":")[1].strip() for row in open("/proc/cpuinfo") if row.startswith("model name")), "?")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "machine": f"{gpu}; {cpu}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}",
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


# ------------------------------------------------------------------------------------------------------------ the CPU


def cpu_heads() -> dict[str, Callable]:
    score = partial(linear_logp, backend=KernelBackend("torch"))
    return {NAIVE: peers.of_logp(peers.naive_logp), LOGP: peers.of_logp(score), OURS: ours(KernelBackend("torch"))}


def resident(name: str) -> float:
    """GiB, of VmRSS (now) or VmHWM (at most)."""
    row = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return int(row.split()[1]) / 2**20


def cpu_growth(name: str, shape: tuple) -> float:
    """GiB by which forward + backward in this fresh process raise its peak above what it holds before."""
    x = make_inputs(*shape, "cpu", torch.float32)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the inputs
    before = resident("VmRSS")
    kept = call(cpu_heads()[name], x, True)
    assert kept[2].shape == x.hidden_ND.shape and kept[3].shape == x.weight_VD.shape
    return resident("VmHWM") - before


def measure_cpu(shape: tuple, rounds: int) -> dict[str, dict]:
    """Of each head: errors on 256 rows, growth, median seconds, and those over the naive head's."""
    small = make_inputs(min(256, shape[0]), *shape[1:], "cpu", torch.float32)
    exact, results = oracle(small), {}
    for name, forward in cpu_heads().items():
        results[name] = first_run(forward, small, exact, "GRPO", backward=True, cuda=False)
        command = [sys.executable, "-m", "bench.head", "--cpu", "--growth", name, "--shapes", ",".join(map(str, shape))]
        results[name]["growth_GiB"] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    x = make_inputs(*shape, "cpu", torch.float32)
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
from bench.head import KernelBackend, ours
forward = ours(KernelBackend("torch"))
"""


def measure_against(shape: tuple, folder: Path, rounds: int) -> dict:
    """CPU seconds of forward and backward here and in `folder`, in two processes that take turns on the same inputs."""
    x = make_inputs(*shape, "cpu", torch.float32)
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({name: getattr(x, name).detach() for name in Inputs.__slots__}, file.name)
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


def main_cpu(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    shape = args.shapes[0] if args.shapes else (4096, 512, 151936)
    if args.growth:
        print(cpu_growth(args.growth, shape))
        return
    if args.against:
        results = measure_against(shape, args.against.absolute(), args.rounds)
    else:
        results = measure_cpu(shape, args.rounds)
    text = json.dumps(facts() | {"shape": shape, "threads": 1, "results": results}, indent=1)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", default=[], type=lambda s: tuple(map(int, s.split(","))), metavar="N,D,V"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a line of JSON is added for each result; with --cpu, one object")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--against", type=Path, metavar="FOLDER")
    parser.add_argument("--growth", help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.cpu:
        return main_cpu(args)
    if args.table:
        return print(table([json.loads(row) for row in args.table.read_text().splitlines()]))

    def write(line: dict) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n")

    def alarm(*_) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, alarm)
    peers.unpack()
    write(facts())
    lines: list[dict] = []
    for shape in args.shapes or ([(64, 128, 515)] if args.dry else dict.fromkeys(SHAPES)):
        lines += measure(shape, args, write)
    print(table(lines))


if __name__ == "__main__":
    main()
