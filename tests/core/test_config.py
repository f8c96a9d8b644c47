"""config.py: defaults, what is computed from keys, the shipped recipes."""

import dataclasses
import pickle
from pathlib import Path

import pytest

from base.check.rules import check_config
from base.inputs.reader import load
from config import Config, ConfigError, DataConfig, DataError, GenerationConfig, LossConfig, PolicyConfig, shortened

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_nemo_rls():
    """grpo_math_1B.yaml of NeMo RL 7ea279a, where the key means the same."""
    cfg = Config()
    assert (cfg.grpo.num_prompts_per_step, cfg.grpo.num_generations_per_prompt, cfg.grpo.seed) == (32, 16, 42)
    assert (cfg.grpo.normalize_rewards, cfg.grpo.use_leave_one_out_baseline) == (True, True)
    assert (cfg.grpo.val_period, cfg.grpo.max_val_samples, cfg.grpo.max_num_steps) == (10, 256, 1_000_000)
    assert cfg.loss_fn == LossConfig(ratio_clip_min=0.2, ratio_clip_max=0.2, ratio_clip_c=None)
    assert cfg.loss_fn.token_level_loss and not cfg.loss_fn.use_importance_sampling_correction
    assert (cfg.loss_fn.reference_policy_kl_penalty, cfg.loss_fn.reference_policy_kl_type) == (0.01, "k3")
    assert (cfg.loss_fn.kl_input_clamp_value, cfg.loss_fn.kl_output_clamp_value) == (20, 10)
    assert (cfg.loss_fn.positive_example_nll_weight, cfg.loss_fn.truncated_importance_sampling_type) == (0, None)
    assert dataclasses.astuple(cfg.grpo.adv_estimator) == ("grpo", True, None, 4)
    assert cfg.grpo.advantage_clip_low is cfg.grpo.advantage_clip_high is cfg.grpo.seq_logprob_error_threshold is None
    assert dataclasses.astuple(cfg.policy.optimizer.kwargs) == (5e-6, 0.01, (0.9, 0.999), 1e-8, "float32")
    assert dataclasses.astuple(cfg.policy.scheduler) == ("constant", 50, 0.1, 0.0)
    assert cfg.policy.pack_tokens("cpu") == 512 * 4 and cfg.policy.sequence_packing.train_mb_tokens is None


@pytest.mark.parametrize(
    ("max_new_tokens", "max_input_seq_length", "expected"),
    [
        (30, None, 70),
        (30, 50, 50),
        (30, 71, 70),  # room for the response comes first
        (100, None, 99),  # a response gets what its prompt leaves
        (100, 50, 50),
    ],
)
def test_longest_prompt(max_new_tokens, max_input_seq_length, expected):
    generation = GenerationConfig(max_new_tokens=max_new_tokens)
    policy = PolicyConfig(max_total_sequence_length=100, generation=generation)
    data = DataConfig(max_input_seq_length=max_input_seq_length)
    assert Config(policy=policy, data=data).max_prompt_tokens == expected


# --- what is shipped ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_config_is_valid(path):
    cfg = load(path)
    ranks_of_engine = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    for num_engines in (1, 2, 4):
        check_config(cfg, num_engines * ranks_of_engine)


def test_how_many_tokens_a_pack_holds():
    """As many as the key says; without it as many as the device likes, and always a whole sequence."""
    policy = PolicyConfig(max_total_sequence_length=4096)
    assert [policy.pack_tokens(device) for device in ("cuda", "cpu")] == [8192, 4096]
    assert PolicyConfig(max_total_sequence_length=32_768).pack_tokens("cuda") == 32_768
    packing = dataclasses.replace(policy.sequence_packing, train_mb_tokens=5000)
    assert dataclasses.replace(policy, sequence_packing=packing).pack_tokens("cuda") == 5000
    data = [f"data.{key}.data_path=a.jsonl" for key in ("train", "validation")]
    check_config(load(ROOT / "configs/smoke.yaml", [*data, "policy.max_total_sequence_length=4096"]), 1)


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, "\n\x1b[2J\0\ud800", [[]] * 10**6, {i: "x" * 1000 for i in range(10**5)}, b"x" * 1000, 10**4000],
    ids=["text", "control", "list", "mapping", "bytes", "int"],
)
def test_a_value_in_a_message_is_one_short_line(value):
    text = shortened(value)
    assert len(text) <= 80 and text.isprintable() and text[:3] == repr(value)[:3]


def test_a_short_value_is_whole():
    for value in ("it's", 1.5, None, [1, "a"], {"factor": 4.0, "type": "yarn"}, "x" * 78):
        assert shortened(value) == repr(value)


def test_a_nest_is_no_recursion():
    nest = []
    for _ in range(10**5):
        nest = [nest]
    assert len(shortened(nest)) <= 80


def test_a_message_is_whole():
    text = f"run.yaml line 3: grpo.seed={'9' * 10**4}: take another"
    assert str(ConfigError(text)) == str(DataError(text)) == text


def test_a_message_has_a_line_for_each_argument_and_no_other():
    assert str(ConfigError("a\nb\x1b[2J\x85", "é 中")) == "a\\nb\\x1b[2J\\x85\né 中"
    error = pickle.loads(pickle.dumps(DataError("a", "b")))
    assert type(error) is DataError and str(error) == "a\nb"
