"""rules.py and contradictions.py: a config that cannot run, or a key that nothing reads, is refused by name."""

import re
from pathlib import Path

import pytest
import torch

from advantages import estimate_advantages
from config import CheckpointingConfig, ConfigError
from support.check.contradictions import RULES
from support.check.preflight import ALL_RANKS_GENERATE, parse_command_line
from support.check.rules import check_config, fewest_ranks, must_save_by_seconds
from support.inputs import keys
from support.inputs.reader import load

SMOKE = Path(__file__).resolve().parents[2] / "configs/smoke.yaml"
VALID = ["data.train.data_path=train.jsonl", "data.validation.data_path=val.jsonl"]


def problems_of(path: str, world_size: int, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_config(load(path, [*VALID, *overrides]), world_size)
    return str(caught.value).splitlines()


def test_keys_of_what_is_off_are_accepted():
    """NeMo RL's files set them, max_response_length to the whole sequence among them."""
    off = ["grpo.reward_shaping.max_response_length=512", "grpo.reward_scaling.source_max=0"]
    check_config(load(SMOKE, [*VALID, *off]), 1)


VLLM = "policy.generation.vllm_cfg"

AGE_0 = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0")


TIS_KEYS = "truncated_importance_sampling"
CISPO, GSPO = "loss_fn.use_cispo=true", "loss_fn.sequence_level_importance_ratios=true"
PER_SEQUENCE, IS = "loss_fn.token_level_loss=false", "loss_fn.use_importance_sampling_correction=true"
KIND, HIGH, LOW = (f"loss_fn.{TIS_KEYS}_{name}" for name in ("type", "ratio", "ratio_min"))
SHAPING, LEVEL = "grpo.reward_shaping", "loss_fn.importance_sampling_correction_level"
LORA = "policy.dtensor_cfg.lora_cfg"
REINFORCE, GDPO = "grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.name=gdpo"


@pytest.mark.parametrize(
    ("unread", "default", "other", "besides"),
    [
        (GSPO, "false", "loss_fn.disable_ppo_ratio=true", [PER_SEQUENCE]),
        ("grpo.reward_std=batch", "baseline", "grpo.normalize_rewards=false", []),
        ("grpo.reward_std_floor=0.0", "0.05", "grpo.normalize_rewards=false", []),
        ("loss_fn.old_logprobs=sampler", "trainer", "loss_fn.disable_ppo_ratio=true", []),
        ("policy.reference_model_name=there", "null", "loss_fn.reference_policy_kl_penalty=0.0", []),
        ("grpo.ref_policy_update_period=5", "null", "policy.reference_model_name=there", []),
        ("loss_fn.old_logprobs=sampler", "trainer", "loss_fn.force_on_policy_ratio=true", []),
        (f"{LEVEL}=token", "sequence_sum", "loss_fn.sequence_level_importance_ratios=false", [IS]),
        (f"{LEVEL}=token", "sequence_sum", "loss_fn.use_importance_sampling_correction=false", [GSPO, PER_SEQUENCE]),
        ("grpo.reward_std_floor=0.0", "0.05", "grpo.use_leave_one_out_baseline=false", []),
        ("grpo.reward_shaping.enabled=true", "false", GDPO, []),
        ("grpo.turn_level_advantages=true", "false", "grpo.max_rollout_turns=1", []),
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
        ("policy.optimizer.muon_momentum=0.9", "0.95", "policy.optimizer.name=torch.optim.AdamW", []),
        ("policy.offload_optimizer_for_logprob=true", "false", "policy.dtensor_cfg.cpu_offload=true", []),
    ],
)
def test_a_key_that_nothing_reads_must_have_its_default(write, unread, default, other, besides):
    (problem,) = problems_of(write("grpo: {seed: 1}"), 1, unread, other, *besides)
    key = unread.partition("=")[0]
    assert unread in problem and other in problem and f"set {key}={default}" in problem
    check_config(load("run.yaml", [*VALID, f"{key}={default}", other, *besides]), 1)


ESTIMATOR_OPTIONS = {  # key -> a value other than its default
    "grpo.normalize_rewards": "false",
    "grpo.use_leave_one_out_baseline": "false",
    "grpo.reward_std": "batch",
    "grpo.reward_std_floor": "0.9",
    "grpo.adv_estimator.minus_baseline": "false",
    "grpo.adv_estimator.reward_weights": "[1.0, 3.0]",
}


def advantages_of(cfg):
    """What the estimator of a config makes of two groups of four samples with two rewards each."""
    rewards = {"a": torch.tensor([0.0, 1, 1, 1, 0, 0, 0, 1]), "b": torch.tensor([0.5, 2, 0, 1, 7, 3, 0, 0])}
    group_B = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    num_tokens_B = torch.arange(1, 9)
    if cfg.grpo.adv_estimator.name == "none":
        return torch.zeros(8)
    return estimate_advantages(rewards["a"] + rewards["b"], group_B, num_tokens_B, cfg.grpo, rewards)


@pytest.mark.parametrize("key", ESTIMATOR_OPTIONS)
@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "reinforce_plus_plus", "none"])
def test_an_option_is_refused_if_and_only_if_the_estimator_does_not_read_it(write, estimator, key):
    name = f"grpo.adv_estimator.name={estimator}"
    plain = load(write("grpo: {seed: 1}"), [*VALID, name])
    changed = load("run.yaml", [*VALID, name, f"{key}={ESTIMATOR_OPTIONS[key]}"])
    check_config(plain, 1)
    if torch.equal(advantages_of(plain), advantages_of(changed)):
        with pytest.raises(ConfigError, match=re.escape(f"{key}={ESTIMATOR_OPTIONS[key]}")):
            check_config(changed, 1)
    else:
        check_config(changed, 1)


def test_a_forced_ratio_is_for_one_step_per_rollout(write):
    path = write("grpo: {seed: 1}")
    forced = "loss_fn.force_on_policy_ratio=true"
    batch = "policy.train_global_batch_size"
    (problem,) = problems_of(path, 1, forced, "policy.ppo_epochs=2")
    assert forced in problem and "policy.ppo_epochs=2" in problem
    (problem,) = problems_of(path, 1, forced, f"{batch}=128")
    assert forced in problem and f"{batch}=128" in problem
    (problem,) = problems_of(path, 1, f"{batch}=500")
    assert f"{batch}=500" in problem and "512 or null" in problem
    check_config(load(path, [*VALID, f"{batch}=null"]), 1)
    check_config(load(path, [*VALID, forced, f"{batch}=512"]), 1)
    check_config(load(path, [*VALID, f"{batch}=128", "policy.ppo_epochs=2"]), 1)


@pytest.mark.parametrize(
    "overrides",
    [
        [CISPO, IS, f"{KIND}=icepop", f"{HIGH}=2", f"{LOW}=0"],
        [GSPO, PER_SEQUENCE, IS, f"{KIND}=tis", f"{HIGH}=2"],
        [PER_SEQUENCE, "loss_fn.loss_scale_factor=512", "grpo.normalize_rewards=false"],
        [IS, f"{KIND}=sequence"],
        [IS, f"{KIND}=sequence-mask", f"{HIGH}=3"],
        [REINFORCE, "grpo.adv_estimator.minus_baseline=false"],
        [GDPO, "grpo.adv_estimator.reward_weights=[1, 0.5]", "grpo.reward_std=batch"],
        ["loss_fn.use_on_policy_kl_approximation=true", "loss_fn.reference_policy_kl_penalty=0"],
        ["grpo.advantage_clip_low=-1", "grpo.advantage_clip_high=1"],
        [GSPO, PER_SEQUENCE, IS, f"{KIND}=tis", f"{HIGH}=2", f"{LEVEL}=token"],
        ["grpo.async_grpo.enabled=true", "loss_fn.old_logprobs=sampler"],
        [f"{SHAPING}.enabled=true", f"{SHAPING}.max_response_length=512", "grpo.max_rollout_turns=3"],  # rllm#575
    ],
)
def test_keys_that_do(write, overrides):
    check_config(load(write("grpo: {seed: 1}"), [*VALID, *overrides]), 1)


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
        ("policy.dtensor_cfg.activation_checkpointing", ["-1"], ["true", "0", "36"]),
    ],
)
def test_bounds(write, key, refused, accepted):
    path = write("grpo: {seed: 1}")
    for text in refused:
        (problem,) = problems_of(path, 1, f"{key}={text}")
        assert f"{key}=" in problem
    for text in accepted:
        check_config(load(path, [*VALID, f"{key}={text}"]), 1)


def test_time_to_save_by():
    """90,061 s are a day, an hour, a minute and a second."""
    assert must_save_by_seconds(CheckpointingConfig(checkpoint_must_save_by="1:01:01:01")) == 90_061
    assert must_save_by_seconds(CheckpointingConfig()) is None


def test_prompts_are_divided_among_engines_not_ranks(write):
    path = write("grpo: {num_prompts_per_step: 2}")
    check_config(load(path, [*VALID, f"{VLLM}.tensor_parallel_size=2"]), 4)
    assert len(problems_of(path, 4)) == 1


def test_validation_data_is_needed_only_where_validation_is_asked_for(write):
    overrides = ["data.train.data_path=x", "grpo.val_period=0"]
    check_config(load(write("grpo: {seed: 1}"), overrides), 1)
    with pytest.raises(ConfigError, match=r"data\.validation\.data_path"):
        check_config(load("run.yaml", [*overrides, "grpo.val_at_end=true"]), 1)


SETS = "data: {train: [{data_path: a.jsonl}, {data_path: b.jsonl}], validation: {data_path: v.jsonl}}\n"


def test_mixes_that_do(write):
    for overrides in (
        [],
        ["data.train.0.weight=2", "data.train.1.weight=0.5"],
        ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=16"],
        ["data.use_multiple_dataloader=true", "data.custom_dataloader=mine:sampler"],
        ["data.validation=null", "data.train.0.split_validation_size=0.1"],
    ):
        check_config(load(write(SETS), overrides), 1)


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
    check_config(cfg, world_size, ranks_of_node)
    assert world_size - cfg.policy.generation.num_generators == num_trainers


SIZE, NODES = f"{COLOCATED}.resources.gpus_per_node", f"{COLOCATED}.resources.num_nodes"


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
    (problem,) = problems_of("configs/smoke.yaml", 2, f"{SIZE}=1")
    assert f"{SIZE}=1" in problem and f"{SIZE}=null" in problem


def test_the_table_names_keys():
    """A condition on a name that no key has would never hold, or end the check."""
    for rule in RULES:
        named = [key for condition in (*rule.when, *rule.refuse) for key in condition.keys]
        assert {*named, *rule.unread} <= keys.FIELDS.keys() and rule.why
        assert rule.refuse or rule.unread


@pytest.mark.parametrize("percent", range(101, 200, 7))
def test_products_of_decimals_are_whole_where_their_decimals_are(write, percent):
    """Of 1.15 and 100 in binary fractions the product is 114.99999999999999."""
    overrides = ["grpo.use_dynamic_sampling=true", f"grpo.batch_multiplier={percent / 100}"]
    cfg = load(SMOKE, [*overrides, "grpo.num_prompts_per_step=100"])
    check_config(cfg, 1)
    assert cfg.grpo.prompts_per_batch == percent
    text = f"grpo: {{use_dynamic_sampling: true, num_prompts_per_step: '${{mul: {percent / 100}, 100}}'}}"
    assert load(write(text)).grpo.num_prompts_per_step == percent
    if percent % 10:
        with pytest.raises(ConfigError, match=f"{percent / 10} is not a whole number"):
            check_config(load(SMOKE, [*overrides, "grpo.num_prompts_per_step=10"]), 1)


REPLICAS = "policy.dtensor_cfg.dp_replicate_size"


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
    check_config(load("configs/smoke.yaml", [*VALID, f"{REPLICAS}=2", *overrides]), world_size)


@pytest.mark.parametrize(("value", "replicas"), [("2", 2), ("null", 1)])
def test_replicas_have_the_key_of_nemo_rl(write, value, replicas):
    cfg = load(write(f"policy: {{dtensor_cfg: {{_v2: true, dp_replicate_size: {value}}}}}"))
    assert cfg.policy.dtensor_cfg.dp_replicate_size == replicas
