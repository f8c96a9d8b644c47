"""What is refused of a Config that was read well: sizes that do not fit, names that repeat, keys that contradict.

Each refusal names the keys with their values and the reason. Nothing that a user sets is silently ignored. What needs
no arithmetic is a row of the table in contradictions.yaml.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from base.check.contradictions import contradictions
from base.inputs import reader
from base.system.users_code import ROOT
from config import ENVIRONMENTS, CheckpointingConfig, Config, ConfigError, DataConfig, DatasetConfig, EnvConfig

RESOURCES = "policy.generation.colocated.resources"
NO_VALIDATION = "ask for no validation with grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false"


def load_checked(
    path: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    ranks_of_node: int | None = None,
    *,
    explain: bool = False,
    reads_data: bool = True,
) -> Config:
    """The config of a file, as `reader.load` reads it, for `world_size` ranks, so many to a node; None: for the fewest
    that there may be. Unless reads_data, it is without data and environments. ConfigError, a line for each mistake,
    whether it is about one key or several."""
    reading = reader.read(path, overrides, explain=explain)
    cfg = reading.cfg
    if not reads_data:
        cfg = replace(cfg, data=DataConfig(), env=EnvConfig())
    num_ranks = fewest_ranks(cfg) if world_size is None else world_size
    reading.raise_problems(list(config_problems(cfg, num_ranks, ranks_of_node, reads_data)))
    return cfg


def check_config(cfg: Config, world_size: int, ranks_of_node: int | None = None) -> None:
    """Raise ConfigError, a line for each problem, if `world_size` ranks, so many to a node, cannot run `cfg`."""
    problems = list(config_problems(cfg, world_size, ranks_of_node))
    if problems:
        raise ConfigError(*problems)


def config_problems(cfg: Config, world_size: int, ranks_of_node: int | None, reads_data: bool = True) -> Iterator[str]:
    """What is wrong with keys beside each other."""
    assert world_size >= 1, world_size
    yield from _split_problems(cfg, world_size, ranks_of_node)
    yield from _rank_problems(cfg, world_size, ranks_of_node)
    yield from _batch_problems(cfg)
    yield from _length_problems(cfg)
    yield from contradictions(cfg)
    yield from _checkpoint_problems(cfg)
    yield from _reward_problems(cfg)
    if reads_data:
        yield from _dataset_problems(cfg)
    yield from _mix_problems(cfg)
    yield from _custom_problems(cfg)
    yield from _agent_problems(cfg)
    yield from _missing_parts(cfg)


def _missing_parts(cfg: Config) -> Iterator[str]:
    """Parts of the program that this config needs, and that a fork has deleted."""
    uses_split = cfg.policy.generation.num_generators > 0
    uses_lora = cfg.policy.dtensor_cfg.lora_cfg.enabled
    sets = [*cfg.data.train, *cfg.data.validation]
    uses_reward_model = any(section.env_name == "reward_model" for section in sets)
    for path, is_used, what in (
        ("base/agents", bool(cfg.env.agents), "env.agents"),
        ("run/split", uses_split, "policy.generation.colocated.enabled=false"),
        ("lora.py", uses_lora, "policy.dtensor_cfg.lora_cfg.enabled=true"),
        ("reference.py", cfg.holds_reference, "loss_fn.reference_policy_kl_penalty"),
        ("router_replay.py", cfg.policy.router_replay.enabled, "policy.router_replay.enabled=true"),
        ("run/dump.py", cfg.logger.dump_rollouts > 0, "logger.dump_rollouts"),
        ("run/reward_model.py", uses_reward_model, "env_name 'reward_model'"),
    ):
        if is_used and not (ROOT / path).exists():
            yield f"{what} needs {path}, which is not here: restore it, or do without"


def fewest_ranks(cfg: Config) -> int:
    """The ranks that are enough to generate, and to train where others do that."""
    generation = cfg.policy.generation
    replicas = cfg.policy.dtensor_cfg.dp_replicate_size
    if generation.num_generators:
        return generation.num_generators + replicas
    return math.lcm(generation.vllm_cfg.tensor_parallel_size, replicas)


def _split_problems(cfg: Config, world_size: int, ranks_of_node: int | None) -> Iterator[str]:
    """Which ranks generate and which train, by the rules of NeMo RL (nemo_rl/algorithms/grpo.py, `setup`)."""
    generation = cfg.policy.generation
    if generation.colocated.enabled:
        return
    size = generation.colocated.resources.gpus_per_node
    nodes = generation.colocated.resources.num_nodes
    num_nodes = world_size // (ranks_of_node or world_size)
    if size is None:
        fix = "set gpus_per_node to the number of generating ranks per node"
    elif num_nodes > 1 and nodes is None:
        fix = "set num_nodes to the number of nodes that generate"
    elif num_nodes > 1 and size != ranks_of_node:
        fix = f"nodes either train or generate: set gpus_per_node={ranks_of_node}"
    elif generation.num_generators >= world_size:
        fix = "no rank is left to train; start more ranks, or lower these keys"
    elif num_nodes == 1 and ranks_of_node and (nodes or 1) > 1:
        fix = "set num_nodes to 1, or start torchrun on more nodes"
    else:
        return
    given = f"{RESOURCES}.gpus_per_node={json.dumps(size)} and {RESOURCES}.num_nodes={json.dumps(nodes)}"
    where = f"{world_size} ranks on {num_nodes} nodes"
    yield f"policy.generation.colocated.enabled=false with {given}, {where}: {fix}"


def _rank_problems(cfg: Config, world_size: int, ranks_of_node: int | None) -> Iterator[str]:
    """Replicas, engines and the prompts of a step divide the ranks, and engines the ranks of a node."""
    generation = cfg.policy.generation
    replicas = cfg.policy.dtensor_cfg.dp_replicate_size
    replicas_key = f"policy.dtensor_cfg.dp_replicate_size={replicas}"
    tensor = generation.vllm_cfg.tensor_parallel_size
    tensor_key = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor}"
    num_trainers = max(0, world_size - generation.num_generators)
    size = num_trainers // replicas
    if num_trainers % replicas:
        yield f"{replicas_key} does not divide the {num_trainers} ranks that train: use the number of their nodes, or 1"
    elif generation.colocated.enabled and size % tensor and tensor % size:
        yield f"{replicas_key} makes replicas of {size} ranks, and engines of {tensor_key} would span them: change one"

    num_ranks = generation.num_generators or world_size
    ranks = f"world size {num_ranks}" if generation.colocated.enabled else f"{num_ranks} ranks that generate"
    num_engines = num_ranks // tensor
    prompts = cfg.grpo.num_prompts_per_step
    if ranks_of_node is None:  # without torchrun: those of the cluster that the recipe names
        ranks_of_node = cfg.cluster.gpus_per_node if cfg.cluster.num_nodes > 1 else world_size
    if num_ranks % tensor:
        yield f"{tensor_key} does not divide the {ranks}: start a multiple of {tensor} ranks"
    elif ranks_of_node % tensor and ranks_of_node != world_size:
        most = math.gcd(ranks_of_node, tensor)
        yield f"{tensor_key} does not divide the {ranks_of_node} ranks of a node, and no engine spans nodes: use {most}"
    elif prompts % num_engines:
        fewer = prompts - prompts % num_engines
        fits = f"{fewer} or {fewer + num_engines}" if fewer else str(num_engines)
        engines = f"the {num_engines} engines ({ranks}, {tensor_key})"
        yield f"grpo.num_prompts_per_step={prompts} is not divisible by {engines}: use {fits}"


def _batch_problems(cfg: Config) -> Iterator[str]:
    """How a rollout is cut into optimizer steps, and how many prompts are drawn at once."""
    grpo = cfg.grpo
    prompts = grpo.num_prompts_per_step
    rollout = grpo.samples_per_step
    batch = cfg.samples_per_minibatch
    batch_key = f"policy.train_global_batch_size={json.dumps(cfg.policy.train_global_batch_size)}"
    if rollout % batch:
        samples = f"{rollout} samples of grpo.num_prompts_per_step={prompts} x {grpo.num_generations_per_prompt}"
        yield f"{batch_key} does not divide the {samples}: set it to {rollout} or null"
    num_optimizer_steps = cfg.policy.ppo_epochs * (rollout // batch)
    if cfg.loss_fn.force_on_policy_ratio and num_optimizer_steps > 1:
        steps = f"policy.ppo_epochs={cfg.policy.ppo_epochs} and {batch_key} make {num_optimizer_steps}"
        yield f"loss_fn.force_on_policy_ratio=true is for one optimizer step per rollout, but {steps}: set it to false"
    draw = round(prompts * grpo.batch_multiplier, 9)
    if draw != grpo.prompts_per_batch:
        keys = f"grpo.batch_multiplier={grpo.batch_multiplier} x grpo.num_prompts_per_step={prompts}"
        yield f"{keys}: {draw} is not a whole number"
    size = cfg.data.num_prompts_per_dataloader
    takes_turns = cfg.data.use_multiple_dataloader and cfg.data.custom_dataloader is None
    if takes_turns and size and grpo.prompts_per_batch % size:
        prompts = f"the {grpo.prompts_per_batch} prompts drawn at once for a step"
        yield f"data.num_prompts_per_dataloader={size} does not divide {prompts}"


def _length_problems(cfg: Config) -> Iterator[str]:
    """A validation response has room behind the longest prompt."""
    total = cfg.policy.max_total_sequence_length
    prompt = cfg.max_prompt_tokens
    val_new = cfg.grpo.val_max_new_tokens or 0
    if cfg.policy.generation.max_new_tokens < total < prompt + val_new:
        needed = f"grpo.val_max_new_tokens={val_new} and prompts of {prompt} tokens do not fit in"
        fix = f"raise it to {prompt + val_new}, or lower data.max_input_seq_length"
        yield f"{needed} policy.max_total_sequence_length={total}: {fix}"


def _checkpoint_problems(cfg: Config) -> Iterator[str]:
    """Saving and resuming."""
    saving = cfg.checkpointing
    deadline = saving.checkpoint_must_save_by
    if deadline is not None:
        is_time = re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,2}){3}", deadline)
        if not is_time or not must_save_by_seconds(saving):
            yield f"checkpointing.checkpoint_must_save_by={deadline:.80}: must be DD:HH:MM:SS, such as 00:03:45:00"
    if saving.resume_step and not re.fullmatch("best|[0-9]{1,9}", saving.resume_step):
        yield f"checkpointing.resume_step={saving.resume_step:.80}: must be the number of a step, or best"
    name = saving.metric_name
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
    """Rewards that nothing weighs, and the overlong penalty."""
    weights = cfg.grpo.adv_estimator.reward_weights
    if cfg.grpo.adv_estimator.name == "gdpo" and weights and not any(weights):
        weights_key = f"grpo.adv_estimator.reward_weights={json.dumps(weights)}"
        yield f"{weights_key} and grpo.adv_estimator.name=gdpo: no reward is trained; give one of them another weight"
    shaping = cfg.grpo.reward_shaping
    if not shaping.enabled or shaping.stop_properly_penalty_coef is not None:
        return
    new = cfg.policy.generation.max_new_tokens
    turns = cfg.grpo.max_rollout_turns
    most = turns * new
    most_key = f"policy.generation.max_new_tokens={new} x grpo.max_rollout_turns={turns}"
    longest = shaping.max_response_length
    longest_key = f"grpo.reward_shaping.max_response_length={json.dumps(longest)}"
    if longest is not None and longest > most:
        yield f"{longest_key} is more than {most_key}: no response is that long; lower the first to {most}"
    elif shaping.overlong_buffer_length > (longest or most):
        buffer_key = f"grpo.reward_shaping.overlong_buffer_length={shaping.overlong_buffer_length}"
        response = f"a response of {longest or most} tokens ({longest_key}, {most_key})"
        yield f"{buffer_key} is longer than {response}: every response would be penalized; lower the first"


def _dataset_problems(cfg: Config) -> Iterator[str]:
    """Each dataset names its rows, and has a name of its own."""
    train = cfg.data.train
    validation = cfg.data.validation
    split_off = tuple(dataset for dataset in train if dataset.split_validation_size)
    validates = cfg.grpo.val_period or cfg.grpo.val_at_start or cfg.grpo.val_at_end
    unset = (DatasetConfig(),)
    yield from _source_problems("data.train", train or unset, "name the jsonl file of training problems")
    needs_validation = validates and not split_off and not validation
    yield from _source_problems(
        "data.validation", unset if needs_validation else validation, f"name a file, or {NO_VALIDATION}"
    )
    yield from _repeated("data.train", train)
    yield from _repeated("data.validation", split_off + validation)
    if any(dataset.split_validation_size != cfg.data.default.split_validation_size for dataset in validation):
        yield "data.validation.split_validation_size: validation sets are not split; set it in data.train"
    yield from _selection_problems(cfg)


def _selection_problems(cfg: Config) -> Iterator[str]:
    """How the rows of a set are chosen."""
    default = cfg.data.default.prompt_selection
    if any(dataset.prompt_selection != default for dataset in cfg.data.validation):
        yield "data.validation.prompt_selection: validation takes all rows; set it in data.train"
    rules = {dataset.prompt_selection for dataset in cfg.data.train}
    for rule in sorted(rules - {"uniform", "p(1-p)", "thompson"}):
        if ":" not in rule:
            yield f"data.train.prompt_selection={rule:.80}: must be uniform, p(1-p), thompson or module:function"
    if rules - {"uniform"} and not cfg.data.shuffle:
        yield "data.shuffle=false has no effect on the rows of data.train.prompt_selection: set it to true"


def _source_problems(key: str, sets: Sequence[DatasetConfig], hint: str) -> Iterator[str]:
    for number, dataset in enumerate(sets):
        place = f"{key}.{number}" if len(sets) > 1 else key
        function = dataset.dataset_name or ""
        if dataset.data_path is None and dataset.dataset_name is None:
            yield f"{place}.data_path is not set: {hint}"
        if dataset.data_path is not None and ":" in function:
            yield (
                f"{place}.data_path={dataset.data_path:.80} is not read beside dataset_name={function:.80}, "
                f"a function of yours: set {place}.dataset_name=null to read the file, or {place}.data_path=null"
            )


def _repeated(key: str, sets: Sequence[DatasetConfig]) -> Iterator[str]:
    for name, count in Counter(dataset.set_name for dataset in sets).items():
        if name and count > 1:
            yield f"{key}: {count} sets are called '{name}': give each its own `name`"


def _mix_problems(cfg: Config) -> Iterator[str]:
    """How several training sets become one."""
    weights = [dataset.weight for dataset in cfg.data.train]
    if None in weights and any(weights):
        yield "data.train: some sets have a weight and some have none: give all of them one, or none"
    if any(weights) and cfg.data.use_multiple_dataloader:
        yield "data.train.weight and data.use_multiple_dataloader=true: choose one way to mix"


def _custom_problems(cfg: Config) -> Iterator[str]:
    """The arguments of env.custom belong to an environment or agent that is in use."""
    named = {*cfg.data.task_to_env.values()}
    for dataset in cfg.data.train + cfg.data.validation:
        named.add(dataset.env_name)
    in_use = {name for name in named if name and ":" in name}
    for agent in cfg.env.agents:
        if agent.name:
            in_use.add(agent.name)
    for name in cfg.env.custom:
        if name not in in_use:
            known = ", ".join(sorted(in_use)) or "none"
            yield f"env.custom.{name:.80}: no agent has this name, and no dataset uses it as env_name; in use: {known}"


def _agent_problems(cfg: Config) -> Iterator[str]:
    """The agents, and what does not go with them."""
    agents = cfg.env.agents
    names = Counter(agent.name for agent in agents)
    for number, agent in enumerate(agents):
        place = f"env.agents.{number}" if len(agents) > 1 else "env.agents"
        if not agent.name or ":" in agent.name or agent.name in ENVIRONMENTS or names[agent.name] > 1:
            yield f"{place}.name={agent.name}: must be set, unique among env_names, and without a colon"
        if bool(agent.function) == bool(agent.command):
            yield f"{place}: set function or command, and not both"
        elif agent.command and agent.name in cfg.env.custom:
            yield f"env.custom.{agent.name}: a command's arguments belong in {place}.command"
        elif agent.address in ("0.0.0.0", "::"):
            yield f"{place}.address={agent.address}: an agent's URL needs one address of this machine"
        elif agent.isolation == "required" and not agent.command:
            yield f"{place}.isolation=required: only a command can be isolated; set it to none"
    if agents and cfg.policy.tokenizer.chat_template is None:
        yield "policy.tokenizer.chat_template=null: an agent's messages need a chat template; set it to default"
