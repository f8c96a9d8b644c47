"""How fast a step was: tokens and samples per second, FLOPs, and the share of the GPU's peak."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist

from base.hf.model_config import ModelConfig
from base.system.ranks import gather
from config import LoRAConfig, PolicyConfig
from metrics import Numbers
from pack import MicroBatch, Minibatch


def train_flops(config: ModelConfig, micros: Iterable[MicroBatch], lora: LoRAConfig | None = None) -> int:
    """FLOPs of one forward and backward of these micro-batches. Nothing is read from a device.

    "Model FLOPs" (PaLM, arXiv 2204.02311, appendix B): the matmuls that log-probabilities and their gradients need. A
    weight of a block's matrix: 6 for each token of a pack, where a shared prompt is once, and of an expert's, for each
    token that it gets. Attention: 12 N H for each layer and pair of a query and a key that it sees, of which a window
    leaves fewer; H is the mean of keys and values. A layer with state: 3 times what `ModelConfig.state_flops` names.
    Head: 2 D V for each row, and 4 D V for each that can have a gradient. With `lora` those of frozen weights are not
    made: 4 for each of theirs and of the factors', 2 D V. Not counted: what backward computes again (activations,
    scores of flash attention, logits of two passes), merging.
    """
    num_weights = config.weights_per_token
    passes = 3  # forward, gradients of the inputs, gradients of the weights
    if lora and lora.enabled:
        from base.hf.lora_layers import adapted_layers  # a run without LoRA does without

        adapters = adapted_layers(config, lora)
        num_weights += sum(lora.dim * (outputs + inputs) for outputs, inputs in adapters.values())
        passes = 2
    flops = 0
    for micro in micros:
        flops += 2 * passes * num_weights * len(micro.token_T)
        flops += 3 * config.state_flops * len(micro.token_T)
        lengths = np.diff(micro.layout.bounds).tolist()
        for length, prefix in zip(lengths, micro.layout.prefixes, strict=True):
            before = lengths[prefix] if prefix >= 0 else 0
            flops += 3 * (config.attention_flops(before + length) - config.attention_flops(before))
        passes_of_rows = len(micro.pos_R) + (passes - 1) * micro.num_grad_rows
        flops += 2 * passes_of_rows * config.hidden_size * config.vocab_size
    return flops


def performance_metrics(
    train: Numbers, seconds: Numbers, minibatches: list[Minibatch], model: ModelConfig, policy: PolicyConfig
) -> Numbers:
    """How fast a step was: names and TFLOP/s as NeMo RL has them (`performance_metrics`, nemo_rl/algorithms/utils.py,
    7ea279a). train, seconds: the step's metrics and phases. What was not done has no rate (scoring), and a device of
    unknown peak no utilisation. A collective of all ranks."""
    micros = [micro for minibatch in minibatches for micro in minibatch.micros]
    own_flops = policy.ppo_epochs * train_flops(model, micros, policy.dtensor_cfg.lora_cfg)
    flops = sum(gather(float(own_flops)))
    tokens = train["total_num_tokens"]
    total = seconds["total_step_time"]
    training = seconds["policy_training"]
    scoring = seconds["policy_and_reference_logprobs"]
    num_trainers = dist.get_world_size()
    num_generators = policy.generation.num_generators
    num_all = num_trainers + num_generators
    num_generating = num_generators or num_trainers
    values = {
        "performance/tokens_per_sec": tokens / total,
        "performance/samples_per_sec": train["global_valid_seqs"] / total,
        "performance/generation_tokens_per_sec": train["total_gen_tokens"] / seconds["generation"],
        "performance/training_worker_group_tokens_per_sec": tokens / (training + scoring),
    }
    num_gpus = {  # at work
        "performance/tokens_per_sec": num_all,
        "performance/samples_per_sec": num_all,
        "performance/generation_tokens_per_sec": num_generating,
        "performance/training_worker_group_tokens_per_sec": num_trainers,
    }
    for name, num in num_gpus.items():
        values[f"{name}_per_gpu"] = values[name] / num
    values["performance/policy_training_tokens_per_sec_per_gpu"] = tokens / training / num_trainers
    train_tflops = flops / training / 1e12 / num_trainers
    values["performance/train_flops_per_gpu"] = train_tflops
    is_scored = micros[0].old_logp_R is not None or micros[0].ref_logp_R is not None
    if is_scored:
        values["performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu"] = tokens / scoring / num_trainers
    if policy.precision == "bfloat16":
        from base.plan.gpus import PEAK_FLOPS  # in bfloat16

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        if device in PEAK_FLOPS:
            values["performance/train_fp_utilization"] = train_tflops * 1e12 / PEAK_FLOPS[device]
    values["performance/train_tokens"] = train["train_tokens"]
    values["timing/train/valid_tokens_per_sec_per_gpu"] = train["global_valid_toks"] / total / num_all
    return values
