"""Keys of ours that several of verl's make: batches, the loss, what grades. from_verl.yaml has the others."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from base.inputs.keys import text_of
from config import ConfigError
from tools.made import GRADED_BY, Made, number, whole

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def made_of(v: Mapping[str, Any]) -> Made:
    """v: each of verl's keys with its value. ConfigError for a value that no run of verl can have."""
    made = Made()
    _batches(v, made)
    _data(v, made)
    _clips(v, made)
    _averages(v, made)
    _sampler_weights(v, made)
    _rejection(v, made)
    _graders(v, made)
    if v["algorithm.filter_groups.enable"] and not v["algorithm.filter_groups.max_num_gen_batches"]:
        made.notes["algorithm.filter_groups.max_num_gen_batches"] = (
            "verl draws batches until a step is full, here as many as grpo.dynamic_sampling_max_gen_batches says"
        )
    if str(v["algorithm.adv_estimator"]).startswith("reinforce_plus_plus"):
        made.notes["algorithm.adv_estimator"] = "verl whitens with Bessel's correction, sqrt(N / (N - 1)) of N tokens"
    return made


def _batches(v: Mapping[str, Any], made: Made) -> None:
    """verl counts prompts, and a step is a rollout."""
    num_prompts = whole(v, "data.train_batch_size", 1)
    num_samples = whole(v, "actor_rollout_ref.rollout.n", 1)
    drawn = num_prompts
    if v["data.gen_batch_size"] is not None:
        drawn = whole(v, "data.gen_batch_size", 1)
    total = whole(v, "data.max_prompt_length", 1) + whole(v, "data.max_response_length", 1)
    num_ranks = whole(v, "trainer.nnodes", 1) * whole(v, "trainer.n_gpus_per_node", 1)
    num_shards = whole(v, f"{ACTOR}.fsdp_config.fsdp_size", -1)
    made.keys["grpo.num_prompts_per_step"] = num_prompts
    made.keys["grpo.batch_multiplier"] = drawn / num_prompts
    made.keys["policy.train_global_batch_size"] = whole(v, f"{ACTOR}.ppo_mini_batch_size", 1) * num_samples
    made.keys["policy.max_total_sequence_length"] = total
    made.keys["policy.dtensor_cfg.dp_replicate_size"] = max(1, num_ranks // num_shards) if num_shards > 0 else 1


def _data(v: Mapping[str, Any], made: Made) -> None:
    for ours, theirs in (("data.train", "data.train_files"), ("data.validation", "data.val_files")):
        files = v[theirs]
        if not files:
            continue
        paths = files if isinstance(files, list) else [files]
        sections: list[dict[str, Any]] = [{"data_path": path} for path in paths]
        if len(sections) > 1:  # files of several sets are often called alike
            for section in sections:
                section["name"] = Path(str(section["data_path"])).parent.name or None
        made.keys[ours] = sections


def _clips(v: Mapping[str, Any], made: Made) -> None:
    for ours, theirs in (("min", "low"), ("max", "high")):
        key = f"{ACTOR}.clip_ratio_{theirs}"
        if v[key] is None:
            key = f"{ACTOR}.clip_ratio"
        made.keys[f"loss_fn.ratio_clip_{ours}"] = number(v, key)
    made.keys["loss_fn.ratio_clip_min"] = min(made.keys["loss_fn.ratio_clip_min"], 1.0)  # a ratio is never below 0
    mode = v[f"{ACTOR}.policy_loss.loss_mode"]
    if mode not in ("vanilla", "dppo_tv"):  # the others have no dual clip
        made.keys["loss_fn.ratio_clip_c"] = None
    if mode == "dppo_tv":  # its bounds are of probabilities
        made.keys["loss_fn.dppo_mask_low"] = made.keys["loss_fn.ratio_clip_min"]
        made.keys["loss_fn.dppo_mask_high"] = made.keys["loss_fn.ratio_clip_max"]
    if mode == "sapo":
        made.keys["loss_fn.sapo_tau_positive"] = number(v, f"{ACTOR}.tau_pos")
        made.keys["loss_fn.sapo_tau_negative"] = number(v, f"{ACTOR}.tau_neg")
    if mode in ("dppo_tv", "sapo"):  # the ratio is not clipped
        made.keys["loss_fn.ratio_clip_min"] = 0.2
        made.keys["loss_fn.ratio_clip_max"] = 0.2


def _averages(v: Mapping[str, Any], made: Made) -> None:
    """What the loss is divided by."""
    mode, average = v[f"{ACTOR}.policy_loss.loss_mode"], v[f"{ACTOR}.loss_agg_mode"]
    if mode in ("sapo", "geo_mean"):  # verl averages these over sequences whatever this key says
        made.keys["loss_fn.token_level_loss"] = False
        made.keys["loss_fn.loss_scale_factor"] = None
        return
    if mode == "cispo" and average != "token-mean":
        made.refused[f"{ACTOR}.loss_agg_mode"] = (
            f"CISPO averages over tokens here: add {ACTOR}.loss_agg_mode=token-mean"
        )
    if average == "seq-mean-token-sum-norm":
        width = v[f"{ACTOR}.loss_scale_factor"]
        if width is None:
            width = whole(v, "data.max_response_length", 1)
            made.notes[f"{ACTOR}.loss_agg_mode"] = (
                "without loss_scale_factor verl divides by the padded width of a micro-batch, here by "
                f"data.max_response_length={width}"
            )
        made.keys["loss_fn.loss_scale_factor"] = width


def _sampler_weights(v: Mapping[str, Any], made: Made) -> None:
    level = v[f"{CORRECTION}.rollout_is"]
    if level is None:
        return
    low, high = _bounds(f"{CORRECTION}.rollout_is_threshold", v[f"{CORRECTION}.rollout_is_threshold"])
    is_gspo = v[f"{ACTOR}.policy_loss.loss_mode"] == "gspo"
    if is_gspo and level == "token":  # a token's weight counts for its own gradient
        made.keys["loss_fn.gspo_token"] = True
        made.keys["loss_fn.importance_sampling_correction_level"] = "token"
    if v[f"{ACTOR}.policy_loss.loss_mode"] == "geo_mean":
        made.refused[f"{CORRECTION}.rollout_is"] = (
            "verl multiplies GMPO by the geometric mean of a sequence's weights, here each token has its own: add "
            f"{CORRECTION}.rollout_is=null"
        )
    if low is None:
        kind = "tis" if level == "token" or is_gspo else "sequence-truncate"
    else:
        kind = "icepop" if level == "token" or is_gspo else "sequence-mask"
    made.keys["loss_fn.truncated_importance_sampling_type"] = kind
    made.keys["loss_fn.truncated_importance_sampling_ratio"] = high
    made.keys["loss_fn.truncated_importance_sampling_ratio_min"] = low


REJECTED = {"token_k1": "token", "seq_mean_k1": "sequence"}  # an option of rollout_rs -> what it takes out


def _rejection(v: Mapping[str, Any], made: Made) -> None:
    """verl bounds sampler / trainer, and divides by counts that include what is rejected, as here."""
    key = f"{CORRECTION}.rollout_rs"
    options = str(v[key]).split(",")
    if not set(options) <= REJECTED.keys():  # null, or refused by the table
        return
    key_of_bounds = f"{CORRECTION}.rollout_rs_threshold"
    thresholds = text_of(v[key_of_bounds]).split(",")
    if len(thresholds) == 1:
        thresholds *= len(options)
    if len(thresholds) != len(options):
        raise ConfigError(
            f"{key_of_bounds}={v[key_of_bounds]:.80}: expected a bound for each of {v[key]}, or one for all"
        )
    for option, threshold in zip(options, thresholds, strict=True):
        low, high = _bounds(key_of_bounds, threshold)
        made.keys[f"loss_fn.{REJECTED[option]}_rejection_ratio_min"] = 1 / high
        made.keys[f"loss_fn.{REJECTED[option]}_rejection_ratio_max"] = high if low is None else 1 / low
    if "token_k1" in options and v[f"{CORRECTION}.rollout_is"] == "sequence":
        made.refused[key] = (
            "verl's weight of a sequence is of all its tokens, here of those that are not rejected: add "
            f"{key}=seq_mean_k1 or {CORRECTION}.rollout_is=token"
        )
    if v["algorithm.adv_estimator"] in ("opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        made.notes[key] = "verl's advantages are of the tokens that are not rejected, here of all"


def _bounds(key: str, threshold: Any) -> tuple[float | None, float]:
    """2.0 -> (None, 2.0); "0.5_2.0" -> (0.5, 2.0). Of weights, one bound clamps and two zero those outside (IcePop); in
    a rejection the lower one is then 1 / 2.0."""
    low, _, high = text_of(threshold).strip().rpartition("_")
    try:
        bounds = (float(low) if low else None, float(high))
    except ValueError:
        bounds = (None, 0.0)
    if any(bound is not None and not 0 < bound < math.inf for bound in bounds):
        raise ConfigError(f"{key}={text_of(threshold):.80}: expected a bound such as 2.0, or two as in 0.5_2.0")
    return bounds


def _graders(v: Mapping[str, Any], made: Made) -> None:
    made.keys[GRADED_BY] = "reward_model" if v["reward.reward_model.enable"] else "math"
    path = v["reward.custom_reward_function.path"]
    if path:
        file = Path(str(path))
        parts = [*file.parent.parts, file.stem]
        if file.is_absolute() or ".." in parts:
            parts = [file.stem]
        made.keys[GRADED_BY] = f"{'.'.join(parts)}:{v['reward.custom_reward_function.name']}"
