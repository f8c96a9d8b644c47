"""A config as NeMo RL writes it -> as we write it: names, shapes and values of keys, `${...}`, keys without effect.

Facts are those of the GRPO guides and examples/configs of NVIDIA-NeMo/RL at 7ea279a, and of its older flat `data`
section. This file knows names of keys and yaml nodes; config_file.py reads values of types.
"""

import textwrap
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import groupby

import yaml

from config import ConfigError
from run.config_yaml import NULL, plain_value, scalar

_DATASET_KEYS = "dataset_name subset split_validation_size seed input_key output_key prompt_file system_prompt_file"
RENAMED = {f"data.{name}": f"data.default.{name}" for name in [*_DATASET_KEYS.split(), "processor", "env_name"]} | {
    "data.train_data_path": "data.train.data_path",
    "data.val_data_path": "data.validation.data_path",
    "data.train_jsonl_fpath": "data.train.data_path",
    "data.validation_jsonl_fpath": "data.validation.data_path",
    "data.train_split": "data.train.split",
    "data.val_split": "data.validation.split",
}
# Last name of a key in `data` -> values that name what null means here: rows of data_path, read as they are, in turn.
MEAN_NULL = {
    "dataset_name": ["ResponseDataset", "NemoGymDataset", "nemo_gym", "openai_format"],
    "processor": ["default", "math_data_processor", "math_hf_data_processor", "nemo_gym_data_processor"],
    "custom_dataloader": ["examples.custom_dataloader.custom_dataloader.example_custom_dataloader"],
}
SCORE = "validation/sampled/"  # NeMo RL's validation metrics `val:...` are those of our sampled validation
# Keys that are read but change nothing, by section; what a user may miss most comes first. `x.*` is every key below x.
# `key=a|b` has only these values, which are what happens here anyway; any other value of that key is refused.
NO_EFFECT = """
policy: dtensor_cfg.tensor_parallel_size dtensor_cfg.context_parallel_size dtensor_cfg.sequence_parallel
policy: dtensor_cfg.cpu_offload dtensor_cfg.enabled=true dtensor_cfg.lora_cfg.enabled=false dtensor_cfg.lora_cfg.*
policy: megatron_cfg.enabled=false megatron_cfg.* draft.enabled=false draft.* dynamic_batching.*
policy: train_micro_batch_size logprob_batch_size generation_batch_size offload_optimizer_for_logprob
policy: hf_config_overrides={} tokenizer.name=${policy.model_name} tokenizer.use_fastokens dtensor_cfg._v2
policy: make_sequence_length_divisible_by dtensor_cfg.custom_parallel_plan dtensor_cfg.automodel_kwargs.*
policy.sequence_packing: enabled=true logprob_mb_tokens algorithm microbatch_order sequence_length_round
policy.generation: top_p=1.0|1 top_k=null backend=vllm stop_strings=null colocated.enabled=true colocated.*
policy.generation: val_temperature=${.temperature} val_top_p=${.top_p} val_top_k=${.top_k} vllm_kwargs={}
policy.generation: port_range_low port_range_high refit_transport refit_cfg.* real_quant_export_cpu_offload
policy.generation: mcore_generation_config.*
policy.generation.vllm_cfg: async_engine=false kv_cache_dtype=auto logprobs_mode=processed_logprobs
policy.generation.vllm_cfg: pipeline_parallel_size=1 expert_parallel_size=1 use_deep_gemm=false max_model_len use_tqdm
policy.generation.vllm_cfg: num_last_layers_in_bf16 num_first_layers_in_bf16 enable_vllm_metrics_logger
policy.generation.vllm_cfg: vllm_metrics_logger_interval http_refit_api_key_env_var http_refit_server_port
policy.generation.vllm_cfg: zmq_refit_server_port reset_encoder_cache_after_weight_update
grpo: async_grpo.enabled=false async_grpo.* stop_at_validation_metric=null stop_at_validation_threshold=null
grpo: invalid_tool_call_advantage=null malformed_thinking_advantage=null val_start_at=-1 val_batch_size
grpo.adv_estimator: normalize_rewards=${grpo.normalize_rewards}
grpo.adv_estimator: use_leave_one_out_baseline=${grpo.use_leave_one_out_baseline}
data: num_workers train.download_dir validation.download_dir default.download_dir
env: should_use_nemo_gym=false should_log_nemo_gym_responses nemo_gym.* math.stop_strings=null math.verifier_type=math
env.reward_model: enabled=true checkpoint_path=null batch_size tokenizer.* resources.* dtensor_cfg.*
checkpointing: save_optimizer=true model_save_format save_consolidated
logger: wandb_enabled mlflow_enabled swanlab_enabled monitor_gpus wandb.* mlflow.* swanlab.* tensorboard.*
: logger.gpu_monitoring.* cluster.* reward_penalties.* data_plane.enabled=false data_plane.* on_policy_distillation=null
"""
_LINES = [line.partition(": ") for line in NO_EFFECT.strip().splitlines()]
_ROWS = [f"{section}.{key}".removeprefix(".") for section, _, keys in _LINES for key in keys.split()]
_ONLY = dict(row.split("=", 1) for row in _ROWS if "=" in row)
_FILTERED = ": the trainer scores the whole distribution, and a filtered sampler draws from another"


def is_section(name: str) -> bool:
    """Whether NO_EFFECT has some keys below `name` one by one, so that each of them is to be looked at."""
    return any(row.startswith(f"{name}.") and row != f"{name}.*" for row in _ROWS)


def no_effect(name: str, node: yaml.Node, where: str) -> str | None:
    """The row of NO_EFFECT with this key, for `warning`; None without one. A row with values gives "" for such a value,
    of which there is nothing to tell, and ConfigError for others."""
    if name in _ONLY:
        value = node.value if isinstance(node, yaml.ScalarNode) else "a mapping or list" if node.value else "{}"
        value = "null" if node.tag == NULL else value
        if value.lower() not in _ONLY[name].split("|"):
            reason = _FILTERED if name.endswith((".top_p", ".top_k")) else ""
            expected = _ONLY[name].replace("|", " or ")
            raise ConfigError(f"{where}: {name}={value:.80} is not supported here, only {expected}{reason}")
        return ""
    return next((row for row in _ROWS if row == name or fnmatchcase(f"{name}.", row)), None)


def warning(rows: Iterable[str]) -> str:
    """What to print about keys without effect, a paragraph for each section; rows as `no_effect` returns them."""
    lines = ["warning: these keys of NeMo RL have no effect here (* is every key below):"]
    for section, group in groupby(sorted(rows, key=_ROWS.index), key=lambda row: row.partition(".")[0]):
        text = f"  {section}: {', '.join(row.partition('.')[2] for row in group)}"
        lines.append(textwrap.fill(text, 120, subsequent_indent="    ", break_on_hyphens=False))
    return "\n".join(lines)


def rewrite(name: str, node: yaml.Node, where: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """(full key, node, place) of a key as we write it; a list of schedulers gives several. ConfigError if it cannot."""
    name = RENAMED.get(name, name)
    if name == "policy.scheduler" and isinstance(node, yaml.SequenceNode):
        yield from _scheduler(name, node, where)
    elif name == "checkpointing.metric_name" and isinstance(node, yaml.ScalarNode):
        metric = node.value.replace("train:", "train/", 1).replace("val:", SCORE, 1)
        yield name, scalar(f"{SCORE}accuracy" if metric == "val_reward" else metric), where  # an older name of accuracy
    elif name.startswith("data.") and node.value in MEAN_NULL.get(name.rpartition(".")[2], []):
        yield name, scalar("null"), where
    else:
        yield name, node, where


def _scheduler(name: str, node: yaml.Node, where: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """The keys of policy.scheduler for NeMo RL's list: LinearLR, ConstantLR, and the milestone between them."""
    entries = plain_value(node, f"{where}: {name}")
    schedulers = [entry if isinstance(entry, dict) else {} for entry in entries]
    names = [str(entry.get("name")).rpartition(".")[2] for entry in schedulers[:2]]
    warmup = schedulers[0].get("kwargs") or {} if schedulers else {}
    known = isinstance(warmup, dict) and names == ["LinearLR", "ConstantLR"] and len(schedulers) <= 3
    if not known or warmup.get("end_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}: {name}: of lists, only a LinearLR up to 1.0 before a ConstantLR is understood")
    for theirs, ours in {"start_factor": "warmup_start_factor", "total_iters": "warmup_steps"}.items():
        if theirs in warmup:
            yield f"{name}.{ours}", scalar(str(warmup[theirs])), where
