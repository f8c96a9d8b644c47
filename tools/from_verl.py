"""Keys of ours that several of verl's make: batches, the loss, what grades. from_verl.yaml has the others."""

import math
from pathlib import Path
from typing import Any

from base.inputs.keys import text_of
from config import ConfigError
from tools.translation import GRADED_BY, Translation, Values, number, whole

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def translate(theirs: Values) -> Translation:
    """theirs: each of verl's keys with its value. ConfigError for a value that no run of verl can have."""
    result = Translation()
    _batches(theirs, result)
    _data(theirs, result)
    _optimizer(theirs, result)
    _clips(theirs, result)
    _averages(theirs, result)
    _sampler_weights(theirs, result)
    _rejection(theirs, result)
    _graders(theirs, result)
    if theirs["algorithm.filter_groups.enable"] and not theirs["algorithm.filter_groups.max_num_gen_batches"]:
        result.notes["algorithm.filter_groups.max_num_gen_batches"] = (
            "verl draws batches until a step is full, here as many as grpo.dynamic_sampling_max_gen_batches says"
        )
    if str(theirs["algorithm.adv_estimator"]).startswith("reinforce_plus_plus"):
        result.notes["algorithm.adv_estimator"] = "verl whitens with Bessel's correction, sqrt(N / (N - 1)) of N tokens"
    return result


def _batches(theirs: Values, result: Translation) -> None:
    """verl counts prompts, and a step is a rollout."""
    num_prompts = whole(theirs, "data.train_batch_size", 1)
    num_samples = whole(theirs, "actor_rollout_ref.rollout.n", 1)
    drawn = num_prompts
    if theirs["data.gen_batch_size"] is not None:
        drawn = whole(theirs, "data.gen_batch_size", 1)
    total = whole(theirs, "data.max_prompt_length", 1) + whole(theirs, "data.max_response_length", 1)
    num_ranks = whole(theirs, "trainer.nnodes", 1) * whole(theirs, "trainer.n_gpus_per_node", 1)
    num_shards = whole(theirs, f"{ACTOR}.fsdp_config.fsdp_size", -1)
    result.keys["grpo.num_prompts_per_step"] = num_prompts
    result.keys["grpo.batch_multiplier"] = drawn / num_prompts
    result.keys["policy.train_global_batch_size"] = whole(theirs, f"{ACTOR}.ppo_mini_batch_size", 1) * num_samples
    result.keys["policy.max_total_sequence_length"] = total
    num_replicas = 1
    if num_shards > 0:
        num_replicas = max(1, num_ranks // num_shards)
    result.keys["policy.dtensor_cfg.dp_replicate_size"] = num_replicas


def _data(theirs: Values, result: Translation) -> None:
    files_of = {"data.train": theirs["data.train_files"], "data.validation": theirs["data.val_files"]}
    for key, files in files_of.items():
        if not files:
            continue
        if not isinstance(files, list):
            files = [files]
        sections: list[Values] = [{"data_path": file} for file in files]
        if len(sections) > 1:  # files of several sets are often called alike
            for section in sections:
                section["name"] = Path(str(section["data_path"])).parent.name or None
        result.keys[key] = sections


def _optimizer(theirs: Values, result: Translation) -> None:
    key = f"{ACTOR}.optim.weight_decay"
    if theirs[f"{ACTOR}.strategy"] == "megatron" and theirs[key]:
        result.notes[key] = "Megatron does not decay norms and biases, here all weights decay"


def _clips(theirs: Values, result: Translation) -> None:
    low = _clip(theirs, "clip_ratio_low")
    high = _clip(theirs, "clip_ratio_high")
    low = min(low, 1.0)  # a ratio is never below 0
    result.keys["loss_fn.ratio_clip_min"] = low
    result.keys["loss_fn.ratio_clip_max"] = high
    mode = theirs[f"{ACTOR}.policy_loss.loss_mode"]
    if mode not in ("vanilla", "dppo_tv"):  # the others have no dual clip
        result.keys["loss_fn.ratio_clip_c"] = None
    if mode == "dppo_tv":  # its bounds are of probabilities
        result.keys["loss_fn.dppo_mask_low"] = low
        result.keys["loss_fn.dppo_mask_high"] = high
    if mode == "sapo":
        result.keys["loss_fn.sapo_tau_positive"] = number(theirs, f"{ACTOR}.tau_pos")
        result.keys["loss_fn.sapo_tau_negative"] = number(theirs, f"{ACTOR}.tau_neg")
    if mode in ("dppo_tv", "sapo"):  # the ratio is not clipped
        result.keys["loss_fn.ratio_clip_min"] = 0.2
        result.keys["loss_fn.ratio_clip_max"] = 0.2


def _clip(theirs: Values, name: str) -> float:
    """A bound of the ratio, which clip_ratio is where the bound is null."""
    if theirs[f"{ACTOR}.{name}"] is None:
        name = "clip_ratio"
    return number(theirs, f"{ACTOR}.{name}")


def _averages(theirs: Values, result: Translation) -> None:
    """What the loss is divided by."""
    mode = theirs[f"{ACTOR}.policy_loss.loss_mode"]
    key = f"{ACTOR}.loss_agg_mode"
    average = theirs[key]
    differences = []
    if mode in ("sapo", "geo_mean"):  # verl averages these over sequences whatever this key says
        result.keys["loss_fn.token_level_loss"] = False
        result.keys["loss_fn.loss_scale_factor"] = None
        if average != "seq-mean-token-mean" and (theirs[f"{ACTOR}.entropy_coeff"] or theirs[f"{ACTOR}.use_kl_loss"]):
            differences.append("verl averages entropy and KL as this key says, here over sequences, as the loss")
    elif mode == "cispo" and average != "token-mean":
        result.refused[key] = f"CISPO averages over tokens here: add {key}=token-mean"
    elif average == "seq-mean-token-sum-norm":
        width = theirs[f"{ACTOR}.loss_scale_factor"]
        if width is None:
            width = whole(theirs, "data.max_response_length", 1)
            differences.append(
                "without loss_scale_factor verl divides by the padded width of a micro-batch, here by "
                f"data.max_response_length={width}"
            )
        result.keys["loss_fn.loss_scale_factor"] = width
    if mode in ("sapo", "geo_mean") or str(average).startswith("seq-mean"):
        differences.append("verl counts sequences without a trained token, which are not counted here")
    if differences:
        result.notes[key] = "; ".join(differences)
    if mode == "geo_mean":
        result.notes[f"{ACTOR}.policy_loss.loss_mode"] = (
            "verl's gradient is larger by the number of micro-batches that a rank has in a mini-batch, because it adds "
            "their means"
        )


def _sampler_weights(theirs: Values, result: Translation) -> None:
    key = f"{CORRECTION}.rollout_is"
    level = theirs[key]
    if level is None:
        return
    result.notes[key] = (
        "where a log-probability of the sampler is NaN, verl's loss is NaN, here the token is not trained"
    )
    low, high = _bounds(f"{key}_threshold", theirs[f"{key}_threshold"])
    mode = theirs[f"{ACTOR}.policy_loss.loss_mode"]
    if mode == "gspo" and level == "token":  # a token's weight counts for its own gradient
        result.keys["loss_fn.gspo_token"] = True
        result.keys["loss_fn.importance_sampling_correction_level"] = "token"
    if mode == "geo_mean":
        result.refused[key] = (
            "verl multiplies GMPO by the geometric mean of a sequence's weights, here each token has its own: add "
            f"{key}=null"
        )
    of_sequence = level != "token" and mode != "gspo"
    if low is None:
        kind = "sequence-truncate" if of_sequence else "tis"
    else:
        kind = "sequence-mask" if of_sequence else "icepop"
    result.keys["loss_fn.truncated_importance_sampling_type"] = kind
    result.keys["loss_fn.truncated_importance_sampling_ratio"] = high
    result.keys["loss_fn.truncated_importance_sampling_ratio_min"] = low


REJECTED = {"token_k1": "token", "seq_mean_k1": "sequence"}  # an option of rollout_rs -> what it takes out


def _rejection(theirs: Values, result: Translation) -> None:
    """verl bounds sampler / trainer, and divides by counts that include what is rejected, as here."""
    key = f"{CORRECTION}.rollout_rs"
    options = str(theirs[key]).split(",")
    if not set(options) <= REJECTED.keys():  # null, or refused by the table
        return
    key_of_bounds = f"{CORRECTION}.rollout_rs_threshold"
    written = text_of(theirs[key_of_bounds])
    thresholds = written.split(",")
    if len(thresholds) == 1:
        thresholds *= len(options)
    if len(thresholds) != len(options):
        expected = f"expected a bound for each of {theirs[key]}, or one for all"
        raise ConfigError(f"{key_of_bounds}={written:.80}: {expected}")
    for option, threshold in zip(options, thresholds, strict=True):
        low, high = _bounds(key_of_bounds, threshold)
        most = high
        if low is not None:
            most = 1 / low
        result.keys[f"loss_fn.{REJECTED[option]}_rejection_ratio_min"] = 1 / high
        result.keys[f"loss_fn.{REJECTED[option]}_rejection_ratio_max"] = most
    if "token_k1" in options and theirs[f"{CORRECTION}.rollout_is"] == "sequence":
        result.refused[key] = (
            "verl's weight of a sequence is of all its tokens, here of those that are not rejected: add "
            f"{key}=seq_mean_k1 or {CORRECTION}.rollout_is=token"
        )
    if theirs["algorithm.adv_estimator"] in ("opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        result.notes[key] = "verl's advantages are of the tokens that are not rejected, here of all"


def _bounds(key: str, threshold: Any) -> tuple[float | None, float]:
    """2.0 -> (None, 2.0); "0.5_2.0" -> (0.5, 2.0). Of weights, one bound clamps and two zero those outside (IcePop); in
    a rejection the lower one is then 1 / 2.0."""
    written = text_of(threshold).strip()
    low, _, high = written.rpartition("_")
    lower = None
    if low:
        lower = _bound(key, written, low)
    return lower, _bound(key, written, high)


def _bound(key: str, written: str, text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 0 < bound < math.inf:
        raise ConfigError(f"{key}={written:.80}: expected a bound such as 2.0, or two as in 0.5_2.0")
    return bound


def _graders(theirs: Values, result: Translation) -> None:
    result.keys[GRADED_BY] = "math"
    if theirs["reward.reward_model.enable"]:
        result.keys[GRADED_BY] = "reward_model"
    path = theirs["reward.custom_reward_function.path"]
    if path:
        file = Path(str(path))
        parts = [*file.parent.parts, file.stem]
        if file.is_absolute() or ".." in parts:
            parts = [file.stem]
        result.keys[GRADED_BY] = f"{'.'.join(parts)}:{theirs['reward.custom_reward_function.name']}"
