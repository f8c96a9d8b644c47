"""AdamW's first moment in bfloat16 (policy.optimizer.kwargs.state_dtype) on gradients of real runs, against float32.

    python bench/moments.py record FOLDER CONFIG.yaml [key=value ...]    trains on one rank, keeps part of each gradient
    python bench/moments.py measure FOLDER ... [--out=FILE]              what AdamW makes of them in 4,000 steps

Kept are 20,000 numbers at equal distances through all parameters, as the optimizer sees them: after clipping. `measure`
gives them, step by step, to the run's own optimizer in both precisions; a recording of fewer steps is repeated. Weights
are zero before each step, without decay and at rate 1, so that they are the update after it. Errors are norms of the
difference over the norm of float32's. "v rounded" is for contrast: both moments rounded to the nearest bfloat16.
"""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from config import OptimizerConfig, OptimizerKwargs
from optim import build_optimizer

NUM_STEPS = 4_000
NUM_KEPT = 20_000
SHOWN = (60, 120, 1_000, 4_000)
QUIET = (
    *("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.enabled=false"),
    *("checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false"),
)


def record(folder: Path, words: list[str]) -> int:
    """Trains in this process; the exit code of the run."""
    folder.mkdir(parents=True)
    kept: list[torch.Tensor] = []

    def keep(optimizer, *_):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        distance = max(1, sum(param.numel() for param in params) // NUM_KEPT)
        kept.append(torch.cat([param.grad.to_local().flatten()[::distance] for param in params]))

    register_optimizer_step_pre_hook(keep)
    import grpo

    sys.argv = ["grpo.py", words[0], *QUIET, *words[1:], f"logger.log_dir={folder / 'logs'}"]
    code = grpo.main()
    save_file({"grad": torch.stack(kept)}, folder / "gradients.safetensors", {"command": " ".join(words)})
    return code


def measure(grad_SN: torch.Tensor) -> dict:
    """Errors of the update and of the mean of v at SHOWN steps, and of the sum of all updates."""
    names = {"bfloat16": "bfloat16", "float32": "float32", "v rounded": "bfloat16"}
    weights, optimizers = {}, {}
    for name, state_dtype in names.items():
        model = nn.Linear(grad_SN.shape[1], 1, bias=False)
        kwargs = OptimizerKwargs(lr=1.0, weight_decay=0.0, state_dtype=state_dtype)
        weights[name], optimizers[name] = model.weight, build_optimizer(model, OptimizerConfig(kwargs=kwargs))
    sums = {name: torch.zeros(grad_SN.shape[1], dtype=torch.float64) for name in names}
    norms, rows = [], {}
    for step in range(1, NUM_STEPS + 1):
        grad_N = grad_SN[(step - 1) % len(grad_SN)]
        for name, weight in weights.items():
            weight.detach().copy_(torch.zeros_like(weight))
            weight.grad = grad_N[None].clone()
            optimizers[name].step()
            sums[name] += weight.detach()[0]
            if name == "v rounded":
                v = optimizers[name].state[weight]["exp_avg_sq"]
                v.copy_(v.bfloat16())
        update = {name: weight.detach() for name, weight in weights.items()}
        errors = {name: relative(update[name], update["float32"]) for name in names}
        norms.append(errors["bfloat16"])
        if step in SHOWN:
            v_mean = {n: optimizers[n].state[w]["exp_avg_sq"].double().mean().item() for n, w in weights.items()}
            for name in ("bfloat16", "v rounded"):
                row = {"update": errors[name], "mean of v": v_mean[name] / v_mean["float32"] - 1}
                rows[f"{step}, {name}"] = row | {"sum of the updates": relative(sums[name], sums["float32"])}
    return {"at": rows, "largest error of an update": max(norms), "median": sorted(norms)[len(norms) // 2]}


def relative(a: torch.Tensor, exact: torch.Tensor) -> float:
    return float((a - exact).double().norm() / exact.double().norm())


def main() -> int:
    mode, *words = sys.argv[1:] or ["help"]
    if mode == "record":
        return record(Path(words[0]).absolute(), words[1:])
    if mode != "measure":
        raise SystemExit(__doc__)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {"date": str(date.today()), "commit": commit, "torch": torch.__version__, "steps": NUM_STEPS}
    for folder in [Path(word) for word in words if not word.startswith("--out=")]:
        with safe_open(folder / "gradients.safetensors", "pt") as file:
            grad_SN = file.get_tensor("grad")
            report[folder.name] = file.metadata()
        report[folder.name] |= {"steps recorded": len(grad_SN), "numbers of each": grad_SN.shape[1]}
        report[folder.name] |= {"gradients of zero": int((grad_SN == 0).all(1).sum())} | measure(grad_SN)
    text = json.dumps(report, indent=1)
    print(text)
    for word in words:
        if word.startswith("--out="):
            Path(word.removeprefix("--out=")).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    from system.exits import exit_process

    exit_process(main())
