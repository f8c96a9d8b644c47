"""rules.py and contradictions.py: a config that cannot run, or a key that nothing reads, is refused by name."""

import re
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from advantages import estimate_advantages
from base.check.command_line import ALL_RANKS_GENERATE, parse_command_line
from base.check.contradictions import READS, RULES, contradictions
from base.check.rules import check_config, fewest_ranks, must_save_by_seconds
from base.inputs import keys
from base.inputs.reader import load
from config import CheckpointingConfig, Config, ConfigError, LossConfig
from loss import policy_loss

SMOKE = Path(__file__).resolve().parents[2] / "configs/smoke.yaml"
VALID = ["data.train.data_path=train.jsonl", "data.validation.data_path=val.jsonl"]


def problems_of(path: str, world_size: int, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_config(load(path, [*VALID, *overrides]), world_size)
    return str(caught.value).splitlines()


VLLM = "policy.generation.vllm_cfg"

ESTIMATOR_OPTIONS = {  # key -> a value other than its default
    "grpo.normalize_rewards": "false",
    "grpo.use_leave_one_out_baseline": "false",
    "grpo.reward_std": "batch",
    "grpo.reward_std_floor": "0.9",
    "grpo.adv_estimator.minus_baseline": "false",
    "grpo.adv_estimator.reward_weights": "[1.0, 3.0]",
    "grpo.adv_estimator.pass_k": "2",
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
@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "reinforce_plus_plus", "pkpo", "grpo_passk", "none"])
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


TOKEN_LOSS_KEYS = {  # a value other than the default
    "ratio_clip_min": 0.1,
    "ratio_clip_max": 0.3,
    "ratio_clip_c": 1.5,
    "sapo_tau_positive": 1.5,
    "sapo_tau_negative": 1.5,
    "dppo_mask_low": 0.05,
    "dppo_mask_high": 0.05,
    "dppo_kl_tau": 0.1,
}


def gradient_of(cfg):
    """Of the loss of a config, for tokens whose probability has risen or fallen a little or much, with either sign of
    the advantage."""
    old_logp_R = torch.log(torch.tensor([0.1, 0.3, 0.5, 0.8] * 4))
    change_R = torch.log(torch.tensor([0.3] * 4 + [0.85] * 4 + [1.25] * 4 + [3.0] * 4))
    logp_R = torch.cat([old_logp_R + change_R] * 2).requires_grad_()
    loss, _ = policy_loss(
        logp_R,
        old_logp_R=torch.cat([old_logp_R] * 2),
        sampler_logp_R=torch.cat([old_logp_R] * 2),
        adv_R=torch.cat([torch.ones(16), -torch.ones(16)]),
        mask_R=torch.ones(32),
        seq_R=torch.arange(32),
        num_valid_tokens=32,
        num_valid_seqs=32,
        cfg=cfg,
    )
    return torch.autograd.grad(loss, logp_R)[0]


@pytest.mark.parametrize("key", TOKEN_LOSS_KEYS)
@pytest.mark.parametrize("token_loss", get_args(LossConfig.__annotations__["token_loss"]))
def test_a_key_is_refused_if_and_only_if_the_token_loss_does_not_read_it(token_loss, key):
    plain = LossConfig(token_loss=token_loss, token_level_loss=token_loss != "gmpo")
    changed = replace(plain, **{key: TOKEN_LOSS_KEYS[key]})
    refused = [message.partition("=")[0] for message in contradictions(Config(loss_fn=changed))]
    is_read = not torch.equal(gradient_of(plain), gradient_of(changed))
    assert refused == ([] if is_read else [f"loss_fn.{key}"])


def test_some_reward_has_a_weight():
    gdpo = ("grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.reward_weights=[0, 0]")
    [problem] = problems_of(SMOKE, 1, *gdpo)
    assert problem.startswith("grpo.adv_estimator.reward_weights=[0.0, 0.0] and grpo.adv_estimator.name=gdpo: ")


def test_time_to_save_by():
    """90,061 s are a day, an hour, a minute and a second."""
    assert must_save_by_seconds(CheckpointingConfig(checkpoint_must_save_by="1:01:01:01")) == 90_061
    assert must_save_by_seconds(CheckpointingConfig()) is None


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
    assert TOKEN_LOSS_KEYS.keys() == {*chain.from_iterable(READS.values())}
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


@pytest.mark.parametrize(("value", "replicas"), [("2", 2), ("null", 1)])
def test_replicas_have_the_key_of_nemo_rl(write, value, replicas):
    cfg = load(write(f"policy: {{dtensor_cfg: {{_v2: true, dp_replicate_size: {value}}}}}"))
    assert cfg.policy.dtensor_cfg.dp_replicate_size == replicas


CASES = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))


def with_settings(settings):
    cfg = Config()
    for name, value in settings.items():
        sections = name.split(".")
        values = [tuple(value) if isinstance(value, list) else value]
        for depth in range(len(sections) - 1, -1, -1):
            section = attrgetter(".".join(sections[:depth]))(cfg) if depth else cfg
            values.append(replace(section, **{sections[depth]: values[-1]}))
        cfg = values[-1]
    return cfg


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(f"{k}={v}" for k, v in case["set"].items()))
def test_each_case_is_refused_by_its_rules(case):
    """By as many messages as are written there, so that a rule that is lost is missed."""
    refused = [message.partition("=")[0] for message in contradictions(with_settings(case["set"]))]
    assert refused == case["refused"]


@pytest.mark.house  # a fork may add a rule
def test_each_rule_has_a_case():
    configs = [with_settings(case["set"]) for case in CASES]
    for rule in RULES:
        meets = [cfg for cfg in configs if all(condition.is_met(cfg) for condition in rule.when)]
        for condition in rule.refuse:
            assert any(condition.is_met(cfg) for cfg in meets), rule
        for key in rule.unread:
            assert any(attrgetter(key)(cfg) != keys.FIELDS[key].default for cfg in meets), (rule, key)
