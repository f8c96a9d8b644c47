"""Numbers of a step: reduced over micro-batches and ranks, then written for people and programs.

Owns the reduction rule and the files metrics.jsonl, samples.jsonl and the TensorBoard events, and the console line.
Reduction rule (that of `loss.policy_loss`): a pair (sum, count) adds up on both sides and is divided once, at the very
end; a name ending in `_min` or `_max` takes the extremum; any other scalar adds up. Never a mean of means (trl#6380).
Values are logged raw: a NaN stays visible.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from chat import Tokenizer
from config import CheckpointingConfig
from data import Sample
from envs import OUTCOMES

Metric = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def accumulate(total: dict[str, Metric], new: dict[str, Metric]) -> None:
    """Adds one micro-batch's metrics to `total`, in place, by the reduction rule; no device sync."""
    for name, value in new.items():
        if name not in total:
            total[name] = value
        elif isinstance(value, tuple):
            total[name] = tuple(a + b for a, b in zip(total[name], value, strict=True))
        elif name.endswith("_min"):
            total[name] = torch.minimum(total[name], value)
        elif name.endswith("_max"):
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = total[name] + value


def reduce_over_ranks(total: dict[str, Metric], *, divide_sums_by: int = 1) -> dict[str, float]:
    """The step's numbers, equal on every rank: a collective, with the same names on all ranks.

    `divide_sums_by`: the number of optimizer steps that `total` was accumulated over: what is no pair and no extremum
    becomes its mean over them.
    """
    names = list(total)
    sums = [v for name in names for v in _sum_parts(name, total[name])]
    summed = _over_ranks(sums, torch.sum)
    lows = _over_ranks([total[n] for n in names if n.endswith("_min")], torch.amin)
    highs = _over_ranks([total[n] for n in names if n.endswith("_max")], torch.amax)
    reduced = {}
    for name in names:
        if isinstance(total[name], tuple):
            value, count = next(summed), next(summed)
            reduced[name] = value / count if count else float("nan")
        elif name.endswith(("_min", "_max")):
            reduced[name] = next(lows if name.endswith("_min") else highs)
        else:
            reduced[name] = next(summed) / divide_sums_by
    return reduced


def _sum_parts(name: str, value: Metric) -> tuple[torch.Tensor, ...]:
    if isinstance(value, tuple):
        return value
    return () if name.endswith(("_min", "_max")) else (value,)


def _over_ranks(values: list[torch.Tensor], combine: Callable) -> Iterator[float]:
    """Gathered and then combined: the MIN and MAX of gloo's all_reduce lose a NaN of any rank but the first."""
    if not values:
        return iter(())
    mine = torch.stack([torch.as_tensor(v).detach().double().cpu() for v in values])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return iter(combine(torch.stack(parts), 0).tolist())


def sample_metrics(generated: Sequence[Sample], trained: Sequence[Sample]) -> dict[str, float]:
    """Numbers of the samples of a step, all ranks': `generated`, of which dynamic sampling left `trained`.

    Names are NeMo RL's where it has one. Means are over all generated samples: they show the policy, the kept ones only
    the middle of the problems. Of `trained`: filtered_reward and total_num_tokens. zero_variance_fraction is of the
    groups' rewards that the advantages see, unshaped_zero_variance_fraction of those before shaping.
    """
    tokens_B = np.array([s.num_gen_tokens for s in generated])
    turns_B = np.array([s.num_turns for s in generated])
    return {
        "reward": _mean(s.reward for s in generated),
        "filtered_reward": _mean(s.reward for s in trained),
        "unshaped_reward": _mean(s.unshaped_reward for s in generated),
        "accuracy": _mean(s.outcome == "ok" for s in generated),
        **{f"outcome/{name}": _mean(s.outcome == name for s in generated) for name in OUTCOMES[1:]},
        **_group_metrics(generated),
        **_reward_by("env", generated, [s.env_name for s in generated]),
        **_reward_by("dataset", generated, [s.dataset for s in generated]),
        **_outcomes_by_env(generated),
        **_reward_by("finish_reason", generated, [s.finish_reason for s in generated]),
        **_reward_by("gen_tokens", generated, [_length_bucket(s.num_gen_tokens) for s in generated]),
        "mean_prompt_length": _mean(len(s.prompt_ids) for s in generated),
        "mean_gen_tokens_per_sample": float(tokens_B.mean()),
        "min_gen_tokens_per_sample": int(tokens_B.min()),
        "max_gen_tokens_per_sample": int(tokens_B.max()),
        "mean_env_tokens_per_sample": _mean(s.num_env_tokens for s in generated),
        "mean_total_tokens_per_sample": _mean(s.num_tokens for s in generated),
        "total_gen_tokens": int(tokens_B.sum()),
        "total_num_tokens": sum(s.num_tokens for s in trained),
        "total_turns": int(turns_B.sum()),
        "avg_turns_per_sample": float(turns_B.mean()),
        "max_turns_per_sample": int(turns_B.max()),
        "truncation_rate": _mean(s.finish_reason == "length" for s in generated),
        "natural_termination_rate": _mean(s.finish_reason == "stop" for s in generated),
        "max_turns_reached_rate": _mean(s.finish_reason == "max_turns" for s in generated),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _group_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    unshaped = [{s.unshaped_reward for s in group} for group in groups.values()]
    return {
        "zero_variance_fraction": _mean(len({s.reward for s in group}) == 1 for group in groups.values()),
        "unshaped_zero_variance_fraction": _mean(len(rewards) == 1 for rewards in unshaped),
    }


def _reward_by(what: str, samples: Sequence[Sample], labels: Sequence[str]) -> dict[str, float]:
    """Mean reward of the samples under each label; a label that no sample has this step is not there."""
    by_label: dict[str, list[float]] = {}
    for sample, label in zip(samples, labels, strict=True):
        by_label.setdefault(label, []).append(sample.reward)
    return {f"reward_by_{what}/{label}": _mean(rewards) for label, rewards in sorted(by_label.items()) if label}


def _outcomes_by_env(samples: Sequence[Sample]) -> dict[str, float]:
    """Of each environment: its samples, and the share of them with each outcome; `ok` is its accuracy."""
    values: dict[str, float] = {}
    for name in sorted({s.env_name for s in samples}):
        outcomes = [s.outcome for s in samples if s.env_name == name]
        values[f"num_samples_by_env/{name}"] = len(outcomes)
        values |= {f"outcome_by_env/{name}/{known}": outcomes.count(known) / len(outcomes) for known in OUTCOMES}
    return values


def _length_bucket(length: int) -> str:
    """By powers of two: "000017-000032". Zeros in front keep the names in order."""
    top = 1 << max(length - 1, 0).bit_length()
    return f"{top // 2 + 1 if top > 1 else 0:06d}-{top:06d}"


_TIMERS = {"prepare_for_generation": "prepare_for_generation/total"}  # NeMo RL's name


class RunLog:
    """Files of a run folder and the console, written by rank 0 only."""

    def __init__(self, folder: Path, *, tensorboard: bool, first_step: int, num_steps: int, max_samples: int):
        self.folder, self.num_steps, self.max_samples = folder, num_steps, max_samples
        for name in ("metrics.jsonl", "samples.jsonl"):
            _drop_from(folder / name, first_step)
        self.metrics_file = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self.samples_file = (folder / "samples.jsonl").open("a", encoding="utf-8", buffering=1)
        events = str(folder / "tensorboard")
        self.tensorboard = SummaryWriter(events, purge_step=first_step) if tensorboard else None
        self.start, self.first_step = time.perf_counter(), first_step
        self.tokens_per_sec: list[float] = []

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """One object of metrics.jsonl and the same numbers to TensorBoard."""
        self.metrics_file.write(json.dumps({"step": step, **values}) + "\n")
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)

    def samples(
        self, step: int, kind: str, samples: Sequence[Sample], tokenizer: Tokenizer, num_print: int = 0
    ) -> None:
        """The first conversations to samples.jsonl, `num_print` of them to the console."""
        for i, sample in enumerate(samples[: max(self.max_samples, num_print)]):
            prompt, reply = (
                tokenizer.backend.decode(list(ids), skip_special_tokens=False)
                for ids in (sample.prompt_ids, sample.output_ids)
            )
            record = dict(
                step=step,
                kind=kind,
                row_id=sample.row_id,
                index=sample.index,
                prompt=prompt,
                reply=reply,
                reward=sample.reward,
                unshaped_reward=sample.unshaped_reward,
                outcome=sample.outcome,
                finish_reason=sample.finish_reason,
                weight_version=sample.weight_version,
                num_tokens=sample.num_tokens,
            )
            if i < self.max_samples:
                self.samples_file.write(json.dumps(record, ensure_ascii=False) + "\n")
            if i < num_print:
                print(f"    [{kind}] {prompt!r} -> {reply!r}  {sample.outcome}, reward {sample.reward:g}", flush=True)

    def step(self, step: int, train: dict[str, float], seconds: dict[str, float], world_size: int) -> None:
        """A training step: its object in metrics.jsonl and its one readable line."""
        total = seconds["total_step_time"]
        tokens_per_sec = train["total_num_tokens"] / total
        values = {f"train/{name}": value for name, value in train.items()}
        values |= {f"timing/train/{_TIMERS.get(name, name)}": value for name, value in seconds.items()}
        values["performance/tokens_per_sec"] = tokens_per_sec
        values["performance/tokens_per_sec_per_gpu"] = tokens_per_sec / world_size
        values["performance/samples_per_sec"] = train["global_valid_seqs"] / total
        values["performance/samples_per_sec_per_gpu"] = train["global_valid_seqs"] / total / world_size
        values["timing/train/valid_tokens_per_sec_per_gpu"] = train["global_valid_toks"] / total / world_size
        values["performance/policy_training_tokens_per_sec_per_gpu"] = (
            train["total_num_tokens"] / seconds["policy_training"] / world_size
        )
        values["performance/generation_tokens_per_sec_per_gpu"] = (
            train["total_gen_tokens"] / seconds["generation"] / world_size
        )
        self.metrics(step, values)
        self.tokens_per_sec.append(tokens_per_sec)
        eta = (time.perf_counter() - self.start) / (step - self.first_step + 1) * (self.num_steps - step)
        short = {"generation": "gen", "data_processing": "data", "policy_training": "train"}
        short["prepare_for_generation"] = "sync"
        phases = " ".join(f"{label} {seconds[name]:.2f}" for name, label in short.items())
        print(
            f"step {step}/{self.num_steps} | reward {train['reward']:.3f} acc {train['accuracy']:.3f} | "
            f"loss {train['loss']:+.4f} grad {train['grad_norm']:.3f} | "
            f"logp gap {train['logp_gap_mean']:.0e} max {train['logp_gap_max']:.0e} | "
            f"{tokens_per_sec:,.0f} tok/s | {total:.2f}s ({phases}) | ETA {int(eta) // 60}m{int(eta) % 60:02d}s",
            flush=True,
        )

    def validation(self, step: int, values: dict[str, float]) -> None:
        """A validation: an object of its own in metrics.jsonl, and a line."""
        self.metrics(step, values)
        accuracies = [f"{label} {value:.3f}" for label, value in _accuracies(values).items()]
        seconds = f"{values['timing/validation/total_validation_time']:.1f}s"
        print(" | ".join([f"validation after step {step}", *accuracies, seconds]), flush=True)

    def close(self, state: dict, seconds: float, checkpoints: Path, cfg: CheckpointingConfig) -> None:
        """The table a run ends with."""
        self.metrics_file.close()
        self.samples_file.close()
        if self.tensorboard:
            self.tensorboard.close()
        rows = []
        first, last = _accuracies(state["first_validation"]), _accuracies(state["last_validation"])
        for label in first | last or ("greedy", "sampled"):
            known = [f"{values[label]:.3f}" if label in values else "not measured" for values in (first, last)]
            rows.append((f"accuracy, {label}", " -> ".join(known)))
        median = float(np.median(self.tokens_per_sec)) if self.tokens_per_sec else float("nan")
        rows += [
            ("steps", f"{state['step']} ({len(self.tokens_per_sec)} of them in this process)"),
            ("seconds of training", f"{seconds:.0f} (validations and checkpoints included)"),
            ("tokens/s, median step", f"{median:,.0f}"),
            ("checkpoints", str(checkpoints) if cfg.enabled else "none (checkpointing.enabled=false)"),
            ("model, HF format", str(self.folder / "hf_model") if cfg.save_hf_at_end else "none"),
            ("metrics, samples", f"{self.folder / 'metrics.jsonl'}, {self.folder / 'samples.jsonl'}"),
            ("TensorBoard", f"tensorboard --logdir {self.folder}" if self.tensorboard else "none"),
        ]
        width = max(len(name) for name, _ in rows)
        print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows) + "\n", flush=True)


def _accuracies(values: dict[str, float]) -> dict[str, float]:
    """Mode -> accuracy; where there are several sets, "<set> <mode>"."""
    start, end = "validation/", "/accuracy"
    found = {name: value for name, value in values.items() if name.startswith(start) and name.endswith(end)}
    return {name[len(start) : -len(end)].replace("/", " "): value for name, value in found.items()}


def _drop_from(file: Path, first_step: int) -> None:
    """Removes what a run wrote after the checkpoint it is now resumed from (a last line cut by a kill included)."""
    if not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)  # bytes: text has other line ends too, and a cut can be no text
    kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] < first_step]
    file.write_bytes(b"".join(kept))
