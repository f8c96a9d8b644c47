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
import re
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

    @property
    def prompts_per_batch(self) -> int:
        """Prompts drawn at once."""
        return int(self.num_prompts_per_step * self.batch_multiplier)


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
        None, "Of several validation sets: its name in metrics, validation/<name>/...; null = the file's stem."
    )
    data_path: str | None = key(None, "The jsonl file, relative to the working directory. To be set.")
    input_key: str = key("input", "Field of a row with the problem, if it has no chat `messages`.")
    output_key: str = key("output", "Field of a row with the expected answer.")
    system_prompt_file: str | None = key(None, "Text file that becomes the system message; null = none.")
    prompt_file: str | None = key(None, "Text file; the problem goes where its {} is. null = none.")
    env_name: str = key("exact", "What scores responses; exact: all of it, or after ####, is the number.")

    @property
    def set_name(self) -> str:
        """What metrics call it; "" where no file is named."""
        return self.name or Path(self.data_path or "").stem


@dataclass(frozen=True, slots=True)
class DataConfig:
    max_input_seq_length: int | None = key(
        None, "Prompts of more tokens are dropped and counted; null = what max_new_tokens leaves.", ">= 1"
    )
    shuffle: bool = key(True, "A new order of the training data each epoch; false = file order.")
    train: DatasetConfig = DatasetConfig()
    validation: tuple[DatasetConfig, ...] = (DatasetConfig(),)  # in yaml a mapping, or a list of mappings


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


def _section(kind: Any) -> type | None:
    """The class of a section, or of the sections of a list; None for other fields."""
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return kind if is_dataclass(kind) else None


def _walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    for f in fields(cls):
        yield prefix + f.name, f
        if _section(f.type):
            yield from _walk(_section(f.type), f"{prefix}{f.name}.")


_FIELDS: dict[str, Field] = dict(_walk(Config))  # full key -> field, sections too, in the order above
_CLASSES = {"": Config} | {name: _section(f.type) for name, f in _FIELDS.items() if _section(f.type)}
_LISTS = [name for name in _CLASSES if name and not is_dataclass(_FIELDS[name].type)]  # lists of sections
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
        if name in _FIELDS and name not in _SECTIONS and get_origin(_split(_FIELDS[name].type)[0]) is tuple:
            node = _compose(text, where)
        else:  # the text as typed, whatever yaml would see in "no", "a: b" or "[x]"
            tag = yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False))
            node = yaml.ScalarNode(tag, text)
        values[_numbered(name)] = _value(name, node, where)
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
        if name in _LISTS and isinstance(node, yaml.SequenceNode):  # one value: nothing of what it replaces stays
            below = {key: value for key, value in below.items() if not key.startswith(f"{name}.")}
            continue
        if name != "defaults":
            own[_numbered(name)] = _value(name, node, where)
            continue
        for entry in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(entry, yaml.ScalarNode) or not entry.value:
                raise ConfigError(f"{where}: defaults: expected a file or a list of files, got {_got(entry)}")
            below |= _read_file(path.parent / entry.value, (*parents, path))
    return below | own


def _numbered(name: str) -> str:
    """`data.validation.x` -> `data.validation.0.x`: a list of sections may be written as its only one."""
    for section in _LISTS:
        rest = name.removeprefix(f"{section}.")
        if rest != name and not rest.partition(".")[0].isdigit():
            return f"{section}.0.{rest}"
    return name


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
            continue
        for i, item in enumerate(child.value if name in _LISTS and isinstance(child, yaml.SequenceNode) else ()):
            if not isinstance(item, yaml.MappingNode):
                raise ConfigError(f"{where}: {name}: expected a list of mappings, got {_got(item)} in it")
            yield from _leaves(item, f"{name}.{i}.", path, lines)
        yield name, child, where


def _value(name: str, node: yaml.Node, where: str) -> Any:
    """The value of a key. Every unknown key and wrong type ends here."""
    plain = re.sub(r"\.\d+(?=\.|$)", "", name)  # without the number in a list
    if plain not in _FIELDS:
        raise ConfigError(f"{where}: {_unknown(plain)}")
    if plain in _SECTIONS:
        raise ConfigError(f"{where}: {name} is a section, got {_got(node)}; set its keys: {_SECTIONS[plain]}")
    f = _FIELDS[plain]
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
        if prefix + f.name in _LISTS:
            start = f"{prefix}{f.name}."
            numbers = [int(name.removeprefix(start).partition(".")[0]) for name in values if name.startswith(start)]
            items = range(max(numbers, default=0) + 1)
            kwargs[f.name] = tuple(_build(_section(f.type), f"{start}{i}.", values) for i in items)
        elif is_dataclass(f.type):
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
    problems = list(_bound_problems(cfg)) or [
        *_size_problems(cfg, world_size),
        *loss_problems(cfg.loss_fn),
        *_clashes(cfg, _WITHOUT_EFFECT),
        *_other_problems(cfg),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """(full key, field, value) of a config; the sections of a list are numbered where there are several."""
    for f in fields(section):
        name, value = prefix + f.name, getattr(section, f.name)
        if is_dataclass(value):
            yield from _settings(value, f"{name}.")
        elif name in _LISTS:
            for i, item in enumerate(value):
                yield from _settings(item, f"{name}.{i}." if len(value) > 1 else f"{name}.")
        else:
            yield name, f, value


def _bound_problems(cfg: Config) -> Iterator[str]:
    """Each key by itself, against the bounds it declares."""
    for name, f, value in _settings(cfg):
        bounds, meaning = f.metadata["bounds"], f.metadata["help"]
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
    rollout, batch = prompts * cfg.grpo.num_generations_per_prompt, cfg.policy.train_global_batch_size
    if batch is not None and rollout % batch:
        yield (
            f"policy.train_global_batch_size={batch} does not divide the {rollout} samples of a rollout "
            f"(grpo.num_prompts_per_step={prompts} x num_generations_per_prompt={cfg.grpo.num_generations_per_prompt})"
        )
    epochs = cfg.policy.ppo_epochs
    if cfg.loss_fn.force_on_policy_ratio and (epochs > 1 or (batch or rollout) < rollout):
        yield (
            f"loss_fn.force_on_policy_ratio=true is for one optimizer step per rollout, but policy.ppo_epochs={epochs} "
            f"and policy.train_global_batch_size={json.dumps(batch)} make {epochs * (rollout // (batch or rollout))}"
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


_TIS = "truncated_importance_sampling"
_LOSS_CLASHES = (  # a condition, another, why they do not go together: keys of loss_fn, values as in json
    ("use_cispo=true", "ratio_clip_c!=null", "CISPO has no second clip"),
    ("use_cispo=true", "disable_ppo_ratio=true", "CISPO needs the ratio"),
    ("use_cispo=true", "force_on_policy_ratio=true", "CISPO needs the ratio"),
    ("use_cispo=true", "sequence_level_importance_ratios=true", "CISPO's ratio is a token's, GSPO's a sequence's"),
    ("use_cispo=true", "token_level_loss=false", "CISPO averages over tokens"),
    ("sequence_level_importance_ratios=true", "token_level_loss=true", "GSPO averages over sequences"),
    ("loss_scale_factor!=null", "token_level_loss=true", "a mean over tokens divides by their number"),
    ("disable_ppo_ratio=true", "force_on_policy_ratio=true", "choose one"),
    (f"{_TIS}_type!=null", "use_importance_sampling_correction=false", "there are no weights to bound"),
    (f"{_TIS}_type!=null|sequence", f"{_TIS}_ratio=null", "it needs its upper bound"),
    (f"{_TIS}_type=icepop|seq-mask-tis", f"{_TIS}_ratio_min=null", "it needs its lower bound"),
    (f"{_TIS}_type=null|sequence", f"{_TIS}_ratio!=null", "only the other types have a bound"),
    (f"{_TIS}_type=null|sequence", f"{_TIS}_ratio_min!=null", "only the other types have a bound"),
    (f"{_TIS}_type!=null|tis|icepop", "sequence_level_importance_ratios=true", "GSPO's weights are of sequences"),
)
_WITHOUT_EFFECT = (  # as above, with full keys: the first would be read by nobody, which is better said than ignored
    ("loss_fn.ratio_clip_c!=null", "loss_fn.disable_ppo_ratio=true", "there is no ratio to clip"),
    ("loss_fn.ratio_clip_c!=null", "loss_fn.force_on_policy_ratio=true", "the ratio is 1"),
    ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.disable_ppo_ratio=true", "there is no ratio"),
    ("loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name!=reinforce_plus_plus", "only that one has it"),
    ("loss_fn.kl_gradient=plain", "loss_fn.use_kl_in_reward=true", "a reward has no gradient"),
    ("loss_fn.use_on_policy_kl_approximation=true", "loss_fn.use_kl_in_reward=true", "only the KL in the loss has it"),
    ("grpo.ref_policy_update_period!=null", "loss_fn.reference_policy_kl_penalty=0.0", "there is no reference"),
    ("grpo.ref_policy_update_alpha!=1.0", "grpo.ref_policy_update_period=null", "the reference is never updated"),
    ("policy.scheduler.min_factor!=0.0", "policy.scheduler.name=constant", "a constant rate has no end to reach"),
    ("grpo.adv_estimator.reward_weights!=null", "grpo.adv_estimator.name!=gdpo", "only gdpo has several rewards"),
    ("grpo.adv_estimator.minus_baseline=false", "grpo.adv_estimator.name!=reinforce_plus_plus", "the others need one"),
    ("grpo.reward_std!=baseline", "grpo.normalize_rewards=false", "nothing is divided by it"),
    ("grpo.reward_shaping.enabled=true", "grpo.adv_estimator.name=gdpo", "it reads each reward, not their shaped sum"),
    ("grpo.reward_std!=baseline", "grpo.adv_estimator.name=reinforce_plus_plus", "it whitens over tokens"),
)


def loss_problems(loss: LossConfig) -> Iterator[str]:
    """Keys of the loss that contradict each other. `policy_loss` asserts that there are none."""
    yield from _clashes(loss, _LOSS_CLASHES, "loss_fn.")
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    if None not in (low, high) and low > high:
        yield f"loss_fn.{_TIS}_ratio_min={low} is above loss_fn.{_TIS}_ratio={high}: exchange them"


def _clashes(root: Any, rows: Sequence[tuple[str, str, str]], prefix: str = "") -> Iterator[str]:
    """A line for each of the rows whose two conditions, `key=value|value` or `key!=...`, both hold."""

    def text(name: str) -> str:
        value = operator.attrgetter(name)(root)
        return value if isinstance(value, str) else json.dumps(value)

    for *conditions, why in rows:
        keys = [re.fullmatch(r"(.+?)(!?=)(.+)", condition).groups() for condition in conditions]
        if all((text(name) in values.split("|")) == (sign == "=") for name, sign, values in keys):
            yield f"{' and '.join(f'{prefix}{name}={text(name)}' for name, _, _ in keys)}: {why}"


def _other_problems(cfg: Config) -> Iterator[str]:
    generation, grpo, data = cfg.policy.generation, cfg.grpo, cfg.data
    if generation.top_p != 1 or generation.top_k is not None:
        yield (
            f"policy.generation.top_p={generation.top_p}, top_k={json.dumps(generation.top_k)}: must be 1 "
            "and null; the trainer scores the whole distribution, and a filtered sampler draws from another"
        )
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if None not in (low, high) and low >= high:
        yield f"grpo.advantage_clip_low={low} is not below grpo.advantage_clip_high={high}: exchange them"
    if data.train.data_path is None:
        yield "data.train.data_path is not set: name the jsonl file of training problems"
    yield from _reward_problems(cfg)
    yield from _validation_problems(cfg)


def _reward_problems(cfg: Config) -> Iterator[str]:
    """Scaling, shaping and dynamic sampling."""
    grpo, scaling, shaping = cfg.grpo, cfg.grpo.reward_scaling, cfg.grpo.reward_shaping
    for side in ("source", "target") if scaling.enabled else ():
        low, high = getattr(scaling, f"{side}_min"), getattr(scaling, f"{side}_max")
        if low >= high:
            key = f"grpo.reward_scaling.{side}"
            yield f"{key}_min={low} is not below {key}_max={high}: exchange them"
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
    draw = grpo.num_prompts_per_step * grpo.batch_multiplier
    multiplier_key = f"grpo.batch_multiplier={grpo.batch_multiplier}"
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        yield f"{multiplier_key} and grpo.use_dynamic_sampling=false: only dynamic sampling draws spare prompts"
    elif draw != int(draw):
        yield f"{multiplier_key} x grpo.num_prompts_per_step={grpo.num_prompts_per_step}: {draw} is no whole number"


def _validation_problems(cfg: Config) -> Iterator[str]:
    grpo, sets = cfg.grpo, cfg.data.validation
    asked = grpo.val_period or grpo.val_at_start or grpo.val_at_end
    for i, dataset in enumerate(sets):
        if dataset.data_path is None and (asked or len(sets) > 1):
            yield (
                f"data.validation{f'.{i}' if len(sets) > 1 else ''}.data_path is not set: name a jsonl file, or ask "
                "for no validation with grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false"
            )
    names = [dataset.set_name for dataset in sets]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        yield f"data.validation: {names.count(name)} sets are called '{name}': tell them apart by their key `name`"
    total, prompt, new = cfg.policy.max_total_sequence_length, cfg.max_prompt_tokens, grpo.val_max_new_tokens
    if new is not None and prompt + new > total:
        yield (
            f"grpo.val_max_new_tokens={new} and prompts of {prompt} tokens do not fit in "
            f"policy.max_total_sequence_length={total}: raise it to {prompt + new}, or lower data.max_input_seq_length"
        )
