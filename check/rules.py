"""What is refused of a Config that was read well: values out of bounds, sizes that do not fit, keys that contradict.

Each refusal names the keys with their values and the reason. Nothing that a user sets is silently ignored.
"""

import json
import math
import operator
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from check.keys import bounds, default_text, meanings, plain_name, settings
from config import CheckpointingConfig, Config, ConfigError, DatasetConfig, LossConfig, shortened

MAX_NUMBER = 1e9  # of a key that declares no upper bound
MAX_STEP_SAMPLES = 10_000_000
MAX_PATH_BYTES = 3_800  # of a folder: Linux takes 4,095, and the run's files are below it
_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def validate(cfg: Config, world_size: int, ranks_of_node: int | None = None) -> None:
    """Raise ConfigError, a line for each problem, if `world_size` ranks cannot run `cfg`, or not with so many to a node
    where that is known. Reads no file."""
    assert world_size >= 1, world_size
    problems = list(_bound_problems(cfg)) or [
        *_split_problems(cfg, world_size, ranks_of_node),
        *_replica_problems(cfg, max(0, world_size - cfg.policy.generation.num_generators)),
        *_size_problems(cfg, cfg.policy.generation.num_generators or world_size),
        *loss_problems(cfg.loss_fn),
        *_unread_problems(cfg),
        *_lora_problems(cfg),
        *_checkpoint_problems(cfg),
        *_reward_problems(cfg),
        *_data_problems(cfg),
    ]
    if problems:
        shown = [problem for i, problem in enumerate(problems) if not i or sum(map(len, problems[: i + 1])) < 450]
        rest = [f"and {len(problems) - len(shown)} more"] if problems[len(shown) :] else []
        raise ConfigError(*shown, *rest)


def _bound_problems(cfg: Config) -> Iterator[str]:
    """Each key by itself, against the bounds it declares."""
    for name, value in settings(cfg):
        key = plain_name(name)
        if value == "":
            yield f"{name} is empty ({meanings()[key]})"
        numbers = [each for each in (value if isinstance(value, tuple) else [value]) if isinstance(each, int | float)]
        limits = [limit.split() for limit in bounds(key).split(",") if limit]
        if not all(_OPERATORS[sign](number, float(limit)) for number in numbers for sign, limit in limits):
            yield f"{name}={json.dumps(value):.80}: must be {bounds(key)} ({meanings()[key]})"
        elif "<" not in bounds(key) and max(map(abs, numbers), default=0) > MAX_NUMBER:
            yield f"{name}={json.dumps(value):.80}: no number here is above {MAX_NUMBER:,.0f} ({meanings()[key]})"


def fewest_ranks(cfg: Config) -> int:
    """The ranks that are enough to generate, and to train where others do that."""
    generation, replicas = cfg.policy.generation, cfg.policy.dtensor_cfg.dp_replicate_size
    num_generators, tensor = generation.num_generators, generation.vllm_cfg.tensor_parallel_size
    return num_generators + replicas if num_generators else math.lcm(tensor, replicas)


def _split_problems(cfg: Config, world_size: int, ranks_of_node: int | None) -> Iterator[str]:
    """Which ranks generate and which train, by the rules of NeMo RL (nemo_rl/algorithms/grpo.py, `setup`)."""
    generation, resources = cfg.policy.generation, cfg.policy.generation.colocated.resources
    if generation.colocated.enabled:
        return
    key = "policy.generation.colocated.resources"
    size_key = f"{key}.gpus_per_node={json.dumps(resources.gpus_per_node)}"
    nodes_key = f"{key}.num_nodes={json.dumps(resources.num_nodes)}"
    num_nodes = world_size // (ranks_of_node or world_size)
    if resources.gpus_per_node is None:
        yield f"{size_key} with policy.generation.colocated.enabled=false: set it to the ranks of a node that generate"
    elif num_nodes > 1 and resources.num_nodes is None:
        yield f"{nodes_key} with {num_nodes} nodes: set it to the number of nodes that generate"
    elif num_nodes > 1 and resources.gpus_per_node != ranks_of_node:
        yield f"{size_key} with {num_nodes} nodes: a node trains or generates as a whole, so set it to {ranks_of_node}"
    elif generation.num_generators >= world_size:
        yield (
            f"{size_key} and {nodes_key} are {generation.num_generators} ranks that generate, of {world_size}: none is "
            "left to train; start more ranks, or lower them"
        )
    elif num_nodes == 1 and ranks_of_node and resources.num_nodes not in (None, 1):
        yield f"{nodes_key} on one node: set it to 1, or start torchrun on more nodes"


def _replica_problems(cfg: Config, num_trainers: int) -> Iterator[str]:
    """Which ranks hold the policy once, together."""
    replicas, tensor = cfg.policy.dtensor_cfg.dp_replicate_size, cfg.policy.generation.vllm_cfg.tensor_parallel_size
    key = f"policy.dtensor_cfg.dp_replicate_size={replicas}"
    size, rest = divmod(num_trainers, replicas)
    if rest:
        yield f"{key} does not divide the {num_trainers} ranks that train: use the number of their nodes, or 1"
    elif cfg.policy.generation.colocated.enabled and size % tensor and tensor % size:
        engines = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor}"
        yield f"{key} makes replicas of {size} ranks, across which engines of {engines} would lie: change one of them"
    if replicas > 1 and cfg.policy.optimizer.name == "torch.optim.Muon":
        products = "which multiplies matrices over all ranks, across the replicas"
        yield f"{key} with policy.optimizer.name=torch.optim.Muon, {products}: use torch.optim.AdamW, or 1"


def _size_problems(cfg: Config, num_ranks: int) -> Iterator[str]:
    """Numbers that must fit each other. num_ranks: those that generate."""
    generation = cfg.policy.generation
    tensor, prompts = generation.vllm_cfg.tensor_parallel_size, cfg.grpo.num_prompts_per_step
    groups, rest = divmod(num_ranks, tensor)
    tensor_key = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor}"
    ranks = f"world size {num_ranks}" if generation.colocated.enabled else f"{num_ranks} ranks that generate"
    if rest:
        yield f"{tensor_key} does not divide the {ranks}: start a multiple of {tensor} ranks"
    elif prompts % groups:
        fits = " or ".join(str(n) for n in (prompts - prompts % groups, prompts + -prompts % groups) if n)
        yield (
            f"grpo.num_prompts_per_step={prompts} is not divisible by the {groups} data-parallel groups "
            f"({ranks}, {tensor_key}): use {fits}"
        )
    rollout, epochs = prompts * cfg.grpo.num_generations_per_prompt, cfg.policy.ppo_epochs
    batch_key = f"policy.train_global_batch_size={json.dumps(cfg.policy.train_global_batch_size)}"
    num_optimizer_steps, rest = divmod(rollout, cfg.policy.train_global_batch_size or rollout)
    if rollout * cfg.grpo.batch_multiplier > MAX_STEP_SAMPLES:
        yield f"grpo.num_prompts_per_step={prompts}: over {MAX_STEP_SAMPLES:,} samples, which a step holds in memory"
    if rest:
        yield (
            f"{batch_key} does not divide the {rollout} samples of a rollout "
            f"(grpo.num_prompts_per_step={prompts} x num_generations_per_prompt={cfg.grpo.num_generations_per_prompt})"
            f": set it to {rollout} or null"
        )
    if cfg.loss_fn.force_on_policy_ratio and epochs * num_optimizer_steps > 1:
        yield (
            f"loss_fn.force_on_policy_ratio=true is for one optimizer step per rollout, but policy.ppo_epochs={epochs} "
            f"and {batch_key} make {epochs * num_optimizer_steps}"
        )
    yield from _async_problems(cfg)
    total, new = cfg.policy.max_total_sequence_length, generation.max_new_tokens
    pack, total_key = cfg.policy.sequence_packing.train_mb_tokens, f"policy.max_total_sequence_length={total}"
    if pack is not None and pack < total:
        yield f"policy.sequence_packing.train_mb_tokens={pack} is less than {total_key}: use {total} or more"
    if new > total:
        yield f"policy.generation.max_new_tokens={new} is more than {total_key}: lower it to {total} or less"
    prompt, val_new = max_prompt_tokens(cfg), cfg.grpo.val_max_new_tokens or 0
    if new < total < prompt + val_new:
        yield (
            f"grpo.val_max_new_tokens={val_new} and prompts of {prompt} tokens do not fit in {total_key}: raise it to "
            f"{prompt + val_new}, or lower data.max_input_seq_length"
        )


def _async_problems(cfg: Config) -> Iterator[str]:
    """What older weights need, and what there is no way to do."""
    section, is_split = cfg.grpo.async_grpo, not cfg.policy.generation.colocated.enabled
    age = section.max_age
    if age and not cfg.loss_fn.use_importance_sampling_correction:
        yield (
            f"grpo.async_grpo.max_trajectory_age_steps={age} trains tokens of older weights, which need "
            "loss_fn.use_importance_sampling_correction=true; set it, or set the age to 0"
        )
    if section.enabled and is_split and section.in_flight_weight_updates and not age:
        yield (
            "grpo.async_grpo.in_flight_weight_updates=true with max_trajectory_age_steps=0: no response outlasts its "
            "step; set the age to 1 or more, or in_flight_weight_updates=false"
        )
    if section.enabled and not (is_split or section.recompute_kv_cache_after_weight_updates):
        yield (
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false with policy.generation.colocated.enabled="
            "true: the keys and values go when the engine sleeps; set it to true, or split the job"
        )


_TIS = "truncated_importance_sampling"
_LOSS_CLASHES = (  # two conditions on keys of loss_fn, with values as in json, that may not both hold, and why
    ("use_cispo=true", "ratio_clip_c!=null", "CISPO has no second clip"),
    ("use_cispo=true", "disable_ppo_ratio=true", "CISPO needs the ratio"),
    ("use_cispo=true", "force_on_policy_ratio=true", "CISPO needs the ratio"),
    ("use_cispo=true", "sequence_level_importance_ratios=true", "CISPO's ratio is a token's, GSPO's is a sequence's"),
    ("use_cispo=true", "token_level_loss=false", "CISPO averages over tokens"),
    ("sequence_level_importance_ratios=true", "token_level_loss=true", "GSPO averages over sequences"),
    ("loss_scale_factor!=null", "token_level_loss=true", "a mean over tokens divides by their number"),
    ("disable_ppo_ratio=true", "force_on_policy_ratio=true", "choose one"),
    (f"{_TIS}_type!=null", "use_importance_sampling_correction=false", "there are no weights to bound"),
    (f"{_TIS}_type!=null|sequence", f"{_TIS}_ratio=null", "this type needs its upper bound"),
    (f"{_TIS}_type=icepop|seq-mask-tis", f"{_TIS}_ratio_min=null", "this type needs its lower bound"),
    (f"{_TIS}_type=null|sequence", f"{_TIS}_ratio!=null", "only the other types have a bound"),
    (f"{_TIS}_type=null|sequence", f"{_TIS}_ratio_min!=null", "only the other types have a bound"),
    (f"{_TIS}_type!=null|tis|icepop", "sequence_level_importance_ratios=true", "GSPO weights whole sequences"),
)
_LORA = "policy.dtensor_cfg.lora_cfg"
_LORA_CLASHES = (  # what LoRA is not trained with, and why
    ("policy.optimizer.name=torch.optim.Muon", "it is for matrices, not their factors; use torch.optim.AdamW"),
    ("grpo.ref_policy_update_alpha!=1.0", "averages of factors make no average; use 1"),
)
_ESTIMATOR = "grpo.adv_estimator.name"
_UNREAD = (  # a key that nothing reads while the condition holds, and why: it must have its default then
    ("loss_fn.ratio_clip_c", "loss_fn.disable_ppo_ratio=true", "there is no ratio to clip"),
    ("loss_fn.ratio_clip_c", "loss_fn.force_on_policy_ratio=true", "the ratio is 1"),
    ("loss_fn.sequence_level_importance_ratios", "loss_fn.disable_ppo_ratio=true", "there is no ratio"),
    ("loss_fn.kl_gradient", "loss_fn.use_kl_in_reward=true", "a reward has no gradient"),
    ("loss_fn.use_on_policy_kl_approximation", "loss_fn.use_kl_in_reward=true", "it is about the KL in the loss"),
    ("loss_fn.use_kl_in_reward", f"{_ESTIMATOR}!=reinforce_plus_plus", "only reinforce_plus_plus has it"),
    ("grpo.adv_estimator.minus_baseline", f"{_ESTIMATOR}!=reinforce_plus_plus", "the other estimators have a baseline"),
    ("grpo.adv_estimator.reward_weights", f"{_ESTIMATOR}!=gdpo", "only gdpo has several rewards"),
    ("grpo.normalize_rewards", f"{_ESTIMATOR}=reinforce_plus_plus", "it whitens over the tokens of the batch"),
    ("grpo.use_leave_one_out_baseline", f"{_ESTIMATOR}=reinforce_plus_plus", "it may subtract the group's mean"),
    ("grpo.reward_std", f"{_ESTIMATOR}=reinforce_plus_plus", "it whitens over the tokens of the batch"),
    ("grpo.reward_std", "grpo.normalize_rewards=false", "nothing is divided by it"),
    ("grpo.reward_shaping.enabled", f"{_ESTIMATOR}=gdpo", "it reads each reward, not their shaped sum"),
    ("grpo.async_grpo.max_trajectory_age_steps", "grpo.async_grpo.enabled=false", "each step samples anew"),
    ("grpo.async_grpo.in_flight_weight_updates", "grpo.async_grpo.enabled=false", "each step samples anew"),
    ("grpo.batch_multiplier", "grpo.use_dynamic_sampling=false", "only dynamic sampling draws spare prompts"),
    ("grpo.ref_policy_update_period", "loss_fn.reference_policy_kl_penalty=0.0", "there is no reference policy"),
    ("grpo.ref_policy_update_alpha", "grpo.ref_policy_update_period=null", "the reference policy is never updated"),
    ("policy.generation.colocated.resources.gpus_per_node", "policy.generation.colocated.enabled=true", "all generate"),
    ("policy.generation.colocated.resources.num_nodes", "policy.generation.colocated.enabled=true", "all generate"),
    ("policy.scheduler.min_factor", "policy.scheduler.name=constant", "a constant rate does not fall"),
    (f"{_LORA}.target_modules", f"{_LORA}.match_all_linear=true", "all are adapted"),
    (f"{_LORA}.exclude_modules", f"{_LORA}.match_all_linear=true", "all are adapted"),
    (f"{_LORA}.exclude_modules", f"{_LORA}.target_modules!=[]", "those alone are adapted"),
    (f"{_LORA}.adapter_path", f"{_LORA}.enabled=false", "no adapter is trained"),
    ("policy.optimizer.muon_lr", "policy.optimizer.name!=torch.optim.Muon", "only Muon reads it"),
    ("policy.optimizer.muon_momentum", "policy.optimizer.name!=torch.optim.Muon", "only Muon reads it"),
    ("policy.offload_optimizer_for_logprob", "policy.dtensor_cfg.cpu_offload=true", "that offloads the moments, too"),
    ("data.custom_dataloader", "data.use_multiple_dataloader=false", "it takes turns of several sets"),
    ("checkpointing.resume_from", "checkpointing.resume=never", "a new run is started"),
)


def loss_problems(loss: LossConfig) -> Iterator[str]:
    """Keys of the loss that contradict each other."""
    for one, other, reason in _LOSS_CLASHES:
        keys = [_key_if(loss, condition) for condition in (one, other)]
        if all(keys):
            yield f"{' and '.join(f'loss_fn.{key}={_text(loss, key)}' for key in keys)}: {reason}"
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    if None not in (low, high) and low > high:
        yield f"loss_fn.{_TIS}_ratio_min={low} is above loss_fn.{_TIS}_ratio={high}: exchange them"


def _unread_problems(cfg: Config) -> Iterator[str]:
    """Keys that are set and that nothing would read."""
    for key, condition, reason in _UNREAD:
        other, default = _key_if(cfg, condition), default_text(key).strip('"')
        if other and _text(cfg, key) != default:
            setting = f"{key}={_text(cfg, key)}"
            yield f"{setting} has no effect with {other}={_text(cfg, other)}: {reason}; set {key}={default}"


def _key_if(section: Any, condition: str) -> str | None:
    """The key of `key=value|value` or `key!=value|value`, if that holds in the section."""
    key, sign, values = re.fullmatch(r"(.+?)(!?=)(.+)", condition).groups()
    return key if (_text(section, key) in values.split("|")) == (sign == "=") else None


def _text(section: Any, key: str) -> str:
    """The value of a key as one writes it: json, and text without quotes."""
    value = operator.attrgetter(key)(section)
    return value if isinstance(value, str) else json.dumps(value)


def _lora_problems(cfg: Config) -> Iterator[str]:
    """Whether the model has the layers that lora_cfg names, hf/lora_layers.py says."""
    for other, reason in _LORA_CLASHES if cfg.policy.dtensor_cfg.lora_cfg.enabled else ():
        if key := _key_if(cfg, other):
            yield f"{_LORA}.enabled=true with {key}={_text(cfg, key)}: {reason}"


def _checkpoint_problems(cfg: Config) -> Iterator[str]:
    """Saving and resuming."""
    saving = cfg.checkpointing
    by, name = saving.checkpoint_must_save_by, saving.metric_name
    if by is not None and (not re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,2}){3}", by) or not must_save_by_seconds(saving)):
        yield f"checkpointing.checkpoint_must_save_by={by:.80}: must be DD:HH:MM:SS, such as 00:03:45:00"
    if not name.startswith(("train/", "validation/")):
        yield f"checkpointing.metric_name={name}: must be a key of metrics.jsonl, such as train/reward"
    elif saving.enabled and saving.keep_top_k and name.startswith("validation/") and not cfg.grpo.val_period:
        yield f"checkpointing.keep_top_k={saving.keep_top_k} compares {name}, but grpo.val_period=0 means no validation"


def must_save_by_seconds(cfg: CheckpointingConfig) -> float | None:
    """checkpoint_must_save_by of a validated config in seconds; None for null."""
    if cfg.checkpoint_must_save_by is None:
        return None
    days, hours, minutes, seconds = map(int, cfg.checkpoint_must_save_by.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _reward_problems(cfg: Config) -> Iterator[str]:
    """Scaling, shaping, the bounds of advantages, dynamic sampling."""
    grpo = cfg.grpo
    scaling, shaping = grpo.reward_scaling, grpo.reward_shaping
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if None not in (low, high) and low >= high:
        yield f"grpo.advantage_clip_low={low} is not below grpo.advantage_clip_high={high}: exchange them"
    for side in ("source", "target") if scaling.enabled else ():
        low, high = getattr(scaling, f"{side}_min"), getattr(scaling, f"{side}_max")
        if low >= high:
            yield f"grpo.reward_scaling.{side}_min={low} is not below {side}_max={high}: exchange them"
    new, buffer = cfg.policy.generation.max_new_tokens, shaping.overlong_buffer_length
    longest = new if shaping.max_response_length is None else shaping.max_response_length
    length_key = f"grpo.reward_shaping.max_response_length={json.dumps(shaping.max_response_length)}"
    if shaping.enabled and shaping.stop_properly_penalty_coef is None:
        if longest > new:
            yield f"{length_key} is above policy.generation.max_new_tokens={new}: no response gets there; use {new}"
        if buffer > longest:
            yield (
                f"grpo.reward_shaping.overlong_buffer_length={buffer} is longer than a response of {longest} tokens "
                f"({length_key}, policy.generation.max_new_tokens={new}): every response would be penalized"
            )
    if cfg.loss_fn.use_kl_in_reward and (cfg.policy.generation.top_p < 1 or cfg.policy.generation.top_k):
        compared = "would compare the filtered policy with the whole reference: set loss_fn.use_kl_in_reward=false"
        yield f"policy.generation.top_p and top_k: the KL in the reward {compared}"
    draw = grpo.num_prompts_per_step * grpo.batch_multiplier
    if draw != grpo.prompts_per_batch:
        keys = f"grpo.batch_multiplier={grpo.batch_multiplier} x grpo.num_prompts_per_step={grpo.num_prompts_per_step}"
        yield f"{keys}: {draw} is not a whole number"


def _data_problems(cfg: Config) -> Iterator[str]:
    """The datasets, their names, and how several training sets become one."""
    data, draw = cfg.data, cfg.grpo.prompts_per_batch
    weights, size = [dataset.weight for dataset in data.train], data.num_prompts_per_dataloader
    split_off = tuple(dataset for dataset in data.train if dataset.split_validation_size)
    validates = cfg.grpo.val_period or cfg.grpo.val_at_start or cfg.grpo.val_at_end
    unset = (DatasetConfig(),)
    hints = {
        "train": "name the jsonl file of training problems",
        "validation": "name a jsonl file, or ask for no validation with grpo.val_period=0 grpo.val_at_start=false "
        "grpo.val_at_end=false",
    }
    validation = data.validation or (unset if validates and not split_off else ())
    for key, sets in (("train", data.train or unset), ("validation", validation)):
        for i, dataset in enumerate(sets):
            if dataset.data_path is None and dataset.dataset_name is None:
                yield f"data.{key}{f'.{i}' if len(sets) > 1 else ''}.data_path is not set: {hints[key]}"
    for key, sets in (("train", data.train), ("validation", split_off + data.validation)):
        for name, count in Counter(dataset.set_name for dataset in sets).items():
            if name and count > 1:
                yield f"data.{key}: {count} sets are called '{name}': tell them apart by their key `name`"
    if any(dataset.split_validation_size != data.default.split_validation_size for dataset in data.validation):
        yield "data.validation.split_validation_size: validation sets are not split; set it in data.train"
    env_names = {*data.task_to_env.values(), *(dataset.env_name for dataset in data.train + data.validation)}
    env_names = {name for name in env_names if name and ":" in name}
    for name in [name for name in cfg.env.custom if name not in env_names]:
        in_use = ", ".join(sorted(env_names)) or "none"
        yield f"env.custom.{name:.80}: no data set has such a module:Class as its env_name; in use: {in_use}"
    if None in weights and any(weights):
        yield "data.train: some sets have a weight and some have none: give all of them one, or none"
    if any(weights) and data.use_multiple_dataloader:
        yield "data.train.weight and data.use_multiple_dataloader=true: choose one way to mix"
    if data.use_multiple_dataloader and data.custom_dataloader is None:
        if size is None:
            yield "data.use_multiple_dataloader=true: set data.num_prompts_per_dataloader, the prompts of a turn"
        elif draw % size:
            yield f"data.num_prompts_per_dataloader={size} does not divide the {draw} prompts drawn at once for a step"


def max_prompt_tokens(cfg: Config) -> int:
    """The longest prompt kept: it leaves room for max_new_tokens, or for one token if those are the total."""
    total, new = cfg.policy.max_total_sequence_length, cfg.policy.generation.max_new_tokens
    left = total - (new if new < total else 1)
    return min(left, cfg.data.max_input_seq_length or left)


def check_writable(key: str, folder: str) -> None:
    """Raise ConfigError if `folder`, the value of config key `key`, could not be made or written. Leaves nothing."""
    path = Path(folder).absolute()
    setting = f"{key}={folder}"
    sizes = [len(os.fsencode(part)) for part in (path, *path.parts)]
    if sizes[0] > MAX_PATH_BYTES or max(sizes[1:]) > 255:
        limits = f"255 bytes, or all of it is longer than {MAX_PATH_BYTES:,} bytes"
        raise ConfigError(f"{key}={shortened(folder)}: a name in it is longer than {limits}")
    while not os.path.lexists(path):  # unlike Path.exists, also false below a folder that must not be searched
        path = path.parent
    try:
        real = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        reason = f"{path} is a link that cannot be followed ({error.strerror}); is a disk not mounted?"
        raise ConfigError(f"{setting}: {reason}") from None
    if not real.is_dir():
        raise ConfigError(f"{setting}: {path} is a file, not a folder")
    try:
        tempfile.TemporaryFile(dir=real).close()  # os.access says that /proc may be written
    except OSError as error:
        raise ConfigError(f"{setting}: cannot write in {path} ({error.strerror})") from None
