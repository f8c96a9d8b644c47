"""The configuration of a run: every key, with its type, default, bounds and meaning.

Keys that NeMo RL has too carry its names and, unless the meaning says otherwise, the defaults of its
`grpo_math_1B.yaml`. config_file.py reads and writes them, config_check.py says what is refused. Imports neither torch
nor vllm, so that `grpo.py --check` takes no time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin


class ConfigError(Exception):
    """A mistake of the user's. The text is the whole message; the entry prints it and exits with 2."""


def key(default: Any, meaning: str, bounds: str = "") -> Any:
    """A config key. `bounds` is what `validate` asks of the value, as in "> 0" or ">= 0, < 1". `default` dict: the
    value is a mapping of any keys, read as yaml means it, and empty by default."""
    metadata = {"help": meaning, "bounds": bounds}
    return (
        field(default_factory=dict, metadata=metadata) if default is dict else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True, slots=True)
class AdvEstimatorConfig:
    name: Literal["grpo", "gdpo", "reinforce_plus_plus"] = key(
        "grpo",
        "grpo: reward against its group's. gdpo: so for each of several rewards, then a weighted sum, whitened over "
        "the batch. reinforce_plus_plus: whitened over the tokens of the batch; reads neither normalize_rewards nor "
        "use_leave_one_out_baseline.",
    )
    minus_baseline: bool = key(True, "reinforce_plus_plus: first subtract the mean reward of the group.")
    reward_weights: tuple[float, ...] | None = key(
        None, "gdpo: weight of each reward, in the alphabetical order of their names; null = 1 each."
    )


@dataclass(frozen=True, slots=True)
class RewardScalingConfig:
    enabled: bool = key(False, "Map rewards linearly from the source range to the target range, clamped to it.")
    source_min: float = key(0.0, "Rewards at or below become target_min.")
    source_max: float = key(1.0, "Rewards at or above become target_max.")
    target_min: float = key(0.0, "Lowest reward after scaling.")
    target_max: float = key(1.0, "Highest reward after scaling.")


@dataclass(frozen=True, slots=True)
class RewardShapingConfig:
    enabled: bool = key(False, "Lower the reward of long responses: DAPO's overlong penalty, or stop_properly's.")
    overlong_buffer_length: int = key(128, "The penalty grows over the last so many tokens.", ">= 1")
    overlong_buffer_penalty: float = key(1.0, "Taken off the reward at max_response_length tokens.", ">= 0")
    max_response_length: int | None = key(
        None, "Tokens at which the whole penalty is due; null = policy.generation.max_new_tokens.", ">= 1"
    )
    floor_overlong_penalty: bool = key(
        False, "At most overlong_buffer_penalty, as TRL; false: grows past max_response_length, as NeMo RL, verl."
    )
    stop_properly_penalty_coef: float | None = key(
        None, "Multiply the reward of truncated responses by this, in place of the overlong penalty.", ">= 0, <= 1"
    )


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    num_prompts_per_step: int = key(32, "Prompts of one optimizer step, over all ranks.", ">= 1")
    num_generations_per_prompt: int = key(16, "Samples per prompt, compared to each other.", ">= 2")
    max_rollout_turns: int = key(
        1, "Replies of the policy in a conversation; an environment may end it sooner.", ">= 1"
    )
    max_num_epochs: int = key(1, "Passes over the training data, unless max_num_steps ends the run.", ">= 1")
    max_num_steps: int = key(1_000_000, "Optimizer steps, unless max_num_epochs ends the run.", ">= 1")
    normalize_rewards: bool = key(True, "Divide advantages by the standard deviation of their group.")
    use_leave_one_out_baseline: bool = key(True, "Baseline: mean reward of the others in the group.")
    reward_std: Literal["baseline", "group", "batch"] = key(
        "baseline",
        "Which standard deviation normalize_rewards divides by. baseline: of the rewards that make the baseline, with "
        "NeMo RL's rule for 0. group, batch: of the whole group or batch, + 1e-4, as TRL's scale_rewards.",
    )
    adv_estimator: AdvEstimatorConfig = AdvEstimatorConfig()
    advantage_clip_low: float | None = key(None, "Advantages below are raised to this; null = none are.")
    advantage_clip_high: float | None = key(None, "Advantages above are lowered to this; null = none are.")
    seq_logprob_error_threshold: float | None = key(
        None,
        "Leave out a sequence whose mean exp(|sampler - trainer log-probability|) exceeds this; null = none.",
        ">= 1",
    )
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    overlong_filtering: bool = key(False, "Truncated samples are not trained on; they stay in their group's baseline.")
    use_dynamic_sampling: bool = key(
        False,
        "DAPO: draw prompts until a step is full of groups whose rewards, before shaping, are not all equal. A pass "
        "over the data then has fewer steps.",
    )
    batch_multiplier: float = key(
        1.0, "use_dynamic_sampling: draw so many times num_prompts_per_step prompts at once.", ">= 1"
    )
    dynamic_sampling_max_gen_batches: int = key(10, "Draws for one step; if they are too few the run stops.", ">= 1")
    ref_policy_update_period: int | None = key(
        None, "Steps between updates of the reference policy; null = it stays what the run began with.", ">= 1"
    )
    ref_policy_update_alpha: float = key(
        1.0, "An update sets reference = alpha * policy + (1 - alpha) * reference.", "> 0, <= 1"
    )
    val_period: int = key(10, "Validate every so many steps; 0 = only at start and end, if asked.", ">= 0")
    val_at_start: bool = key(False, "Validate before the first step.")
    val_at_end: bool = key(False, "Validate after the last step.")
    max_val_samples: int = key(256, "Validation problems used of each set, from the top of the file.", ">= 1")
    val_num_generations_per_prompt: int = key(
        1, "Samples per problem, for accuracy, pass@k and maj@k of k = 1, 2, 4, ... up to it; greedy has one.", ">= 1"
    )
    val_temperature: float | None = key(None, "Of sampled validation; null = policy.generation.temperature.", "> 0")
    val_top_p: float | None = key(None, "Of sampled validation, which may filter; null = 1.", "> 0, <= 1")
    val_top_k: int | None = key(None, "Of sampled validation, which may filter; null = no limit.", ">= 1")
    val_max_new_tokens: int | None = key(
        None, "Longest response of validation; null = policy.generation.max_new_tokens.", ">= 1"
    )
    seed: int = key(42, "Decides data order and samples: same seed, same run.", ">= 0, < 4294967296")
    logp_gap_limit: float | None = key(
        0.1,
        "Stop when |sampler - trainer| log-probability, averaged over a step, exceeds this. bfloat16 gives 0.01, "
        "float32 1e-6; engines that miss an update give what that update moves. null = log only.",
        "> 0",
    )
    logp_gap_patience: int = key(
        0, "Steps over logp_gap_limit are skipped and counted as bad; this many in a row do not stop the run.", ">= 0"
    )
    canary_period: int = key(
        10,
        "Steps between looks at a fixed prompt, sampled and scored anew: the same limit. 0 = at the start only.",
        ">= 0",
    )
    max_bad_steps: int = key(
        0,
        "Steps with a non-finite loss or gradient are skipped and counted; more than so many in a row stop "
        "the run. 0 = the first does: it is a fault to look at, not noise to step over.",
        ">= 0",
    )

    @property
    def prompts_per_batch(self) -> int:
        """Prompts drawn at once."""
        return int(self.num_prompts_per_step * self.batch_multiplier)


MAX_LOG_RATIO = 20.0  # of |logp - old|: beyond, the ratio is e^20 or e^-20 and has no gradient; exp never overflows


@dataclass(frozen=True, slots=True)
class LossConfig:
    ratio_clip_min: float = key(0.2, "The probability ratio is clipped below at 1 - this.", ">= 0, <= 1")
    ratio_clip_max: float = key(0.2, "The probability ratio is clipped above at 1 + this.", ">= 0")
    ratio_clip_c: float | None = key(None, "Dual clip of negative advantages, at this * |advantage|.", "> 1")
    token_level_loss: bool = key(True, "Mean over tokens; false = over sequences of their token means.")
    loss_scale_factor: float | None = key(
        None,
        "Dr. GRPO, with token_level_loss=false: divide the token sum of every sequence by this length, as the longest "
        "response, in place of its own; null = its own.",
        "> 0",
    )
    disable_ppo_ratio: bool = key(False, "Plain policy gradient: log-probability in place of the ratio.")
    force_on_policy_ratio: bool = key(False, "Ratio 1: exact with one optimizer step per rollout.")
    sequence_level_importance_ratios: bool = key(False, "GSPO: one ratio for a sequence, the mean of its tokens' logs.")
    use_cispo: bool = key(False, "CISPO: the clipped ratio is a constant weight of the log-probability.")
    reference_policy_kl_penalty: float = key(0.01, "Weight of KL(policy || reference); 0 = no reference.", ">= 0")
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = key("k3", "Schulman's estimator of the KL.")
    kl_gradient: Literal["score_function", "plain"] = key(
        "score_function",
        "Gradient of the KL in the loss. score_function: of the KL itself, sampling included, as NeMo RL. plain: of "
        "the estimator alone, as TRL and verl.",
    )
    kl_input_clamp_value: float | None = key(20.0, "Bound of |log-probability difference| in the KL.", "> 0")
    kl_output_clamp_value: float | None = key(10.0, "Bound of |KL| of a token.", "> 0")
    use_on_policy_kl_approximation: bool = key(False, "Weight the KL by policy / sampler probability.")
    use_kl_in_reward: bool = key(False, "KL in the reward in place of the loss; reinforce_plus_plus only.")
    use_importance_sampling_correction: bool = key(False, "Weight tokens by trainer / sampler probability.")
    truncated_importance_sampling_type: (
        Literal["tis", "icepop", "seq-mask-tis", "sequence", "sequence-truncate", "sequence-mask"] | None
    ) = key(
        None,
        "Weights out of bounds are clamped (tis) or 0 (icepop); seq-mask-tis: 0 in sequences whose geometric mean is "
        "out. sequence: a weight is the product over the sequence; -truncate, -mask: with bounds, as tis and icepop. "
        "null: of tokens, no bounds.",
    )
    truncated_importance_sampling_ratio: float | None = key(None, "Upper bound of the weights.", "> 0")
    truncated_importance_sampling_ratio_min: float | None = key(None, "Lower bound; null = 0.", ">= 0")
    entropy_coef: float = key(0.0, "Weight of the entropy bonus: exact entropy, over the whole vocabulary.", ">= 0")
    positive_example_nll_weight: float = key(0.0, "Weight of -log-probability of samples with reward > 0.", ">= 0")


@dataclass(frozen=True, slots=True)
class DTensorConfig:
    activation_checkpointing: bool = key(False, "Compute blocks again in backward: slower, less memory.")


@dataclass(frozen=True, slots=True)
class SequencePackingConfig:
    train_mb_tokens: int = key(2048, "Tokens of a pack (micro-batch); sequences stay whole.", ">= 1")


@dataclass(frozen=True, slots=True)
class OptimizerKwargs:
    lr: float = key(5e-6, "Learning rate after warm-up.", "> 0")
    weight_decay: float = key(0.01, "Decoupled weight decay.", ">= 0")
    betas: tuple[float, float] = key((0.9, 0.999), "Decay rates of the two moments.", ">= 0, < 1")
    eps: float = key(1e-8, "Added to the root of the second moment.", "> 0")


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    name: Literal["torch.optim.AdamW"] = key("torch.optim.AdamW", "The only one there is.")
    kwargs: OptimizerKwargs = OptimizerKwargs()


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    name: Literal["constant", "linear", "cosine"] = key("constant", "Of the learning rate, after warm-up.")
    warmup_steps: int = key(50, "Steps of linear warm-up; 0 = none.", ">= 0")
    warmup_start_factor: float = key(0.1, "Share of the learning rate at the first step.", "> 0, <= 1")
    min_factor: float = key(0.0, "linear, cosine: share of the learning rate at the last step.", ">= 0, <= 1")


@dataclass(frozen=True, slots=True)
class VllmConfig:
    tensor_parallel_size: int = key(1, "Consecutive ranks that share one engine.", ">= 1")
    gpu_memory_utilization: float = key(0.6, "Share of GPU memory for the engine while awake.", "> 0, < 1")
    enforce_eager: bool = key(False, "No CUDA graphs: starts faster, generates slower. Always so on CPU.")
    precision: Literal["bfloat16", "float32"] | None = key(None, "Of the engine; null = policy.precision.")
    kvcache_gib: int = key(1, "CPU only: GiB of key-value cache of an engine.", ">= 1")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    temperature: float = key(1.0, "Divides the logits, in sampler and trainer alike.", "> 0")
    top_p: float = key(1.0, "Only 1: the trainer scores the whole distribution, not a part.")
    top_k: int | None = key(None, "Only null, for the same reason.")
    max_new_tokens: int = key(
        256,
        "Tokens of a response; longer ones are cut and counted. Kept free behind every prompt; but for "
        "policy.max_total_sequence_length, as NeMo RL's configs have it: then a response gets what its prompt leaves.",
        ">= 1",
    )
    stop_token_ids: tuple[int, ...] | None = key(None, "Ids that end a response; null = the model's.", ">= 0")
    vllm_cfg: VllmConfig = VllmConfig()


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    chat_template: str | None = key(
        "default", "default: the model's own; a file; the template's text; null = none: the text of the messages alone."
    )
    chat_template_kwargs: Mapping[str, Any] = key(
        dict, "What the template may ask for by name, as enable_thinking: false."
    )


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    model_name: str = key("Qwen/Qwen2.5-1.5B", "Folder or hub name: Qwen2, Qwen2.5, dense Qwen3, Llama 3.")
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["bfloat16", "float32"] = key("bfloat16", "Of the trainer; master weights: float32.")
    kernel_backend: Literal["auto", "triton", "torch"] = key(
        "auto", "Code that computes the output layer and the loss: auto means triton on CUDA and torch elsewhere."
    )
    logprob_chunk_size: int | None = key(
        None, "With triton, how many response tokens have logits in memory at once; null means 3.5 GiB of them.", ">= 1"
    )
    train_global_batch_size: int | None = key(
        None, "Samples of one optimizer step; null = the whole rollout, one step.", ">= 1"
    )
    ppo_epochs: int = key(1, "Passes over the samples of a rollout.", ">= 1")
    max_total_sequence_length: int = key(512, "Tokens of prompt and response together.", ">= 2")
    max_grad_norm: float = key(1.0, "A longer gradient is scaled down to this norm.", "> 0")
    dtensor_cfg: DTensorConfig = DTensorConfig()
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    generation: GenerationConfig = GenerationConfig()


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    name: str | None = key(
        None, "What metrics and errors call it, as in validation/<name>/...; null = the file's stem or dataset_name."
    )
    data_path: str | None = key(
        None, "A jsonl, json or parquet file, relative to the working directory, or a hub name org/dataset."
    )
    dataset_name: str | None = key(
        None,
        "A known dataset: gsm8k, MATH-500, OpenMathInstruct-2, DeepScaler, AIME2024, AIME2025, AIME2026, DAPOMath17K, "
        "DAPOMathAIME2024; or module:function of yours, which gets this section and returns a sequence of rows. null = "
        "what data_path names; with both, rows of that kind from there.",
    )
    subset: str | None = key(None, "Of a hub dataset: its configuration; null = the known dataset's, or none.")
    split: str | None = key(None, "Of a hub dataset; null = the known dataset's, or train.")
    input_key: str | None = key(
        None,
        "Field of a row with the problem, as text or chat messages; a.b looks into field a. null = the known "
        "dataset's, or messages, input, problem, question or prompt, whichever a row has.",
    )
    output_key: str | None = key(
        None,
        "Field of a row with the expected answer; a.b looks into field a. null = the known dataset's, or output, "
        "expected_answer, ground_truth or answer, whichever a row has.",
    )
    prompt_file: str | None = key(
        None,
        "Text file around the problem (of chat messages: the last user's), which goes where its {} is; {{ and }} stand "
        "for braces. null = none.",
    )
    system_prompt_file: str | None = key(
        None, "Text file that becomes the system message of rows that bring none of their own; null = none."
    )
    processor: str | None = key(
        None, "module:function of yours: a row as read -> a row as understood here, or None to leave it out."
    )
    env_name: str | None = key(
        None,
        "What scores responses: exact (all of it, or after ####, is the number), math, code, reward_model, or "
        "module:Class or module:function of yours. null = the known dataset's, or exact.",
    )
    min_reward: float | None = key(
        None, "Leave out rows whose field `reward`, as rollouts of NeMo Gym have it, is less; null = none."
    )
    repeat: int = key(1, "How often each row is in the set: in validation, as so many problems.", ">= 1")
    split_validation_size: float = key(
        0.0, "Training set: this share of the rows (from 1 on: so many) is taken out, as a validation set.", ">= 0"
    )
    seed: int = key(42, "Decides which rows split_validation_size takes.", ">= 0, < 4294967296")
    weight: float | None = key(
        None, "Of several training sets: its share of the prompts, against the others' weights; null = by size.", "> 0"
    )

    @property
    def set_name(self) -> str:
        """What metrics call it; "" where nothing is named."""
        return self.name or Path(self.data_path or "").stem or (self.dataset_name or "").rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class DataConfig:
    max_input_seq_length: int | None = key(
        None, "Prompts of more tokens are dropped and counted; null, or more: what max_new_tokens leaves.", ">= 1"
    )
    shuffle: bool = key(True, "A new order of the training data each epoch; false = file order.")
    use_multiple_dataloader: bool = key(
        False, "Training sets in turn, num_prompts_per_dataloader prompts of each, or as custom_dataloader says."
    )
    num_prompts_per_dataloader: int | None = key(
        None, "use_multiple_dataloader: prompts of one set before the next one's turn. To be set there.", ">= 1"
    )
    custom_dataloader: str | None = key(
        None,
        "use_multiple_dataloader: module:function of yours that names the set of each prompt of a step and may read "
        "the metrics of the step before (mixing.py); null = in turn.",
    )
    task_to_env: Mapping[str, str] = key(dict, "Field `task_name` of rows -> env_name; other task names are env_names.")
    train: tuple[DatasetConfig, ...] = ()  # in yaml a mapping, or a list of mappings
    validation: tuple[DatasetConfig, ...] = ()
    default: DatasetConfig = DatasetConfig()  # what train and validation sets do not say themselves


@dataclass(frozen=True, slots=True)
class MathEnvConfig:
    num_workers: int = key(8, "Worker processes that grade; the ranks of a machine share them.", ">= 1")
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = key(
        "hf_math_verify", "Equal as mathematics; or, as DAPO, equal as text after `Answer:`."
    )
    format_reward: float = key(0.0, "Of a wrong answer that is in a box.", ">= 0, < 1")
    deadline_s: float = key(5.0, "Seconds for an answer; then its grader is killed, outcome `timeout`.", "> 0, <= 600")
    memory_mib: int = key(2048, "Memory of a grader.", ">= 256")


@dataclass(frozen=True, slots=True)
class CodeEnvConfig:
    num_workers: int = key(8, "Worker processes that judge; the ranks of a machine share them.", ">= 1")
    isolation: Literal["required", "none"] = key(
        "required", "required: namespaces of its own for each program, or no run. none: limits alone, as this user."
    )
    deadline_s: float = key(
        10.0, "Seconds for all tests of a program; then it is killed, outcome `timeout`.", "> 0, <= 600"
    )
    memory_mib: int = key(512, "Memory of a program.", ">= 64")


@dataclass(frozen=True, slots=True)
class RewardModelConfig:
    model_name: str | None = key(
        None, "Folder or hub name of a Qwen2-, Qwen3- or LlamaForSequenceClassification with one label."
    )
    precision: Literal["bfloat16", "float32"] = key("bfloat16", "Of its weights and compute; scores are float32.")
    max_model_len: int = key(2048, "Its longest conversation, in its tokens; longer ones are outcome `error`.", ">= 1")


@dataclass(frozen=True, slots=True)
class EnvConfig:
    math: MathEnvConfig = MathEnvConfig()
    code: CodeEnvConfig = CodeEnvConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    custom: Mapping[str, Mapping[str, Any]] = key(dict, "env_name (module:Class) of yours -> its keyword arguments.")
    max_error_fraction: float = key(
        0.05, "Stop when more than this share of a step's replies ends in outcome `error`.", ">= 0, <= 1"
    )


@dataclass(frozen=True, slots=True)
class LoggerConfig:
    log_dir: str = key("logs", "Holds the numbered run folders, exp_001 and on.")
    tensorboard_enabled: bool = key(True, "Write the numbers of metrics.jsonl as TensorBoard events too.")
    num_samples_to_log: int = key(8, "Conversations of each step and validation written to samples.jsonl.", ">= 0")
    num_val_samples_to_print: int = key(3, "Conversations of a validation shown on the console.", ">= 0")


@dataclass(frozen=True, slots=True)
class CheckpointingConfig:
    enabled: bool = key(True, "Save checkpoints; a run without cannot be continued.")
    checkpoint_dir: str | None = key(None, "Where they go; null = checkpoints in the run folder.")
    save_period: int = key(10, "Steps between checkpoints: the most that a kill costs.", ">= 1")
    keep_latest: int = key(2, "How many stay. Not 1: the old goes after the new is whole.", ">= 2")
    keep_top_k: int | None = key(None, "Of the others, so many best by metric_name stay too; null = none.", ">= 1")
    metric_name: str = key(
        "validation/sampled/accuracy", "What keep_top_k compares: a key of metrics.jsonl, its newest value when saving."
    )
    higher_is_better: bool = key(True, "Of metric_name.")
    save_hf_at_end: bool = key(True, "Write the final weights as a Hugging Face folder, checkpoints or not.")
    resume_from: str | None = key(None, "Run folder whose newest checkpoint to continue; null = as `resume` says.")
    resume: Literal["auto", "must", "never"] | None = key(
        None,
        "auto: go on with resume_from, else with the newest run of logger.log_dir that has a whole checkpoint, over a "
        "damaged one to the one before it; a new run where none is. must: the same, but the newest must be there "
        "and good. never: a new run. null: must with resume_from, else never.",
    )
    allow_changes: bool = key(
        False, "Resume with another model name, seed, template or other data than before: other data from their start."
    )
    checkpoint_must_save_by: str | None = key(
        None, "DD:HH:MM:SS after the start: save and end with exit code 75, as on a signal; null = never."
    )

    @property
    def must_save_by_seconds(self) -> float | None:
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    factor: float = key(10.0, "A phase of a step that takes so many times its median hangs: the run ends.", "> 1")
    min_seconds: float = key(600.0, "No phase hangs before it took so long.", "> 0")
    first_seconds: float = key(3600.0, "The same, of the first phase of a name: it may compile, or load.", "> 0")


@dataclass(frozen=True, slots=True)
class Config:
    grpo: GRPOConfig = GRPOConfig()
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig = PolicyConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    logger: LoggerConfig = LoggerConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that is kept: behind it, `max_new_tokens` fit, or one token where those are the total."""
        total, new = self.policy.max_total_sequence_length, self.policy.generation.max_new_tokens
        left = total - (new if new < total else 1)
        return left if self.data.max_input_seq_length is None else min(left, self.data.max_input_seq_length)


def section_class(kind: Any) -> type | None:
    """The class of a section, or of the sections of a list; None for other fields."""
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return kind if is_dataclass(kind) else None


def _walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    for f in fields(cls):
        yield prefix + f.name, f
        if section_class(f.type):
            yield from _walk(section_class(f.type), f"{prefix}{f.name}.")


FIELDS: dict[str, Field] = dict(_walk(Config))  # full key -> field, sections too, in the order above
CLASSES = {"": Config} | {name: section_class(f.type) for name, f in FIELDS.items() if section_class(f.type)}
LISTS = [name for name in CLASSES if name and not is_dataclass(FIELDS[name].type)]  # lists of sections
SECTIONS = {name: ", ".join(f.name for f in fields(cls)) for name, cls in CLASSES.items()}  # -> its keys


class DataError(ConfigError):
    """A dataset or model folder the run cannot use; the message names the file and the fix. Process exit code 2."""
