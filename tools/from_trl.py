"""Keys of ours that several of TRL's make: batches, lengths, the loss, what grades. from_trl.yaml has the others."""

import math
import re

from config import ConfigError
from tools.translation import GRADED_BY, YOURS, Translation, Values, number, whole

ASSUMED_PROMPT = 512  # tokens; TRL does not limit prompts
UNBOUNDED = 1e9  # in place of no bound, where a bound of ours must be a number


def translate(theirs: Values) -> Translation:
    """theirs: each of TRL's keys with its value. ConfigError for a value that no run of TRL can have."""
    result = Translation()
    _batches(theirs, result)
    _lengths(theirs, result)
    _optimizer(theirs, result)
    _clips(theirs, result)
    _averages(theirs, result)
    _reference_kl(theirs, result)
    _sampler_weights(theirs, result)
    _rewards(theirs, result)
    _graders(theirs, result)
    return result


def _batches(theirs: Values, result: Translation) -> None:
    """TRL counts samples, and optimizer steps; here a step is a rollout of whole groups."""
    group = whole(theirs, "num_generations", 1)
    on_device = whole(theirs, "per_device_train_batch_size", 1)
    accumulated = whole(theirs, "gradient_accumulation_steps", 1)
    num_processes = whole(theirs, "num_processes", 1)
    parts = accumulated
    if theirs["steps_per_generation"] is not None:
        parts = whole(theirs, "steps_per_generation", 1)
    if theirs["generation_batch_size"] is None:
        rollout = on_device * num_processes * parts
    else:
        rollout = whole(theirs, "generation_batch_size", 1)
        if theirs["steps_per_generation"] is not None and num_processes == 1:  # a dump has both
            num_processes = max(1, rollout // (on_device * parts))
    train = on_device * num_processes * accumulated
    rollout = max(rollout, train)  # several rollouts of one optimizer step have the same weights
    num_prompts, rest = divmod(rollout, group)
    if rest:
        problem = f"{rollout} samples of a rollout do not divide into whole groups of num_generations={group}"
        fix = "raise gradient_accumulation_steps, or add num_processes=8 if eight processes train"
        raise ConfigError(f"{problem}: {fix}")
    result.updates_per_rollout = max(1, rollout // train) * whole(theirs, "num_iterations", 1)
    result.keys["grpo.num_prompts_per_step"] = num_prompts
    result.keys["policy.train_global_batch_size"] = train
    result.keys["cluster.gpus_per_node"] = num_processes
    if rollout > train and theirs["loss_type"] in ("dapo", "cispo"):
        result.notes["loss_type"] = (
            "TRL divides each optimizer step by the mean tokens of the rollout's steps, here each by its own"
        )


def _lengths(theirs: Values, result: Translation) -> None:
    total = theirs["vllm_max_model_length"]
    if total is None:
        prompt = ASSUMED_PROMPT
        if theirs["max_prompt_length"] is not None:
            prompt = whole(theirs, "max_prompt_length", 1)
        total = whole(theirs, "max_completion_length", 1) + prompt
    result.keys["policy.max_total_sequence_length"] = total


def _optimizer(theirs: Values, result: Translation) -> None:
    result.keys["policy.optimizer.kwargs.betas"] = [number(theirs, "adam_beta1"), number(theirs, "adam_beta2")]
    if theirs["weight_decay"] and not theirs["use_peft"]:  # adapters have neither norms nor biases
        result.notes["weight_decay"] = "TRL's optimizer does not decay norms and biases, here all weights decay"
    max_steps = number(theirs, "max_steps")  # which alone ends a run if it is set
    result.keys["grpo.max_num_epochs"] = max(math.ceil(number(theirs, "num_train_epochs")), int(max_steps))
    curve = theirs["lr_scheduler_kwargs"]
    if not isinstance(curve, dict):
        return
    if "min_lr_rate" in curve:
        result.keys["policy.scheduler.min_factor"] = number(curve, "min_lr_rate")
    elif "min_lr" in curve:
        rate = number(theirs, "learning_rate")
        if rate <= 0:
            raise ConfigError(f"learning_rate={rate}: expected a number above 0, of which min_lr is a share")
        result.keys["policy.scheduler.min_factor"] = number(curve, "min_lr") / rate


def _clips(theirs: Values, result: Translation) -> None:
    low = number(theirs, "epsilon")
    key_of_high = "epsilon_high"
    if theirs["epsilon_high"] is None:
        key_of_high = "epsilon"
    high = number(theirs, key_of_high)
    if low == 0.4 and theirs["loss_type"] == "grpo":
        result.notes["epsilon"] = (
            "0.4 with loss_type=grpo are the defaults of TRL's GMPOConfig, whose dump has no key of its own: if this "
            "is one, start the run with loss_fn.token_loss=gmpo"
        )
    result.keys["loss_fn.ratio_clip_min"] = min(low, 1.0)  # a ratio is never below 0
    result.keys["loss_fn.ratio_clip_max"] = high
    if theirs["loss_type"] == "sapo":  # has a gate in place of the clip
        result.keys["loss_fn.ratio_clip_min"] = 0.2
        result.keys["loss_fn.ratio_clip_max"] = 0.2
        result.keys["loss_fn.sapo_tau_positive"] = number(theirs, "sapo_temperature_pos")
        result.keys["loss_fn.sapo_tau_negative"] = number(theirs, "sapo_temperature_neg")
        return
    if theirs["loss_type"] == "cispo":  # TRL bounds the weight at epsilon_high itself, and not below
        result.keys["loss_fn.ratio_clip_min"] = 1.0
        result.keys["loss_fn.ratio_clip_max"] = high - 1
        if high < 1:
            result.refused[key_of_high] = (
                f"TRL's cispo bounds the weight at {high}; here the bound is at least 1: add epsilon_high=5.0"
            )
    elif theirs["delta"] is not None:
        delta = number(theirs, "delta")
        result.keys["loss_fn.ratio_clip_c"] = delta
        if delta < 1 + high or delta <= 1:
            result.refused["delta"] = (
                f"below 1 + epsilon_high={1 + high:g}, TRL bounds the ratio for both signs of the advantage, and the "
                "clip here does not; add delta=null"
            )


def _averages(theirs: Values, result: Translation) -> None:
    """What the loss is divided by."""
    loss = theirs["loss_type"]
    level = theirs["importance_sampling_level"]
    if level == "sequence" and loss in ("sapo", "cispo"):
        result.refused["importance_sampling_level"] = (
            f"{loss.upper()} has a ratio per token here: add importance_sampling_level=token"
        )
    if theirs["mask_truncated_completions"] and loss in ("grpo", "dr_grpo", "luspo", "sapo"):
        result.notes["mask_truncated_completions"] = (
            "TRL divides by all sequences, here by those that are not masked: the loss is larger by their ratio"
        )
    if theirs["entropy_coef"] or theirs["use_adaptive_entropy"]:
        result.notes["entropy_coef"] = (
            "TRL averages the entropy over the tokens of each micro-batch, here it is averaged as the loss is"
        )


def _reference_kl(theirs: Values, result: Translation) -> None:
    """TRL multiplies k3 by p / old, with its gradient: kl_gradient=policy_ratio. While p is the old policy that is
    score_function, our default."""
    if not theirs["beta"] or not theirs["use_bias_correction_kl"]:
        return
    instead = "use_bias_correction_kl=false is the KL without that ratio, TRL's before 1.10"
    if theirs["importance_sampling_level"] == "sequence":
        result.refused["use_bias_correction_kl"] = f"TRL multiplies the KL by the ratio of the sequence; {instead}"
    elif result.updates_per_rollout > 1:
        result.keys["loss_fn.kl_gradient"] = "policy_ratio"


def _sampler_weights(theirs: Values, result: Translation) -> None:
    if not theirs["use_vllm"] or not theirs["vllm_importance_sampling_correction"]:
        return
    result.notes["vllm_importance_sampling_correction"] = (
        "TRL trains a token whose sampler log-probability is NaN with weight 1, here it is not trained"
    )
    mode = theirs["vllm_importance_sampling_mode"]
    low = theirs["vllm_importance_sampling_clip_min"]
    high = theirs["vllm_importance_sampling_clip_max"]
    if theirs["vllm_importance_sampling_cap"] is not None:  # its name before 1.0
        high = theirs["vllm_importance_sampling_cap"]
    if high is None:
        high = UNBOUNDED
    result.keys["loss_fn.truncated_importance_sampling_ratio"] = high
    if mode == "token_mask" and low is None:
        result.keys["loss_fn.truncated_importance_sampling_ratio_min"] = 0.0
    if theirs["importance_sampling_level"] != "sequence":
        return
    if mode in ("token_truncate", "token_mask"):
        result.keys["loss_fn.importance_sampling_correction_level"] = "token"
    elif mode == "sequence_truncate":  # with GSPO, tis and icepop weight sequences
        result.keys["loss_fn.truncated_importance_sampling_type"] = "tis"
    elif mode == "sequence_mask":
        result.keys["loss_fn.truncated_importance_sampling_type"] = "icepop"
        if low is None:
            result.keys["loss_fn.truncated_importance_sampling_ratio_min"] = 0.0


def _rewards(theirs: Values, result: Translation) -> None:
    if theirs["multi_objective_aggregation"] != "normalize_then_sum":
        return
    result.keys["grpo.normalize_rewards"] = True  # whatever scale_rewards says
    result.keys["grpo.reward_std"] = "group"
    result.notes["multi_objective_aggregation"] = (
        "TRL adds 1e-4 to the last deviation; the environment has to give each reward (StepResult.rewards)"
    )


def _graders(theirs: Values, result: Translation) -> None:
    """TRL's reward functions, by names or dotted paths, and its reward model."""
    functions = theirs["reward_funcs"]
    model = theirs["reward_model_name_or_path"]
    if not isinstance(functions, list):
        functions = [functions]
    graders = [str(grader) for grader in [*functions, model] if grader]
    result.keys[GRADED_BY] = f"{YOURS}your_function"
    if len(graders) != 1:
        return
    grader = graders[0]
    if model or "/" in grader:
        result.keys[GRADED_BY] = "reward_model"
        result.keys["env.reward_model.model_name"] = grader
    elif re.fullmatch(r"(trl\.(\w+\.)*)?accuracy_reward", grader):
        result.keys[GRADED_BY] = "math"
        result.keys["data.default.output_key"] = "solution"
    elif re.fullmatch(r"\w+", grader):
        result.keys[GRADED_BY] = f"{YOURS}{grader}"
    elif re.fullmatch(r"\w+(\.\w+)+", grader):
        module, _, function = grader.rpartition(".")
        result.keys[GRADED_BY] = f"{module}:{function}"
