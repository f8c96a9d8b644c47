"""rules.py: a config that cannot run, or a key that nothing reads, is refused with the keys and the reason.

Messages are compared whole: they are the interface.
"""

import re
from typing import get_args

import pytest
import torch

from advantages import estimate_advantages
from check.preflight import ALL_RANKS_GENERATE, parse_command_line
from check.reader import load
from check.rules import fewest_ranks, must_save_by_seconds, validate
from config import AdvEstimatorConfig, CheckpointingConfig, ConfigError

VALID = ["data.train.data_path=train.jsonl", "data.validation.data_path=val.jsonl"]


def problems_of(path: str, world_size: int, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(load(path, [*VALID, *overrides]), world_size)
    return str(caught.value).splitlines()


VLLM = "policy.generation.vllm_cfg"

AGE_0 = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0")


@pytest.mark.parametrize(
    ("world_size", "overrides", "problems"),
    [
        (
            1,
            ["grpo.async_grpo.enabled=true"],
            [
                "grpo.async_grpo.max_trajectory_age_steps=1 trains tokens of older weights, which need loss_fn."
                "use_importance_sampling_correction=true; set it, or set the age to 0"
            ],
        ),
        (
            1,
            [*AGE_0, "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false"],
            [
                "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false with policy.generation.colocated.enabled"
                "=true: the keys and values go when the engine sleeps; set it to true, or split the job"
            ],
        ),
        (
            1,
            ["grpo.async_grpo.max_trajectory_age_steps=3"],
            [
                "grpo.async_grpo.max_trajectory_age_steps=3 has no effect with grpo.async_grpo.enabled=false: each "
                "step samples anew; set grpo.async_grpo.max_trajectory_age_steps=1"
            ],
        ),
        (
            1,
            ["grpo.num_generations_per_prompt=1", "grpo.max_num_steps=0"],
            [
                "grpo.num_generations_per_prompt=1: must be >= 2 (A step samples this many responses per prompt; "
                "they form a group.)",
                "grpo.max_num_steps=0: must be >= 1 (The run ends after this many steps, or after max_num_epochs.)",
            ],
        ),
        (
            8,
            ["grpo.num_prompts_per_step=30", f"{VLLM}.tensor_parallel_size=2"],
            [
                "grpo.num_prompts_per_step=30 is not divisible by the 4 data-parallel groups (world size 8, "
                "policy.generation.vllm_cfg.tensor_parallel_size=2): use 28 or 32"
            ],
        ),
        (
            8,
            ["grpo.num_prompts_per_step=3"],
            [
                "grpo.num_prompts_per_step=3 is not divisible by the 8 data-parallel groups (world size 8, "
                "policy.generation.vllm_cfg.tensor_parallel_size=1): use 8"
            ],
        ),
        (
            2,
            [f"{VLLM}.tensor_parallel_size=4"],
            [
                "policy.generation.vllm_cfg.tensor_parallel_size=4 does not divide the world size 2: "
                "start a multiple of 4 ranks"
            ],
        ),
        (
            1,
            ["policy.sequence_packing.train_mb_tokens=511"],
            [
                "policy.sequence_packing.train_mb_tokens=511 is less than "
                "policy.max_total_sequence_length=512: use 512 or more"
            ],
        ),
        (
            1,
            ["policy.generation.max_new_tokens=513"],
            [
                "policy.generation.max_new_tokens=513 is more than policy.max_total_sequence_length=512: lower it to "
                "512 or less"
            ],
        ),
        (
            1,
            [
                "checkpointing.resume=never",
                "checkpointing.resume_from=logs/exp_001",
                "checkpointing.checkpoint_must_save_by=03:45:00",
                "checkpointing.metric_name=accuracy",
            ],
            [
                "checkpointing.resume_from=logs/exp_001 has no effect with checkpointing.resume=never: a new run is "
                "started; set checkpointing.resume_from=null",
                "checkpointing.checkpoint_must_save_by=03:45:00: must be DD:HH:MM:SS, such as 00:03:45:00",
                "checkpointing.metric_name=accuracy: must be a key of metrics.jsonl, such as train/reward",
            ],
        ),
        (
            1,
            ["checkpointing.keep_top_k=3", "grpo.val_period=0"],
            [
                "checkpointing.keep_top_k=3 compares validation/sampled/accuracy, but grpo.val_period=0 means no "
                "validation"
            ],
        ),
        (
            1,
            ["loss_fn.disable_ppo_ratio=true", "loss_fn.force_on_policy_ratio=true", "loss_fn.ratio_clip_c=3"],
            [
                "loss_fn.disable_ppo_ratio=true and loss_fn.force_on_policy_ratio=true: choose one",
                "loss_fn.ratio_clip_c=3.0 has no effect with loss_fn.disable_ppo_ratio=true: there is no ratio to clip"
                "; set loss_fn.ratio_clip_c=null",
                "loss_fn.ratio_clip_c=3.0 has no effect with loss_fn.force_on_policy_ratio=true: the ratio is 1; "
                "set loss_fn.ratio_clip_c=null",
            ],
        ),
        (
            1,
            ["data.train=null", "data.validation=null"],
            [
                "data.train.data_path is not set: name the jsonl file of training problems",
                "data.validation.data_path is not set: name a jsonl file, or ask for no validation with "
                "grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false",
            ],
        ),
        (
            1,
            ["data.train.env_name=m:A", "data.validation.env_name=m:B", "data.task_to_env.sums=m:C"]
            + [f"env.custom.m:{name}.near=6" for name in "ABC"]
            + ["env.custom.m:a.near=6"],
            ["env.custom.m:a: no data set has such a module:Class as its env_name; in use: m:A, m:B, m:C"],
        ),
        (
            1,
            ["data.default.env_name=math", "env.custom.math.near=6"],
            ["env.custom.math: no data set has such a module:Class as its env_name; in use: none"],
        ),
    ],
)
def test_validate(write, world_size, overrides, problems):
    assert problems_of(write("grpo: {seed: 1}"), world_size, *overrides) == problems


TIS_KEYS = "truncated_importance_sampling"
CISPO, GSPO = "loss_fn.use_cispo=true", "loss_fn.sequence_level_importance_ratios=true"
PER_SEQUENCE, IS = "loss_fn.token_level_loss=false", "loss_fn.use_importance_sampling_correction=true"
KIND, HIGH, LOW = (f"loss_fn.{TIS_KEYS}_{name}" for name in ("type", "ratio", "ratio_min"))
LORA = "policy.dtensor_cfg.lora_cfg"
REINFORCE, GDPO = "grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.name=gdpo"


@pytest.mark.parametrize(
    ("one", "other", "besides"),
    [
        (CISPO, "loss_fn.ratio_clip_c=3.0", []),
        (CISPO, "loss_fn.disable_ppo_ratio=true", []),
        (CISPO, "loss_fn.force_on_policy_ratio=true", []),
        (CISPO, PER_SEQUENCE, []),
        (GSPO, "loss_fn.token_level_loss=true", []),
        ("loss_fn.loss_scale_factor=9.0", "loss_fn.token_level_loss=true", []),
        (f"{KIND}=tis", "loss_fn.use_importance_sampling_correction=false", [f"{HIGH}=2"]),
        (f"{KIND}=tis", f"{HIGH}=null", [IS]),
        (f"{KIND}=sequence-mask", f"{HIGH}=null", [IS]),
        (f"{KIND}=icepop", f"{LOW}=null", [IS, f"{HIGH}=2"]),
        (f"{KIND}=seq-mask-tis", f"{LOW}=null", [IS, f"{HIGH}=2"]),
        (f"{KIND}=null", f"{HIGH}=2.0", [IS]),
        (f"{KIND}=null", f"{LOW}=0.5", [IS]),
        (f"{KIND}=sequence", f"{HIGH}=2.0", [IS]),
        (f"{KIND}=sequence", f"{LOW}=0.0", [IS]),
        (f"{KIND}=seq-mask-tis", GSPO, [IS, PER_SEQUENCE, f"{HIGH}=2", f"{LOW}=0.5"]),
        (f"{KIND}=sequence", GSPO, [IS, PER_SEQUENCE]),
    ],
)
def test_keys_that_do_not_go_together(write, one, other, besides):
    (problem,) = problems_of(write("grpo: {seed: 1}"), 1, one, other, *besides)
    assert problem.startswith(f"{one} and {other}: ")


@pytest.mark.parametrize(
    ("unread", "default", "other", "besides"),
    [
        (GSPO, "false", "loss_fn.disable_ppo_ratio=true", [PER_SEQUENCE]),
        ("loss_fn.use_kl_in_reward=true", "false", "grpo.adv_estimator.name=grpo", []),
        ("loss_fn.use_kl_in_reward=true", "false", GDPO, []),
        ("loss_fn.kl_gradient=plain", "score_function", "loss_fn.use_kl_in_reward=true", [REINFORCE]),
        ("loss_fn.use_on_policy_kl_approximation=true", "false", "loss_fn.use_kl_in_reward=true", [REINFORCE]),
        ("grpo.reward_std=batch", "baseline", "grpo.normalize_rewards=false", []),
        ("grpo.reward_shaping.enabled=true", "false", GDPO, []),
        ("grpo.ref_policy_update_period=5", "null", "loss_fn.reference_policy_kl_penalty=0.0", []),
        ("grpo.ref_policy_update_alpha=0.5", "1.0", "grpo.ref_policy_update_period=null", []),
        ("policy.scheduler.min_factor=0.1", "0.0", "policy.scheduler.name=constant", []),
        ("policy.optimizer.muon_lr=0.02", "null", "policy.optimizer.name=torch.optim.AdamW", []),
        (f'{LORA}.target_modules=["q_proj"]', "[]", f"{LORA}.match_all_linear=true", []),
        (f'{LORA}.exclude_modules=["q_proj"]', "[]", f"{LORA}.match_all_linear=true", []),
        (
            f'{LORA}.exclude_modules=["v_proj"]',
            "[]",
            f'{LORA}.target_modules=["q_proj"]',
            [f"{LORA}.match_all_linear=false"],
        ),
        (f"{LORA}.adapter_path=there", "null", f"{LORA}.enabled=false", []),
        ("policy.optimizer.muon_momentum=0.9", "0.95", "policy.optimizer.name=torch.optim.AdamW", []),
        ("policy.offload_optimizer_for_logprob=true", "false", "policy.dtensor_cfg.cpu_offload=true", []),
    ],
)
def test_a_key_that_nothing_reads_must_have_its_default(write, unread, default, other, besides):
    (problem,) = problems_of(write("grpo: {seed: 1}"), 1, unread, other, *besides)
    assert problem.startswith(f"{unread} has no effect with {other}: ")
    key = unread.partition("=")[0]
    assert problem.endswith(f"; set {key}={default}")
    validate(load("run.yaml", [*VALID, f"{key}={default}", other, *besides]), 1)


@pytest.mark.parametrize(
    ("other", "besides", "reason"),
    [
        ("policy.optimizer.name=torch.optim.Muon", [], "it is for matrices, not their factors; use torch.optim.AdamW"),
        (
            "grpo.ref_policy_update_alpha=0.5",
            ["grpo.ref_policy_update_period=2"],
            "averages of factors make no average; use 1",
        ),
    ],
)
def test_what_is_not_trained_with_lora(write, other, besides, reason):
    path, lora = write("grpo: {seed: 1}"), f"{LORA}.enabled=true"
    assert problems_of(path, 1, lora, other, *besides) == [f"{lora} with {other}: {reason}"]
    for words in ([other, *besides], [lora, *besides]):
        validate(load(path, [*VALID, *words]), 1)


ESTIMATOR_OPTIONS = {  # key -> a value other than its default
    "grpo.normalize_rewards": "false",
    "grpo.use_leave_one_out_baseline": "false",
    "grpo.reward_std": "batch",
    "grpo.adv_estimator.minus_baseline": "false",
    "grpo.adv_estimator.reward_weights": "[1.0, 3.0]",
}


def advantages_of(cfg):
    """What the estimator of a config makes of two groups of four samples with two rewards each."""
    rewards = {"a": torch.tensor([0.0, 1, 1, 1, 0, 0, 0, 1]), "b": torch.tensor([0.5, 2, 0, 1, 7, 3, 0, 0])}
    group_B = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    num_tokens_B = torch.arange(1, 9)
    return estimate_advantages(rewards["a"] + rewards["b"], group_B, num_tokens_B, cfg.grpo, cfg.loss_fn, rewards)


@pytest.mark.parametrize("key", ESTIMATOR_OPTIONS)
@pytest.mark.parametrize("estimator", get_args(AdvEstimatorConfig.__annotations__["name"]))
def test_an_option_is_refused_if_and_only_if_the_estimator_does_not_read_it(write, estimator, key):
    name = f"grpo.adv_estimator.name={estimator}"
    plain = load(write("grpo: {seed: 1}"), [*VALID, name])
    changed = load("run.yaml", [*VALID, name, f"{key}={ESTIMATOR_OPTIONS[key]}"])
    validate(plain, 1)
    if torch.equal(advantages_of(plain), advantages_of(changed)):
        with pytest.raises(
            ConfigError, match=f"^{re.escape(f'{key}={ESTIMATOR_OPTIONS[key]} has no effect with {name}')}: "
        ):
            validate(changed, 1)
    else:
        validate(changed, 1)


def test_a_forced_ratio_is_for_one_step_per_rollout(write):
    path = write("grpo: {seed: 1}")
    forced = "loss_fn.force_on_policy_ratio=true"
    batch = "policy.train_global_batch_size"
    start = "loss_fn.force_on_policy_ratio=true is for one optimizer step per rollout, but policy.ppo_epochs="
    assert problems_of(path, 1, forced, "policy.ppo_epochs=2") == [f"{start}2 and {batch}=null make 2"]
    assert problems_of(path, 1, forced, f"{batch}=128") == [f"{start}1 and {batch}=128 make 4"]
    (problem,) = problems_of(path, 1, f"{batch}=500")
    assert problem.startswith(f"{batch}=500 does not divide the 512 samples of a rollout (")
    assert problem.endswith("): set it to 512 or null")
    validate(load(path, [*VALID, f"{batch}=null"]), 1)
    validate(load(path, [*VALID, forced, f"{batch}=512"]), 1)
    validate(load(path, [*VALID, f"{batch}=128", "policy.ppo_epochs=2"]), 1)


def test_bounds_the_wrong_way_round(write):
    bounds = [IS, f"{KIND}=icepop", f"{LOW}=3", f"{HIGH}=2"]
    assert problems_of(write("grpo: {seed: 1}"), 1, *bounds) == [f"{LOW}=3.0 is above {HIGH}=2.0: exchange them"]
    (problem,) = problems_of("run.yaml", 1, "grpo.advantage_clip_low=1", "grpo.advantage_clip_high=1")
    assert problem == "grpo.advantage_clip_low=1.0 is not below grpo.advantage_clip_high=1.0: exchange them"


def test_a_kl_in_the_reward_knows_no_filter(write):
    words = [REINFORCE, "loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.minus_baseline=false"]
    for setting in ("top_p=0.9", "top_k=9"):
        (problem,) = problems_of(write("grpo: {seed: 1}"), 1, *words, f"policy.generation.{setting}")
        assert problem.startswith("policy.generation.top_p and top_k: the KL in the reward would compare the filtered")


@pytest.mark.parametrize(
    "overrides",
    [
        [CISPO, IS, f"{KIND}=icepop", f"{HIGH}=2", f"{LOW}=0"],
        [GSPO, PER_SEQUENCE, IS, f"{KIND}=tis", f"{HIGH}=2"],
        [PER_SEQUENCE, "loss_fn.loss_scale_factor=512", "grpo.normalize_rewards=false"],
        [IS, f"{KIND}=sequence"],
        [IS, f"{KIND}=sequence-mask", f"{HIGH}=3"],
        [REINFORCE, "loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.minus_baseline=false"],
        [GDPO, "grpo.adv_estimator.reward_weights=[1, 0.5]", "grpo.reward_std=batch"],
        ["loss_fn.use_on_policy_kl_approximation=true", "loss_fn.reference_policy_kl_penalty=0"],
        ["grpo.advantage_clip_low=-1", "grpo.advantage_clip_high=1"],
    ],
)
def test_keys_that_do(write, overrides):
    validate(load(write("grpo: {seed: 1}"), [*VALID, *overrides]), 1)


@pytest.mark.parametrize(
    ("key", "refused", "accepted"),
    [
        ("loss_fn.ratio_clip_c", ["1", "0.5"], ["1.1", "null"]),
        ("loss_fn.ratio_clip_min", ["-0.1", "1.1"], ["0", "1"]),
        ("policy.generation.temperature", ["0", "-1"], ["0.1"]),
        ("policy.generation.top_p", ["0", "1.1"], ["0.1", "1"]),
        ("policy.generation.top_k", ["0"], ["1", "null"]),
        ("grpo.val_top_k", ["-1"], ["0", "null"]),
        ("policy.optimizer.kwargs.lr", ["0", "-1e-6"], ["1e-9"]),
        ("policy.optimizer.kwargs.betas", ["[0.9, 1]", "[-0.1, 0.9]"], ["[0, 0]"]),
        ("policy.generation.stop_token_ids", ["[3, -1]"], ["[0]", "null"]),
        (f"{VLLM}.gpu_memory_utilization", ["0", "1"], ["0.9"]),
        (f"{VLLM}.tensor_parallel_size", ["0"], ["1"]),
        ("checkpointing.save_period", ["0"], ["1"]),
        ("checkpointing.keep_latest", ["1"], ["2"]),
        ("grpo.val_period", ["-2"], ["0"]),
        ("grpo.max_bad_steps", ["-1"], ["0"]),
        ("grpo.seed", ["-1", "4294967296"], ["0", "4294967295"]),
        ("policy.scheduler.warmup_start_factor", ["0", "1.5"], ["1"]),
    ],
)
def test_bounds(write, key, refused, accepted):
    path = write("grpo: {seed: 1}")
    for text in refused:
        (problem,) = problems_of(path, 1, f"{key}={text}")
        assert problem.startswith(f"{key}=") and ": must be " in problem
    for text in accepted:
        validate(load(path, [*VALID, f"{key}={text}"]), 1)


def test_time_to_save_by():
    """90,061 s are a day, an hour, a minute and a second."""
    assert must_save_by_seconds(CheckpointingConfig(checkpoint_must_save_by="1:01:01:01")) == 90_061
    assert must_save_by_seconds(CheckpointingConfig()) is None


def test_prompts_are_divided_among_engines_not_ranks(write):
    path = write("grpo: {num_prompts_per_step: 2}")
    validate(load(path, [*VALID, f"{VLLM}.tensor_parallel_size=2"]), 4)
    assert len(problems_of(path, 4)) == 1


def test_empty_text_is_refused(write):
    (problem,) = problems_of(write("logger: {log_dir: ''}"), 1)
    assert problem == "logger.log_dir is empty (This folder holds the numbered run folders, exp_001 and on.)"


def test_validation_data_is_needed_only_where_validation_is_asked_for(write):
    overrides = ["data.train.data_path=x", "grpo.val_period=0"]
    validate(load(write("grpo: {seed: 1}"), overrides), 1)
    with pytest.raises(ConfigError, match=r"^data\.validation\.data_path is not set"):
        validate(load("run.yaml", [*overrides, "grpo.val_at_end=true"]), 1)


SETS = "data: {train: [{data_path: a.jsonl}, {data_path: b.jsonl}], validation: {data_path: v.jsonl}}\n"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.train.0.weight=2"], "data.train: some sets have a weight and some have none: give all of them one"),
        (["data.train.0.weight=0"], "data.train.0.weight=0.0: must be > 0"),
        (
            ["data.train.1.data_path=x/a.jsonl"],
            "data.train: 2 sets are called 'a': tell them apart by their key `name`",
        ),
        (
            ["data.use_multiple_dataloader=true"],
            "data.use_multiple_dataloader=true: set data.num_prompts_per_dataloader",
        ),
        (
            ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=12"],
            "data.num_prompts_per_dataloader=12 does not divide the 32 prompts drawn at once for a step",
        ),
        (
            ["data.use_multiple_dataloader=true", "data.train.0.weight=1", "data.train.1.weight=1"],
            "data.train.weight and data.use_multiple_dataloader=true: choose one way to mix",
        ),
        (["data.train.0.split_validation_size=2", "data.train.0.name=v"], "data.validation: 2 sets are called 'v'"),
        (["data.validation.split_validation_size=2"], "data.validation.split_validation_size: validation sets are not"),
        (
            ["data.train.1.dataset_name=ResponseDataset", "data.train.1.data_path=null"],
            "data.train.1.data_path is not se",
        ),
    ],
)
def test_mixes_that_make_no_sense(write, overrides, problem):
    with pytest.raises(ConfigError) as error:
        validate(load(write(SETS), overrides), 1)
    assert problem in str(error.value)


def test_mixes_that_do(write):
    for overrides in (
        [],
        ["data.train.0.weight=2", "data.train.1.weight=0.5"],
        ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=16"],
        ["data.use_multiple_dataloader=true", "data.custom_dataloader=mine:sampler"],
        ["data.validation=null", "data.train.0.split_validation_size=0.1"],
    ):
        validate(load(write(SETS), overrides), 1)


# ------------------------------------------------------------------------------------------ which ranks generate

COLOCATED = "policy.generation.colocated"
NEEDS = f"{COLOCATED}.enabled=false"


@pytest.mark.parametrize(
    ("world_size", "ranks_of_node", "gpus_per_node", "num_nodes", "num_trainers"),
    [
        (2, 2, 1, None, 1),
        (8, 8, 2, None, 6),
        (8, 8, 7, 1, 1),
        (16, 8, 8, 1, 8),
        (32, 8, 8, 3, 8),
        (4, None, 1, None, 3),
    ],
)
def test_a_job_splits_as_in_nemo_rl(world_size, ranks_of_node, gpus_per_node, num_nodes, num_trainers):
    """Its `setup` by hand: on one node gpus_per_node GPUs generate, on several num_nodes whole nodes."""
    nodes = [] if num_nodes is None else [f"{COLOCATED}.resources.num_nodes={num_nodes}"]
    overrides = [NEEDS, f"{COLOCATED}.resources.gpus_per_node={gpus_per_node}", *nodes]
    cfg = load("configs/smoke.yaml", [*VALID, *overrides, "grpo.num_prompts_per_step=168"])
    validate(cfg, world_size, ranks_of_node)
    assert world_size - cfg.policy.generation.num_generators == num_trainers


SIZE, NODES = f"{COLOCATED}.resources.gpus_per_node", f"{COLOCATED}.resources.num_nodes"


@pytest.mark.parametrize(
    ("world_size", "ranks_of_node", "overrides", "problem"),
    [
        (8, 8, [], f"{SIZE}=null with {NEEDS}: set it to the ranks of a node that generate"),
        (16, 8, [f"{SIZE}=8"], f"{NODES}=null with 2 nodes: set it to the number of nodes that generate"),
        (
            16,
            8,
            [f"{SIZE}=4", f"{NODES}=1"],
            f"{SIZE}=4 with 2 nodes: a node trains or generates as a whole, so set it ",
        ),
        (
            8,
            8,
            [f"{SIZE}=4", f"{NODES}=2"],
            f"{SIZE}=4 and {NODES}=2 are 8 ranks that generate, of 8: none is left to t",
        ),
        (
            2,
            2,
            [f"{SIZE}=4"],
            f"{SIZE}=4 and {NODES}=null are 4 ranks that generate, of 2: none is left to train; start",
        ),
        (
            1,
            None,
            [f"{SIZE}=1"],
            f"{SIZE}=1 and {NODES}=null are 1 ranks that generate, of 1: none is left to train; st",
        ),
        (
            2,
            2,
            [f"{SIZE}=1", "grpo.async_grpo.enabled=true"],
            "grpo.async_grpo.max_trajectory_age_steps=1 trains tokens of older weights, which need loss_fn.use_import",
        ),
        (
            2,
            2,
            [f"{SIZE}=1", *AGE_0, "grpo.async_grpo.in_flight_weight_updates=true"],
            "grpo.async_grpo.in_flight_weight_updates=true with max_trajectory_age_steps=0: no response outlasts its "
            "step; set the age to 1 or more, or in_flight_weight_updates=false",
        ),
        (8, 8, [f"{SIZE}=2", f"{NODES}=2"], f"{NODES}=2 on one node: set it to 1, or start torchrun on more nodes"),
        (
            8,
            8,
            [f"{SIZE}=3", f"{VLLM}.tensor_parallel_size=2"],
            f"{VLLM}.tensor_parallel_size=2 does not divide the 3 r",
        ),
        (
            8,
            8,
            [f"{SIZE}=5"],
            "grpo.num_prompts_per_step=16 is not divisible by the 5 data-parallel groups (5 ranks tha",
        ),
    ],
)
def test_impossible_splits_are_refused_with_the_fix(world_size, ranks_of_node, overrides, problem):
    with pytest.raises(ConfigError) as caught:
        validate(load("configs/smoke.yaml", [*VALID, NEEDS, *overrides]), world_size, ranks_of_node)
    assert str(caught.value).startswith(problem), caught.value


def test_to_score_a_model_all_ranks_generate(monkeypatch):
    """eval.py of the config of a split job with replicas, on one rank."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    words = [*VALID, NEEDS, f"{SIZE}=4", f"{REPLICAS}=2"]
    cfg = parse_command_line(["configs/smoke.yaml", *words, *ALL_RANKS_GENERATE], "")
    assert cfg.policy.generation.num_generators == 0


def test_without_torchrun_a_check_takes_the_fewest_ranks():
    def fewest(*overrides):
        return fewest_ranks(load("configs/smoke.yaml", [*VALID, *overrides]))

    assert (fewest(), fewest(f"{VLLM}.tensor_parallel_size=4")) == (1, 4)
    assert (fewest(NEEDS, f"{SIZE}=3"), fewest(NEEDS, f"{SIZE}=8", f"{NODES}=2")) == (4, 17)
    assert (fewest(f"{REPLICAS}=6", f"{VLLM}.tensor_parallel_size=4"), fewest(f"{REPLICAS}=2")) == (12, 2)
    assert fewest(NEEDS, f"{SIZE}=3", f"{REPLICAS}=2") == 5
    assert problems_of("configs/smoke.yaml", 2, f"{SIZE}=1") == [
        f"{SIZE}=1 has no effect with {COLOCATED}.enabled=true: all generate; set {SIZE}=null"
    ]


REPLICAS = "policy.dtensor_cfg.dp_replicate_size"


@pytest.mark.parametrize(
    ("world_size", "overrides", "problem"),
    [
        (
            8,
            [f"{REPLICAS}=3"],
            f"{REPLICAS}=3 does not divide the 8 ranks that train: use the number of their nodes, or 1",
        ),
        (2, [f"{REPLICAS}=4"], f"{REPLICAS}=4 does not divide the 2 ranks that train"),
        (16, [f"{REPLICAS}=2", NEEDS, f"{SIZE}=1"], f"{REPLICAS}=2 does not divide the 15 ranks that train"),
        (
            12,
            [f"{REPLICAS}=4", f"{VLLM}.tensor_parallel_size=2", "grpo.num_prompts_per_step=6"],
            f"{REPLICAS}=4 makes replicas of 3 ranks, across which engines of {VLLM}.tensor_parallel_size=2 would",
        ),
        (
            4,
            [f"{REPLICAS}=2", "policy.optimizer.name=torch.optim.Muon"],
            f"{REPLICAS}=2 with policy.optimizer.name=torch.optim.Muon, which multiplies matrices over all ranks",
        ),
        (
            8,
            [f"{REPLICAS}=0"],
            f"{REPLICAS}=0: must be >= 1 (The ranks that train are this many replicas, such as nodes",
        ),
    ],
)
def test_impossible_replicas_are_refused_with_the_fix(world_size, overrides, problem):
    said = problems_of("configs/smoke.yaml", world_size, *overrides)
    assert said[0].startswith(problem), said


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (8, [f"{VLLM}.tensor_parallel_size=4"]),  # an engine is a replica
        (8, [f"{VLLM}.tensor_parallel_size=2"]),  # two engines are
        (8, [f"{VLLM}.tensor_parallel_size=8"]),  # an engine is two
        (2, []),  # each rank is one
        (12, [NEEDS, f"{SIZE}=4", f"{VLLM}.tensor_parallel_size=4"]),  # engines lie elsewhere
    ],
)
def test_replicas_that_can_be(world_size, overrides):
    validate(load("configs/smoke.yaml", [*VALID, f"{REPLICAS}=2", *overrides]), world_size)


@pytest.mark.parametrize(("value", "replicas"), [("2", 2), ("null", 1)])
def test_replicas_have_the_key_of_nemo_rl(write, value, replicas):
    cfg = load(write(f"policy: {{dtensor_cfg: {{_v2: true, dp_replicate_size: {value}}}}}"))
    assert cfg.policy.dtensor_cfg.dp_replicate_size == replicas
