"""What is refused of a Config that was read well: values out of bounds, sizes that do not fit, keys that contradict.

Each refusal names the keys with their values and the reason. Nothing that a user sets is silently ignored. The table of
settings that contradict each other is rules.yaml.
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

import yaml

from config import ENVIRONMENTS, CheckpointingConfig, Config, ConfigError, DatasetConfig
from support.inputs.keys import bounds, default_text, meanings, plain_name, settings, text_of

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_TABLE: list[str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def check_config(cfg: Config, world_size: int, ranks_of_node: int | None = None) -> None:
    """Raise ConfigError, a line for each problem, if `world_size` ranks, so many to a node, cannot run `cfg`."""
    assert world_size >= 1, world_size
    problems = list(_bound_problems(cfg)) or [
        *_split_problems(cfg, world_size, ranks_of_node),
        *_size_problems(cfg, world_size),
        *table_problems(cfg),
        *_checkpoint_problems(cfg),
        *_reward_problems(cfg),
        *_data_problems(cfg),
        *_agent_problems(cfg),
    ]
    if problems:
        raise ConfigError(*problems)


def table_problems(cfg: Config) -> Iterator[str]:
    """What rules.yaml refuses."""
    for row in _TABLE:
        text, reason = row.split(" -- ")
        first, *others = text.split(" & ")
        found = [_holds(cfg, condition) for condition in others]
        for condition in first.split(", ") if all(found) else ():
            if "=" in condition or ">" in condition:
                if setting := _holds(cfg, condition):
                    yield f"{' and '.join([setting, *found])}: {reason}"
                continue
            default = default_text(condition).strip('"')
            if setting := _holds(cfg, f"{condition}!={default}"):
                yield f"{setting} has no effect with {' and '.join(found)}: {reason}; set {condition}={default}"


def _holds(cfg: Config, condition: str) -> str:
    """The settings that a condition is about, as key=value, if it holds; else ""."""
    key, sign, other = re.fullmatch(r"([\w.]+)(=|!=|>=|>)(.*)", condition).groups()
    value = operator.attrgetter(key)(cfg)
    setting = f"{key}={text_of(value)}"
    if sign in _OPERATORS:
        bound = operator.attrgetter(other)(cfg)
        is_true = None not in (value, bound) and _OPERATORS[sign](value, bound)
        return f"{setting} and {other}={text_of(bound)}" * is_true
    return setting * ((text_of(value) in other.split("|")) == (sign == "="))


def _bound_problems(cfg: Config) -> Iterator[str]:
    """Each key by itself, against the bounds it declares."""
    for name, value in settings(cfg):
        key = plain_name(name)
        if value == "" or (isinstance(value, tuple) and "" in value):
            yield f"{name}={json.dumps(value):.80}: empty strings are not allowed ({meanings()[key]})"
        numbers = [each for each in (value if isinstance(value, tuple) else [value]) if isinstance(each, int | float)]
        limits = [limit.split() for limit in bounds(key).split(",") if limit]
        if not all(_OPERATORS[sign](number, float(limit)) for number in numbers for sign, limit in limits):
            yield f"{name}={json.dumps(value):.80}: must be {bounds(key)} ({meanings()[key]})"


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
    size, nodes, num_nodes = resources.gpus_per_node, resources.num_nodes, world_size // (ranks_of_node or world_size)
    fixes = {
        "set gpus_per_node to the number of generating ranks per node": size is None,
        "set num_nodes to the number of nodes that generate": num_nodes > 1 and nodes is None,
        f"nodes either train or generate: set gpus_per_node={ranks_of_node}": num_nodes > 1 and size != ranks_of_node,
        "no rank is left to train; start more ranks, or lower these keys": generation.num_generators >= world_size,
        "set num_nodes to 1, or start torchrun on more nodes": num_nodes == 1 and ranks_of_node and (nodes or 1) > 1,
    }
    if fix := next((fix for fix, is_needed in fixes.items() if is_needed), None):
        key = "policy.generation.colocated.resources"
        given = f"{key}.gpus_per_node={json.dumps(size)} and {key}.num_nodes={json.dumps(nodes)}"
        where = f"{world_size} ranks on {num_nodes} nodes"
        yield f"policy.generation.colocated.enabled=false with {given}, {where}: {fix}"


def _size_problems(cfg: Config, world_size: int) -> Iterator[str]:
    """Numbers that must fit each other, and the number of ranks."""
    generation, replicas = cfg.policy.generation, cfg.policy.dtensor_cfg.dp_replicate_size
    tensor, prompts = generation.vllm_cfg.tensor_parallel_size, cfg.grpo.num_prompts_per_step
    prompts_key = f"grpo.num_prompts_per_step={prompts}"
    replicas_key = f"policy.dtensor_cfg.dp_replicate_size={replicas}"
    tensor_key = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor}"
    num_trainers = max(0, world_size - generation.num_generators)
    size, rest = divmod(num_trainers, replicas)
    if rest:
        yield f"{replicas_key} does not divide the {num_trainers} ranks that train: use the number of their nodes, or 1"
    elif generation.colocated.enabled and size % tensor and tensor % size:
        yield f"{replicas_key} makes replicas of {size} ranks, and engines of {tensor_key} would span them: change one"
    num_ranks = generation.num_generators or world_size
    ranks = f"world size {num_ranks}" if generation.colocated.enabled else f"{num_ranks} ranks that generate"
    groups, rest = divmod(num_ranks, tensor)
    if rest:
        yield f"{tensor_key} does not divide the {ranks}: start a multiple of {tensor} ranks"
    elif prompts % groups:
        fits = " or ".join(str(n) for n in (prompts - prompts % groups, prompts + -prompts % groups) if n)
        yield f"{prompts_key} is not divisible by the {groups} engines ({ranks}, {tensor_key}): use {fits}"
    rollout, epochs = prompts * cfg.grpo.num_generations_per_prompt, cfg.policy.ppo_epochs
    batch_key = f"policy.train_global_batch_size={json.dumps(cfg.policy.train_global_batch_size)}"
    num_optimizer_steps, rest = divmod(rollout, cfg.policy.train_global_batch_size or rollout)
    if rest:
        samples = f"{rollout} samples of {prompts_key} x {cfg.grpo.num_generations_per_prompt}"
        yield f"{batch_key} does not divide the {samples}: set it to {rollout} or null"
    if cfg.loss_fn.force_on_policy_ratio and epochs * num_optimizer_steps > 1:
        steps = f"policy.ppo_epochs={epochs} and {batch_key} make {epochs * num_optimizer_steps}"
        yield f"loss_fn.force_on_policy_ratio=true is for one optimizer step per rollout, but {steps}: set it to false"
    total, new = cfg.policy.max_total_sequence_length, generation.max_new_tokens
    prompt, val_new = max_prompt_tokens(cfg), cfg.grpo.val_max_new_tokens or 0
    if new < total < prompt + val_new:
        needed = f"grpo.val_max_new_tokens={val_new} and prompts of {prompt} tokens do not fit in"
        fix = f"raise it to {prompt + val_new}, or lower data.max_input_seq_length"
        yield f"{needed} policy.max_total_sequence_length={total}: {fix}"


def _checkpoint_problems(cfg: Config) -> Iterator[str]:
    """Saving and resuming."""
    saving = cfg.checkpointing
    by, name = saving.checkpoint_must_save_by, saving.metric_name
    if by is not None and (not re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,2}){3}", by) or not must_save_by_seconds(saving)):
        yield f"checkpointing.checkpoint_must_save_by={by:.80}: must be DD:HH:MM:SS, such as 00:03:45:00"
    if saving.resume_step and not re.fullmatch("best|[0-9]{1,9}", saving.resume_step):
        yield f"checkpointing.resume_step={saving.resume_step:.80}: must be the number of a step, or best"
    if not name.startswith(("train/", "validation/")):
        yield f"checkpointing.metric_name={name}: must be a key of metrics.jsonl, such as train/reward"
    elif saving.enabled and saving.keep_top_k and name.startswith("validation/") and not cfg.grpo.val_period:
        yield f"checkpointing.keep_top_k={saving.keep_top_k} compares {name}: set grpo.val_period above 0"


def must_save_by_seconds(cfg: CheckpointingConfig) -> float | None:
    """checkpoint_must_save_by of a validated config in seconds; None for null."""
    if cfg.checkpoint_must_save_by is None:
        return None
    days, hours, minutes, seconds = map(int, cfg.checkpoint_must_save_by.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _reward_problems(cfg: Config) -> Iterator[str]:
    """Shaping and dynamic sampling."""
    grpo, new = cfg.grpo, cfg.policy.generation.max_new_tokens
    shaping, most = grpo.reward_shaping, grpo.max_rollout_turns * new
    buffer, longest = shaping.overlong_buffer_length, shaping.max_response_length
    has_penalty = shaping.enabled and shaping.stop_properly_penalty_coef is None
    longest_key = f"grpo.reward_shaping.max_response_length={json.dumps(longest)}"
    most_key = f"policy.generation.max_new_tokens={new} x grpo.max_rollout_turns={grpo.max_rollout_turns}"
    if has_penalty and (longest or 0) > most:
        yield f"{longest_key} is more than {most_key}: no response is that long; lower the first to {most}"
    elif has_penalty and buffer > (longest or most):
        response = f"a response of {longest or most} tokens ({longest_key}, {most_key})"
        problem = f"is longer than {response}: every response would be penalized; lower the first"
        yield f"grpo.reward_shaping.overlong_buffer_length={buffer} {problem}"
    draw = round(grpo.num_prompts_per_step * grpo.batch_multiplier, 9)
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
    no_validation = "ask for no validation with grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false"
    hints = {"train": "name the jsonl file of training problems", "validation": f"name a file, or {no_validation}"}
    validation = data.validation or (unset if validates and not split_off else ())
    for key, sets in (("train", data.train or unset), ("validation", validation)):
        for i, dataset in enumerate(sets):
            if dataset.data_path is None and dataset.dataset_name is None:
                yield f"data.{key}{f'.{i}' if len(sets) > 1 else ''}.data_path is not set: {hints[key]}"
    for key, sets in (("train", data.train), ("validation", split_off + data.validation)):
        for name, count in Counter(dataset.set_name for dataset in sets).items():
            if name and count > 1:
                yield f"data.{key}: {count} sets are called '{name}': give each its own `name`"
    if any(dataset.split_validation_size != data.default.split_validation_size for dataset in data.validation):
        yield "data.validation.split_validation_size: validation sets are not split; set it in data.train"
    env_names = {*data.task_to_env.values(), *(dataset.env_name for dataset in data.train + data.validation)}
    env_names = {name for name in env_names if name and ":" in name} | {agent.name for agent in cfg.env.agents}
    for name in [name for name in cfg.env.custom if name not in env_names]:
        in_use = ", ".join(sorted(filter(None, env_names))) or "none"
        yield f"env.custom.{name:.80}: no agent has this name, and no dataset uses it as env_name; in use: {in_use}"
    if None in weights and any(weights):
        yield "data.train: some sets have a weight and some have none: give all of them one, or none"
    if any(weights) and data.use_multiple_dataloader:
        yield "data.train.weight and data.use_multiple_dataloader=true: choose one way to mix"
    if data.use_multiple_dataloader and data.custom_dataloader is None and size and draw % size:
        yield f"data.num_prompts_per_dataloader={size} does not divide the {draw} prompts drawn at once for a step"


def _agent_problems(cfg: Config) -> Iterator[str]:
    """The agents, and what does not go with them."""
    names = Counter(agent.name for agent in cfg.env.agents)
    for i, agent in enumerate(cfg.env.agents):
        place = f"env.agents.{i}" if len(cfg.env.agents) > 1 else "env.agents"
        if not agent.name or ":" in agent.name or agent.name in ENVIRONMENTS or names[agent.name] > 1:
            yield f"{place}.name={agent.name}: must be set, unique among env_names, and without a colon"
        if bool(agent.function) == bool(agent.command):
            yield f"{place}: set function or command, and not both"
        elif agent.command and agent.name in cfg.env.custom:
            yield f"env.custom.{agent.name}: a command's arguments belong in {place}.command"
        elif agent.isolation == "required" and not agent.command:
            yield f"{place}.isolation=required: only a command can be isolated; set it to none"
    if cfg.env.agents and cfg.grpo.turn_level_advantages:
        yield "grpo.turn_level_advantages=true: an agent gives one reward for all its calls; set it to false"
    if cfg.env.agents and cfg.policy.tokenizer.chat_template is None:
        yield "policy.tokenizer.chat_template=null: an agent's messages need a chat template; set it to default"


def max_prompt_tokens(cfg: Config) -> int:
    """The longest prompt kept: it leaves room for max_new_tokens, or for one token if those are the total."""
    total, new = cfg.policy.max_total_sequence_length, cfg.policy.generation.max_new_tokens
    left = total - (new if new < total else 1)
    return min(left, cfg.data.max_input_seq_length or left)


def check_writable(key: str, folder: str) -> None:
    """Raise ConfigError if `folder`, the value of config key `key`, could not be made or written. Leaves nothing."""
    path = Path(folder).absolute()
    while not os.path.lexists(path):  # unlike Path.exists, also false below a folder that must not be searched
        path = path.parent
    try:
        tempfile.TemporaryFile(dir=path).close()  # os.access says that /proc may be written
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot write in {path} ({error.strerror})") from None
