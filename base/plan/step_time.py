"""The seconds of a step, and the bytes of its checkpoints, before a run: computed from counted FLOPs and bytes and from
the speeds of data sheets, not measured. Without torch. bench/results/step_time.md compares them with published
steps."""

import math
from dataclasses import dataclass

from base.plan.gpus import Gpu
from base.plan.memory_plan import NUMBER, Plan, count
from config import Config, num_recomputed

# Shares of a data sheet's speed that are reached: matmuls as in docs/scale.md, memory and links as NVIDIA's own tests.
MATMULS, MEMORY, LINKS = 0.35, 0.8, 0.8
DECODE = 3e-3  # seconds of a decoding step for scheduling and sampling; assumed
CPU_MEMORY = 100e9  # bytes a second of a host, for an optimizer that computes there; assumed
MEAN_RESPONSE = 300 / 768  # of the longest one; assumed: solutions of GSM8K where 768 tokens are allowed
GB = 1e9


@dataclass(frozen=True)
class Step:
    """Samples of a step on all GPUs: tokens of a prompt, tokens of a response (mean and longest), forwards that score;
    shared: whether a prompt is computed once for its group. The gradient is computed `epochs` times over all tokens, in
    `minibatches` optimizer steps each time."""

    samples: int
    prompt: float
    response: float
    longest: int
    scorings: int = 1
    group: int = 16
    shared: bool = True
    epochs: int = 1
    minibatches: int = 1

    @classmethod
    def of(cls, cfg: Config, prompt: float) -> "Step":
        """prompt: mean tokens of a prompt. All turns of a sample count as one response; an agent's as one reply."""
        grpo, policy = cfg.grpo, cfg.policy
        room = max(1, policy.max_total_sequence_length - math.ceil(prompt))
        longest = min(policy.generation.max_new_tokens * grpo.max_rollout_turns, room)
        return cls(
            samples=grpo.samples_per_step,
            prompt=prompt,
            response=longest * MEAN_RESPONSE,
            longest=longest,
            scorings=int(cfg.holds_reference),
            group=grpo.num_generations_per_prompt,
            shared=policy.sequence_packing.share_prefix,
            epochs=policy.ppo_epochs,
            minibatches=math.ceil(grpo.samples_per_step / cfg.samples_per_minibatch),
        )

    @property
    def tokens(self) -> float:
        return self.samples * (self.response + self.prompt / (self.group if self.shared else 1))


def phase_seconds(plan: Plan, gpu: Gpu, step: Step) -> dict[str, float]:
    """Seconds of each phase of a step."""
    model, policy, n = plan.model, plan.cfg.policy, plan.num_gpus
    shards, replicas = plan.num_shards, plan.num_gpus // plan.num_shards
    flops, memory, host = MATMULS * gpu.flops, MEMORY * gpu.memory, LINKS * gpu.host
    link = LINKS * speed_between(shards, plan, gpu)
    head, weights = plan.head, count(plan.shapes)
    tokens, length = step.tokens / n, round(step.prompt + step.response)
    # Of a forward: 2 for each weight and token (run.speed.train_flops), 4 for each pair that attention sees.
    attention = model.attention_flops(length) / length
    of_token = 2 * model.weights_per_token + attention + model.state_flops
    blocks_flops, head_flops = tokens * of_token, 2 * head * tokens
    again = policy.dtensor_cfg.activation_checkpointing
    part = num_recomputed(again, model.num_hidden_layers) / model.num_hidden_layers
    passes = 2 if plan.lora else 3  # LoRA makes no gradients of the frozen weights
    packs = max(step.minibatches, math.ceil(tokens / plan.tokens))
    # Gathers and reduce-scatters of FSDP run beside the matmuls: the longer of the two counts.
    gathered = packs * plan.precision * weights * (shards - 1) / shards / link
    num_sums = step.minibatches if policy.dtensor_cfg.defer_fsdp_grad_sync else packs
    summed = num_sums * 4 * count(plan.trained) * (shards - 1) / shards / link
    summed += num_sums * seconds_between_replicas(plan, gpu, replicas)
    fetched = 0.0
    if policy.dtensor_cfg.cpu_offload:
        fetched = packs * plan.precision * weights / shards / host
    computed = (blocks_flops * (passes + part) + passes * head_flops) / flops
    train = max(computed, 2 * (gathered + fetched) + summed)
    trained = count(plan.trained) / shards
    if policy.dtensor_cfg.cpu_offload:  # gradients to the host, 28 bytes for each number there, weights back
        optimizer = (8 / host + 28 * n / CPU_MEMORY) * trained
    elif policy.offload_optimizer_for_logprob:
        optimizer = (28 / memory + 16 / host) * trained
    else:
        optimizer = 28 / memory * trained
    copies = 1 / link + 1 / memory if n > 1 else 2 / memory
    return {
        "generate": generation_seconds(plan, gpu, step),
        "score": step.scorings * max((blocks_flops + head_flops) / flops, gathered + fetched),
        "train": step.epochs * (train + step.minibatches * optimizer),
        "sync": plan.engine_precision * weights * copies,
    }


def speed_between(num_gpus: int, plan: Plan, gpu: Gpu) -> float:
    """Bytes a second of a collective among so many neighbouring GPUs: over the links of a node, or over the network,
    where rings run through the cards of all GPUs of a node at once."""
    per_node = max(1, plan.num_gpus // plan.cfg.cluster.num_nodes)
    if num_gpus <= per_node:
        return gpu.link
    return min(gpu.link, per_node * gpu.network)


def seconds_between_replicas(plan: Plan, gpu: Gpu, replicas: int) -> float:
    """Of the all-reduce of a GPU's float32 gradients, which goes to the same shard of other replicas."""
    per_node = max(1, plan.num_gpus // plan.cfg.cluster.num_nodes)
    speed = gpu.link if plan.num_gpus <= per_node else gpu.network
    return 2 * 4 * count(plan.trained) / plan.num_shards * (replicas - 1) / replicas / (LINKS * speed)


def generation_seconds(plan: Plan, gpu: Gpu, step: Step) -> float:
    """Each decoding step reads the weights, those of all experts among them, and keys and values in the cache. There
    are as many steps as the longest response has tokens, and more where the cache does not hold all sequences at
    once."""
    tensor = plan.cfg.policy.generation.vllm_cfg.tensor_parallel_size
    samples = step.samples / plan.num_engines
    at_once = min(samples, 1024, plan.kv_cache / plan.kv_bytes / (step.prompt + step.response))
    # A response that ends makes room for another one: all waves but the last take as long as a mean response.
    num_steps = step.longest + (samples / at_once - 1) * step.response
    num_weights = count(plan.shapes, ".layers.") + plan.head
    weights = plan.engine_precision * num_weights / tensor / (MEMORY * gpu.memory)
    keys = samples * plan.kv_bytes * step.response * (step.prompt + step.response) / (MEMORY * gpu.memory)
    tokens = samples * (step.response + step.prompt / step.group)
    num_weights_per_token = plan.model.weights_per_token + plan.head
    matmuls = 2 * num_weights_per_token / tensor * tokens / (MATMULS * gpu.flops)
    return num_steps * (weights + DECODE) + keys + matmuls


def whole_step(phases: dict[str, float], cfg: Config) -> float:
    """Seconds of a step. Generators of their own draw the next step's samples while this one trains (async_grpo)."""
    others = sum(phases.values()) - phases["generate"]
    if cfg.policy.generation.num_generators and cfg.grpo.async_grpo.enabled:
        return max(phases["generate"], others)
    return phases["generate"] + others


def time_line(plan: Plan, gpu: Gpu, step: Step, num_steps: int) -> str:
    phases = phase_seconds(plan, gpu, step)
    seconds = whole_step(phases, plan.cfg)
    num_gpus = plan.num_gpus + plan.cfg.policy.generation.num_generators
    num_nodes = plan.cfg.cluster.num_nodes
    where = f"{num_gpus} {gpu.name}"
    if num_nodes > 1:
        where += f" in {num_nodes} nodes"
    parts = ", ".join(f"{phase} {number(value)}" for phase, value in phases.items())
    hours = number(seconds * num_steps / 3600)
    return (
        f"time       {number(seconds)} s a step on {where} ({parts}), {hours} h for {num_steps:,} steps: computed, not "
        f"measured, for prompts of {step.prompt:,.0f} tokens and responses of {step.response:,.0f}, at most "
        f"{step.longest:,}; graders, agents and validation come on top (docs/gpus.md)"
    )


# ------------------------------------------------------------------------------------------------------------- the disk


def checkpoint_bytes(plan: Plan) -> int:
    """What checkpoint.py writes of all ranks: the weights in float32, with LoRA those of the adapters, the optimizer's
    moments, and the copy of reference.py unless it is a model of its own."""
    trained = count(plan.trained)
    first = NUMBER[plan.cfg.policy.optimizer.kwargs.state_dtype]
    size = (4 + first + 4) * trained - 4 * count(plan.matrices)
    if not plan.lora:
        size += 4 * (count(plan.shapes) - trained)  # frozen routers
    if plan.cfg.holds_reference and plan.teacher is None:
        size += (4 if plan.cfg.grpo.ref_policy_update_alpha < 1 else plan.precision) * trained
    return size


def disk_line(plan: Plan) -> str:
    parts = []
    cfg = plan.cfg.checkpointing
    if cfg.enabled:
        size = checkpoint_bytes(plan)
        kept = cfg.keep_latest + (cfg.keep_top_k or 0)
        whole = number((kept + 1) * size / GB)
        parts.append(f"{number(size / GB)} GB a checkpoint; {kept} kept and one being written: {whole} GB")
    if cfg.save_hf_at_end:
        parts.append(f"the exported weights {number(plan.precision * count(plan.shapes) / GB)} GB")
    return f"disk       {'; '.join(parts) or 'no checkpoints, no exported weights'}"


def number(value: float) -> str:
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"
