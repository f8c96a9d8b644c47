"""Numbers of a step: of its samples, of its loss, reduced over micro-batches and ranks, and of its speed.

The reduction rule, which loss.py is written for: a pair (sum, count) adds up on both sides and is divided once, at the
very end; a name that ends in `_min` or `_max` takes the extremum; any other scalar adds up. Never a mean of means
(huggingface/trl#6380).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from batch import MicroBatch, Minibatch
from config import LoRAConfig, PolicyConfig
from data import Sample, groups_of
from envs import OUTCOMES
from hf.lora_layers import adapted_layers
from hf.model_config import ModelConfig

Metric = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Numbers = dict[str, float]  # a metric's name -> its value

# Dense bfloat16 TFLOP/s by torch.cuda.get_device_name; a part of a GPU (MIG) has another name. From NVIDIA's data
# sheets, which print twice as much: with sparsity.
PEAK_TFLOPS = dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 312.0)
PEAK_TFLOPS |= dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), 312.0)
PEAK_TFLOPS |= dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"), 989.5)
PEAK_TFLOPS |= {"NVIDIA H100 PCIe": 756.5, "NVIDIA H100 NVL": 835.5, "NVIDIA H200 NVL": 835.5}
PEAK_TFLOPS |= {"NVIDIA B200": 2250.0, "NVIDIA B300": 2250.0, "NVIDIA GB200": 2500.0}


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
    if not total:
        return {}
    parts = [part for value in total.values() for part in (value if isinstance(value, tuple) else (value,))]
    local = torch.stack([torch.as_tensor(part).detach().double().cpu() for part in parts])
    # Gathered and then combined: the MIN and MAX of gloo's all_reduce lose a NaN of any rank but the first.
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    of_ranks = torch.stack(gathered)
    combined = zip(of_ranks.sum(0).tolist(), of_ranks.amin(0).tolist(), of_ranks.amax(0).tolist(), strict=True)
    reduced = {}
    for name, value in total.items():
        summed, low, high = next(combined)
        if isinstance(value, tuple):
            count, _, _ = next(combined)
            reduced[name] = summed / count if count else float("nan")
        elif name.endswith(("_min", "_max")):
            reduced[name] = low if name.endswith("_min") else high
        else:
            reduced[name] = summed / divide_sums_by
    return reduced


def derived_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Reduced metrics -> the same with what is no mean, and NeMo RL's names where the reduction needs another ending.

    effective_sample_size of the sampler weights (Kish 1965): (sum w)^2 / (n sum w^2), from 1/n (one weight is
    everything) to 1 (all equal), over n tokens, or sequences where weights are theirs. It takes the place of
    importance_weight_square, of which it is made.
    """
    pattern = r"(seq_mult_prob_error(?:_after_mask)?)(?:_(min|max))?"
    metrics = {re.sub(pattern, lambda m: f"{m[2] or 'mean'}_{m[1]}", name): x for name, x in metrics.items()}
    if "importance_weight_square" in metrics:
        mean, square = metrics["importance_weight_mean"], metrics.pop("importance_weight_square")
        metrics["effective_sample_size"] = mean**2 / square if square else math.nan
    return metrics


def sample_metrics(generated: Sequence[Sample], trained: Sequence[Sample]) -> dict[str, float]:
    """Numbers of the samples of a step, all ranks': `generated`, of which dynamic sampling left `trained`.

    Names are NeMo RL's where it has one. Means are over all generated samples: they show the policy, the kept ones only
    the middle of the problems. Of `trained`: filtered_reward and total_num_tokens. zero_variance_fraction is of the
    groups' rewards that the advantages see, unshaped_zero_variance_fraction of those before shaping.
    """
    tokens_B = np.array([s.num_gen_tokens for s in generated])
    turns_B = np.array([s.num_turns for s in generated])
    groups = groups_of(generated)
    return {
        "reward": _mean(s.reward for s in generated),
        "filtered_reward": _mean(s.reward for s in trained),
        "unshaped_reward": _mean(s.unshaped_reward for s in generated),
        "accuracy": _mean(s.outcome == "ok" for s in generated),
        **{f"outcome/{name}": _mean(s.outcome == name for s in generated) for name in OUTCOMES[1:]},
        "zero_variance_fraction": _mean(len({s.reward for s in group}) == 1 for group in groups),
        "unshaped_zero_variance_fraction": _mean(len({s.unshaped_reward for s in group}) == 1 for group in groups),
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


def train_flops(config: ModelConfig, micros: Iterable[MicroBatch], lora: LoRAConfig | None = None) -> int:
    """FLOPs of one forward and backward of these micro-batches. Nothing is read from a device.

    "Model FLOPs" (PaLM, arXiv 2204.02311, appendix B): the matmuls that log-probabilities and their gradients need. A
    weight of a block's matrix: 6 for each token of a pack, where a shared prompt is once. Attention: 12 N H for each
    layer and pair of a query and a key that it sees. Head: 2 D V for each row, and 4 D V for each that can have a
    gradient. With `lora` those of frozen weights are not made: 4 for each of theirs and of the factors', 2 D V. Not
    counted: what backward computes again (activations, scores of flash attention, logits of two passes), merging.
    """
    matrices = [shape for name, shape in config.tensor_shapes() if ".layers." in name and len(shape) == 2]
    adapters = adapted_layers(config, lora) if lora else {}
    num_weights = sum(map(math.prod, matrices)) + sum(lora.dim * sum(shape) for shape in adapters.values())
    passes = 2 if adapters else 3  # forward, the inputs' gradients, the weights'
    pair_flops = 12 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    flops = 0
    for micro in micros:
        length_S = np.diff(micro.cu_seqlens).astype(np.int64)
        prefix_length_S = np.where(micro.prefix_S >= 0, length_S[micro.prefix_S], 0)
        num_pairs = int((length_S * (length_S + 1) // 2 + length_S * prefix_length_S).sum())
        head = 2 * (len(micro.pos_R) + (passes - 1) * micro.num_grad_rows) * config.hidden_size * config.vocab_size
        flops += 2 * passes * num_weights * len(micro.token_T) + pair_flops * num_pairs + head
    return flops


def performance_metrics(
    train: Numbers, seconds: Numbers, minibatches: list[Minibatch], model: ModelConfig, policy: PolicyConfig
) -> Numbers:
    """How fast a step was: names and TFLOP/s as NeMo RL has them (`performance_metrics`, nemo_rl/algorithms/utils.py,
    7ea279a). train, seconds: the step's metrics and phases. What was not done has no rate (scoring), and a device of
    unknown peak no utilisation. A collective of all ranks."""
    micros = [micro for minibatch in minibatches for micro in minibatch.micros]
    flops = torch.tensor(
        policy.ppo_epochs * train_flops(model, micros, policy.dtensor_cfg.lora_cfg), dtype=torch.float64
    )
    dist.all_reduce(flops)
    tokens, total = train["total_num_tokens"], seconds["total_step_time"]
    training, scoring = seconds["policy_training"], seconds["policy_and_reference_logprobs"]
    rates = {
        "tokens_per_sec": tokens / total,
        "samples_per_sec": train["global_valid_seqs"] / total,
        "generation_tokens_per_sec": train["total_gen_tokens"] / seconds["generation"],
        "training_worker_group_tokens_per_sec": tokens / (training + scoring),
    }
    values = {f"performance/{name}": rate for name, rate in rates.items()}
    num_trainers = dist.get_world_size()
    num_generators = policy.generation.num_generators
    num_all = num_trainers + num_generators
    gpus = defaultdict(lambda: num_trainers, tokens_per_sec=num_all, samples_per_sec=num_all)  # at work, by rate
    gpus["generation_tokens_per_sec"] = num_generators or num_trainers
    rates |= {"policy_training_tokens_per_sec": tokens / training, "train_flops": flops.item() / training / 1e12}
    if micros[0].old_logp_R is not None or micros[0].ref_logp_R is not None:
        rates["policy_and_reference_logprobs_tokens_per_sec"] = tokens / scoring
    values |= {f"performance/{name}_per_gpu": rate / gpus[name] for name, rate in rates.items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if policy.precision == "bfloat16" and device in PEAK_TFLOPS:
        values["performance/train_fp_utilization"] = values["performance/train_flops_per_gpu"] / PEAK_TFLOPS[device]
    values["performance/train_tokens"] = train["train_tokens"]
    values["timing/train/valid_tokens_per_sec_per_gpu"] = train["global_valid_toks"] / total / gpus["tokens_per_sec"]
    return values


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _reward_by(category: str, samples: Sequence[Sample], labels: Sequence[str]) -> dict[str, float]:
    """Mean reward of the samples under each label; a label that no sample has this step is not there."""
    by_label = defaultdict(list)
    for sample, label in zip(samples, labels, strict=True):
        by_label[label].append(sample.reward)
    return {f"reward_by_{category}/{label}": _mean(rewards) for label, rewards in sorted(by_label.items()) if label}


def _outcomes_by_env(samples: Sequence[Sample]) -> dict[str, float]:
    """The samples of each environment, and the share of them with each outcome; `ok` is its accuracy."""
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
