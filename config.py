"""Every key of a run's configuration: type, default, bounds, and below it the meaning that --help and errors show. A
key of NeMo RL has its name, and its default in `grpo_math_1B.yaml` unless the meaning says otherwise. No torch."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, dataclass_transform, get_origin

MAX_LOG_RATIO = 20.0  # |logp - old logp| is clamped to this: beyond, the ratio has no gradient; exp never overflows
ENVIRONMENTS = ("exact", "math", "code", "reward_model", "math_multi_reward")
ImportanceSampling = Literal["tis", "icepop", "seq-mask-tis", "sequence", "sequence-truncate", "sequence-mask"]


class ConfigError(Exception):
    """A user's mistake: each argument is a line. The program exits with 2."""

    def __str__(self) -> str:
        return "\n".join(printable(line) for line in self.args)


class DataError(ConfigError):
    """A dataset or model folder that the run cannot use. The message names the file and the fix."""


def printable(line: str) -> str:
    """A line of a message, with escapes in place of control characters and line ends."""
    escaped = [character if character.isprintable() else ascii(character).strip("'") for character in line]
    return "".join(escaped)


def shortened(value: Any) -> str:
    """A value in a message: its repr, on one line, without its middle where it is longer than 80 characters."""
    text = repr(value) if isinstance(value, str) else reprlib.repr(value)  # quick for a deep nest or a million items
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-25:]}"


def key(default: Any, bounds: str) -> Any:
    """A config key whose value, or each number of it, must be within `bounds`, such as "> 0" or ">= 0, < 1"."""
    return field(default=default, metadata={"bounds": bounds})


@dataclass_transform(frozen_default=True)
class Section:
    """Each subclass becomes a frozen dataclass: a section of the config, with a default for each key."""

    def __init_subclass__(cls) -> None:
        mutable = [name for name, kind in cls.__annotations__.items() if get_origin(kind) in (list, dict)]
        assert not mutable, f"{cls.__name__}.{mutable[0]}: the type of a key is frozen: tuple[..., ...] or Mapping"
        dataclass(frozen=True, kw_only=True)(cls)  # forks add keys anywhere


class AdvEstimatorConfig(Section):
    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "max_rl", "opo", "gpg", "pkpo", "grpo_passk", "none"] = "grpo"
    """grpo compares the rewards of a group. gdpo does so for each of several rewards, then whitens their weighted sum
    over the batch. reinforce_plus_plus whitens the rewards over the tokens of the batch. max_rl divides by the group's
    mean reward, opo weighs the group's mean by length, and gpg scales by the share of samples with a reward. pkpo
    trains the best of pass_k samples, and grpo_passk, verl's, only the best sample of a group. none ignores the rewards
    and trains only the KL: on-policy distillation, with policy.reference_model_name."""
    minus_baseline: bool = True
    """reinforce_plus_plus first subtracts the mean reward of the group."""
    reward_weights: tuple[float, ...] | None = None
    """gdpo multiplies the rewards by these weights, in the alphabetical order of their names; null means 1 each."""
    pass_k: int = key(4, ">= 2")
    """pkpo raises the expected best reward of this many samples: pass@k, for rewards of 0 and 1."""


class RewardScalingConfig(Section):
    enabled: bool = False
    """Rewards are clamped to the source range, then mapped linearly to the target range."""
    source_min: float = 0.0
    """Rewards at or below this become target_min."""
    source_max: float = 1.0
    """Rewards at or above this become target_max."""
    target_min: float = 0.0
    """No scaled reward is lower than this."""
    target_max: float = 1.0
    """No scaled reward is higher than this."""


class RewardShapingConfig(Section):
    enabled: bool = False
    """Long responses lose reward, by DAPO's overlong penalty or by stop_properly_penalty_coef."""
    overlong_buffer_length: int = key(128, ">= 1")
    """The penalty starts this many tokens before max_response_length and grows linearly."""
    overlong_buffer_penalty: float = key(1.0, ">= 0")
    """A response of max_response_length tokens loses this much reward."""
    max_response_length: int | None = key(None, ">= 1")
    """The full penalty is due at this many tokens of all turns; null means max_rollout_turns times max_new_tokens."""
    stop_properly_penalty_coef: float | None = key(None, ">= 0, <= 1")
    """Truncated responses keep this share of their reward, and the overlong penalty is off; null leaves it on."""


class AsyncGRPOConfig(Section):
    enabled: bool = False
    """A step waits only for responses to its own prompts; responses to later prompts continue with the new weights."""
    max_trajectory_age_steps: int = key(1, ">= 0")
    """A trained token comes from weights at most this many steps older than the newest; 0 is as without async_grpo."""
    in_flight_weight_updates: bool = False
    """With colocated.enabled=false: true loads new weights during responses, false lets responses end first."""
    recompute_kv_cache_after_weight_updates: bool = True
    """After a sync, unfinished responses get keys and values of the new weights. If false (NeMo RL's default), their
    later tokens come from a mixture of weights, and the logp gap leaves those tokens out."""

    @property
    def max_age(self) -> int:
        """max_trajectory_age_steps, or 0 if async_grpo is off."""
        return self.max_trajectory_age_steps if self.enabled else 0


class GRPOConfig(Section):
    num_prompts_per_step: int = key(32, ">= 1")
    """A step is one rollout of this many prompts, over all ranks, plus one or more optimizer steps on its samples."""
    num_generations_per_prompt: int = key(16, ">= 2")
    """A step samples this many responses per prompt; they form a group."""
    max_rollout_turns: int = key(1, ">= 1")
    """The policy replies at most this many times in a conversation; an environment may end it sooner."""
    max_num_epochs: int = key(1, ">= 1")
    """The run ends after this many passes over the training data, or after max_num_steps if that is sooner."""
    max_num_steps: int = key(1_000_000, ">= 1")
    """The run ends after this many steps, or after max_num_epochs."""
    normalize_rewards: bool = True
    """grpo and gdpo divide each advantage by a standard deviation of rewards, which reward_std names; grpo_passk by the
    group's."""
    use_leave_one_out_baseline: bool = True
    """grpo and gdpo subtract the mean reward of the group's other samples. If false, they subtract the group's mean."""
    reward_std: Literal["baseline", "group", "batch"] = "baseline"
    """The standard deviation is over the rewards in the baseline (NeMo RL), the group or the batch. For group and batch
    it gets 1e-4 added (TRL)."""
    reward_std_floor: float = key(0.05, ">= 0, <= 1")
    """A leave-one-out standard deviation above 0 counts as at least this share of the range of the group's rewards; 0
    sets no floor."""
    adv_estimator: AdvEstimatorConfig = AdvEstimatorConfig()
    turn_level_advantages: bool = False
    """The tokens of a turn get an advantage from that turn's own scaled reward, compared with the same turn of the
    group's other samples. If false, all tokens of a conversation get the advantage of the sum of its rewards."""
    advantage_clip_low: float | None = None
    """Advantages below this are raised to it; null means no limit."""
    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it; null means no limit."""
    seq_logprob_error_threshold: float | None = key(None, ">= 1")
    """Sequences whose mean exp(|sampler - trainer log-probability|) exceeds this are not trained on; null keeps all."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    async_grpo: AsyncGRPOConfig = AsyncGRPOConfig()
    overlong_filtering: bool = False
    """Truncated samples are not trained on; their rewards still count in their group's baseline."""
    use_dynamic_sampling: bool = False
    """As in DAPO, prompts are drawn until a step is full of groups whose unshaped rewards differ within the group."""
    batch_multiplier: float = key(1.0, ">= 1")
    """use_dynamic_sampling draws this many times num_prompts_per_step prompts at once."""
    dynamic_sampling_max_gen_batches: int = key(10, ">= 1")
    """At most this many batches are drawn to fill a step (use_dynamic_sampling), or to find a sample to train on."""
    dynamic_sampling_when_exhausted: Literal["stop", "train"] = "stop"
    """If the step is still not full, stop saves, exports and ends the run; train trains on the groups it has."""
    ref_policy_update_period: int | None = key(None, ">= 1")
    """The reference policy is updated once in this many steps; null leaves it at the initial weights."""
    ref_policy_update_alpha: float = key(1.0, "> 0, <= 1")
    """An update sets the reference to alpha * policy + (1 - alpha) * reference."""
    val_period: int = key(10, ">= 0")
    """Validation runs once in this many steps; 0 leaves only val_at_start and val_at_end."""
    val_at_start: bool = False
    """Validation runs before the first step."""
    val_at_end: bool = False
    """Validation runs after the last step."""
    max_val_samples: int = key(256, ">= 1")
    """Validation uses at most this many problems of each set, from the top of the file."""
    val_num_generations_per_prompt: int = key(1, ">= 1")
    """Sampled validation draws this many responses per problem, for pass@k and maj@k; greedy validation draws one."""
    val_temperature: float | None = key(None, "> 0")
    """Sampled validation divides the logits by this; null means policy.generation.temperature."""
    val_top_p: float | None = key(None, "> 0, <= 1")
    """Sampled validation keeps only the likeliest tokens that hold this probability; null: policy.generation.top_p."""
    val_top_k: int | None = key(None, ">= 0")
    """Sampled validation draws from this many likeliest tokens, 0 from all; null: policy.generation.top_k."""
    val_max_new_tokens: int | None = key(None, ">= 1")
    """A validation response has at most this many tokens; null means policy.generation.max_new_tokens."""
    seed: int = key(42, ">= 0, < 4294967296")
    """The seed fixes the order of the data and all samples; on a CPU, without async_grpo, a run repeats exactly."""
    logp_gap_limit: float | None = key(0.1, "> 0")
    """An optimizer step is bad if the mean |sampler - trainer log-probability| of its tokens, in nats, exceeds this;
    null means no limit. bfloat16 gives up to 0.05, float32 1e-6."""
    canary_period: int = key(10, ">= 0")
    """Once in this many steps, a fixed prompt tests the logp gap against logp_gap_limit; 0 tests it only at start."""
    max_bad_steps: int = key(0, ">= 0")
    """A step with a bad gap, or without a finite loss and gradient, is skipped; more than this in a row end the run."""
    allow_pack_dependence: bool = False
    """A loss.py whose gradient depends on how sequences are packed is trained. If false, it is refused at the start."""

    @property
    def prompts_per_batch(self) -> int:
        """The number of prompts that are drawn at once."""
        return int(round(self.num_prompts_per_step * self.batch_multiplier, 9))  # 100 x 1.15 is 114.99999999999999

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    def max_num_seqs(self, num_engines: int) -> int:
        """The most samples in an engine at once, <= 1024: with async_grpo those of a training batch, else those of the
        larger of training batch and validation."""
        most = math.ceil(self.prompts_per_batch / num_engines) * self.num_generations_per_prompt
        if not self.async_grpo.enabled:
            of_validation = math.ceil(self.max_val_samples / num_engines) * self.val_num_generations_per_prompt
            most = max(most, of_validation)
        return min(1024, most)


class LossConfig(Section):
    ratio_clip_min: float = key(0.2, ">= 0, <= 1")
    """The probability ratio is clipped from below at 1 - this."""
    ratio_clip_max: float = key(0.2, ">= 0")
    """The probability ratio is clipped from above at 1 + this."""
    ratio_clip_c: float | None = key(None, "> 1")
    """A token with negative advantage has at most this * |advantage| as loss (dual clip); null means no limit."""
    token_level_loss: bool = True
    """The loss is the mean over tokens. If false, it is the mean over samples of their token means. All sequences of
    an agent's rollout are one sample."""
    loss_scale_factor: float | None = key(None, "> 0")
    """As in Dr. GRPO, this length divides each sequence's token sum; null divides by the sequence's own length. With
    token_level_loss it divides the sum of all tokens, in place of their number."""
    token_loss: Literal["ppo", "sapo", "dppo", "ipo", "dppo_tv", "gmpo"] = "ppo"
    """The loss of a token: PPO's clip, SAPO's gate, the masks of prime-rl's DPPO and IPO or of verl's dppo_tv on the
    change of a token's probability, or GMPO's geometric mean. use_cispo and disable_ppo_ratio replace ppo. GSPO is
    sequence_level_importance_ratios."""
    sapo_tau_positive: float = key(1.0, "> 0")
    """SAPO's gate is this steep where the advantage is positive."""
    sapo_tau_negative: float = key(1.05, "> 0")
    """SAPO's gate is this steep where the advantage is not positive."""
    dppo_mask_low: float = key(0.2, ">= 0")
    """dppo, ipo and dppo_tv remove the gradient of a token whose probability has fallen by more than this."""
    dppo_mask_high: float = key(0.2, ">= 0")
    """dppo, ipo and dppo_tv remove the gradient of a token whose probability has risen by more than this."""
    dppo_kl_tau: float = key(1e-3, ">= 0")
    """dppo and ipo add the square of the log-ratio with this weight."""
    off_policy_mask_threshold: float | None = key(None, ">= 0")
    """Sequences of negative advantage are not trained where the sampler's mean log-probability is above the policy's
    by more than this (DeepSeek-V3.2); null trains them."""
    token_rejection_ratio_min: float | None = key(None, "> 0")
    """Tokens whose probability in the trainer is below this times the sampler's are not trained; null sets no bound."""
    token_rejection_ratio_max: float | None = key(None, "> 0")
    """Tokens whose probability in the trainer is above this times the sampler's are not trained; null sets no bound."""
    sequence_rejection_ratio_min: float | None = key(None, "> 0")
    """Sequences whose geometric mean of these ratios is below this are not trained; null sets no bound."""
    sequence_rejection_ratio_max: float | None = key(None, "> 0")
    """Sequences whose geometric mean of these ratios is above this are not trained; null sets no bound."""
    disable_ppo_ratio: bool = False
    """The log-probability replaces the ratio, which makes this the plain policy gradient."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """trainer: the ratio compares with the policy at the start of the step. sampler: with the policy that drew the
    token; tokens of older weights are then clipped too, no forward precedes the step, and no correction is needed."""
    force_on_policy_ratio: bool = False
    """The ratio counts as 1, which is exact with one optimizer step per rollout."""
    sequence_level_importance_ratios: bool = False
    """As in GSPO, the tokens of a sequence share one ratio, from the mean of their log-ratios."""
    gspo_token: bool = False
    """As in GSPO-token, each token's own log-probability has the gradient of the shared ratio (verl)."""
    use_cispo: bool = False
    """As in CISPO, the clipped ratio is a constant weight on the log-probability."""
    reference_policy_kl_penalty: float = key(0.01, ">= 0")
    """The KL of policy and reference policy has this weight; with 0 there is no reference policy."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """The KL is estimated by Schulman's k1, k2 or k3."""
    topk_logits_k: int | None = key(None, ">= 1")
    """The KL is over this many ids that are likeliest under the reference, with the rest as one, not over the sampled
    token alone (NeMo RL's distillation.topk_logits_k). null: it is estimated."""
    kl_gradient: Literal["score_function", "policy_ratio", "plain"] = "score_function"
    """score_function is the gradient of the KL at each token's own state (NeMo RL); policy_ratio is too, in later
    optimizer steps of a rollout as well (DeepSeek-V3.2, TRL); plain is the gradient of the estimator (verl)."""
    kl_input_clamp_value: float | None = key(20.0, "> 0")
    """The KL clamps each log-probability difference to +-this; null means no limit."""
    kl_output_clamp_value: float | None = key(10.0, "> 0")
    """The KL of a token is clamped to +-this; null means no limit."""
    use_on_policy_kl_approximation: bool = False
    """The KL of a token is weighted by the ratio of its policy and sampler probabilities."""
    use_importance_sampling_correction: bool = False
    """The loss of a token is weighted by the ratio of its trainer and sampler probabilities."""
    truncated_importance_sampling_type: ImportanceSampling | None = None
    """tis clamps the weights to the bounds, icepop zeroes those outside, and seq-mask-tis zeroes sequences whose
    geometric mean is outside. sequence multiplies the weights of a sequence into one; sequence-truncate and
    sequence-mask then bound it as tis and icepop do. With null, tokens are weighted without bounds."""
    importance_sampling_correction_level: Literal["token", "sequence_mean", "sequence_sum"] = "sequence_sum"
    """With GSPO, the log of a token's weight is its own log-ratio, or the mean or the sum over its sequence. NeMo RL
    takes the sum, which is noisy for long sequences."""
    truncated_importance_sampling_ratio: float | None = key(None, "> 0")
    """The weights have this upper bound."""
    truncated_importance_sampling_ratio_min: float | None = key(None, ">= 0")
    """The weights have this lower bound; null means 0, but icepop and seq-mask-tis need a number."""
    entropy_coef: float = key(0.0, ">= 0")
    """The entropy bonus has this weight; the entropy is exact, over all tokens that top_p and top_k keep."""
    entropy_target: float | None = key(None, "> 0")
    """The weight starts at entropy_coef and moves after each optimizer step: up if the mean entropy of its tokens, in
    nats, is at most this, else down, and then there is no bonus in the next one (TRL). null: it stays."""
    entropy_coef_delta: float = key(0.005, "> 0")
    """The weight of the entropy bonus moves by this much (entropy_target)."""
    entropy_coef_max: float = key(1.0, "> 0")
    """The weight of the entropy bonus rises to this at most (entropy_target)."""
    positive_example_nll_weight: float = key(0.0, ">= 0")
    """Samples with a reward above 0 add their -log-probability with this weight."""

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has an entropy bonus, be its weight 0 at present."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def has_rejection(self) -> bool:
        """Whether tokens or sequences are rejected by their ratios."""
        of_tokens = (self.token_rejection_ratio_min, self.token_rejection_ratio_max)
        of_sequences = (self.sequence_rejection_ratio_min, self.sequence_rejection_ratio_max)
        return any(bound is not None for bound in of_tokens + of_sequences)


class LoRAConfig(Section):
    enabled: bool = False
    """The weights are frozen, and a low-rank adapter of each adapted layer is trained."""
    dim: int = key(8, ">= 1")
    """The adapters have this rank."""
    alpha: float = key(32.0, "> 0")
    """The product of an adapter's factors is multiplied by alpha / dim."""
    lora_A_init: Literal["xavier", "uniform"] = "xavier"
    """The first factor is initialized as Glorot normal or Kaiming uniform, the second as zeros."""
    match_all_linear: bool = True
    """All linear layers of the blocks are adapted, but not the head, which NeMo RL adapts too."""
    target_modules: tuple[str, ...] = ()
    """Without match_all_linear, only layers of these names or patterns, such as *.layers.0.*, are adapted."""
    exclude_modules: tuple[str, ...] = ()
    """Without match_all_linear and target_modules, all layers are adapted except layers of these names."""


LORA_KEY = "policy.dtensor_cfg.lora_cfg"


class AutomodelKwargs(Section):
    force_hf: bool = False
    """transformers' blocks compute Qwen2, Qwen3 and Llama too, uncompiled, as they do all other families."""


# Which blocks the backward pass computes again: all, or the first N; "offload" is all, with their inputs on the host.
Recompute = bool | int | Literal["offload"]


def num_recomputed(recompute: Recompute, num_blocks: int) -> int:
    """How many of the blocks are computed again."""
    if recompute is True or recompute == "offload":
        return num_blocks
    return min(int(recompute), num_blocks)


class DTensorConfig(Section):
    activation_checkpointing: Recompute = key(False, ">= 0")
    """The backward pass computes all blocks again, or this many of them, which is slower and saves memory. offload:
    all, and their inputs wait in pinned host memory, for sequences that do not fit otherwise."""
    cpu_offload: bool = False
    """Weights, gradients and moments are in host memory, and the optimizer computes there, which is slow."""
    defer_fsdp_grad_sync: bool = False
    """Ranks sum gradients after the last pack, not after each: faster if host or links limit; whole gradients wait."""
    dp_replicate_size: int = key(1, ">= 1")
    """Training ranks form this many replicas, for example one per node; each shards weights and optimizer states."""
    automodel_kwargs: AutomodelKwargs = AutomodelKwargs()
    lora_cfg: LoRAConfig = LoRAConfig()

    def keeps_single_shard(self, num_trainers: int) -> bool:
        """Where nobody knows a GPU's memory: whether the weights stay gathered for all packs of a phase. Those of a
        single shard do, unless LoRA has frozen them or host memory holds them."""
        is_single_shard = num_trainers == self.dp_replicate_size
        return is_single_shard and not (self.cpu_offload or self.lora_cfg.enabled)


class SequencePackingConfig(Section):
    train_mb_tokens: int | None = key(None, ">= 1")
    """A pack has at most this many tokens. null: on GPUs what the memory plan holds of 8192 to 32768; on CPU 2048."""
    share_prefix: bool = True
    """The samples of a prompt in one pack share it, so the prompt is computed once."""


class OptimizerKwargs(Section):
    lr: float = key(5e-6, "> 0")
    """The learning rate of AdamW has this value after warm-up."""
    weight_decay: float = key(0.01, ">= 0")
    """The decoupled weight decay has this strength, for Muon's matrices too."""
    betas: tuple[float, float] = key((0.9, 0.999), ">= 0, < 1")
    """The two moments decay at these rates."""
    eps: float = key(1e-8, "> 0")
    """This is added to the root of the second moment."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 keeps the first moment, and Muon's momentum, in 16 bits; the second moment always has 32."""


class OptimizerConfig(Section):
    name: Literal["torch.optim.AdamW", "torch.optim.Muon"] = "torch.optim.AdamW"
    """torch.optim.Muon is Muon for the matrices of the blocks and AdamW for all other parameters."""
    kwargs: OptimizerKwargs = OptimizerKwargs()
    muon_lr: float | None = key(None, "> 0")
    """Muon's matrices have this learning rate after warm-up; null means kwargs.lr: updates are as large as AdamW's."""
    muon_momentum: float = key(0.95, ">= 0, < 1")
    """Muon's momentum decays at this rate."""


class SchedulerConfig(Section):
    name: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, the learning rate follows this curve over the steps of the run."""
    warmup_steps: int = key(50, ">= 0")
    """The learning rate rises linearly over this many steps; 0 means no warm-up."""
    warmup_start_factor: float = key(0.1, "> 0, <= 1")
    """The first step of the warm-up has this share of the learning rate."""
    min_factor: float = key(0.0, ">= 0, <= 1")
    """linear and cosine fall towards this share of the learning rate, reached one step after the last."""


class ChatServerConfig(Section):
    tool_parser: str | None = None
    """vLLM's parser of this name, such as hermes, reads tool calls in a reply to an agent; null leaves them text."""
    reasoning_parser: str | None = None
    """vLLM's parser of this name, such as qwen3, separates the reasoning from the rest of a reply to an agent."""


class VllmConfig(Section):
    tensor_parallel_size: int = key(1, ">= 1")
    """This many consecutive ranks share one engine."""
    gpu_memory_utilization: float = key(0.6, "> 0, < 1")
    """The engine takes this share of the GPU's memory while it is awake."""
    enforce_eager: bool = False
    """The engine uses no CUDA graphs, so it starts faster and generates slower. On CPU there are none."""
    precision: Literal["bfloat16", "float32"] | None = None
    """The engine computes in this type; null means policy.precision."""
    moe_backend: str | None = None
    """vLLM's kernels for experts, by its name for them, such as triton or cutlass; null is triton on CUDA."""
    kvcache_gib: int = key(1, ">= 1")
    """On CPU, the key-value cache of an engine takes this many GiB."""
    http_server_serving_chat_kwargs: ChatServerConfig = ChatServerConfig()


class ColocatedResourcesConfig(Section):
    gpus_per_node: int | None = key(None, ">= 1, <= 1000")
    """With enabled=false, this many ranks, the last ones of the node, only generate. In a job of several nodes, it must
    be the number of ranks of a node."""
    num_nodes: int | None = key(None, ">= 1, <= 10000")
    """With enabled=false, this many nodes, the last ones of the job, only generate. On a single node: 1 or null."""


class ColocatedConfig(Section):
    enabled: bool = True
    """Every rank trains and generates in turns. If false, `resources` says which ranks only generate."""
    resources: ColocatedResourcesConfig = ColocatedResourcesConfig()


class GenerationConfig(Section):
    temperature: float = key(1.0, "> 0")
    """Sampler and trainer both divide the logits by this."""
    top_p: float = key(1.0, "> 0, <= 1")
    """Sampler and trainer both keep only the likeliest tokens that hold this much probability; 1 keeps all."""
    top_k: int | None = key(None, ">= 1")
    """Sampler and trainer both keep only this many likeliest tokens, before top_p; null keeps all."""
    max_new_tokens: int = key(256, ">= 1")
    """A response has at most this many tokens. Prompts longer than max_total_sequence_length - max_new_tokens are
    dropped, but if the two keys are equal, as in NeMo RL's configs, a response may use whatever its prompt leaves."""
    stop_token_ids: tuple[int, ...] | None = key(None, ">= 0")
    """These token ids end a response; null means the model's own."""
    stop_strings: tuple[str, ...] | None = None
    """These texts also end a response. The token that completes one belongs to the response and is trained."""
    colocated: ColocatedConfig = ColocatedConfig()
    vllm_cfg: VllmConfig = VllmConfig()

    @property
    def num_generators(self) -> int:
        """The number of ranks that only generate, the last ones of a job; 0 if all ranks train and generate."""
        resources = self.colocated.resources
        return 0 if self.colocated.enabled else (resources.gpus_per_node or 0) * (resources.num_nodes or 1)


class TokenizerConfig(Section):
    name: str | None = None
    """The tokenizer and its template come from this folder or hub model; null means the model's own."""
    chat_template: str | None = "default"
    """default is the model's own template, other text is a template or a file, and null joins the messages' texts."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The chat template sees these variables, such as enable_thinking: false."""


class HFConfigOverrides(Section):
    max_position_embeddings: int | None = key(None, ">= 1")
    """A sequence may have at most this many tokens; null means what config.json of the model says."""


class RouterReplayConfig(Section):
    enabled: bool = False
    """The routers of a mixture of experts send each token to the experts that the sampler sent it to, and compute
    weights and gradients themselves. So a choice that rounding changes is the same on both sides."""
    measure_only: bool = False
    """The routers choose as always, and train/router_flip_fraction says how often the sampler chose otherwise."""


class PolicyConfig(Section):
    model_name: str = "Qwen/Qwen2.5-1.5B"
    """The policy starts from this folder or hub model; docs/families.md lists the families."""
    reference_model_name: str | None = None
    """The KL is to this teacher, a folder or hub model of the same vocabulary; null: to the initial policy."""
    reference_server_url: str | None = None
    """The KL is to the teacher that a vLLM server at this address serves, which takes no memory here."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    hf_config_overrides: HFConfigOverrides = HFConfigOverrides()
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """The trainer computes in this type; its master weights are float32."""
    kernel_backend: Literal["auto", "triton", "torch"] = "auto"
    """The output layer runs on these kernels; auto means triton on CUDA and torch elsewhere."""
    compile: bool | None = None
    """torch.compile fuses the loss, and each block around its attention. null: true on CUDA; true is refused on CPU."""
    freeze_moe_router: bool = True
    """The routers of a mixture of experts keep their weights. They compute in float32 in any case."""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    deterministic_attention: bool = False
    """On CUDA the backward pass sums in a fixed order, so equal samples give bitwise equal gradients, more slowly."""
    logprob_chunk_size: int | None = key(None, ">= 1")
    """With triton, the logits of this many response tokens are in memory at once; null means 3.25 GiB of them."""
    train_global_batch_size: int | None = key(None, ">= 1")
    """An optimizer step trains on this many samples; null means the whole rollout."""
    ppo_epochs: int = key(1, ">= 1")
    """A step trains this many times on the samples of its rollout."""
    max_total_sequence_length: int = key(512, ">= 2")
    """Prompt and response together have at most this many tokens."""
    max_grad_norm: float = key(1.0, "> 0")
    """A longer gradient is scaled down to this norm."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    offload_optimizer_for_logprob: bool = False
    """The moments stay in host memory; the optimizer moves the moments of one parameter at a time to the GPU."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    generation: GenerationConfig = GenerationConfig()

    @property
    def engine_precision(self) -> str:
        """The engine's, which is the trainer's unless vllm_cfg names another."""
        return self.generation.vllm_cfg.precision or self.precision

    def pack_tokens(self, device_type: str) -> int:
        """train_mb_tokens. Where it is null: what that means on "cpu", and on "cuda" the least that it may mean;
        run.job.with_pack_tokens sets the number at the start of a run."""
        default = 8192 if device_type == "cuda" else 2048
        return self.sequence_packing.train_mb_tokens or max(default, self.max_total_sequence_length)


class DatasetConfig(Section):
    name: str | None = None
    """Metrics and errors call the dataset this; null means the stem of the file or dataset_name."""
    data_path: str | None = None
    """The rows come from this jsonl, json or parquet file or hub dataset (org/name); null: dataset_name's own."""
    dataset_name: str | None = None
    """gsm8k, MATH-500, OpenMathInstruct-2, DeepScaler, AIME2024, AIME2025, AIME2026, DAPOMath17K and DAPOMathAIME2024
    are known. A module:function of yours, which excludes a data_path, gets this section and returns a sequence of rows.
    null reads data_path."""
    subset: str | None = None
    """This configuration of a hub dataset is read; null means dataset_name's own, or none."""
    split: str | None = None
    """This split of a hub dataset is read; null means dataset_name's own, or train."""
    input_key: str | None = None
    """This field of a row holds the problem, as text or chat messages; a.b is field b of field a. null means
    dataset_name's own, or the first that a row has of messages, input, problem, question and prompt."""
    output_key: str | None = None
    """This field holds the expected answer; null likewise tries output, expected_answer, ground_truth and answer."""
    prompt_file: str | None = None
    """The problem, or the last user message of a chat, replaces {} in this text file; {{ and }} there mean braces."""
    system_prompt_file: str | None = None
    """The text of this file becomes the system message of rows that have none; null adds none."""
    processor: str | None = None
    """module:function is a function of yours that turns a row as read into a row to use, or into None to drop it."""
    env_name: str | None = None
    """exact (the response, or its part after ####, is the number), math, math_multi_reward, code, reward_model,
    an agent, or module:Class or module:function of yours scores responses. null means dataset_name's own, or exact."""
    repeat: int = key(1, ">= 1, <= 10000")
    """The set has each row this many times; in validation, each copy is a problem."""
    split_validation_size: float = key(0.0, ">= 0")
    """A training set gives this share of its rows, or this many if 1 or more, to a validation set."""
    seed: int = key(42, ">= 0, < 4294967296")
    """The seed decides which rows split_validation_size takes."""
    weight: float | None = key(None, "> 0")
    """Several training sets give prompts in proportion to their weights; null weights them by their numbers of rows."""
    prompt_selection: str = "uniform"
    """uniform takes each row of a training set once an epoch. p(1-p) and thompson prefer rows that the policy gets
    right now and then, by the row's past groups. module:function of yours gives a row's weight (see
    base/inputs/selection.py)."""

    @property
    def set_name(self) -> str:
        """The dataset's name in metrics and errors; "" if the section names nothing."""
        return self.name or Path(self.data_path or "").stem or (self.dataset_name or "").rpartition(":")[2]


class DataConfig(Section):
    max_input_seq_length: int | None = key(None, ">= 1")
    """Longer prompts are dropped and counted; null: the limit that max_new_tokens leaves."""
    shuffle: bool = True
    """Each epoch reads the training data in a new random order. If false, it keeps the order of the file."""
    use_multiple_dataloader: bool = False
    """The training sets take turns, with num_prompts_per_dataloader prompts each, or follow custom_dataloader."""
    num_prompts_per_dataloader: int | None = key(None, ">= 1")
    """With use_multiple_dataloader, but no custom_dataloader, this many prompts come from a set before the next set."""
    custom_dataloader: str | None = None
    """module:function of yours chooses the set of each prompt (see base/inputs/set_choice.py); null: turns."""
    task_to_env: Mapping[str, str] = field(default_factory=dict)
    """A row whose `task_name` is a key here goes to that env_name; other task names are env_names themselves."""
    train: tuple[DatasetConfig, ...] = ()  # in yaml a mapping, or a list of mappings
    validation: tuple[DatasetConfig, ...] = ()
    default: DatasetConfig = DatasetConfig()  # for keys that a train or validation set does not give


class MathEnvConfig(Section):
    num_workers: int = key(8, ">= 1, <= 1000")
    """This many worker processes grade; the ranks of a machine share them."""
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """hf_math_verify compares mathematics; dapo_math_verify compares the text after `Answer:`, as DAPO does. The names
    are NeMo RL's; the grader is our own, judges/math.py."""
    deadline_s: float = key(5.0, "> 0, <= 600")
    """Grading an answer may take this many seconds; then its worker is killed and the outcome is `error`."""
    memory_mib: int = key(2048, ">= 256")
    """A worker may use this many MiB of memory."""


class CodeEnvConfig(Section):
    num_workers: int = key(8, ">= 1, <= 1000")
    """This many worker processes run tests; the ranks of a machine share them."""
    isolation: Literal["required", "none"] = "required"
    """required runs each program in namespaces of its own, or not at all. none runs it as this user, within limits."""
    deadline_s: float = key(10.0, "> 0, <= 600")
    """All tests of a program may take this many seconds; then it is killed and the outcome is `timeout`."""
    memory_mib: int = key(512, ">= 64")
    """A program may use this many MiB of memory."""


class RewardModelConfig(Section):
    model_name: str | None = None
    """This folder or hub model is a Qwen2-, Qwen3- or LlamaForSequenceClassification with one label."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """The reward model holds its weights and computes in this type; its scores are float32."""
    max_model_len: int = key(2048, ">= 1")
    """Conversations with more tokens, by the reward model's tokenizer, get the outcome `error`."""


class AgentConfig(Section):
    name: str | None = None
    """The name of this agent. It drives the conversations of rows with this env_name; env.custom has its arguments."""
    function: str | None = None
    """module:function, or file.py:function, is a function of yours that calls base_url and returns the reward."""
    command: tuple[str, ...] | None = None
    """Each rollout runs this command instead of function: row on stdin, reward as its last line of stdout."""
    python: str | None = None
    """Function and command are started by this interpreter; null means the trainer's."""
    num_workers: int = key(16, ">= 1, <= 1000")
    """This many rollouts of the agent are under way at once; the ranks of a machine share them."""
    max_starting: int | None = key(None, ">= 1")
    """This many of them may have asked for nothing yet, as while their containers start; null means no limit."""
    address: str | None = None
    """The endpoint also listens at this address of the machine, which the agent's URL has; null: at 127.0.0.1 alone."""
    deadline_s: float = key(300.0, "> 0, <= 86400")
    """A rollout may take this many seconds, not counting the engine's sleep; then it is killed with all it started."""
    max_calls: int = key(64, ">= 1, <= 100000")
    """A rollout may ask for this many replies; further requests get the status 429."""
    memory_mib: int | None = key(None, ">= 64")
    """A worker may use this many MiB of memory; null means no limit."""
    isolation: Literal["required", "none"] = "none"
    """required isolates a command: it sees only its own processes, and only files of the system and of its program."""
    pass_env: tuple[str, ...] = ()
    """The agent sees these variables of the run's environment, besides PATH, TMPDIR and LD_LIBRARY_PATH."""
    reward_names: tuple[str, ...] = ()
    """The parts of the reward that the agent returns in `rewards`, for metrics and gdpo."""


class EnvConfig(Section):
    math: MathEnvConfig = MathEnvConfig()
    code: CodeEnvConfig = CodeEnvConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    agents: tuple[AgentConfig, ...] = ()  # in yaml a mapping, or a list of mappings
    custom: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of classes of your own, and of agents: {"my:Class": {near: 6}}; on the command line
    env.custom.my:Class.near=6."""
    max_error_fraction: float = key(0.05, ">= 0, <= 1")
    """The run stops if more than this share of a step's replies end in `error`: they could not be graded."""
    max_crashed_fraction: float = key(1.0, ">= 0, <= 1")
    """The run stops if more than this share of a step's rollouts end in `crashed`: the agent failed after the policy
    had replied. They are trained, with reward 0. It also stops if an agent only crashes in two steps running."""


class WandbConfig(Section):
    project: str | None = None
    """The run belongs to this W&B project; null means WANDB_PROJECT, or W&B's own default."""
    name: str | None = None
    """The run has this name in W&B; null means the name of its folder, such as exp_001."""


class LoggerConfig(Section):
    log_dir: str = "logs"
    """This folder holds the numbered run folders, exp_001 and on."""
    tensorboard_enabled: bool = True
    """The numbers of metrics.jsonl are also written as TensorBoard events."""
    wandb_enabled: bool = False
    """The numbers of metrics.jsonl are also sent to Weights & Biases (WANDB_MODE=offline: kept for `wandb sync`)."""
    wandb: WandbConfig = WandbConfig()
    num_samples_to_log: int = key(8, ">= 0")
    """Each step and validation writes this many conversations to samples.jsonl."""
    num_val_samples_to_print: int = key(3, ">= 0")
    """Each validation prints this many of its greedy conversations, divided equally among the sets."""
    dump_rollouts: int = key(0, ">= 0")
    """Step 1, and then one step in this many, writes its trained samples, with tokens, to rollouts; 0 writes none."""


class CheckpointingConfig(Section):
    enabled: bool = True
    """The run saves checkpoints; without them it cannot be continued."""
    checkpoint_dir: str | None = None
    """Checkpoints go to this folder; null means checkpoints in the run folder."""
    save_period: int = key(10, ">= 1")
    """A checkpoint is saved once in this many steps. A kill loses at most that many, or twice if saving is slow."""
    keep_latest: int = key(2, ">= 2")
    """This many newest checkpoints are kept, at least two: an old one goes only after the new one is complete."""
    keep_top_k: int | None = key(None, ">= 1")
    """This many more checkpoints are kept, the best by metric_name; null keeps no more."""
    metric_name: str = "validation/sampled/accuracy"
    """keep_top_k compares this key of metrics.jsonl, by its newest value at the time of saving."""
    higher_is_better: bool = True
    """The best metric_name is the highest. If false, it is the lowest."""
    save_hf_at_end: bool = True
    """The run ends by writing its weights as a Hugging Face folder, with or without checkpoints."""
    resume_from: str | None = None
    """The run continues from a checkpoint of this run folder; null means what `resume` says."""
    resume_step: str | None = None
    """The checkpoint to load: the number of its step, or best by metric_name; null means the newest. If it is
    not the newest, the resumed run removes the later checkpoints when it first saves."""
    resume: Literal["auto", "must", "never"] | None = None
    """auto continues from the newest complete checkpoint of resume_from, else of the newest run in log_dir that has
    one, else (without resume_from) starts a new run. must fails if there is none. never starts a new run. null: must if
    resume_from is set, else never."""
    allow_changes: bool = False
    """A resumed run may change the model's name, seed, template or data; changed data start from their first row."""
    checkpoint_must_save_by: str | None = None
    """The run saves and exits with code 75 this long after its start, DD:HH:MM:SS; null sets no limit."""


class ClusterConfig(Section):
    gpus_per_node: int = key(1, ">= 1, <= 1000")
    """`--check` plans the memory for this many GPUs on each machine; torchrun sets the number for a run."""
    num_nodes: int = key(1, ">= 1, <= 10000")
    """`--check` plans the memory for this many machines."""


class WatchdogConfig(Section):
    factor: float = key(10.0, "> 1")
    """A phase that takes longer than this many times its median counts as hung; the run ends with exit code 4."""
    min_seconds: float = key(600.0, "> 0, < 604800")
    """No phase counts as hung before it has taken this many seconds."""
    first_seconds: float = key(3600.0, "> 0, < 604800")
    """A phase that runs for the first time, and may compile or load, counts as hung after this many seconds."""


class Config(Section):
    grpo: GRPOConfig = GRPOConfig()
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig = PolicyConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    logger: LoggerConfig = LoggerConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def samples_per_minibatch(self) -> int:
        """Of an optimizer step."""
        return self.policy.train_global_batch_size or self.grpo.samples_per_step

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference policy, which the KL is to."""
        return self.loss_fn.reference_policy_kl_penalty > 0

    @property
    def holds_reference(self) -> bool:
        """Whether the reference policy is here, and not behind a server."""
        return self.has_reference and self.policy.reference_server_url is None

    @property
    def needs_old_logps(self) -> bool:
        """Whether log-probabilities at the start of the step need a forward of their own.

        In the order of the lines below:
            seq_logprob_error_threshold masks sequences by them, before the step: needed
            old_logprobs=sampler compares with the sampler: not needed
            several optimizer steps for a rollout: needed, because the policy moves between them
            async_grpo has old tokens, and measures the gap before the step: needed
            one optimizer step: not needed, because its forward runs the policy of the start, and the ratio is exactly 1
        """
        if self.grpo.seq_logprob_error_threshold is not None:
            return True
        if self.loss_fn.old_logprobs == "sampler":
            return False
        policy_moves = self.policy.ppo_epochs > 1 or self.samples_per_minibatch < self.grpo.samples_per_step
        has_old_tokens = self.grpo.async_grpo.max_age > 0
        return policy_moves or has_old_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt kept: it leaves room for max_new_tokens, or for one token if those are the total."""
        total = self.policy.max_total_sequence_length
        new = self.policy.generation.max_new_tokens
        left = total - new if new < total else total - 1
        return min(left, self.data.max_input_seq_length or left)
