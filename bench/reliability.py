"""What the checks of every step cost, on the real 2-rank smoke run: each other step has none of them.

Run: `torchrun --standalone --nproc_per_node=2 bench/reliability.py [OUT.json] [key.sub=value ...]`: 300 steps, minutes.

The checks: is every sample of this version of the weights; are loss and gradient finite and do sampler and trainer
agree (the numbers are in the step's metrics anyway); was anyone told to stop (a collective, and looks between decode
steps); the watchdog's phases; is a checkpoint ready to be committed (a collective). In steps with an even number they
are replaced by nothing. Steps that look at the canary or save are left out, with their neighbours; what those two take
is reported apart. Every forward of the model is counted.
"""

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NUM_STEPS, PERIOD = 300, 30
OUT = Path(sys.argv.pop(1)) if len(sys.argv) > 1 and "=" not in sys.argv[1] else None
sys.argv[1:1] = ["configs/smoke.yaml", f"grpo.max_num_steps={NUM_STEPS}", f"grpo.canary_period={PERIOD}"]
sys.argv += [f"checkpointing.save_period={PERIOD}", "grpo.val_period=0", "logger.log_dir=logs/reliability"]
sys.argv += ["grpo.val_at_start=false", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"]

import engine
import grpo
import model
from run import checkpoint, setup
from system import watchdog
from system.exits import Signals, exit_process

CHECKS = {
    (grpo, "check_versions"): None,
    (grpo, "count_bad_steps"): 0,
    (Signals, "requested"): False,
    (Signals, "pending"): False,
    (watchdog.Watchdog, "enter"): None,
    (checkpoint.Saver, "poll"): None,
}
ALWAYS = [(engine.LLM, "reset_prefix_cache"), (setup, "check_canary"), (checkpoint.Saver, "save")]
step, began = 0, {}
spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # check -> step -> seconds
forwards: dict[int, int] = defaultdict(int)


def measure(owner, name: str, instead: tuple = ()) -> None:
    """Times each call of `owner.name`; with `instead`, even steps get that value and nothing is called."""
    original, label = getattr(owner, name), f"{owner.__name__}.{name}"

    def timed(*args, **kwargs):
        if instead and step and step % 2 == 0:
            return instead[0]
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[label][step] += time.perf_counter() - start

    setattr(owner, name, timed)


def follow_steps() -> None:
    sample, forward = grpo.sample_step, model.Decoder.forward

    def begins(*args):
        global step
        step = args[-1]
        began[step] = time.perf_counter()
        return sample(*args)

    def counted(*args, **kwargs):
        forwards[step] += 1
        return forward(*args, **kwargs)

    grpo.sample_step, model.Decoder.forward = begins, counted


def ms(seconds) -> dict[str, float]:
    seconds = sorted(1e3 * s for s in seconds)
    return {"median": statistics.median(seconds), "p90": seconds[int(0.9 * len(seconds))], "max": seconds[-1]}


def report() -> dict:
    """Pairs (odd step with checks, the even one after it), without those next to a canary or a save."""
    seconds = {number: began[number + 1] - began[number] for number in began if number + 1 in began}
    near = {number + offset for number in range(0, NUM_STEPS + 1, PERIOD) for offset in range(-1, 4)}
    pairs = [(n, n + 1) for n in range(11, NUM_STEPS - 1, 2) if not {n, n + 1} & near]
    differences = [seconds[one] - seconds[other] for one, other in pairs]
    checks = {f"{owner.__name__}.{name}" for owner, name in CHECKS}
    odd = [one for one, _ in pairs]
    total = [sum(spent[label][n] for label in checks) for n in odd]
    return {
        "num_pairs": len(pairs),
        "step_with_checks_ms": ms(seconds[n] for n, _ in pairs),
        "step_without_ms": ms(seconds[n] for _, n in pairs),
        "difference_ms_mean": 1e3 * statistics.mean(differences),
        "difference_ms_standard_error": 1e3 * statistics.stdev(differences) / len(differences) ** 0.5,
        "inside_the_checks_ms": ms(total),
        "each_check_median_ms": {label: ms(spent[label][n] for n in odd)["median"] for label in sorted(checks)},
        "reset_prefix_cache_ms": ms(spent["LLM.reset_prefix_cache"][n] for n in odd),
        "canary_ms": ms(spent["run.setup.check_canary"].values()),
        "save_blocks_ms": ms(spent["Saver.save"].values()),
        "forwards_with_checks": sorted({forwards[n] for n, _ in pairs}),
        "forwards_without": sorted({forwards[n] for _, n in pairs}),
    }


if __name__ == "__main__":
    for (owner, name), instead in CHECKS.items():
        measure(owner, name, (instead,))
    for owner, name in ALWAYS:
        measure(owner, name)
    follow_steps()
    code = grpo.main()
    if code == 0 and os.environ["RANK"] == "0":
        text = json.dumps(report() | {"command": " ".join(sys.argv)}, indent=1)
        print(text)
        if OUT:
            OUT.write_text(text + "\n")
    exit_process(code)
