"""The configuration of a run: frozen dataclasses <- yaml files <- `key.sub=value` overrides.

Owns every key: its type, default, bounds and meaning stand here once, and `help_text` prints them from here.
Keys that NeMo RL has too carry its names and, unless the meaning says otherwise, the defaults of its
`grpo_math_1B.yaml`. A mistake is a `ConfigError` that names the place, the full key, the value and the fix.
Reads yaml files and nothing else: whether data and model exist is for `data.py` to say. Imports neither torch
nor vllm, so that `grpo.py --check` takes no time. Tests: `pytest tests/test_config.py`.
"""

import difflib
import json
import math
import operator
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml


class ConfigError(Exception):
    """A mistake of the user's. The text is the whole message; the entry prints it and exits with 2."""


def key(default: Any, meaning: str, bounds: str = "") -> Any:
    """A config key. `bounds` is what `validate` asks of the value, as in "> 0" or ">= 0, < 1"."""
    return field(default=default, metadata={"help": meaning, "bounds": bounds})


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    num_prompts_per_step: int = key(32, "Prompts of one optimizer step, over all ranks.", ">= 1")
    num_generations_per_prompt: int = key(16, "Samples per prompt, compared to each other.", ">= 2")
    max_num_epochs: int = key(1, "Passes over the training data, unless max_num_steps ends the run.", ">= 1")
    max_num_steps: int = key(1_000_000, "Optimizer steps, unless max_num_epochs ends the run.", ">= 1")
    normalize_rewards: bool = key(True, "Divide advantages by the standard deviation of their group.")
    use_leave_one_out_baseline: bool = key(True, "Baseline: mean reward of the others in the group.")
    val_period: int = key(10, "Validate every so many steps; 0 = only at start and end, if asked.", ">= 0")
    val_at_start: bool = key(False, "Validate before the first step.")
    val_at_end: bool = key(False, "Validate after the last step.")
    max_val_samples: int = key(256, "Validation problems used, from the top of the file.", ">= 1")
    val_num_generations_per_prompt: int = key(1, "Samples per problem; greedy has one.", ">= 1")
    seed: int = key(42, "Decides data order and samples: same seed, same run.", ">= 0, < 4294967296")
    logp_gap_limit: float | None = key(
        0.1,
        "Stop when |sampler - trainer| log-probability, averaged over a step, exceeds this: they then hold "
        "different weights. bfloat16 gives 0.01, float32 1e-6, stale weights 0.2 or more. null = log only.",
        "> 0",
    )
    max_bad_steps: int = key(
        0,
        "Steps with a non-finite loss or gradient are skipped and counted; more than so many in a row stop "
        "the run. 0 = the first does: it is a fault to look at, not noise to step over.",
        ">= 0",
    )


@dataclass(frozen=True, slots=True)
class LossConfig:
    ratio_clip_min: float = key(0.2, "The probability ratio is clipped below at 1 - this.", ">= 0, <= 1")
    ratio_clip_max: float = key(0.2, "The probability ratio is clipped above at 1 + this.", ">= 0")
    ratio_clip_c: float | None = key(None, "Dual clip of negative advantages, at this * |advantage|.", "> 1")
    token_level_loss: bool = key(True, "Mean over tokens; false = over sequences of their token means.")
    use_importance_sampling_correction: bool = key(False, "Weight tokens by trainer / sampler probability.")
    disable_ppo_ratio: bool = key(False, "Plain policy gradient: log-probability in place of the ratio.")
    force_on_policy_ratio: bool = key(False, "Ratio 1: exact with one optimizer step per rollout.")


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
    warmup_steps: int = key(50, "Steps of linear warm-up, then constant; 0 = none.", ">= 0")
    warmup_start_factor: float = key(0.1, "Share of the learning rate at the first step.", "> 0, <= 1")


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
        "Tokens of a response; longer ones are cut and counted. Kept free behind every prompt; so not 512, "
        "NeMo RL's default, which is its whole max_total_sequence_length.",
        ">= 1",
    )
    stop_token_ids: tuple[int, ...] | None = key(None, "Ids that end a response; null = the model's.", ">= 0")
    vllm_cfg: VllmConfig = VllmConfig()


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    model_name: str = key("Qwen/Qwen2.5-1.5B", "Folder or hub name: Qwen2, Qwen2.5, dense Qwen3, Llama 3.")
    precision: Literal["bfloat16", "float32"] = key("bfloat16", "Of the trainer; master weights: float32.")
    max_total_sequence_length: int = key(512, "Tokens of prompt and response together.", ">= 2")
    max_grad_norm: float = key(1.0, "A longer gradient is scaled down to this norm.", "> 0")
    dtensor_cfg: DTensorConfig = DTensorConfig()
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    generation: GenerationConfig = GenerationConfig()


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    data_path: str | None = key(None, "The jsonl file, relative to the working directory. To be set.")
    input_key: str = key("input", "Field of a row with the problem, if it has no chat `messages`.")
    output_key: str = key("output", "Field of a row with the expected answer.")
    system_prompt_file: str | None = key(None, "Text file that becomes the system message; null = none.")
    prompt_file: str | None = key(None, "Text file; the problem goes where its {} is. null = none.")
    env_name: str = key("exact", "What scores responses; exact: all of it, or after ####, is the number.")


@dataclass(frozen=True, slots=True)
class DataConfig:
    max_input_seq_length: int | None = key(
        None, "Prompts of more tokens are dropped and counted; null = what max_new_tokens leaves.", ">= 1"
    )
    shuffle: bool = key(True, "A new order of the training data each epoch; false = file order.")
    train: DatasetConfig = DatasetConfig()
    validation: DatasetConfig = DatasetConfig()


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
    save_hf_at_end: bool = key(True, "Write the final weights as a Hugging Face folder, checkpoints or not.")
    resume_from: str | None = key(None, "Run folder whose newest checkpoint to continue; null = new run.")


@dataclass(frozen=True, slots=True)
class Config:
    grpo: GRPOConfig = GRPOConfig()
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig = PolicyConfig()
    data: DataConfig = DataConfig()
    logger: LoggerConfig = LoggerConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that is kept: with it, `max_new_tokens` fit behind."""
        left = self.policy.max_total_sequence_length - self.policy.generation.max_new_tokens
        return left if self.data.max_input_seq_length is None else self.data.max_input_seq_length


def _walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    for f in fields(cls):
        yield prefix + f.name, f
        if is_dataclass(f.type):
            yield from _walk(f.type, f"{prefix}{f.name}.")


_FIELDS: dict[str, Field] = dict(_walk(Config))  # full key -> field, sections too, in the order above
_CLASSES = {"": Config} | {name: f.type for name, f in _FIELDS.items() if is_dataclass(f.type)}
_SECTIONS = {name: ", ".join(f.name for f in fields(cls)) for name, cls in _CLASSES.items()}  # -> its keys
_TAG = "tag:yaml.org,2002:"  # the tags of yaml's own types start with it


# Values come from yaml's node tree, not from the objects PyYAML makes of it: it takes `1e-6` for a string,
# `no` for False and the last of two equal keys. A node has text and line; the field says what the text is.


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a yaml file, over the files its `defaults:` names and under `key.sub=value` overrides.

    The last to set a key wins; a list is one value. Raises ConfigError. What the values say is `validate`'s.
    """
    values = _read_file(Path(path), ())
    for override in overrides:
        where = f"command line {override!r}"
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{where}: expected key.sub=value, as in grpo.seed=1")
        if name in _FIELDS and get_origin(_split(_FIELDS[name].type)[0]) is tuple:
            node = _compose(text, where)
        else:  # the text as typed, whatever yaml would see in "no", "a: b" or "[x]"
            tag = yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False))
            node = yaml.ScalarNode(tag, text)
        values[name] = _value(name, node, where)
    return _build(Config, "", values)


def _read_file(path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    """Full key -> value of a file over its defaults. `parents`: the files whose defaults led here."""
    if path.resolve() in [parent.resolve() for parent in parents]:
        raise ConfigError(f"{path}: defaults go in a circle: {' -> '.join(map(str, (*parents, path)))}")
    try:
        root = _compose(path.read_bytes(), str(path))
    except OSError as error:
        named = f" (named by the defaults of {parents[-1]})" if parents else ""
        there = ", ".join(sorted(map(str, path.parent.glob("*.yaml")))) or "none"
        raise ConfigError(f"{path}: {error.strerror}{named}; yaml files there: {there}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected sections of keys, as in 'grpo: {{seed: 1}}', got {_got(root)}")
    below, own = {}, {}
    for name, node, where in _leaves(root, "", path, {}):
        if name != "defaults":
            own[name] = _value(name, node, where)
            continue
        for entry in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(entry, yaml.ScalarNode) or not entry.value:
                raise ConfigError(f"{where}: defaults: expected a file or a list of files, got {_got(entry)}")
            below |= _read_file(path.parent / entry.value, (*parents, path))
    return below | own


def _compose(text: str | bytes, where: str) -> yaml.Node:
    """Yaml text -> its node tree, with no object made of it. Empty text is null."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader) or yaml.ScalarNode(_TAG + "null", "")
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{where} line {error.problem_mark.line + 1}: not yaml: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not yaml: {' '.join(str(error).split())}") from None


def _leaves(node: yaml.Node, prefix: str, path: Path, lines: dict[str, int]) -> Iterator[tuple[str, yaml.Node, str]]:
    """(full key, node, place) of all below a mapping that is no section. `lines`: keys seen -> their line."""
    for key_node, child in node.value:
        line = key_node.start_mark.line + 1
        where = f"{path} line {line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: expected the name of a key, got {_got(key_node)}")
        name = prefix + key_node.value
        if name in lines:
            raise ConfigError(f"{where}: {name} is set again, first in line {lines[name]}; remove one")
        lines[name] = line
        if name in _SECTIONS and isinstance(child, yaml.MappingNode):
            yield from _leaves(child, f"{name}.", path, lines)
        else:
            yield name, child, where


def _value(name: str, node: yaml.Node, where: str) -> Any:
    """The value of a key. Every unknown key and wrong type ends here."""
    if name not in _FIELDS:
        raise ConfigError(f"{where}: {_unknown(name)}")
    if name in _SECTIONS:
        raise ConfigError(f"{where}: {name} is a section, got {_got(node)}; set its keys: {_SECTIONS[name]}")
    f = _FIELDS[name]
    try:
        return _read(node, f.type)
    except ValueError:
        expected = f"expected {_type_name(f.type)}, got {_got(node)}"
        raise ConfigError(f"{where}: {name}: {expected}; the default is {json.dumps(f.default)}") from None


def _read(node: yaml.Node, kind: Any) -> Any:
    """A node as a value of a field's type. ValueError where it is none."""
    base, optional = _split(kind)
    if optional and node.tag == _TAG + "null":
        return None
    if get_origin(base) is tuple and isinstance(node, yaml.SequenceNode):
        kinds = get_args(base)
        kinds = kinds[:1] * len(node.value) if kinds[-1] is Ellipsis else kinds
        return tuple(_read(item, item_kind) for item, item_kind in zip(node.value, kinds, strict=True))
    text = node.value
    if not isinstance(node, yaml.ScalarNode) or node.tag == _TAG + "null" or not node.tag.startswith(_TAG):
        raise ValueError
    if base is str or (get_origin(base) is Literal and text in get_args(base)):
        return text
    if base is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if base is int:
        return int(text)
    if base is float and math.isfinite(float(text)):
        return float(text)
    raise ValueError


def _got(node: yaml.Node) -> str:
    """What was written, and what yaml takes it for."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(_got(i) if isinstance(i, yaml.ScalarNode) else '...' for i in node.value)}]"
    tag = node.tag.removeprefix(_TAG)
    return {"map": "a mapping", "null": "null"}.get(tag, f"{node.value!r} ({tag})")


def _unknown(name: str) -> str:
    """What to say of a key that does not exist: the key nearest by its last name, and the keys beside it."""
    last_names = {full: full.rpartition(".")[2] for full in _FIELDS}
    last = difflib.get_close_matches(name.rpartition(".")[2], last_names.values(), n=1)
    namesakes = [full for full in _FIELDS if last_names[full] in last]
    near = difflib.get_close_matches(name, namesakes, n=1, cutoff=0)
    section = name
    while section not in _SECTIONS:
        section = section.rpartition(".")[0]
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"unknown key '{name}'.{hint} Keys of {section or 'a config'}: {_SECTIONS[section]}"


def _split(kind: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); `X` -> (X, False)."""
    return (get_args(kind)[0], True) if NoneType in get_args(kind) else (kind, False)


def _build(cls: type, prefix: str, values: dict[str, Any]) -> Any:
    kwargs = {}
    for f in fields(cls):
        if is_dataclass(f.type):
            kwargs[f.name] = _build(f.type, f"{prefix}{f.name}.", values)
        elif prefix + f.name in values:
            kwargs[f.name] = values[prefix + f.name]
    return cls(**kwargs)


def to_yaml(cfg: Config) -> str:
    """The whole config as yaml that `load` reads back to an equal one."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)


def help_text() -> str:
    """Every key with its type, bounds, default and meaning."""
    lines = []
    for name, f in _FIELDS.items():
        if name not in _SECTIONS:
            bounds = f" ({f.metadata['bounds']})" if f.metadata["bounds"] else ""
            lines.append(f"{name}: {_type_name(f.type)}{bounds} = {json.dumps(f.default)}")
            lines.append(textwrap.indent(textwrap.fill(f.metadata["help"], 100), "    "))
    return "\n".join(lines) + "\n"


def _type_name(kind: Any) -> str:
    base, optional = _split(kind)
    names = {bool: "true or false", int: "int", float: "finite float", str: "str"}
    if get_origin(base) is Literal:
        name = " or ".join(get_args(base))
    else:
        name = names.get(base) or str(base).replace("tuple", "list")
    return f"{name} or null" if optional else name


_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def validate(cfg: Config, world_size: int) -> None:
    """Raise ConfigError, a line for each problem, if `world_size` ranks cannot run `cfg`. Reads no file."""
    assert world_size >= 1, world_size
    problems = list(_bound_problems(cfg)) or [*_size_problems(cfg, world_size), *_other_problems(cfg)]
    if problems:
        raise ConfigError("\n".join(problems))


def _bound_problems(cfg: Config) -> Iterator[str]:
    """Each key by itself, against the bounds it declares."""
    for name, f in _FIELDS.items():
        if name in _SECTIONS:
            continue
        value, bounds, meaning = operator.attrgetter(name)(cfg), f.metadata["bounds"], f.metadata["help"]
        if value == "":
            yield f"{name} is empty ({meaning})"
        limits = [limit.split() for limit in bounds.split(",") if limit]
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(_OPERATORS[sign](number, float(limit)) for number in numbers for sign, limit in limits):
            yield f"{name}={json.dumps(value)}: must be {bounds} ({meaning})"


def _size_problems(cfg: Config, world_size: int) -> Iterator[str]:
    """Numbers that must fit each other."""
    generation = cfg.policy.generation
    tensor, prompts = generation.vllm_cfg.tensor_parallel_size, cfg.grpo.num_prompts_per_step
    groups, rest = divmod(world_size, tensor)
    tensor_key = f"policy.generation.vllm_cfg.tensor_parallel_size={tensor}"
    if rest:
        yield f"{tensor_key} does not divide the world size {world_size}: start a multiple of {tensor} ranks"
    elif prompts % groups:
        fits = " or ".join(str(n) for n in (prompts - prompts % groups, prompts + -prompts % groups) if n)
        yield (
            f"grpo.num_prompts_per_step={prompts} is not divisible by the {groups} data-parallel groups "
            f"(world size {world_size}, {tensor_key}): use {fits}"
        )
    total, new = cfg.policy.max_total_sequence_length, generation.max_new_tokens
    pack, prompt = cfg.policy.sequence_packing.train_mb_tokens, cfg.max_prompt_tokens
    total_key = f"policy.max_total_sequence_length={total}"
    new_key = f"policy.generation.max_new_tokens={new}"
    if pack < total:
        yield f"policy.sequence_packing.train_mb_tokens={pack} is less than {total_key}: use {total} or more"
    if new >= total:
        yield f"{new_key} leaves no room for a prompt in {total_key}: lower it below {total}"
    elif prompt + new > total:
        yield f"data.max_input_seq_length={prompt} and {new_key} do not fit in {total_key}: use {total - new}"


def _other_problems(cfg: Config) -> Iterator[str]:
    generation, loss, grpo, data = cfg.policy.generation, cfg.loss_fn, cfg.grpo, cfg.data
    if generation.top_p != 1 or generation.top_k is not None:
        yield (
            f"policy.generation.top_p={generation.top_p}, top_k={json.dumps(generation.top_k)}: must be 1 "
            "and null; the trainer scores the whole distribution, and a filtered sampler draws from another"
        )
    if loss.disable_ppo_ratio and loss.force_on_policy_ratio:
        yield "loss_fn.disable_ppo_ratio=true and force_on_policy_ratio=true exclude each other: choose one"
    if loss.disable_ppo_ratio and loss.ratio_clip_c is not None:
        yield f"loss_fn.ratio_clip_c={loss.ratio_clip_c} needs the ratio that disable_ppo_ratio=true removes"
    if data.train.data_path is None:
        yield "data.train.data_path is not set: name the jsonl file of training problems"
    if data.validation.data_path is None and (grpo.val_period or grpo.val_at_start or grpo.val_at_end):
        yield (
            "data.validation.data_path is not set: name a jsonl file, or ask for no validation with "
            "grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false"
        )
