"""`compiled_loss` beside the loss as it is, for test_compile.py: a process of its own, in which dynamo is on.

    python compiled_losses.py BACKEND [NAME ...]        BACKEND: aot_eager | inductor; NAME: of `cases`, or all

Prints a line of JSON for each case.
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "core")]

import torch
from loss_cases import numbers_of
from test_loss_exact import ALGORITHMS, config_of
from torch._dynamo.utils import counters

import head
from compiled_loss import compiled_loss
from config import Config
from metrics import Metrics

PPO = "loss_R = torch.maximum(-t.adv_R * ratio_R, -t.adv_R * clamped_R)"
EDITS = {  # what follows PPO's loss of a token
    "log-cosh": ["loss_R = loss_R + 0.1 * (ratio_R - 1).cosh().log()"],
    "a power of the ratio": ["loss_R = torch.where(t.adv_R > 0, -t.adv_R * ratio_R**0.9, loss_R)"],
    "length": ["loss_R = loss_R * t.seqs.length_R.log1p()"],
    "Huber": [
        "huber_R = torch.nn.functional.huber_loss(t.logp_R, t.old_logp_R, reduction='none', delta=0.1)",
        "loss_R = loss_R + huber_R",
    ],
    "median of the pack": ["loss_R = loss_R - t.adv_R * ratio_R.median()"],
    "tokens before": ["loss_R = loss_R * (0.01 * (t.logp_R - t.old_logp_R).cumsum(0)).exp()"],
    "the larger half": [
        "least = loss_R.detach().topk(len(loss_R) // 2).values[-1]",
        "loss_R = torch.where(loss_R >= least, loss_R, 0.0)",
    ],
    "three temperatures": [
        "for tau in (0.5, 1.0, 2.0):",
        "    loss_R = loss_R - t.adv_R * (tau * (ratio_R - 1)).sigmoid()",
    ],
    "a margin": ["loss_R = torch.nn.functional.softplus(loss_R + 0.3)"],
    "best of a sequence": [
        "best_R = torch.zeros_like(loss_R).index_reduce(0, t.seqs.index_R, ratio_R.detach(), 'amax')",
        "loss_R = loss_R * best_R[t.seqs.index_R]",
    ],
    "does not compile": ["if ratio_R.sum() > 9:", "    loss_R = 2 * loss_R"],
}


def cases() -> dict[str, tuple[Config, list[str]]]:
    """Name -> (config, lines that are added to loss.py)."""
    found = {}
    for algorithm, settings in ALGORITHMS.items():
        for number, keys in enumerate(settings):
            found[f"{algorithm} {number}"] = (config_of(keys), [])
    found["entropy held at a target"] = (config_of({"entropy_target": 0.3}), [])
    for name, edit in EDITS.items():
        found[name] = (Config(), edit)
    return found


def loss_with(edit: list[str]) -> head.PolicyLoss:
    """`policy_loss` of a copy of loss.py with these lines."""
    text = (ROOT / "loss.py").read_text()
    assert text.count(PPO) == 1
    text = text.replace(PPO, "\n    ".join([PPO, *edit]))
    module = ModuleType("edited_loss")
    module.__dict__["__name__"] = "edited_loss"
    exec(compile(text, "edited_loss.py", "exec"), module.__dict__)
    return module.policy_loss


def batch(cfg: Config, num_tokens: int, num_seqs: int, seed: int) -> tuple[torch.Tensor, dict]:
    """(statistics, the other arguments of the loss) of a pack of a run on a GPU: float32, counts as tensors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: float) -> torch.Tensor:
        return size * torch.randn(num_tokens, generator=generator)

    logp_R = -torch.rand(num_tokens, generator=generator) * 3
    old_logp_R = logp_R + normal(0.2)
    seq_R = torch.randint(0, num_seqs, (num_tokens,), generator=generator).sort().values
    mask_R = torch.rand(num_tokens, generator=generator) < 0.8
    arguments = {
        "old_logp_R": old_logp_R,
        "sampler_logp_R": torch.where(mask_R, old_logp_R + normal(0.1), torch.nan),
        "ref_logp_R": logp_R + normal(0.3),
        "adv_R": torch.randn(num_seqs, generator=generator)[seq_R],
        "mask_R": mask_R,
        "seq_R": seq_R,
        "share_R": torch.rand(num_seqs, generator=generator, dtype=torch.float64)[seq_R],
        "positive_R": seq_R % 2 == 0,
        "num_valid_tokens": mask_R.sum(),
        "num_valid_seqs": torch.tensor(num_seqs),
        "num_positive_tokens": (mask_R & (seq_R % 2 == 0)).sum(),
        "cfg": cfg.loss_fn,
    }
    if cfg.loss_fn.entropy_target is not None:
        arguments["entropy_coef"] = torch.tensor(0.02 * seed)  # from 0 on, another one in each step
    return torch.stack([logp_R, torch.rand(num_tokens, generator=generator)]), arguments


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the largest number; equal NaNs and infinities are equal."""
    same = (a == b) | (a.isnan() & b.isnan())
    size = b[b.isfinite()].abs().amax() if b.isfinite().any() else torch.tensor(1.0)
    gap = torch.where(same, 0.0, (a.double() - b.double()).abs()) / size.clamp(min=1e-30)
    return float(gap.nan_to_num(nan=torch.inf).amax())  # a NaN of one side alone: `max` would pass it over


def flat(metrics: Metrics) -> dict[str, torch.Tensor]:
    """Sums and counts by themselves."""
    found = {}
    for name, value in metrics.items():
        for number, part in enumerate(numbers_of(value)):
            found[f"{name} {number}"] = part
    return found


def compare(name: str, cfg: Config, edit: list[str]) -> dict:
    """20 steps of other lengths and counts: how many graphs they took, and the largest differences, each relative to
    the largest number. The loss is a sum whose terms may cancel: its difference is relative to the size of all terms,
    sum |slope * statistic|."""
    torch._dynamo.reset()
    counters.clear()
    loss = loss_with(edit)
    compiled, text = compiled_loss(loss, cfg.loss_fn, torch.device("cpu"), has_old=True, has_ref=True)
    result = {"case": name, "text": text, "slopes": 0.0, "loss": 0.0, "metrics": 0.0, "entropy": 0}
    for step in range(20):
        stats_2R, arguments = batch(cfg, 150 + 37 * step, 5 + step % 7, step)
        with_metrics = step % 2 == 0
        found = head.derivatives(partial(compiled, **arguments), stats_2R, with_metrics=with_metrics)
        expected = head.derivatives(partial(loss, **arguments), stats_2R, with_metrics=with_metrics)
        assert expected.slopes_2R.any() and expected.slopes_2R.isfinite().all()
        assert expected.loss.isfinite() and found.loss.isfinite()
        assert found.metrics.keys() == expected.metrics.keys()
        result["slopes"] = max(result["slopes"], difference(found.slopes_2R, expected.slopes_2R))
        made_of = (expected.slopes_2R * stats_2R).abs().sum()
        result["loss"] = max(result["loss"], float((found.loss - expected.loss).abs() / made_of))
        result["entropy"] += found.uses_entropy != expected.uses_entropy
        wanted = flat(expected.metrics)
        for key, value in flat(found.metrics).items():
            result["metrics"] = max(result["metrics"], difference(value, wanted[key]))
    result["graphs"] = counters["stats"]["unique_graphs"]
    if not edit:
        nothing_2R, arguments = batch(cfg, 24, 3, 0)
        empty = {key: x[:0] if torch.is_tensor(x) and x.dim() else x for key, x in arguments.items()}
        loss_of_nothing, _ = compiled(nothing_2R[0, :0], entropy_R=nothing_2R[1, :0], **empty)
        result["empty"] = float(loss_of_nothing)
    return result


def main() -> None:
    backend, *names = sys.argv[1:]
    if backend != "inductor":
        torch.compile = partial(torch.compile, backend=backend)
    table = cases()
    for name in names or table:
        print(json.dumps(compare(name, *table[name])), flush=True)


if __name__ == "__main__":
    main()
