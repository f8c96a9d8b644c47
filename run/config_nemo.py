"""A config as NeMo RL writes it -> one of ours: its `${...}`, the shapes of keys we spell otherwise, keys to pass over.

Facts are those of NeMo RL's GRPO guides and examples/configs (7ea279a, and the flat `data` section it had before). What
it has and we do not is in `PASSED_OVER`: such keys are named in one warning; those that would change the run are
refused, but for the value that says how it is here. Knows names and yaml nodes, no types: config_file.py reads values.
"""

import re
from collections.abc import Callable, Iterator
from math import prod

import yaml

from config import ConfigError

_DATASET_KEYS = (
    *("dataset_name", "subset", "split_validation_size", "seed", "input_key", "output_key"),
    *("prompt_file", "system_prompt_file", "processor", "env_name"),
)
RENAMED = {f"data.{name}": f"data.default.{name}" for name in _DATASET_KEYS} | {
    "data.train_data_path": "data.train.data_path",
    "data.val_data_path": "data.validation.data_path",
    "data.train_jsonl_fpath": "data.train.data_path",
    "data.validation_jsonl_fpath": "data.validation.data_path",
    "data.train_split": "data.train.split",
    "data.val_split": "data.validation.split",
}
SCORE = "validation/sampled/"  # of metrics that NeMo RL calls val:...
# `section.*` is all below it; `key=a|b` only with these values (as written); anything else of the key is refused.
PASSED_OVER = """
cluster.*  data_plane.enabled=false  data_plane.*  reward_penalties.*  on_policy_distillation=null
grpo.val_start_at=-1  grpo.val_batch_size  grpo.stop_at_validation_metric=null  grpo.stop_at_validation_threshold=null
grpo.invalid_tool_call_advantage=null  grpo.malformed_thinking_advantage=null
grpo.async_grpo.enabled=false  grpo.async_grpo.*
grpo.adv_estimator.normalize_rewards=${grpo.normalize_rewards}
grpo.adv_estimator.use_leave_one_out_baseline=${grpo.use_leave_one_out_baseline}
checkpointing.model_save_format
checkpointing.save_consolidated  checkpointing.save_optimizer=true
policy.tokenizer.name=${policy.model_name}  policy.tokenizer.use_fastokens  policy.hf_config_overrides={}
policy.train_micro_batch_size  policy.generation_batch_size  policy.logprob_batch_size  policy.logprob_chunk_size
policy.offload_optimizer_for_logprob  policy.make_sequence_length_divisible_by  policy.dynamic_batching.*
policy.dtensor_cfg._v2  policy.dtensor_cfg.enabled=true  policy.dtensor_cfg.cpu_offload
policy.dtensor_cfg.sequence_parallel  policy.dtensor_cfg.tensor_parallel_size  policy.dtensor_cfg.context_parallel_size
policy.dtensor_cfg.custom_parallel_plan  policy.dtensor_cfg.automodel_kwargs.*
policy.dtensor_cfg.lora_cfg.enabled=false  policy.dtensor_cfg.lora_cfg.*
policy.megatron_cfg.enabled=false  policy.megatron_cfg.*  policy.draft.enabled=false  policy.draft.*
policy.sequence_packing.enabled=true  policy.sequence_packing.logprob_mb_tokens  policy.sequence_packing.algorithm
policy.sequence_packing.microbatch_order  policy.sequence_packing.sequence_length_round
policy.generation.backend=vllm  policy.generation.stop_strings=null
policy.generation.val_temperature=${.temperature}  policy.generation.val_top_p=${.top_p}
policy.generation.val_top_k=${.top_k}  policy.generation.port_range_low  policy.generation.port_range_high
policy.generation.refit_transport  policy.generation.real_quant_export_cpu_offload  policy.generation.refit_cfg.*
policy.generation.mcore_generation_config.*  policy.generation.vllm_kwargs={}
policy.generation.colocated.enabled=true  policy.generation.colocated.*
policy.generation.vllm_cfg.async_engine=false  policy.generation.vllm_cfg.kv_cache_dtype=auto
policy.generation.vllm_cfg.logprobs_mode=processed_logprobs  policy.generation.vllm_cfg.pipeline_parallel_size=1
policy.generation.vllm_cfg.expert_parallel_size=1  policy.generation.vllm_cfg.max_model_len
policy.generation.vllm_cfg.use_tqdm  policy.generation.vllm_cfg.use_deep_gemm=false
policy.generation.vllm_cfg.num_last_layers_in_bf16  policy.generation.vllm_cfg.num_first_layers_in_bf16
policy.generation.vllm_cfg.enable_vllm_metrics_logger  policy.generation.vllm_cfg.vllm_metrics_logger_interval
policy.generation.vllm_cfg.http_refit_api_key_env_var  policy.generation.vllm_cfg.http_refit_server_port
policy.generation.vllm_cfg.zmq_refit_server_port  policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update
data.num_workers  data.train.download_dir  data.validation.download_dir  data.default.download_dir
env.should_use_nemo_gym=false  env.should_log_nemo_gym_responses  env.nemo_gym.*  env.math.stop_strings=null
env.math.verifier_type=math
env.reward_model.enabled=true  env.reward_model.tokenizer.*  env.reward_model.batch_size
env.reward_model.checkpoint_path=null  env.reward_model.resources.*  env.reward_model.dtensor_cfg.*
logger.wandb_enabled  logger.mlflow_enabled  logger.swanlab_enabled  logger.monitor_gpus  logger.wandb.*
logger.swanlab.*  logger.tensorboard.*  logger.mlflow.*  logger.gpu_monitoring.*
""".split()
_ONLY = dict(row.split("=", 1) for row in PASSED_OVER if "=" in row)
_ALL = {row for row in PASSED_OVER if "=" not in row}


def is_section(name: str) -> bool:
    """Whether only some keys below `name` may be passed over, so that each is to be looked at."""
    return any(row.startswith(f"{name}.") and row != f"{name}.*" for row in PASSED_OVER)


def passed_over(name: str, node: yaml.Node, where: str) -> str | None:
    """The key or section of the table that a key is passed over by, to be named; "" where its value is how things are
    here; None for other keys."""
    if name in _ONLY:
        got = node.value if isinstance(node, yaml.ScalarNode) else "{}" if not node.value else "a mapping or list"
        got = "null" if node.tag.endswith(":null") else got
        if got.lower() not in _ONLY[name].split("|"):
            raise ConfigError(f"{where}: {name}={got} is not supported here, only {_ONLY[name].replace('|', ' or ')}")
        return ""
    parts = name.split(".")
    sections = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return name if name in _ALL else next((section for section in sections if f"{section}.*" in _ALL), None)


def rewrite(name: str, node: yaml.Node, where: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """(name, node, place) of a key as we spell it; several of a list of schedulers."""
    if name == "policy.scheduler" and isinstance(node, yaml.SequenceNode):
        found = yaml.SafeLoader("").construct_document(node)
        warmup, rest = found[0], found[1] if len(found) > 1 else {}
        names = [str(entry.get("name")).rpartition(".")[2] for entry in (warmup, rest)]
        if names != ["LinearLR", "ConstantLR"] or warmup["kwargs"].get("end_factor", 1.0) != 1.0 or len(found) > 3:
            raise ConfigError(f"{where}: {name}: of lists, only a LinearLR up to 1.0 before a ConstantLR is understood")
        values = {"start_factor": "warmup_start_factor", "total_iters": "warmup_steps"}
        for theirs, ours in values.items():
            if theirs in warmup["kwargs"]:
                yield f"{name}.{ours}", scalar(str(warmup["kwargs"][theirs])), where
    elif name == "checkpointing.metric_name" and isinstance(node, yaml.ScalarNode):
        ours = node.value.replace("train:", "train/", 1).replace("val:", SCORE, 1)
        yield name, scalar(f"{SCORE}accuracy" if ours == "val_reward" else ours), where  # its older name for accuracy
    else:
        yield RENAMED.get(name, name), node, where


def scalar(text: str) -> yaml.ScalarNode:
    """The node of a text as typed: null, a number or text, as yaml sees it."""
    return yaml.ScalarNode(yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False)), text)


def interpolate(name: str, text: str, where: str, look_up: Callable[[str], str]) -> str:
    """`text` of key `name` without its `${key}`, `${.sibling}` and `${mul: a, b}`. `look_up`: full key -> its text."""
    for _ in range(20):
        found = re.search(r"\$\{([^${}]*)\}", text)
        if not found:
            return text
        inner, (resolver, colon, rest) = found[1].strip(), found[1].partition(":")
        if colon:
            factors = [factor.strip() for factor in rest.split(",")]
            if resolver.strip() != "mul" or not all(re.fullmatch(r"[\d.]+", factor) for factor in factors):
                raise ConfigError(f"{where}: {name}: ${{{inner}}}: only keys, and mul of numbers, are understood")
            value = f"{prod(map(float, factors)):.17g}"
        else:
            value = look_up(f"{name.rpartition('.')[0]}{inner}" if inner.startswith(".") else inner)
        text = text[: found.start()] + value + text[found.end() :]
    raise ConfigError(f"{where}: {name}: ${{...}} goes in a circle, or is too deep")
