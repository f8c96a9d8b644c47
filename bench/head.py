"""Speed, memory and error of the output layer: ours, the bare matmuls, the naive one and other projects', in one run.

    python -m bench.head [--shapes N,D,V or N,D,V:vocab ...] [--only NAME ...] [--out FILE]    one GPU, bfloat16
    python -m bench.head --dry                             the same course on a CPU, tiny: whether the script works
    python -m bench.head --table FILE                      the table of what FILE has so far

All get the same inputs: hidden states that lean on the target's row of the weight, so that logits are peaked, and old
log-probabilities that keep every ratio between the clips: near one, heads that round logits would be judged by luck.
V: rows of the weight, of which the tokenizer has the first `vocab`, 151,665 of Qwen2.5's 151,936: what training meets.
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
import shutil
import signal
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

from bench import peers
from bench.head_cases import (
    BARE,
    LIGER_GRPO,
    LOGP,
    OURS,
    Inputs,
    bare,
    call,
    first_run,
    heads,
    make_inputs,
    milliseconds,
    oracle,
)
from bench.head_table import MAIN_SHAPES, table

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [*MAIN_SHAPES, *((n, d, 151936, 151665) for n in (32768, 8192) for d in (1536, 2048, 4096))]
SHAPES.append((4096, 4096, 128256, 128256))
SECONDS = 60  # for the first run of a head, compilation included


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
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    x = make_inputs(*shape[:3], device, dtype, shape[3])
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
    for key in ((OURS, True), (LOGP, True), (LOGP, False)):
        if key in found and found[key][1]:
            write({"shape": shape, "profile": key, "kernel_ms": kernel_ms(found[key][1], cuda)})
    return [line for line, _ in found.values()]


def facts() -> dict:
    """Where, with what and how something was measured."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = ""  # in a copy without history, or without git
    if shutil.which("git"):
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cpu = next((row.split(":")[1].strip() for row in open("/proc/cpuinfo") if row.startswith("model name")), "?")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "machine": f"{gpu}; {cpu}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}",
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def shape_of(text: str) -> tuple[int, int, int, int]:
    """N,D,V or N,D,V:vocab."""
    sizes, _, vocab = text.partition(":")
    num_rows, width, columns = map(int, sizes.split(","))
    return num_rows, width, columns, int(vocab or columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=[], type=shape_of, metavar="N,D,V[:vocab]")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a line of JSON is added for each result")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
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

    # As in training (base/system/ranks.py): a matmul that splits its sum adds the parts in float32. All heads alike.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    signal.signal(signal.SIGALRM, alarm)
    peers.unpack()
    write(facts())
    lines: list[dict] = []
    for shape in args.shapes or ([(64, 128, 515, 509)] if args.dry else dict.fromkeys(SHAPES)):
        lines += measure(shape, args, write)
    print(table(lines))


if __name__ == "__main__":
    main()
