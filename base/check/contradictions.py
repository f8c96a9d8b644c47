"""Settings that contradict each other: the tables RULES and READS, and what they refuse of a Config.

A rule refuses the conditions of `refuse` where all those of `when` hold. Nothing reads the keys of `unread` while
`when` holds: each must have its default, because another value would be ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from base.inputs.keys import FIELDS, text_of
from config import Config


@dataclass(frozen=True)
class Condition:
    """`holds`, of the values of `keys`."""

    keys: tuple[str, ...]
    holds: Callable[..., bool]

    def is_met(self, cfg: Config) -> bool:
        values = [attrgetter(key)(cfg) for key in self.keys]
        return self.holds(*values)


def equal(key: str, *values: object) -> Condition:
    """The key has one of these values."""
    return Condition((key,), lambda value: value in values)


def not_equal(key: str, *values: object) -> Condition:
    """The key has none of these values."""
    return Condition((key,), lambda value: value not in values)


def above(key: str, other: str) -> Condition:
    """Both keys have a number, and that of `key` is the higher one."""
    return Condition((key, other), lambda value, bound: None not in (value, bound) and value > bound)


def at_least(key: str, other: str) -> Condition:
    """Both keys have a number, and that of `key` is not the lower one."""
    return Condition((key, other), lambda value, bound: None not in (value, bound) and value >= bound)


def all_zero(key: str) -> Condition:
    """The key has a list of numbers, and each is 0."""
    return Condition((key,), lambda values: bool(values) and not any(values))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """why ends the message: in it, "the first" is the key that is refused, "the second" the first key of `when`."""

    when: Sequence[Condition] = ()
    refuse: Sequence[Condition] = ()
    unread: Sequence[str] = ()
    why: str


def contradictions(cfg: Config) -> Iterator[str]:
    """What RULES and READS refuse."""
    for rule in [*RULES, unread_by(cfg.loss_fn.token_loss)]:
        if not all(condition.is_met(cfg) for condition in rule.when):
            continue
        others = [setting(cfg, key) for condition in rule.when for key in condition.keys]
        for condition in rule.refuse:
            if condition.is_met(cfg):
                settings = [setting(cfg, key) for key in condition.keys]
                yield f"{' and '.join([*settings, *others])}: {rule.why}"
        for key in rule.unread:
            default = FIELDS[key].default
            if attrgetter(key)(cfg) != default:
                fix = f"set {key}={text_of(default)}"
                yield f"{setting(cfg, key)} has no effect with {' and '.join(others)}: {rule.why}; {fix}"


def unread_by(token_loss: str) -> Rule:
    """The rule that refuses the keys of other token losses."""
    assert token_loss in READS, f"READS needs a line of {token_loss}"
    keys = dict.fromkeys(chain.from_iterable(READS.values()))
    return Rule(
        when=[equal("loss_fn.token_loss", token_loss)],
        unread=[f"loss_fn.{key}" for key in keys if key not in READS[token_loss]],
        why="this token loss does not read it",
    )


def setting(cfg: Config, key: str) -> str:
    return f"{key}={text_of(attrgetter(key)(cfg))}"


# token_loss -> the keys of loss_fn that not every token loss reads, and this one does
READS = {
    "ppo": ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c"),
    "sapo": ("sapo_tau_positive", "sapo_tau_negative"),
    "dppo": ("dppo_mask_low", "dppo_mask_high", "dppo_kl_tau"),
    "ipo": ("dppo_mask_low", "dppo_mask_high", "dppo_kl_tau"),
    "dppo_tv": ("dppo_mask_low", "dppo_mask_high", "ratio_clip_c"),
    "gmpo": ("ratio_clip_min", "ratio_clip_max"),
}

RULES = [
    Rule(
        when=[not_equal("loss_fn.ratio_clip_c", None)],
        refuse=[equal("loss_fn.use_cispo", True)],
        why="CISPO has no second clip; set the second to null",
    ),
    Rule(
        when=[equal("loss_fn.use_cispo", True)],
        refuse=[equal("loss_fn.disable_ppo_ratio", True), equal("loss_fn.force_on_policy_ratio", True)],
        why="CISPO needs the ratio; set the first to false",
    ),
    Rule(
        when=[equal("loss_fn.sequence_level_importance_ratios", True)],
        refuse=[equal("loss_fn.use_cispo", True)],
        why="CISPO's ratio is per token; set the second to false",
    ),
    Rule(
        when=[equal("loss_fn.token_level_loss", False)],
        refuse=[equal("loss_fn.use_cispo", True)],
        why="CISPO averages over tokens; set the second to true",
    ),
    Rule(
        when=[equal("loss_fn.use_cispo", True)],
        refuse=[not_equal("loss_fn.token_loss", "ppo")],
        why="CISPO is a token loss of its own; set the second to false",
    ),
    Rule(
        when=[equal("loss_fn.disable_ppo_ratio", True)],
        refuse=[not_equal("loss_fn.token_loss", "ppo")],
        why="REINFORCE is a token loss of its own; set the second to false",
    ),
    Rule(
        when=[equal("loss_fn.force_on_policy_ratio", True)],
        refuse=[not_equal("loss_fn.token_loss", "ppo")],
        why="with a ratio of 1 there is nothing to bound; set the second to false",
    ),
    Rule(
        when=[equal("loss_fn.sequence_level_importance_ratios", True)],
        refuse=[not_equal("loss_fn.token_loss", "ppo")],
        why="GSPO clips the ratio of a sequence; set the first to ppo",
    ),
    Rule(
        when=[equal("loss_fn.token_level_loss", True)],
        refuse=[equal("loss_fn.token_loss", "gmpo")],
        why="GMPO averages over sequences; set the second to false",
    ),
    Rule(
        when=[equal("loss_fn.token_loss", "gmpo")],
        refuse=[not_equal("loss_fn.loss_scale_factor", None)],
        why="GMPO averages over sequences; set the first to null",
    ),
    Rule(
        when=[equal("loss_fn.token_loss", "gmpo")],
        refuse=[equal("grpo.turn_level_advantages", True)],
        why="all turns share a ratio; set the first to false",
    ),
    Rule(
        when=[equal("loss_fn.use_on_policy_kl_approximation", True)],
        refuse=[equal("loss_fn.kl_gradient", "policy_ratio")],
        why="both weight the KL by a ratio; set the first to score_function",
    ),
    Rule(
        when=[equal("loss_fn.old_logprobs", "sampler")],
        refuse=[equal("loss_fn.kl_gradient", "policy_ratio")],
        why="no old log-probabilities are computed; use use_on_policy_kl_approximation",
    ),
    Rule(
        when=[not_equal("policy.generation.top_p", 1.0)],
        refuse=[equal("loss_fn.kl_gradient", "policy_ratio")],
        why="the KL is of unfiltered log-probabilities, which are not kept; use score_function",
    ),
    Rule(
        when=[not_equal("policy.generation.top_k", None)],
        refuse=[equal("loss_fn.kl_gradient", "policy_ratio")],
        why="the KL is of unfiltered log-probabilities, which are not kept; use score_function",
    ),
    Rule(
        when=[equal("loss_fn.sequence_level_importance_ratios", False)],
        unread=["loss_fn.gspo_token"],
        why="it is a form of GSPO",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "max_rl", "opo", "gpg", "pkpo")],
        unread=[
            "grpo.normalize_rewards",
            "grpo.use_leave_one_out_baseline",
            "grpo.reward_std",
            "grpo.reward_std_floor",
        ],
        why="the estimator has a baseline of its own",
    ),
    Rule(
        when=[equal("loss_fn.entropy_target", None)],
        unread=["loss_fn.entropy_coef_delta", "loss_fn.entropy_coef_max"],
        why="the weight of the entropy bonus stays",
    ),
    Rule(
        when=[not_equal("loss_fn.entropy_target", None)],
        refuse=[above("loss_fn.entropy_coef", "loss_fn.entropy_coef_max")],
        why="the weight starts at the first, which is too high; lower it",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "grpo_passk")],
        unread=["grpo.use_leave_one_out_baseline", "grpo.reward_std", "grpo.reward_std_floor"],
        why="the baseline is the second best reward, and the deviation the group's",
    ),
    Rule(
        when=[not_equal("grpo.adv_estimator.name", "pkpo")],
        unread=["grpo.adv_estimator.pass_k"],
        why="only pkpo compares the best of k samples",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "pkpo")],
        refuse=[above("grpo.adv_estimator.pass_k", "grpo.num_generations_per_prompt")],
        why="a group is smaller than the first; lower it",
    ),
    Rule(
        when=[equal("loss_fn.force_on_policy_ratio", True)],
        refuse=[equal("loss_fn.disable_ppo_ratio", True)],
        why="choose one",
    ),
    Rule(
        when=[equal("loss_fn.use_importance_sampling_correction", False)],
        refuse=[not_equal("loss_fn.truncated_importance_sampling_type", None)],
        why="there are no weights to bound; set the second to true",
    ),
    Rule(
        when=[equal("loss_fn.truncated_importance_sampling_ratio", None)],
        refuse=[not_equal("loss_fn.truncated_importance_sampling_type", None, "sequence")],
        why="this type needs its upper bound; set the second",
    ),
    Rule(
        when=[equal("loss_fn.truncated_importance_sampling_ratio_min", None)],
        refuse=[equal("loss_fn.truncated_importance_sampling_type", "icepop", "seq-mask-tis")],
        why="this type needs its lower bound; set the second",
    ),
    Rule(
        when=[equal("loss_fn.truncated_importance_sampling_type", None, "sequence")],
        refuse=[
            not_equal("loss_fn.truncated_importance_sampling_ratio", None),
            not_equal("loss_fn.truncated_importance_sampling_ratio_min", None),
        ],
        why="this type has no bounds; set the first to null",
    ),
    Rule(
        when=[equal("loss_fn.sequence_level_importance_ratios", True)],
        refuse=[not_equal("loss_fn.truncated_importance_sampling_type", None, "tis", "icepop")],
        why="GSPO weights whole sequences; use tis or icepop",
    ),
    Rule(
        refuse=[
            above("loss_fn.truncated_importance_sampling_ratio_min", "loss_fn.truncated_importance_sampling_ratio")
        ],
        why="the first must be lower",
    ),
    Rule(
        refuse=[
            above("loss_fn.token_rejection_ratio_min", "loss_fn.token_rejection_ratio_max"),
            above("loss_fn.sequence_rejection_ratio_min", "loss_fn.sequence_rejection_ratio_max"),
        ],
        why="no ratio is within these bounds; the first must be lower",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "gdpo")],
        refuse=[equal("grpo.turn_level_advantages", True)],
        why="its rewards are sums over all turns; use another estimator",
    ),
    Rule(
        when=[equal("grpo.reward_shaping.enabled", True)],
        refuse=[equal("grpo.turn_level_advantages", True)],
        why="shaping applies to the sum of all turns; set one to false",
    ),
    Rule(
        when=[equal("loss_fn.sequence_level_importance_ratios", True)],
        refuse=[equal("grpo.turn_level_advantages", True)],
        why="all turns share a ratio; unset one",
    ),
    Rule(
        when=[], refuse=[at_least("grpo.advantage_clip_low", "grpo.advantage_clip_high")], why="the first must be lower"
    ),
    Rule(
        when=[equal("grpo.reward_scaling.enabled", True)],
        refuse=[
            at_least("grpo.reward_scaling.source_min", "grpo.reward_scaling.source_max"),
            at_least("grpo.reward_scaling.target_min", "grpo.reward_scaling.target_max"),
        ],
        why="the first must be lower",
    ),
    Rule(
        refuse=[above("policy.max_total_sequence_length", "policy.sequence_packing.train_mb_tokens")],
        why="a pack holds whole sequences; raise the second",
    ),
    Rule(
        refuse=[above("policy.generation.max_new_tokens", "policy.max_total_sequence_length")],
        why="a response is part of the sequence; lower the first",
    ),
    Rule(
        when=[
            equal("grpo.async_grpo.enabled", True),
            equal("loss_fn.use_importance_sampling_correction", False),
            equal("loss_fn.old_logprobs", "trainer"),
        ],
        refuse=[not_equal("grpo.async_grpo.max_trajectory_age_steps", 0)],
        why="tokens of older weights need the correction; set loss_fn.use_importance_sampling_correction=true, or "
        "old_logprobs=sampler, or the age to 0",
    ),
    Rule(
        when=[
            equal("grpo.async_grpo.max_trajectory_age_steps", 0),
            equal("grpo.async_grpo.enabled", True),
            equal("policy.generation.colocated.enabled", False),
        ],
        refuse=[equal("grpo.async_grpo.in_flight_weight_updates", True)],
        why="no response outlasts its step; set the age to 1 or more, or in_flight_weight_updates=false",
    ),
    Rule(
        when=[equal("policy.generation.colocated.enabled", True), equal("grpo.async_grpo.enabled", True)],
        refuse=[equal("grpo.async_grpo.recompute_kv_cache_after_weight_updates", False)],
        why="the engine's sleep drops keys and values; set the first to true, or split the job",
    ),
    Rule(
        when=[equal("policy.optimizer.name", "torch.optim.Muon")],
        refuse=[not_equal("policy.dtensor_cfg.dp_replicate_size", 1)],
        why="Muon multiplies matrices over all ranks, across replicas; use torch.optim.AdamW, or dp_replicate_size=1",
    ),
    Rule(
        when=[equal("policy.optimizer.name", "torch.optim.Muon")],
        refuse=[equal("policy.dtensor_cfg.lora_cfg.enabled", True)],
        why="Muon is for matrices, not for their factors; use torch.optim.AdamW",
    ),
    Rule(
        when=[not_equal("grpo.ref_policy_update_alpha", 1.0)],
        refuse=[equal("policy.dtensor_cfg.lora_cfg.enabled", True)],
        why="the product of averaged factors is not the average of the products; use ref_policy_update_alpha=1",
    ),
    Rule(
        when=[
            equal("policy.dtensor_cfg.lora_cfg.enabled", True),
            equal("policy.dtensor_cfg.lora_cfg.target_modules", ()),
            equal("policy.dtensor_cfg.lora_cfg.exclude_modules", ()),
        ],
        refuse=[equal("policy.dtensor_cfg.lora_cfg.match_all_linear", False)],
        why="name layers in one of the lists, or set the first to true",
    ),
    Rule(
        when=[equal("data.num_prompts_per_dataloader", None), equal("data.custom_dataloader", None)],
        refuse=[equal("data.use_multiple_dataloader", True)],
        why="set data.num_prompts_per_dataloader, the prompts of a turn",
    ),
    Rule(
        when=[equal("loss_fn.disable_ppo_ratio", True)],
        unread=["loss_fn.ratio_clip_c", "loss_fn.sequence_level_importance_ratios", "loss_fn.old_logprobs"],
        why="there is no ratio",
    ),
    Rule(
        when=[equal("loss_fn.force_on_policy_ratio", True)],
        unread=["loss_fn.ratio_clip_c", "loss_fn.old_logprobs"],
        why="the ratio is 1",
    ),
    Rule(
        when=[equal("loss_fn.use_importance_sampling_correction", True)],
        refuse=[equal("loss_fn.old_logprobs", "sampler")],
        why="the ratio compares with the sampler already; set the second to false",
    ),
    Rule(
        when=[equal("loss_fn.sequence_level_importance_ratios", False)],
        unread=["loss_fn.importance_sampling_correction_level"],
        why="truncated_importance_sampling_type alone decides the level",
    ),
    Rule(
        when=[equal("loss_fn.use_importance_sampling_correction", False)],
        unread=["loss_fn.importance_sampling_correction_level"],
        why="there are no weights",
    ),
    Rule(
        when=[equal("loss_fn.reference_policy_kl_penalty", 0.0)],
        unread=[
            "policy.reference_model_name",
            "policy.reference_server_url",
            "grpo.ref_policy_update_period",
            "loss_fn.topk_logits_k",
        ],
        why="there is no KL",
    ),
    Rule(
        when=[not_equal("policy.reference_server_url", None)],
        unread=["policy.reference_model_name", "grpo.ref_policy_update_period"],
        why="the teacher is the server's model",
    ),
    Rule(
        when=[not_equal("policy.reference_server_url", None)],
        refuse=[not_equal("policy.generation.temperature", 1.0)],
        why="a server gives log-probabilities at temperature 1; set the first to 1, or name the teacher's folder",
    ),
    Rule(
        when=[not_equal("loss_fn.topk_logits_k", None)],
        unread=["loss_fn.kl_gradient", "loss_fn.use_on_policy_kl_approximation"],
        why="the KL is over the reference's likeliest ids, whatever was sampled",
    ),
    Rule(
        when=[not_equal("loss_fn.topk_logits_k", None)],
        refuse=[not_equal("policy.generation.top_p", 1.0), not_equal("policy.generation.top_k", None)],
        why="the KL is of unfiltered log-probabilities; use the first's default, or set the second to null",
    ),
    Rule(
        when=[not_equal("policy.reference_model_name", None)],
        unread=["grpo.ref_policy_update_period"],
        why="a teacher does not follow the policy",
    ),
    Rule(
        when=[equal("grpo.ref_policy_update_period", None)],
        unread=["grpo.ref_policy_update_alpha"],
        why="the reference policy is never updated",
    ),
    Rule(
        when=[not_equal("grpo.adv_estimator.name", "reinforce_plus_plus")],
        unread=["grpo.adv_estimator.minus_baseline"],
        why="the other estimators always subtract a baseline",
    ),
    Rule(
        when=[not_equal("grpo.adv_estimator.name", "gdpo")],
        unread=["grpo.adv_estimator.reward_weights"],
        why="only gdpo has several rewards",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "gdpo")],
        refuse=[all_zero("grpo.adv_estimator.reward_weights")],
        why="no reward is trained; give one of them a weight other than 0",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "reinforce_plus_plus", "none")],
        unread=[
            "grpo.normalize_rewards",
            "grpo.use_leave_one_out_baseline",
            "grpo.reward_std",
            "grpo.reward_std_floor",
        ],
        why="it does not compare within groups",
    ),
    Rule(
        when=[equal("grpo.normalize_rewards", False)],
        unread=["grpo.reward_std", "grpo.reward_std_floor"],
        why="nothing is divided by a deviation",
    ),
    Rule(
        when=[equal("grpo.use_leave_one_out_baseline", False)],
        unread=["grpo.reward_std_floor"],
        why="a deviation that includes the sample's own reward needs no floor",
    ),
    Rule(
        when=[not_equal("grpo.reward_std", "baseline")],
        unread=["grpo.reward_std_floor"],
        why="a deviation that includes the sample's own reward needs no floor",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "gdpo")],
        unread=["grpo.reward_shaping.enabled"],
        why="gdpo reads each reward, not their shaped sum",
    ),
    Rule(
        when=[equal("grpo.adv_estimator.name", "none")],
        unread=[
            "grpo.reward_shaping.enabled",
            "grpo.turn_level_advantages",
            "grpo.advantage_clip_low",
            "grpo.advantage_clip_high",
        ],
        why="no reward is trained",
    ),
    Rule(
        when=[equal("grpo.max_rollout_turns", 1), equal("env.agents", ())],
        unread=["grpo.turn_level_advantages"],
        why="a conversation has one turn",
    ),
    Rule(
        when=[equal("loss_fn.reference_policy_kl_penalty", 0.0)],
        refuse=[equal("grpo.adv_estimator.name", "none")],
        why="nothing is trained; set the second to 1",
    ),
    Rule(
        when=[equal("grpo.async_grpo.enabled", False)],
        unread=["grpo.async_grpo.max_trajectory_age_steps", "grpo.async_grpo.in_flight_weight_updates"],
        why="each step samples anew",
    ),
    Rule(
        when=[equal("policy.router_replay.enabled", False)],
        unread=["policy.router_replay.measure_only"],
        why="the engine does not tell the sampler's experts",
    ),
    Rule(
        when=[equal("grpo.use_dynamic_sampling", False)],
        unread=["grpo.batch_multiplier"],
        why="only dynamic sampling draws spare prompts",
    ),
    Rule(
        when=[equal("grpo.use_dynamic_sampling", False)],
        unread=["grpo.dynamic_sampling_when_exhausted"],
        why="every step is full",
    ),
    Rule(
        when=[equal("policy.generation.colocated.enabled", True)],
        unread=[
            "policy.generation.colocated.resources.gpus_per_node",
            "policy.generation.colocated.resources.num_nodes",
        ],
        why="all ranks generate",
    ),
    Rule(
        when=[equal("policy.scheduler.name", "constant")],
        unread=["policy.scheduler.min_factor"],
        why="a constant rate does not fall",
    ),
    Rule(
        when=[equal("policy.dtensor_cfg.lora_cfg.match_all_linear", True)],
        unread=["policy.dtensor_cfg.lora_cfg.target_modules", "policy.dtensor_cfg.lora_cfg.exclude_modules"],
        why="all layers are adapted",
    ),
    Rule(
        when=[not_equal("policy.dtensor_cfg.lora_cfg.target_modules", ())],
        unread=["policy.dtensor_cfg.lora_cfg.exclude_modules"],
        why="only those are adapted",
    ),
    Rule(
        when=[not_equal("policy.optimizer.name", "torch.optim.Muon")],
        unread=["policy.optimizer.muon_lr", "policy.optimizer.muon_momentum"],
        why="only Muon reads it",
    ),
    Rule(
        when=[equal("policy.dtensor_cfg.cpu_offload", True)],
        unread=["policy.offload_optimizer_for_logprob"],
        why="that offloads the moments, too",
    ),
    Rule(
        when=[equal("data.use_multiple_dataloader", False)],
        unread=["data.custom_dataloader"],
        why="it is used only with use_multiple_dataloader=true",
    ),
    Rule(
        when=[equal("checkpointing.resume", "never")], unread=["checkpointing.resume_from"], why="a new run is started"
    ),
    Rule(
        when=[equal("checkpointing.resume_from", None)],
        unread=["checkpointing.resume_step"],
        why="name the run in resume_from",
    ),
    Rule(
        when=[equal("checkpointing.resume", "auto")], unread=["checkpointing.resume_step"], why="auto takes the newest"
    ),
    Rule(
        when=[equal("env.agents", ())],
        unread=[
            "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.tool_parser",
            "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.reasoning_parser",
        ],
        why="only agents read it",
    ),
]
