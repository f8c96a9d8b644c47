"""Keys of ours that several of TRL's make: batches, lengths, the loss, what grades. from_trl.yaml has the others."""

import math
import re
from collections.abc import Mapping
from typing import Any

from config import ConfigError
from tools.made import GRADED_BY, YOURS, Made, number, whole

ASSUMED_PROMPT = 512  # tokens; TRL does not limit prompts
UNBOUNDED = 1e9  # in place of no bound, where a bound of ours must be a number


def made_of(v: Mapping[str, Any]) -> Made:
    """v: each of TRL's keys with its value. ConfigError for a value that no run of TRL can have."""
    made = Made()
    _batches(v, made)
    _lengths(v, made)
    _optimizer(v, made)
    _clips(v, made)
    _averages(v, made)
    _reference_kl(v, made)
    _sampler_weights(v, made)
    _rewards(v, made)
    _graders(v, made)
    return made


def _batches(v: Mapping[str, Any], made: Made) -> None:
    """TRL counts samples, and optimizer steps; here a step is a rollout of whole groups."""
    group = whole(v, "num_generations", 1)
    on_device = whole(v, "per_device_train_batch_size", 1)
    accumulated = whole(v, "gradient_accumulation_steps", 1)
    num_processes = whole(v, "num_processes", 1)
    parts = accumulated
    if v["steps_per_generation"] is not None:
        parts = whole(v, "steps_per_generation", 1)
    if v["generation_batch_size"] is None:
        rollout = on_device * num_processes * parts
    else:
        rollout = whole(v, "generation_batch_size", 1)
        if v["steps_per_generation"] is not None and num_processes == 1:  # a dump has both
            num_processes = max(1, rollout // (on_device * parts))
    train = on_device * num_processes * accumulated
    rollout = max(rollout, train)  # several rollouts of one optimizer step have the same weights
    num_prompts, rest = divmod(rollout, group)
    if rest:
        problem = f"{rollout} samples of a rollout do not divide into whole groups of num_generations={group}"
        fix = "raise gradient_accumulation_steps, or add num_processes=8 if eight processes train"
        raise ConfigError(f"{problem}: {fix}")
    made.num_updates = max(1, rollout // train) * whole(v, "num_iterations", 1)
    made.keys["grpo.num_prompts_per_step"] = num_prompts
    made.keys["policy.train_global_batch_size"] = train
    made.keys["cluster.gpus_per_node"] = num_processes
    if rollout > train and v["loss_type"] in ("dapo", "cispo"):
        made.notes["loss_type"] = (
            "TRL divides each optimizer step by the mean tokens of the rollout's steps, here each by its own"
        )


def _lengths(v: Mapping[str, Any], made: Made) -> None:
    total = v["vllm_max_model_length"]
    if total is None:
        prompt = ASSUMED_PROMPT
        if v["max_prompt_length"] is not None:
            prompt = whole(v, "max_prompt_length", 1)
        total = whole(v, "max_completion_length", 1) + prompt
    made.keys["policy.max_total_sequence_length"] = total


def _optimizer(v: Mapping[str, Any], made: Made) -> None:
    made.keys["policy.optimizer.kwargs.betas"] = [number(v, "adam_beta1"), number(v, "adam_beta2")]
    max_steps = number(v, "max_steps")  # which alone ends a run if it is set
    made.keys["grpo.max_num_epochs"] = max(math.ceil(number(v, "num_train_epochs")), int(max_steps))
    curve = v["lr_scheduler_kwargs"]
    if not isinstance(curve, Mapping):
        return
    if "min_lr_rate" in curve:
        made.keys["policy.scheduler.min_factor"] = number(curve, "min_lr_rate")
    elif "min_lr" in curve:
        rate = number(v, "learning_rate")
        if rate <= 0:
            raise ConfigError(f"learning_rate={rate}: expected a number above 0, of which min_lr is a share")
        made.keys["policy.scheduler.min_factor"] = number(curve, "min_lr") / rate


def _clips(v: Mapping[str, Any], made: Made) -> None:
    low = number(v, "epsilon")
    high = low if v["epsilon_high"] is None else number(v, "epsilon_high")
    made.keys["loss_fn.ratio_clip_min"] = min(low, 1.0)  # a ratio is never below 0
    made.keys["loss_fn.ratio_clip_max"] = high
    if v["loss_type"] == "sapo":  # has a gate in place of the clip
        made.keys["loss_fn.ratio_clip_min"] = 0.2
        made.keys["loss_fn.ratio_clip_max"] = 0.2
        made.keys["loss_fn.sapo_tau_positive"] = number(v, "sapo_temperature_pos")
        made.keys["loss_fn.sapo_tau_negative"] = number(v, "sapo_temperature_neg")
        return
    if v["loss_type"] == "cispo":  # TRL bounds the weight at epsilon_high itself, and not below
        made.keys["loss_fn.ratio_clip_min"] = 1.0
        made.keys["loss_fn.ratio_clip_max"] = high - 1
        if high < 1:
            key = "epsilon" if v["epsilon_high"] is None else "epsilon_high"
            made.refused[key] = (
                f"TRL's cispo bounds the weight at {high}; here the bound is at least 1: add epsilon_high=5.0"
            )
    elif v["delta"] is not None:
        delta = number(v, "delta")
        made.keys["loss_fn.ratio_clip_c"] = delta
        if delta < 1 + high or delta <= 1:
            made.refused["delta"] = (
                f"below 1 + epsilon_high={1 + high:g}, TRL bounds the ratio for both signs of the advantage, and the "
                "clip here does not; add delta=null"
            )


def _averages(v: Mapping[str, Any], made: Made) -> None:
    """What the loss is divided by."""
    loss, level = v["loss_type"], v["importance_sampling_level"]
    if level == "sequence" and loss == "sapo":
        made.refused["importance_sampling_level"] = (
            "SAPO has a ratio per token here: add importance_sampling_level=token"
        )
    if level == "sequence" and loss == "cispo":
        made.refused["importance_sampling_level"] = (
            "CISPO has a ratio per token here: add importance_sampling_level=token"
        )
    if v["mask_truncated_completions"] and loss in ("grpo", "dr_grpo", "luspo", "sapo"):
        made.notes["mask_truncated_completions"] = (
            "TRL divides by all sequences, here by those that are not masked: the loss is larger by their ratio"
        )
    if v["entropy_coef"]:
        made.notes["entropy_coef"] = (
            "TRL averages the entropy over the tokens of each micro-batch, here it is averaged as the loss is"
        )


def _reference_kl(v: Mapping[str, Any], made: Made) -> None:
    """TRL multiplies k3 by p / old, with its gradient: kl_gradient=policy_ratio. While p is the old policy that is
    score_function, our default."""
    if not v["beta"] or not v["use_bias_correction_kl"]:
        return
    instead = "use_bias_correction_kl=false is the KL without that ratio, TRL's before 1.10"
    if v["importance_sampling_level"] == "sequence":
        made.refused["use_bias_correction_kl"] = f"TRL multiplies the KL by the ratio of the sequence; {instead}"
    elif made.num_updates > 1:
        made.keys["loss_fn.kl_gradient"] = "policy_ratio"


def _sampler_weights(v: Mapping[str, Any], made: Made) -> None:
    if not v["use_vllm"] or not v["vllm_importance_sampling_correction"]:
        return
    made.notes["vllm_importance_sampling_correction"] = (
        "TRL trains a token whose sampler log-probability is NaN with weight 1, here it is not trained"
    )
    mode, low, high = (v[f"vllm_importance_sampling_{name}"] for name in ("mode", "clip_min", "clip_max"))
    if v["vllm_importance_sampling_cap"] is not None:  # its name before 1.0
        high = v["vllm_importance_sampling_cap"]
    keys = made.keys
    keys["loss_fn.truncated_importance_sampling_ratio"] = UNBOUNDED if high is None else high
    if mode == "token_mask" and low is None:
        keys["loss_fn.truncated_importance_sampling_ratio_min"] = 0.0
    if v["importance_sampling_level"] != "sequence":
        return
    if mode in ("token_truncate", "token_mask"):
        keys["loss_fn.importance_sampling_correction_level"] = "token"
    elif mode == "sequence_truncate":  # with GSPO, tis and icepop weight sequences
        keys["loss_fn.truncated_importance_sampling_type"] = "tis"
    elif mode == "sequence_mask":
        keys["loss_fn.truncated_importance_sampling_type"] = "icepop"
        keys["loss_fn.truncated_importance_sampling_ratio_min"] = 0.0 if low is None else low


def _rewards(v: Mapping[str, Any], made: Made) -> None:
    if v["multi_objective_aggregation"] != "normalize_then_sum":
        return
    made.keys["grpo.normalize_rewards"] = True  # whatever scale_rewards says
    made.keys["grpo.reward_std"] = "group"
    made.notes["multi_objective_aggregation"] = (
        "TRL adds 1e-4 to the last deviation; the environment has to give each reward (StepResult.rewards)"
    )


def _graders(v: Mapping[str, Any], made: Made) -> None:
    """TRL's reward functions (names, dotted paths, in a script also models) and its reward model."""
    functions, model = v["reward_funcs"], v["reward_model_name_or_path"]
    names = functions if isinstance(functions, list) else [functions]
    names = [str(name) for name in [*names, model] if name]
    name = names[0] if len(names) == 1 else ""
    if name and (name == model or "/" in name):
        made.keys[GRADED_BY] = "reward_model"
        made.keys["env.reward_model.model_name"] = name
    elif re.fullmatch(r"(trl\.(\w+\.)*)?accuracy_reward", name):
        made.keys[GRADED_BY] = "math"
        made.keys["data.default.output_key"] = "solution"
    elif re.fullmatch(r"\w+(\.\w+)*", name):
        module, _, function = name.rpartition(".")
        is_own = module in ("", "__main__")
        made.keys[GRADED_BY] = f"{YOURS}{function}" if is_own else f"{module}:{function}"
    else:
        made.keys[GRADED_BY] = f"{YOURS}your_function"
